//! Selection along an axis.

use super::context::*;
use ckpt_passes::ops::select::*;
use ckpt_torch::bytes;

kernels! {
    ARG_MAX => arg("aten::argmax.out");
    ARG_MIN => arg("aten::argmin.out");
    TOP_K => top_k;
}

/// libtorch finds the first of equal elements. The last one is the first of the flipped operand, counted from the end.
fn arg(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let mut dims = x.size();
    let axis = cx.axis(dims.len());
    let (length, keep) = (dims[axis], cx.flag("keepdims"));
    match keep {
        true => dims[axis] = 1,
        false => drop(dims.remove(axis)),
    }
    let out = empty(&dims, Kind::Int64, x.device())?;
    let last = cx.flag("select_last_index");
    let axis = axis as i64;
    let operand = match last {
        true => flip(x, &[axis])?,
        false => x.alias(),
    };
    write(name, args![&operand, axis, keep, &out])?;
    if last {
        let end = scalar(Kind::Int64, (length - 1) as f64)?;
        write("aten::sub.out", args![&end, &out, 1, &out])?;
    }
    Ok(vec![out])
}

fn top_k(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let mut dims = x.size();
    let axis = cx.axis(dims.len());
    let k = cx.ints(1)?[0];
    dims[axis] = k;
    let values = empty(&dims, x.kind(), x.device())?;
    let indices = empty(&dims, Kind::Int64, x.device())?;
    let all = empty_like(x)?;
    let places = empty_as(x, Kind::Int64)?;
    write(
        "aten::sort.values_stable",
        args![x, true, axis as i64, cx.flag("largest"), &all, &places],
    )?;
    for (to, from) in [(&values, &all), (&indices, &places)] {
        copy_into(to, &from.narrow(axis as i64, 0, k))?;
    }
    if let Some(ties) = cx.ties.filter(|_| x.device() == Device::Cpu) {
        ties.set(has_tie(&all, axis, k as usize)?);
    }
    Ok(vec![values, indices])
}

/// Returns whether any two of the first `k + 1` elements of a sorted axis are equal.
fn has_tie(sorted: &Tensor, axis: usize, k: usize) -> Result<bool> {
    let dims = sorted.size();
    let (length, inner) = (
        dims[axis] as usize,
        dims[axis + 1..].iter().product::<i64>() as usize,
    );
    let (kind, size) = (
        sorted.kind(),
        bytes::element_bytes(sorted.kind()).map_err(torch_error)?,
    );
    let is_zero = |element: &[u8]| match element.split_last() {
        Some((last, rest)) if is_float(kind) => last & 0x7f == 0 && rest.iter().all(|b| *b == 0),
        _ => false,
    };
    let same = |a: &[u8], b: &[u8]| a == b || (is_zero(a) && is_zero(b));
    let pairs = k.min(length.saturating_sub(1));
    let row = inner * size;
    bytes::look(sorted, |content| {
        content.chunks_exact((length * row).max(1)).any(|block| {
            let (first, next) = (block.chunks_exact(size), block[row..].chunks_exact(size));
            first.zip(next).take(pairs * inner).any(|(a, b)| same(a, b))
        })
    })
    .map_err(torch_error)
}
