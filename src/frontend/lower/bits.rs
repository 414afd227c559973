//! `BitShift` of signed integers (ONNX BitShift-28), in arithmetic that the internal opset has.

use super::call::{Call, Lowered, one};
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::bits::BITWISE_NOT;
use ckpt_passes::ops::logic::{AND, LESS, WHERE};

/// `BitShift`. Left: multiplies by a power of two and drops the bits beyond the width. Right: divides by 2ˢ and rounds
/// down; a negative x goes by way of ~x. A shift that is negative or not below the width leaves only the sign.
pub fn shift(call: &mut Call) -> Lowered {
    let [x, by] = call.operands(["X", "Y"])?;
    let dtype = call.dtype(x);
    let width = match dtype {
        DType::I8 => 8,
        DType::I16 => 16,
        DType::I32 => 32,
        DType::I64 => 64,
        _ => return Ok(None),
    };
    if call.dtype(by) != dtype {
        return Ok(None); // The row refuses it.
    }
    let left = !call.attr_choice("direction", ["LEFT", "RIGHT"], "")?;
    let (x, by) = (call.cast(x, DType::I64)?, call.cast(by, DType::I64)?);
    let (zero, end) = (call.int(0), call.int(width));
    let before = call.op(&LESS, &[by, zero])?;
    let known = call.op(&LESS, &[by, end])?;
    // Positive numbers have no bit 63, so a shift by 63 or more leaves nothing.
    let last = call.int(if left { 64 } else { 63 });
    let useful = call.op(&LESS, &[by, last])?;
    let useful = call.op(&AND, &[useful, known])?;
    let place = call.op(&WHERE, &[useful, by, zero])?;
    let place = call.op(&WHERE, &[before, zero, place])?;
    let powers: Vec<i64> = (0..64).map(|s| 1_i64.wrapping_shl(s)).collect();
    let powers = call.constant("powers", Tensor::ints(&powers));
    let power = call.gather(powers, place, 0)?;
    let y = if left {
        let moved = call.mul(x, power)?;
        let moved = call.op(&WHERE, &[useful, moved, zero])?;
        call.op(&WHERE, &[before, zero, moved])?
    } else {
        let negative = call.op(&LESS, &[x, zero])?;
        let turned = call.op(&BITWISE_NOT, &[x])?;
        let size = call.op(&WHERE, &[negative, turned, x])?;
        let moved = call.op(&DIV, &[size, power])?;
        let moved = call.op(&WHERE, &[useful, moved, zero])?;
        let moved = call.op(&WHERE, &[before, zero, moved])?;
        let turned = call.op(&BITWISE_NOT, &[moved])?;
        call.op(&WHERE, &[negative, turned, moved])?
    };
    one(call.cast(y, dtype)?)
}
