//! Rules of layout ops: axes given as operands, known contents read through strides, views.

use ckpt_ir::error::Result;
use ckpt_ir::layout::count;
use ckpt_ir::op::{Footprint, InferCx, MemoryCx, Place, Sized, fresh};
use ckpt_ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_ir::{DType, Dim, Ty};

/// Checks that a given operand is an integer vector; returns its length, where known.
pub fn int_vector(cx: &InferCx, slot: usize) -> Result<Option<usize>> {
    let ty = cx.ty(slot)?;
    if !matches!(ty.dtype, DType::I64 | DType::I32) || ty.rank() != 1 {
        let name = cx.op.ins.get(slot).map_or("?", |s| s.name);
        return Err(cx
            .fail(
                "type",
                format!("operand `{name}` is not a vector of integers"),
            )
            .found(ty.to_string()));
    }
    Ok(ty.dims[0].as_const().and_then(|n| usize::try_from(n).ok()))
}

/// The axes an optional operand lists, as `0..rank`, in its order; `None` where it is not given.
///
/// # Errors
/// Axes that are not constants, out of range, or listed twice: the rank of the result would not be known.
pub fn const_axes(cx: &InferCx, slot: usize, rank: usize) -> Result<Option<Vec<usize>>> {
    if cx.opt_ty(slot).is_none() {
        return Ok(None);
    }
    int_vector(cx, slot)?;
    let listed = cx
        .const_ints(slot)
        .ok_or_else(|| cx.fail("shape", "axes that are not constants are not supported"))?;
    let mut axes = Vec::with_capacity(listed.len());
    for axis in listed {
        let axis = cx.axis(axis, rank)?;
        if axes.contains(&axis) {
            return Err(cx.fail("axis", format!("axis {axis} is listed twice")));
        }
        axes.push(axis);
    }
    Ok(Some(axes))
}

/// Axes that typing has checked, as `0..rank`.
pub fn known_axes(listed: Option<&[i64]>, rank: usize) -> Vec<usize> {
    let from_end = |a: &i64| if *a < 0 { a + rank as i64 } else { *a } as usize;
    listed.unwrap_or_default().iter().map(from_end).collect()
}

/// Contents of `dims` elements read from `ints` through `strides`; `None` above the size that is looked into.
pub fn strided_contents(
    ints: &[Dim],
    dims: &[i64],
    strides: &[i64],
    offset: i64,
) -> Option<Vec<Dim>> {
    let total = count(dims);
    if u64::try_from(total).ok()? > MAX_KNOWN_ELEMENTS {
        return None;
    }
    (0..total)
        .map(|flat| {
            let (mut rest, mut at) = (flat, offset);
            for (dim, stride) in dims.iter().zip(strides).rev() {
                at += rest % dim * stride;
                rest /= dim;
            }
            ints.get(usize::try_from(at).ok()?).cloned()
        })
        .collect()
}

/// For ops whose result has the operand's contents in the operand's order.
pub fn fold_same(cx: &InferCx, _: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    Some(vec![cx.ints(0)?.to_vec()])
}

/// A view of operand `of`, nothing else taken.
pub fn view(of: usize, strides: Vec<i64>) -> Footprint {
    Footprint::new(vec![Place::View { of, strides }])
}

/// A view of the first operand through the strides that `f` finds.
pub fn view_of_first(cx: &MemoryCx, f: impl FnOnce(&Sized) -> Vec<i64>) -> Footprint {
    match cx.ins.first() {
        Some(Some(x)) => view(0, f(x)),
        _ => fresh(cx),
    }
}
