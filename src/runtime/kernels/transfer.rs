//! Out of the device's memory and back. The executor leaves what was moved out where it is.

use super::{Kernel, KernelCx};
use crate::runtime::outside::fetched;
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::transfer::*;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&OFFLOAD, offload), (&FETCH, fetch)];

fn offload(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let on_disk = cx.attrs.str(TO) == TO_DISK;
    Ok(vec![cx.outside.keep(cx.x(0)?, on_disk)?])
}

fn fetch(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![fetched(cx.x(0)?)?])
}
