//! The largest element of each window.

use super::context::*;
use ckpt_passes::ops::pool::*;

/// The kernel for max pooling; its gradient consists of other ops.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&MAX_POOL, max_pool)];

/// Reduces axis by axis from the last. Of equal elements this selects the first in row-major order.
fn max_pool(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let all = Windows::of(cx.attrs);
    if x.numel() == 0 {
        let mut dims = x.size();
        for (dim, windows) in dims[2..].iter_mut().zip(&all) {
            *dim = windows.count(*dim);
        }
        let kinds = [x.kind(), Kind::Int64].into_iter().take(cx.n_outs);
        return kinds.map(|kind| empty(&dims, kind, x.device())).collect();
    }
    let by_column = cx.flag("storage_order");
    let (mut values, mut places) = (x.alias(), None);
    for (i, windows) in all.iter().enumerate().rev() {
        let axis = i + 2;
        let size = x.size();
        // The distance of neighbours along this axis in the image.
        let step: i64 = if by_column {
            size[2..axis].iter().product()
        } else {
            size[axis + 1..].iter().product()
        };
        (values, places) = along(&values, places, windows, axis, step)?;
    }
    let Some(places) = places else {
        return Ok(vec![values]);
    };
    // Places so far are within one image of one channel.
    let image: i64 = x.size()[2..].iter().product();
    let images = x.size()[0] * x.size()[1];
    let mut column = vec![1; x.dim()];
    (column[0], column[1]) = (x.size()[0], x.size()[1]);
    let first = Tensor::arange(images, (Kind::Int64, x.device())).view(column.as_slice());
    scale_and_add(&places, &first, image)?;
    Ok(vec![values, places].into_iter().take(cx.n_outs).collect())
}

/// `to` += `factor`·`from`, in place.
fn scale_and_add(to: &Tensor, from: &Tensor, factor: i64) -> Result<()> {
    write("aten::add_.Tensor", args![to, from, factor])
}

/// Returns the largest element of each window along one axis, and its place: `step` times its index on the axis, plus its entry
/// in `places`.
fn along(
    x: &Tensor,
    places: Option<Tensor>,
    windows: &Windows,
    axis: usize,
    step: i64,
) -> Result<(Tensor, Option<Tensor>)> {
    let size = x.size();
    let count = windows.count(size[axis]);
    let reach = windows.reach(size[axis], count);
    let mut padded_size = size.clone();
    padded_size[axis] = reach;
    let padded = if reach == size[axis] && windows.before == 0 && x.is_contiguous() {
        x.alias()
    } else {
        let padded = empty(&padded_size, x.kind(), x.device())?;
        let least = scalar(x.kind(), f64::NEG_INFINITY)?;
        fill(&padded, &least)?;
        let inner = padded.narrow(axis as i64, windows.before, size[axis]);
        copy_into(&inner, x)?;
        padded
    };
    let mut out_size = size.clone();
    out_size[axis] = count;
    let values = empty(&out_size, x.kind(), x.device())?;
    let taps = empty(&out_size, Kind::Int64, x.device())?;
    let (mut dims, mut strides) = (out_size.clone(), padded.stride());
    dims.push(windows.kernel);
    strides.push(strides[axis] * windows.dilation);
    strides[axis] *= windows.stride;
    let view = padded.as_strided(dims.as_slice(), strides.as_slice(), None);
    write(
        "aten::max.dim_max",
        args![&view, size.len() as i64, false, &values, &taps],
    )?;
    drop((view, padded));
    // The index on the axis is tap·dilation + window·stride − padding. If padding is selected, all elements are −∞, and the index
    // is clamped to the nearest element.
    let mut column = vec![1; size.len()];
    column[axis] = count;
    let starts = Tensor::arange(count, (Kind::Int64, x.device())).view(column.as_slice());
    scaled(&taps, windows.dilation)?;
    scale_and_add(&taps, &starts, windows.stride)?;
    drop(starts);
    let before = scalar(Kind::Int64, windows.before as f64)?;
    sub_into(&taps, &before)?;
    write("aten::clamp_", args![&taps, 0, size[axis] - 1])?;
    let Some(places) = places else {
        scaled(&taps, step)?;
        return Ok((values, Some(taps)));
    };
    let found = empty(&out_size, Kind::Int64, x.device())?;
    write(
        "aten::gather.out",
        args![&places, axis as i64, &taps, false, &found],
    )?;
    scale_and_add(&found, &taps, step)?;
    Ok((values, Some(found)))
}

/// `v` *= `factor`, in place.
fn scaled(v: &Tensor, factor: i64) -> Result<()> {
    let factor = scalar(Kind::Int64, factor as f64)?;
    mul_into(v, &factor)
}
