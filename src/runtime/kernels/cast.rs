//! Change of element type.

use super::context::*;
use super::float8::{rounded, wide_kind};
use crate::runtime::convert::kind;
use ckpt_passes::ops::cast::*;

/// The kernel for casts.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&CAST, |cx| {
    let (x, to) = (cx.x(0)?, cx.attrs.dtype(TO));
    Ok(vec![match to.is_float8() && saturates(cx.attrs) {
        true => rounded(cx.device, (x, None), to, true, wide_kind(&[x])?)?,
        false => copied_as(x, kind(to)?)?,
    }])
})];
