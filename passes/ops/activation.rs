//! Activations and their gradients.
//!
//! Each gradient is one row of our own with the operands PyTorch's backward kernel takes, so that the backward makes no
//! temporaries. Bodies compute in float32 where the operands are narrower and round once, as those kernels do.

use super::logic::LESS_OR_EQUAL;
use super::math::{ERF, EXP};
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, BodyCx, Domain, Effect, Grad, Import, InferCx, OpDef, Slot, elementwise, fresh, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, ValueId};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

pub const ROWS: &[&OpDef] = &[
    &TANH,
    &TANH_GRAD,
    &SIGMOID,
    &SIGMOID_GRAD,
    &RELU,
    &RELU_GRAD,
    &GELU,
    &GELU_GRAD,
    &SOFTPLUS,
    &ERF_GRAD,
];

pub static TANH: OpDef = OpDef {
    name: "Tanh",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Tanh", 6), Import::Aten("aten.tanh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = emit(cx.b, &TANH_GRAD, &[cx.y(0), cx.dy0()])?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// dy·(1 − y²); `aten::tanh_backward`.
pub static TANH_GRAD: OpDef = OpDef {
    name: "TanhGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("y"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let (y, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let square = cx.b.mul(y, y)?;
        let one = one_like(cx.b, y);
        let slope = cx.b.sub(one, square)?;
        let dx = cx.b.mul(dy, slope)?;
        narrow(cx, dx)
    }),
};

pub static SIGMOID: OpDef = OpDef {
    name: "Sigmoid",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Sigmoid", 6), Import::Aten("aten.sigmoid")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = emit(cx.b, &SIGMOID_GRAD, &[cx.y(0), cx.dy0()])?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// dy·(1 − y)·y; `aten::sigmoid_backward`.
pub static SIGMOID_GRAD: OpDef = OpDef {
    name: "SigmoidGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("y"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let (y, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let one = one_like(cx.b, y);
        let rest = cx.b.sub(one, y)?;
        let dx = cx.b.mul(dy, rest)?;
        let dx = cx.b.mul(dx, y)?;
        narrow(cx, dx)
    }),
};

pub static RELU: OpDef = OpDef {
    name: "Relu",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Relu", 6), Import::Aten("aten.relu")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_number,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = emit(cx.b, &RELU_GRAD, &[cx.y(0), cx.dy0()])?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// 0 where y ≤ 0, else dy (also where y is NaN); `aten::threshold_backward` with threshold 0.
pub static RELU_GRAD: OpDef = OpDef {
    name: "ReluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("y"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: two_alike,
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(|cx| {
        let dtype = cx.ty(cx.x(0)).dtype;
        let zero = cx.b.scalar(dtype, 0.0);
        let off = emit(cx.b, &LESS_OR_EQUAL, &[cx.x(0), zero])?;
        Ok(vec![choose(cx.b, off, zero, cx.x(1))?])
    }),
};

pub static GELU: OpDef = OpDef {
    name: "Gelu",
    domain: Domain::Onnx { since: 20 },
    imports: &[Import::Onnx("Gelu", 20), Import::Aten("aten.gelu")],
    attrs: &[AttrSpec {
        name: "approximate",
        kind: AttrKind::Str,
        default: AttrDefault::Str("none"),
    }],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: |cx| {
        check_approximate(cx)?;
        unary_float(cx)
    },
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let d = cx.b.emit(&GELU_GRAD, &[cx.x(0), cx.dy0()], attrs)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

fn check_approximate(cx: &InferCx) -> Result<()> {
    match cx.attrs.str("approximate") {
        "none" | "tanh" => Ok(()),
        other => Err(cx
            .fail("attribute", "unknown value of `approximate`")
            .expected("none or tanh")
            .found(other)),
    }
}

/// The gradient of [`GELU`]; `aten::gelu_backward`.
pub static GELU_GRAD: OpDef = OpDef {
    name: "GeluGrad",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[AttrSpec {
        name: "approximate",
        kind: AttrKind::Str,
        default: AttrDefault::Str("none"),
    }],
    ins: &[Slot::req("x"), Slot::req("dy")],
    outs: &[Slot::req("dx")],
    effect: Effect::Pure,
    infer: |cx| {
        check_approximate(cx)?;
        two_alike(cx)
    },
    fold: no_fold,
    grad: Grad::Body,
    cost: ten_flops,
    memory: elementwise,
    body: Body::Function(gelu_grad_body),
};

/// Exact: dy·(Φ(x) + x·φ(x)). Tanh: with u = √(2/π)(x + 0.044715x³) and t = tanh u,
/// dy·(½(1 + t) + ½x(1 − t²)·√(2/π)(1 + 3·0.044715x²)) (Hendrycks and Gimpel 2016, arXiv 1606.08415).
fn gelu_grad_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
    let dtype = cx.ty(x).dtype;
    let k = |cx: &mut BodyCx, value: f64| cx.b.scalar(dtype, value);
    let (one, half) = (k(cx, 1.0), k(cx, 0.5));
    let slope = if cx.attrs.str("approximate") == "tanh" {
        let beta = k(cx, std::f64::consts::SQRT_2 * 0.5 * FRAC_2_SQRT_PI);
        let (kappa, kappa3) = (k(cx, 0.044715), k(cx, 3.0 * 0.044715));
        let square = cx.b.mul(x, x)?;
        let cubic = cx.b.mul(square, kappa)?;
        let cubic = cx.b.mul(cubic, x)?;
        let inner = cx.b.add(x, cubic)?;
        let inner = cx.b.mul(inner, beta)?;
        let t = emit(cx.b, &TANH, &[inner])?;
        let left = cx.b.add(t, one)?;
        let left = cx.b.mul(left, half)?;
        let t2 = cx.b.mul(t, t)?;
        let dt = cx.b.sub(one, t2)?;
        let du = cx.b.mul(square, kappa3)?;
        let du = cx.b.add(du, one)?;
        let du = cx.b.mul(du, beta)?;
        let right = cx.b.mul(x, half)?;
        let right = cx.b.mul(right, dt)?;
        let right = cx.b.mul(right, du)?;
        cx.b.add(left, right)?
    } else {
        let root_half = k(cx, FRAC_1_SQRT_2);
        let scaled = cx.b.mul(x, root_half)?;
        let erf = emit(cx.b, &ERF, &[scaled])?;
        let cdf = cx.b.add(erf, one)?;
        let cdf = cx.b.mul(cdf, half)?;
        let minus_half = k(cx, -0.5);
        let square = cx.b.mul(x, x)?;
        let exponent = cx.b.mul(square, minus_half)?;
        let pdf = emit(cx.b, &EXP, &[exponent])?;
        let density = k(cx, FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5);
        let pdf = cx.b.mul(pdf, density)?;
        let right = cx.b.mul(x, pdf)?;
        cx.b.add(cdf, right)?
    };
    let dx = cx.b.mul(dy, slope)?;
    narrow(cx, dx)
}

pub static SOFTPLUS: OpDef = OpDef {
    name: "Softplus",
    domain: Domain::Onnx { since: 1 },
    imports: &[Import::Onnx("Softplus", 1)],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        // Rounded once: in a 16-bit type the slope by itself would be.
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.dy0())?);
        let slope = emit(cx.b, &SIGMOID, &[x])?;
        let d = cx.b.mul(dy, slope)?;
        let dtype = cx.ty(cx.x(0)).dtype;
        let d = cx.b.cast(d, dtype)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// dy·(2/√π)·exp(−x²): the kernel works in its result (`mul_out`, `neg_`, `exp_`, `mul_`, `mul_`).
pub static ERF_GRAD: OpDef = OpDef {
    name: "ErfGrad",
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
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Function(|cx| {
        let (x, dy) = (widen(cx.b, cx.x(0))?, widen(cx.b, cx.x(1))?);
        let square = cx.b.mul(x, x)?;
        let exponent = cx.b.neg(square)?;
        let bell = emit(cx.b, &EXP, &[exponent])?;
        let dtype = cx.ty(x).dtype;
        let height = cx.b.scalar(dtype, FRAC_2_SQRT_PI);
        let slope = cx.b.mul(bell, height)?;
        let dx = cx.b.mul(dy, slope)?;
        narrow(cx, dx)
    }),
};
