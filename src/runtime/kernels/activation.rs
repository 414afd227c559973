//! Activations, and the fused gradients that libtorch has for them.

use super::arith::{gradient, unary};
use super::context::*;
use ckpt_passes::ops::activation::*;

kernels! {
    TANH => unary("aten::tanh.out", &[]);
    TANH_GRAD => gradient("aten::tanh_backward.grad_input", &[]);
    SIGMOID => unary("aten::sigmoid.out", &[]);
    SIGMOID_GRAD => gradient("aten::sigmoid_backward.grad_input", &[]);
    // `relu` itself has no form that writes into a given result.
    RELU => unary("aten::clamp_min.out", args![0]);
    RELU_GRAD => gradient("aten::threshold_backward.grad_input", args![0]);
    GELU => gelu;
    GELU_GRAD => gelu_grad;
    SOFTPLUS => unary("aten::softplus.out", args![1, 20]);
    ERF_GRAD => erf_grad;
}

fn gelu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    unary(cx, "aten::gelu.out", args![cx.attrs.str("approximate")])
}

fn gelu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let approximate = args![cx.attrs.str("approximate")];
    gradient(cx, "aten::gelu_backward.grad_input", approximate)
}

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
