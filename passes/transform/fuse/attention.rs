//! Fuses `Attention`.

use super::pattern::{Found, Pattern, with_lead};
use crate::analysis::attention::decomposed::{Decomposed, EmptyRows, Keys};
use crate::analysis::attention::mask::{MaskOperand, Segments};
use crate::analysis::matcher::Matcher;
use crate::error::{Error, Result};
use crate::ir::op::OpClass;
use crate::ir::same_dims;
use crate::ir::{Attrs, DType, Dim, NodeId, ValueId};
use crate::ops::reduce::{REDUCE_MEAN, reduce_axes};
use crate::ops::{Builder, EmitExt, activation, arith, attention, logic, shape};
use std::cmp::Ordering;

/// A decomposed attention that one op can compute.
struct Fusible(Decomposed);

/// Returns the attention whose softmax a node is, where one op can compute it.
pub(super) fn find(m: &mut Matcher, id: NodeId) -> Option<Found> {
    if m.graph.node(id).op.class != OpClass::Softmax {
        return None;
    }
    let attention = m.attention(id).filter(|a| a.obstacle.is_none())?;
    Some(Found::new(attention.output, Fusible(attention)))
}

impl Pattern for Fusible {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        let found = &mut self.0;
        let keys = match &mut found.keys {
            Keys::Value(v) | Keys::Transpose(v) => v,
        };
        let mut all = vec![&mut found.queries, keys, &mut found.values];
        all.extend(found.mask.operands.iter_mut().map(|o| match o {
            MaskOperand::Bias(value) | MaskOperand::Keep { value, .. } => value,
        }));
        all.extend(found.mask.segments.iter_mut().map(|s| &mut s.value));
        all.extend(&mut found.sink);
        all
    }

    fn plural(&self) -> &'static str {
        "attentions"
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
        let found = self.0;
        let dims = found.dims;
        let output = b.ty(found.output).clone();
        let mut k = found.keys.value();
        if let Keys::Transpose(_) = found.keys {
            let mut perm: Vec<i64> = (0..b.rank(k) as i64).collect();
            let last = perm.len() - 1;
            perm.swap(last, last - 1);
            k = b.emit(&shape::TRANSPOSE, &[k], Attrs::new().with("perm", perm))?;
        }
        let (mut q, mut v) = (found.queries, found.values);
        // The scores are masked with batch and heads as two axes, and the queries merge them.
        let lead = dims.len() - 2;
        if dims[..lead] != b.ty(q).dims[..b.rank(q) - 2] {
            for operand in [&mut q, &mut k, &mut v] {
                *operand = with_lead(b, *operand, found.scores, lead, 2)?;
            }
        }
        let dtype = b.ty(q).dtype;
        let mut scale = found.scale;
        if dtype == DType::F64 && f64::from(scale as f32) != scale {
            // The attribute is a float32. In float64 the queries are scaled, as they were before.
            let factor = b.scalar(dtype, scale);
            q = b.mul(q, factor)?;
            scale = 1.0;
        }
        let mut ins = vec![Some(q), Some(k), Some(v)];
        if let Some(mask) = joined_mask(b, &found.mask.operands)? {
            ins.push(Some(mask));
        }
        if let Some(segments) = &found.mask.segments {
            ins.resize(attention::SEGMENTS, None);
            ins.push(Some(numbers_of(b, segments)?));
        }
        let [.., queries, keys] = dims.as_slice() else {
            return Err(Error::bug("fuse", "scores without axes"));
        };
        let (left, right) = found.mask.band.aligned(queries, keys).unwrap_or_default();
        let never_empty = found.mask.operands.is_empty() && found.mask.band_shows_all;
        // A query that sees no key gives all its weight to the sink.
        let has_sink = found.sink.is_some();
        let uniform = found.mask.empty_rows_are_uniform && !never_empty && !has_sink;
        let is_zero = never_empty || uniform || has_sink;
        let zeros = is_zero || found.empty_rows == EmptyRows::Zeros;
        let attrs = Attrs::new()
            .with("scale", scale as f32)
            .with("softcap", found.softcap as f32)
            .with("causal", i64::from(right == Some(0)))
            .with("window_left", left.unwrap_or(-1))
            .with("window_right", right.filter(|r| *r > 0).unwrap_or(-1))
            .with("empty_rows", if zeros { "zeros" } else { "nan" });
        let wants_lse = uniform || has_sink;
        let results = b.emit_n(
            &attention::ATTENTION,
            ins,
            attrs,
            1 + usize::from(wants_lse),
        )?;
        let y = match (&results[..], found.sink) {
            ([y, lse], Some(sink)) => beside_sink(b, *y, *lse, sink)?,
            ([y, lse], None) => mean_in_empty_rows(b, *y, *lse, v)?,
            _ => results[0],
        };
        if same_dims(&b.ty(y).dims, &output.dims) {
            return Ok(y);
        }
        // Not like the old output, which is about to be replaced by this value.
        let lead = b.rank(found.queries) - 2;
        with_lead(b, y, found.queries, lead, 2)
    }
}

/// Returns an attention's result beside a sink: the keys share the weight σ(lse − sink).
fn beside_sink(b: &mut Builder, y: ValueId, lse: ValueId, sink: ValueId) -> Result<ValueId> {
    let (narrow, wide) = (b.ty(y).dtype, b.ty(lse).dtype);
    let last = b.ints(&[-1]);
    let lse = b.emit(&shape::UNSQUEEZE, &[lse, last], Attrs::new())?;
    let sink = b.cast(sink, wide)?;
    let above = b.sub(lse, sink)?;
    let rest = b.emit(&activation::SIGMOID, &[above], Attrs::new())?;
    let rest = b.cast(rest, narrow)?;
    b.mul(y, rest)
}

/// Returns an attention's result with the mean of all values for each query that sees no key: its log-sum-exp is −∞.
fn mean_in_empty_rows(b: &mut Builder, y: ValueId, lse: ValueId, v: ValueId) -> Result<ValueId> {
    let rank = b.rank(y);
    let lowest = b.scalar(b.ty(lse).dtype, f64::NEG_INFINITY);
    let sees = b.emit(&logic::GREATER, &[lse, lowest], Attrs::new())?;
    let last = b.ints(&[-1]);
    let sees = b.emit(&shape::UNSQUEEZE, &[sees, last], Attrs::new())?;
    let mut mean = reduce_axes(b, &REDUCE_MEAN, v, &[rank - 2], true)?;
    if rank > 2 {
        let heads = |b: &Builder, x: ValueId| b.ty(x).dims[rank - 3].clone();
        let groups = attention::groups(&heads(b, y), &heads(b, v)).unwrap_or(1);
        mean = attention::repeated(b, mean, rank - 3, groups)?;
    }
    b.emit(&logic::WHERE, &[sees, y, mean], Attrs::new())
}

/// Returns segments as the op reads them: int64, without axes that the scores do not have.
fn numbers_of(b: &mut Builder, segments: &Segments) -> Result<ValueId> {
    let places = segments.at.iter().enumerate();
    let dropped = places.filter(|(_, i)| **i == Dim::ZERO);
    let dropped: Vec<i64> = dropped.map(|(axis, _)| axis as i64).collect();
    let mut numbers = b.cast(segments.value, DType::I64)?;
    if !dropped.is_empty() {
        let axes = b.ints(&dropped);
        numbers = b.emit(&shape::SQUEEZE, &[numbers, axes], Attrs::new())?;
    }
    Ok(numbers)
}

/// Returns all mask operands as one: boolean where all are.
fn joined_mask(b: &mut Builder, operands: &[MaskOperand]) -> Result<Option<ValueId>> {
    let mut keep: Option<ValueId> = None;
    let mut bias: Option<ValueId> = None;
    for operand in operands {
        match *operand {
            MaskOperand::Keep { value, keep: same } => {
                let seen = match same {
                    true => value,
                    false => b.emit(&logic::NOT, &[value], Attrs::new())?,
                };
                keep = Some(match keep {
                    Some(other) => b.emit(&logic::AND, &[other, seen], Attrs::new())?,
                    None => seen,
                });
            }
            MaskOperand::Bias(value) => bias = Some(sum(b, bias, value)?),
        }
    }
    let (Some(seen), Some(other)) = (keep, bias) else {
        return Ok(keep.or(bias));
    };
    let dtype = b.ty(other).dtype;
    let (zero, low) = (b.scalar(dtype, 0.0), b.scalar(dtype, f64::NEG_INFINITY));
    let hidden = b.emit(&logic::WHERE, &[seen, zero, low], Attrs::new())?;
    Ok(Some(sum(b, bias, hidden)?))
}

/// Returns the sum of two biases, in the wider of their types.
fn sum(b: &mut Builder, a: Option<ValueId>, c: ValueId) -> Result<ValueId> {
    let Some(a) = a else { return Ok(c) };
    let (left, right) = (b.ty(a).dtype, b.ty(c).dtype);
    let wide = match left.size_bytes().cmp(&right.size_bytes()) {
        _ if left == right => left,
        Ordering::Less => right,
        Ordering::Greater => left,
        // The two 16-bit types hold different numbers.
        Ordering::Equal => DType::F32,
    };
    let (a, c) = (b.cast(a, wide)?, b.cast(c, wide)?);
    b.emit(&arith::ADD, &[a, c], Attrs::new())
}
