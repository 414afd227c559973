//! Elementwise ops that are short formulas of rows: `Cast` of constants, `CastLike`, `Hardmax`, `Mean`, `Mod` of floats, `Shrink`, `Softsign`,
//! `ThresholdedRelu`, `EyeLike` (ONNX operator specifications of those names).

use super::call::{Call, Lowered, from_start, one};
use super::known::number;
use ckpt_passes::ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::{ABS, MOD, SUM};
use ckpt_passes::ops::cast::{SATURATE, rounded};
use ckpt_passes::ops::logic::{EQUAL, GREATER, LESS, WHERE, XOR};
use ckpt_passes::ops::rule::{Formulas, Term, binary_op, select, unary_op};
use ckpt_passes::ops::select::ARG_MAX;

/// `Cast` of a floating-point constant to integers, which may be a shape or a bound: the constant in that type.
pub fn cast(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let Some(dtype) = call.attr_dtype("to")? else {
        return Ok(None);
    };
    // The row reads it, too.
    call.ignore_attr(SATURATE);
    call.ignore_attr("round_mode");
    match whole(call, x, dtype) {
        Some(constant) => one(constant),
        None => Ok(None),
    }
}

/// Returns small floating-point constants, or one number that is known, as integers rounded toward zero or as truth values. A
/// number that the type does not hold is left to the runtime.
fn whole(call: &mut Call, x: ValueId, dtype: DType) -> Option<ValueId> {
    if !call.dtype(x).is_float() {
        return None;
    }
    let tensor = call.graph.value(x).tensor();
    let small = tensor.filter(|t| t.elements() <= MAX_KNOWN_ELEMENTS);
    let (dims, numbers) = match small {
        Some(tensor) => {
            let numbers = (0..tensor.elements() as usize).map(|i| tensor.get_f64(i));
            (tensor.dims.clone(), numbers.collect::<Option<Vec<f64>>>()?)
        }
        None => {
            let one = number(call.graph, &call.contents, x)?;
            (vec![1; call.rank(x)], vec![one])
        }
    };
    let (least, greatest) = dtype.int_range()?;
    let mut bytes = Vec::new();
    for number in numbers {
        let number = match dtype {
            DType::Bool => f64::from(u8::from(number != 0.0)),
            _ => number.trunc(),
        };
        // Larger doubles do not tell neighbours apart.
        let fits = number.abs() <= (1_i64 << 53) as f64;
        let number = Some(number as i64).filter(|n| fits && (least..=greatest).contains(n))?;
        bytes.extend_from_slice(Tensor::scalar_int(dtype, number).bytes()?);
    }
    let folded = Tensor::new(dtype, dims, bytes);
    let name = format!("{}.{dtype}", call.graph.value(x).name);
    Some(call.constant(&name, folded))
}

/// `CastLike`: the first operand in the element type of the second.
pub fn cast_like(call: &mut Call) -> Lowered {
    let [x, like] = call.operands(["input", "target_type"])?;
    let saturate = call.attr_int(SATURATE, 1)? != 0;
    call.ignore_attr("round_mode"); // It matters to one type only, which we do not have.
    let dtype = call.dtype(like);
    match whole(call, x, dtype) {
        Some(constant) => one(constant),
        None if dtype.is_float8() && call.dtype(x) != dtype => {
            one(rounded(&mut call.b, x, dtype, saturate)?)
        }
        None => one(call.cast(x, dtype)?),
    }
}

/// `Mod` of floating-point operands with the sign of the divisor (ONNX Mod-28, `fmod` = 0). It takes the remainder with the
/// sign of the dividend, and adds the divisor where the signs differ.
pub fn modulo(call: &mut Call) -> Lowered {
    let [a, b] = call.operands(["A", "B"])?;
    if !call.dtype(a).is_float() || call.peek_int("fmod") == Some(1) {
        return Ok(None);
    }
    call.ignore_attr("fmod");
    let [zero, minus_zero] = [0.0, -0.0].map(|v| call.scalar_like(a, v));
    let rest = call.emit(&MOD, &[a, b], Attrs::new().with("fmod", 1))?;
    let backward = call.op(&LESS, &[b, zero])?;
    let below = call.op(&LESS, &[rest, zero])?;
    let against = call.op(&XOR, &[backward, below])?;
    let turned = call.add(rest, b)?;
    let y = call.op(&WHERE, &[against, turned, rest])?;
    // A remainder of zero has the sign of the divisor as well.
    let none = call.op(&EQUAL, &[rest, zero])?;
    let signed = call.op(&WHERE, &[backward, minus_zero, zero])?;
    one(call.op(&WHERE, &[none, signed, y])?)
}

/// `Hardmax`: 1 at the first of the largest elements along an axis, 0 elsewhere.
pub fn hardmax(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let rank = call.rank(x);
    // Until opset 12 the axes from `axis` on are flattened, which is the same only on the last axis.
    let axis = call.attr_int("axis", if call.opset < 13 { 1 } else { -1 })?;
    let is_read = |a: &usize| call.opset >= 13 || a + 1 == rank;
    let Some(axis) = from_start(axis, rank).filter(is_read) else {
        return Err(call.unsupported(format!("axis {axis} in opset {}", call.opset)));
    };
    let attrs = Attrs::new().with("axis", axis as i64);
    let best = call.emit(&ARG_MAX, &[x], attrs)?;
    let places = call.positions(x, axis)?;
    let mut dims = vec![1; rank];
    dims[axis] = -1;
    let places = call.reshape(places, &dims)?;
    let hit = call.op(&EQUAL, &[places, best])?;
    one(call.cast_like(hit, x)?)
}

/// The sum of the broadcast operands, divided by their number.
pub fn mean(call: &mut Call) -> Lowered {
    let mut all = vec![call.need(0, "data_0")?];
    while let Some(next) = call.opt(all.len()) {
        all.push(next);
    }
    let sum = Term(call.op(&SUM, &all)?);
    one(call.eval(sum / all.len() as f64)?)
}

/// x + bias below -lambd, x - bias above lambd, 0 between.
pub fn shrink(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let (bias, lambd) = (
        call.attr_float("bias", 0.0)?,
        call.attr_float("lambd", 0.5)?,
    );
    let [bias, high, low, zero] =
        [bias, lambd, -lambd, 0.0].map(|v| call.scalar_like(x, f64::from(v)));
    let below = call.op(&LESS, &[x, low])?;
    let above = call.op(&GREATER, &[x, high])?;
    let (raised, lowered) = (call.add(x, bias)?, call.sub(x, bias)?);
    let y = call.op(&WHERE, &[above, lowered, zero])?;
    one(call.op(&WHERE, &[below, raised, y])?)
}

/// x / (1 + |x|).
pub fn softsign(call: &mut Call) -> Lowered {
    let x = Term(call.need(0, "input")?);
    one(call.eval(x / (1.0 + unary_op(&ABS, x)))?)
}

/// x above alpha, 0 elsewhere.
pub fn thresholded_relu(call: &mut Call) -> Lowered {
    let x = Term(call.need(0, "X")?);
    let alpha = f64::from(call.attr_float("alpha", 1.0)?);
    one(call.eval(select(binary_op(&GREATER, x, alpha), x, 0.0))?)
}

/// `EyeLike`: a matrix of the operand's shape with ones on diagonal `k`.
pub fn eye_like(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    call.want_rank(x, &[2], "input")?;
    let dtype = call.attr_dtype("dtype")?.unwrap_or(call.dtype(x));
    let shift = call.attr_int("k", 0)?;
    let (rows, columns) = (call.positions(x, 0)?, call.positions(x, 1)?);
    let shift = call.int(shift);
    let rows = call.add(rows, shift)?;
    let rows = call.unsqueeze(rows, &[1])?;
    let on = call.op(&EQUAL, &[rows, columns])?;
    one(call.cast(on, dtype)?)
}
