//! Out of the device's memory and back. The executor leaves what was moved out where it is.

use super::context::*;
use crate::runtime::outside::fetched;
use ckpt_passes::ops::transfer::*;

pub const KERNELS: &[(&OpDef, Kernel)] =
    &[(&OFFLOAD, offload), (&RELEASE, release), (&FETCH, fetch)];

fn offload(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let on_disk = cx.attrs.str(TO) == TO_DISK;
    let x = cx.x(0)?.f_contiguous().map_err(|e| tch_error(&e))?;
    Ok(vec![cx.outside.keep(&x, on_disk)?])
}

/// Of a transfer that was done at once: it is outside already.
fn release(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![cx.x(1)?.shallow_clone()])
}

fn fetch(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![fetched(cx.x(0)?)?])
}
