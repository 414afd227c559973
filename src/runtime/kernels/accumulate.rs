//! Sums of narrow terms, widened some rows at a time.

use super::{Kernel, KernelCx, arith, call, copy_into, empty, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::accumulate::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&ACCUMULATE, accumulate)];

fn accumulate(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (sum, part) = (cx.x(0)?, cx.x(1)?);
    if sum.kind() == part.kind() {
        return arith::binary(cx, "aten::add", "out", &[Arg::Int(1)]);
    }
    let size = part.size();
    let out = cx.result(&sum.size(), sum.kind(), sum.device())?;
    if part.numel() == 0 {
        return Ok(vec![out]);
    }
    let most = stretch(&size);
    let mut dims = size.clone();
    if let Some(rows) = dims.first_mut() {
        *rows = most;
    }
    let buffer = empty(&dims, sum.kind(), sum.device())?;
    let mut at = 0;
    while at < size.first().copied().unwrap_or(1) {
        let count = most.min(size.first().copied().unwrap_or(1) - at);
        let wide = rows(&buffer, 0, count)?;
        copy_into(&wide, &rows(part, at, count)?)?;
        let (own, target) = (rows(sum, at, count)?, rows(&out, at, count)?);
        let args = [
            Arg::Tensor(&own),
            Arg::Tensor(&wide),
            Arg::Int(1),
            Arg::Tensor(&target),
        ];
        write("aten::add", "out", &args)?;
        at += count;
    }
    Ok(vec![out])
}

/// Rows of a tensor; all of it where it has none.
fn rows(x: &Tensor, at: i64, count: i64) -> Result<Tensor> {
    if x.dim() == 0 {
        return Ok(x.alias());
    }
    let args = [Arg::Tensor(x), Arg::Int(0), Arg::Int(at), Arg::Int(count)];
    call("aten::narrow", "", &args)
}
