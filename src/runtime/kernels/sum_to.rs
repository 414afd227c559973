//! The adjoint of broadcasting.

use super::context::*;
use super::reduce::total_to;
use ckpt_passes::ops::sum_to::*;

/// The kernel of `SumToShape`.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&SUM_TO_SHAPE, sum_to_shape)];

/// Sums over the axes along which the target shape was broadcast.
fn sum_to_shape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let (size, target) = (x.size(), cx.ints(1)?);
    let lead = size.len().checked_sub(target.len());
    let fits = lead.is_some_and(|lead| {
        target
            .iter()
            .zip(&size[lead..])
            .all(|(t, s)| *t == 1 || t == s)
    });
    if !fits {
        let error = cx.shape_error("the target does not broadcast to the operand");
        return Err(error.found(format!("{size:?} to {target:?}")));
    }
    let out = empty(&target, x.kind(), x.device())?;
    total_to(x, &out)?;
    Ok(vec![out])
}
