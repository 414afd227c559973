//! The gradient of `ReduceProd`, of which factors of 0 are cases of their own, and what its kernel takes.

use super::{EQUAL, REDUCE_PROD, known_axes, reduce_axes, sum_kept, with_kept_axes};
use crate::error::Result;
use crate::ir::DType;
use crate::ir::op::{Footprint, GradCx, MemoryCx, Sized, fresh};
use crate::ops::rules::{choose, emit, one_like};

/// Each factor gets the product of all the others: the whole product over the factor, except where a factor is 0. If it
/// is the only one, it gets the product of the rest, and the rest gets nothing; if it is not, nobody gets anything.
pub fn gradient(cx: &mut GradCx) -> Result<()> {
    let (x, axes) = (cx.x(0), known_axes(cx)?);
    let dtype = cx.ty(x).dtype;
    let dy = with_kept_axes(cx, cx.dy0())?;
    let (zero, one) = (cx.b.scalar(dtype, 0.0), one_like(cx.b, x));
    let is_zero = emit(cx.b, &EQUAL, &[x, zero])?;
    let rest = choose(cx.b, is_zero, one, x)?;
    let product = reduce_axes(cx.b, &REDUCE_PROD, rest, &axes, true)?;
    let dy = cx.b.mul(dy, product)?;
    let each = cx.b.div(dy, rest)?;
    // Counted in int64: exact for groups of any size.
    let counted = cx.b.cast(is_zero, DType::I64)?;
    let zeros = sum_kept(cx.b, counted, &axes)?;
    let (none, single) = (cx.b.int(0), cx.b.int(1));
    let none = emit(cx.b, &EQUAL, &[zeros, none])?;
    let single = emit(cx.b, &EQUAL, &[zeros, single])?;
    let reached = choose(cx.b, is_zero, single, none)?;
    let dx = choose(cx.b, reached, each, zero)?;
    cx.give(0, dx);
    Ok(())
}

/// `aten::prod` takes one axis at a time, from the last to the first; the last step writes into the result.
pub fn memory(cx: &MemoryCx) -> Footprint {
    let Some(x) = &cx.ins[0] else {
        return fresh(cx);
    };
    let rank = x.dims.len() as i64;
    let mut axes: Vec<i64> = match cx.ins.get(1) {
        Some(Some(axes)) => axes.ints.clone().unwrap_or_default(),
        _ => Vec::new(),
    };
    axes.iter_mut().for_each(|a| *a = a.rem_euclid(rank.max(1)));
    if axes.is_empty() && cx.attrs.int("noop_with_empty_axes") == 0 {
        axes = (0..rank).collect();
    }
    axes.sort_unstable();
    let (mut dims, mut before, mut temp_bytes) = (x.dims.clone(), 0, 0);
    for axis in axes.iter().skip(1).rev() {
        dims[*axis as usize] = 1;
        let partial = Sized::contiguous(x.dtype, dims.clone()).bytes();
        temp_bytes = temp_bytes.max(before + partial);
        before = partial;
    }
    Footprint {
        temp_bytes,
        ..fresh(cx)
    }
}
