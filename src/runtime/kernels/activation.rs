//! Activations, and the fused gradients that libtorch has for them.

use super::arith::{gradient, unary};
use super::context::*;
use ckpt_passes::ops::activation::*;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&TANH, |cx| unary(cx, "aten::tanh.out", &[])),
    (&TANH_GRAD, |cx| {
        gradient(cx, "aten::tanh_backward.grad_input", &[])
    }),
    (&SIGMOID, |cx| unary(cx, "aten::sigmoid.out", &[])),
    (&SIGMOID_GRAD, |cx| {
        gradient(cx, "aten::sigmoid_backward.grad_input", &[])
    }),
    // `relu` itself has no form that writes into a given result.
    (&RELU, |cx| unary(cx, "aten::clamp_min.out", args![0])),
    (&RELU_GRAD, |cx| {
        gradient(cx, "aten::threshold_backward.grad_input", args![0])
    }),
    (&GELU, |cx| {
        unary(cx, "aten::gelu.out", args![cx.attrs.str("approximate")])
    }),
    (&GELU_GRAD, |cx| {
        let approximate = cx.attrs.str("approximate");
        gradient(cx, "aten::gelu_backward.grad_input", args![approximate])
    }),
    (&SOFTPLUS, |cx| {
        unary(cx, "aten::softplus.out", args![1, 20])
    }),
    (&ERF_GRAD, erf_grad),
];

/// 2/√π · e^(−x²) · dy, computed in the result.
fn erf_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result_like(x)?;
    write("aten::mul.out", args![x, x, &out])?;
    let slope = scalar(x.kind(), std::f64::consts::FRAC_2_SQRT_PI)?;
    write("aten::neg_", args![&out])?;
    write("aten::exp_", args![&out])?;
    mul_into(&out, &slope)?;
    mul_into(&out, dy)?;
    Ok(vec![out])
}
