//! Dead code elimination: drops nodes that no output depends on, and constants without readers.
//!
//! Any phase; the phase stays. Floating-point initializers stay even if unread: they are the user's weights.

use crate::ir::{Graph, SecondaryMap};

/// Drops dead nodes and constants. Returns whether anything was dropped.
pub fn dce(graph: &mut Graph) -> bool {
    let mut wanted = SecondaryMap::new(graph.value_bound(), false);
    for output in graph.outputs() {
        wanted[*output] = true;
    }
    let mut live = SecondaryMap::new(graph.node_bound(), false);
    for id in graph.order().iter().rev() {
        let node = graph.node(*id);
        if live[*id] || node.outs.iter().any(|v| wanted[*v]) {
            live[*id] = true;
            for value in node.operands() {
                wanted[value] = true;
            }
            // The original of a live copy stays, because it defines what the copy computes. It comes earlier, as
            // operands do, and may be a copy itself.
            if let Some(original) = node.recompute_of {
                live[original] = true;
            }
        }
    }
    let dropped = graph.remove_nodes(&|id| !live[id]);
    let unread: Vec<_> = graph
        .inits()
        .filter(|(id, v)| v.uses().is_empty() && !v.ty().dtype.is_real() && !graph.is_output(*id))
        .map(|(id, _)| id)
        .collect();
    for id in &unread {
        graph.remove_source(*id);
    }
    dropped > 0 || !unread.is_empty()
}
