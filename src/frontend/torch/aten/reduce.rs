//! Ops that reduce axes: sums, means, extremes, norms and deviations. Also cumulative sums.

use super::super::value::Value;
use super::pointwise::float_self;
use super::signature::{Call, Formula, Op, along};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::{EmitExt, arith, index, logic, math, power, reduce, scan, select, shape};

pub const FORMULAS: &[Formula] = &[
    "max(self: t, other: t) => maximum(self, other)",
    "min(self: t, other: t) => minimum(self, other)",
];

pub const OPS: &[Op] = &[
    (
        "{all,any}(self: t); \
         {all,any}(self: t, dim: I, keepdim: b?); \
         {_is_all_true,_is_any_true}(self: t)",
        quantified,
    ),
    (
        "{amax,amin}(self: t, dim: I?, keepdim: b?); \
         {max,min}(self: t)",
        plain,
    ),
    ("arg{max,min}(self: t, dim: i?, keepdim: b?)", arg),
    ("cumsum(self: t, dim: i, *, dtype: d?)", cumsum),
    (
        "linalg_vector_norm(self: t, ord: f?, dim: I?, keepdim: b?, *, dtype: d?); \
         norm(self: t, p: f?); \
         norm(self: t, p: f?, dim: I, keepdim: b?, *, dtype: d?)",
        norm,
    ),
    ("logsumexp(self: t, dim: I, keepdim: b?)", |c| {
        let x = float_self(c)?;
        reduced(c, &reduce::REDUCE_LOG_SUM_EXP, x)
    }),
    ("{max,min}(self: t, dim: i, keepdim: b?)", extreme_at),
    (
        "{sum,mean,prod}(self: t, *, dtype: d?); \
         {sum,mean,prod}(self: t, dim: I?, keepdim: b?, *, dtype: d?)",
        summed,
    ),
    (
        "{std,var}(self: t, unbiased: b?); \
         {std,var}(self: t, dim: I?, unbiased: b?, keepdim: b?); \
         {std,var}(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        deviation,
    ),
];

/// Returns true for an op that is about the largest elements.
fn is_max(c: &Call) -> bool {
    c.name.contains("max")
}

/// Emits a reduction over axes.
pub(super) fn over(
    c: &mut Call,
    op: &'static OpDef,
    x: ValueId,
    axes: &[usize],
    keep: bool,
) -> Result<ValueId> {
    let list: Vec<i64> = axes.iter().map(|a| *a as i64).collect();
    let list = c.low.b.ints(&list);
    // A reduction over no axes leaves the tensor as it is.
    let attrs = Attrs::new()
        .with("keepdims", i64::from(keep))
        .with("noop_with_empty_axes", 1);
    c.emit_with(op, &[x, list], attrs)
}

/// Emits a reduction of `x` over `dim` as the call asks for it.
fn reduced_value(c: &mut Call, op: &'static OpDef, x: ValueId) -> Result<ValueId> {
    let axes = c.axes("dim", c.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    over(c, op, x, &axes, keep)
}

fn reduced(c: &mut Call, op: &'static OpDef, x: ValueId) -> Result<Value> {
    let y = reduced_value(c, op, x)?;
    c.made(y)
}

/// Lowers a largest or smallest element.
fn plain(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    match is_max(c) {
        true => reduced(c, &reduce::REDUCE_MAX, x),
        false => reduced(c, &reduce::REDUCE_MIN, x),
    }
}

/// Returns `self` in `dtype` if it is given. Integers are added in int64.
fn computed_in(c: &mut Call) -> Result<ValueId> {
    let x = c.value("self")?;
    let own = c.dtype(x);
    let natural = if own.is_float() { own } else { DType::I64 };
    let dtype = c.dtype_or(natural)?;
    c.low.b.cast(x, dtype)
}

/// Lowers `sum`, `mean` and `prod`.
fn summed(c: &mut Call) -> Result<Value> {
    let x = computed_in(c)?;
    let op = match c.name.as_str() {
        "mean" => &reduce::REDUCE_MEAN,
        "prod" => &reduce::REDUCE_PROD,
        _ => &reduce::REDUCE_SUM,
    };
    reduced(c, op, x)
}

/// Lowers `all` and `any`.
fn quantified(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let x = c.low.truth(x)?;
    let x = c.low.b.cast(x, DType::I32)?;
    let op = match c.name.contains("all") {
        true => &reduce::REDUCE_MIN,
        false => &reduce::REDUCE_MAX,
    };
    let y = reduced_value(c, op, x)?;
    // The extremes of no elements are those of the type: all are true, and none is.
    let zero = c.low.b.scalar(DType::I32, 0.0);
    c.result(&logic::GREATER, &[y, zero])
}

/// Emits the index of an extreme along an axis.
fn place(c: &mut Call, x: ValueId, axis: usize, keep: bool) -> Result<ValueId> {
    let op = match is_max(c) {
        true => &select::ARG_MAX,
        false => &select::ARG_MIN,
    };
    c.emit_with(op, &[x], along(axis).with("keepdims", i64::from(keep)))
}

fn arg(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let keep = c.bool("keepdim", false)?;
    let y = if c.has("dim") {
        let axis = c.axis("dim", 0, c.rank(x))?;
        place(c, x, axis, keep)?
    } else {
        let flat = c.flattened(x)?;
        place(c, flat, 0, false)?
    };
    c.made(y)
}

/// Lowers the extreme along an axis, and the index of the first element with it, which gets the gradient.
fn extreme_at(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let axis = c.axis("dim", 0, c.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    let at = place(c, x, axis, true)?;
    let values = c.emit_with(&index::GATHER_ELEMENTS, &[x, at], along(axis))?;
    let mut results = Vec::with_capacity(2);
    for mut v in [values, at] {
        if !keep {
            let axes = c.low.b.ints(&[axis as i64]);
            v = c.emit(&shape::SQUEEZE, &[v, axes])?;
        }
        results.push(c.made(v)?);
    }
    Ok(Value::Tuple(results))
}

fn cumsum(c: &mut Call) -> Result<Value> {
    let x = computed_in(c)?;
    if c.rank(x) == 0 {
        return c.made(x);
    }
    let axis = c.axis("dim", 0, c.rank(x))?;
    let axis = c.low.b.int(axis as i64);
    c.result(&scan::CUM_SUM, &[x, axis])
}

fn norm(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let dtype = c.dtype_or(c.dtype(x))?;
    let x = c.low.b.cast(x, dtype)?;
    let p = c.float(c.either(&["ord", "p"]), 2.0)?;
    if p == 2.0 {
        return reduced(c, &reduce::REDUCE_L2, x);
    }
    if p == 1.0 {
        return reduced(c, &reduce::REDUCE_L1, x);
    }
    let size = c.emit(&arith::ABS, &[x])?;
    if p == f64::INFINITY {
        return reduced(c, &reduce::REDUCE_MAX, size);
    }
    if p == f64::NEG_INFINITY {
        return reduced(c, &reduce::REDUCE_MIN, size);
    }
    if p == 0.0 {
        let names = [("type", dtype.into())];
        return c.formula(&names, "to(sum(self != 0, dim, keepdim), type)");
    }
    let order = c.low.b.scalar(dtype, p);
    let powers = c.emit(&power::POW, &[size, order])?;
    let sum = reduced_value(c, &reduce::REDUCE_SUM, powers)?;
    let root = c.low.b.scalar(dtype, 1.0 / p);
    c.result(&power::POW, &[sum, root])
}

/// Returns the number of reduced elements as a scalar of that type.
pub(super) fn count(c: &mut Call, x: ValueId, axes: &[usize], dtype: DType) -> Result<ValueId> {
    let dims = &c.low.b.ty(x).dims;
    let count = axes.iter().fold(Dim::ONE, |n, axis| n.mul(&dims[*axis]));
    c.low.operand(&count.into(), dtype)
}

/// Lowers `var`, the variance about the mean, and `std`, its root.
fn deviation(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let axes = c.axes("dim", c.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    let correction = match c.has("correction") {
        true => c.float("correction", 1.0)?,
        false => f64::from(u8::from(c.bool("unbiased", true)?)),
    };
    let mean = over(c, &reduce::REDUCE_MEAN, x, &axes, true)?;
    let off = c.low.b.sub(x, mean)?;
    let square = c.low.b.mul(off, off)?;
    let y = if correction == 0.0 {
        over(c, &reduce::REDUCE_MEAN, square, &axes, keep)?
    } else {
        let sum = over(c, &reduce::REDUCE_SUM, square, &axes, keep)?;
        let n = count(c, x, &axes, c.dtype(x))?;
        let correction = c.scalar_like(x, correction);
        let n = c.low.b.sub(n, correction)?;
        c.low.b.div(sum, n)?
    };
    match c.name.as_str() {
        "std" => c.result(&math::SQRT, &[y]),
        _ => c.made(y),
    }
}
