//! Weights made of their codes, some rows at a time, so that no code is ever unpacked for the whole weight.

use super::context::*;
use ckpt_passes::ops::quantised::*;

kernels! {
    DEQUANTIZE => dequantize;
}

fn dequantize(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let shape = cx.attrs.ints(SHAPE);
    let scale = cx.x(1)?;
    let out = empty(shape, scale.kind(), scale.device())?;
    let most = most_elements(cx.device, cx.attrs);
    if most == 0 || out.numel() == 0 {
        return Ok(vec![out]);
    }
    let codes = as_vector(&dense(cx.x(0)?)?)?;
    let room = |count, kind| empty(&[count], kind, out.device());
    let unpacked = match cx.attrs.int(BITS) {
        4 => Some(room(2 * (most / 2 + 1), Kind::Uint8)?),
        _ => None,
    };
    let table = cx.opt(3);
    let places = table.map(|_| room(most, Kind::Int64)).transpose()?;
    let signed = cx.flag(SIGNED);
    let to = as_vector(&out)?;
    let width: i64 = shape[1..].iter().product();
    for (first, rows) in pieces(cx.device, cx.attrs) {
        let (at, n) = (first * width, rows * width);
        let codes = match &unpacked {
            Some(room) => unpack(cx, &codes, (at, n), room)?,
            None => narrow(&codes, 0, at, n)?,
        };
        let target = narrow(&to, 0, at, n)?;
        match (table, &places) {
            (Some(table), Some(places)) => {
                let places = narrow(places, 0, 0, n)?;
                copy_into(&places, &codes)?;
                write("aten::take.out", args![table, &places, &target])?;
            }
            _ => copy_into(&target, &codes)?,
        }
        if signed {
            sub_into(&target, &scalar(out.kind(), 8.0)?)?;
        }
        let target = narrow(&out, 0, first, rows)?;
        if let Some(zero) = cx.opt(2) {
            by_block(cx, (&target, first), zero, sub_into)?;
        }
        by_block(cx, (&target, first), scale, mul_into)?;
    }
    Ok(vec![out])
}

/// Returns `n` codes from code `at` on, each in a byte of `room`, with 8 added where they have a sign.
fn unpack(cx: &KernelCx, codes: &Tensor, (at, n): (i64, i64), room: &Tensor) -> Result<Tensor> {
    let (first, end) = (at / 2, (at + n + 1) / 2);
    let bytes = narrow(codes, 0, first, end - first)?;
    let pairs = narrow(room, 0, 0, 2 * (end - first))?;
    let pairs = call("aten::view", args![&pairs, &[end - first, 2]])?;
    let half = |i| call("aten::select.int", args![&pairs, 1, i]);
    let number = |n| scalar(Kind::Uint8, n);
    let high = i64::from(!cx.flag(HIGH_FIRST));
    write(
        "aten::bitwise_and.Tensor_out",
        args![&bytes, &number(15.0)?, &half(1 - high)?],
    )?;
    write(
        "aten::bitwise_right_shift.Tensor_out",
        args![&bytes, &number(4.0)?, &half(high)?],
    )?;
    if cx.flag(SIGNED) {
        write("aten::bitwise_xor_.Tensor", args![&pairs, &number(8.0)?])?;
    }
    narrow(room, 0, at - 2 * first, n)
}

/// Applies scales or zero points to rows of the result, which begin at `first`.
fn by_block(
    cx: &KernelCx,
    (rows, first): (&Tensor, i64),
    numbers: &Tensor,
    apply: fn(&Tensor, &Tensor) -> Result<()>,
) -> Result<()> {
    if numbers.dim() == 0 {
        return apply(rows, numbers);
    }
    let (axis, block) = (axis(cx.attrs), cx.attrs.int(BLOCK));
    let mut numbers = numbers.alias();
    if numbers.size()[0] > 1 {
        numbers = match axis {
            0 if block > 1 => narrow(&numbers, 0, first / block, 1)?,
            _ => narrow(&numbers, 0, first, rows.size()[0])?,
        };
    }
    if axis == 0 || block == 1 || numbers.size()[axis] == 1 {
        return apply(rows, &numbers);
    }
    let (axis, size) = (axis as i64, rows.size()[axis]);
    let whole = size / block;
    if whole > 0 {
        let part = narrow(rows, axis, 0, whole * block)?;
        let part = call("aten::unflatten.int", args![&part, axis, &[whole, block]])?;
        let each = narrow(&numbers, axis, 0, whole)?;
        apply(&part, &call("aten::unsqueeze", args![&each, axis + 1])?)?;
    }
    if whole * block < size {
        let part = narrow(rows, axis, whole * block, size - whole * block)?;
        apply(&part, &narrow(&numbers, axis, whole, 1)?)?;
    }
    Ok(())
}
