//! Offload and fetch, done at once. The executor leaves what was offloaded where it is.

use super::context::*;
use crate::runtime::swap_store::new_tensor;
use ckpt_passes::ops::transfer::*;

pub const KERNELS: &[(&OpDef, Kernel)] =
    &[(&OFFLOAD, offload), (&RELEASE, release), (&FETCH, fetch)];

/// The memory of a run on the host is the host's, so that only a file is outside it.
fn offload(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let to_file = cx.attrs.str(TO) == TO_DISK || backend(x).is_host();
    let x = x.f_contiguous().map_err(|e| tch_error(&e))?;
    Ok(vec![cx.store.keep(&x, to_file)?])
}

/// The transfer was done at once, so the tensor is stored already.
fn release(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![cx.x(1)?.shallow_clone()])
}

/// A new tensor on the host; the executor moves it to the device.
fn fetch(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let stored = cx.x(0)?;
    let here = new_tensor(stored)?;
    copy_into(&here, stored)?;
    Ok(vec![here])
}
