//! Softmax, its logarithm, and their gradients.

use super::shape::axes_of;
use super::{Kernel, KernelCx, empty, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::softmax::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SOFTMAX, |cx| forward(cx, "aten::_softmax")),
    (&LOG_SOFTMAX, |cx| forward(cx, "aten::_log_softmax")),
    (&SOFTMAX_GRAD, |cx| {
        gradient(cx, "aten::_softmax_backward_data")
    }),
    (&LOG_SOFTMAX_GRAD, |cx| {
        gradient(cx, "aten::_log_softmax_backward_data")
    }),
];

/// Row-major, copied if it is not; the copy is declared by the rows.
pub fn dense(x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() {
        return Ok(x.alias());
    }
    let out = empty(&x.size(), x.kind(), x.device())?;
    write(
        "aten::copy_",
        "",
        &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
    )?;
    Ok(out)
}

fn axis(cx: &KernelCx, rank: usize) -> i64 {
    axes_of(&[cx.attrs.int("axis")], rank)[0] as i64
}

fn forward(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let x = dense(cx.x(0)?)?;
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    let args = [
        Arg::Tensor(&x),
        Arg::Int(axis(cx, x.dim())),
        Arg::Bool(false),
        Arg::Tensor(&out),
    ];
    write(name, "out", &args)?;
    Ok(vec![out])
}

fn gradient(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (y, dy) = (dense(cx.x(0)?)?, dense(cx.x(1)?)?);
    let out = cx.result(&y.size(), y.kind(), y.device())?;
    let args = [
        Arg::Tensor(&dy),
        Arg::Tensor(&y),
        Arg::Int(axis(cx, y.dim())),
        Arg::Dtype(y.kind()),
        Arg::Tensor(&out),
    ];
    write(name, "out", &args)?;
    Ok(vec![out])
}
