//! Reductions over axes.

use super::shape::axes_of;
use super::{Kernel, KernelCx, call, empty, scalar, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::reduce::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&REDUCE_SUM, |cx| {
        reduce(cx, |x, axes, keep, out| sum(x, axes, keep, out))
    }),
    (&REDUCE_MEAN, |cx| reduce(cx, mean)),
    (&REDUCE_MAX, |cx| {
        reduce(cx, |x, axes, keep, out| {
            extreme("aten::amax", f64::NEG_INFINITY, x, axes, keep, out)
        })
    }),
    (&REDUCE_MIN, |cx| {
        reduce(cx, |x, axes, keep, out| {
            extreme("aten::amin", f64::INFINITY, x, axes, keep, out)
        })
    }),
    (&REDUCE_PROD, |cx| reduce(cx, product)),
    (&REDUCE_SUM_SQUARE, |cx| {
        reduce(cx, |x, axes, keep, out| {
            let square = empty(&x.size(), x.kind(), x.device())?;
            write(
                "aten::mul",
                "out",
                &[Arg::Tensor(x), Arg::Tensor(x), Arg::Tensor(&square)],
            )?;
            sum(&square, axes, keep, out)
        })
    }),
    (&REDUCE_L1, |cx| {
        reduce(cx, |x, axes, keep, out| norm(1, x, axes, keep, out))
    }),
    (&REDUCE_L2, |cx| {
        reduce(cx, |x, axes, keep, out| norm(2, x, axes, keep, out))
    }),
    (&REDUCE_LOG_SUM_EXP, |cx| {
        reduce(cx, |x, axes, keep, out| {
            dims_out("aten::logsumexp", "out", x, axes, &[Arg::Bool(keep)], out)
        })
    }),
];

/// Reduces `x` over `axes` (at least one) into `out`.
type Reduction = fn(&Tensor, &[i64], bool, &Tensor) -> Result<()>;

fn dims_out(
    name: &str,
    overload: &str,
    x: &Tensor,
    axes: &[i64],
    rest: &[Arg],
    out: &Tensor,
) -> Result<()> {
    let mut args = vec![Arg::Tensor(x), Arg::Ints(axes)];
    args.extend_from_slice(rest);
    args.push(Arg::Tensor(out));
    write(name, overload, &args)
}

pub fn sum(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    dims_out(
        "aten::sum",
        "IntList_out",
        x,
        axes,
        &[Arg::Bool(keep), Arg::None],
        out,
    )
}

/// `of_nothing` is what an empty group gives: the end of the element type's range on that side.
fn extreme(
    name: &str,
    of_nothing: f64,
    x: &Tensor,
    axes: &[i64],
    keep: bool,
    out: &Tensor,
) -> Result<()> {
    if x.numel() > 0 || out.numel() == 0 {
        return dims_out(name, "out", x, axes, &[Arg::Bool(keep)], out);
    }
    let end = match out.kind() {
        Kind::Bool => scalar(Kind::Bool, of_nothing.max(0.0))?,
        kind => scalar(kind, of_nothing)?,
    };
    write(
        "aten::fill_",
        "Tensor",
        &[Arg::Tensor(out), Arg::Tensor(&end)],
    )
}

fn norm(order: i64, x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    let args = [
        Arg::Tensor(x),
        Arg::Int(order),
        Arg::Ints(axes),
        Arg::Bool(keep),
        Arg::None,
        Arg::Tensor(out),
    ];
    write("aten::linalg_vector_norm", "out", &args)
}

/// The sum over the number of elements; 16-bit operands as `aten::mean` takes them, in float32.
fn mean(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    if matches!(x.kind(), Kind::Half | Kind::BFloat16) {
        let rest = [Arg::Bool(keep), Arg::None];
        return dims_out("aten::mean", "out", x, axes, &rest, out);
    }
    sum(x, axes, keep, out)?;
    let size = x.size();
    let n: i64 = axes.iter().map(|a| size[*a as usize]).product();
    let n = scalar(out.kind(), n as f64)?;
    write("aten::div_", "Tensor", &[Arg::Tensor(out), Arg::Tensor(&n)])
}

/// libtorch multiplies along one axis at a time: from the last to the first, the last step into the result.
fn product(x: &Tensor, axes: &[i64], keep: bool, out: &Tensor) -> Result<()> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    let mut partial = x.alias();
    for axis in sorted[1..].iter().rev() {
        let args = [
            Arg::Tensor(&partial),
            Arg::Int(*axis),
            Arg::Bool(keep),
            Arg::None,
        ];
        partial = call("aten::prod", "dim_int", &args)?;
    }
    let args = [
        Arg::Tensor(&partial),
        Arg::Int(sorted[0]),
        Arg::Bool(keep),
        Arg::None,
        Arg::Tensor(out),
    ];
    write("aten::prod", "int_out", &args)
}

/// ONNX: no axes means all of them, unless `noop_with_empty_axes` makes it none.
fn reduce(cx: &KernelCx, reduction: Reduction) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let size = x.size();
    let mut axes = match cx.opt(1) {
        Some(_) => axes_of(&cx.ints(1)?, size.len()),
        None => Vec::new(),
    };
    axes.sort_unstable();
    let keep = cx.attrs.int("keepdims") != 0;
    if axes.is_empty() {
        if cx.attrs.int("noop_with_empty_axes") != 0 && cx.op != &REDUCE_SUM_SQUARE {
            return elementwise(cx, x, reduction);
        }
        axes = if cx.attrs.int("noop_with_empty_axes") != 0 {
            Vec::new()
        } else {
            (0..size.len()).collect()
        };
    }
    if axes.is_empty() {
        return elementwise(cx, x, reduction);
    }
    let dims: Vec<i64> = (0..size.len())
        .filter_map(|i| match (axes.contains(&i), keep) {
            (true, true) => Some(1),
            (true, false) => None,
            (false, _) => Some(size[i]),
        })
        .collect();
    let out = empty(&dims, x.kind(), x.device())?;
    let axes: Vec<i64> = axes.into_iter().map(|a| a as i64).collect();
    reduction(x, &axes, keep, &out)?;
    Ok(vec![out])
}

/// A reduction over no axis is one over an axis of size 1.
fn elementwise(_: &KernelCx, x: &Tensor, reduction: Reduction) -> Result<Vec<Tensor>> {
    let out = empty(&x.size(), x.kind(), x.device())?;
    reduction(&x.unsqueeze(-1), &[x.dim() as i64], false, &out)?;
    Ok(vec![out])
}
