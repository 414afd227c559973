//! Change of element type.

use super::{Kernel, KernelCx, empty, write};
use crate::runtime::convert::kind;
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::cast::*;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&CAST, cast)];

fn cast(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = empty(&x.size(), kind(cx.attrs.dtype("to"))?, x.device())?;
    write(
        "aten::copy_",
        "",
        &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
    )?;
    Ok(vec![out])
}
