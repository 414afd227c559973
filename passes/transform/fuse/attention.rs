//! `Attention` out of its parts.

use super::{Found, Pattern, with_lead};
use crate::analysis::attention::form::{Blind, Form, Keys};
use crate::analysis::attention::mask::Part;
use crate::analysis::matcher::Reading;
use crate::error::Result;
use crate::ir::build::same_dims;
use crate::ir::op::OpClass;
use crate::ir::{Attrs, Builder, DType, ValueId};
use crate::ops::reduce::{REDUCE_MEAN, reduce_axes};
use crate::ops::{arith, attention, logic, shape};
use std::cmp::Ordering;

/// An attention that nothing keeps from being one op.
pub struct Whole(Form);

/// All attentions that nothing stands in the way of, in order.
pub fn find(reading: &mut Reading) -> Vec<Found<Whole>> {
    let nodes = &reading.flow.nodes;
    nodes.iter().filter_map(|id| whole(reading, *id)).collect()
}

fn whole(reading: &mut Reading, id: crate::ir::NodeId) -> Option<Found<Whole>> {
    let node = reading.graph.node(id);
    if node.op.class != OpClass::Softmax {
        return None;
    }
    let form = reading.attention(id).filter(|f| f.obstacle.is_none())?;
    Some(Found {
        output: form.output,
        what: Whole(form),
    })
}

impl Pattern for Whole {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        let form = &mut self.0;
        let keys = match &mut form.keys {
            Keys::Value(v) | Keys::Transpose(v) => v,
        };
        let mut all = vec![&mut form.queries, keys, &mut form.values];
        all.extend(form.mask.parts.iter_mut().map(|p| match p {
            Part::Bias(value) | Part::Keep { value, .. } => value,
        }));
        all
    }

    fn word(&self) -> &'static str {
        "attentions"
    }

    fn build(self, b: &mut Builder) -> Result<ValueId> {
        let form = self.0;
        let dims = form.dims;
        let output = b.ty(form.output).clone();
        let mut k = form.keys.value();
        if let Keys::Transpose(_) = form.keys {
            let mut perm: Vec<i64> = (0..b.rank(k) as i64).collect();
            let last = perm.len() - 1;
            perm.swap(last, last - 1);
            k = b.emit(&shape::TRANSPOSE, &[k], Attrs::new().with("perm", perm))?;
        }
        let (mut q, mut v) = (form.queries, form.values);
        // Scores that are masked with batch and heads apart, of queries in which they are one axis.
        let lead = dims.len() - 2;
        let apart = dims[..lead] != b.ty(q).dims[..b.rank(q) - 2];
        if apart {
            for operand in [&mut q, &mut k, &mut v] {
                *operand = with_lead(b, *operand, form.scores, lead, 2)?;
            }
        }
        let dtype = b.ty(q).dtype;
        let mut scale = form.scale;
        if dtype == DType::F64 && f64::from(scale as f32) != scale {
            // The attribute is a float32: in float64 the queries take the scale, as they did before.
            let factor = b.scalar(dtype, scale);
            q = b.mul(q, factor)?;
            scale = 1.0;
        }
        let mut ins = vec![Some(q), Some(k), Some(v)];
        if let Some(mask) = joined(b, &form.mask.parts)? {
            ins.push(Some(mask));
        }
        let [.., queries, keys] = dims.as_slice() else {
            return Err(crate::error::Error::bug("fuse", "scores without axes"));
        };
        let (left, right) = form.mask.band.aligned(queries, keys).unwrap_or_default();
        let never_blind = form.mask.parts.is_empty() && form.mask.band_shows_all;
        let all_alike = form.mask.all_alike && !never_blind;
        let zeros = never_blind || all_alike || form.blind == Blind::Zeros;
        let attrs = Attrs::new()
            .with("scale", scale as f32)
            .with("softcap", form.softcap as f32)
            .with("causal", i64::from(right == Some(0)))
            .with("window_left", left.unwrap_or(-1))
            .with("window_right", right.filter(|r| *r > 0).unwrap_or(-1))
            .with("empty_rows", if zeros { "zeros" } else { "nan" });
        let y = match all_alike {
            true => {
                let made = b.emit_n(&attention::ATTENTION, ins, attrs, 2)?;
                mean_where_blind(b, made[0], made[1], v)?
            }
            false => b.emit_n(&attention::ATTENTION, ins, attrs, 1)?[0],
        };
        if same_dims(&b.ty(y).dims, &output.dims) {
            return Ok(y);
        }
        // Not the shape of the old output: it is about to be that of the new one.
        let whole = b.rank(form.queries) - 2;
        with_lead(b, y, form.queries, whole, 2)
    }
}

/// An attention's result with the mean of all values for each query that sees no key: one whose log-sum-exp is −∞.
fn mean_where_blind(b: &mut Builder, y: ValueId, lse: ValueId, v: ValueId) -> Result<ValueId> {
    let rank = b.rank(y);
    let lowest = b.scalar(b.ty(lse).dtype, f64::NEG_INFINITY);
    let sees = b.emit(&logic::GREATER, &[lse, lowest], Attrs::new())?;
    let last = b.ints(&[-1]);
    let sees = b.emit(&shape::UNSQUEEZE, &[sees, last], Attrs::new())?;
    let mut mean = reduce_axes(b, &REDUCE_MEAN, v, &[rank - 2], true)?;
    if rank > 2 {
        let heads = |b: &Builder, x: ValueId| b.ty(x).dims[rank - 3].clone();
        let groups = attention::groups(&heads(b, y), &heads(b, v)).unwrap_or(1);
        mean = attention::repeated(b, mean, groups)?;
    }
    b.emit(&logic::WHERE, &[sees, y, mean], Attrs::new())
}

/// All parts of a mask as one operand: boolean where all parts are.
fn joined(b: &mut Builder, parts: &[Part]) -> Result<Option<ValueId>> {
    let mut keep: Option<ValueId> = None;
    let mut bias: Option<ValueId> = None;
    for part in parts {
        match *part {
            Part::Keep { value, keep: same } => {
                let seen = positive(b, value, same)?;
                keep = Some(match keep {
                    Some(other) => b.emit(&logic::AND, &[other, seen], Attrs::new())?,
                    None => seen,
                });
            }
            Part::Bias(value) => bias = Some(sum(b, bias, value)?),
        }
    }
    Ok(match (keep, bias) {
        (Some(keep), Some(bias)) => {
            let of = b.ty(bias).dtype;
            let hidden = select(b, keep, true, f64::NEG_INFINITY, of)?;
            Some(sum(b, Some(bias), hidden)?)
        }
        (keep, bias) => keep.or(bias),
    })
}

fn positive(b: &mut Builder, value: ValueId, keep: bool) -> Result<ValueId> {
    if keep {
        return Ok(value);
    }
    b.emit(&logic::NOT, &[value], Attrs::new())
}

/// 0 where a boolean is `keep`, `fill` elsewhere.
fn select(b: &mut Builder, v: ValueId, keep: bool, fill: f64, dtype: DType) -> Result<ValueId> {
    let (zero, low) = (b.scalar(dtype, 0.0), b.scalar(dtype, fill));
    let (then, otherwise) = if keep { (zero, low) } else { (low, zero) };
    b.emit(&logic::WHERE, &[v, then, otherwise], Attrs::new())
}

/// The sum of two biases, in the wider of their types.
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
