//! Joining, splitting, repeating and padding.

use super::context::*;
use ckpt_passes::ops::concat::*;

kernels! {
    CONCAT => concat;
    SPLIT => split;
    TILE => tile;
    PAD => pad;
}

fn concat(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let parts = cx.all();
    let first = cx.x(0)?;
    let axis = cx.axis(first.dim());
    let mut size = first.size();
    size[axis] = parts.iter().map(|p| p.size()[axis]).sum();
    let out = empty(&size, first.kind(), first.device())?;
    let mut at = 0;
    for part in parts {
        let length = part.size()[axis];
        let place = narrow(&out, axis as i64, at, length)?;
        if place.size() != part.size() {
            return Err(cx.misfit(format!("{:?} beside {:?}", part.size(), first.size())));
        }
        copy_into(&place, part)?;
        at += length;
    }
    Ok(vec![out])
}

fn split(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let axis = cx.axis(x.dim());
    let total = x.size()[axis];
    let sizes = match cx.opt(1) {
        Some(_) => cx.ints(1)?,
        None => {
            // Equal parts, the last one smaller (ONNX Split-18).
            let n = cx.attrs.opt_int("num_outputs");
            let n = n.unwrap_or(cx.n_outs as i64).max(1);
            let each = (total + n - 1) / n;
            (0..n).map(|i| (total - i * each).clamp(0, each)).collect()
        }
    };
    if sizes.iter().sum::<i64>() != total || sizes.len() != cx.n_outs {
        return Err(cx.misfit(format!("{total} into {sizes:?}")));
    }
    let mut at = 0;
    let mut outs = Vec::new();
    for size in sizes {
        outs.push(narrow(x, axis as i64, at, size)?);
        at += size;
    }
    Ok(outs)
}

fn pad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let pads = cx.ints(1)?;
    let axes = cx.axes(3, x.dim())?;
    let axes = axes.unwrap_or_else(|| (0..x.dim()).collect());
    let n = axes.len();
    let size = x.size();
    let mut out_size = size.clone();
    // Source and target of the part that is kept; a negative pad cuts.
    let mut kept = x.alias();
    let mut place_at = vec![0; size.len()];
    for (i, axis) in axes.iter().enumerate() {
        let (before, after) = (pads[i], pads[i + n]);
        out_size[*axis] = size[*axis] + before + after;
        if out_size[*axis] < 0 {
            return Err(cx.misfit(format!("{size:?} padded by {pads:?}")));
        }
        let start = (-before).max(0);
        let length = (size[*axis] - start - (-after).max(0)).max(0);
        kept = narrow(&kept, *axis as i64, start.min(size[*axis]), length)?;
        place_at[*axis] = before.max(0);
    }
    let out = empty(&out_size, x.kind(), x.device())?;
    match cx.opt(2) {
        Some(value) => fill(&out, &value.reshape(&[] as &[i64]))?,
        None => zero(&out)?,
    };
    let mut place = out.alias();
    for (axis, at) in place_at.iter().enumerate() {
        place = narrow(&place, axis as i64, *at, kept.size()[axis])?;
    }
    copy_into(&place, &kept)?;
    Ok(vec![out])
}

fn tile(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let repeats = cx.ints(1)?;
    let dims: Vec<i64> = x.size().iter().zip(&repeats).map(|(d, r)| d * r).collect();
    let out = empty(&dims, x.kind(), x.device())?;
    // Views every axis as (repeats, size), so that one copy of a broadcast view suffices.
    let mut tiles = Vec::new();
    for (size, times) in x.size().iter().zip(&repeats) {
        tiles.extend([*times, *size]);
    }
    let mut source = x.alias();
    for axis in 0..x.dim() {
        source = source.unsqueeze(2 * axis as i64);
    }
    copy_into(&out.view(tiles.as_slice()), &source)?;
    Ok(vec![out])
}
