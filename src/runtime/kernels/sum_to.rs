//! The adjoint of broadcasting.

use super::reduce::sum;
use super::{Kernel, KernelCx, empty, write};
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::sum_to::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&SUM_TO_SHAPE, sum_to_shape)];

/// Sums over the axes along which a tensor of the target shape was broadcast.
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
    let Some(lead) = lead.filter(|_| fits) else {
        return Err(Error::model(
            "shape",
            "SumToShape: the target does not broadcast to the operand",
        )
        .found(format!("{size:?} to {target:?}")));
    };
    let axes: Vec<i64> = (0..size.len())
        .filter(|i| *i < lead || (target[i - lead] == 1 && size[*i] != 1))
        .map(|i| i as i64)
        .collect();
    let out = empty(&target, x.kind(), x.device())?;
    if axes.is_empty() {
        let same = x.reshape(target.as_slice());
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(&same), Arg::Bool(false)],
        )?;
        return Ok(vec![out]);
    }
    // Summed with the axes kept, then seen without the leading ones.
    let kept: Vec<i64> = (0..size.len())
        .map(|i| if i < lead { 1 } else { target[i - lead] })
        .collect();
    sum(x, &axes, true, &out.view(kept.as_slice()))?;
    Ok(vec![out])
}
