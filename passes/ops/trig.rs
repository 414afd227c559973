//! Trigonometric and hyperbolic functions of one operand beside sine and cosine (ONNX operator specifications of those
//! names). Gradients read the result where that is exact.

use super::names::*;
use super::rule::*;
use ckpt_ir::op::{Domain, Grad, GradCx, OpDef};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &TAN, &ASIN, &ACOS, &ATAN, &SINH, &COSH, &ASINH, &ACOSH, &ATANH,
];

const fn function(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        later_types: BF16_SINCE_22,
        ..unary_of_input(name, domain, aten, grad)
    }
}

/// x² of a term.
fn square(x: Term) -> Expr {
    x * x
}

/// dy/√(1 − x²).
fn over_root(cx: &GradCx) -> Expr {
    cx.cotangent() / unary_op(SQRT, -square(cx.operand(0)) + 1.0)
}

/// Gradient dy·(1 + y²).
pub static TAN: OpDef = function(
    "Tan",
    onnx(7, 7),
    &["aten.tan"],
    Grad::First(|cx| cx.eval(cx.cotangent() * (square(cx.result(0)) + 1.0))),
);

/// Gradient dy/√(1 − x²).
pub static ASIN: OpDef = function(
    "Asin",
    onnx(7, 7),
    &["aten.asin"],
    Grad::First(|cx| cx.eval(over_root(cx))),
);

/// Gradient −dy/√(1 − x²).
pub static ACOS: OpDef = function(
    "Acos",
    onnx(7, 7),
    &["aten.acos"],
    Grad::First(|cx| cx.eval(-over_root(cx))),
);

/// Gradient dy/(1 + x²).
pub static ATAN: OpDef = function(
    "Atan",
    onnx(7, 7),
    &["aten.atan"],
    Grad::First(|cx| cx.eval(cx.cotangent() / (square(cx.operand(0)) + 1.0))),
);

/// Gradient dy·cosh x.
pub static SINH: OpDef = function(
    "Sinh",
    onnx(9, 9),
    &["aten.sinh"],
    Grad::First(|cx| cx.eval(cx.cotangent() * unary_op(&COSH, cx.operand(0)))),
);

/// Gradient dy·sinh x.
pub static COSH: OpDef = function(
    "Cosh",
    onnx(9, 9),
    &["aten.cosh"],
    Grad::First(|cx| cx.eval(cx.cotangent() * unary_op(&SINH, cx.operand(0)))),
);

/// Gradient dy/cosh y, which is √(x² + 1).
pub static ASINH: OpDef = function(
    "Asinh",
    onnx(9, 9),
    &["aten.asinh"],
    Grad::First(|cx| cx.eval(cx.cotangent() / unary_op(&COSH, cx.result(0)))),
);

/// Gradient dy/sinh y, which is √(x² − 1).
pub static ACOSH: OpDef = function(
    "Acosh",
    onnx(9, 9),
    &["aten.acosh"],
    Grad::First(|cx| cx.eval(cx.cotangent() / unary_op(&SINH, cx.result(0)))),
);

/// Gradient dy/(1 − x²).
pub static ATANH: OpDef = function(
    "Atanh",
    onnx(9, 9),
    &["aten.atanh"],
    Grad::First(|cx| cx.eval(cx.cotangent() / (-square(cx.operand(0)) + 1.0))),
);
