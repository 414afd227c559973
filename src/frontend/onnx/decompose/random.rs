//! Random tensors: `RandomUniform`, `RandomNormal`, their `Like` forms, and `Bernoulli` (ONNX operator specifications).
//!
//! All draw from the seed of the step (see `passes/ops/random.rs`); the file's own `seed` would give every step the same
//! numbers, so that it is left out.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, ValueId};
use ckpt_passes::ops::logic::LESS;
use ckpt_passes::ops::math::{COS, LOG, SQRT};
use ckpt_passes::ops::random::UNIFORM;
use std::f64::consts::TAU;

fn one(v: ValueId) -> Result<Option<Vec<Out>>> {
    Ok(Some(vec![Out::Value(v)]))
}

/// float32 in [0, 1).
fn uniform01(call: &mut Call, shape: ValueId) -> Result<ValueId> {
    let (seed, stream) = (call.seed()?, call.stream());
    call.b.emit(&UNIFORM, &[shape, seed, stream], Attrs::new())
}

/// The shape and element type that the node asks for.
fn wanted(call: &mut Call) -> Result<(ValueId, DType)> {
    call.ignore("seed");
    let dtype = call.dtype_attribute("dtype")?;
    let asked = call.ints("shape")?;
    let (shape, default) = match (asked, call.opt(0)) {
        (Some(shape), None) => (call.b.ints(&shape), DType::F32),
        (None, Some(like)) => (call.b.shape(like)?, call.dtype(like)),
        _ => return Err(call.fail("attribute", "`shape` is missing")),
    };
    let dtype = dtype.unwrap_or(default);
    if !dtype.is_float() {
        return Err(call.fail("type", format!("random numbers of element type {dtype}")));
    }
    Ok((shape, dtype))
}

/// low + (high - low)·u.
pub fn uniform(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (low, high) = (call.float("low", 0.0)?, call.float("high", 1.0)?);
    let (shape, dtype) = wanted(call)?;
    let draw = uniform01(call, shape)?;
    let wide = call.scaled(draw, f64::from(high) - f64::from(low))?;
    let low = call.b.scalar(DType::F32, f64::from(low));
    let y = call.b.add(wide, low)?;
    one(call.b.cast(y, dtype)?)
}

/// mean + scale·√(-2 ln(1 - u))·cos(2πv): G. Box and M. Muller, 1958.
pub fn normal(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (mean, scale) = (call.float("mean", 0.0)?, call.float("scale", 1.0)?);
    let (shape, dtype) = wanted(call)?;
    let (u, v) = (uniform01(call, shape)?, uniform01(call, shape)?);
    let unit = call.b.scalar(DType::F32, 1.0);
    let rest = call.b.sub(unit, u)?;
    let log = call.b.emit(&LOG, &[rest], Attrs::new())?;
    let radius = call.scaled(log, -2.0)?;
    let radius = call.b.emit(&SQRT, &[radius], Attrs::new())?;
    let angle = call.scaled(v, TAU)?;
    let angle = call.b.emit(&COS, &[angle], Attrs::new())?;
    let y = call.b.mul(radius, angle)?;
    let y = call.scaled(y, f64::from(scale))?;
    let mean = call.b.scalar(DType::F32, f64::from(mean));
    let y = call.b.add(y, mean)?;
    one(call.b.cast(y, dtype)?)
}

/// 1 with the probability that the operand says, else 0.
pub fn bernoulli(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let p = call.need(0, "input")?;
    call.ignore("seed");
    let dtype = call.dtype_attribute("dtype")?.unwrap_or(call.dtype(p));
    let shape = call.b.shape(p)?;
    let draw = uniform01(call, shape)?;
    let p = call.b.cast(p, DType::F32)?;
    let hit = call.b.emit(&LESS, &[draw, p], Attrs::new())?;
    one(call.b.cast(hit, dtype)?)
}
