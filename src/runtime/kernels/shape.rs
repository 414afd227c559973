//! Shapes and views. Views are real libtorch views; a reshape that cannot be one is a row-major copy.

use super::{Kernel, KernelCx, call};
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::shape::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SHAPE, shape),
    (&SIZE, |cx| Ok(vec![Tensor::from(cx.x(0)?.numel() as i64)])),
    (&IDENTITY, |cx| Ok(vec![cx.x(0)?.alias()])),
    (&STOP_GRADIENT, |cx| Ok(vec![cx.x(0)?.alias()])),
    (&RESHAPE, reshape),
    (&FLATTEN, flatten),
    (&SQUEEZE, squeeze),
    (&UNSQUEEZE, unsqueeze),
    (&TRANSPOSE, transpose),
    (&EXPAND, expand),
];

fn shape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let size = cx.x(0)?.size();
    let rank = size.len() as i64;
    let clamp = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
    let (start, end) = (
        clamp(cx.attrs.int("start")),
        clamp(cx.attrs.opt_int("end").unwrap_or(rank)),
    );
    Ok(vec![Tensor::from_slice(&size[start..end.max(start)])])
}

/// ONNX Reshape: 0 copies the operand's size unless `allowzero`, one −1 takes what is left.
fn reshape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let (size, mut target) = (x.size(), cx.ints(1)?);
    if cx.attrs.int("allowzero") == 0 {
        for (i, dim) in target.iter_mut().enumerate() {
            if *dim == 0 {
                *dim = *size
                    .get(i)
                    .ok_or_else(|| mismatch(cx, "a 0 beyond the operand's rank"))?;
            }
        }
    }
    if let Some(at) = target.iter().position(|d| *d == -1) {
        let rest: i64 = target
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != at)
            .map(|(_, d)| d)
            .product();
        let total = x.numel() as i64;
        if rest == 0 || total % rest != 0 {
            return Err(mismatch(cx, &format!("{size:?} into {target:?}")));
        }
        target[at] = total / rest;
    }
    reshaped(cx, x, &target)
}

fn reshaped(cx: &KernelCx, x: &Tensor, target: &[i64]) -> Result<Vec<Tensor>> {
    if target.iter().any(|d| *d < 0) || target.iter().product::<i64>() != x.numel() as i64 {
        return Err(mismatch(cx, &format!("{:?} into {target:?}", x.size())));
    }
    Ok(vec![call(
        "aten::reshape",
        "",
        &[Arg::Tensor(x), Arg::Ints(target)],
    )?])
}

pub fn mismatch(cx: &KernelCx, what: &str) -> Box<Error> {
    Error::model(
        "shape",
        format!("{}: the sizes do not fit: {what}", cx.op.name),
    )
}

fn flatten(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let axis = cx.attrs.int("axis");
    let at = if axis < 0 {
        axis + size.len() as i64
    } else {
        axis
    } as usize;
    reshaped(
        cx,
        x,
        &[size[..at].iter().product(), size[at..].iter().product()],
    )
}

/// Axes in `0..rank`.
pub fn axes_of(axes: &[i64], rank: usize) -> Vec<usize> {
    axes.iter()
        .map(|a| if *a < 0 { a + rank as i64 } else { *a } as usize)
        .collect()
}

fn squeeze(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let axes = match cx.opt(1) {
        Some(_) => axes_of(&cx.ints(1)?, size.len()),
        None => (0..size.len()).filter(|i| size[*i] == 1).collect(),
    };
    if let Some(bad) = axes.iter().find(|a| size.get(**a) != Some(&1)) {
        return Err(mismatch(cx, &format!("axis {bad} of {size:?} is not 1")));
    }
    let kept: Vec<usize> = (0..size.len()).filter(|i| !axes.contains(i)).collect();
    Ok(vec![restrided(
        x,
        |i| kept.get(i).map(|k| (size[*k], x.stride()[*k])),
        kept.len(),
    )?])
}

fn unsqueeze(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let axes = cx.ints(1)?;
    let mut axes = axes_of(&axes, x.dim() + axes.len());
    axes.sort_unstable();
    let mut view = x.alias();
    for axis in axes {
        view = call(
            "aten::unsqueeze",
            "",
            &[Arg::Tensor(&view), Arg::Int(axis as i64)],
        )?;
    }
    Ok(vec![view])
}

/// A view with the sizes and strides that `axis` gives for each of `rank` axes.
fn restrided(
    x: &Tensor,
    axis: impl Fn(usize) -> Option<(i64, i64)>,
    rank: usize,
) -> Result<Tensor> {
    let (mut sizes, mut strides) = (Vec::new(), Vec::new());
    for (size, stride) in (0..rank).filter_map(axis) {
        sizes.push(size);
        strides.push(stride);
    }
    call(
        "aten::as_strided",
        "",
        &[
            Arg::Tensor(x),
            Arg::Ints(&sizes),
            Arg::Ints(&strides),
            Arg::None,
        ],
    )
}

fn transpose(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let reversed: Vec<i64> = (0..x.dim() as i64).rev().collect();
    let perm = cx.attrs.opt_ints("perm").unwrap_or(&reversed);
    Ok(vec![call(
        "aten::permute",
        "",
        &[Arg::Tensor(x), Arg::Ints(perm)],
    )?])
}

/// ONNX Expand broadcasts both ways: a 1 in the target keeps the operand's size.
fn expand(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let (size, mut target) = (x.size(), cx.ints(1)?);
    while target.len() < size.len() {
        target.insert(0, 1);
    }
    let lead = target.len() - size.len();
    for (dim, found) in target[lead..].iter_mut().zip(&size) {
        if *dim == 1 {
            *dim = *found;
        }
    }
    Ok(vec![call(
        "aten::expand",
        "",
        &[Arg::Tensor(x), Arg::Ints(&target), Arg::Bool(false)],
    )?])
}
