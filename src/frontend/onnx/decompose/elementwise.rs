//! Elementwise ops that are short formulas of rows: `CastLike`, `Hardmax`, `Mean`, `Mod` of floats, `Shrink`, `Softsign`, `Swish`,
//! `ThresholdedRelu` (ONNX operator specifications of those names).

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, ValueId};
use ckpt_passes::ops::activation::SIGMOID;
use ckpt_passes::ops::arith::{ABS, MOD, SUM};
use ckpt_passes::ops::logic::{EQUAL, GREATER, LESS, WHERE, XOR};
use ckpt_passes::ops::select::ARG_MAX;

fn one(v: ValueId) -> Result<Option<Vec<Out>>> {
    Ok(Some(vec![Out::Value(v)]))
}

/// The first operand in the element type of the second.
pub fn cast_like(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, like) = (call.need(0, "input")?, call.need(1, "target_type")?);
    call.ignore("saturate"); // Both say something about 8-bit floats only, which we do not have.
    call.ignore("round_mode");
    let dtype = call.dtype(like);
    one(call.b.cast(x, dtype)?)
}

/// `Mod` of floating-point operands with the sign of the divisor (ONNX Mod-28, `fmod` = 0): the remainder that has the sign
/// of the dividend, and the divisor added where the signs differ.
pub fn modulo(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (a, b) = (call.need(0, "A")?, call.need(1, "B")?);
    if !call.dtype(a).is_float() || call.peek_int("fmod") == Some(1) {
        return Ok(None);
    }
    call.ignore("fmod");
    let zero = call.b.scalar(call.dtype(a), 0.0);
    let minus_zero = call.b.scalar(call.dtype(a), -0.0);
    let rest = call.b.emit(&MOD, &[a, b], Attrs::new().with("fmod", 1))?;
    let backward = call.b.emit(&LESS, &[b, zero], Attrs::new())?;
    let below = call.b.emit(&LESS, &[rest, zero], Attrs::new())?;
    let against = call.b.emit(&XOR, &[backward, below], Attrs::new())?;
    let turned = call.b.add(rest, b)?;
    let y = call
        .b
        .emit(&WHERE, &[against, turned, rest], Attrs::new())?;
    // No remainder has the sign of the divisor, too.
    let none = call.b.emit(&EQUAL, &[rest, zero], Attrs::new())?;
    let signed = call
        .b
        .emit(&WHERE, &[backward, minus_zero, zero], Attrs::new())?;
    one(call.b.emit(&WHERE, &[none, signed, y], Attrs::new())?)
}

/// 1 at the first of the largest elements along an axis, 0 elsewhere.
pub fn hardmax(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    let rank = call.b.rank(x) as i64;
    // Until opset 12 the axes from `axis` on are flattened, which is the same on the last axis only.
    let axis = call.int("axis", if call.opset < 13 { 1 } else { -1 })?;
    let axis = if axis < 0 { axis + rank } else { axis };
    if !(0..rank).contains(&axis) || (call.opset < 13 && axis != rank - 1) {
        return Err(call.unsupported(format!("axis {axis} in opset {}", call.opset)));
    }
    let attrs = Attrs::new().with("axis", axis);
    let best = call.b.emit(&ARG_MAX, &[x], attrs)?;
    let places = call.positions(x, axis as usize)?;
    let mut dims = vec![1; rank as usize];
    dims[axis as usize] = -1;
    let places = call.reshape(places, &dims)?;
    let hit = call.b.emit(&EQUAL, &[places, best], Attrs::new())?;
    let dtype = call.dtype(x);
    one(call.b.cast(hit, dtype)?)
}

/// The sum of the operands, broadcast, by their number.
pub fn mean(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let mut all = vec![call.need(0, "data_0")?];
    while let Some(next) = call.opt(all.len()) {
        all.push(next);
    }
    let n = all.len() as f64;
    let sum = call.b.emit(&SUM, &all, Attrs::new())?;
    let n = call.b.scalar(call.dtype(sum), n);
    one(call.b.div(sum, n)?)
}

/// x + bias below -lambd, x - bias above lambd, 0 between.
pub fn shrink(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    let (bias, lambd) = (call.float("bias", 0.0)?, call.float("lambd", 0.5)?);
    let dtype = call.dtype(x);
    let number = |call: &mut Call, v: f32| call.b.scalar(dtype, f64::from(v));
    let (bias, high, low) = (
        number(call, bias),
        number(call, lambd),
        number(call, -lambd),
    );
    let zero = number(call, 0.0);
    let below = call.b.emit(&LESS, &[x, low], Attrs::new())?;
    let above = call.b.emit(&GREATER, &[x, high], Attrs::new())?;
    let (raised, lowered) = (call.b.add(x, bias)?, call.b.sub(x, bias)?);
    let y = call.b.emit(&WHERE, &[above, lowered, zero], Attrs::new())?;
    one(call.b.emit(&WHERE, &[below, raised, y], Attrs::new())?)
}

/// x / (1 + |x|).
pub fn softsign(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    let size = call.b.emit(&ABS, &[x], Attrs::new())?;
    let one_ = call.b.scalar(call.dtype(x), 1.0);
    let size = call.b.add(one_, size)?;
    one(call.b.div(x, size)?)
}

/// x·σ(alpha·x).
pub fn swish(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let alpha = call.float("alpha", 1.0)?;
    let steep = if alpha == 1.0 {
        x
    } else {
        call.scaled(x, f64::from(alpha))?
    };
    let gate = call.b.emit(&SIGMOID, &[steep], Attrs::new())?;
    one(call.b.mul(x, gate)?)
}

/// x above alpha, 0 elsewhere.
pub fn thresholded_relu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let alpha = call.float("alpha", 1.0)?;
    let dtype = call.dtype(x);
    let (alpha, zero) = (
        call.b.scalar(dtype, f64::from(alpha)),
        call.b.scalar(dtype, 0.0),
    );
    let above = call.b.emit(&GREATER, &[x, alpha], Attrs::new())?;
    one(call.b.emit(&WHERE, &[above, x, zero], Attrs::new())?)
}

/// `EyeLike`: a matrix of the operand's shape with ones on one diagonal.
pub fn eye_like(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    call.want_rank(x, &[2], "input")?;
    let dtype = match call.dtype_attribute("dtype")? {
        Some(dtype) => dtype,
        None => call.dtype(x),
    };
    let shift = call.int("k", 0)?;
    let (rows, columns) = (call.positions(x, 0)?, call.positions(x, 1)?);
    let shift = call.b.int(shift);
    let rows = call.b.add(rows, shift)?;
    let rows = call.unsqueeze(rows, &[1])?;
    let on = call.b.emit(&EQUAL, &[rows, columns], Attrs::new())?;
    one(call.b.cast(on, dtype)?)
}
