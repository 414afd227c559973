//! When each value is last used: the one place that says so for memory, plans and runs.
//!
//! A value dies right after the last node that reads it. A value without readers dies right after the node that makes it.
//! Graph outputs live to the end, inputs and initializers throughout.
//!
//! A value that is fetched arrives while other nodes run, and its first reader waits for it. Until then the transfer
//! reads the offloaded value, so that value lives at least until the first reader of what was fetched. A parameter that ranks gather
//! arrives in the same way. What is fetched or gathered and has no readers arrives at the end.
//!
//! [`MemoryProfile`](super::MemoryProfile) applies these rules to storages: a storage dies with the last of its values.
//! The executor applies them to tensors, which hold their storage. So a run frees what the profile predicts.

use crate::analysis::fused_updates::FusedUpdate;
use crate::ir::{Graph, SecondaryMap, ValueId};
use crate::ops::collective::ALL_GATHER;
use crate::ops::transfer::{FETCH, OFFLOAD, RELEASE};

/// The last uses of values, by position in the graph's order.
#[derive(Clone, Debug)]
pub struct Liveness {
    last_use: SecondaryMap<ValueId, Option<usize>>,
    lives_on: SecondaryMap<ValueId, bool>,
    /// The fetched and gathered values that the node at each position is the first to read.
    pub arrivals: Vec<Vec<ValueId>>,
}

impl Liveness {
    /// Computes the last uses. Linear in nodes and operands.
    pub fn new(graph: &Graph) -> Liveness {
        let bound = graph.value_bound();
        let mut liveness = Liveness {
            last_use: SecondaryMap::new(bound, None),
            lives_on: SecondaryMap::new(bound, false),
            arrivals: vec![Vec::new(); graph.order().len()],
        };
        // What has to live until something reads a value that is under way: the offloaded value behind a fetched one, and of a
        // gathered parameter only that itself.
        let mut under_way: SecondaryMap<ValueId, Option<ValueId>> = SecondaryMap::new(bound, None);
        for (position, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            for value in node.ins.iter().flatten().chain(&node.outs) {
                liveness.last_use[*value] = Some(position);
                if let Some(source) = under_way[*value].take() {
                    liveness.last_use[source] = Some(position);
                    liveness.arrivals[position].push(*value);
                }
            }
            let source = match node.operand(0) {
                Some(source) if node.op == &FETCH && is_offloaded(graph, source) => source,
                _ if node.op == &ALL_GATHER => node.outs[0],
                _ => continue,
            };
            under_way[node.outs[0]] = Some(source);
        }
        let made = graph.order().iter().flat_map(|id| &graph.node(*id).outs);
        let unread = made.filter_map(|value| under_way[*value]);
        for value in graph.outputs().iter().copied().chain(unread) {
            liveness.lives_on[value] = true;
        }
        liveness
    }

    /// As [`Liveness::new`], for a device that computes some updates in one call each, which reads the gradient.
    pub fn with_updates(graph: &Graph, updates: &[FusedUpdate]) -> Liveness {
        let mut liveness = Liveness::new(graph);
        for update in updates {
            let last_use = &mut liveness.last_use[update.gradient];
            *last_use = (*last_use).max(Some(update.at));
        }
        liveness
    }

    /// The position of the last node that makes or reads a value; `None` for an input or initializer without readers.
    pub fn last_use(&self, value: ValueId) -> Option<usize> {
        self.last_use[value]
    }

    /// Whether a value is needed after the last node.
    pub fn lives_on(&self, value: ValueId) -> bool {
        self.lives_on[value]
    }

    /// By position, the values that nodes made and that die right after the node there.
    pub fn frees(&self, graph: &Graph) -> Vec<Vec<ValueId>> {
        let mut frees = vec![Vec::new(); graph.order().len()];
        for value in graph.order().iter().flat_map(|id| &graph.node(*id).outs) {
            if let Some(position) = self.last_use[*value]
                && !self.lives_on[*value]
            {
                frees[position].push(*value);
            }
        }
        frees
    }
}

/// Whether a value lies outside the device's memory: an `Offload` made it, directly or through `Release`.
fn is_offloaded(graph: &Graph, mut value: ValueId) -> bool {
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
