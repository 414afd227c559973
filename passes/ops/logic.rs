//! Truth values, comparisons and `Where` (ONNX operator specifications of those names).
//!
//! Folding matters here: exporters compute masks and shapes with these ops. A comparison of sizes folds only where it
//! has the same answer in every run; truth values are the sizes 0 and 1.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Domain, Grad, GradCx, Indices, InferCx, OpClass, OpDef, elementwise};
use ckpt_ir::{AttrSpec, DType, Dim, Same, Ty};

/// The rows of this family.
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

fn negated(truth_value: &Dim) -> Dim {
    Dim::ONE.sub(truth_value)
}

const fn truth_value(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    infer: InferFn,
) -> OpDef {
    let why = "a truth value is piecewise constant";
    piecewise_constant(name, domain, aten, why, infer)
}

const fn comparison(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    infer: InferFn,
) -> OpDef {
    let why = "a comparison is piecewise constant";
    piecewise_constant(name, domain, aten, why, infer)
}

/// ONNX `And`.
pub static AND: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match (x[0].as_const(), x[1].as_const()) {
            (Some(0), _) | (_, Some(0)) => Some(truth(false)),
            (Some(_), Some(_)) => Some(truth(true)),
            _ => None,
        })
    },
    ..truth_value(
        "And",
        onnx(7, 7),
        &["aten.bitwise_and", "aten.logical_and"],
        two_booleans,
    )
};

/// ONNX `Or`.
pub static OR: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match (x[0].as_const(), x[1].as_const()) {
            (Some(1), _) | (_, Some(1)) => Some(truth(true)),
            (Some(_), Some(_)) => Some(truth(false)),
            _ => None,
        })
    },
    ..truth_value(
        "Or",
        onnx(7, 7),
        &["aten.bitwise_or", "aten.logical_or"],
        two_booleans,
    )
};

/// ONNX `Xor`.
pub static XOR: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(truth(x[0].as_const()? != x[1].as_const()?))
        })
    },
    ..truth_value("Xor", onnx(7, 7), &["aten.logical_xor"], two_booleans)
};

/// ONNX `Not`.
pub static NOT: OpDef = OpDef {
    ins: X,
    outs: Y,
    fold: |cx, ty| fold_elementwise(cx, ty, |x| Some(truth(x[0].as_const()? == 0))),
    ..truth_value(
        "Not",
        onnx(1, 1),
        &["aten.bitwise_not", "aten.logical_not"],
        |cx| {
            cx.want_dtype(0, is_bool, "bool")?;
            Ok(vec![cx.ty(0)?.clone()])
        },
    )
};

/// ONNX `Equal`.
pub static EQUAL: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| match x[0].same(x[1]) {
            Same::Yes => Some(truth(true)),
            Same::No => Some(truth(false)),
            Same::Unknown => None,
        })
    },
    ..comparison("Equal", onnx(7, 13), &["aten.eq"], binary_compare)
};

/// ONNX `Less`.
pub static LESS: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[0], x[1])),
    scalar: |_| {
        Some(vec![scalar::apply(
            scalar::Op::Less,
            [scalar::x(0), scalar::x(1)],
        )])
    },
    ..comparison("Less", onnx(7, 13), &["aten.lt"], two_ordered)
};

/// ONNX `LessOrEqual`.
pub static LESS_OR_EQUAL: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            less(x[1], x[0]).map(|truth_value| negated(&truth_value))
        })
    },
    scalar: |_| {
        Some(vec![scalar::apply(
            scalar::Op::LessOrEqual,
            [scalar::x(0), scalar::x(1)],
        )])
    },
    ..comparison("LessOrEqual", onnx(12, 16), &["aten.le"], two_ordered)
};

/// ONNX `Greater`.
pub static GREATER: OpDef = OpDef {
    fold: |cx, ty| fold_elementwise(cx, ty, |x| less(x[1], x[0])),
    scalar: |_| {
        Some(vec![scalar::apply(
            scalar::Op::Less,
            [scalar::x(1), scalar::x(0)],
        )])
    },
    ..comparison("Greater", onnx(7, 13), &["aten.gt"], two_ordered)
};

/// ONNX `GreaterOrEqual`.
pub static GREATER_OR_EQUAL: OpDef = OpDef {
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            less(x[0], x[1]).map(|truth_value| negated(&truth_value))
        })
    },
    scalar: |_| {
        Some(vec![scalar::apply(
            scalar::Op::LessOrEqual,
            [scalar::x(1), scalar::x(0)],
        )])
    },
    ..comparison("GreaterOrEqual", onnx(12, 16), &["aten.ge"], two_ordered)
};

/// ONNX `IsNaN`.
pub static IS_NAN: OpDef = OpDef {
    ins: X,
    outs: Y,
    ..truth_value("IsNaN", onnx(9, 13), &["aten.isnan"], float_test)
};

fn float_test(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    Ok(vec![cx.ty(0)?.with_dtype(DType::Bool)])
}

/// ONNX `IsInf`.
pub static IS_INF: OpDef = OpDef {
    ins: X,
    outs: Y,
    attrs: &[
        AttrSpec::int("detect_negative", 1),
        AttrSpec::int("detect_positive", 1),
    ],
    later_types: &[(DType::F16, 20), (DType::BF16, 20)],
    ..truth_value("IsInf", onnx(10, 10), &[], float_test)
};

/// `X` where the condition holds, else `Y`; all three broadcast.
pub static WHERE: OpDef = OpDef {
    aten: &["aten.masked_fill", "aten.where"],
    ins: slots!["condition", "X", "Y"],
    outs: OUTPUT,
    indices: Indices::PassedOn,
    infer: |cx| {
        cx.want_dtype(0, is_bool, "bool")?;
        let dtype = cx.same_dtype(&[1, 2])?;
        Ok(vec![Ty::new(dtype, broadcast_dims(cx, 0..3)?)])
    },
    fold: fold_where,
    scalar: |_| {
        Some(vec![scalar::select(
            scalar::x(0),
            scalar::x(1),
            scalar::x(2),
        )])
    },
    grad: Grad::Rule(grad_where),
    cost: one_flop,
    memory: elementwise,
    ..standard(
        "Where",
        onnx(9, 16),
        OpClass::Elementwise,
        BatchAxes::Pointwise,
    )
};

/// Where the condition is not known, the two sides may still be the same.
fn fold_where(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    fold_elementwise(cx, types, |x| match x[0].as_const() {
        Some(0) => Some(x[2].clone()),
        Some(_) => Some(x[1].clone()),
        None => (x[1].same(x[2]) == Same::Yes).then(|| x[1].clone()),
    })
}

/// The zeros are one scalar that broadcasts, so only the condition is read.
fn grad_where(cx: &mut GradCx) -> Result<()> {
    let (condition, dy) = (cx.operand(0), cx.cotangent());
    if cx.wants(1) {
        cx.give_summed(1, select(condition, dy, 0.0))?;
    }
    if cx.wants(2) {
        cx.give_summed(2, select(condition, 0.0, dy))?;
    }
    Ok(())
}
