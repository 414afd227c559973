//! What attention and its gradient mean in standard ops: all scores at once, keys and values repeated for their queries.
//!
//! For any ONNX runtime, which makes no promise on memory. Computed in the type that the kernel computes in.

use super::{empty_is_nan, groups};
use crate::error::Result;
use crate::ir::op::BodyCx;
use crate::ir::{Attrs, Builder, DType, ValueId};
use crate::ops::activation::TANH;
use crate::ops::axes::sizes;
use crate::ops::concat::CONCAT;
use crate::ops::extreme::MAX;
use crate::ops::fill::RANGE;
use crate::ops::logic::{AND, GREATER_OR_EQUAL, LESS_OR_EQUAL, WHERE};
use crate::ops::math::{EXP, LOG};
use crate::ops::matmul::MATMUL;
use crate::ops::reduce::{REDUCE_MAX, REDUCE_SUM, reduce_axes, sum_kept};
use crate::ops::rules::{emit, widen};
use crate::ops::shape::{EXPAND, RESHAPE, SQUEEZE, UNSQUEEZE, transpose};
use crate::ops::sum_to::sum_down;

/// Operands, as many key heads as query heads, in the type computed in, and the probabilities.
struct Rows {
    q: ValueId,
    k: ValueId,
    v: ValueId,
    dtype: DType,
    rank: usize,
    /// Key heads repeated this often.
    groups: i64,
    /// tanh of the capped scores.
    capped: Option<ValueId>,
    /// exp(score − largest score).
    weights: ValueId,
    /// [L…, Hq, Sq, 1]: the largest score, and the sum of the weights.
    top: ValueId,
    sum: ValueId,
}

pub fn forward(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let outs = cx.outs.clone();
    if has_no_keys(cx, 0) {
        let mut results = vec![zeros_of(cx, 0, 2)?];
        if outs.len() > 1 {
            let shape = sizes(cx.b, cx.x(0), 0..outs[1].rank())?;
            let none = cx.b.scalar(outs[1].dtype, f64::NEG_INFINITY);
            results.push(emit(cx.b, &EXPAND, &[none, shape])?);
        }
        return Ok(results);
    }
    let rows = rows_of(cx, 0)?;
    let product = emit(cx.b, &MATMUL, &[rows.weights, rows.v])?;
    let divisor = divisor_of(cx, &rows)?;
    let y = cx.b.div(product, divisor)?;
    let mut results = vec![cx.b.cast(y, outs[0].dtype)?];
    if outs.len() > 1 {
        let log = emit(cx.b, &LOG, &[rows.sum])?;
        let lse = cx.b.add(log, rows.top)?;
        let last = cx.b.ints(&[-1]);
        results.push(emit(cx.b, &SQUEEZE, &[lse, last])?);
    }
    Ok(results)
}

/// With P the probabilities: dv = Pᵀ·dy, dP = dy·vᵀ, slopes = P·(dP − Σ P·dP), the bias's gradient; dq = scale·slopes·k,
/// dk = scale·slopesᵀ·q, the slopes times 1 − tanh² where scores are capped.
pub fn backward(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let wants = cx.attrs.ints("wants").to_vec();
    if has_no_keys(cx, 1) {
        let mut results = Vec::new();
        for want in wants {
            let x = cx.x(want as usize + 1);
            results.push(cx.b.filled_like(x, 0.0)?);
        }
        return Ok(results);
    }
    let rows = rows_of(cx, 1)?;
    let dy = widen(cx.b, cx.x(0))?;
    let divisor = divisor_of(cx, &rows)?;
    let p = cx.b.div(rows.weights, divisor)?;
    let last = rows.rank - 1;
    let v = swap_last(cx, rows.v)?;
    let dp = emit(cx.b, &MATMUL, &[dy, v])?;
    let product = cx.b.mul(p, dp)?;
    let along = sum_kept(cx.b, product, &[last])?;
    let rest = cx.b.sub(dp, along)?;
    let slopes = cx.b.mul(p, rest)?;
    let inner = match rows.capped {
        Some(t) => {
            let square = cx.b.mul(t, t)?;
            let one = cx.b.scalar(rows.dtype, 1.0);
            let slope = cx.b.sub(one, square)?;
            cx.b.mul(slopes, slope)?
        }
        None => slopes,
    };
    let scale = cx.b.scalar(rows.dtype, f64::from(cx.attrs.float("scale")));
    let mut results = Vec::new();
    for want in wants {
        let like = cx.x(want as usize + 1);
        let wide = match want {
            0 => {
                let dq = emit(cx.b, &MATMUL, &[inner, rows.k])?;
                cx.b.mul(dq, scale)?
            }
            1 => {
                let flipped = swap_last(cx, inner)?;
                let dk = emit(cx.b, &MATMUL, &[flipped, rows.q])?;
                let dk = cx.b.mul(dk, scale)?;
                gathered(cx, &rows, dk, like)?
            }
            2 => {
                let flipped = swap_last(cx, p)?;
                let dv = emit(cx.b, &MATMUL, &[flipped, dy])?;
                gathered(cx, &rows, dv, like)?
            }
            _ => {
                let dims = cx.ty(like).dims;
                sum_down(cx.b, slopes, &dims, |b| b.shape(like))?
            }
        };
        let narrow = cx.ty(like).dtype;
        results.push(cx.b.cast(wide, narrow)?);
    }
    Ok(results)
}

/// Whether there is no key for certain, which a maximum over keys would not survive.
fn has_no_keys(cx: &BodyCx, q: usize) -> bool {
    let k = cx.ty(cx.x(q + 1));
    k.dims[k.rank() - 2].as_const() == Some(0)
}

/// Zeros of the shape of the result; `v` is its third operand.
fn zeros_of(cx: &mut BodyCx, q: usize, v: usize) -> Result<ValueId> {
    let (q, v) = (cx.x(q), cx.x(v));
    let ty = cx.ty(q);
    let rows = sizes(cx.b, q, 0..ty.rank() - 1)?;
    let size = sizes(cx.b, v, ty.rank() - 1..ty.rank())?;
    let shape =
        cx.b.emit(&CONCAT, &[rows, size], Attrs::new().with("axis", 0))?;
    let zero = cx.b.scalar(ty.dtype, 0.0);
    emit(cx.b, &EXPAND, &[zero, shape])
}

fn swap_last(cx: &mut BodyCx, v: ValueId) -> Result<ValueId> {
    let rank = cx.b.rank(v);
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(rank - 1, rank - 2);
    transpose(cx.b, v, perm)
}

/// What the weights of a query are divided by: 1 instead of 0 where a query that sees no key gives zeros.
fn divisor_of(cx: &mut BodyCx, rows: &Rows) -> Result<ValueId> {
    if empty_is_nan(cx.attrs) {
        return Ok(rows.sum);
    }
    // The largest score of a query has the weight 1, so that its sum is 0 or at least 1.
    let one = cx.b.scalar(rows.dtype, 1.0);
    emit(cx.b, &MAX, &[rows.sum, one])
}

/// Scores, masked, and their weights; operands start at slot `at`.
fn rows_of(cx: &mut BodyCx, at: usize) -> Result<Rows> {
    let (q, k, v) = (cx.x(at), cx.x(at + 1), cx.x(at + 2));
    let rank = cx.b.rank(q);
    let groups = match rank.checked_sub(3) {
        Some(i) => groups(&cx.ty(q).dims[i], &cx.ty(k).dims[i]).unwrap_or(1),
        None => 1,
    };
    let (q, k, v) = (widen(cx.b, q)?, widen(cx.b, k)?, widen(cx.b, v)?);
    let (k, v) = (repeated(cx.b, k, groups)?, repeated(cx.b, v, groups)?);
    let dtype = cx.ty(q).dtype;
    let keys = swap_last(cx, k)?;
    let mut scores = emit(cx.b, &MATMUL, &[q, keys])?;
    let scale = cx.b.scalar(dtype, f64::from(cx.attrs.float("scale")));
    scores = cx.b.mul(scores, scale)?;
    let cap = f64::from(cx.attrs.float("softcap"));
    let mut capped = None;
    if cap != 0.0 {
        let cap = cx.b.scalar(dtype, cap);
        let small = cx.b.div(scores, cap)?;
        let tanh = emit(cx.b, &TANH, &[small])?;
        scores = cx.b.mul(tanh, cap)?;
        capped = Some(tanh);
    }
    if let Some(bias) = cx.ins.get(at + 3).copied().flatten() {
        scores = match cx.ty(bias).dtype {
            DType::Bool => hidden(cx, scores, bias)?,
            _ => {
                let bias = cx.b.cast(bias, dtype)?;
                cx.b.add(scores, bias)?
            }
        };
    }
    if let Some(seen) = band(cx, q, k)? {
        scores = hidden(cx, scores, seen)?;
    }
    let top = reduce_axes(cx.b, &REDUCE_MAX, scores, &[rank - 1], true)?;
    // A row of −∞ alone: its weights are then 0, not NaN.
    let lowest = cx.b.scalar(dtype, lowest(dtype));
    let top = emit(cx.b, &MAX, &[top, lowest])?;
    let less = cx.b.sub(scores, top)?;
    let weights = emit(cx.b, &EXP, &[less])?;
    let sum = sum_kept(cx.b, weights, &[rank - 1])?;
    Ok(Rows {
        q,
        k,
        v,
        dtype,
        rank,
        groups,
        capped,
        weights,
        top,
        sum,
    })
}

/// The lowest finite number.
fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MIN,
        _ => f64::from(f32::MIN),
    }
}

/// The scores, −∞ where `seen` is false.
fn hidden(cx: &mut BodyCx, scores: ValueId, seen: ValueId) -> Result<ValueId> {
    let dtype = cx.ty(scores).dtype;
    let nothing = cx.b.scalar(dtype, f64::NEG_INFINITY);
    emit(cx.b, &WHERE, &[seen, scores, nothing])
}

/// Each head `times` times in a row: of [.., heads, rows, columns].
pub fn repeated(b: &mut Builder, x: ValueId, times: i64) -> Result<ValueId> {
    if times == 1 {
        return Ok(x);
    }
    let rank = b.rank(x);
    let axis = Attrs::new().with("axis", 0);
    let at = b.ints(&[rank as i64 - 2]);
    let apart = emit(b, &UNSQUEEZE, &[x, at])?;
    let mut group = vec![1; rank + 1];
    group[rank - 2] = times;
    let group = b.ints(&group);
    let wide = emit(b, &EXPAND, &[apart, group])?;
    let heads = sizes(b, x, rank - 3..rank - 2)?;
    let times = b.ints(&[times]);
    let heads = b.mul(heads, times)?;
    let mut shape = vec![heads, sizes(b, x, rank - 2..rank)?];
    if rank > 3 {
        shape.insert(0, sizes(b, x, 0..rank - 3)?);
    }
    let shape = b.emit(&CONCAT, &shape, axis)?;
    b.emit(&RESHAPE, &[wide, shape], Attrs::new().with("allowzero", 1))
}

fn reshaped(cx: &mut BodyCx, x: ValueId, shape: ValueId) -> Result<ValueId> {
    let attrs = Attrs::new().with("allowzero", 1);
    cx.b.emit(&RESHAPE, &[x, shape], attrs)
}

/// Undoes [`repeated`] for a gradient: summed over the queries of each key head. `like` has the key heads.
fn gathered(cx: &mut BodyCx, rows: &Rows, dx: ValueId, like: ValueId) -> Result<ValueId> {
    if rows.groups == 1 {
        return Ok(dx);
    }
    let rank = rows.rank;
    let times = cx.b.ints(&[rows.groups]);
    let shape = [
        sizes(cx.b, like, 0..rank - 2)?,
        times,
        sizes(cx.b, like, rank - 2..rank)?,
    ];
    let shape = cx.b.emit(&CONCAT, &shape, Attrs::new().with("axis", 0))?;
    let apart = reshaped(cx, dx, shape)?;
    reduce_axes(cx.b, &REDUCE_SUM, apart, &[rank - 2], false)
}

/// Which keys a query may see by their places, bool [Sq, Sk]; `None` where that is all of them.
fn band(cx: &mut BodyCx, q: ValueId, k: ValueId) -> Result<Option<ValueId>> {
    let limit = |name: &str| Some(cx.attrs.int(name)).filter(|n| *n >= 0);
    let left = limit("window_left");
    let right = match cx.attrs.int("causal") {
        0 => limit("window_right"),
        _ => Some(0),
    };
    if left.is_none() && right.is_none() {
        return Ok(None);
    }
    let (queries, keys) = (length(cx, q)?, length(cx, k)?);
    let back = cx.b.sub(keys, queries)?;
    let rows = positions(cx, queries)?;
    let places = cx.b.add(rows, back)?;
    let column = cx.b.ints(&[1]);
    let places = emit(cx.b, &UNSQUEEZE, &[places, column])?;
    let columns = positions(cx, keys)?;
    let mut seen = None;
    if let Some(n) = left {
        let n = cx.b.int(n);
        let first = cx.b.sub(places, n)?;
        seen = Some(emit(cx.b, &GREATER_OR_EQUAL, &[columns, first])?);
    }
    if let Some(n) = right {
        let n = cx.b.int(n);
        let last = cx.b.add(places, n)?;
        let before = emit(cx.b, &LESS_OR_EQUAL, &[columns, last])?;
        seen = Some(match seen {
            Some(after) => emit(cx.b, &AND, &[after, before])?,
            None => before,
        });
    }
    Ok(seen)
}

/// The size of the last axis but one, as a scalar.
fn length(cx: &mut BodyCx, x: ValueId) -> Result<ValueId> {
    let rank = cx.b.rank(x);
    let size = sizes(cx.b, x, rank - 2..rank - 1)?;
    let first = cx.b.ints(&[0]);
    emit(cx.b, &SQUEEZE, &[size, first])
}

/// 0, 1, … short of `count`.
fn positions(cx: &mut BodyCx, count: ValueId) -> Result<ValueId> {
    let (zero, one) = (cx.b.int(0), cx.b.int(1));
    emit(cx.b, &RANGE, &[zero, count, one])
}
