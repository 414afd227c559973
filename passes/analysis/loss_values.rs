//! The loss side of a training graph: everything between the last matrix products and the loss, and the cotangents of it.

use super::gradients::{FOUND_INF, GRAD_NORM, trained, training_outputs};
use super::sizes::Sizes;
use crate::ir::op::OpClass;
use crate::ir::{Graph, Node, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::accumulate::ADD_PRODUCT;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Returns true for what the loss side of a graph ends at: ops that mix tokens or features by parameters.
fn is_border(node: &Node) -> bool {
    use OpClass::{Attention, BiasedProduct, Convolution, Exchange, Product, Update};
    let ends = [
        Product,
        BiasedProduct,
        Attention,
        Convolution,
        Exchange,
        Update,
    ];
    ends.contains(&node.op.class) || node.op == &ADD_PRODUCT
}

/// Returns the largest value of the loss side and its bytes, the first of equal ones; `None` where no output is a
/// loss. Gradients of parameters do not count.
pub fn largest(graph: &Graph, sizes: &Sizes) -> Option<(ValueId, u64)> {
    let sized = loss_side(graph).into_iter();
    let sized = sized.map(|v| (v, sizes.bytes(v)));
    sized.min_by_key(|(_, bytes)| Reverse(*bytes))
}

/// Returns the values of the loss side, without gradients of parameters; none where no output is a loss.
pub fn loss_side(graph: &Graph) -> Vec<ValueId> {
    let is_scalar = |v: &ValueId| graph.ty(*v).elements().is_one() && graph.ty(*v).dtype.is_float();
    let of_training = training_outputs(graph);
    let is_loss = |v: &ValueId| {
        let name = graph.value(*v).name.as_str();
        is_scalar(v) && !of_training.contains(v) && ![GRAD_NORM, FOUND_INF].contains(&name)
    };
    let losses = graph.outputs().iter().copied().filter(is_loss);
    let mut open: Vec<NodeId> = losses.filter_map(|v| graph.def_node(v)).collect();
    if open.is_empty() {
        return Vec::new();
    }
    let mut seen = SecondaryMap::new(graph.node_bound(), false);
    while let Some(id) = open.pop() {
        let node = graph.node(id);
        if seen[id] {
            continue;
        }
        seen[id] = true;
        if !is_border(node) {
            open.extend(graph.operand_nodes(id));
        }
    }
    // Backward: what is computed from these values without a product, and the products that are computed again for it.
    let gradients: BTreeSet<ValueId> = trained(graph).into_values().collect();
    let is_gradient = |v: &ValueId| gradients.contains(v);
    // The norm of all gradients is computed of every cotangent, and sizes of labels cut hidden states.
    let links = |v: &ValueId| graph.ty(*v).dtype.is_float() && !graph.ty(*v).elements().is_one();
    let is_link = |id: NodeId| graph.node(id).outs.iter().any(links);
    let mut again: Vec<NodeId> = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        if node.role != Role::Backward || is_border(node) || node.outs.iter().any(is_gradient) {
            continue;
        }
        let mut operands = graph.operand_nodes(*id);
        seen[*id] |= operands.any(|operand| seen[operand] && is_link(operand));
        if seen[*id] {
            again.extend(graph.operand_nodes(*id));
        }
    }
    for id in again {
        seen[id] = true;
    }
    let values = graph.order().iter().filter(|id| seen[**id]);
    let values = values.flat_map(|id| graph.node(*id).outs.iter().copied());
    values.filter(|v| !is_gradient(v)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Sizes};

    fn largest_of(source: &str) -> Option<(String, u64)> {
        let g = crate::text::parse(source).unwrap();
        let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
        largest(&g, &sizes).map(|(v, bytes)| (g.value(v).name.clone(), bytes))
    }

    #[test]
    fn products_end_the_loss_side() {
        let source = "graph @g typed (%x: f32[4,64], %w: f32[64,16]) -> (%loss) {
  %h = Tanh %x : f32[4,64]
  %scores = MatMul %h, %w : f32[4,16]
  %e = Exp %scores : f32[4,16]
  %loss = ReduceSum %e {keepdims=0, noop_with_empty_axes=0} : f32[]
}
";
        assert_eq!(largest_of(source), Some(("scores".into(), 256)));
    }

    #[test]
    fn a_graph_without_a_scalar_has_no_loss() {
        let source = "graph @g typed (%x: f32[4]) -> (%y) {
  %y = Tanh %x : f32[4]
}
";
        assert_eq!(largest_of(source), None);
    }
}
