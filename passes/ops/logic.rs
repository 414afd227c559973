//! Truth values, comparisons and `Where` (ONNX operator specifications of those names).
//!
//! Folding matters here: exporters compute masks and shapes with these ops. A comparison of sizes folds only where it
//! has the same answer in every run; truth values are the sizes 0 and 1.

use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Grad, GradCx, Import, InferCx, OpDef, Slot, elementwise, fresh, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Dim, Same, Ty};

pub const ROWS: &[&OpDef] = &[
    &AND,
    &OR,
    &XOR,
    &NOT,
    &EQUAL,
    &LESS,
    &LESS_OR_EQUAL,
    &GREATER,
    &GREATER_OR_EQUAL,
    &IS_NAN,
    &IS_INF,
    &WHERE,
];

fn is_bool(d: DType) -> bool {
    d == DType::Bool
}

fn two_booleans(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_bool, "bool")?;
    binary_compare(cx)
}

/// Operands of an order comparison: numbers.
fn two_ordered(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    binary_compare(cx)
}

fn truth(holds: bool) -> Dim {
    Dim::from(holds as i64)
}

/// Whether `a < b` in every run or in none.
fn less(a: &Dim, b: &Dim) -> Option<Dim> {
    match b.sub(a).bounds() {
        (Some(lo), _) if lo >= 1 => Some(truth(true)),
        (_, Some(hi)) if hi <= 0 => Some(truth(false)),
        _ => None,
    }
}

fn negated(truth_value: Dim) -> Dim {
    Dim::ONE.sub(&truth_value)
}

pub static AND: OpDef = OpDef {
    name: "And",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("And", 7), Import::Aten("aten.logical_and")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_booleans,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match (x[0].as_const(), x[1].as_const()) {
            (Some(0), _) | (_, Some(0)) => Some(truth(false)),
            (Some(_), Some(_)) => Some(truth(true)),
            _ => None,
        })
    },
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static OR: OpDef = OpDef {
    name: "Or",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Or", 7), Import::Aten("aten.logical_or")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_booleans,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match (x[0].as_const(), x[1].as_const()) {
            (Some(1), _) | (_, Some(1)) => Some(truth(true)),
            (Some(_), Some(_)) => Some(truth(false)),
            _ => None,
        })
    },
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static XOR: OpDef = OpDef {
    name: "Xor",
    domain: Domain::Onnx { since: 7 },
    imports: &[Import::Onnx("Xor", 7), Import::Aten("aten.logical_xor")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_booleans,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(truth(x[0].as_const()? != x[1].as_const()?))
        })
    },
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static NOT: OpDef = OpDef {
    name: "Not",
    domain: Domain::Onnx { since: 1 },
    imports: &[Import::Onnx("Not", 1), Import::Aten("aten.logical_not")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: |cx| {
        cx.want_dtype(0, is_bool, "bool")?;
        Ok(vec![cx.ty(0)?.clone()])
    },
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(truth(x[0].as_const()? == 0))),
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static EQUAL: OpDef = OpDef {
    name: "Equal",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Equal", 7), Import::Aten("aten.eq")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_compare,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].same(x[1]) {
            Same::Yes => Some(truth(true)),
            Same::No => Some(truth(false)),
            Same::Unknown => None,
        })
    },
    grad: Grad::Zero("a comparison is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static LESS: OpDef = OpDef {
    name: "Less",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Less", 7), Import::Aten("aten.lt")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_ordered,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[0], x[1])),
    grad: Grad::Zero("a comparison is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static LESS_OR_EQUAL: OpDef = OpDef {
    name: "LessOrEqual",
    domain: Domain::Onnx { since: 16 },
    imports: &[Import::Onnx("LessOrEqual", 12), Import::Aten("aten.le")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_ordered,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[1], x[0]).map(negated)),
    grad: Grad::Zero("a comparison is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static GREATER: OpDef = OpDef {
    name: "Greater",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Greater", 7), Import::Aten("aten.gt")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_ordered,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[1], x[0])),
    grad: Grad::Zero("a comparison is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static GREATER_OR_EQUAL: OpDef = OpDef {
    name: "GreaterOrEqual",
    domain: Domain::Onnx { since: 16 },
    imports: &[Import::Onnx("GreaterOrEqual", 12), Import::Aten("aten.ge")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_ordered,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[0], x[1]).map(negated)),
    grad: Grad::Zero("a comparison is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static IS_NAN: OpDef = OpDef {
    name: "IsNaN",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("IsNaN", 9), Import::Aten("aten.isnan")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: float_test,
    fold: no_fold,
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

fn float_test(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    Ok(vec![cx.ty(0)?.with_dtype(DType::Bool)])
}

pub static IS_INF: OpDef = OpDef {
    name: "IsInf",
    domain: Domain::Onnx { since: 10 },
    imports: &[Import::Onnx("IsInf", 10)],
    attrs: &[
        AttrSpec {
            name: "detect_negative",
            kind: AttrKind::Int,
            default: AttrDefault::Int(1),
        },
        AttrSpec {
            name: "detect_positive",
            kind: AttrKind::Int,
            default: AttrDefault::Int(1),
        },
    ],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: float_test,
    fold: no_fold,
    grad: Grad::Zero("a truth value is piecewise constant"),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// `X` where the condition holds, else `Y`; all three broadcast.
pub static WHERE: OpDef = OpDef {
    name: "Where",
    domain: Domain::Onnx { since: 16 },
    imports: &[Import::Onnx("Where", 9), Import::Aten("aten.where")],
    attrs: &[],
    ins: &[Slot::req("condition"), Slot::req("X"), Slot::req("Y")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: |cx| {
        cx.want_dtype(0, is_bool, "bool")?;
        let dtype = cx.same_dtype(&[1, 2])?;
        Ok(vec![Ty::new(dtype, broadcast_dims(cx, 0..3)?)])
    },
    fold: fold_where,
    grad: Grad::Rule(grad_where),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// Where the condition is not known, the two sides may still be the same.
fn fold_where(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    fold_elementwise(cx, types, |x| match x[0].as_const() {
        Some(0) => Some(x[2].clone()),
        Some(_) => Some(x[1].clone()),
        None => (x[1].same(x[2]) == Same::Yes).then(|| x[1].clone()),
    })
}

/// The zeros are one scalar that broadcasts, so nothing but the condition is read.
fn grad_where(cx: &mut GradCx) -> Result<()> {
    let (condition, dy) = (cx.x(0), cx.dy0());
    let dtype = cx.ty(dy).dtype;
    let zero = cx.b.scalar(dtype, 0.0);
    if cx.wants(1) {
        let d = choose(cx.b, condition, dy, zero)?;
        cx.give_summed(1, d)?;
    }
    if cx.wants(2) {
        let d = choose(cx.b, condition, zero, dy)?;
        cx.give_summed(2, d)?;
    }
    Ok(())
}
