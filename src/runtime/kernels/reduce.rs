//! Reductions over axes.

use super::context::*;
use ckpt_passes::ops::reduce::*;

kernels! {
    REDUCE_SUM => reduce(total);
    REDUCE_MEAN => reduce(mean);
    REDUCE_MAX => reduce(|x, axes, keep, out| extreme("aten::amax.out", f64::NEG_INFINITY, x, axes, keep, out));
    REDUCE_MIN => reduce(|x, axes, keep, out| extreme("aten::amin.out", f64::INFINITY, x, axes, keep, out));
    REDUCE_PROD => reduce(product);
    REDUCE_SUM_SQUARE => reduce(sum_square);
    REDUCE_L1 => reduce(|x, axes, keep, out| norm(1, x, axes, keep, out));
    REDUCE_L2 => reduce(|x, axes, keep, out| norm(2, x, axes, keep, out));
    REDUCE_LOG_SUM_EXP => reduce(|x, axes, keep, out| write("aten::logsumexp.out", args![x, axes, keep, out]));
}

/// Reduces `x` over `axes` (at least one) into `out`.
type Reduction = fn(&Tensor, &[i64], bool, &Tensor) -> Result<()>;

/// Sums `x` over ascending `axes` into row-major `out`. On a device, sums of columns are products with ones.
fn total(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    if !backend(x).is_host() && x.kind() == out.kind() {
        let places: Vec<usize> = axes.iter().map(|a| *a as usize).collect();
        if is_product_with_ones(&sized(x)?, &places) {
            let columns = out.numel() as i64;
            let rows = x.numel() as i64 / columns;
            let ones = empty(&[1, rows], x.kind(), x.device())?;
            write("aten::fill_.Scalar", args![&ones, 1.0])?;
            let (x, out) = (x.view([rows, columns]), out.view([1, columns]));
            return write("aten::mm.out", args![&ones, &x, &out]);
        }
    }
    sum(x, axes, keep, out)
}

/// Sums `x` over `axes` into `out`.
pub fn sum(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    write(
        "aten::sum.IntList_out",
        args![x, axes, keep, Arg::None, out],
    )
}

/// Sums `x` into `out` over the axes along which `out` would be broadcast to the sizes of `x`.
pub fn sum_to(x: &Tensor, out: &Tensor) -> Result<()> {
    sum_down(x, out, sum)
}

/// As [`sum_to`], by [`total`].
pub fn total_to(x: &Tensor, out: &Tensor) -> Result<()> {
    sum_down(x, out, total)
}

fn sum_down(x: &Tensor, out: &Tensor, sum: Reduction) -> Result<()> {
    let full = x.size();
    let lead = full.len() - out.dim();
    let kept: Vec<i64> = std::iter::repeat_n(1, lead).chain(out.size()).collect();
    let is_summed = |i: &usize| *i < lead || (kept[*i] == 1 && full[*i] != 1);
    let axes = (0..full.len()).filter(is_summed).map(|i| i as i64);
    let axes: Vec<i64> = axes.collect();
    let target = out.view(kept.as_slice());
    match axes.is_empty() {
        true => copy_into(&target, x),
        false => sum(x, &axes, true, &target),
    }
}

fn sum_square(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    let square = empty_like(x)?;
    write("aten::mul.out", args![x, x, &square])?;
    sum(&square, axes, keep, out)
}

/// Reduces to the smallest or largest element. An empty group gives `of_nothing`, the lowest or highest number of the type.
fn extreme(
    name: &str,
    of_nothing: f64,
    x: &Tensor,
    axes: &[i64],
    keep: bool,
    out: &Tensor,
) -> Result<()> {
    if x.numel() > 0 || out.numel() == 0 {
        return write(name, args![x, axes, keep, out]);
    }
    let end = match out.kind() {
        Kind::Bool => scalar(Kind::Bool, of_nothing.max(0.0))?,
        kind => scalar(kind, of_nothing)?,
    };
    fill(out, &end)
}

fn norm(order: i64, x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    let args = args![x, order, axes, keep, Arg::None, out];
    write("aten::linalg_vector_norm.out", args)
}

/// Divides the sum by the number of elements. 16-bit operands go to `aten::mean`, which computes in float32.
fn mean(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    if is_narrow(x.kind()) {
        return write("aten::mean.out", args![x, axes, keep, Arg::None, out]);
    }
    sum(x, axes, keep, out)?;
    let size = x.size();
    let n: i64 = axes.iter().map(|a| size[*a as usize]).product();
    div_into(out, &scalar(out.kind(), n as f64)?)
}

/// Multiplies along one axis at a time, from the last to the first, as libtorch can. The last step writes into the result.
fn product(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    let mut partial = x.alias();
    for axis in sorted[1..].iter().rev() {
        partial = call(
            "aten::prod.dim_int",
            args![&partial, *axis, keep, Arg::None],
        )?;
    }
    write(
        "aten::prod.int_out",
        args![&partial, sorted[0], keep, Arg::None, out],
    )
}

/// ONNX: no axes means all of them, unless `noop_with_empty_axes` makes it none.
fn reduce(cx: &KernelCx, reduction: Reduction) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let mut axes = cx.axes(1, size.len())?.unwrap_or_default();
    axes.sort_unstable();
    if axes.is_empty() && !cx.flag("noop_with_empty_axes") {
        axes = (0..size.len()).collect();
    }
    if axes.is_empty() {
        // A reduction over no axis is one over an axis of size 1.
        let out = empty_like(x)?;
        reduction(&x.unsqueeze(-1), &[x.dim() as i64], false, &out)?;
        return Ok(vec![out]);
    }
    let keep = cx.flag("keepdims");
    let kept = size
        .iter()
        .enumerate()
        .filter_map(|(i, size)| match axes.contains(&i) {
            true => keep.then_some(1),
            false => Some(*size),
        });
    let dims: Vec<i64> = kept.collect();
    let out = empty(&dims, x.kind(), x.device())?;
    let axes: Vec<i64> = axes.into_iter().map(|a| a as i64).collect();
    reduction(x, &axes, keep, &out)?;
    Ok(vec![out])
}
