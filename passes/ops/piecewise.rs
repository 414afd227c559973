//! Piecewise activations: `LeakyRelu`, `PRelu`, `Elu`, `HardSigmoid`, `HardSwish`, `Mish` (ONNX operator specifications
//! of those names) and their gradients.

use super::activation::{SIGMOID, SOFTPLUS, TANH};
use super::logic::{AND, GREATER, LESS, LESS_OR_EQUAL};
use super::math::EXP;
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, BodyCx, Domain, Effect, Footprint, Grad, GradCx, Import, InferCx, MemoryCx, OpDef, Slot,
    elementwise, fresh, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[
    &LEAKY_RELU,
    &LEAKY_RELU_GRAD,
    &PRELU,
    &ELU,
    &ELU_GRAD,
    &HARD_SIGMOID,
    &HARD_SWISH,
    &HARD_SWISH_GRAD,
    &MISH,
    &MISH_GRAD,
];

const fn number(name: &'static str, default: f32) -> AttrSpec {
    AttrSpec {
        name,
        kind: AttrKind::Float,
        default: AttrDefault::Float(default),
    }
}

/// x where x > 0, else alpha·x; `aten::leaky_relu`.
pub static LEAKY_RELU: OpDef = OpDef {
    name: "LeakyRelu",
    domain: Domain::Onnx { since: 16 },
    imports: &[Import::Onnx("LeakyRelu", 6)],
    attrs: &[number("alpha", 0.01)],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&LEAKY_RELU_GRAD, &[cx.x(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// dy where x > 0, else alpha·dy; `aten::leaky_relu_backward`.
pub static LEAKY_RELU_GRAD: OpDef = OpDef {
    name: "LeakyReluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[number("alpha", 0.01)],
    ins: &[Slot::req("x"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: one_flop,
    memory: elementwise,
    body: Body::Function(|cx| {
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let zero = constant(cx, x, 0.0);
        let alpha = constant(cx, x, cx.attrs.float("alpha") as f64);
        let rising = emit(cx.b, &GREATER, &[x, zero])?;
        let scaled = cx.b.mul(dy, alpha)?;
        let dx = choose(cx.b, rising, dy, scaled)?;
        narrow(cx, dx)
    }),
};

/// A constant of the type of `like`.
fn constant(cx: &mut BodyCx, like: ValueId, value: f64) -> ValueId {
    let dtype = cx.ty(like).dtype;
    cx.b.scalar(dtype, value)
}

/// x where x ≥ 0, else slope·x; the slope broadcasts to x.
pub static PRELU: OpDef = OpDef {
    name: "PRelu",
    domain: Domain::Onnx { since: 16 },
    imports: &[Import::Onnx("PRelu", 7)],
    attrs: &[],
    ins: &[Slot::req("X"), Slot::req("slope")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: infer_prelu,
    fold: no_fold,
    grad: Grad::Rule(grad_prelu),
    cost: one_flop,
    memory: prelu_memory,
    body: Body::Standard,
};

/// The kernel's result takes the strides of the operand, so that one is made row-major first.
fn prelu_memory(cx: &MemoryCx) -> Footprint {
    Footprint {
        temp_bytes: strided_bytes(cx, &[0]),
        ..fresh(cx)
    }
}

fn infer_prelu(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1])?;
    let both = broadcast_dims(cx, 0..2)?;
    let x = cx.ty(0)?;
    if !may_be_same(&both, &x.dims) {
        return Err(cx
            .fail("shape", "the slope does not broadcast to the operand")
            .expected(x.to_string())
            .found(cx.ty(1)?.to_string()));
    }
    Ok(vec![x.clone()])
}

/// dx = dy where x > 0, else slope·dy; dslope = Σ x·dy where x ≤ 0.
fn grad_prelu(cx: &mut GradCx) -> Result<()> {
    let (x, slope, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let dtype = cx.ty(x).dtype;
    let zero = cx.b.scalar(dtype, 0.0);
    let rising = emit(cx.b, &GREATER, &[x, zero])?;
    if cx.wants(0) {
        let scaled = cx.b.mul(dy, slope)?;
        let dx = choose(cx.b, rising, dy, scaled)?;
        cx.give_summed(0, dx)?;
    }
    if cx.wants(1) {
        let product = cx.b.mul(x, dy)?;
        let falling = choose(cx.b, rising, zero, product)?;
        cx.give_summed(1, falling)?;
    }
    Ok(())
}

/// x where x > 0, else alpha·(exp x − 1); `aten::elu`.
pub static ELU: OpDef = OpDef {
    name: "Elu",
    domain: Domain::Onnx { since: 6 },
    imports: &[Import::Onnx("Elu", 6)],
    attrs: &[number("alpha", 1.0)],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&ELU_GRAD, &[cx.x(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// dy where x > 0, else dy·alpha·exp x; `aten::elu_backward` on the operand.
pub static ELU_GRAD: OpDef = OpDef {
    name: "EluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[number("alpha", 1.0)],
    ins: &[Slot::req("x"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let zero = constant(cx, x, 0.0);
        let alpha = constant(cx, x, cx.attrs.float("alpha") as f64);
        let rising = emit(cx.b, &GREATER, &[x, zero])?;
        // Where it rises the power is not read; it could overflow, and then its gradient would be no number.
        let falling = choose(cx.b, rising, zero, x)?;
        let slope = emit(cx.b, &EXP, &[falling])?;
        let slope = cx.b.mul(slope, alpha)?;
        let scaled = cx.b.mul(dy, slope)?;
        let dx = choose(cx.b, rising, dy, scaled)?;
        narrow(cx, dx)
    }),
};

/// alpha·x + beta, clamped to 0..1.
pub static HARD_SIGMOID: OpDef = OpDef {
    name: "HardSigmoid",
    domain: Domain::Onnx { since: 6 },
    imports: &[Import::Onnx("HardSigmoid", 6)],
    attrs: &[number("alpha", 0.2), number("beta", 0.5)],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(grad_hard_sigmoid),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// dy·alpha where the result is neither 0 nor 1. The product is taken in float32 for the 16-bit types, which do not
/// hold alpha.
fn grad_hard_sigmoid(cx: &mut GradCx) -> Result<()> {
    let (y, dy) = (cx.y(0), cx.dy0());
    let dtype = cx.ty(y).dtype;
    let (zero, one) = (cx.b.scalar(dtype, 0.0), cx.b.scalar(dtype, 1.0));
    let alpha = cx.attrs().float("alpha") as f64;
    let alpha = cx.b.scalar(compute_type(dtype), alpha);
    let above = emit(cx.b, &GREATER, &[y, zero])?;
    let below = emit(cx.b, &LESS, &[y, one])?;
    let inside = emit(cx.b, &AND, &[above, below])?;
    let wide = widen(cx.b, dy)?;
    let scaled = cx.b.mul(wide, alpha)?;
    let scaled = cx.b.cast(scaled, dtype)?;
    let dx = choose(cx.b, inside, scaled, zero)?;
    cx.give(0, dx);
    Ok(())
}

/// x·clamp(x/6 + 1/2, 0, 1); `aten::hardswish`.
pub static HARD_SWISH: OpDef = OpDef {
    name: "HardSwish",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("HardSwish", 14)],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&HARD_SWISH_GRAD, &[cx.x(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// 0 where x ≤ −3, dy·(x/3 + 1/2) up to 3, else dy; `aten::hardswish_backward`.
pub static HARD_SWISH_GRAD: OpDef = OpDef {
    name: "HardSwishGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("x"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: one_flop,
    memory: dense_operands,
    body: Body::Function(|cx| {
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let (low, high) = (constant(cx, x, -3.0), constant(cx, x, 3.0));
        let (zero, half) = (constant(cx, x, 0.0), constant(cx, x, 0.5));
        let slope = cx.b.div(x, high)?;
        let slope = cx.b.add(slope, half)?;
        let inner = cx.b.mul(dy, slope)?;
        let linear = emit(cx.b, &GREATER, &[x, high])?;
        let dx = choose(cx.b, linear, dy, inner)?;
        let off = emit(cx.b, &LESS_OR_EQUAL, &[x, low])?;
        let dx = choose(cx.b, off, zero, dx)?;
        narrow(cx, dx)
    }),
};

/// x·tanh(log(1 + exp x)); `aten::mish`.
pub static MISH: OpDef = OpDef {
    name: "Mish",
    domain: Domain::Onnx { since: 18 },
    imports: &[Import::Onnx("Mish", 18)],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&MISH_GRAD, &[cx.x(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// With t = tanh(softplus x): dy·(t + x·sigmoid(x)·(1 − t²)); `aten::mish_backward`.
pub static MISH_GRAD: OpDef = OpDef {
    name: "MishGrad",
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
    memory: dense_operands,
    body: Body::Function(|cx| {
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let one = constant(cx, x, 1.0);
        let soft = emit(cx.b, &SOFTPLUS, &[x])?;
        let t = emit(cx.b, &TANH, &[soft])?;
        let sigmoid = emit(cx.b, &SIGMOID, &[x])?;
        let square = cx.b.mul(t, t)?;
        let rest = cx.b.sub(one, square)?;
        let slope = cx.b.mul(x, sigmoid)?;
        let slope = cx.b.mul(slope, rest)?;
        let slope = cx.b.add(t, slope)?;
        let dx = cx.b.mul(dy, slope)?;
        narrow(cx, dx)
    }),
};
