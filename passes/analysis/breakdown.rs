//! What the bytes at the peak are: the rows of a before/after table.
//!
//! Storages alive at the node where the peak is reached, by what they are for. The rows add up to the peak.

use crate::analysis::memory::MemoryProfile;
use crate::ir::{Def, Graph, Role, SecondaryMap};
use crate::transform::joint::trained;
use crate::transform::optimizer::states;

/// Bytes alive at the peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Initializers.
    pub parameters: u64,
    pub inputs: u64,
    /// What an optimizer keeps for parameters: inputs that updates are of.
    pub state: u64,
    /// Gradients that leave the graph.
    pub gradients: u64,
    /// Other graph outputs.
    pub outputs: u64,
    /// Results of the forward part, computed for the first time or again.
    pub activations: u64,
    /// Results of the backward part on their way to a gradient.
    pub cotangents: u64,
    /// Temporaries inside the kernel that runs.
    pub temporaries: u64,
}

impl Breakdown {
    /// Looks at the moment of `memory`'s peak; `memory` is that of `graph`.
    pub fn new(graph: &Graph, memory: &MemoryProfile) -> Breakdown {
        let mut rows = Breakdown::default();
        let at = memory
            .at
            .and_then(|id| graph.order().iter().position(|n| *n == id));
        // What a storage is handed out as, by its first value.
        let mut handed_out = SecondaryMap::new(graph.value_bound(), None);
        for id in graph.outputs() {
            handed_out[memory.storage(*id).first] = Some(false);
        }
        for id in trained(graph).into_values() {
            handed_out[memory.storage(id).first] = Some(true);
        }
        let mut is_state = SecondaryMap::new(graph.value_bound(), false);
        for id in states(graph) {
            is_state[id] = true;
        }
        for storage in &memory.storages {
            let value = graph.value(storage.first);
            let node = match &value.def {
                Def::Init(_) => {
                    rows.parameters += storage.bytes;
                    continue;
                }
                Def::Input => {
                    match is_state[storage.first] {
                        true => rows.state += storage.bytes,
                        false => rows.inputs += storage.bytes,
                    }
                    continue;
                }
                Def::Node { node, .. } => *node,
            };
            let Some(at) = at else { continue };
            // What is written over where it dies counts as what is written there.
            let end = at + usize::from(storage.taken_by.is_some());
            if storage.born > at || storage.dies.is_some_and(|dies| dies < end) {
                continue;
            }
            let row = match (handed_out[storage.first], graph.node(node).role) {
                (Some(true), _) => &mut rows.gradients,
                (Some(false), _) => &mut rows.outputs,
                (None, Role::Backward) => &mut rows.cotangents,
                (None, Role::Forward | Role::Loss) => &mut rows.activations,
            };
            *row += storage.bytes;
        }
        rows.temporaries = at.map_or(0, |at| memory.temp_bytes[at]);
        rows
    }

    /// The peak.
    pub fn total(&self) -> u64 {
        self.rows().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Names and bytes, in the order of a table.
    pub fn rows(&self) -> [(&'static str, u64); 8] {
        [
            ("parameters", self.parameters),
            ("inputs", self.inputs),
            ("state", self.state),
            ("gradients", self.gradients),
            ("outputs", self.outputs),
            ("activations", self.activations),
            ("cotangents", self.cotangents),
            ("temporaries", self.temporaries),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Sizes};
    use crate::testing::{Random, random_graph};

    #[test]
    fn rows_add_up_to_the_peak() {
        let mut r = Random(11);
        let mut filled = Breakdown::default();
        for n in 0..300 {
            let g = random_graph(&mut r, 3 + n % 20);
            let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
            let memory = MemoryProfile::new(&g, &sizes).unwrap();
            let rows = Breakdown::new(&g, &memory);
            assert_eq!(rows.total(), memory.peak_bytes);
            filled.activations += rows.activations;
            filled.cotangents += rows.cotangents;
            filled.inputs += rows.inputs;
        }
        assert!(filled.activations > 0 && filled.cotangents > 0 && filled.inputs > 0);
    }
}
