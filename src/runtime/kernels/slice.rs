//! Slices and their gradient. A slice is a view if every step is positive, else a copy.

use super::context::*;
use ckpt_passes::ir::layout::slice_span;
use ckpt_passes::ops::slice::*;

/// The kernels for slices and their gradient.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&SLICE, slice), (&SLICE_GRAD, slice_grad)];

/// One axis of a slice: first position, step, and how many.
struct Span {
    axis: usize,
    start: i64,
    step: i64,
    length: i64,
}

/// Returns the span that a slice takes of each axis of a tensor of `size`.
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
            .ok_or_else(|| cx.misfit(format!("axis {axis} of {size:?}")))?;
        if *step == 0 {
            return Err(cx.misfit("a step of 0"));
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
    let axes = cx.axes(3, x.dim())?;
    let axes = axes.unwrap_or_else(|| (0..starts.len()).collect());
    let steps = match cx.opt(4) {
        Some(_) => cx.ints(4)?,
        None => vec![1; starts.len()],
    };
    let spans = spans(cx, &x.size(), &starts, &ends, &axes, &steps)?;
    let view = view_of(x, &spans)?;
    let backward = backward(&spans);
    if backward.is_empty() {
        return Ok(vec![view]);
    }
    Ok(vec![flip(&dense(&view)?, &backward)?])
}

/// Returns the axes with negative steps.
fn backward(spans: &[Span]) -> Vec<i64> {
    let backward = spans.iter().filter(|s| s.step < 0);
    backward.map(|s| s.axis as i64).collect()
}

/// Returns the view of a slice, with all steps taken as positive.
fn view_of(x: &Tensor, spans: &[Span]) -> Result<Tensor> {
    let mut view = x.alias();
    for span in spans {
        let last = span.start + (span.length - 1) * span.step;
        let (start, end) = match span.length {
            0 => (0, 0),
            _ => (span.start.min(last), span.start.max(last) + 1),
        };
        view = call(
            "aten::slice.Tensor",
            args![&view, span.axis as i64, start, end, span.step.abs()],
        )?;
    }
    Ok(view)
}

/// Makes zeros of the operand's shape with the cotangent at the slice.
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
    let out = empty(&size, dy.kind(), dy.device())?;
    zero(&out)?;
    let backward = backward(&spans);
    let dy = match backward.is_empty() {
        true => dy.alias(),
        false => flip(dy, &backward)?,
    };
    copy_into(&view_of(&out, &spans)?, &dy)?;
    Ok(vec![out])
}
