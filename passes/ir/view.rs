//! Temporary petgraph views of a graph.
//!
//! petgraph provides algorithms (topological order, dominators, components). It does not store the graph, because it
//! has no operand order, no repeated operands and no nodes with several results. A view is built in O(V+E).

use super::graph::Graph;
use super::id::NodeId;
use petgraph::graph::DiGraph;

/// Nodes in schedule order (petgraph index = position in `order`), one edge an operand.
pub fn view(graph: &Graph) -> DiGraph<NodeId, ()> {
    let mut view = DiGraph::with_capacity(graph.order().len(), graph.order().len() * 2);
    let mut index_of = super::id::SecondaryMap::new(graph.node_bound(), None);
    for id in graph.order() {
        index_of[*id] = Some(view.add_node(*id));
    }
    for id in graph.order() {
        for value in graph.node(*id).ins.iter().flatten() {
            if let Some(def) = graph.def_node(*value)
                && let (Some(from), Some(to)) = (index_of[def], index_of[*id])
            {
                view.add_edge(from, to, ());
            }
        }
    }
    view
}
