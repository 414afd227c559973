//! Whether an op treats the examples of a batch apart, so that processes can each run it on some of them.
//!
//! Unlike rows, which chunking cuts, examples need not be cut here: every process has its own from the start. What counts
//! is that no result mixes two of them, and that each stays at its place among the axes.

use super::super::attention::{ATTENTION, SEGMENTS};
use super::super::concat::{CONCAT, PAD, SPLIT, TILE};
use super::super::conv::{CONV, CONV_TRANSPOSE};
use super::super::fill::{CONSTANT_OF_SHAPE, TRILU};
use super::super::index::GATHER;
use super::super::norm::{LAYER_NORM, RMS_NORM};
use super::super::piecewise::PRELU;
use super::super::pool::MAX_POOL;
use super::super::rotary::ROTARY;
use super::super::scan::CUM_SUM;
use super::super::select::{ARG_MAX, ARG_MIN};
use super::super::slice::{SLICE, STEPS};
use super::{Reason, axis_of, from_start, permutation, reduced_axes};
use crate::loss::CLASS_LOSS;
use ckpt_ir::op::{BatchAxes, Effect};
use ckpt_ir::typing::Contents;
use ckpt_ir::{Dim, Graph, Node, NodeId, Same, ValueId};

/// What [`examples_apart`] looks at.
pub struct ApartCx<'a> {
    /// The graph of the node.
    pub graph: &'a Graph,
    /// Known contents of small integer values.
    pub contents: &'a Contents,
    /// The axis of a value along which the examples lie; `None` for a value that is the same for all of them.
    pub axis: &'a dyn Fn(ValueId) -> Option<usize>,
}

const MIXED: Reason = "it mixes the examples of a batch";
const MOVED: Reason = "it moves the examples of a batch to another axis";

fn when(holds: bool, otherwise: Reason) -> Result<(), Reason> {
    match holds {
        true => Ok(()),
        false => Err(otherwise),
    }
}

/// Checks that no result of a node mixes examples. All results must have an axis of them.
///
/// # Errors
/// Why it does, or that there is no rule for the op.
pub fn examples_apart(cx: &ApartCx, id: NodeId) -> Result<(), Reason> {
    let node = cx.graph.node(id);
    if node.op.effect == Effect::Seeded {
        return Err("it would draw the same numbers for the examples of each process");
    }
    let out = node.outs.iter().map(|v| (cx.axis)(*v));
    let out = out.collect::<Option<Vec<usize>>>().ok_or(MIXED)?;
    match node.op.axes {
        BatchAxes::Pointwise | BatchAxes::Broadcast | BatchAxes::SummedToShape => {
            aligned(cx, node, out[0])
        }
        BatchAxes::Regrouped => regrouped(cx, node, out[0]),
        BatchAxes::Permuted => {
            let x = node.ins[0].ok_or(MIXED)?;
            let perm = permutation(&node.attrs, cx.graph.ty(x).rank());
            when((cx.axis)(x) == perm.get(out[0]).copied(), MOVED)
        }
        BatchAxes::Product => product(cx, node, out[0]),
        BatchAxes::BiasedProduct => {
            let turned = node.attrs.int("transA") != 0;
            let own = |slot: usize| node.operand(slot).and_then(cx.axis);
            let is_along = own(0) == Some(usize::from(turned)) && out[0] == 0;
            when(is_along && own(1).is_none(), MIXED)?;
            match node.operand(2) {
                Some(c) => lies_at(cx, node, c, out[0]),
                None => Ok(()),
            }
        }
        BatchAxes::Reduced => {
            let x = node.ins[0].ok_or(MIXED)?;
            let axes = reduced_axes(node, cx.graph.ty(x).rank(), cx.contents);
            let axes = axes.ok_or("the axes that it reduces are not constants")?;
            when(
                !(cx.axis)(x).is_some_and(|axis| axes.contains(&axis)),
                MIXED,
            )
        }
        BatchAxes::AlongAxis => along(cx, node, &out, node.attrs.int("axis")),
        BatchAxes::ClassLoss => leading(cx, node, &out),
        BatchAxes::OneHot => {
            let x = node.ins[0].ok_or(MIXED)?;
            let axis = node.attrs.int("axis");
            let is_last = axis == -1 || axis == cx.graph.ty(x).rank() as i64;
            when(is_last && (cx.axis)(x) == Some(out[0]), MOVED)
        }
        BatchAxes::ClassLossGrad | BatchAxes::Sliced | BatchAxes::Mixed => mixed(cx, node, &out),
    }
}

/// Ops whose field `axes` gives no rule.
fn mixed(cx: &ApartCx, node: &Node, out: &[usize]) -> Result<(), Reason> {
    let op = node.op;
    let is = |ops: &[&'static ckpt_ir::OpDef]| ops.contains(&op);
    if is(&[&PRELU, &ROTARY, &CONSTANT_OF_SHAPE]) {
        return aligned(cx, node, out[0]);
    }
    if is(&[&CONV, &CONV_TRANSPOSE, &MAX_POOL, &CLASS_LOSS]) {
        return leading(cx, node, out);
    }
    if is(&[&ATTENTION]) {
        let is_leading = |axis: usize, v: ValueId| axis + 2 < cx.graph.ty(v).rank();
        let all = node.operands().filter_map(cx.axis).all(|a| a == out[0]);
        let first = node.operands().take(3).all(|v| (cx.axis)(v).is_some());
        when(all && first && is_leading(out[0], node.outs[0]), MIXED)?;
        let given = |slot: usize| node.operand(slot).filter(|v| (cx.axis)(*v).is_some());
        if let Some(segments) = given(SEGMENTS) {
            // Without the axis of heads.
            let rank = |v: ValueId| cx.graph.ty(v).rank();
            let is_whole = rank(segments) + 2 == rank(node.outs[0]);
            when(is_whole && rank(segments) > 1, MOVED)?;
        }
        return match given(3) {
            Some(bias) => lies_at(cx, node, bias, out[0]),
            None => Ok(()),
        };
    }
    if is(&[&CONCAT, &SPLIT, &ARG_MAX, &ARG_MIN]) {
        return along(cx, node, out, node.attrs.int("axis"));
    }
    if is(&[&LAYER_NORM, &RMS_NORM]) {
        let x = node.ins[0].ok_or(MIXED)?;
        let rank = cx.graph.ty(x).rank() as i64;
        let from = node.attrs.int("axis");
        let from = if from < 0 { from + rank } else { from };
        when(out.iter().all(|axis| (*axis as i64) < from), MIXED)?;
        return same_axis(cx, node, out);
    }
    if is(&[&CUM_SUM]) {
        let axis = node.operand(1).and_then(|v| cx.contents.get(v));
        let axis = axis.and_then(|ints| ints.first()?.as_const());
        return along(cx, node, out, axis.ok_or("its axis is not a constant")?);
    }
    if is(&[&TRILU]) {
        when(out[0] + 2 < cx.graph.ty(node.outs[0]).rank(), MIXED)?;
        return same_axis(cx, node, out);
    }
    if is(&[&SLICE, &PAD, &TILE]) {
        let x = node.ins[0].ok_or(MIXED)?;
        let same = |axis: usize| &cx.graph.ty(x).dims[axis];
        when((cx.axis)(x) == Some(out[0]), MOVED)?;
        let is_whole = same(out[0]).same(&cx.graph.ty(node.outs[0]).dims[out[0]]) == Same::Yes;
        return when(
            is_whole && !turns(cx, node, out[0]),
            "it drops or adds examples",
        );
    }
    if is(&[&GATHER]) {
        let (Some(data), Some(places)) = (node.operand(0), node.operand(1)) else {
            return Err(MIXED);
        };
        let axis = axis_of(node, cx.graph.ty(data).rank());
        let chosen = cx.graph.ty(places).rank();
        return match ((cx.axis)(data), (cx.axis)(places)) {
            (None, Some(at)) => when(out[0] == axis + at, MOVED),
            (Some(at), None) if at < axis => when(out[0] == at, MOVED),
            (Some(at), None) if at > axis => when(out[0] + 1 == at + chosen, MOVED),
            _ => Err(MIXED),
        };
    }
    Err("there is no rule for how it treats the examples of a batch")
}

/// Whether a slice goes backwards along an axis.
fn turns(cx: &ApartCx, node: &Node, axis: usize) -> bool {
    if node.op != &SLICE {
        return false;
    }
    let known = |slot: usize| node.operand(slot).map(|v| cx.contents.get(v));
    let rank = cx.graph.ty(node.outs[0]).rank() as i64;
    let steps = match known(STEPS) {
        None => return false,
        Some(steps) => steps.unwrap_or_default(),
    };
    let axes = known(STEPS - 1).map(Option::unwrap_or_default);
    let is_at = |i: usize| match axes {
        None => i == axis,
        Some(axes) => axes.get(i).and_then(Dim::as_const).is_none_or(|a| {
            let a = if a < 0 { a + rank } else { a };
            a == axis as i64
        }),
    };
    let is_forward = |step: &Dim| step.as_const().is_some_and(|n| n > 0);
    steps.is_empty() || (0..steps.len()).any(|i| is_at(i) && !is_forward(&steps[i]))
}

/// A value broadcasts to the result with its examples at the same axis.
fn lies_at(cx: &ApartCx, node: &Node, v: ValueId, out: usize) -> Result<(), Reason> {
    let rank = cx.graph.ty(node.outs[0]).rank();
    match (cx.axis)(v) {
        Some(axis) => when(cx.graph.ty(v).rank() - axis == rank - out, MOVED),
        None => Ok(()),
    }
}

/// All operands broadcast to the result.
fn aligned(cx: &ApartCx, node: &Node, out: usize) -> Result<(), Reason> {
    node.operands().try_for_each(|v| lies_at(cx, node, v, out))
}

/// Examples lie along the same axis of all operands and results that have them.
fn same_axis(cx: &ApartCx, node: &Node, out: &[usize]) -> Result<(), Reason> {
    let ins = node.operands().filter_map(cx.axis);
    when(
        ins.chain(out.iter().copied()).all(|axis| axis == out[0]),
        MOVED,
    )
}

/// Examples lie along the first axis of all operands and results that have them.
fn leading(cx: &ApartCx, node: &Node, out: &[usize]) -> Result<(), Reason> {
    when(out[0] == 0, MIXED)?;
    same_axis(cx, node, out)
}

/// The op works along an axis, which is not that of the examples.
fn along(cx: &ApartCx, node: &Node, out: &[usize], axis: i64) -> Result<(), Reason> {
    let x = node.ins[0].ok_or(MIXED)?;
    let rank = cx.graph.ty(x).rank();
    let axis = from_start(axis, rank);
    let examples = (cx.axis)(x).ok_or(MIXED)?;
    when(examples != axis, MIXED)?;
    let tensors = node.operands().filter(|v| cx.graph.ty(*v).rank() == rank);
    when(tensors.filter_map(cx.axis).all(|at| at == examples), MOVED)?;
    // An axis that the op removes shifts those behind it.
    let shift = |v: &ValueId| {
        let gone = rank as i64 - cx.graph.ty(*v).rank() as i64;
        (cx.axis)(*v).map(|at| at as i64 + if axis < examples { gone } else { 0 })
    };
    when(
        node.outs
            .iter()
            .map(shift)
            .all(|at| at == Some(examples as i64))
            && !out.is_empty(),
        MOVED,
    )
}

/// Elements keep their order, so as many must come before the axis of the examples.
fn regrouped(cx: &ApartCx, node: &Node, out: usize) -> Result<(), Reason> {
    let x = node.ins[0].ok_or(MIXED)?;
    let before = |v: ValueId, axis: usize| Dim::product(&cx.graph.ty(v).dims[..axis]);
    match (cx.axis)(x) {
        Some(axis) => {
            let same = before(x, axis).same(&before(node.outs[0], out));
            when(same == Same::Yes, MOVED)
        }
        None => Ok(()),
    }
}

fn product(cx: &ApartCx, node: &Node, out: usize) -> Result<(), Reason> {
    let (Some(a), Some(b)) = (node.operand(0), node.operand(1)) else {
        return Err(MIXED);
    };
    let rank = |v: ValueId| cx.graph.ty(v).rank();
    let (axis_a, axis_b) = ((cx.axis)(a), (cx.axis)(b));
    let is_summed = axis_a.is_some_and(|axis| axis + 1 == rank(a))
        || axis_b.is_some_and(|axis| axis + 2 == rank(b) || rank(b) == 1);
    when(!is_summed, MIXED)?;
    if rank(b) == 1 {
        return when(axis_a == Some(out), MOVED);
    }
    if rank(a) == 1 {
        return Err(MIXED);
    }
    lies_at(cx, node, a, out)?;
    lies_at(cx, node, b, out)
}
