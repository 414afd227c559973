//! Floats of 8 bits: rounded and read by pieces, each in a buffer of float32 or float64.

use super::context::*;
use crate::runtime::convert::kind;
use ckpt_passes::ir::float8::decoded;
use ckpt_passes::ir::{DType, op::DeviceKind};
use ckpt_passes::ops::cast::{TO, piece, piece_elements, saturates, wide_type};
use ckpt_passes::ops::float8::*;

kernels! {
    QUANTIZE_FLOAT8 => quantize;
    DEQUANTIZE_FLOAT8 => dequantize;
}

fn quantize(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, to) = (cx.x(0)?, cx.attrs.dtype(TO));
    let wide = wide_kind(&[x, cx.x(1)?])?;
    let scale = in_kind(cx.x(1)?, wide)?;
    Ok(vec![rounded(
        cx.device,
        (x, Some(&scale)),
        to,
        saturates(cx.attrs),
        wide,
    )?])
}

/// Converts to a type of 8 bits, divided by a scale if there is one.
pub(super) fn rounded(
    device: DeviceKind,
    (x, scale): (&Tensor, Option<&Tensor>),
    to: DType,
    saturate: bool,
    wide: Kind,
) -> Result<Tensor> {
    let out = empty_as(x, kind(to)?)?;
    // The code of the largest number is the one before infinity or NaN.
    let greatest = (0..=0x7f).map(|code| decoded(to, code));
    let greatest = greatest.filter(|x| x.is_finite()).fold(0.0, f64::max);
    by_piece(device, (x, &out, scale), wide, |buffer, x, out, scale| {
        copy_into(buffer, x)?;
        if let Some(scale) = scale {
            div_into(buffer, scale)?;
        }
        if saturate {
            write("aten::clamp_", args![buffer, -greatest, greatest])?;
        }
        copy_into(out, buffer)
    })?;
    Ok(out)
}

fn dequantize(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (codes, scale) = (cx.x(0)?, cx.x(1)?);
    let to = kind(cx.attrs.dtype(TO))?;
    let wide = match to {
        Kind::Double => Kind::Double,
        _ => wide_kind(&[scale])?,
    };
    let scale = in_kind(scale, wide)?;
    if to == wide {
        let out = copied_as(codes, to)?;
        mul_into(&out, &scale)?;
        return Ok(vec![out]);
    }
    let out = empty_as(codes, to)?;
    let all = (codes, &out, Some(&scale));
    by_piece(cx.device, all, wide, |buffer, codes, out, scale| {
        copy_into(buffer, codes)?;
        if let Some(scale) = scale {
            mul_into(buffer, scale)?;
        }
        copy_into(out, buffer)
    })?;
    Ok(vec![out])
}

/// Calls `convert` with the buffer and each piece of an operand, a result and a scale.
fn by_piece(
    device: DeviceKind,
    (x, out, scale): (&Tensor, &Tensor, Option<&Tensor>),
    wide: Kind,
    convert: impl Fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>) -> Result<()>,
) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    let dims = out.size();
    let room = empty(&[piece_elements(device, &dims)], wide, out.device())?;
    let buffer = |like: &Tensor| {
        let part = narrow(&room, 0, 0, like.numel() as i64)?;
        call("aten::view", args![&part, &like.size()])
    };
    let Some((axis, places)) = piece(device, &dims) else {
        return convert(&buffer(out)?, x, out, scale);
    };
    for (at, n) in blocks(dims[axis], places) {
        let part = |t: &Tensor, axis: usize| narrow(t, axis as i64, at, n);
        let to = part(out, axis)?;
        // The scale broadcasts from the last axis on.
        let scale = scale.map(|scale| {
            let own = (axis + scale.dim()).checked_sub(dims.len());
            match own.filter(|own| scale.size()[*own] > 1) {
                Some(own) => part(scale, own),
                None => Ok(scale.alias()),
            }
        });
        convert(
            &buffer(&to)?,
            &part(x, axis)?,
            &to,
            scale.transpose()?.as_ref(),
        )?;
    }
    Ok(())
}

/// Returns the type in which operands are scaled.
pub(super) fn wide_kind(operands: &[&Tensor]) -> Result<Kind> {
    let types = operands.iter().map(|x| dtype_of(x.kind()));
    let types = types.collect::<Result<Vec<DType>>>()?;
    kind(wide_type(types.into_iter()))
}

/// Returns the tensor itself, or a copy in another type.
fn in_kind(x: &Tensor, kind: Kind) -> Result<Tensor> {
    match x.kind() == kind {
        true => Ok(x.alias()),
        false => copied_as(x, kind),
    }
}
