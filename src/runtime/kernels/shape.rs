//! Shapes and views. Results are libtorch views; a reshape that cannot be a view is a row-major copy.

use super::context::*;
use ckpt_passes::ops::shape::*;

/// Kernels for ops that read or change a shape; most return a view and copy nothing.
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

/// ONNX Reshape: 0 copies the operand's size unless `allowzero`, and −1 is inferred from the rest.
fn reshape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let (size, mut target) = (x.size(), cx.ints(1)?);
    if cx.attrs.int("allowzero") == 0 {
        for (i, dim) in target.iter_mut().enumerate() {
            if *dim == 0 {
                *dim = *size
                    .get(i)
                    .ok_or_else(|| cx.misfit("a 0 beyond the operand's rank"))?;
            }
        }
    }
    if let Some(at) = target.iter().position(|d| *d == -1) {
        // The product of the other sizes; the sign of −1 cancels.
        let rest = -target.iter().product::<i64>();
        let total = x.numel() as i64;
        if rest == 0 || total % rest != 0 {
            return Err(cx.misfit(format!("{size:?} into {target:?}")));
        }
        target[at] = total / rest;
    }
    reshaped(cx, x, &target)
}

fn reshaped(cx: &KernelCx, x: &Tensor, target: &[i64]) -> Result<Vec<Tensor>> {
    if target.iter().any(|d| *d < 0) || target.iter().product::<i64>() != x.numel() as i64 {
        return Err(cx.misfit(format!("{:?} into {target:?}", x.size())));
    }
    Ok(vec![call("aten::reshape", args![x, target])?])
}

fn flatten(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let (rows, columns) = size.split_at(cx.axis(size.len()));
    reshaped(cx, x, &[rows.iter().product(), columns.iter().product()])
}

fn squeeze(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let single = || (0..size.len()).filter(|i| size[*i] == 1).collect();
    let axes = cx.axes(1, size.len())?.unwrap_or_else(single);
    if let Some(bad) = axes.iter().find(|a| size.get(**a) != Some(&1)) {
        return Err(cx.misfit(format!("axis {bad} of {size:?} is not 1")));
    }
    let kept = size.iter().zip(x.stride()).enumerate();
    let kept = kept.filter(|(i, _)| !axes.contains(i));
    let (dims, strides): (Vec<i64>, Vec<i64>) = kept.map(|(_, kept)| kept).unzip();
    Ok(vec![strided(x, &dims, &strides)?])
}

fn unsqueeze(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let axes = cx.ints(1)?;
    let mut axes = axes_of(&axes, x.dim() + axes.len());
    axes.sort_unstable();
    let mut view = x.alias();
    for axis in axes {
        view = call("aten::unsqueeze", args![&view, axis as i64])?;
    }
    Ok(vec![view])
}

fn transpose(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let reversed: Vec<i64> = (0..x.dim() as i64).rev().collect();
    let perm = cx.attrs.opt_ints("perm").unwrap_or(&reversed);
    Ok(vec![call("aten::permute", args![x, perm])?])
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
    Ok(vec![call("aten::expand", args![x, &target, false])?])
}
