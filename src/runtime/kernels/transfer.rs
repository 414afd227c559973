//! Offload and fetch without overlap. The executor leaves an offloaded tensor in the store.

use super::context::*;
use crate::runtime::swap_store::new_tensor;
use ckpt_passes::ops::transfer::*;

/// Kernels of `Offload`, `Release` and `Fetch`, for transfers that do not overlap other nodes.
pub const KERNELS: &[(&OpDef, Kernel)] =
    &[(&OFFLOAD, offload), (&RELEASE, release), (&FETCH, fetch)];

/// A run on the host offloads to a file, because the host's memory is the memory of the run.
fn offload(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let to_file = cx.attrs.str(TO) == TO_DISK || backend(x).is_host();
    let x = dense(x)?;
    Ok(vec![cx.store.keep(&x, to_file)?])
}

/// The transfer was done at once, so the tensor is stored already.
fn release(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![cx.x(1)?.shallow_clone()])
}

/// Makes a tensor on the host; the executor moves it to the device.
fn fetch(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let stored = cx.x(0)?;
    let here = new_tensor(stored)?;
    copy_into(&here, stored)?;
    Ok(vec![here])
}
