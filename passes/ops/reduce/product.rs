//! The gradient of `ReduceProd`, of which factors of 0 are cases of their own, and what its kernel takes.

use super::{EQUAL, REDUCE_PROD, known_axes, reduce_axes, sum_kept, with_kept_axes};
use crate::error::Result;
use crate::ir::op::{Footprint, GradCx, MemoryCx, Sized, fresh};
use crate::ir::{DType, ValueId};
use crate::ops::rule::*;

/// Each factor gets the product of all the others: the whole product over the factor, except where a factor is 0. If it
/// is the only one, it gets the product of the rest, and the rest gets nothing; if it is not, nobody gets anything.
pub fn gradient(cx: &mut GradCx) -> Result<ValueId> {
    let (x, axes) = (cx.operand(0), known_axes(cx)?);
    let dy = with_kept_axes(cx, cx.dy0())?;
    let [zero, one] = [0.0, 1.0].map(|n| cx.number(x, n));
    let is_zero = cx.bind(binary_op(&EQUAL, x, zero))?;
    let rest = cx.bind(select(is_zero, one, x))?;
    let product = reduce_axes(cx.b, &REDUCE_PROD, rest, &axes, true)?;
    let each = cx.bind(dy * product / rest)?;
    // Counted in int64: exact for groups of any size.
    let zeros = Term(sum_kept(cx.b, cast(is_zero, DType::I64), &axes)?);
    let [none, single] = [0, 1].map(|n| cx.b.int(n));
    let none = cx.bind(binary_op(&EQUAL, zeros, none))?;
    let single = binary_op(&EQUAL, zeros, single);
    let reached = select(is_zero, single, none);
    cx.eval(select(reached, each, zero))
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
    fresh(cx).with_temp(temp_bytes)
}
