//! What the operand of `LayerNormalization` gets from readers of its statistics, of which the gradient is one.

use super::*;
use crate::ops::reduce::count_along;
use crate::ops::shape::EXPAND;

/// With mean μ and inverse deviation s of rows of n elements: dx = dμ/n − (x − μ)·ds·s³/n.
pub fn give(cx: &mut GradCx) -> Result<()> {
    if cx.dy(1).is_none() && cx.dy(2).is_none() {
        return Ok(());
    }
    let ty = cx.ty(cx.x(0));
    let dtype = compute_type(ty.dtype);
    let axes: Vec<usize> = (axis_of(&cx.attrs(), ty.rank())..ty.rank()).collect();
    let count = count_along(cx, &axes)?;
    let mut dx = None;
    if let Some(dmean) = cx.dy(1) {
        let dmean = cx.b.cast(dmean, dtype)?;
        let share = cx.b.div(dmean, count)?;
        let shape = cx.b.shape(cx.x(0))?;
        dx = Some(emit(cx.b, &EXPAND, &[share, shape])?);
    }
    if let Some(ds) = cx.dy(2) {
        let (ds, s) = (cx.b.cast(ds, dtype)?, cx.b.cast(cx.y(2), dtype)?);
        let square = cx.b.mul(s, s)?;
        let cube = cx.b.mul(square, s)?;
        let slope = cx.b.mul(ds, cube)?;
        let share = cx.b.div(slope, count)?;
        let (x, mean) = (widen(cx.b, cx.x(0))?, cx.b.cast(cx.y(1), dtype)?);
        let centred = cx.b.sub(x, mean)?;
        let part = cx.b.mul(centred, share)?;
        dx = Some(match dx {
            Some(so_far) => cx.b.sub(so_far, part)?,
            None => cx.b.neg(part)?,
        });
    }
    if let Some(dx) = dx {
        let dx = cx.b.cast(dx, ty.dtype)?;
        cx.give(0, dx);
    }
    Ok(())
}
