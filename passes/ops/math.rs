//! Functions of one operand (ONNX operator specifications of those names).
//!
//! A gradient reads the result where that costs no more than reading the operand, because the result is usually alive
//! anyway. Gradients of three or more elementwise nodes are rows of our own in [`super::activation`].

use super::names::*;
use super::rule::*;
use ckpt_ir::op::{Grad, OpClass, OpDef};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&EXP, &LOG, &SQRT, &RECIPROCAL, &ERF, &SIN, &COS];

/// ONNX `Exp`.
pub static EXP: OpDef = OpDef {
    scalar: |_| Some(vec![scalar::library("exp", scalar::x(0))]),
    ..unary_of_input(
        "Exp",
        onnx(6, 13),
        &["aten.exp"],
        Grad::First(|cx| cx.eval(cx.cotangent() * cx.result(0))),
    )
};

/// ONNX `Log`.
pub static LOG: OpDef = OpDef {
    scalar: |_| Some(vec![scalar::library("log", scalar::x(0))]),
    ..unary_of_input(
        "Log",
        onnx(6, 13),
        &["aten.log"],
        Grad::First(|cx| cx.eval(cx.cotangent() / cx.operand(0))),
    )
};

/// ONNX `Sqrt`.
pub static SQRT: OpDef = OpDef {
    class: OpClass::Power,
    scalar: |_| Some(vec![scalar::library("sqrt", scalar::x(0))]),
    ..unary(
        "Sqrt",
        onnx(6, 13),
        &["aten.rsqrt", "aten.sqrt"],
        Grad::First(|cx| cx.eval(cx.cotangent() / (cx.result(0) * 2.0))),
    )
};

/// ONNX `Reciprocal`.
pub static RECIPROCAL: OpDef = OpDef {
    cost: one_flop,
    scalar: |_| Some(vec![scalar::number(1.0) / scalar::x(0)]),
    ..unary(
        "Reciprocal",
        onnx(6, 13),
        &["aten.reciprocal", "aten.rsqrt"],
        Grad::First(|cx| cx.eval(cx.cotangent() * -(cx.result(0) * cx.result(0)))),
    )
};

/// ONNX `Erf`.
pub static ERF: OpDef = OpDef {
    scalar: |_| Some(vec![scalar::library("erf", scalar::x(0))]),
    ..unary_of_input(
        "Erf",
        onnx(9, 13),
        &["aten.erf"],
        Grad::First(|cx| cx.eval(binary_op(ERF_GRAD, cx.operand(0), cx.cotangent()))),
    )
};

/// ONNX `Sin`.
pub static SIN: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    scalar: |_| Some(vec![scalar::library("sin", scalar::x(0))]),
    ..unary_of_input(
        "Sin",
        onnx(7, 7),
        &["aten.sin"],
        Grad::First(|cx| cx.eval(cx.cotangent() * unary_op(&COS, cx.operand(0)))),
    )
};

/// ONNX `Cos`.
pub static COS: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    scalar: |_| Some(vec![scalar::library("cos", scalar::x(0))]),
    ..unary_of_input(
        "Cos",
        onnx(7, 7),
        &["aten.cos"],
        Grad::First(|cx| cx.eval(cx.cotangent() * -unary_op(&SIN, cx.operand(0)))),
    )
};
