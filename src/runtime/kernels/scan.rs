//! Running sums.

use super::shape::axes_of;
use super::{Kernel, KernelCx, empty, write};
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
    let out = empty(&x.size(), x.kind(), x.device());
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
    let buffer = empty(&x.size(), x.kind(), x.device());
    let n = x.size()[axis as usize];
    let flip = |source: &Tensor, target: &Tensor| {
        write(
            "aten::flip",
            "out",
            &[Arg::Tensor(source), Arg::Ints(&[axis]), Arg::Tensor(target)],
        )
    };
    let shift = |source: &Tensor, target: &Tensor| -> Result<()> {
        write("aten::zero_", "", &[Arg::Tensor(target)])?;
        if n > 1 {
            let (from, to) = (source.narrow(axis, 0, n - 1), target.narrow(axis, 1, n - 1));
            write(
                "aten::copy_",
                "",
                &[Arg::Tensor(&to), Arg::Tensor(&from), Arg::Bool(false)],
            )?;
        }
        Ok(())
    };
    match (reverse, exclusive) {
        (true, false) => {
            flip(x, &out)?;
            total(&out, &buffer)?;
            flip(&buffer, &out)?;
        }
        (true, true) => {
            flip(x, &out)?;
            shift(&out, &buffer)?;
            total(&buffer, &out)?;
            flip(&out, &buffer)?;
            write(
                "aten::copy_",
                "",
                &[Arg::Tensor(&out), Arg::Tensor(&buffer), Arg::Bool(false)],
            )?;
        }
        (false, _) => {
            shift(x, &buffer)?;
            total(&buffer, &out)?;
        }
    }
    Ok(vec![out])
}
