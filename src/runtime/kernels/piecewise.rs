//! Piecewise activations and their gradients.
//!
//! `_prelu_kernel`, `hardswish_backward` and `mish_backward` cannot write into a given result, and their results have the
//! strides of the operands. So the operands are made row-major first.

use super::arith::{gradient, unary};
use super::context::*;
use ckpt_passes::ops::piecewise::*;

kernels! {
    LEAKY_RELU => leaky_relu;
    LEAKY_RELU_GRAD => leaky_relu_grad;
    PRELU => prelu;
    ELU => elu;
    ELU_GRAD => elu_grad;
    HARD_SIGMOID => hard_sigmoid;
    HARD_SWISH => unary("aten::hardswish.out", &[]);
    HARD_SWISH_GRAD => like_operands("aten::hardswish_backward");
    MISH => unary("aten::mish.out", &[]);
    MISH_GRAD => like_operands("aten::mish_backward");
}

fn leaky_relu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    unary(cx, "aten::leaky_relu.out", args![cx.number("alpha")])
}

fn leaky_relu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let args = args![cx.number("alpha"), false];
    gradient(cx, "aten::leaky_relu_backward.grad_input", args)
}

fn elu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    unary(cx, "aten::elu.out", args![cx.number("alpha"), 1.0, 1.0])
}

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
