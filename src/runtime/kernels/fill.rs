//! Tensors made from numbers, and triangles.

use super::context::*;
use crate::runtime::convert;
use ckpt_passes::ops::fill::*;

kernels! {
    CONSTANT_OF_SHAPE => constant_of_shape;
    RANGE => range;
    TRILU => trilu;
}

fn trilu(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let diagonal = match cx.opt(1) {
        Some(_) => cx.ints(1)?[0],
        None => 0,
    };
    let name = match cx.flag("upper") {
        true => "aten::triu.out",
        false => "aten::tril.out",
    };
    let out = empty_like(x)?;
    // libtorch copies an operand that is not row-major, but not if it works in place.
    let mut source = x;
    if !x.is_contiguous() {
        copy_into(&out, x)?;
        source = &out;
    }
    write(name, args![source, diagonal, &out])?;
    Ok(vec![out])
}

fn constant_of_shape(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let size = cx.ints(0)?;
    let device = cx.x(0)?.device();
    let Some(value) = cx.attrs.opt_tensor("value") else {
        let out = empty(&size, Kind::Float, device)?;
        zero(&out)?;
        return Ok(vec![out]);
    };
    let out = empty(&size, convert::kind(value.dtype)?, device)?;
    let value = lent_scalar(value)?;
    fill(&out, &value)?;
    Ok(vec![out])
}

fn range(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (start, limit, delta) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let kind = start.kind();
    let float = |t: &Tensor| t.double_value(&[]);
    let int = |t: &Tensor| t.int64_value(&[]);
    let count = if !is_float(kind) {
        let (s, l, d) = (int(start), int(limit), int(delta));
        if d == 0 {
            return Err(cx.misfit("a step of 0"));
        }
        if (d > 0 && s >= l) || (d < 0 && s <= l) {
            0
        } else {
            ((l - s).abs() - 1) / d.abs() + 1
        }
    } else {
        let count = (float(limit) - float(start)) / float(delta);
        count.ceil().max(0.0) as i64
    };
    // number = start + i·delta, in the type of the operands.
    let out = empty(&[count], kind, start.device())?;
    write("aten::arange.out", args![count, &out])?;
    mul_into(&out, delta)?;
    add_into(&out, start)?;
    Ok(vec![out])
}
