//! Arithmetic with broadcasting: `Add`, `Sub`, `Mul`, `Div`, `Neg` (ONNX operator specifications of those names).

use super::rules::*;
use crate::error::Result;
use crate::ir::op::{Body, Domain, Effect, Grad, GradCx, Import, InferCx, OpDef, Slot, fresh};
use crate::ir::{Dim, Ty};

pub const ROWS: &[&OpDef] = &[&ADD, &SUB, &MUL, &DIV, &NEG];

pub static ADD: OpDef = OpDef {
    name: "Add",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Add", 7), Import::Aten("aten.add")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_number,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(x[0].add(x[1]))),
    grad: Grad::Rule(|cx| {
        for i in 0..2 {
            if cx.wants(i) {
                cx.give_summed(i, cx.dy0())?;
            }
        }
        Ok(())
    }),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static SUB: OpDef = OpDef {
    name: "Sub",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Sub", 7), Import::Aten("aten.sub")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_number,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(x[0].sub(x[1]))),
    grad: Grad::Rule(|cx| {
        if cx.wants(0) {
            cx.give_summed(0, cx.dy0())?;
        }
        if cx.wants(1) {
            let d = cx.b.neg(cx.dy0())?;
            cx.give_summed(1, d)?;
        }
        Ok(())
    }),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static MUL: OpDef = OpDef {
    name: "Mul",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Mul", 7), Import::Aten("aten.mul")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_number,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(x[0].mul(x[1]))),
    grad: Grad::Rule(|cx| {
        for i in 0..2 {
            if cx.wants(i) {
                let d = cx.b.mul(cx.dy0(), cx.x(1 - i))?;
                cx.give_summed(i, d)?;
            }
        }
        Ok(())
    }),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

pub static DIV: OpDef = OpDef {
    name: "Div",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Div", 7), Import::Aten("aten.div")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_number,
    fold: fold_div,
    grad: Grad::Rule(grad_div),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// ONNX integer division truncates; it equals floor division where neither side is negative.
fn fold_div(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    fold_elementwise(cx, types, |x| {
        let positive = |d: &Dim, least: i64| d.bounds().0.is_some_and(|lo| lo >= least);
        (positive(x[0], 0) && positive(x[1], 1)).then(|| x[0].div(x[1]))
    })
}

/// y = a/b: da = dy/b, db = −dy·a/b², computed as −(dy/b)·(a/b) so that nothing but a, b and dy is read.
fn grad_div(cx: &mut GradCx) -> Result<()> {
    let (a, b) = (cx.x(0), cx.x(1));
    let da = cx.b.div(cx.dy0(), b)?;
    if cx.wants(0) {
        cx.give_summed(0, da)?;
    }
    if cx.wants(1) {
        let ratio = cx.b.div(a, b)?;
        let product = cx.b.mul(da, ratio)?;
        let db = cx.b.neg(product)?;
        cx.give_summed(1, db)?;
    }
    Ok(())
}

pub static NEG: OpDef = OpDef {
    name: "Neg",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Neg", 6), Import::Aten("aten.neg")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_number,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(Dim::ZERO.sub(x[0]))),
    grad: Grad::Rule(|cx| {
        let d = cx.b.neg(cx.dy0())?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};
