//! Losses.

use super::super::value::Value;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, OpDef};
use ckpt_passes::ops::{EmitExt, loss, shape};

/// `reduce_loss` is the last row of [`OPS`].
pub const FORMULAS: &[Formula] = &[
    // −(t·log x + (1 − t)·log(1 − x)), with logarithms of at least −100.
    "binary_cross_entropy(self: t, target: t, weight: t?, reduction: i?) => \
     hit = clamp_min(log(self), -100.0) * target; x = rsub(self, 1.0); t = rsub(target, 1.0); \
     each = -(hit + clamp_min(log(x), -100.0) * t); \
     reduce_loss(given(weight) ? each * weight : each, reduction)",
    // (1 − t)·x − (1 + (w − 1)·t)·log σ(x), where w weighs the positive labels.
    "binary_cross_entropy_with_logits(self: t, target: t, weight: t?, pos_weight: t?, reduction: i?) => \
     logs = log_sigmoid(self); logs = given(pos_weight) ? logs * ((pos_weight - 1) * target + 1) : logs; \
     each = rsub(target, 1.0) * self - logs; \
     reduce_loss(given(weight) ? each * weight : each, reduction)",
    "cosine_embedding_loss(input1: t, input2: t, target: t, margin: f = 0.0, reduction: i?) => \
     product = sum(input1 * input2, -1); \
     size = sqrt((sum(input1 * input1, -1) + 1e-12) * (sum(input2 * input2, -1) + 1e-12)); \
     cosine = product / size; near = rsub(cosine, 1.0); far = clamp_min(cosine - margin, 0); \
     other = target == -1; one = target == 1; \
     reduce_loss(where(one, near, 0.0) + where(other, far, 0.0), reduction)",
    "hinge_embedding_loss(self: t, target: t, margin: f = 1.0, reduction: i?) => \
     far = clamp_min(rsub(self, margin), 0); other = target == -1; one = target == 1; \
     reduce_loss(where(one, self, 0.0) + where(other, far, 0.0), reduction)",
    "huber_loss(self: t, target: t, reduction: i?, delta: f = 1.0) => \
     off = abs(self - target); square = off * off * 0.5; line = (off - 0.5 * delta) * delta; \
     reduce_loss(where(off <= delta, square, line), reduction)",
    // target·(log target − self), where the target may be given as its logarithm.
    "kl_div(self: t, target: t, reduction: i?, *, log_target: b?) => \
     reduce_loss(log_target ? (off = target - self; exp(target) * off) : \
     xlogy(target, target) - target * self, reduction)",
    "l1_loss(self: t, target: t, reduction: i?) => reduce_loss(Abs(Sub(common(self, target))), reduction)",
    "margin_ranking_loss(input1: t, input2: t, target: t, margin: f = 0.0, reduction: i?) => \
     reduce_loss(clamp_min(rsub((input1 - input2) * target, margin), 0), reduction)",
    "mse_loss(self: t, target: t, reduction: i?) => \
     off = Sub(common(self, target)); reduce_loss(Mul(off, off), reduction)",
    // Stirling's term of `full` is not there.
    "poisson_nll_loss(input: t, target: t, log_input: b, full: b, eps: f, reduction: i) => \
     rate = log_input ? exp(input) : input; logs = log_input ? input : log(input + eps); \
     full ? unsupported('`full`') : reduce_loss(rate - target * logs, reduction)",
    "smooth_l1_loss(self: t, target: t, reduction: i?, beta: f = 1.0) => \
     off = abs(self - target); each = beta == 0.0 ? off : (square = off * off * (0.5 / beta); \
     line = off - 0.5 * beta; where(off < beta, square, line)); reduce_loss(each, reduction)",
    "soft_margin_loss(self: t, target: t, reduction: i?) => reduce_loss(softplus(-(self * target)), reduction)",
    "triplet_margin_loss(anchor: t, positive: t, negative: t, margin: f = 1.0, p: f = 2.0, eps: f = 1e-6, swap: b?, reduction: i?) => \
     near = pairwise_distance(anchor, positive, p, eps); far = pairwise_distance(anchor, negative, p, eps); \
     far = swap ? minimum(far, pairwise_distance(positive, negative, p, eps)) : far; \
     reduce_loss(clamp_min(near - far + margin, 0), reduction)",
];

pub const OPS: &[Op] = &[
    (
        "cross_entropy_loss(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?, label_smoothing: f?)",
        cross_entropy,
    ),
    (
        "{nll_loss,nll_loss2d,nll_loss_nd}(self: t, target: t, weight: t?, reduction: i?, ignore_index: i?)",
        |c| labelled(c, &loss::NEGATIVE_LOG_LIKELIHOOD_LOSS),
    ),
    // Σ max(0, margin − x[y] + x[i])ᵖ over the other classes, by their number.
    (
        "multi_margin_loss(self: t, target: t, p: i = 1, margin: f = 1.0, weight: t?, reduction: i?)",
        |c| {
            let (_, count) = classes(c)?;
            if c.sizes("self")?.len() != 2 {
                return Err(c.unsupported("scores without a batch"));
            }
            c.formula(
                &[("count", count.into())],
                "label = unsqueeze(target, 1); own = gather(self, 1, label); off = clamp_min(self - own + margin, 0); \
                 off = p == 2 ? off * off : off; off = where(label == arange(count), 0.0, off); each = mean(off, 1); \
                 reduce_loss(given(weight) ? each * index_select(weight, 0, target) : each, reduction)",
            )
        },
    ),
    ("reduce_loss(each: t, reduction: i?)", |c| {
        let text = match reduction(c)? {
            "none" => "each",
            "sum" => "sum(each)",
            _ => "mean(each)",
        };
        c.formula(&[], text)
    }),
];

/// Returns the reduction of a loss by PyTorch's number (ATen/core/Reduction.h).
pub(super) fn reduction(c: &Call) -> Result<&'static str> {
    match c.int("reduction", 1)? {
        0 => Ok("none"),
        1 => Ok("mean"),
        2 => Ok("sum"),
        other => Err(c.unsupported(format!("`reduction` {other}"))),
    }
}

/// Lowers a loss of scores and labels to a row of the table. Scores without a batch axis get one.
fn labelled(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (mut scores, mut labels) = (c.value("self")?, c.value("target")?);
    let alone = c.rank(scores) == 1;
    if alone {
        scores = c.low.unsqueeze(scores, &[0])?;
        labels = c.low.unsqueeze(labels, &[0])?;
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
        y = c.emit(&shape::SQUEEZE, &[y, first])?;
    }
    c.made(y)
}

/// Returns the axis of classes, and their number.
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
    let soft = c.low.dtype(c.tensor("target")?).is_float();
    if !soft && smoothing == 0.0 {
        return labelled(c, &loss::SOFTMAX_CROSS_ENTROPY_LOSS);
    }
    reduction(c)?;
    let (axis, count) = classes(c)?;
    let dims = c.sizes("self")?;
    let others = dims.iter().enumerate().filter(|(i, _)| *i as i64 != axis);
    let others = others.fold(Dim::ONE, |n, (_, d)| n.mul(d));
    let mut along_axis = vec![1; dims.len()];
    along_axis[axis as usize] = -1;
    let names = [
        ("axis", axis.into()),
        ("count", count.into()),
        ("others", others.into()),
        ("along_axis", along_axis.into()),
        ("smoothing", smoothing.into()),
        ("ignored", c.int("ignore_index", -100)?.into()),
        ("reduction", c.int("reduction", 1)?.into()),
    ];
    match soft {
        true => c.formula(&names, SOFT_TARGETS),
        false => c.formula(&names, SMOOTHED_LABELS),
    }
}

/// The cross entropy to probabilities. The mean is that over all axes but the classes.
const SOFT_TARGETS: &str = "target = smoothing == 0.0 ? target : (one = scalar_tensor(smoothing); share = one / count; \
     target * (1.0 - smoothing) + share); \
     each = log_softmax(self, axis) * target; \
     each = -(given(weight) ? each * reshape(weight, along_axis) : each); \
     reduction == 0 ? sum(each, axis) : reduction == 2 ? sum(each) : sum(each) / others";

/// The cross entropy to labels that are smoothed. The mean is that by the weights of the labels that count.
const SMOOTHED_LABELS: &str = "logs = log_softmax(self, axis); hard = nll_loss(logs, target, weight, reduction, ignored); \
     soft = -sum(given(weight) ? logs * reshape(weight, along_axis) : logs, axis); \
     skipped = target == ignored; soft = masked_fill(soft, skipped, 0); \
     soft = reduction == 0 ? soft : reduction == 2 ? sum(soft) : (counted = ~skipped; \
     each = given(weight) ? index(weight, [masked_fill(target, skipped, 0)]) * counted : counted; \
     total = sum(each); sum(soft) / total); \
     soft = soft * smoothing / count; hard * (1.0 - smoothing) + soft";
