//! Piecewise activations and their gradients.
//!
//! libtorch has no form of `_prelu_kernel`, `hardswish_backward` and `mish_backward` that writes into a given result:
//! theirs has the strides of the operands, so these are made row-major first.

use super::arith::{gradient, unary};
use super::context::*;
use ckpt_passes::ops::piecewise::*;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&LEAKY_RELU, |cx| {
        unary(cx, "aten::leaky_relu.out", args![cx.number("alpha")])
    }),
    (&LEAKY_RELU_GRAD, |cx| {
        let args = [Arg::from(cx.number("alpha")), Arg::from(false)];
        gradient(cx, "aten::leaky_relu_backward.grad_input", &args)
    }),
    (&PRELU, prelu),
    (&ELU, |cx| {
        unary(cx, "aten::elu.out", args![cx.number("alpha"), 1.0, 1.0])
    }),
    (&ELU_GRAD, elu_grad),
    (&HARD_SIGMOID, hard_sigmoid),
    (&HARD_SWISH, |cx| unary(cx, "aten::hardswish.out", &[])),
    (&HARD_SWISH_GRAD, |cx| {
        like_operands(cx, "aten::hardswish_backward")
    }),
    (&MISH, |cx| unary(cx, "aten::mish.out", &[])),
    (&MISH_GRAD, |cx| like_operands(cx, "aten::mish_backward")),
];

fn elu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result_like(x)?;
    let args = args![dy, cx.number("alpha"), 1.0, 1.0, false, x, &out];
    write("aten::elu_backward.grad_input", args)?;
    Ok(vec![out])
}

/// Calls `name(dy, x)`.
fn like_operands(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (x, dy) = (dense(cx.x(0)?)?, dense(cx.x(1)?)?);
    Ok(vec![call(name, args![&dy, &x])?])
}

/// The slope broadcasts within the kernel.
fn prelu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, slope) = (dense(cx.x(0)?)?, cx.x(1)?);
    Ok(vec![call("aten::_prelu_kernel", args![&x, slope])?])
}

/// beta + alpha·x in one rounding, then clamped in place.
fn hard_sigmoid(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result_like(x)?;
    let beta = scalar(x.kind(), cx.number("beta"))?;
    write("aten::add.out", args![&beta, x, cx.number("alpha"), &out])?;
    write("aten::clamp_", args![&out, 0, 1])?;
    Ok(vec![out])
}
