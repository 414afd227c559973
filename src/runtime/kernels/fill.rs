//! Tensors made from numbers, and triangles.

use super::shape::mismatch;
use super::{Kernel, KernelCx, copy_into, empty, lent_scalar, write};
use crate::runtime::convert;
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::fill::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&CONSTANT_OF_SHAPE, constant_of_shape),
    (&RANGE, range),
    (&TRILU, trilu),
];

fn trilu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let diagonal = match cx.opt(1) {
        Some(_) => cx.ints(1)?[0],
        None => 0,
    };
    let name = if cx.attrs.int("upper") != 0 {
        "aten::triu"
    } else {
        "aten::tril"
    };
    let out = empty(&x.size(), x.kind(), x.device())?;
    // libtorch copies an operand that is not row-major; in place it does not.
    let source = if x.is_contiguous() {
        x
    } else {
        copy_into(&out, x)?;
        &out
    };
    write(
        name,
        "out",
        &[Arg::Tensor(source), Arg::Int(diagonal), Arg::Tensor(&out)],
    )?;
    Ok(vec![out])
}

fn constant_of_shape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let size = cx.ints(0)?;
    let device = cx.x(0)?.device();
    let Some(value) = cx.attrs.opt_tensor("value") else {
        let out = empty(&size, Kind::Float, device)?;
        write("aten::zero_", "", &[Arg::Tensor(&out)])?;
        return Ok(vec![out]);
    };
    let out = empty(&size, convert::kind(value.dtype)?, device)?;
    let value = lent_scalar(value)?;
    write(
        "aten::fill_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(&value)],
    )?;
    Ok(vec![out])
}

fn range(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (start, limit, delta) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let kind = start.kind();
    let scalar = |t: &Tensor| t.double_value(&[]);
    let int = |t: &Tensor| t.int64_value(&[]);
    let whole = !matches!(
        kind,
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
    );
    let count = if whole {
        let (s, l, d) = (int(start), int(limit), int(delta));
        if d == 0 {
            return Err(mismatch(cx, "a step of 0"));
        }
        if (d > 0 && s >= l) || (d < 0 && s <= l) {
            0
        } else {
            ((l - s).abs() - 1) / d.abs() + 1
        }
    } else {
        ((scalar(limit) - scalar(start)) / scalar(delta))
            .ceil()
            .max(0.0) as i64
    };
    // number = start + i·delta, in the type of the operands.
    let out = empty(&[count], kind, start.device())?;
    write("aten::arange", "out", &[Arg::Int(count), Arg::Tensor(&out)])?;
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(delta)],
    )?;
    write(
        "aten::add_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(start), Arg::Int(1)],
    )?;
    Ok(vec![out])
}
