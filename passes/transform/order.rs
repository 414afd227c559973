//! Orders in which nodes may run.

use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, SecondaryMap};

/// Appends a node to the order, behind what it reads; without recursion, because chains are as long as graphs.
pub fn settle(
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
        let operands = graph.node(n).ins.iter().flatten();
        let waiting = operands
            .filter_map(|v| graph.def_node(*v))
            .find(|m| !done[*m]);
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
