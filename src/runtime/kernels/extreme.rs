//! Largest and smallest of several operands, and clamping.

use super::context::*;
use ckpt_passes::ops::extreme::*;

kernels! {
    MAX => fold("aten::maximum.out");
    MIN => fold("aten::minimum.out");
    CLIP => clip;
}

/// Any number of operands, folded into one result in place.
fn fold(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let all = cx.all();
    let first = cx.x(0)?;
    let out = cx.result(&broadcast(&all), first.kind(), first.device())?;
    let mut rest = &all[1..];
    match rest.split_first() {
        Some((second, others)) if broadcast(&[first, second]) == out.size() => {
            write(name, args![first, *second, &out])?;
            rest = others;
        }
        _ => copy_into(&out, first)?,
    }
    for next in rest {
        write(name, args![&out, *next, &out])?;
    }
    Ok(vec![out])
}

fn clip(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result_like(x)?;
    let scalar = |slot: usize| cx.opt(slot).map(|t| t.reshape(&[] as &[i64]));
    let (low, high) = (scalar(1), scalar(2));
    match low.is_none() && high.is_none() {
        true => copy_into(&out, x)?,
        false => write(
            "aten::clamp.Tensor_out",
            args![x, low.as_ref(), high.as_ref(), &out],
        )?,
    }
    Ok(vec![out])
}
