//! Arithmetic with broadcasting (ONNX operator specifications of those names); powers, extremes and rounding are in
//! [`super::power`] and [`super::extreme`].

use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Grad, GradCx, Import, InferCx, OpDef, Slot, elementwise, fresh, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Dim, Ty};

pub const ROWS: &[&OpDef] = &[
    &ADD,
    &SUB,
    &MUL,
    &DIV,
    &NEG,
    &SUM,
    &ABS,
    &SIGN,
    &MOD,
    &FLOOR,
    &CEIL,
    &ROUND,
    &ROUND_THROUGH,
];

pub static ADD: OpDef = OpDef {
    name: "Add",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("Add", 7), Import::Aten("aten.add")],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: binary_number,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].add(x[1]))),
    grad: Grad::Rule(|cx| {
        for i in 0..2 {
            if cx.wants(i) {
                cx.give_summed(i, cx.dy0())?;
            }
        }
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
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
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].sub(x[1]))),
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
    memory: elementwise,
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
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].mul(x[1]))),
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
    memory: elementwise,
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
    memory: elementwise,
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
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(Dim::ZERO.sub(x[0]))),
    grad: Grad::Rule(|cx| {
        let d = cx.b.neg(cx.dy0())?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

pub static SUM: OpDef = OpDef {
    name: "Sum",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Sum", 8)],
    attrs: &[],
    ins: &[Slot::var("data_0")],
    outs: &[Slot::req("sum")],
    effect: Effect::Pure,
    infer: sum_types,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            x.iter().try_fold(Dim::ZERO, |sum, d| exact(sum.add(d)))
        })
    },
    grad: Grad::Rule(|cx| {
        for i in 0..cx.wants.len() {
            if cx.wants(i) {
                cx.give_summed(i, cx.dy0())?;
            }
        }
        Ok(())
    }),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Standard,
};

/// ONNX `Sum` takes floating-point operands only.
fn sum_types(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    variadic_number(cx)
}

pub static ABS: OpDef = OpDef {
    name: "Abs",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Abs", 6), Import::Aten("aten.abs")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].bounds() {
            (Some(lo), _) if lo >= 0 => Some(x[0].clone()),
            (_, Some(hi)) if hi <= 0 => Some(Dim::ZERO.sub(x[0])),
            _ => None,
        })
    },
    // The derivative at 0 is taken as 0, as PyTorch takes it.
    grad: Grad::Rule(|cx| {
        let sign = emit(cx.b, &SIGN, &[cx.x(0)])?;
        let d = cx.b.mul(cx.dy0(), sign)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

pub static SIGN: OpDef = OpDef {
    name: "Sign",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Sign", 9), Import::Aten("aten.sign")],
    attrs: &[],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: unary_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].bounds() {
            (Some(lo), _) if lo > 0 => Some(Dim::ONE),
            (_, Some(hi)) if hi < 0 => Some(Dim::from(-1)),
            (Some(0), Some(0)) => Some(Dim::ZERO),
            _ => None,
        })
    },
    grad: Grad::Zero("a sign is piecewise constant"),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// Remainder: with the sign of the divisor (integers), or of the dividend (`fmod = 1`).
pub static MOD: OpDef = OpDef {
    name: "Mod",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Mod", 10)],
    attrs: &[AttrSpec {
        name: "fmod",
        kind: AttrKind::Int,
        default: AttrDefault::Int(0),
    }],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: |cx| {
        let types = binary_number(cx)?;
        if types[0].dtype.is_float() && cx.attrs.int("fmod") != 1 {
            return Err(cx
                .fail("attribute", "floating-point operands need `fmod` = 1")
                .found("fmod = 0"));
        }
        Ok(types)
    },
    fold: |cx, ty| {
        let truncates = cx.attrs.int("fmod") == 1;
        fold_elementwise(cx, ty, |x| {
            let (a, b) = (x[0].bounds().0?, x[1].bounds().0?);
            (b >= 1 && (a >= 0 || !truncates)).then(|| x[0].modulo(x[1]))
        })
    },
    grad: Grad::Rule(grad_mod),
    cost: ten_flops,
    memory: elementwise,
    body: Body::Standard,
};

/// y = a − b·trunc(a/b): da = dy, db = −dy·trunc(a/b). The quotient is (a − y)/b, an integer but for rounding.
fn grad_mod(cx: &mut GradCx) -> Result<()> {
    if cx.wants(0) {
        cx.give_summed(0, cx.dy0())?;
    }
    if cx.wants(1) {
        let whole = cx.b.sub(cx.x(0), cx.y(0))?;
        let quotient = cx.b.div(whole, cx.x(1))?;
        let quotient = emit(cx.b, &ROUND, &[quotient])?;
        let product = cx.b.mul(cx.dy0(), quotient)?;
        let db = cx.b.neg(product)?;
        cx.give_summed(1, db)?;
    }
    Ok(())
}

pub static FLOOR: OpDef = OpDef {
    name: "Floor",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Floor", 6), Import::Aten("aten.floor")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Zero("rounding is piecewise constant"),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

pub static CEIL: OpDef = OpDef {
    name: "Ceil",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Ceil", 6), Import::Aten("aten.ceil")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Zero("rounding is piecewise constant"),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// To the nearest integer, halves to even.
pub static ROUND: OpDef = OpDef {
    name: "Round",
    domain: Domain::Onnx { since: 11 },
    imports: &[Import::Onnx("Round", 11), Import::Aten("aten.round")],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Zero("rounding is piecewise constant"),
    cost: one_flop,
    memory: elementwise,
    body: Body::Standard,
};

/// Rounds as [`ROUND`] does and passes the gradient on as if it had not: what training sees of quantisation (the
/// straight-through estimator, Bengio et al. 2013, arXiv 1308.3432).
pub static ROUND_THROUGH: OpDef = OpDef {
    name: "RoundThrough",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: unary_float,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        cx.give(0, cx.dy0());
        Ok(())
    }),
    cost: one_flop,
    memory: elementwise,
    body: Body::Function(|cx| Ok(vec![emit(cx.b, &ROUND, &[cx.x(0)])?])),
};
