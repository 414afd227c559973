//! Ops that reduce axes: sums, means, extremes, norms and deviations. Also cumulative sums.

use super::super::value::Value;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::EmitExt;

/// A reduction over no axes leaves the tensor as it is (`noop_with_empty_axes`).
pub const FORMULAS: &[Formula] = &[
    // The extremes of no elements are those of the type: all are true, and none is.
    "all(self: t, dim: I?, keepdim: b?); _is_all_true(self: t) => Greater(ReduceMin( \
     Cast(truth(self), to=int32), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1), 0)",
    "amax(self: t, dim: I?, keepdim: b?) => \
     ReduceMax(self, axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
    "amin(self: t, dim: I?, keepdim: b?) => \
     ReduceMin(self, axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
    "any(self: t, dim: I?, keepdim: b?); _is_any_true(self: t) => Greater(ReduceMax( \
     Cast(truth(self), to=int32), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1), 0)",
    "argmax(self: t, dim: i?, keepdim: b?) => given(dim) ? \
     ArgMax(self, axis=axis(self, dim), keepdims=keepdim) : ArgMax(Reshape(self, [-1]), axis=0, keepdims=0)",
    "argmin(self: t, dim: i?, keepdim: b?) => given(dim) ? \
     ArgMin(self, axis=axis(self, dim), keepdims=keepdim) : ArgMin(Reshape(self, [-1]), axis=0, keepdims=0)",
    "cumsum(self: t, dim: i, *, dtype: d?) => \
     x = summand(self, dtype); dim(x) == 0 ? x : CumSum(x, whole(axis(x, dim)))",
    "linalg_vector_norm(self: t, ord: f = 2.0, dim: I?, keepdim: b?, *, dtype: d?) => \
     x = in_type(floating(self), dtype); a = axes(x, dim); \
     ord == 2.0 ? ReduceL2(x, a, keepdims=keepdim, noop_with_empty_axes=1) : ord == 1.0 ? ReduceL1(x, a, keepdims=keepdim, noop_with_empty_axes=1) : \
     (size = Abs(x); ord == inf ? ReduceMax(size, a, keepdims=keepdim, noop_with_empty_axes=1) : ord == -inf ? ReduceMin(size, a, keepdims=keepdim, noop_with_empty_axes=1) : \
     ord == 0.0 ? to(sum(self != 0, dim, keepdim), dtype(x)) : \
     Pow(ReduceSum(Pow(size, ord), a, keepdims=keepdim, noop_with_empty_axes=1), 1.0 / ord))",
    "frobenius_norm(self: t, dim: I?, keepdim: b?) => linalg_vector_norm(self, 2.0, dim, keepdim)",
    "logsumexp(self: t, dim: I, keepdim: b?) => \
     ReduceLogSumExp(floating(self), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
    "max(self: t) => amax(self)",
    // The index is that of the first element with the extreme, which gets the gradient.
    "max(self: t, dim: i, keepdim: b?) => \
     a = axis(self, dim); at = ArgMax(self, axis=a, keepdims=1); top = GatherElements(self, at, axis=a); \
     keepdim ? (top, at) : (Squeeze(top, [a]), Squeeze(at, [a]))",
    "max(self: t, other: t) => maximum(self, other)",
    "mean(self: t, dim: I?, keepdim: b?, *, dtype: d?) => \
     ReduceMean(summand(self, dtype), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
    "min(self: t) => amin(self)",
    "min(self: t, dim: i, keepdim: b?) => \
     a = axis(self, dim); at = ArgMin(self, axis=a, keepdims=1); least = GatherElements(self, at, axis=a); \
     keepdim ? (least, at) : (Squeeze(least, [a]), Squeeze(at, [a]))",
    "min(self: t, other: t) => minimum(self, other)",
    "norm(self: t, p: f = 2.0, dim: I?, keepdim: b?, *, dtype: d?) => \
     linalg_vector_norm(self, p, dim, keepdim, dtype=dtype)",
    "prod(self: t, dim: I?, keepdim: b?, *, dtype: d?) => \
     ReduceProd(summand(self, dtype), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
    "sum(self: t, dim: I?, keepdim: b?, *, dtype: d?) => \
     ReduceSum(summand(self, dtype), axes(self, dim), keepdims=keepdim, noop_with_empty_axes=1)",
];

pub const OPS: &[Op] = &[
    ("{cummax,cummin}(self: t, dim: i)", running_extreme),
    (
        "linalg_norm(self: t, ord: f?, dim: I?, keepdim: b?, *, dtype: d?); \
         linalg_norm(self: t, ord: S, dim: I?, keepdim: b?, *, dtype: d?); \
         linalg_matrix_norm(self: t, ord: fS?, dim: I?, keepdim: b?, *, dtype: d?)",
        matrix_norm,
    ),
    (
        "{std,var}(self: t, unbiased: b?); \
         {std,var}(self: t, dim: I?, unbiased: b?, keepdim: b?); \
         {std,var}(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        deviation,
    ),
];

/// Lowers `cummax` and `cummin`: the extreme of the elements so far, and the place of the last element that equals it. Each
/// round covers twice as many elements as the one before.
fn running_extreme(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let dims = c.low.dims(x).to_vec();
    let Some(size) = dims.get(axis).map_or(Some(1), Dim::as_const) else {
        return Err(c
            .fail("shape", "the size along the axis is not known")
            .help("export with a fixed size along it"));
    };
    let column = vec![1; dims.len().saturating_sub(axis + 1)];
    let names = [
        ("axis", Value::from(axis as i64)),
        ("column", [vec![size], column].concat().into()),
        ("size", size.into()),
    ];
    let mut at = c.formula(&names, "expand(reshape(arange(size), column), size(self))")?;
    let mut best = c.run("detach", [c.given("self")])?;
    let largest = c.name == "cummax";
    let mut covered = 1;
    while covered < size {
        let names = [
            ("axis", Value::from(axis as i64)),
            ("covered", covered.into()),
            ("rest", (size - covered).into()),
            ("best", best),
            ("at", at),
            ("largest", largest.into()),
        ];
        let both = c.formula(
            &names,
            "early = narrow(best, axis, 0, rest); late = narrow(best, axis, covered, rest); \
             wins = (largest ? late >= early : late <= early) | isnan(late); \
             value = where(wins, late, early); \
             place = where(wins, narrow(at, axis, covered, rest), narrow(at, axis, 0, rest)); \
             (cat([narrow(best, axis, 0, covered), value], axis), cat([narrow(at, axis, 0, covered), place], axis))",
        )?;
        let [value, place] = both.members() else {
            return Err(c.fail("op", "a round has two results"));
        };
        (best, at) = (value.clone(), place.clone());
        covered *= 2;
    }
    let names = [("axis", (axis as i64).into()), ("at", at)];
    c.formula(
        &names,
        "dim(self) == 0 ? (clone(self), at) : (gather(self, axis, at), at)",
    )
}

/// Lowers norms of vectors, of matrices (two axes), and of all elements.
fn matrix_norm(c: &mut Call) -> Result<Value> {
    let rank = c.sizes("self")?.len();
    let order = match c.given("ord") {
        Value::Str(word) if word == "fro" => None,
        Value::Str(word) => return Err(c.unsupported(format!("the norm `{word}`"))),
        number => number.number(),
    };
    let natural = match c.name.as_str() {
        "linalg_matrix_norm" => vec![-2, -1],
        // An order for a matrix is one of its rows or columns.
        _ if order.is_some() && rank == 2 => vec![0, 1],
        _ => Vec::new(),
    };
    let axes = c.ints("dim")?.unwrap_or(natural);
    let names = |rows: i64, columns: i64| {
        [
            ("rows", Value::from(rows)),
            ("columns", Value::from(columns)),
            ("all", axes.clone().into()),
            ("size", order.map_or(Value::Float(2.0), Value::Float)),
        ]
    };
    let (Some(order), [rows, columns]) = (order, axes.as_slice()) else {
        return c.formula(
            &names(0, 0),
            "linalg_vector_norm(self, size, all, keepdim, dtype=dtype)",
        );
    };
    // The largest or smallest sum of a row or column.
    let (summed, compared) = if order.abs() == 1.0 {
        (rows, columns)
    } else {
        (columns, rows)
    };
    if order.abs() != 1.0 && order.is_finite() {
        return Err(c.unsupported(format!("the norm {order} of a matrix")));
    }
    c.formula(
        &names(*summed, *compared),
        "sums = linalg_vector_norm(self, 1.0, rows, true, dtype=dtype); \
         y = size > 0 ? amax(sums, columns, true) : amin(sums, columns, true); keepdim ? y : squeeze(y, all)",
    )
}

/// Lowers `var`, the variance about the mean, and `std`, its root.
fn deviation(c: &mut Call) -> Result<Value> {
    let variance = c.formula(
        &[],
        "x = floating(self); a = axes(x, dim); \
         off = Sub(x, ReduceMean(x, a, keepdims=1, noop_with_empty_axes=1)); square = Mul(off, off); \
         less = given(correction) ? correction : given(unbiased) ? (unbiased ? 1.0 : 0.0) : 1.0; \
         less == 0.0 ? ReduceMean(square, a, keepdims=keepdim, noop_with_empty_axes=1) : \
         (sum = ReduceSum(square, a, keepdims=keepdim, noop_with_empty_axes=1); \
         Div(sum, Sub(like(count(x, a), x), less)))",
    )?;
    match c.name.as_str() {
        "std" => c.formula(&[("variance", variance)], "Sqrt(variance)"),
        _ => Ok(variance),
    }
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

/// Returns the number of reduced elements as a scalar of that type.
pub(super) fn count(c: &mut Call, x: ValueId, axes: &[usize], dtype: DType) -> Result<ValueId> {
    let dims = &c.low.b.ty(x).dims;
    let count = axes.iter().fold(Dim::ONE, |n, axis| n.mul(&dims[*axis]));
    c.low.operand(&count.into(), dtype)
}
