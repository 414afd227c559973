//! `Softmax`, `LogSoftmax` and their gradients, which read the result (ONNX Softmax-13, LogSoftmax-13).

use super::math::EXP;
use super::reduce::sum_kept;
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{Body, BodyCx, Domain, Effect, Grad, Import, InferCx, OpDef, Slot, no_fold};
use crate::ir::{AttrDefault, AttrKind, AttrSpec};

pub const ROWS: &[&OpDef] = &[&SOFTMAX, &SOFTMAX_GRAD, &LOG_SOFTMAX, &LOG_SOFTMAX_GRAD];

const AXIS: AttrSpec = AttrSpec {
    name: "axis",
    kind: AttrKind::Int,
    default: AttrDefault::Int(-1),
};

fn check_axis(cx: &InferCx) -> Result<()> {
    cx.axis(cx.attrs.int("axis"), cx.ty(0)?.rank()).map(drop)
}

/// The axis of a body's first operand.
fn axis(cx: &BodyCx) -> usize {
    let (axis, rank) = (cx.attrs.int("axis"), cx.ty(cx.x(0)).rank());
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

/// `aten::_softmax`.
pub static SOFTMAX: OpDef = OpDef {
    name: "Softmax",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Softmax", 13)],
    attrs: &[AXIS],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: |cx| {
        check_axis(cx)?;
        unary_float(cx)
    },
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&SOFTMAX_GRAD, &[cx.y(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: |cx| dense_operands(cx).in_place_operands(cx, &[0, 1]),
    body: Body::Standard,
};

/// dx = y·(dy − Σ dy·y) along the axis; `aten::_softmax_backward_data`.
pub static SOFTMAX_GRAD: OpDef = OpDef {
    name: "SoftmaxGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[AXIS],
    ins: &[Slot::req("y"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: |cx| {
        check_axis(cx)?;
        two_alike(cx)
    },
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: |cx| dense_operands(cx).in_place_operands(cx, &[0, 1]),
    body: Body::Function(|cx| {
        let axis = axis(cx);
        let (y, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let product = cx.b.mul(y, dy)?;
        let sum = sum_kept(cx.b, product, &[axis])?;
        let rest = cx.b.sub(dy, sum)?;
        let dx = cx.b.mul(y, rest)?;
        narrow(cx, dx)
    }),
};

/// `aten::_log_softmax`.
pub static LOG_SOFTMAX: OpDef = OpDef {
    name: "LogSoftmax",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("LogSoftmax", 13)],
    attrs: &[AXIS],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: |cx| {
        check_axis(cx)?;
        unary_float(cx)
    },
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&LOG_SOFTMAX_GRAD, &[cx.y(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: |cx| dense_operands(cx).in_place_operands(cx, &[0, 1]),
    body: Body::Standard,
};

/// dx = dy − exp(y)·Σ dy along the axis; `aten::_log_softmax_backward_data`.
pub static LOG_SOFTMAX_GRAD: OpDef = OpDef {
    name: "LogSoftmaxGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[AXIS],
    ins: &[Slot::req("y"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: |cx| {
        check_axis(cx)?;
        two_alike(cx)
    },
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: |cx| dense_operands(cx).in_place_operands(cx, &[0, 1]),
    body: Body::Function(|cx| {
        let axis = axis(cx);
        let (y, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let sum = sum_kept(cx.b, dy, &[axis])?;
        let share = emit(cx.b, &EXP, &[y])?;
        let back = cx.b.mul(share, sum)?;
        let dx = cx.b.sub(dy, back)?;
        narrow(cx, dx)
    }),
};
