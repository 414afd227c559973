//! Piecewise activations and their gradients.
//!
//! libtorch has no form of `_prelu_kernel`, `hardswish_backward` and `mish_backward` that writes into a given result:
//! theirs has the strides of the operands, so these are made row-major first.

use super::arith::unary;
use super::softmax::dense;
use super::{Kernel, KernelCx, call, scalar, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::piecewise::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&LEAKY_RELU, |cx| {
        unary(cx, "aten::leaky_relu", "out", &[number(cx, "alpha")])
    }),
    (&LEAKY_RELU_GRAD, |cx| {
        let tail = [number(cx, "alpha"), Arg::Bool(false)];
        gradient(cx, "aten::leaky_relu_backward", &[], true, &tail)
    }),
    (&PRELU, prelu),
    (&ELU, |cx| {
        let numbers = [number(cx, "alpha"), Arg::Double(1.0), Arg::Double(1.0)];
        unary(cx, "aten::elu", "out", &numbers)
    }),
    (&ELU_GRAD, |cx| {
        let numbers = [
            number(cx, "alpha"),
            Arg::Double(1.0),
            Arg::Double(1.0),
            Arg::Bool(false),
        ];
        gradient(cx, "aten::elu_backward", &numbers, false, &[])
    }),
    (&HARD_SIGMOID, hard_sigmoid),
    (&HARD_SWISH, |cx| unary(cx, "aten::hardswish", "out", &[])),
    (&HARD_SWISH_GRAD, |cx| {
        like_operands(cx, "aten::hardswish_backward")
    }),
    (&MISH, |cx| unary(cx, "aten::mish", "out", &[])),
    (&MISH_GRAD, |cx| like_operands(cx, "aten::mish_backward")),
];

/// An attribute as a number.
fn number<'a>(cx: &KernelCx, name: &str) -> Arg<'a> {
    Arg::Double(f64::from(cx.attrs.float(name)))
}

/// Calls `name(dy, [x,] middle…, [x,] tail…, grad_input)`; our rows take (x, dy).
fn gradient(
    cx: &KernelCx,
    name: &str,
    middle: &[Arg],
    x_first: bool,
    tail: &[Arg],
) -> Result<Vec<Tensor>> {
    let (x, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    let mut args = vec![Arg::Tensor(dy)];
    if x_first {
        args.push(Arg::Tensor(x));
    }
    args.extend_from_slice(middle);
    if !x_first {
        args.push(Arg::Tensor(x));
    }
    args.extend_from_slice(tail);
    args.push(Arg::Tensor(&out));
    write(name, "grad_input", &args)?;
    Ok(vec![out])
}

/// Calls `name(dy, x)`.
fn like_operands(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (x, dy) = (dense(cx.x(0)?)?, dense(cx.x(1)?)?);
    let out = call(name, "", &[Arg::Tensor(&dy), Arg::Tensor(&x)])?;
    Ok(vec![out])
}

/// The slope broadcasts within the kernel.
fn prelu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, slope) = (dense(cx.x(0)?)?, cx.x(1)?);
    let out = call(
        "aten::_prelu_kernel",
        "",
        &[Arg::Tensor(&x), Arg::Tensor(slope)],
    )?;
    Ok(vec![out])
}

/// beta + alpha·x in one rounding, then clamped in place.
fn hard_sigmoid(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    let beta = scalar(x.kind(), f64::from(cx.attrs.float("beta")))?;
    let args = [
        Arg::Tensor(&beta),
        Arg::Tensor(x),
        number(cx, "alpha"),
        Arg::Tensor(&out),
    ];
    write("aten::add", "out", &args)?;
    let bounds = [Arg::Tensor(&out), Arg::Int(0), Arg::Int(1)];
    write("aten::clamp_", "", &bounds)?;
    Ok(vec![out])
}
