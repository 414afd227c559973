//! Index tuples as positions along one axis, which turns a lookup by tuples into a lookup along an axis.
//!
//! The gradient of `GatherND` could be `ScatterND` with `reduction` = add, which is shorter. Runtimes add its updates on
//! several threads, though, and lose some where tuples repeat; the gradient of `Gather` has no such freedom.

use crate::names::*;
use crate::reduce::reduce_axes;
use crate::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::GradCx;
use ckpt_ir::{Attrs, Dim, ValueId};

/// The gradient of `GatherND(data, indices)`, whose first `batch_dims` axes go together.
pub fn grad_gather_nd(cx: &mut GradCx) -> Result<()> {
    let (x, indices, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let batch = cx.attrs().int("batch_dims") as usize;
    let Some(length) = cx.b.ty(indices).dims.last().and_then(Dim::as_const) else {
        return Err(no_rule(cx, "how many indices a tuple has is not known"));
    };
    let named = batch + length as usize;
    let position = positions(cx, batch, length as usize)?;
    // The named axes become one.
    let mut rows = cx.b.ints(&[1]);
    for axis in 0..named {
        let size = size(cx, x, axis)?;
        rows = cx.b.mul(rows, size)?;
    }
    let rest = span(cx, x, named, cx.b.rank(x))?;
    let flat = cx.b.concat(&[rows, rest], 0)?;
    let axis = Attrs::new().with("axis", 0);
    let operands = [flat, position, dy];
    let dx = cx.b.emit(GATHER_GRAD, &operands, axis)?;
    let shape = cx.b.shape(x)?;
    let dx = cx.b.reshape_to(dx, shape)?;
    cx.give(0, dx);
    Ok(())
}

/// Where each tuple points to along the named axes taken as one, not negative: the shape of the indices without the
/// last axis.
fn positions(cx: &mut GradCx, batch: usize, length: usize) -> Result<ValueId> {
    let (x, indices) = (cx.x(0), cx.x(1));
    let mut strides = Vec::new();
    let mut stride = cx.b.ints(&[1]);
    for axis in (batch..batch + length).rev() {
        strides.insert(0, stride);
        let size = size(cx, x, axis)?;
        stride = cx.b.mul(stride, size)?;
    }
    let strides = match strides.is_empty() {
        true => cx.b.ints(&[]),
        false => cx.b.concat(&strides, 0)?,
    };
    let sizes = span(cx, x, batch, batch + length)?;
    // A remainder has the sign of its divisor: -1 is the last.
    let inside = cx.b.op(MOD, &[indices, sizes])?;
    let scaled = cx.b.mul(inside, strides)?;
    let last = cx.b.rank(indices) - 1;
    let own = reduce_axes(cx.b, REDUCE_SUM, scaled, &[last], false)?;
    if batch == 0 {
        return Ok(own);
    }
    // Each batch has its own stretch, as long as the stride before the first index.
    let mut batches = cx.b.ints(&[1]);
    for axis in 0..batch {
        let size = size(cx, indices, axis)?;
        batches = cx.b.mul(batches, size)?;
    }
    let count = cx.b.reshape(batches, &[])?;
    let number = cx.b.counted(count)?;
    let begin = cx.b.mul(number, stride)?;
    let head = span(cx, indices, 0, batch)?;
    let ones = cx.b.ints(&vec![1; last - batch]);
    let begin = cx.b.reshape_to_all(begin, &[head, ones])?;
    cx.b.add(own, begin)
}

/// Sizes of the axes `from..to`: int64 [to − from].
fn span(cx: &mut GradCx, v: ValueId, from: usize, to: usize) -> Result<ValueId> {
    let attrs = Attrs::new()
        .with("start", from as i64)
        .with("end", to as i64);
    cx.b.emit(SHAPE, &[v], attrs)
}

/// The size of one axis: int64 [1].
fn size(cx: &mut GradCx, v: ValueId, axis: usize) -> Result<ValueId> {
    span(cx, v, axis, axis + 1)
}
