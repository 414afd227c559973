//! Gates: libtorch's silu and its gradient, with products computed in the results.

use super::arith::{gradient, unary};
use super::context::*;
use ckpt_passes::ops::gated::*;

kernels! {
    SILU => unary("aten::silu.out", &[]);
    SILU_GRAD => gradient("aten::silu_backward.grad_input", &[]);
    SWIGLU => swiglu;
    SWIGLU_GRAD => swiglu_grad;
}

/// Computes silu(gate)·by in `out`.
fn gated(gate: &Tensor, by: &Tensor, out: Tensor) -> Result<Tensor> {
    write("aten::silu.out", args![gate, &out])?;
    mul_into(&out, by)?;
    Ok(out)
}

fn swiglu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (gate, up) = (cx.x(0)?, cx.x(1)?);
    Ok(vec![gated(gate, up, cx.result_like(gate)?)?])
}

fn swiglu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (gate, up, dy) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let dgate = cx.result_like(gate)?;
    write("aten::mul.out", args![dy, up, &dgate])?;
    let args = args![&dgate, gate, &dgate];
    write("aten::silu_backward.grad_input", args)?;
    let dup = gated(gate, dy, empty_like(gate)?)?;
    Ok(vec![dgate, dup])
}
