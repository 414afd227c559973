//! When a run lets go of each value, and when what was fetched must have arrived.
//!
//! The same rules as `analysis::memory`, by value instead of by storage.

use ckpt_passes::ir::{Graph, SecondaryMap, ValueId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};

/// By position in the graph's order.
pub struct Lifetimes {
    /// The values that nobody reads any more after each step. Graph outputs, inputs and weights stay.
    pub drops: Vec<Vec<ValueId>>,
    /// What was fetched and is read at each step for the first time.
    pub joins: Vec<Vec<ValueId>>,
}

impl Lifetimes {
    pub fn new(graph: &Graph) -> Lifetimes {
        let steps = graph.order().len();
        let mut last: SecondaryMap<ValueId, Option<usize>> =
            SecondaryMap::new(graph.value_bound(), None);
        let mut stays = SecondaryMap::new(graph.value_bound(), false);
        for output in graph.outputs() {
            stays[*output] = true;
        }
        // What each fetched value that nobody has read comes from.
        let mut coming: SecondaryMap<ValueId, Option<ValueId>> =
            SecondaryMap::new(graph.value_bound(), None);
        let mut joins = vec![Vec::new(); steps];
        for (at, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            for value in node.ins.iter().flatten().chain(&node.outs) {
                last[*value] = Some(at);
                if let Some(from) = coming[*value].take() {
                    last[from] = Some(at);
                    joins[at].push(*value);
                }
            }
            if let (true, Some(Some(from))) = (node.op == &FETCH, node.ins.first())
                && is_outside(graph, *from)
            {
                coming[node.outs[0]] = Some(*from);
            }
        }
        // What nobody has read arrives at the end.
        for id in graph.order() {
            for value in &graph.node(*id).outs {
                if let Some(from) = coming[*value] {
                    stays[from] = true;
                }
            }
        }
        let mut drops = vec![Vec::new(); steps];
        for id in graph.order() {
            for value in &graph.node(*id).outs {
                if let Some(at) = last[*value]
                    && !stays[*value]
                {
                    drops[at].push(*value);
                }
            }
        }
        Lifetimes { drops, joins }
    }
}

/// Whether a value is one that was moved out.
fn is_outside(graph: &Graph, mut value: ValueId) -> bool {
    while let Some(maker) = graph.def_node(value) {
        let node = graph.node(maker);
        if node.op == &OFFLOAD {
            return true;
        }
        match node.ins.get(1) {
            Some(Some(of)) if node.op == &RELEASE => value = *of,
            _ => return false,
        }
    }
    false
}
