//! Slices: views where every step is positive, copies otherwise; and the gradient of a slice.

use super::shape::{axes_of, mismatch};
use super::{Kernel, KernelCx, call, empty, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ir::layout::slice_span;
use ckpt_passes::ops::slice::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&SLICE, slice), (&SLICE_GRAD, slice_grad)];

/// One axis of a slice: first position, step, and how many.
struct Span {
    axis: usize,
    start: i64,
    step: i64,
    length: i64,
}

/// What a slice takes along each axis of a tensor of `size`.
fn spans(
    cx: &KernelCx,
    size: &[i64],
    starts: &[i64],
    ends: &[i64],
    axes: &[usize],
    steps: &[i64],
) -> Result<Vec<Span>> {
    let mut spans = Vec::new();
    for (((axis, start), end), step) in axes.iter().zip(starts).zip(ends).zip(steps) {
        let n = *size
            .get(*axis)
            .ok_or_else(|| mismatch(cx, &format!("axis {axis} of {size:?}")))?;
        if *step == 0 {
            return Err(mismatch(cx, "a step of 0"));
        }
        let (start, length) = slice_span(n, *start, *end, *step);
        spans.push(Span {
            axis: *axis,
            start,
            step: *step,
            length,
        });
    }
    Ok(spans)
}

fn slice(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let (starts, ends) = (cx.ints(1)?, cx.ints(2)?);
    let axes = match cx.opt(3) {
        Some(_) => axes_of(&cx.ints(3)?, x.dim()),
        None => (0..starts.len()).collect(),
    };
    let steps = match cx.opt(4) {
        Some(_) => cx.ints(4)?,
        None => vec![1; starts.len()],
    };
    let spans = spans(cx, &x.size(), &starts, &ends, &axes, &steps)?;
    if spans.iter().any(|s| s.step < 0) {
        let mut out = x.alias();
        for span in &spans {
            out = picked(&out, span)?;
        }
        return Ok(vec![contiguous(&out)?]);
    }
    Ok(vec![view_of(x, &spans)?])
}

/// The view of a slice with positive steps.
fn view_of(x: &Tensor, spans: &[Span]) -> Result<Tensor> {
    let mut view = x.alias();
    for span in spans {
        let end = if span.length == 0 {
            span.start
        } else {
            span.start + (span.length - 1) * span.step + 1
        };
        let args = [
            Arg::Tensor(&view),
            Arg::Int(span.axis as i64),
            Arg::Int(span.start),
            Arg::Int(end),
            Arg::Int(span.step),
        ];
        view = call("aten::slice", "Tensor", &args)?;
    }
    Ok(view)
}

fn positions(span: &Span) -> Tensor {
    let at: Vec<i64> = (0..span.length)
        .map(|i| span.start + i * span.step)
        .collect();
    Tensor::from_slice(&at)
}

fn picked(x: &Tensor, span: &Span) -> Result<Tensor> {
    call(
        "aten::index_select",
        "",
        &[
            Arg::Tensor(x),
            Arg::Int(span.axis as i64),
            Arg::Tensor(&positions(span)),
        ],
    )
}

fn contiguous(x: &Tensor) -> Result<Tensor> {
    call("aten::contiguous", "", &[Arg::Tensor(x)])
}

/// Zeros of the operand's shape, with the cotangent at the slice.
fn slice_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let dy = cx.x(0)?;
    let size = cx.ints(1)?;
    let axes = axes_of(cx.attrs.ints("axes"), size.len());
    let spans = spans(
        cx,
        &size,
        &cx.ints(2)?,
        &cx.ints(3)?,
        &axes,
        cx.attrs.ints("steps"),
    )?;
    let out = empty(&size, dy.kind(), dy.device());
    write("aten::zero_", "", &[Arg::Tensor(&out)])?;
    if spans.iter().all(|s| s.step > 0) {
        write(
            "aten::copy_",
            "",
            &[
                Arg::Tensor(&view_of(&out, &spans)?),
                Arg::Tensor(dy),
                Arg::Bool(false),
            ],
        )?;
        return Ok(vec![out]);
    }
    let flat =
        Tensor::arange(size.iter().product::<i64>(), (Kind::Int64, dy.device())).reshape(&size);
    let mut at = flat;
    for span in &spans {
        at = picked(&at, span)?;
    }
    let (at, values) = (at.reshape([-1]), dy.reshape([-1]));
    let lines = out.view([-1]);
    write(
        "aten::scatter_",
        "src",
        &[
            Arg::Tensor(&lines),
            Arg::Int(0),
            Arg::Tensor(&at),
            Arg::Tensor(&values),
        ],
    )?;
    Ok(vec![out])
}
