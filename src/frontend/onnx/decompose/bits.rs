//! `BitShift` of signed integers (ONNX BitShift-28), in arithmetic that the internal opset has.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor};
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::bits::BITWISE_NOT;
use ckpt_passes::ops::logic::{AND, LESS, WHERE};

/// Left: times a power of two, the bits beyond the width lost. Right: x / 2ˢ rounded down, where x is negative by way of
/// ~x. A shift that is negative, or not below the width, leaves nothing but the sign.
pub fn shift(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, by) = (call.need(0, "X")?, call.need(1, "Y")?);
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
    let left = match call.str("direction", "")? {
        "LEFT" => true,
        "RIGHT" => false,
        other => {
            return Err(call
                .fail("attribute", "unknown value of `direction`")
                .expected("LEFT or RIGHT")
                .found(other.to_string()));
        }
    };
    let (x, by) = (call.b.cast(x, DType::I64)?, call.b.cast(by, DType::I64)?);
    let (zero, end) = (call.b.int(0), call.b.int(width));
    let before = call.b.emit(&LESS, &[by, zero], Attrs::new())?;
    let known = call.b.emit(&LESS, &[by, end], Attrs::new())?;
    // Positive numbers have no bit 63: moving them by 63 and more leaves nothing.
    let last = call.b.int(if left { 64 } else { 63 });
    let useful = call.b.emit(&LESS, &[by, last], Attrs::new())?;
    let useful = call.b.emit(&AND, &[useful, known], Attrs::new())?;
    let place = call.b.emit(&WHERE, &[useful, by, zero], Attrs::new())?;
    let place = call.b.emit(&WHERE, &[before, zero, place], Attrs::new())?;
    let powers: Vec<i64> = (0..64).map(|s| 1_i64.wrapping_shl(s)).collect();
    let powers = call.b.constant("powers", Tensor::ints(&powers));
    let power = call.gather_rows(powers, place)?;
    let y = if left {
        let moved = call.b.mul(x, power)?;
        let moved = call.b.emit(&WHERE, &[useful, moved, zero], Attrs::new())?;
        call.b.emit(&WHERE, &[before, zero, moved], Attrs::new())?
    } else {
        let negative = call.b.emit(&LESS, &[x, zero], Attrs::new())?;
        let turned = call.b.emit(&BITWISE_NOT, &[x], Attrs::new())?;
        let size = call.b.emit(&WHERE, &[negative, turned, x], Attrs::new())?;
        let moved = call.b.emit(&DIV, &[size, power], Attrs::new())?;
        let moved = call.b.emit(&WHERE, &[useful, moved, zero], Attrs::new())?;
        let moved = call.b.emit(&WHERE, &[before, zero, moved], Attrs::new())?;
        let turned = call.b.emit(&BITWISE_NOT, &[moved], Attrs::new())?;
        call.b
            .emit(&WHERE, &[negative, turned, moved], Attrs::new())?
    };
    Ok(Some(vec![Out::Value(call.b.cast(y, dtype)?)]))
}
