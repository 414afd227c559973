//! Sums, means, extremes and other ops that make an axis disappear; cumulative sums.

use super::pointwise::float_self;
use super::signature::{Call, Op};
use super::{Value, compare};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::{arith, extreme, index, logic, math, power, reduce, scan, select, shape};

pub const OPS: &[Op] = &[
    ("all(self: t)", |c| quantified(c, true)),
    ("all(self: t, dim: I, keepdim: b?)", |c| quantified(c, true)),
    ("amax(self: t, dim: I?, keepdim: b?)", |c| {
        plain(c, &reduce::REDUCE_MAX)
    }),
    ("amin(self: t, dim: I?, keepdim: b?)", |c| {
        plain(c, &reduce::REDUCE_MIN)
    }),
    ("any(self: t)", |c| quantified(c, false)),
    ("any(self: t, dim: I, keepdim: b?)", |c| {
        quantified(c, false)
    }),
    ("argmax(self: t, dim: i?, keepdim: b?)", |c| {
        arg(c, &select::ARG_MAX)
    }),
    ("argmin(self: t, dim: i?, keepdim: b?)", |c| {
        arg(c, &select::ARG_MIN)
    }),
    ("cumsum(self: t, dim: i, *, dtype: d?)", cumsum),
    (
        "linalg_vector_norm(self: t, ord: f?, dim: I?, keepdim: b?, *, dtype: d?)",
        norm,
    ),
    ("logsumexp(self: t, dim: I, keepdim: b?)", |c| {
        plain(c, &reduce::REDUCE_LOG_SUM_EXP)
    }),
    ("max(self: t)", |c| plain(c, &reduce::REDUCE_MAX)),
    ("max(self: t, dim: i, keepdim: b?)", |c| {
        extreme_at(c, &select::ARG_MAX)
    }),
    ("max(self: t, other: t)", |c| pairwise(c, &extreme::MAX)),
    ("mean(self: t, *, dtype: d?)", |c| {
        summed(c, &reduce::REDUCE_MEAN)
    }),
    ("mean(self: t, dim: I?, keepdim: b?, *, dtype: d?)", |c| {
        summed(c, &reduce::REDUCE_MEAN)
    }),
    ("min(self: t)", |c| plain(c, &reduce::REDUCE_MIN)),
    ("min(self: t, dim: i, keepdim: b?)", |c| {
        extreme_at(c, &select::ARG_MIN)
    }),
    ("min(self: t, other: t)", |c| pairwise(c, &extreme::MIN)),
    ("norm(self: t, p: f?)", norm),
    (
        "norm(self: t, p: f?, dim: I, keepdim: b?, *, dtype: d?)",
        norm,
    ),
    ("prod(self: t, *, dtype: d?)", |c| {
        summed(c, &reduce::REDUCE_PROD)
    }),
    ("prod(self: t, dim: i, keepdim: b?, *, dtype: d?)", |c| {
        summed_int(c, &reduce::REDUCE_PROD)
    }),
    ("std(self: t, unbiased: b?)", |c| deviation(c, true)),
    ("std(self: t, dim: I?, unbiased: b?, keepdim: b?)", |c| {
        deviation(c, true)
    }),
    (
        "std(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        |c| deviation(c, true),
    ),
    ("sum(self: t, *, dtype: d?)", |c| {
        summed(c, &reduce::REDUCE_SUM)
    }),
    ("sum(self: t, dim: I?, keepdim: b?, *, dtype: d?)", |c| {
        summed(c, &reduce::REDUCE_SUM)
    }),
    ("var(self: t, unbiased: b?)", |c| deviation(c, false)),
    ("var(self: t, dim: I?, unbiased: b?, keepdim: b?)", |c| {
        deviation(c, false)
    }),
    (
        "var(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        |c| deviation(c, false),
    ),
];

/// A reduction over axes.
pub(super) fn over(
    c: &mut Call,
    op: &'static OpDef,
    x: ValueId,
    axes: &[usize],
    keep: bool,
) -> Result<ValueId> {
    let list: Vec<i64> = axes.iter().map(|a| *a as i64).collect();
    let list = c.low.b.ints(&list);
    // No axes to reduce: nothing is.
    let attrs = Attrs::new()
        .with("keepdims", i64::from(keep))
        .with("noop_with_empty_axes", 1);
    c.low.b.emit(op, &[x, list], attrs)
}

fn reduced(c: &mut Call, op: &'static OpDef, x: ValueId) -> Result<Value> {
    let axes = c.axes("dim", c.low.b.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    let y = over(c, op, x, &axes, keep)?;
    c.made(y)
}

fn plain(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = match op == &reduce::REDUCE_LOG_SUM_EXP {
        true => float_self(c)?,
        false => c.value("self")?,
    };
    reduced(c, op, x)
}

/// Computed in `dtype` where it is given; integers add up in int64.
fn computed_in(c: &mut Call) -> Result<ValueId> {
    let x = c.value("self")?;
    let own = c.low.b.ty(x).dtype;
    let natural = if own.is_float() { own } else { DType::I64 };
    let dtype = c.opt_dtype("dtype")?.unwrap_or(natural);
    c.low.b.cast(x, dtype)
}

fn summed(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = computed_in(c)?;
    reduced(c, op, x)
}

fn summed_int(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = computed_in(c)?;
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let axes: Vec<usize> = if c.low.b.rank(x) == 0 {
        vec![]
    } else {
        vec![axis]
    };
    let keep = c.bool("keepdim", false)?;
    let y = over(c, op, x, &axes, keep)?;
    c.made(y)
}

/// Whether all elements are true, or any is.
pub(super) fn quantified(c: &mut Call, all: bool) -> Result<Value> {
    let x = c.value("self")?;
    let x = compare::truth(c, x)?;
    let x = c.low.b.cast(x, DType::I32)?;
    let op = if all {
        &reduce::REDUCE_MIN
    } else {
        &reduce::REDUCE_MAX
    };
    let axes = c.axes("dim", c.low.b.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    let y = over(c, op, x, &axes, keep)?;
    // Of no elements the extremes are those of the type: all are true, and none is.
    let zero = c.low.b.scalar(DType::I32, 0.0);
    let y = c.low.emit(&logic::GREATER, &[y, zero])?;
    c.made(y)
}

fn pairwise(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let operands = super::pointwise::both(c, "self", "other")?;
    let y = c.low.emit(op, &operands)?;
    c.made(y)
}

fn place(c: &mut Call, op: &'static OpDef, x: ValueId, axis: usize, keep: bool) -> Result<ValueId> {
    let attrs = Attrs::new()
        .with("axis", axis as i64)
        .with("keepdims", i64::from(keep));
    c.low.b.emit(op, &[x], attrs)
}

fn arg(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    let keep = c.bool("keepdim", false)?;
    let y = match c.has("dim") {
        true => {
            let axis = c.axis("dim", 0, c.low.b.rank(x))?;
            place(c, op, x, axis, keep)?
        }
        false => {
            let all = c.low.b.ints(&[-1]);
            let flat = c.low.emit(&shape::RESHAPE, &[x, all])?;
            place(c, op, flat, 0, false)?
        }
    };
    c.made(y)
}

/// The extreme along an axis and where the first of its kind is; the gradient goes there.
fn extreme_at(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let keep = c.bool("keepdim", false)?;
    let at = place(c, op, x, axis, true)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let values = c.low.b.emit(&index::GATHER_ELEMENTS, &[x, at], attrs)?;
    let mut results = Vec::with_capacity(2);
    for v in [values, at] {
        let v = match keep {
            true => v,
            false => {
                let axes = c.low.b.ints(&[axis as i64]);
                c.low.emit(&shape::SQUEEZE, &[v, axes])?
            }
        };
        results.push(c.made(v)?);
    }
    Ok(Value::Tuple(results))
}

fn cumsum(c: &mut Call) -> Result<Value> {
    let x = computed_in(c)?;
    if c.low.b.rank(x) == 0 {
        return c.made(x);
    }
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let axis = c.low.b.int(axis as i64);
    let y = c.low.emit(&scan::CUM_SUM, &[x, axis])?;
    c.made(y)
}

fn norm(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.b.ty(x).dtype);
    let x = c.low.b.cast(x, dtype)?;
    let named = if c.has("ord") { "ord" } else { "p" };
    let p = c.float(named, 2.0)?;
    if p == 2.0 {
        return reduced(c, &reduce::REDUCE_L2, x);
    }
    if p == 1.0 {
        return reduced(c, &reduce::REDUCE_L1, x);
    }
    let size = c.low.emit(&arith::ABS, &[x])?;
    match p {
        p if p == f64::INFINITY => reduced(c, &reduce::REDUCE_MAX, size),
        p if p == f64::NEG_INFINITY => reduced(c, &reduce::REDUCE_MIN, size),
        0.0 => {
            let set = c.run("ne", [c.given("self"), 0.into()])?;
            let y = c.run("sum", [set, c.given("dim"), c.given("keepdim")])?;
            c.run("to", [y, Value::DType(dtype)])
        }
        p => {
            let order = c.low.b.scalar(dtype, p);
            let powers = c.low.emit(&power::POW, &[size, order])?;
            let axes = c.axes("dim", c.low.b.rank(x))?;
            let keep = c.bool("keepdim", false)?;
            let sum = over(c, &reduce::REDUCE_SUM, powers, &axes, keep)?;
            let root = c.low.b.scalar(dtype, 1.0 / p);
            let y = c.low.emit(&power::POW, &[sum, root])?;
            c.made(y)
        }
    }
}

/// How many elements are reduced, as a number of that type.
pub(super) fn count(c: &mut Call, x: ValueId, axes: &[usize], dtype: DType) -> Result<ValueId> {
    let dims: Vec<Dim> = axes
        .iter()
        .map(|a| c.low.b.ty(x).dims[*a].clone())
        .collect();
    let count = Value::Int(Dim::product(&dims));
    c.low.scalar_of(&count, dtype)
}

/// Variance about the mean; its root for `root`.
fn deviation(c: &mut Call, root: bool) -> Result<Value> {
    let x = float_self(c)?;
    let axes = c.axes("dim", c.low.b.rank(x))?;
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
        let dtype = c.low.b.ty(x).dtype;
        let n = count(c, x, &axes, dtype)?;
        let correction = c.low.b.scalar(dtype, correction);
        let n = c.low.b.sub(n, correction)?;
        c.low.b.div(sum, n)?
    };
    let y = if root {
        c.low.emit(&math::SQRT, &[y])?
    } else {
        y
    };
    c.made(y)
}
