//! Piecewise activations: `LeakyRelu`, `PRelu`, `Elu`, `HardSigmoid`, `HardSwish`, `Mish` (ONNX operator specifications
//! of those names) and their gradients.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{Grad, GradCx, InferCx, OpDef, fresh};
use ckpt_ir::{AttrSpec, DType, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &LEAKY_RELU,
    &LEAKY_RELU_GRAD,
    &PRELU,
    &ELU,
    &ELU_GRAD,
    &HARD_SIGMOID,
    &HARD_SWISH,
    &HARD_SWISH_GRAD,
    &MISH,
    &MISH_GRAD,
];

const LEAKY_ALPHA: &[AttrSpec] = &[AttrSpec::float("alpha", 0.01)];
const ELU_ALPHA: &[AttrSpec] = &[AttrSpec::float("alpha", 1.0)];

/// x where x > 0, else alpha·x; `aten::leaky_relu`.
pub static LEAKY_RELU: OpDef = OpDef {
    attrs: LEAKY_ALPHA,
    cost: one_flop,
    ..unary(
        "LeakyRelu",
        onnx(6, 16),
        &["aten.leaky_relu"],
        Grad::First(|cx| with_own_attrs(cx, &LEAKY_RELU_GRAD)),
    )
};

/// dy where x > 0, else alpha·dy; `aten::leaky_relu_backward`.
pub static LEAKY_RELU_GRAD: OpDef = OpDef {
    attrs: LEAKY_ALPHA,
    cost: one_flop,
    ..unary_grad("LeakyReluGrad", |cx| {
        let [x, dy] = wide(cx)?;
        let alpha = f64::from(cx.attrs.float("alpha"));
        let [zero, alpha] = [0.0, alpha].map(|n| cx.number(x, n));
        narrow(cx, select(binary_op(GREATER, x, zero), dy, dy * alpha))
    })
};

/// x where x ≥ 0, else slope·x; the slope broadcasts to x.
///
/// The kernel's result takes the strides of the operand, so the kernel copies one that is not row-major first.
pub static PRELU: OpDef = OpDef {
    aten: &["aten.prelu"],
    ins: slots!["X", "slope"],
    outs: Y,
    infer: infer_prelu,
    grad: Grad::Rule(grad_prelu),
    cost: one_flop,
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0])),
    ..mixed("PRelu", onnx(7, 16))
};

fn infer_prelu(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1])?;
    let both = broadcast_dims(cx, 0..2)?;
    let x = cx.ty(0)?;
    if !may_be_same(&both, &x.dims) {
        return Err(cx
            .fail("shape", "the slope does not broadcast to the operand")
            .expected(x.to_string())
            .found(cx.ty(1)?.to_string()));
    }
    Ok(vec![x.clone()])
}

/// dx = dy where x > 0, else slope·dy; dslope = Σ x·dy where x ≤ 0.
fn grad_prelu(cx: &mut GradCx) -> Result<()> {
    let (x, slope, dy) = (cx.operand(0), cx.operand(1), cx.cotangent());
    let zero = cx.number(x, 0.0);
    let rising = cx.bind(binary_op(GREATER, x, zero))?;
    if cx.wants(0) {
        cx.give_summed(0, select(rising, dy, dy * slope))?;
    }
    if cx.wants(1) {
        cx.give_summed(1, select(rising, zero, x * dy))?;
    }
    Ok(())
}

/// x where x > 0, else alpha·(exp x − 1); `aten::elu`.
pub static ELU: OpDef = OpDef {
    attrs: ELU_ALPHA,
    later_types: BF16_SINCE_22,
    ..unary(
        "Elu",
        onnx(6, 6),
        &["aten.elu"],
        Grad::First(|cx| with_own_attrs(cx, &ELU_GRAD)),
    )
};

/// dy where x > 0, else dy·alpha·exp x; `aten::elu_backward` on the operand.
pub static ELU_GRAD: OpDef = OpDef {
    attrs: ELU_ALPHA,
    ..unary_grad("EluGrad", |cx| {
        let [x, dy] = wide(cx)?;
        let alpha = f64::from(cx.attrs.float("alpha"));
        let [zero, alpha] = [0.0, alpha].map(|n| cx.number(x, n));
        let rising = cx.bind(binary_op(GREATER, x, zero))?;
        // Where it rises the power is not read. It could overflow there, and its gradient would be NaN.
        let slope = cx.bind(unary_op(EXP, select(rising, zero, x)) * alpha)?;
        narrow(cx, select(rising, dy, dy * slope))
    })
};

/// alpha·x + beta, clamped to 0..1.
pub static HARD_SIGMOID: OpDef = OpDef {
    attrs: &[AttrSpec::float("alpha", 0.2), AttrSpec::float("beta", 0.5)],
    later_types: BF16_SINCE_22,
    cost: one_flop,
    ..unary(
        "HardSigmoid",
        onnx(6, 6),
        &["aten.hardsigmoid"],
        Grad::First(grad_hard_sigmoid),
    )
};

/// dy·alpha where the result is neither 0 nor 1. The product is taken in float32 for the 16-bit types, which do not
/// hold alpha.
fn grad_hard_sigmoid(cx: &mut GradCx) -> Result<ValueId> {
    let (y, dy) = (cx.result(0), cx.cotangent());
    let dtype = cx.ty(y.0).dtype;
    let [zero, one] = [0.0, 1.0].map(|n| cx.number(y, n));
    let alpha = cx.attrs().float("alpha").into();
    let alpha = Term(cx.b.scalar(compute_type(dtype), alpha));
    let above = binary_op(GREATER, y, zero);
    let inside = cx.bind(binary_op(AND, above, binary_op(LESS, y, one)))?;
    let scaled = cx.widened(dy.0)? * alpha;
    cx.eval(select(inside, cast(scaled, dtype), zero))
}

/// x·clamp(x/6 + 1/2, 0, 1); `aten::hardswish`.
pub static HARD_SWISH: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    cost: one_flop,
    ..unary(
        "HardSwish",
        onnx(14, 14),
        &["aten.hardswish"],
        Grad::First(|cx| with_own_attrs(cx, &HARD_SWISH_GRAD)),
    )
};

/// 0 where x ≤ −3, dy·(x/3 + 1/2) up to 3, else dy; `aten::hardswish_backward`.
pub static HARD_SWISH_GRAD: OpDef = OpDef {
    cost: one_flop,
    memory: dense_operands,
    ..unary_grad("HardSwishGrad", |cx| {
        let [x, dy] = wide(cx)?;
        let [low, high, zero, half] = [-3.0, 3.0, 0.0, 0.5].map(|n| cx.number(x, n));
        let inner = cx.bind(x / high + half)?;
        let inner = cx.bind(dy * inner)?;
        let linear = cx.bind(select(binary_op(GREATER, x, high), dy, inner))?;
        narrow(cx, select(binary_op(LESS_OR_EQUAL, x, low), zero, linear))
    })
};

/// x·tanh(log(1 + exp x)); `aten::mish`.
pub static MISH: OpDef = OpDef {
    later_types: BF16_SINCE_22,
    ..unary(
        "Mish",
        onnx(18, 18),
        &["aten.mish"],
        Grad::First(|cx| with_own_attrs(cx, &MISH_GRAD)),
    )
};

/// With t = tanh(softplus x): dy·(t + x·sigmoid(x)·(1 − t²)); `aten::mish_backward`.
pub static MISH_GRAD: OpDef = OpDef {
    memory: dense_operands,
    ..unary_grad("MishGrad", |cx| {
        let [x, dy] = wide(cx)?;
        let one = cx.number(x, 1.0);
        let t = cx.bind(unary_op(TANH, unary_op(SOFTPLUS, x)))?;
        let sigmoid = cx.bind(unary_op(SIGMOID, x))?;
        let rest = cx.bind(one - t * t)?;
        narrow(cx, dy * (t + x * sigmoid * rest))
    })
};
