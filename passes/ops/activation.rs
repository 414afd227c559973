//! Activations and their gradients.
//!
//! Each gradient is one row of our own with the operands of PyTorch's backward kernel, so the backward pass makes no
//! temporaries. Bodies compute in float32 where the operands are narrower and round once, as those kernels do.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BodyCx, Grad, InferCx, OpClass, OpDef, fresh};
use ckpt_ir::{AttrSpec, Attrs, ValueId};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

/// The rows of this family.
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

/// ONNX `Tanh`.
pub static TANH: OpDef = OpDef {
    class: OpClass::Elementwise,
    scalar: |_| Some(vec![scalar::library("tanh", scalar::x(0))]),
    ..unary_of_input(
        "Tanh",
        onnx(6, 13),
        &["aten.tanh"],
        Grad::First(|cx| cx.eval(binary_op(&TANH_GRAD, cx.result(0), cx.cotangent()))),
    )
};

/// dy·(1 − y²); `aten::tanh_backward`.
pub static TANH_GRAD: OpDef = OpDef {
    ins: Y_DY,
    scalar: |_| {
        let slope = || scalar::number(1.0) - scalar::x(0) * scalar::x(0);
        let operands = [scalar::x(0), scalar::x(1)];
        Some(vec![scalar::call(
            "tanh_grad",
            operands,
            scalar::x(1) * slope(),
        )])
    },
    ..unary_grad("TanhGrad", |cx| {
        let [y, dy] = wide(cx)?;
        let square = cx.bind(y * y)?;
        narrow(cx, dy * (1.0 - square))
    })
};

/// ONNX `Sigmoid`.
pub static SIGMOID: OpDef = OpDef {
    scalar: |_| {
        let value =
            scalar::number(1.0) / (scalar::number(1.0) + scalar::library("exp", -scalar::x(0)));
        Some(vec![scalar::call("sigmoid", [scalar::x(0)], value)])
    },
    ..unary(
        "Sigmoid",
        onnx(6, 13),
        &["aten.sigmoid", "aten.silu"],
        Grad::First(|cx| cx.eval(binary_op(&SIGMOID_GRAD, cx.result(0), cx.cotangent()))),
    )
};

/// dy·(1 − y)·y; `aten::sigmoid_backward`.
pub static SIGMOID_GRAD: OpDef = OpDef {
    ins: Y_DY,
    scalar: |_| {
        let rest = scalar::number(1.0) - scalar::x(0);
        Some(vec![scalar::x(1) * rest * scalar::x(0)])
    },
    ..unary_grad("SigmoidGrad", |cx| {
        let [y, dy] = wide(cx)?;
        narrow(cx, dy * (1.0 - y) * y)
    })
};

/// ONNX `Relu`.
pub static RELU: OpDef = OpDef {
    infer: unary_number,
    cost: one_flop,
    scalar: |_| {
        Some(vec![scalar::apply(
            scalar::Op::Max,
            [scalar::number(0.0), scalar::x(0)],
        )])
    },
    ..unary(
        "Relu",
        onnx(6, 14),
        &["aten.relu"],
        Grad::First(|cx| cx.eval(binary_op(&RELU_GRAD, cx.result(0), cx.cotangent()))),
    )
};

/// 0 where y ≤ 0, else dy (also where y is NaN); `aten::threshold_backward` with threshold 0.
pub static RELU_GRAD: OpDef = OpDef {
    ins: Y_DY,
    scalar: |_| {
        let off = scalar::apply(scalar::Op::LessOrEqual, [scalar::x(0), scalar::number(0.0)]);
        Some(vec![scalar::select(off, scalar::number(0.0), scalar::x(1))])
    },
    ..unary_grad("ReluGrad", |cx| {
        let off = binary_op(LESS_OR_EQUAL, cx.x(0), 0.0);
        Ok(vec![cx.eval(select(off, 0.0, cx.x(1)))?])
    })
};

const APPROXIMATE: &[AttrSpec] = &[AttrSpec::str("approximate", "none")];

/// ONNX `Gelu`.
pub static GELU: OpDef = OpDef {
    attrs: APPROXIMATE,
    infer: |cx| {
        check_approximate(cx)?;
        unary_float(cx)
    },
    scalar: |cx| Some(vec![gelu(is_tanh(cx.attrs), scalar::x(0))]),
    ..unary(
        "Gelu",
        onnx(20, 20),
        &["aten.gelu"],
        Grad::First(|cx| with_own_attrs(cx, &GELU_GRAD)),
    )
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

fn is_tanh(attrs: &Attrs) -> bool {
    attrs.str("approximate") == "tanh"
}

/// The numbers of the approximation: √(2/π) and 0.044715.
fn tanh_numbers() -> [scalar::Expr; 2] {
    [SQRT_2 * FRAC_2_SQRT_PI * 0.5, 0.044715].map(scalar::number)
}

/// ½(1 + erf(x/√2)).
fn normal_cdf(x: scalar::Expr) -> scalar::Expr {
    let erf = scalar::library("erf", x * scalar::number(FRAC_1_SQRT_2));
    scalar::number(0.5) * (scalar::number(1.0) + erf)
}

/// Exact: x·Φ(x); tanh: ½x(1 + tanh u), with u as in [`gelu_grad_body`].
fn gelu(tanh: bool, x: scalar::Expr) -> scalar::Expr {
    let (name, value) = match tanh {
        false => ("gelu", x.clone() * normal_cdf(x.clone())),
        true => {
            let [beta, kappa] = tanh_numbers();
            let cube = x.clone() * x.clone() * x.clone();
            let t = scalar::library("tanh", beta * (x.clone() + kappa * cube));
            let half = scalar::number(0.5) * x.clone();
            ("gelu_tanh", half * (scalar::number(1.0) + t))
        }
    };
    scalar::call(name, [x], value)
}

/// As [`gelu_grad_body`].
fn gelu_slope(tanh: bool, x: scalar::Expr, dy: scalar::Expr) -> scalar::Expr {
    let one = || scalar::number(1.0);
    let square = x.clone() * x.clone();
    let (name, slope) = match tanh {
        false => {
            let bell = scalar::library("exp", square * scalar::number(-0.5));
            let pdf = bell * scalar::number(FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5);
            ("gelu_grad", normal_cdf(x.clone()) + x.clone() * pdf)
        }
        true => {
            let [beta, kappa] = tanh_numbers();
            let cube = square.clone() * x.clone();
            let u = beta.clone() * (x.clone() + kappa.clone() * cube);
            let t = scalar::library("tanh", u);
            let left = scalar::number(0.5) * (one() + t.clone());
            let du = beta * (one() + scalar::number(3.0) * kappa * square);
            let right = scalar::number(0.5) * x.clone() * (one() - t.clone() * t) * du;
            ("gelu_tanh_grad", left + right)
        }
    };
    scalar::call(name, [x, dy.clone()], dy * slope)
}

/// The gradient of [`GELU`]; `aten::gelu_backward`.
pub static GELU_GRAD: OpDef = OpDef {
    attrs: APPROXIMATE,
    infer: |cx| {
        check_approximate(cx)?;
        two_alike(cx)
    },
    scalar: |cx| {
        Some(vec![gelu_slope(
            is_tanh(cx.attrs),
            scalar::x(0),
            scalar::x(1),
        )])
    },
    ..unary_grad("GeluGrad", gelu_grad_body)
};

/// Exact: dy·(Φ(x) + x·φ(x)). Tanh: with u = √(2/π)(x + 0.044715x³) and t = tanh u,
/// dy·(½(1 + t) + ½x(1 − t²)·√(2/π)(1 + 3·0.044715x²)) (Hendrycks and Gimpel 2016, arXiv 1606.08415).
fn gelu_grad_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let [x, dy] = wide(cx)?;
    let [one, half] = [1.0, 0.5].map(|n| cx.number(x, n));
    let slope = if is_tanh(cx.attrs) {
        let constants = [SQRT_2 * 0.5 * FRAC_2_SQRT_PI, 0.044715, 3.0 * 0.044715];
        let [beta, kappa, kappa3] = constants.map(|n| cx.number(x, n));
        let square = cx.bind(x * x)?;
        let u = (x + square * kappa * x) * beta;
        let t = cx.bind(unary_op(&TANH, u))?;
        let left = cx.bind((t + one) * half)?;
        let dt = cx.bind(one - t * t)?;
        let du = cx.bind((square * kappa3 + one) * beta)?;
        left + x * half * dt * du
    } else {
        let root_half = cx.number(x, FRAC_1_SQRT_2);
        let cdf = cx.bind((unary_op(ERF, x * root_half) + one) * half)?;
        let minus_half = cx.number(x, -0.5);
        let density = FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * 0.5;
        let pdf = cx.bind(unary_op(EXP, x * x * minus_half) * density)?;
        cdf + x * pdf
    };
    let slope = cx.bind(slope)?;
    narrow(cx, dy * slope)
}

/// ONNX `Softplus`.
pub static SOFTPLUS: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    ..unary(
        "Softplus",
        onnx(1, 1),
        &["aten.softplus"],
        Grad::First(|cx| {
            // Rounded once: in a 16-bit type the slope by itself would be rounded too.
            let (x, dy) = (cx.widened(cx.x(0))?, cx.widened(cx.dy0())?);
            let dtype = cx.ty(cx.x(0)).dtype;
            cx.eval(cast(dy * unary_op(&SIGMOID, x), dtype))
        }),
    )
};

/// dy·(2/√π)·exp(−x²). The kernel works in its result (`mul_out`, `neg_`, `exp_`, `mul_`, `mul_`).
pub static ERF_GRAD: OpDef = OpDef {
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    scalar: |_| {
        let square = (scalar::x(0) * scalar::x(0)).round();
        let bell = scalar::library("exp", -square).round();
        let slope = (bell * scalar::number(FRAC_2_SQRT_PI).round()).round();
        Some(vec![slope * scalar::x(1)])
    },
    ..unary_grad("ErfGrad", |cx| {
        let [x, dy] = wide(cx)?;
        let bell = unary_op(EXP, -(x * x));
        narrow(cx, dy * (bell * FRAC_2_SQRT_PI))
    })
};
