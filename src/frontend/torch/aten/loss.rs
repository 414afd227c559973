//! Losses.

use super::Value;
use super::pointwise::both;
use super::reduce::over;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, OpDef, ValueId};
use ckpt_passes::ops::{arith, loss, reduce, shape};

pub const OPS: &[Op] = &[
    (
        "binary_cross_entropy(self: t, target: t, weight: t?, reduction: i?)",
        of_probabilities,
    ),
    (
        "binary_cross_entropy_with_logits(self: t, target: t, weight: t?, pos_weight: t?, reduction: i?)",
        of_logits,
    ),
    (
        "cosine_embedding_loss(input1: t, input2: t, target: t, margin: f?, reduction: i?)",
        cosine_embedding,
    ),
    (
        "cross_entropy_loss(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?, label_smoothing: f?)",
        cross_entropy,
    ),
    (
        "hinge_embedding_loss(self: t, target: t, margin: f?, reduction: i?)",
        hinge_embedding,
    ),
    (
        "huber_loss(self: t, target: t, reduction: i?, delta: f?)",
        huber,
    ),
    (
        "kl_div(self: t, target: t, reduction: i?, *, log_target: b?)",
        divergence,
    ),
    ("l1_loss(self: t, target: t, reduction: i?)", |c| {
        distance(c, false)
    }),
    (
        "margin_ranking_loss(input1: t, input2: t, target: t, margin: f?, reduction: i?)",
        margin_ranking,
    ),
    ("mse_loss(self: t, target: t, reduction: i?)", |c| {
        distance(c, true)
    }),
    (
        "nll_loss(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
    (
        "nll_loss2d(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
    (
        "nll_loss_nd(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
    (
        "poisson_nll_loss(input: t, target: t, log_input: b, full: b, eps: f, reduction: i)",
        poisson,
    ),
    (
        "smooth_l1_loss(self: t, target: t, reduction: i?, beta: f?)",
        smooth_l1,
    ),
    ("soft_margin_loss(self: t, target: t, reduction: i?)", |c| {
        let y = c.run("mul", [c.given("self"), c.given("target")])?;
        let y = c.run("neg", [y])?;
        let y = c.run("softplus", [y])?;
        averaged(c, y)
    }),
    (
        "triplet_margin_loss(anchor: t, positive: t, negative: t, margin: f?, p: f?, eps: f?, swap: b?, reduction: i?)",
        triplet,
    ),
];

/// PyTorch's numbers (ATen/core/Reduction.h).
pub(super) fn reduction(c: &Call) -> Result<&'static str> {
    match c.int("reduction", 1)? {
        0 => Ok("none"),
        1 => Ok("mean"),
        2 => Ok("sum"),
        other => Err(c.unsupported(format!("`reduction` {other}"))),
    }
}

/// A row of the table, with a batch axis for scores that have none.
fn labelled(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (mut scores, mut labels) = (c.value("self")?, c.value("target")?);
    let alone = c.low.b.rank(scores) == 1;
    if alone {
        scores = c.low.apply_unsqueeze(scores, &[0])?;
        labels = c.low.apply_unsqueeze(labels, &[0])?;
    }
    let reduction = reduction(c)?;
    let attrs = Attrs::new()
        .with("reduction", reduction)
        .with("ignore_index", c.int("ignore_index", -100)?);
    let mut ins = vec![Some(scores), Some(labels)];
    if let Some(weight) = c.opt_value("weight")? {
        ins.push(Some(weight));
    }
    let mut y = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    if alone && reduction == "none" {
        let first = c.low.b.ints(&[0]);
        y = c.low.emit(&shape::SQUEEZE, &[y, first])?;
    }
    c.made(y)
}

/// The axis of classes, and how many there are.
fn classes(c: &Call) -> Result<(i64, Dim)> {
    let dims = c.low.dims(c.tensor("self")?);
    let axis = usize::from(dims.len() > 1);
    match dims.get(axis) {
        Some(count) => Ok((axis as i64, count.clone())),
        None => Err(c.fail("shape", "the scores have no classes")),
    }
}

fn cross_entropy(c: &mut Call) -> Result<Value> {
    let smoothing = c.float("label_smoothing", 0.0)?;
    let target = c.tensor("target")?;
    if c.low.dtype(target).is_float() {
        return soft_targets(c, smoothing);
    }
    if smoothing == 0.0 {
        return labelled(c, &loss::SOFTMAX_CROSS_ENTROPY_LOSS);
    }
    let (axis, count) = classes(c)?;
    let log = c.run("log_softmax", [c.given("self"), axis.into()])?;
    let hard = c.run(
        "nll_loss",
        [
            log.clone(),
            target.into(),
            c.given("weight"),
            c.given("reduction"),
            c.given("ignore_index"),
        ],
    )?;
    let weighted = weighted(c, log, axis)?;
    let soft = c.run("sum", [weighted, Value::ints(&[axis])])?;
    let soft = c.run("neg", [soft])?;
    let ignored = c.int("ignore_index", -100)?;
    let ignored = c.run("eq", [target.into(), ignored.into()])?;
    let soft = c.run("masked_fill", [soft, ignored.clone(), 0.into()])?;
    let soft = match reduction(c)? {
        "none" => soft,
        "sum" => c.run("sum", [soft])?,
        _ => {
            // Over the weights of the labels that count.
            let counted = c.run("logical_not", [ignored.clone()])?;
            let each = match c.get("weight").cloned() {
                Some(weight) => {
                    let label = c.run("masked_fill", [target.into(), ignored, 0.into()])?;
                    let each = c.run("index", [weight, Value::List(vec![label])])?;
                    c.run("mul", [each, counted])?
                }
                None => counted,
            };
            let total = c.run("sum", [each])?;
            let sum = c.run("sum", [soft])?;
            c.run("div", [sum, total])?
        }
    };
    let soft = c.run("mul", [soft, smoothing.into()])?;
    let soft = c.run("div", [soft, count.into()])?;
    let hard = c.run("mul", [hard, (1.0 - smoothing).into()])?;
    c.run("add", [hard, soft])
}

/// Times the weight of each class.
fn weighted(c: &mut Call, x: Value, axis: i64) -> Result<Value> {
    let Some(weight) = c.get("weight").cloned() else {
        return Ok(x);
    };
    let rank = c.low.dims(c.tensor("self")?).len() as i64;
    let mut dims = vec![1; rank as usize];
    dims[axis as usize] = -1;
    let weight = c.run("reshape", [weight, Value::ints(&dims)])?;
    c.run("mul", [x, weight])
}

/// The cross entropy to probabilities.
fn soft_targets(c: &mut Call, smoothing: f64) -> Result<Value> {
    let (axis, count) = classes(c)?;
    let mut target = c.given("target");
    if smoothing != 0.0 {
        let one = c.run("scalar_tensor", [smoothing.into()])?;
        let each = c.run("div", [one, count.clone().into()])?;
        target = c.run("mul", [target, (1.0 - smoothing).into()])?;
        target = c.run("add", [target, each])?;
    }
    let log = c.run("log_softmax", [c.given("self"), axis.into()])?;
    let each = c.run("mul", [log, target])?;
    let each = weighted(c, each, axis)?;
    let each = c.run("neg", [each])?;
    match reduction(c)? {
        "none" => c.run("sum", [each, Value::ints(&[axis])]),
        "sum" => c.run("sum", [each]),
        _ => {
            let dims = c.low.dims(c.tensor("self")?);
            let all = dims.iter().enumerate().filter(|(i, _)| *i as i64 != axis);
            let all = all.fold(Dim::ONE, |n, (_, d)| n.mul(d));
            let sum = c.run("sum", [each])?;
            c.run("div", [sum, all.into()])
        }
    }
}

/// A loss of each element, reduced.
fn averaged(c: &mut Call, each: Value) -> Result<Value> {
    match reduction(c)? {
        "none" => Ok(each),
        "sum" => c.run("sum", [each]),
        _ => c.run("mean", [each]),
    }
}

/// |self − target|.
fn off(c: &mut Call) -> Result<Value> {
    let off = c.run("sub", [c.given("self"), c.given("target")])?;
    c.run("abs", [off])
}

fn smooth_l1(c: &mut Call) -> Result<Value> {
    let beta = c.float("beta", 1.0)?;
    let off = off(c)?;
    if beta == 0.0 {
        return averaged(c, off);
    }
    let square = c.run("mul", [off.clone(), off.clone()])?;
    let square = c.run("mul", [square, (0.5 / beta).into()])?;
    let line = c.run("sub", [off.clone(), (0.5 * beta).into()])?;
    let near = c.run("lt", [off, beta.into()])?;
    let each = c.run("where", [near, square, line])?;
    averaged(c, each)
}

fn huber(c: &mut Call) -> Result<Value> {
    let delta = c.float("delta", 1.0)?;
    let off = off(c)?;
    let square = c.run("mul", [off.clone(), off.clone()])?;
    let square = c.run("mul", [square, 0.5.into()])?;
    let line = c.run("sub", [off.clone(), (0.5 * delta).into()])?;
    let line = c.run("mul", [line, delta.into()])?;
    let near = c.run("le", [off, delta.into()])?;
    let each = c.run("where", [near, square, line])?;
    averaged(c, each)
}

/// target·(log target − self), with the logarithm given or not.
fn divergence(c: &mut Call) -> Result<Value> {
    let (x, target) = (c.given("self"), c.given("target"));
    let each = if c.bool("log_target", false)? {
        let off = c.run("sub", [target.clone(), x])?;
        let target = c.run("exp", [target])?;
        c.run("mul", [target, off])?
    } else {
        let own = c.run("xlogy", [target.clone(), target.clone()])?;
        let cross = c.run("mul", [target, x])?;
        c.run("sub", [own, cross])?
    };
    averaged(c, each)
}

/// −(t·log x + (1 − t)·log(1 − x)), logarithms not below −100.
fn of_probabilities(c: &mut Call) -> Result<Value> {
    let (x, t) = (c.given("self"), c.given("target"));
    let rest = |c: &mut Call, x: Value| c.run("rsub", [x, 1.0.into()]);
    let part = |c: &mut Call, x: Value, t: Value| {
        let log = c.run("log", [x])?;
        let log = c.run("clamp_min", [log, (-100.0).into()])?;
        c.run("mul", [log, t])
    };
    let hit = part(c, x.clone(), t.clone())?;
    let (x, t) = (rest(c, x)?, rest(c, t)?);
    let miss = part(c, x, t)?;
    let each = c.run("add", [hit, miss])?;
    let each = c.run("neg", [each])?;
    each_weighted(c, each)
}

fn each_weighted(c: &mut Call, each: Value) -> Result<Value> {
    let each = match c.get("weight").cloned() {
        Some(weight) => c.run("mul", [each, weight])?,
        None => each,
    };
    averaged(c, each)
}

/// (1 − t)·x − (1 + (w − 1)·t)·log σ(x), with w the weight of what is positive.
fn of_logits(c: &mut Call) -> Result<Value> {
    let (x, t) = (c.given("self"), c.given("target"));
    let log = c.run("log_sigmoid", [x.clone()])?;
    let log = match c.get("pos_weight").cloned() {
        Some(weight) => {
            let more = c.run("sub", [weight, 1.into()])?;
            let more = c.run("mul", [more, t.clone()])?;
            let more = c.run("add", [more, 1.into()])?;
            c.run("mul", [log, more])?
        }
        None => log,
    };
    let rest = c.run("rsub", [t, 1.0.into()])?;
    let line = c.run("mul", [rest, x])?;
    let each = c.run("sub", [line, log])?;
    each_weighted(c, each)
}

fn margin_ranking(c: &mut Call) -> Result<Value> {
    let off = c.run("sub", [c.given("input1"), c.given("input2")])?;
    let each = c.run("mul", [off, c.given("target")])?;
    let each = c.run("rsub", [each, c.float("margin", 0.0)?.into()])?;
    let each = c.run("clamp_min", [each, 0.into()])?;
    averaged(c, each)
}

/// Of the two labels 1 and −1, what each adds.
fn by_label(c: &mut Call, of_one: Value, of_other: Value) -> Result<Value> {
    let other = c.run("eq", [c.given("target"), (-1).into()])?;
    let one = c.run("eq", [c.given("target"), 1.into()])?;
    let of_one = c.run("where", [one, of_one, 0.0.into()])?;
    let of_other = c.run("where", [other, of_other, 0.0.into()])?;
    let each = c.run("add", [of_one, of_other])?;
    averaged(c, each)
}

fn hinge_embedding(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let rest = c.run("rsub", [x.clone(), c.float("margin", 1.0)?.into()])?;
    let rest = c.run("clamp_min", [rest, 0.into()])?;
    by_label(c, x, rest)
}

fn cosine_embedding(c: &mut Call) -> Result<Value> {
    let (a, b) = (c.given("input1"), c.given("input2"));
    let last = Value::ints(&[-1]);
    let sum = |c: &mut Call, a: &Value, b: &Value| {
        let product = c.run("mul", [a.clone(), b.clone()])?;
        c.run("sum", [product, last.clone()])
    };
    let product = sum(c, &a, &b)?;
    let mut sizes = Vec::with_capacity(2);
    for x in [&a, &b] {
        let square = sum(c, x, x)?;
        sizes.push(c.run("add", [square, 1e-12.into()])?);
    }
    let size = c.run("mul", [sizes[0].clone(), sizes[1].clone()])?;
    let size = c.run("sqrt", [size])?;
    let cosine = c.run("div", [product, size])?;
    let near = c.run("rsub", [cosine.clone(), 1.0.into()])?;
    let far = c.run("sub", [cosine, c.float("margin", 0.0)?.into()])?;
    let far = c.run("clamp_min", [far, 0.into()])?;
    by_label(c, near, far)
}

fn triplet(c: &mut Call) -> Result<Value> {
    let (p, eps) = (c.float("p", 2.0)?, c.float("eps", 1e-6)?);
    let apart = |c: &mut Call, a: &str, b: &str| {
        c.run(
            "pairwise_distance",
            [c.given(a), c.given(b), p.into(), eps.into()],
        )
    };
    let near = apart(c, "anchor", "positive")?;
    let mut far = apart(c, "anchor", "negative")?;
    if c.bool("swap", false)? {
        let other = apart(c, "positive", "negative")?;
        far = c.run("minimum", [far, other])?;
    }
    let each = c.run("sub", [near, far])?;
    let each = c.run("add", [each, c.float("margin", 1.0)?.into()])?;
    let each = c.run("clamp_min", [each, 0.into()])?;
    averaged(c, each)
}

fn poisson(c: &mut Call) -> Result<Value> {
    if c.bool("full", false)? {
        return Err(c.unsupported("`full`"));
    }
    let (x, target) = (c.given("input"), c.given("target"));
    let (rate, log) = match c.bool("log_input", true)? {
        true => (c.run("exp", [x.clone()])?, x),
        false => {
            let safe = c.run("add", [x.clone(), c.float("eps", 1e-8)?.into()])?;
            (x, c.run("log", [safe])?)
        }
    };
    let hits = c.run("mul", [target, log])?;
    let each = c.run("sub", [rate, hits])?;
    averaged(c, each)
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
