//! Arithmetic with broadcasting (ONNX operator specifications of those names); powers, extremes and rounding are in
//! [`super::power`] and [`super::extreme`].

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Domain, Grad, GradCx, InferCx, OpClass, OpDef, Slot, elementwise, fresh,
};
use ckpt_ir::{AttrSpec, DType, Dim, Ty};

/// The rows of this family.
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

/// ONNX `Add`.
pub static ADD: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].add(x[1]))),
    scalar: |_| Some(vec![scalar::x(0) + scalar::x(1)]),
    ..binary("Add", onnx(7, 14), &["aten.add"], Grad::Rule(grad_sum))
};

/// Every operand gets the cotangent.
fn grad_sum(cx: &mut GradCx) -> Result<()> {
    for i in 0..cx.wants.len() {
        if cx.wants(i) {
            cx.give_summed(i, cx.cotangent())?;
        }
    }
    Ok(())
}

/// ONNX `Sub`.
pub static SUB: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].sub(x[1]))),
    scalar: |_| Some(vec![scalar::x(0) - scalar::x(1)]),
    ..binary(
        "Sub",
        onnx(7, 14),
        &["aten.sub"],
        Grad::Rule(|cx| {
            if cx.wants(0) {
                cx.give_summed(0, cx.cotangent())?;
            }
            if cx.wants(1) {
                cx.give_summed(1, -cx.cotangent())?;
            }
            Ok(())
        }),
    )
};

/// ONNX `Mul`.
pub static MUL: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(x[0].mul(x[1]))),
    scalar: |_| Some(vec![scalar::x(0) * scalar::x(1)]),
    ..binary(
        "Mul",
        onnx(7, 14),
        &["aten.mul"],
        Grad::Rule(|cx| {
            for i in 0..2 {
                if cx.wants(i) {
                    cx.give_summed(i, cx.cotangent() * cx.operand(1 - i))?;
                }
            }
            Ok(())
        }),
    )
};

/// ONNX `Div`.
pub static DIV: OpDef = OpDef {
    fold: fold_div,
    scalar: |_| Some(vec![scalar::x(0) / scalar::x(1)]),
    ..binary("Div", onnx(7, 14), &["aten.div"], Grad::Rule(grad_div))
};

/// ONNX integer division truncates. It equals floor division where neither side is negative, or nothing is left.
fn fold_div(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    fold_elementwise(cx, types, |x| {
        let positive = |d: &Dim, least: i64| d.bounds().0.is_some_and(|lo| lo >= least);
        let is_floor = || positive(x[0], 0) || x[0].exact_div(x[1]).is_some();
        (positive(x[1], 1) && is_floor()).then(|| x[0].div(x[1]))
    })
}

/// y = a/b: da = dy/b, db = −dy·a/b², computed as −(dy/b)·(a/b) so that only a, b and dy are read.
fn grad_div(cx: &mut GradCx) -> Result<()> {
    let (a, b) = (cx.operand(0), cx.operand(1));
    let da = cx.bind(cx.cotangent() / b)?;
    if cx.wants(0) {
        cx.give_summed(0, da)?;
    }
    if cx.wants(1) {
        cx.give_summed(1, -(da * (a / b)))?;
    }
    Ok(())
}

/// A function of each element that numbers of all types have, of one FLOP.
const fn number_function(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        infer: unary_number,
        cost: one_flop,
        ..unary(name, domain, aten, grad)
    }
}

/// ONNX `Neg`.
pub static NEG: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| exact(Dim::ZERO.sub(x[0]))),
    scalar: |_| Some(vec![-scalar::x(0)]),
    ..number_function(
        "Neg",
        onnx(6, 13),
        &["aten.neg"],
        Grad::First(|cx| cx.eval(-cx.cotangent())),
    )
};

/// ONNX `Sum`.
pub static SUM: OpDef = OpDef {
    ins: &[Slot::var("data_0")],
    outs: slots!["sum"],
    infer: sum_types,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            x.iter().try_fold(Dim::ZERO, |sum, d| exact(sum.add(d)))
        })
    },
    grad: Grad::Rule(grad_sum),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    scalar: |cx| {
        let sum = (1..cx.ins.len()).fold(scalar::x(0), |sum, i| sum.round() + scalar::x(i));
        Some(vec![sum])
    },
    ..standard("Sum", onnx(8, 13), OpClass::Other, BatchAxes::Pointwise)
};

/// ONNX `Sum` takes floating-point operands only.
fn sum_types(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    variadic_number(cx)
}

/// ONNX `Abs`.
pub static ABS: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].bounds() {
            (Some(lo), _) if lo >= 0 => Some(x[0].clone()),
            (_, Some(hi)) if hi <= 0 => Some(Dim::ZERO.sub(x[0])),
            _ => None,
        })
    },
    scalar: |_| Some(vec![scalar::apply(scalar::Op::Abs, [scalar::x(0)])]),
    ..number_function(
        "Abs",
        onnx(6, 13),
        &["aten.abs"],
        // The derivative at 0 is taken as 0, as PyTorch takes it.
        Grad::First(|cx| cx.eval(cx.cotangent() * unary_op(&SIGN, cx.operand(0)))),
    )
};

/// ONNX `Sign`.
pub static SIGN: OpDef = OpDef {
    ins: INPUT,
    outs: OUTPUT,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].bounds() {
            (Some(lo), _) if lo > 0 => Some(Dim::ONE),
            (_, Some(hi)) if hi < 0 => Some(Dim::from(-1)),
            (Some(0), Some(0)) => Some(Dim::ZERO),
            _ => None,
        })
    },
    ..number_function(
        "Sign",
        onnx(9, 13),
        &["aten.sign"],
        Grad::Zero("a sign is piecewise constant"),
    )
};

/// Remainder: with the sign of the divisor (integers), or of the dividend (`fmod = 1`).
pub static MOD: OpDef = OpDef {
    attrs: &[AttrSpec::int("fmod", 0)],
    class: OpClass::Other,
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
            let at_least = |d: &Dim, least: i64| d.bounds().0.is_some_and(|lo| lo >= least);
            (at_least(x[1], 1) && (!truncates || at_least(x[0], 0))).then(|| x[0].modulo(x[1]))
        })
    },
    cost: ten_flops,
    ..binary(
        "Mod",
        onnx(10, 13),
        &["aten.remainder"],
        Grad::Rule(grad_mod),
    )
};

/// y = a − b·trunc(a/b): da = dy, db = −dy·trunc(a/b). The quotient is (a − y)/b, an integer but for rounding.
fn grad_mod(cx: &mut GradCx) -> Result<()> {
    if cx.wants(0) {
        cx.give_summed(0, cx.cotangent())?;
    }
    if cx.wants(1) {
        let whole = (cx.operand(0) - cx.result(0)) / cx.operand(1);
        let quotient = cx.bind(unary_op(&ROUND, whole))?;
        cx.give_summed(1, -(cx.cotangent() * quotient))?;
    }
    Ok(())
}

const fn rounding(name: &'static str, domain: Domain, aten: &'static [&'static str]) -> OpDef {
    OpDef {
        cost: one_flop,
        ..unary(
            name,
            domain,
            aten,
            Grad::Zero("rounding is piecewise constant"),
        )
    }
}

/// ONNX `Floor`.
pub static FLOOR: OpDef = rounding("Floor", onnx(6, 13), &["aten.floor"]);

/// ONNX `Ceil`.
pub static CEIL: OpDef = rounding("Ceil", onnx(6, 13), &["aten.ceil"]);

/// To the nearest integer, halves to even.
pub static ROUND: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    ..rounding("Round", onnx(11, 11), &["aten.round"])
};

/// Rounds as [`ROUND`] does and passes the gradient on unchanged: the straight-through estimator of quantisation
/// (Bengio et al. 2013, arXiv 1308.3432).
pub static ROUND_THROUGH: OpDef = OpDef {
    ins: X,
    outs: Y,
    infer: unary_float,
    grad: Grad::First(|cx| Ok(cx.dy0())),
    cost: one_flop,
    memory: elementwise,
    ..our_mixed("RoundThrough", |cx| {
        Ok(vec![cx.eval(unary_op(&ROUND, cx.x(0)))?])
    })
};
