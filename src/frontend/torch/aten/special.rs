//! Sizes and numbers of tensors, and functions that no row has.

use super::Value;
use super::pointwise::float_self;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Dim, ValueId};
use ckpt_passes::ops::{arith, logic, math};
use std::f64::consts::PI;

pub const OPS: &[Op] = &[
    ("Int(a: t)", number),
    ("ScalarImplicit(a: t)", number),
    ("_local_scalar_dense(self: t)", number),
    ("dim(self: t)", |c| {
        Ok(Value::Int(Dim::from(
            c.low.dims(c.tensor("self")?).len() as i64
        )))
    }),
    ("erfinv(self: t)", erfinv),
    ("expm1(self: t)", expm1),
    ("item(self: t)", number),
    ("log1p(self: t)", log1p),
    ("numel(self: t)", numel),
    ("size(self: t)", sizes),
    ("size(self: t, dim: i)", size),
    ("sym_numel(self: t)", numel),
    ("sym_size(self: t)", sizes),
    ("sym_size(self: t, dim: i)", size),
];

fn sizes(c: &mut Call) -> Result<Value> {
    let dims = c.low.dims(c.tensor("self")?).to_vec();
    Ok(Value::List(dims.into_iter().map(Value::Int).collect()))
}

fn size(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let size = c.low.dims(x).get(axis).cloned();
    size.map(Value::Int)
        .ok_or_else(|| c.fail("axis", "a scalar has no sizes"))
}

fn numel(c: &mut Call) -> Result<Value> {
    let dims = c.low.dims(c.tensor("self")?);
    Ok(Value::Int(Dim::product(dims)))
}

/// What a tensor of one integer holds, where that is known before a run.
fn number(c: &mut Call) -> Result<Value> {
    let named = if c.has("a") { "a" } else { "self" };
    let x = c.tensor(named)?;
    Ok(match c.low.as_int(x)? {
        Some(n) if c.low.dtype(x) == ckpt_passes::ir::DType::Bool => match n.as_const() {
            Some(n) => Value::Bool(n != 0),
            None => Value::Unknown,
        },
        Some(n) => Value::Int(n),
        None => Value::Unknown,
    })
}

/// exp(x) − 1 without cancellation near 0: 2·exp(x/2)·sinh(x/2).
fn expm1(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let half = c.low.b.scalar(c.low.b.ty(x).dtype, 0.5);
    let two = c.low.b.scalar(c.low.b.ty(x).dtype, 2.0);
    let x = c.low.b.mul(x, half)?;
    let grow = c.low.emit(&math::EXP, &[x])?;
    let sinh = c.low.emit(&ckpt_passes::ops::trig::SINH, &[x])?;
    let y = c.low.b.mul(grow, sinh)?;
    let y = c.low.b.mul(y, two)?;
    c.made(y)
}

/// log(1 + x) without cancellation near 0: x·log(u)/(u − 1) of u = 1 + x as it is rounded, and x where u is 1
/// (W. Kahan, in HP-15C Advanced Functions Handbook, 1982).
fn log1p(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let one = c.low.b.scalar(c.low.b.ty(x).dtype, 1.0);
    let u = c.low.b.add(x, one)?;
    let rounded = c.low.b.sub(u, one)?;
    let tiny = c.low.emit(&logic::EQUAL, &[u, one])?;
    let divisor = c.low.emit(&logic::WHERE, &[tiny, one, rounded])?;
    let log = c.low.emit(&math::LOG, &[u])?;
    let ratio = c.low.b.div(log, divisor)?;
    let ratio = c.low.emit(&logic::WHERE, &[tiny, one, ratio])?;
    let y = c.low.b.mul(x, ratio)?;
    c.made(y)
}

/// The inverse of erf: a first guess to 2·10⁻³ (S. Winitzki, 2008), then steps of Newton's method, each of which
/// squares the error. The derivative of the last step is that of the inverse.
fn erfinv(c: &mut Call) -> Result<Value> {
    let y = float_self(c)?;
    let dtype = c.low.b.ty(y).dtype;
    let number = |c: &mut Call, x: f64| c.low.b.scalar(dtype, x);
    let one = number(c, 1.0);
    let square = c.low.b.mul(y, y)?;
    let rest = c.low.b.sub(one, square)?;
    let log = c.low.emit(&math::LOG, &[rest])?;
    const A: f64 = 0.147;
    let (half, inverse) = (number(c, 0.5), number(c, 1.0 / A));
    let shift = number(c, 2.0 / (PI * A));
    let half_log = c.low.b.mul(log, half)?;
    let first = c.low.b.add(half_log, shift)?;
    let second = c.low.b.mul(log, inverse)?;
    let under = c.low.b.mul(first, first)?;
    let under = c.low.b.sub(under, second)?;
    let root = c.low.emit(&math::SQRT, &[under])?;
    let size = c.low.b.sub(root, first)?;
    let size = c.low.emit(&math::SQRT, &[size])?;
    let sign = c.low.emit(&arith::SIGN, &[y])?;
    let mut x = c.low.b.mul(sign, size)?;
    for _ in 0..3 {
        x = newton(c, x, y)?;
    }
    // At ±1 it is ±∞.
    let far = c.low.emit(&arith::ABS, &[y])?;
    let far = c.low.emit(&logic::EQUAL, &[far, one])?;
    let infinity = number(c, f64::INFINITY);
    let infinity = c.low.b.mul(sign, infinity)?;
    let x = c.low.emit(&logic::WHERE, &[far, infinity, x])?;
    c.made(x)
}

/// x − (erf(x) − y)·(√π/2)·exp(x²).
fn newton(c: &mut Call, x: ValueId, y: ValueId) -> Result<ValueId> {
    let dtype = c.low.b.ty(x).dtype;
    let erf = c.low.emit(&math::ERF, &[x])?;
    let off = c.low.b.sub(erf, y)?;
    let square = c.low.b.mul(x, x)?;
    let grow = c.low.emit(&math::EXP, &[square])?;
    let factor = c.low.b.scalar(dtype, PI.sqrt() / 2.0);
    let step = c.low.b.mul(off, grow)?;
    let step = c.low.b.mul(step, factor)?;
    c.low.b.sub(x, step)
}
