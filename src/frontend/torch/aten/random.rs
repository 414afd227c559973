//! Random tensors. All draw from the seed of the step, so each step has its own numbers (see `passes/ops/random.rs`).

use super::super::value::Value;
use super::lowering::DEFAULT_FLOAT;
use super::signature::{Call, Formula, Op};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::Attrs;
use ckpt_passes::ops::EmitExt;

/// `uniform_below` is of other formulas here: whole numbers in [0, count), in floating point. A float32 draw times a large
/// count may be rounded up to the count.
pub const FORMULAS: &[Formula] = &[
    "bernoulli(self: t, *, generator) => to(rand_like(self, dtype=float32) < self, dtype(self))",
    "bernoulli(self: t, p: f, *, generator) => to(rand_like(self, dtype=float32) < p, dtype(self))",
    // The logarithm of a number above 0 and below 1, so that a result is neither 0 nor infinite.
    "exponential(self: t, lambd: f = 1.0, *, generator) => \
     log(1.0 - rand_like(self) - 4.4703484e-8) * (-1.0 / lambd)",
    "{normal,normal_functional}(self: t, mean: f, std: f, *, generator) => randn_like(self) * std + mean",
    "normal(mean: t, std: ts = 1.0, *, generator) => randn_like(mean) * std + mean",
    "normal(mean: f, std: t, *, generator) => randn_like(std) * std + mean",
    "normal(mean: f, std: f, size: I, *, generator, dtype: d?, layout, device, pin_memory) => \
     randn(size, dtype=dtype) * std + mean",
    "randint(high: i, size: I, *, generator, dtype: d?, layout, device, pin_memory) => \
     to(uniform_below(rand(size), high), given(dtype) ? dtype : int64)",
    "randint(low: i, high: i, size: I, *, generator, dtype: d?, layout, device, pin_memory) => \
     to(uniform_below(rand(size), high - low) + low, given(dtype) ? dtype : int64)",
    "randint_like(self: t, high: i, *, dtype: d?, layout, device, pin_memory, memory_format) => \
     to(uniform_below(rand_like(self, dtype=float32), high), given(dtype) ? dtype : dtype(self))",
    "randint_like(self: t, low: i, high: i, *, dtype: d?, layout, device, pin_memory, memory_format) => \
     to(uniform_below(rand_like(self, dtype=float32), high - low) + low, given(dtype) ? dtype : dtype(self))",
    "randperm(n: i, *, generator, dtype: d?, layout, device, pin_memory) => \
     to(argsort(rand([n])), given(dtype) ? dtype : int64)",
    "uniform(self: t, from: f = 0.0, to: f = 1.0, *, generator) => rand_like(self) * (to - from) + from",
    "uniform_below(self: t, count: i) => clamp_max(floor(self * count), count - 1)",
];

pub const OPS: &[Op] = &[(
    "{rand,randn}(size: I, *, generator, names, dtype: d?, layout, device, pin_memory); \
     {rand,randn}_like(self: t, *, dtype: d?, layout, device, pin_memory, memory_format)",
    drawn,
)];

/// Lowers `rand`, numbers of [0, 1), and `randn`, numbers of the normal distribution.
fn drawn(c: &mut Call) -> Result<Value> {
    let (dims, natural) = match c.dims("size")? {
        Some(dims) => (dims, DEFAULT_FLOAT),
        None => (c.sizes("self")?, c.low.dtype(c.tensor("self")?)),
    };
    let dtype = c.dtype_or(natural)?;
    let zero = c.low.b.scalar(dtype, 0.0);
    let like = c.low.broadcast_to(zero, &dims)?;
    let op = match c.name.starts_with("randn") {
        true => "RandomNormalLike",
        false => "RandomUniformLike",
    };
    let y = standard(&mut c.low.b, op, &Attrs::new(), &[Some(like)], 1)?[0];
    c.made(y)
}
