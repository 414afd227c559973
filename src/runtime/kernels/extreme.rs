//! Selection by size.

use super::{Kernel, KernelCx, broadcast, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::extreme::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&MAX, |cx| fold(cx, "aten::maximum")),
    (&MIN, |cx| fold(cx, "aten::minimum")),
    (&CLIP, clip),
];

/// Any number of operands, folded into one result in place.
fn fold(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let all: Vec<&Tensor> = cx.ins.iter().flatten().copied().collect();
    let first = cx.x(0)?;
    let out = cx.result(&broadcast(&all), first.kind(), first.device())?;
    let Some((second, rest)) = all[1..].split_first() else {
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(first), Arg::Bool(false)],
        )?;
        return Ok(vec![out]);
    };
    let start = if broadcast(&[first, second]) == out.size() {
        write(
            name,
            "out",
            &[Arg::Tensor(first), Arg::Tensor(second), Arg::Tensor(&out)],
        )?;
        rest
    } else {
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(first), Arg::Bool(false)],
        )?;
        &all[1..]
    };
    for next in start {
        write(
            name,
            "out",
            &[Arg::Tensor(&out), Arg::Tensor(next), Arg::Tensor(&out)],
        )?;
    }
    Ok(vec![out])
}

fn clip(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    let scalar = |slot: usize| cx.opt(slot).map(|t| t.reshape(&[] as &[i64]));
    let (low, high) = (scalar(1), scalar(2));
    if low.is_none() && high.is_none() {
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
        )?;
        return Ok(vec![out]);
    }
    write(
        "aten::clamp",
        "Tensor_out",
        &[
            Arg::Tensor(x),
            Arg::OptTensor(low.as_ref()),
            Arg::OptTensor(high.as_ref()),
            Arg::Tensor(&out),
        ],
    )?;
    Ok(vec![out])
}
