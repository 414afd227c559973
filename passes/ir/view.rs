//! Throw-away petgraph lenses on a graph.
//!
//! petgraph is the toolbox (toposort, dominators, components), not the store: operand order, several results and
//! repeated operands have no home there. A view is built in O(V+E), used and dropped.

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
