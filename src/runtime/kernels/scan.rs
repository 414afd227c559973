//! Running sums.

use super::shape::axes_of;
use super::{Kernel, KernelCx, call, copy_into, empty, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::scan::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&CUM_SUM, cum_sum)];

/// libtorch sums forward and includes the element. Backward: flipped, summed, flipped back. Exclusive: summed over the
/// operand shifted by one, zeros coming in.
fn cum_sum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let axis = axes_of(&cx.ints(1)?, x.dim())[0] as i64;
    let out = empty(&x.size(), x.kind(), x.device())?;
    let (reverse, exclusive) = (cx.attrs.int("reverse") != 0, cx.attrs.int("exclusive") != 0);
    let total = |source: &Tensor, target: &Tensor| {
        write(
            "aten::cumsum",
            "out",
            &[
                Arg::Tensor(source),
                Arg::Int(axis),
                Arg::None,
                Arg::Tensor(target),
            ],
        )
    };
    if !reverse && !exclusive {
        total(x, &out)?;
        return Ok(vec![out]);
    }
    let n = x.size()[axis as usize];
    let flip = |source: &Tensor| {
        let args = [Arg::Tensor(source), Arg::Ints(&[axis])];
        call("aten::flip", "", &args)
    };
    let source = if reverse { flip(x)? } else { x.alias() };
    if exclusive {
        write("aten::zero_", "", &[Arg::Tensor(&out)])?;
        if n > 1 {
            let (from, to) = (source.narrow(axis, 0, n - 1), out.narrow(axis, 1, n - 1));
            copy_into(&to, &from)?;
        }
        drop(source);
        write(
            "aten::cumsum_",
            "",
            &[Arg::Tensor(&out), Arg::Int(axis), Arg::None],
        )?;
    } else {
        total(&source, &out)?;
        drop(source);
    }
    // The result of a flip lies as its operand does: row-major.
    Ok(vec![if reverse { flip(&out)? } else { out }])
}
