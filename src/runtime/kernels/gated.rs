//! Gates: libtorch's silu and its gradient, products worked out in the results.

use super::arith::unary;
use super::{Kernel, KernelCx, empty, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::gated::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SILU, |cx| unary(cx, "aten::silu", "out", &[])),
    (&SILU_GRAD, silu_grad),
    (&SWIGLU, swiglu),
    (&SWIGLU_GRAD, swiglu_grad),
];

fn silu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    write(
        "aten::silu_backward",
        "grad_input",
        &[Arg::Tensor(dy), Arg::Tensor(x), Arg::Tensor(&out)],
    )?;
    Ok(vec![out])
}

/// silu(gate) in `out`, then times `by`.
fn gated(gate: &Tensor, by: &Tensor, out: Tensor) -> Result<Tensor> {
    write("aten::silu", "out", &[Arg::Tensor(gate), Arg::Tensor(&out)])?;
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(by)],
    )?;
    Ok(out)
}

fn swiglu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (gate, up) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&gate.size(), gate.kind(), gate.device())?;
    Ok(vec![gated(gate, up, out)?])
}

fn swiglu_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (gate, up, dy) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let dgate = cx.result(&gate.size(), gate.kind(), gate.device())?;
    write(
        "aten::mul",
        "out",
        &[Arg::Tensor(dy), Arg::Tensor(up), Arg::Tensor(&dgate)],
    )?;
    write(
        "aten::silu_backward",
        "grad_input",
        &[Arg::Tensor(&dgate), Arg::Tensor(gate), Arg::Tensor(&dgate)],
    )?;
    let dup = empty(&gate.size(), gate.kind(), gate.device())?;
    Ok(vec![dgate, gated(gate, dy, dup)?])
}
