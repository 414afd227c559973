//! Losses.

use super::Value;
use super::pointwise::both;
use super::reduce::over;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, OpDef, ValueId};
use ckpt_passes::ops::{arith, loss, reduce};

pub const OPS: &[Op] = &[
    (
        "cross_entropy_loss(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?, label_smoothing: f?)",
        |c| labelled(c, &loss::SOFTMAX_CROSS_ENTROPY_LOSS),
    ),
    ("l1_loss(self: t, target: t, reduction: i?)", |c| {
        distance(c, false)
    }),
    ("mse_loss(self: t, target: t, reduction: i?)", |c| {
        distance(c, true)
    }),
    (
        "nll_loss(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
    (
        "nll_loss_nd(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
];

/// PyTorch's numbers (ATen/core/Reduction.h).
fn reduction(c: &Call) -> Result<&'static str> {
    match c.int("reduction", 1)? {
        0 => Ok("none"),
        1 => Ok("mean"),
        2 => Ok("sum"),
        other => Err(c.unsupported(format!("`reduction` {other}"))),
    }
}

fn labelled(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (scores, labels) = (c.value("self")?, c.value("target")?);
    if c.low.b.ty(labels).dtype.is_float() {
        return Err(c.unsupported("a target of probabilities"));
    }
    if c.float("label_smoothing", 0.0)? != 0.0 {
        return Err(c.unsupported("`label_smoothing`"));
    }
    if c.low.b.rank(scores) < 2 {
        return Err(c.unsupported("scores without a batch"));
    }
    let attrs = Attrs::new()
        .with("reduction", reduction(c)?)
        .with("ignore_index", c.int("ignore_index", -100)?);
    let mut ins = vec![Some(scores), Some(labels)];
    if let Some(weight) = c.opt_value("weight")? {
        ins.push(Some(weight));
    }
    let y = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    c.made(y)
}

fn distance(c: &mut Call, squared: bool) -> Result<Value> {
    let [a, b] = both(c, "self", "target")?;
    let off = c.low.b.sub(a, b)?;
    let each = match squared {
        true => c.low.b.mul(off, off)?,
        false => c.low.emit(&arith::ABS, &[off])?,
    };
    let y = reduced(c, each)?;
    c.made(y)
}

fn reduced(c: &mut Call, each: ValueId) -> Result<ValueId> {
    let axes: Vec<usize> = (0..c.low.b.rank(each)).collect();
    match reduction(c)? {
        "none" => Ok(each),
        "sum" => over(c, &reduce::REDUCE_SUM, each, &axes, false),
        _ => over(c, &reduce::REDUCE_MEAN, each, &axes, false),
    }
}
