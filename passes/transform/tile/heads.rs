//! Heads: products that make scores of classes.

use crate::ir::op::{BatchAxes, OpClass};
use crate::ir::{Dim, Graph, Node, NodeId, Role, SecondaryMap, ValueId, same_dims};
use crate::ops::arith::{ADD, SUB};
use crate::ops::batch_axes::axis_of;
use crate::ops::softmax::SOFTMAX;
use rustc_hash::FxHashSet;

pub fn is_product(node: &Node) -> bool {
    matches!(
        node.op.class,
        OpClass::Product | OpClass::BiasedProduct | OpClass::Convolution
    )
}

/// Returns true for products whose result has wider rows than their first operand, and for convolutions with more filters
/// than channels.
pub fn expands(graph: &Graph, node: &Node) -> bool {
    let width = |v: ValueId| {
        let dims = &graph.ty(v).dims;
        match node.op.class {
            OpClass::Convolution => dims.get(1)?.as_const(),
            _ => dims.last()?.as_const(),
        }
    };
    let widths = || Some((width(node.operand(0)?)?, width(node.outs[0])?));
    is_product(node) && widths().is_some_and(|(from, to)| to > from)
}

/// Returns true for a matrix of similarities: of rows with rows, or of features with features (a sum over the rows, such as a
/// covariance).
fn compares_rows(graph: &Graph, node: &Node) -> bool {
    let is_named = |dim: &Dim| dim.as_const().is_none();
    let [rows, width] = &graph.ty(node.outs[0]).dims[..] else {
        return false;
    };
    let mut x = node.operand(0).into_iter().flat_map(|v| &graph.ty(v).dims);
    is_named(width) || (!is_named(rows) && x.any(is_named))
}

/// Returns the scores of classes whose softmax `v` is, perhaps scaled or reshaped. A product with `v` is a mean over the classes.
fn softened(graph: &Graph, v: ValueId) -> Option<ValueId> {
    let mut open = vec![(v, false)];
    let mut seen = FxHashSet::default();
    while let Some((v, is_soft)) = open.pop() {
        let Some(node) = graph.def_node(v).map(|id| graph.node(id)) else {
            continue;
        };
        if !seen.insert((v, is_soft)) {
            continue;
        }
        if is_product(node) {
            let is_parameter = |w: ValueId| graph.ty(w).static_dims().is_some_and(|d| d.len() == 2);
            if is_soft && expands(graph, node) && node.operand(1).is_some_and(is_parameter) {
                return Some(v);
            }
            continue;
        }
        let rank = graph.ty(v).rank();
        match node.op == &SOFTMAX && axis_of(node, rank) + 1 == rank {
            true => open.extend(node.operand(0).map(|x| (x, true))),
            false if node.op.axes == BatchAxes::Regrouped => {
                open.extend(node.operand(0).map(|x| (x, is_soft)));
            }
            false => {
                let operands = elementwise_operands(graph, node);
                // A product of weights with something as wide is no mean. A sum is one where its terms are, as that of a hard choice
                // with the slope of a soft one.
                let is_sum = node.op == &ADD || node.op == &SUB;
                if is_soft || is_sum || operands.len() == 1 {
                    open.extend(operands.into_iter().map(|x| (x, is_soft)));
                }
            }
        }
    }
    None
}

/// Returns true for an op on each element of all pairs, such as the differences of rows and classes: every operand is repeated
/// along an axis.
fn pairs(graph: &Graph, node: &Node) -> bool {
    let [out] = node.outs[..] else {
        return false;
    };
    let dims = &graph.ty(out).dims;
    let is_repeated = |v: ValueId| {
        let own = &graph.ty(v).dims;
        let (over, aligned) = dims.split_at(dims.len() - own.len());
        !over.iter().all(Dim::is_one)
            || aligned
                .iter()
                .zip(own)
                .any(|(all, one)| one.is_one() && !all.is_one())
    };
    let is_pointwise = node.op.axes == BatchAxes::Pointwise && graph.ty(out).dtype.is_float();
    is_pointwise && dims.len() > 1 && node.operands().all(is_repeated)
}

/// Returns the pairs of elements that a sum along the last axis is over: together they are distances, or other scores of pairs.
fn summed_pairs(graph: &Graph, node: &Node) -> Option<NodeId> {
    let x = node.operand(0)?;
    let (dims, own) = (&graph.ty(node.outs[0]).dims, &graph.ty(x).dims);
    let own = own.split_last()?.1;
    let kept = dims.strip_suffix(&[Dim::ONE][..]).unwrap_or(dims);
    let is_wide = own.iter().filter(|dim| !dim.is_one()).count() > 1;
    if node.op.axes != BatchAxes::Reduced || !is_wide || !same_dims(kept, own) {
        return None;
    }
    let mut v = x;
    loop {
        let id = graph.def_node(v)?;
        if pairs(graph, graph.node(id)) {
            return Some(id);
        }
        v = *elementwise_operands(graph, graph.node(id)).first()?;
    }
}

/// Returns the scores that a loss is made of, however it is written: results of the last products before it that are wider than
/// their operands, compare rows or features, or whose softmax weighs a mean, and what ops on each element make of all pairs.
pub fn heads(graph: &Graph) -> Vec<ValueId> {
    let mut heads = Vec::new();
    let is_scalar = |v: &ValueId| graph.ty(*v).elements().is_one() && graph.ty(*v).dtype.is_float();
    let losses = graph.outputs().iter().copied().filter(is_scalar);
    let mut open: Vec<NodeId> = losses.filter_map(|v| graph.def_node(v)).collect();
    let mut seen = SecondaryMap::new(graph.node_bound(), false);
    while let Some(id) = open.pop() {
        let node = graph.node(id);
        if seen[id] || node.role == Role::Backward {
            continue;
        }
        seen[id] = true;
        if !is_product(node) {
            open.extend(graph.operand_nodes(id));
            match summed_pairs(graph, node) {
                Some(of_pairs) => {
                    heads.push(node.outs[0]);
                    seen[of_pairs] = true;
                    open.extend(graph.operand_nodes(of_pairs));
                }
                None if pairs(graph, node) => heads.push(node.outs[0]),
                None => {}
            }
        } else if expands(graph, node) || compares_rows(graph, node) {
            heads.push(node.outs[0]);
        } else {
            heads.extend(node.operand(0).and_then(|v| softened(graph, v)));
        }
    }
    heads.sort_unstable();
    heads.dedup();
    heads
}

/// Returns the operands of an op on each element that are as large as its result; none for other ops.
pub fn elementwise_operands(graph: &Graph, node: &Node) -> Vec<ValueId> {
    if node.op.axes != BatchAxes::Pointwise || node.outs.len() != 1 {
        return Vec::new();
    }
    let dims = &graph.ty(node.outs[0]).dims;
    let operands = node.operands();
    operands
        .filter(|v| same_dims(&graph.ty(*v).dims, dims))
        .collect()
}
