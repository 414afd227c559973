//! Activations, and the fused gradients libtorch has for them.

use super::arith::unary;
use super::{Kernel, KernelCx, scalar, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::activation::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&TANH, |cx| unary(cx, "aten::tanh", "out", &[])),
    (&TANH_GRAD, |cx| gradient(cx, "aten::tanh_backward", &[])),
    (&SIGMOID, |cx| unary(cx, "aten::sigmoid", "out", &[])),
    (&SIGMOID_GRAD, |cx| {
        gradient(cx, "aten::sigmoid_backward", &[])
    }),
    // `relu` itself has no form that writes into a given result.
    (&RELU, |cx| {
        unary(cx, "aten::clamp_min", "out", &[Arg::Int(0)])
    }),
    (&RELU_GRAD, |cx| {
        gradient(cx, "aten::threshold_backward", &[Arg::Int(0)])
    }),
    (&GELU, |cx| {
        unary(
            cx,
            "aten::gelu",
            "out",
            &[Arg::Str(cx.attrs.str("approximate"))],
        )
    }),
    (&GELU_GRAD, |cx| {
        gradient(
            cx,
            "aten::gelu_backward",
            &[Arg::Str(cx.attrs.str("approximate"))],
        )
    }),
    (&SOFTPLUS, |cx| {
        unary(cx, "aten::softplus", "out", &[Arg::Int(1), Arg::Int(20)])
    }),
    (&ERF_GRAD, erf_grad),
];

/// Our rows take (saved, dy); libtorch's backward kernels take (dy, saved, extra…, grad_input).
fn gradient(cx: &KernelCx, name: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let (saved, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&saved.size(), saved.kind(), saved.device())?;
    let mut args = vec![Arg::Tensor(dy), Arg::Tensor(saved)];
    args.extend_from_slice(extra);
    args.push(Arg::Tensor(&out));
    write(name, "grad_input", &args)?;
    Ok(vec![out])
}

/// 2/√π · e^(−x²) · dy, worked out in the result.
fn erf_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    write(
        "aten::mul",
        "out",
        &[Arg::Tensor(x), Arg::Tensor(x), Arg::Tensor(&out)],
    )?;
    let slope = scalar(x.kind(), std::f64::consts::FRAC_2_SQRT_PI)?;
    write("aten::neg_", "", &[Arg::Tensor(&out)])?;
    write("aten::exp_", "", &[Arg::Tensor(&out)])?;
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(&slope)],
    )?;
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(dy)],
    )?;
    Ok(vec![out])
}
