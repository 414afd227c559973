//! The bytes at the peak by purpose: the rows of a before/after table.
//!
//! The rows count the storages that are live at the node where the peak is reached, and add up to the peak. Offloaded
//! results are outside the device's memory and are in no row.

use crate::analysis::gradients::{states, trained};
use crate::analysis::memory::MemoryProfile;
use crate::ir::{Def, Graph, Role, SecondaryMap};

/// Bytes live at the peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Initializers.
    pub parameters: u64,
    /// Graph inputs that are no optimizer states.
    pub inputs: u64,
    /// Optimizer states: inputs that updates update.
    pub state: u64,
    /// Gradients that are graph outputs or operands of updates.
    pub gradients: u64,
    /// Other graph outputs.
    pub outputs: u64,
    /// Results of the forward pass, first computations and recomputations.
    pub activations: u64,
    /// Results of the backward pass that are no gradients of parameters.
    pub cotangents: u64,
    /// Temporaries of the kernel that runs.
    pub temporaries: u64,
}

impl Breakdown {
    /// Builds the rows at the peak of `memory`, the profile of `graph`.
    pub fn new(graph: &Graph, memory: &MemoryProfile) -> Breakdown {
        let mut rows = Breakdown::default();
        let at = memory
            .at
            .and_then(|id| graph.order().iter().position(|n| *n == id));
        // By the first value of a storage: some if it is an output, `true` for gradients.
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
        for storage in memory.storages.iter().filter(|s| !s.is_outside) {
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
            // A storage that is written over where it dies counts as the new one.
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

    /// Returns the peak: the sum of all rows.
    pub fn total(&self) -> u64 {
        self.rows().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns names and bytes, in table order.
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

    #[test]
    fn what_is_outside_is_in_no_row() {
        let source = "graph @g typed (%x: f32[4]) -> (%z) {
  %a = Tanh %x : f32[4]
  %out = Offload %a : f32[4]
  %left = Release %a, %out : f32[4]
  %b = Exp %x : f32[4]
  %c = Neg %b : f32[4]
  %back = Fetch %left : f32[4]
  %z = Add %c, %back : f32[4]
}
";
        let g = crate::text::parse(source).unwrap();
        let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
        let memory = MemoryProfile::new(&g, &sizes).unwrap();
        let rows = Breakdown::new(&g, &memory);
        assert_eq!(memory.outside_peak_bytes, 16);
        assert_eq!(rows.total(), memory.peak_bytes);
    }
}
