//! Random tensors: `RandomUniform`, `RandomNormal`, their `Like` forms, and `Bernoulli` (ONNX operator specifications).
//!
//! All draw from the seed of the step (see `passes/ops/random.rs`). The file's own `seed` is ignored, because it would give
//! every step the same numbers.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::logic::LESS;
use ckpt_passes::ops::math::{COS, LOG, SQRT};
use ckpt_passes::ops::random::UNIFORM;
use ckpt_passes::ops::rule::{Formulas, Term, binary_op, cast, unary_op};
use std::f64::consts::TAU;

/// Draws float32 numbers in [0, 1).
fn uniform01(call: &mut Call, shape: ValueId) -> Result<Term> {
    let (seed, stream) = (call.seed()?, call.stream());
    call.op(&UNIFORM, &[shape, seed, stream]).map(Term)
}

/// Returns the shape and element type that the node asks for.
fn wanted(call: &mut Call) -> Result<(ValueId, DType)> {
    call.ignore_attr("seed");
    let dtype = call.attr_dtype("dtype")?;
    let asked = call.attr_ints("shape")?;
    let (shape, default) = match (asked, call.opt(0)) {
        (Some(shape), None) => (call.ints(&shape), DType::F32),
        (None, Some(like)) => (call.shape(like)?, call.dtype(like)),
        _ => return Err(call.fail("attribute", "`shape` is missing")),
    };
    let dtype = dtype.unwrap_or(default);
    if !dtype.is_float() {
        return Err(call.fail("type", format!("random numbers of element type {dtype}")));
    }
    Ok((shape, dtype))
}

/// low + (high - low)·u.
pub fn uniform(call: &mut Call) -> Lowered {
    let (low, high) = (call.attr_float("low", 0.0)?, call.attr_float("high", 1.0)?);
    let (shape, dtype) = wanted(call)?;
    let draw = uniform01(call, shape)?;
    let (low, width) = (f64::from(low), f64::from(high) - f64::from(low));
    one(call.eval(cast(draw * width + low, dtype))?)
}

/// mean + scale·√(-2 ln(1 - u))·cos(2πv): G. Box and M. Muller, 1958.
pub fn normal(call: &mut Call) -> Lowered {
    let (mean, scale) = (
        call.attr_float("mean", 0.0)?,
        call.attr_float("scale", 1.0)?,
    );
    let (shape, dtype) = wanted(call)?;
    let (u, v) = (uniform01(call, shape)?, uniform01(call, shape)?);
    let radius = unary_op(&SQRT, unary_op(&LOG, 1.0 - u) * -2.0);
    let y = radius * unary_op(&COS, v * TAU) * f64::from(scale) + f64::from(mean);
    one(call.eval(cast(y, dtype))?)
}

/// `Bernoulli`: 1 with the probability that the operand gives, else 0.
pub fn bernoulli(call: &mut Call) -> Lowered {
    let p = call.need(0, "input")?;
    call.ignore_attr("seed");
    let dtype = call.attr_dtype("dtype")?.unwrap_or(call.dtype(p));
    let shape = call.shape(p)?;
    let draw = uniform01(call, shape)?;
    let hit = binary_op(&LESS, draw, cast(p, DType::F32));
    one(call.eval(cast(hit, dtype))?)
}
