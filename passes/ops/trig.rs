//! Trigonometric and hyperbolic functions of one operand beside sine and cosine (ONNX operator specifications of those
//! names). Gradients read the result where that is exact.

use super::math::SQRT;
use super::rules::*;
use crate::error::Result;
use crate::ir::ValueId;
use crate::ir::op::{
    Body, Domain, Effect, Grad, GradCx, Import, OpDef, Slot, elementwise, no_fold,
};

pub const ROWS: &[&OpDef] = &[
    &TAN, &ASIN, &ACOS, &ATAN, &SINH, &COSH, &ASINH, &ACOSH, &ATANH,
];

fn plus_one(cx: &mut GradCx, v: ValueId) -> Result<ValueId> {
    let one = one_like(cx.b, v);
    cx.b.add(v, one)
}

/// dy/√(1 − x²).
fn over_root(cx: &mut GradCx) -> Result<ValueId> {
    let square = cx.b.mul(cx.x(0), cx.x(0))?;
    let square = cx.b.neg(square)?;
    let sum = plus_one(cx, square)?;
    let root = emit(cx.b, &SQRT, &[sum])?;
    cx.b.div(cx.dy0(), root)
}

/// Gradient dy·(1 + y²).
pub static TAN: OpDef = OpDef {
    name: "Tan",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Tan", 7), Import::Aten("aten.tan")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let square = cx.b.mul(cx.y(0), cx.y(0))?;
        let slope = plus_one(cx, square)?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy/√(1 − x²).
pub static ASIN: OpDef = OpDef {
    name: "Asin",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Asin", 7), Import::Aten("aten.asin")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = over_root(cx)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient −dy/√(1 − x²).
pub static ACOS: OpDef = OpDef {
    name: "Acos",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Acos", 7), Import::Aten("aten.acos")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = over_root(cx)?;
        let d = cx.b.neg(d)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy/(1 + x²).
pub static ATAN: OpDef = OpDef {
    name: "Atan",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Atan", 7), Import::Aten("aten.atan")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let square = cx.b.mul(cx.x(0), cx.x(0))?;
        let below = plus_one(cx, square)?;
        let d = cx.b.div(cx.dy0(), below)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy·cosh x.
pub static SINH: OpDef = OpDef {
    name: "Sinh",
    domain: Domain::Onnx { since: 9 },
    imports: &[Import::Onnx("Sinh", 9), Import::Aten("aten.sinh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let slope = emit(cx.b, &COSH, &[cx.x(0)])?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy·sinh x.
pub static COSH: OpDef = OpDef {
    name: "Cosh",
    domain: Domain::Onnx { since: 9 },
    imports: &[Import::Onnx("Cosh", 9), Import::Aten("aten.cosh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let slope = emit(cx.b, &SINH, &[cx.x(0)])?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy/cosh y, which is √(x² + 1).
pub static ASINH: OpDef = OpDef {
    name: "Asinh",
    domain: Domain::Onnx { since: 9 },
    imports: &[Import::Onnx("Asinh", 9), Import::Aten("aten.asinh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let slope = emit(cx.b, &COSH, &[cx.y(0)])?;
        let d = cx.b.div(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy/sinh y, which is √(x² − 1).
pub static ACOSH: OpDef = OpDef {
    name: "Acosh",
    domain: Domain::Onnx { since: 9 },
    imports: &[Import::Onnx("Acosh", 9), Import::Aten("aten.acosh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let slope = emit(cx.b, &SINH, &[cx.y(0)])?;
        let d = cx.b.div(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// Gradient dy/(1 − x²).
pub static ATANH: OpDef = OpDef {
    name: "Atanh",
    domain: Domain::Onnx { since: 9 },
    imports: &[Import::Onnx("Atanh", 9), Import::Aten("aten.atanh")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let square = cx.b.mul(cx.x(0), cx.x(0))?;
        let square = cx.b.neg(square)?;
        let below = plus_one(cx, square)?;
        let d = cx.b.div(cx.dy0(), below)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};
