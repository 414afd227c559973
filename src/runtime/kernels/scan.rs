//! Running sums.

use super::context::*;
use ckpt_passes::ops::scan::*;

/// The kernels of this family, by op.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&CUM_SUM, cum_sum)];

/// libtorch sums forward and includes each element itself. A reverse sum flips operand and result. An exclusive sum shifts the
/// operand by one and fills with zeros.
fn cum_sum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let axis = axes_of(&cx.ints(1)?, x.dim())[0] as i64;
    let out = empty_like(x)?;
    let (reverse, exclusive) = (cx.flag("reverse"), cx.flag("exclusive"));
    let total = |source: &Tensor, target: &Tensor| {
        write("aten::cumsum.out", args![source, axis, Arg::None, target])
    };
    if !reverse && !exclusive {
        total(x, &out)?;
        return Ok(vec![out]);
    }
    let n = x.size()[axis as usize];
    let source = match reverse {
        true => flip(x, &[axis])?,
        false => x.alias(),
    };
    if exclusive {
        zero(&out)?;
        if n > 1 {
            let (from, to) = (source.narrow(axis, 0, n - 1), out.narrow(axis, 1, n - 1));
            copy_into(&to, &from)?;
        }
        drop(source);
        write("aten::cumsum_", args![&out, axis, Arg::None])?;
    } else {
        total(&source, &out)?;
        drop(source);
    }
    // A flip keeps the layout, so the result is row-major.
    Ok(vec![if reverse { flip(&out, &[axis])? } else { out }])
}
