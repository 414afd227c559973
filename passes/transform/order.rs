//! Orders in which nodes can run.

use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, SecondaryMap};

/// Appends a node to `order` behind the nodes that it reads, unless it is `done`. Uses no recursion, because chains are
/// as long as graphs.
///
/// # Errors
/// A `bug` where a node depends on itself.
pub fn append_after_operands(
    graph: &Graph,
    id: NodeId,
    done: &mut SecondaryMap<NodeId, bool>,
    order: &mut Vec<NodeId>,
) -> Result<()> {
    let mut open = vec![id];
    while let Some(n) = open.last().copied() {
        if done[n] {
            open.pop();
            continue;
        }
        let waiting = graph.operand_nodes(n).find(|m| !done[*m]);
        match waiting {
            Some(_) if open.len() > graph.node_bound() => {
                return Err(
                    Error::bug("order", "a new node waits for itself").at(graph.describe(n))
                );
            }
            Some(m) => open.push(m),
            None => {
                done[n] = true;
                order.push(n);
                open.pop();
            }
        }
    }
    Ok(())
}

/// Orders the nodes of a graph: those of `first` as they come, each behind the nodes that it reads, then what is left. So new nodes stand
/// where they are first read.
///
/// # Errors
/// A `bug` where a node depends on itself.
pub fn order_by_reads(graph: &mut Graph, first: &[NodeId]) -> Result<()> {
    let mut done = SecondaryMap::new(graph.node_bound(), false);
    let mut order = Vec::with_capacity(graph.order().len());
    for id in first.iter().chain(graph.order()) {
        append_after_operands(graph, *id, &mut done, &mut order)?;
    }
    graph.set_order(order);
    Ok(())
}
