//! Functions of one operand (ONNX operator specifications of those names).
//!
//! A gradient reads the result where that costs no more than reading the operand, because the result is usually alive
//! anyway. Gradients that would be three or more elementwise nodes are rows of our own in [`super::activation`].

use super::activation::ERF_GRAD;
use super::rules::*;
use crate::ir::op::{Body, Domain, Effect, Grad, Import, OpDef, Slot, elementwise, no_fold};

pub const ROWS: &[&OpDef] = &[&EXP, &LOG, &SQRT, &RECIPROCAL, &ERF, &SIN, &COS];

pub static EXP: OpDef = OpDef {
    name: "Exp",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Exp", 6), Import::Aten("aten.exp")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = cx.b.mul(cx.dy0(), cx.y(0))?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

pub static LOG: OpDef = OpDef {
    name: "Log",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Log", 6), Import::Aten("aten.log")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = cx.b.div(cx.dy0(), cx.x(0))?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

pub static SQRT: OpDef = OpDef {
    name: "Sqrt",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Sqrt", 6), Import::Aten("aten.sqrt")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let dtype = cx.ty(cx.y(0)).dtype;
        let two = cx.b.scalar(dtype, 2.0);
        let twice = cx.b.mul(cx.y(0), two)?;
        let d = cx.b.div(cx.dy0(), twice)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

pub static RECIPROCAL: OpDef = OpDef {
    name: "Reciprocal",
    domain: Domain::Onnx { since: 13 },
    imports: &[
        Import::Onnx("Reciprocal", 6),
        Import::Aten("aten.reciprocal"),
    ],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let square = cx.b.mul(cx.y(0), cx.y(0))?;
        let slope = cx.b.neg(square)?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

pub static ERF: OpDef = OpDef {
    name: "Erf",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Erf", 9), Import::Aten("aten.erf")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let d = emit(cx.b, &ERF_GRAD, &[cx.x(0), cx.dy0()])?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

pub static SIN: OpDef = OpDef {
    name: "Sin",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Sin", 7), Import::Aten("aten.sin")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let slope = emit(cx.b, &COS, &[cx.x(0)])?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

pub static COS: OpDef = OpDef {
    name: "Cos",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Cos", 7), Import::Aten("aten.cos")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let sin = emit(cx.b, &SIN, &[cx.x(0)])?;
        let slope = cx.b.neg(sin)?;
        let d = cx.b.mul(cx.dy0(), slope)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};
