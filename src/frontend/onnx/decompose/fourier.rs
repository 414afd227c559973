//! Fourier transforms: `DFT` (ONNX DFT-20; before, the axis was an attribute).

use super::{Call, Out};
use crate::frontend::fourier::{Scale, Sign, roots};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, ValueId};
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::shape::SQUEEZE;
use ckpt_passes::ops::slice::SLICE;

/// Of real numbers `[…, 1]` or complex ones `[…, 2]` along an axis. Complex numbers come out, or real ones of the inverse
/// of what is one-sided.
pub fn dft(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    let rank = call.b.rank(x);
    let parts = call.size(x, rank.saturating_sub(1), "the last axis")?;
    if rank < 2 || !matches!(parts, 1 | 2) {
        return Err(call.unsupported("an input whose last axis is not of one part or two"));
    }
    let (length, axis) = (call.opt(1), axis(call, rank)?);
    let sign = match call.int("inverse", 0)? {
        0 => Sign::Forward,
        _ => Sign::Inverse,
    };
    let is_half = call.int("onesided", 0)? != 0;
    if is_half && (parts == 2) != (sign == Sign::Inverse) {
        return Err(call.unsupported("`onesided`, but to and from real numbers,"));
    }
    let (one, two) = (call.b.int(1), call.b.int(2));
    let n = match length {
        Some(length) => {
            let length = call.b.cast(length, DType::I64)?;
            let length = call.reshape(length, &[1])?;
            scalar(call, length)?
        }
        None if is_half && sign == Sign::Inverse => {
            let bins = size(call, x, axis)?;
            let bins = call.b.sub(bins, one)?;
            call.b.mul(bins, two)?
        }
        None => size(call, x, axis)?,
    };
    let half = call.b.emit(&DIV, &[n, two], Attrs::new())?;
    let half = call.b.add(half, one)?;
    let (read, columns) = match (is_half, sign) {
        (false, _) => (n, n),
        (true, Sign::Forward) => (n, half),
        (true, Sign::Inverse) => (half, n),
    };
    let (start, end) = (call.b.ints(&[0]), call.reshape(read, &[1])?);
    let axes = call.b.ints(&[axis as i64]);
    let x = match length {
        Some(_) => call.b.emit(&SLICE, &[x, start, end, axes], Attrs::new())?,
        None => x,
    };
    let rows = size(call, x, axis)?;
    let last = rank as i64 - 1;
    let axes = call.b.ints(&[last]);
    let mut numbers = Vec::new();
    for part in call.split(x, &vec![1; parts as usize], last)? {
        numbers.push(call.b.emit(&SQUEEZE, &[part, axes], Attrs::new())?);
    }
    let dtype = call.dtype(x);
    let scale = match sign {
        Sign::Forward => Scale::One,
        Sign::Inverse => Scale::Length,
    };
    let matrix = roots(&mut call.b, n, [rows, columns], dtype, scale)?;
    if let (true, [re, im]) = (is_half, numbers.as_slice()) {
        let y = matrix.real(&mut call.b, [*re, *im], axis, [n, rows])?;
        return Ok(Some(vec![Out::Value(call.unsqueeze(y, &[last])?)]));
    }
    let [re, im] =
        matrix.transformed(&mut call.b, numbers[0], numbers.get(1).copied(), axis, sign)?;
    let (re, im) = (call.unsqueeze(re, &[last])?, call.unsqueeze(im, &[last])?);
    Ok(Some(vec![Out::Value(call.concat(&[re, im], last)?)]))
}

/// The axis that is transformed, which is not that of the parts.
fn axis(call: &mut Call, rank: usize) -> Result<usize> {
    let given = match call.opset < 20 {
        true => call.int("axis", 1)?,
        false => match call.opt(2) {
            None => -2,
            Some(v) => {
                let known = call.b.contents.get(v).and_then(|c| c.first()?.as_const());
                known.ok_or_else(|| call.unsupported("an axis that is computed"))?
            }
        },
    };
    let at = if given < 0 {
        given + rank as i64
    } else {
        given
    };
    match usize::try_from(at) {
        Ok(at) if at + 1 < rank => Ok(at),
        _ => Err(call
            .fail("axis", format!("axis {given} is out of range"))
            .expected(format!("an axis of {rank} that is not the last"))),
    }
}

/// The size of an axis, as a scalar.
fn size(call: &mut Call, x: ValueId, axis: usize) -> Result<ValueId> {
    let size = call.axis_vector(x, axis)?;
    scalar(call, size)
}

fn scalar(call: &mut Call, v: ValueId) -> Result<ValueId> {
    let axes = call.b.ints(&[0]);
    call.b.emit(&SQUEEZE, &[v, axes], Attrs::new())
}
