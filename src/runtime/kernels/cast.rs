//! Change of element type.

use super::context::*;
use crate::runtime::convert::kind;
use ckpt_passes::ops::cast::*;

/// The kernel for casts.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&CAST, |cx| {
    Ok(vec![copied_as(cx.x(0)?, kind(cx.attrs.dtype("to"))?)?])
})];
