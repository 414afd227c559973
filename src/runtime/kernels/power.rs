//! Powers.

use super::context::*;
use crate::runtime::convert;
use ckpt_passes::ops::power::*;

/// The kernel for powers.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&POW, pow)];

/// The result has the base's element type. An exponent that fits that type is converted to it; else the power is
/// taken in the exponent's type and converted back (the row's `memory` rule counts both).
fn pow(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (base, exponent) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&broadcast(&[base, exponent]), base.kind(), base.device())?;
    let power = |b: &Tensor, e: &Tensor, out: &Tensor| {
        write("aten::pow.Tensor_Tensor_out", args![b, e, out])
    };
    if base.kind() == exponent.kind() {
        power(base, exponent, &out)?;
        return Ok(vec![out]);
    }
    let (b, e) = (convert::dtype(base.kind()), convert::dtype(exponent.kind()));
    let fits = match (b, e) {
        (Some(b), Some(e)) => !e.is_float() || (b.is_float() && e.size_bytes() <= b.size_bytes()),
        _ => false,
    };
    if fits {
        power(base, &exponent.to_kind(base.kind()), &out)?;
    } else {
        let wide = empty(&out.size(), exponent.kind(), base.device())?;
        power(base, exponent, &wide)?;
        copy_into(&out, &wide)?;
    }
    Ok(vec![out])
}
