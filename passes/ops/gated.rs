//! Gates: `silu(x) = x·sigmoid(x)` (Elfwing, Uchibe and Doya 2017, arXiv 1702.03118) and `SwiGLU(gate, up) =
//! silu(gate)·up` (Shazeer 2020, arXiv 2002.05202), each with its gradient.
//!
//! As rows of their own they keep their operands for the gradient and nothing else; written as `Sigmoid` and `Mul` they
//! keep the sigmoid, and the gate's result, too. Bodies compute the silu in float32 where the operands are narrower and
//! round it, as the kernels do.

use super::activation::SIGMOID;
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, BodyCx, Domain, Effect, Grad, GradCx, OpDef, Slot, elementwise, fresh, no_fold,
};
use crate::ir::{Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&SILU, &SILU_GRAD, &SWIGLU, &SWIGLU_GRAD];

pub static SILU: OpDef = OpDef {
    name: "Silu",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("x")],
    outs: &[Slot::req("y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = emit(cx.b, &SILU_GRAD, &[cx.x(0), cx.dy0()])?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let (y, _, _) = silu(cx, 0)?;
        narrow(cx, y)
    }),
};

/// dy·s·(1 + x·(1 − s)) with s = sigmoid(x); `aten::silu_backward`.
pub static SILU_GRAD: OpDef = OpDef {
    name: "SiluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("x"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let dy = widen(cx.b, cx.x(1))?;
        let dx = slope(cx, dy)?;
        narrow(cx, dx)
    }),
};

/// silu(gate)·up; the silu is rounded to the operands' type first.
pub static SWIGLU: OpDef = OpDef {
    name: "SwiGlu",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("gate"), Slot::req("up")],
    outs: &[Slot::req("y")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Rule(grad_swiglu),
    cost: ten_flops,
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Function(|cx| {
        let (y, _, _) = silu(cx, 0)?;
        let y = narrow(cx, y)?[0];
        Ok(vec![cx.b.mul(y, cx.x(1))?])
    }),
};

/// Where only one operand needs a gradient, its part alone.
fn grad_swiglu(cx: &mut GradCx) -> Result<()> {
    let (gate, up, dy) = (cx.x(0), cx.x(1), cx.dy0());
    if cx.wants(0) && cx.wants(1) {
        let ins = vec![Some(gate), Some(up), Some(dy)];
        let gradients = cx.b.emit_n(&SWIGLU_GRAD, ins, Default::default(), 2)?;
        cx.give(0, gradients[0]);
        cx.give(1, gradients[1]);
    } else if cx.wants(0) {
        let through = cx.b.mul(dy, up)?;
        let d = emit(cx.b, &SILU_GRAD, &[gate, through])?;
        cx.give(0, d);
    } else if cx.wants(1) {
        let y = emit(cx.b, &SILU, &[gate])?;
        let d = cx.b.mul(dy, y)?;
        cx.give(1, d);
    }
    Ok(())
}

/// The gradients of [`SWIGLU`], each worked out in its own result: dgate = silu'(gate)·(dy·up), dup = silu(gate)·dy.
pub static SWIGLU_GRAD: OpDef = OpDef {
    name: "SwiGluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("gate"), Slot::req("up"), Slot::req("dy")],
    outs: &[Slot::req("dgate"), Slot::req("dup")],
    effect: Effect::Pure,
    infer: |cx| {
        two_alike(cx)?;
        cx.same_dtype(&[0, 2])?;
        let (gate, dy) = (cx.ty(0)?, cx.ty(2)?);
        if !may_be_same(&gate.dims, &dy.dims) {
            return Err(cx
                .fail("shape", "`dy` and `gate` have different shapes")
                .expected(gate.to_string())
                .found(dy.to_string()));
        }
        Ok::<Vec<Ty>, _>(vec![gate.clone(), gate.clone()])
    },
    fold: no_fold,
    grad: Grad::Body,
    cost: |cx| {
        let mut cost = ten_flops(cx);
        cost.flops *= 2;
        cost
    },
    memory: |cx| fresh(cx).in_place_operands(cx, &[1]),
    body: Body::Function(|cx| {
        let (gate, up, dy) = (cx.x(0), cx.x(1), cx.x(2));
        let dtype = cx.ty(gate).dtype;
        let through = cx.b.mul(dy, up)?;
        let through = widen(cx.b, through)?;
        let dgate = slope(cx, through)?;
        let dgate = cx.b.cast(dgate, dtype)?;
        let (y, _, _) = silu(cx, 0)?;
        let y = cx.b.cast(y, dtype)?;
        let dup = cx.b.mul(y, dy)?;
        Ok(vec![dgate, dup])
    }),
};

/// silu(x), x and sigmoid(x) of operand `i`, in the type computed in.
fn silu(cx: &mut BodyCx, i: usize) -> Result<(ValueId, ValueId, ValueId)> {
    let x = widen(cx.b, cx.x(i))?;
    let s = emit(cx.b, &SIGMOID, &[x])?;
    Ok((cx.b.mul(x, s)?, x, s))
}

/// `dy` times the slope of the silu at the first operand.
fn slope(cx: &mut BodyCx, dy: ValueId) -> Result<ValueId> {
    let (_, x, s) = silu(cx, 0)?;
    let one = one_like(cx.b, x);
    let rest = cx.b.sub(one, s)?;
    let rest = cx.b.mul(x, rest)?;
    let rest = cx.b.add(one, rest)?;
    let slope = cx.b.mul(s, rest)?;
    cx.b.mul(dy, slope)
}
