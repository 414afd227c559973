//! What attention and its gradient mean in standard ops: all scores at once, keys and values repeated for their queries.
//!
//! For any ONNX runtime, which makes no promise on memory. Computed in the type that the kernel computes in.

use super::plan::{DLSE, GRAD_SEGMENTS, SEGMENTS, empty_is_nan, groups};
use crate::names::*;
use crate::reduce::{reduce_axes, sum_kept};
use crate::rule::*;
use crate::shape::transpose;
use crate::sum_to::sum_down;
use ckpt_ir::error::Result;
use ckpt_ir::op::BodyCx;
use ckpt_ir::{Attrs, DType, Emit, Same, ValueId};

/// Operands, as many key heads as query heads, in the type computed in, and the probabilities.
struct Rows {
    q: Term,
    k: Term,
    v: Term,
    rank: usize,
    /// Key heads repeated this often.
    groups: i64,
    /// tanh of the capped scores.
    capped: Option<Term>,
    /// exp(score − largest score).
    weights: Term,
    /// [L…, Hq, Sq, 1]: the largest score, and the sum of the weights.
    top: Term,
    sum: Term,
}

/// Builds attention in standard ops.
pub fn forward(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let outs = cx.outs.clone();
    if has_no_keys(cx, 0) {
        let mut results = vec![zeros_of(cx, 0, 2)?];
        if outs.len() > 1 {
            let shape = cx.b.sizes(cx.x(0), 0..outs[1].rank())?;
            let none = cx.b.scalar(outs[1].dtype, f64::NEG_INFINITY);
            results.push(cx.b.expand(none, shape)?);
        }
        return Ok(results);
    }
    let rows = rows_of(cx, 0, SEGMENTS)?;
    let product = cx.bind(binary_op(MATMUL, rows.weights, rows.v))?;
    let divisor = divisor_of(cx, &rows)?;
    let mut results = vec![cx.eval(cast(product / divisor, outs[0].dtype))?];
    if outs.len() > 1 {
        let lse = cx.eval(unary_op(LOG, rows.sum) + rows.top)?;
        results.push(cx.b.squeeze(lse, &[-1])?);
    }
    Ok(results)
}

/// With P the probabilities: dv = Pᵀ·dy, dP = dy·vᵀ, slopes = P·(dP − Σ P·dP), the bias's gradient; dq = scale·slopes·k,
/// dk = scale·slopesᵀ·q, the slopes times 1 − tanh² where scores are capped. The log-sum-exp's cotangent adds P·dlse to the slopes.
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
    let rows = rows_of(cx, 1, GRAD_SEGMENTS)?;
    let dy = cx.widened(cx.x(0))?;
    let divisor = divisor_of(cx, &rows)?;
    let p = cx.bind(rows.weights / divisor)?;
    let last = rows.rank - 1;
    let v = swap_last(cx, rows.v)?;
    let dp = cx.bind(binary_op(MATMUL, dy, v))?;
    let mut along = Term(sum_kept(cx.b, p * dp, &[last])?);
    if let Some(dlse) = cx.opt_x(DLSE) {
        let dlse = cx.b.unsqueeze(dlse, &[-1])?;
        along = cx.bind(along - dlse)?;
    }
    let slopes = cx.bind(p * (dp - along))?;
    let inner = match rows.capped {
        Some(t) => {
            let slope = cx.bind(1.0 - t * t)?;
            cx.bind(slopes * slope)?
        }
        None => slopes,
    };
    let scale = cx.number(dy, f64::from(cx.attrs.float("scale")));
    let mut results = Vec::new();
    for want in wants {
        let like = cx.x(want as usize + 1);
        let wide = match want {
            0 => cx.eval(binary_op(MATMUL, inner, rows.k) * scale)?,
            1 => {
                let flipped = swap_last(cx, inner)?;
                let dk = cx.eval(binary_op(MATMUL, flipped, rows.q) * scale)?;
                gathered(cx, &rows, dk, like)?
            }
            2 => {
                let flipped = swap_last(cx, p)?;
                let dv = cx.eval(binary_op(MATMUL, flipped, dy))?;
                gathered(cx, &rows, dv, like)?
            }
            _ => {
                let dims = cx.ty(like).dims;
                sum_down(cx.b, slopes.0, &dims, |b| b.shape(like))?
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
    let rows = cx.b.sizes(q, 0..ty.rank() - 1)?;
    let size = cx.b.sizes(v, ty.rank() - 1..ty.rank())?;
    let shape = cx.b.concat(&[rows, size], 0)?;
    let zero = cx.b.scalar(ty.dtype, 0.0);
    cx.b.expand(zero, shape)
}

fn swap_last(cx: &mut BodyCx, v: Term) -> Result<Term> {
    let rank = cx.b.rank(v.0);
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(rank - 1, rank - 2);
    transpose(cx.b, v.0, perm).map(Term)
}

/// What the weights of a query are divided by: 1 instead of 0 where a query that sees no key gives zeros.
fn divisor_of(cx: &mut BodyCx, rows: &Rows) -> Result<Term> {
    if empty_is_nan(cx.attrs) {
        return Ok(rows.sum);
    }
    // The largest score of a query has the weight 1, so that its sum is 0 or at least 1.
    cx.bind(binary_op(MAX, rows.sum, 1.0))
}

/// Scores, masked, and their weights; operands start at slot `at`, and `segments` has its own.
fn rows_of(cx: &mut BodyCx, at: usize, segments: usize) -> Result<Rows> {
    let (q, k, v) = (cx.x(at), cx.x(at + 1), cx.x(at + 2));
    let rank = cx.b.rank(q);
    let groups = match rank.checked_sub(3) {
        Some(i) => groups(&cx.ty(q).dims[i], &cx.ty(k).dims[i]).unwrap_or(1),
        None => 1,
    };
    let (q, k, v) = (cx.widened(q)?, cx.widened(k)?, cx.widened(v)?);
    // Without heads, nothing is repeated.
    let heads = rank.saturating_sub(3);
    let k = Term(repeated(cx.b, k.0, heads, groups)?);
    let v = Term(repeated(cx.b, v.0, heads, groups)?);
    let dtype = cx.ty(q.0).dtype;
    let keys = swap_last(cx, k)?;
    let scale = f64::from(cx.attrs.float("scale"));
    let mut scores = cx.bind(binary_op(MATMUL, q, keys) * scale)?;
    let cap = f64::from(cx.attrs.float("softcap"));
    let mut capped = None;
    if cap != 0.0 {
        let cap = cx.number(scores, cap);
        let tanh = cx.bind(unary_op(TANH, scores / cap))?;
        scores = cx.bind(tanh * cap)?;
        capped = Some(tanh);
    }
    if let Some(bias) = cx.opt_x(at + 3) {
        scores = match cx.ty(bias).dtype {
            DType::Bool => hidden(cx, scores, bias)?,
            _ => cx.bind(scores + cast(bias, dtype))?,
        };
    }
    if let Some(seen) = band(cx, q.0, k.0)? {
        scores = hidden(cx, scores, seen.0)?;
    }
    if let Some(segments) = cx.opt_x(segments) {
        let same = same_segment(cx, q.0, k.0, segments)?;
        scores = hidden(cx, scores, same)?;
    }
    let top = reduce_axes(cx.b, REDUCE_MAX, scores, &[rank - 1], true)?;
    // A row of −∞ alone: its weights are then 0, not NaN.
    let top = cx.bind(binary_op(MAX, top, lowest(dtype)))?;
    let weights = cx.bind(unary_op(EXP, scores - top))?;
    let sum = Term(sum_kept(cx.b, weights, &[rank - 1])?);
    Ok(Rows {
        q,
        k,
        v,
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
fn hidden(cx: &mut BodyCx, scores: Term, seen: ValueId) -> Result<Term> {
    cx.bind(select(seen, scores, f64::NEG_INFINITY))
}

/// Returns `x` with each index of an axis repeated `times` times in a row.
pub fn repeated(b: &mut dyn Emit, x: ValueId, axis: usize, times: i64) -> Result<ValueId> {
    if times == 1 {
        return Ok(x);
    }
    let rank = b.rank(x);
    let apart = b.unsqueeze(x, &[axis as i64 + 1])?;
    let mut group = vec![1; rank + 1];
    group[axis + 1] = times;
    let group = b.ints(&group);
    let wide = b.expand(apart, group)?;
    let size = b.sizes(x, axis..axis + 1)?;
    let times = b.ints(&[times]);
    let mut shape = vec![b.mul(size, times)?];
    if axis + 1 < rank {
        shape.push(b.sizes(x, axis + 1..rank)?);
    }
    if axis > 0 {
        shape.insert(0, b.sizes(x, 0..axis)?);
    }
    let shape = b.concat(&shape, 0)?;
    b.reshape_to(wide, shape)
}

/// Undoes [`repeated`] for a gradient: summed over the queries of each key head. `like` has the key heads.
fn gathered(cx: &mut BodyCx, rows: &Rows, dx: ValueId, like: ValueId) -> Result<ValueId> {
    if rows.groups == 1 {
        return Ok(dx);
    }
    let rank = rows.rank;
    let times = cx.b.ints(&[rows.groups]);
    let shape = [
        cx.b.sizes(like, 0..rank - 2)?,
        times,
        cx.b.sizes(like, rank - 2..rank)?,
    ];
    let shape = cx.b.concat(&shape, 0)?;
    let apart = cx.b.reshape_to(dx, shape)?;
    reduce_axes(cx.b, REDUCE_SUM, apart, &[rank - 2], false)
}

/// Which keys a query may see by their places, bool [Sq, Sk]; `None` where that is all of them.
fn band(cx: &mut BodyCx, q: ValueId, k: ValueId) -> Result<Option<Term>> {
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
    let back = cx.bind(Term(keys) - queries)?;
    let rows = Term(cx.b.counted(queries)?);
    let places = cx.bind(rows + back)?;
    let column = cx.b.ints(&[1]);
    let places = cx.bind(binary_op(UNSQUEEZE, places, column))?;
    let columns = cx.b.counted(keys)?;
    let mut seen = None;
    if let Some(n) = left {
        let n = cx.b.int(n);
        seen = Some(cx.bind(binary_op(GREATER_OR_EQUAL, columns, places - n))?);
    }
    if let Some(n) = right {
        let n = cx.b.int(n);
        let before = cx.bind(binary_op(LESS_OR_EQUAL, columns, places + n))?;
        seen = Some(match seen {
            Some(after) => cx.bind(binary_op(AND, after, before))?,
            None => before,
        });
    }
    Ok(seen)
}

/// Which keys are of a query's segment, bool [L…, 1, Sq, Sk].
fn same_segment(cx: &mut BodyCx, q: ValueId, k: ValueId, segments: ValueId) -> Result<ValueId> {
    let rank = cx.b.rank(q);
    let mut keys = segments;
    if cx.b.rank(segments) > 1 {
        keys = cx.b.unsqueeze(keys, &[-2])?;
    }
    let mut own = keys;
    let size = |v: ValueId| cx.ty(v).dims[rank - 2].clone();
    if size(q).same(&size(k)) != Same::Yes {
        // Those of the last keys. A slice would have a size that only a run knows.
        let (queries, all) = (length(cx, q)?, length(cx, k)?);
        let back = cx.bind(Term(all) - queries)?;
        let rows = Term(cx.b.counted(queries)?);
        let places = cx.bind(rows + back)?;
        let last = cx.b.rank(own) as i64 - 1;
        own =
            cx.b.emit(GATHER, &[own, places.0], Attrs::new().with("axis", last))?;
    }
    let own = cx.b.unsqueeze(own, &[-1])?;
    let keys = cx.b.unsqueeze(keys, &[-2])?;
    cx.eval(binary_op(EQUAL, own, keys))
}

/// The size of the last axis but one, as a scalar.
fn length(cx: &mut BodyCx, x: ValueId) -> Result<ValueId> {
    let rank = cx.b.rank(x);
    let size = cx.b.sizes(x, rank - 2..rank - 1)?;
    cx.b.squeeze(size, &[0])
}
