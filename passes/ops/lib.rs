//! The table of operations: one file per family, one row per op, all rows in [`all`].
//!
//! To add an op, follow `docs/adding-an-op.md`. Tests iterate the table, so an op is tested because it has a row and a recipe.

pub mod accumulate;
pub mod activation;
pub mod arith;
pub mod aten;
pub mod attention;
pub mod batch_axes;
pub mod bits;
pub mod blockwise;
pub mod builder;
pub mod cast;
pub mod collective;
pub mod concat;
pub mod conv;
pub mod extreme;
pub mod fill;
pub mod float8;
pub mod gated;
pub mod grouped;
pub mod index;
pub mod linalg;
pub mod logic;
pub mod loss;
pub mod math;
pub mod matmul;
pub mod names;
pub mod norm;
pub mod opaque;
pub mod optimizer;
pub mod piecewise;
pub mod pool;
pub mod power;
pub mod quantised;
pub mod random;
pub mod reduce;
pub mod rotary;
pub mod rule;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod slice;
pub mod softmax;
pub mod sum_to;
pub mod transfer;
pub mod trig;

pub use builder::{Builder, body_of};
pub use rule::EmitExt;

use ckpt_ir::op::{BatchAxes, Domain, OpClass, OpDef};
use ckpt_ir::typing::Contents;
use ckpt_ir::{DType, Graph, NodeId, ValueId};
use rustc_hash::FxHashMap;
use std::sync::LazyLock;

/// Every family's rows.
const FAMILIES: &[&[&OpDef]] = &[
    accumulate::ROWS,
    activation::ROWS,
    arith::ROWS,
    attention::ROWS,
    bits::ROWS,
    blockwise::ROWS,
    cast::ROWS,
    collective::ROWS,
    concat::ROWS,
    conv::ROWS,
    extreme::ROWS,
    fill::ROWS,
    float8::ROWS,
    gated::ROWS,
    grouped::ROWS,
    index::ROWS,
    linalg::ROWS,
    logic::ROWS,
    loss::ROWS,
    math::ROWS,
    matmul::ROWS,
    norm::ROWS,
    opaque::ROWS,
    optimizer::ROWS,
    piecewise::ROWS,
    pool::ROWS,
    power::ROWS,
    quantised::ROWS,
    random::ROWS,
    reduce::ROWS,
    rotary::ROWS,
    scan::ROWS,
    scatter::ROWS,
    select::ROWS,
    shape::ROWS,
    slice::ROWS,
    softmax::ROWS,
    sum_to::ROWS,
    transfer::ROWS,
    trig::ROWS,
];

/// Every row.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    FAMILIES.iter().flat_map(|rows| rows.iter().copied())
}

/// The row of that name in the text form.
pub fn find(name: &str) -> Option<&'static OpDef> {
    static BY_NAME: LazyLock<FxHashMap<&str, &OpDef>> =
        LazyLock::new(|| all().map(|op| (op.name, op)).collect());
    BY_NAME.get(name).copied()
}

/// The row that an ONNX op of that name, at the internal opset, is.
pub fn find_onnx(name: &str) -> Option<&'static OpDef> {
    find(name).filter(|op| matches!(op.domain, Domain::Onnx { .. }))
}

/// The first opset of the standard domain in which this node is valid: its row's, or later for its element types.
/// 0 for an op that is not standard.
pub fn first_opset(graph: &Graph, node: NodeId) -> i64 {
    let n = graph.node(node);
    let Domain::Onnx { since, .. } = n.op.domain else {
        return 0;
    };
    let values = n.ins.iter().flatten().chain(&n.outs);
    let types: Vec<DType> = values
        .filter_map(|v| graph.value(*v).ty.as_ref())
        .map(|ty| ty.dtype)
        .collect();
    let later = n.op.later_types.iter();
    later
        .filter(|(dtype, _)| types.contains(dtype))
        .map(|(_, opset)| *opset)
        .fold(since, i64::max)
}

/// Returns true if the first result of a node is its first operand whenever both have the same type: casts, views that
/// neither permute nor flip, and sums and products with a constant that changes nothing (up to the sign of zero).
pub fn keeps_elements(graph: &Graph, node: NodeId, contents: &Contents) -> bool {
    let n = graph.node(node);
    let steps = || n.ins.get(slice::STEPS).copied().flatten();
    let forward = |v| {
        let steps = contents.get(v);
        steps.is_some_and(|s| {
            s.iter()
                .all(|step| step.bounds().0.is_some_and(|lo| lo > 0))
        })
    };
    match (n.op.class, n.op.axes) {
        (OpClass::Cast, _) => true,
        (OpClass::Layout, _) if n.op == &slice::SLICE => steps().is_none_or(forward),
        (OpClass::Layout, axes) => matches!(
            axes,
            BatchAxes::Pointwise | BatchAxes::Regrouped | BatchAxes::Broadcast
        ),
        _ => match n.op {
            op if op == &arith::ADD || op == &arith::SUB => is_number(graph, n.operand(1), 0.0),
            op if op == &arith::MUL || op == &arith::DIV => is_number(graph, n.operand(1), 1.0),
            _ => false,
        },
    }
}

/// Returns true for a constant of one element, which is `number`.
fn is_number(graph: &Graph, value: Option<ValueId>, number: f64) -> bool {
    let tensor = value.and_then(|v| graph.value(v).tensor());
    tensor.is_some_and(|t| t.elements() == 1 && t.get_f64(0) == Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_state_what_their_constructors_cannot_know() {
        for op in all() {
            assert!(rule::is_stated(op), "{} is not complete", op.name);
        }
    }

    #[test]
    fn every_name_is_that_of_one_row() {
        for name in names::ALL {
            assert_eq!(all().filter(|op| op.name == *name).count(), 1, "{name}");
        }
    }
}
