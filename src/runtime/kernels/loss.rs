//! Class losses and their gradients. The class axis is axis 1, in ONNX and in libtorch.

use super::context::*;
use crate::runtime::ranks::group;
use ckpt_passes::ir::Tensor as Constant;
use ckpt_passes::ops::collective::{GROUP, RANKS, SIZE, slice_of};
use ckpt_passes::ops::loss::*;

/// Kernels of class losses and of their gradients.
pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SOFTMAX_CROSS_ENTROPY_LOSS, cross_entropy),
    (&SOFTMAX_CROSS_ENTROPY_LOSS_GRAD, cross_entropy_grad),
    (&NEGATIVE_LOG_LIKELIHOOD_LOSS, |cx| {
        Ok(vec![nll(cx, &dense(cx.x(0)?)?)?])
    }),
    (&NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD, nll_grad),
    (&CLASS_LOSS, class_loss),
    (&CLASS_TERMS, class_terms),
    (&CLASS_TERMS_GRAD, class_terms_grad),
];

fn ignore_index(cx: &KernelCx) -> i64 {
    cx.attrs.opt_int("ignore_index").unwrap_or(NO_LABEL)
}

fn reduction(cx: &KernelCx) -> Result<i64> {
    match cx.attrs.str("reduction") {
        "none" => Ok(0),
        "mean" => Ok(1),
        "sum" => Ok(2),
        other => Err(cx.bug(format!("reduction `{other}`"))),
    }
}

fn labels(cx: &KernelCx, slot: usize) -> Result<Tensor> {
    dense_as(cx.x(slot)?, Kind::Int64)
}

/// Returns the labels of a loss.
fn labels_of_loss(cx: &KernelCx) -> Result<Tensor> {
    let classes = cx.x(0)?.size()[1];
    checked_labels(cx, labels(cx, 1)?, classes, Some(ignore_index(cx)))
}

/// Returns labels, each of which is a class or ignored.
pub fn checked_labels(
    cx: &KernelCx,
    labels: Tensor,
    classes: i64,
    ignored: Option<i64>,
) -> Result<Tensor> {
    if labels.numel() == 0 {
        return Ok(labels);
    }
    let op = cx.op.name;
    if let Some(deferred) = cx.deferred {
        // The smallest and the largest label do not tell those between from the ignored one.
        let other = ignored.unwrap_or(0);
        let (least, most) = (other.min(0), other.max(classes - 1));
        let check = move |low: i64, high: i64| match (low < least, high > most) {
            (true, _) => check_labels(op, &[low], classes, ignored),
            (_, true) => check_labels(op, &[high], classes, ignored),
            _ => Ok(()),
        };
        deferred.defer(&labels, Box::new(check))?;
        return Ok(labels);
    }
    let found =
        Vec::<i64>::try_from(labels.view([-1])).map_err(|e| cx.bug(format!("labels: {e}")))?;
    check_labels(op, &found, classes, ignored)?;
    Ok(labels)
}

/// Checks that labels are classes, or are ignored.
///
/// # Errors
/// The first label that is neither.
fn check_labels(op: &str, labels: &[i64], classes: i64, ignored: Option<i64>) -> Result<()> {
    let is_class = |label: &i64| (0..classes).contains(label) || Some(*label) == ignored;
    let Some(row) = labels.iter().position(|label| !is_class(label)) else {
        return Ok(());
    };
    let or_ignored = ignored.map(|label| format!(", or {label}"));
    Err(Error::model("index", format!("{op}: a label is no class"))
        .expected(format!(
            "0 to {}{}",
            classes - 1,
            or_ignored.unwrap_or_default()
        ))
        .found(format!("{} in row {row}", labels[row])))
}

/// Returns views of row-major scores as `[N, C]` or, with more axes, `[N, C, 1, rest]`, and of labels alike.
fn folded(scores: &Tensor, labels: &Tensor) -> (Tensor, Tensor) {
    let size = scores.size();
    if size.len() <= 2 {
        return (scores.alias(), labels.alias());
    }
    let rest: i64 = size[2..].iter().product();
    (
        scores.view([size[0], size[1], 1, rest]),
        labels.view([size[0], 1, rest]),
    )
}

/// Computes the negative log-likelihood of row-major log-probabilities.
fn nll(cx: &KernelCx, log_prob: &Tensor) -> Result<Tensor> {
    let labels = labels_of_loss(cx)?;
    let weights = cx.opt(2).map(dense).transpose()?;
    nll_forward(cx, log_prob, &labels, weights.as_ref(), reduction(cx)?)
}

/// As [`nll`], for any operands.
fn nll_forward(
    cx: &KernelCx,
    log_prob: &Tensor,
    labels: &Tensor,
    weights: Option<&Tensor>,
    reduction: i64,
) -> Result<Tensor> {
    let (scores, targets) = folded(log_prob, labels);
    let name = if scores.dim() == 4 {
        "aten::nll_loss2d_forward"
    } else {
        "aten::nll_loss_forward"
    };
    let args = args![&scores, &targets, weights, reduction, ignore_index(cx)];
    let [loss] = call_tensors(name, args)?;
    match loss.dim() {
        0 => Ok(loss),
        _ => Ok(loss.view(labels.size().as_slice())),
    }
}

fn cross_entropy(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scores = dense(cx.x(0)?)?;
    let log_prob = empty_like(&scores)?;
    write(
        "aten::_log_softmax.out",
        args![&scores, 1, false, &log_prob],
    )?;
    let outs = [nll(cx, &log_prob)?, log_prob];
    Ok(outs.into_iter().take(cx.n_outs).collect())
}

fn rows(x: &Tensor, at: i64, count: i64) -> Result<Tensor> {
    narrow(x, 0, at, count)
}

/// Calls `each` with the position of some rows of scores and the rows themselves, in the type computed in. `each` may
/// overwrite them.
fn for_blocks(
    cx: &KernelCx,
    scores: &Tensor,
    mut each: impl FnMut(i64, &Tensor) -> Result<()>,
) -> Result<()> {
    let mut dims = scores.size();
    let total = dims[0];
    dims[0] = rows_at_once(cx.device, &dims);
    let buffer = empty(&dims, compute_kind(scores.kind()), scores.device())?;
    for (at, count) in blocks(total, dims[0]) {
        let wide = rows(&buffer, 0, count)?;
        copy_into(&wide, &rows(scores, at, count)?)?;
        each(at, &wide)?;
    }
    Ok(())
}

/// Replaces `x` by its `aten::_softmax` or `aten::_log_softmax` along axis 1.
fn normalize(name: &str, x: &Tensor) -> Result<()> {
    write(name, args![x, 1, false, x])
}

fn class_loss(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (scores, labels) = (cx.x(0)?, labels_of_loss(cx)?);
    let kind = compute_kind(scores.kind());
    let out = empty_as(&labels, kind)?;
    if labels.numel() == 0 {
        return Ok(vec![out]);
    }
    let weights = cx.opt(2).map(|w| dense(&w.to_kind(kind))).transpose()?;
    for_blocks(cx, scores, |at, wide| {
        if cx.attrs.int("normalized") == 0 {
            normalize("aten::_log_softmax.out", wide)?;
        }
        let own = rows(&labels, at, wide.size()[0])?;
        let losses = nll_forward(cx, wide, &own, weights.as_ref(), 0)?;
        copy_into(&rows(&out, at, wide.size()[0])?, &losses)
    })?;
    Ok(vec![out])
}

/// Returns how many of the classes of a node's scores are classes of this rank; the others are padding.
fn own_classes(cx: &KernelCx, scores: &Tensor) -> Result<i64> {
    let classes = scores.size()[1];
    match cx.attrs.int(SIZE) {
        0 => Ok(classes),
        size => {
            let group = group(cx.attrs.str(GROUP), cx.attrs.int(RANKS))?;
            Ok(slice_of(size, group.ranks, group.rank).1)
        }
    }
}

/// Overwrites scores so that the padding after so many classes counts nothing. Scores of minus infinity become the smallest number: their softmax
/// is the same, but where a rank has no others it would be NaN.
fn prepare_own(scores: &Tensor, classes: i64) -> Result<()> {
    let least = scalar(scores.kind(), f64::from(f32::MIN))?;
    write("aten::clamp_min_.Tensor", args![scores, &least])?;
    let more = scores.size()[1] - classes;
    if more == 0 {
        return Ok(());
    }
    let rest = narrow(scores, 1, classes, more)?;
    let none = scalar(scores.kind(), f64::NEG_INFINITY)?;
    write("aten::fill_.Tensor", args![&rest, &none])
}

fn class_terms(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scores = cx.x(0)?;
    let labels = checked_labels(cx, labels(cx, 1)?, scores.size()[1], None)?;
    let kind = compute_kind(scores.kind());
    let outs = [empty_as(&labels, kind)?, empty_as(&labels, kind)?];
    if labels.numel() == 0 {
        return Ok(outs.into());
    }
    let labels = labels.unsqueeze(1);
    let mut dims = labels.size();
    dims[0] = rows_at_once(cx.device, &scores.size());
    let places = empty(&dims, Kind::Int64, labels.device())?;
    let logs = empty(&dims, kind, labels.device())?;
    let (own_classes, is_shared) = (own_classes(cx, scores)?, cx.attrs.int(SIZE) != 0);
    for_blocks(cx, scores, |at, wide| {
        let count = wide.size()[0];
        let [sums, own] = [0, 1].map(|i: usize| rows(&outs[i].unsqueeze(1), at, count));
        let [sums, own] = [sums?, own?];
        let [places, logs] = [rows(&places, 0, count)?, rows(&logs, 0, count)?];
        let labels = rows(&labels, at, count)?;
        write("aten::gather.out", args![wide, 1, &labels, false, &own])?;
        if is_shared {
            prepare_own(wide, own_classes)?;
        }
        // The largest score less its log-softmax: both are exact where others would cancel.
        write("aten::max.dim_max", args![wide, 1, true, &sums, &places])?;
        normalize("aten::_log_softmax.out", wide)?;
        write("aten::gather.out", args![wide, 1, &places, false, &logs])?;
        write("aten::sub_.Tensor", args![&sums, &logs, 1])
    })?;
    Ok(outs.into())
}

/// Computes softmax·dlog_sums plus, at the labels, dlabel_scores in the result; for 16-bit scores, a few rows at a time in float32.
fn class_terms_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(2)?;
    let at = labels(cx, 3)?.unsqueeze(1);
    let [by, own] = [dense(cx.x(0)?)?.unsqueeze(1), dense(cx.x(1)?)?.unsqueeze(1)];
    let (own_classes, is_shared) = (own_classes(cx, x)?, cx.attrs.int(SIZE) != 0);
    let finish = |probabilities: &Tensor, at: &Tensor, by: &Tensor, own: &Tensor| {
        write("aten::mul_.Tensor", args![probabilities, by])?;
        write_apart("aten::scatter_add_", args![probabilities, 1, at, own])
    };
    if x.kind() == compute_kind(x.kind()) {
        let scores = dense(x)?;
        let out = cx.result_like(&scores)?;
        if is_shared {
            if cx.overwrites.is_none() {
                copy_into(&out, &scores)?;
            }
            prepare_own(&out, own_classes)?;
            normalize("aten::_softmax.out", &out)?;
        } else {
            write("aten::_softmax.out", args![&scores, 1, false, &out])?;
        }
        finish(&out, &at, &by, &own)?;
        return Ok(vec![out]);
    }
    let out = cx.result_like(x)?;
    if x.numel() == 0 {
        return Ok(vec![out]);
    }
    for_blocks(cx, x, |first, wide| {
        if is_shared {
            prepare_own(wide, own_classes)?;
        }
        normalize("aten::_softmax.out", wide)?;
        let count = wide.size()[0];
        let own_rows = |x: &Tensor| rows(x, first, count);
        finish(wide, &own_rows(&at)?, &own_rows(&by)?, &own_rows(&own)?)?;
        copy_into(&rows(&out, first, count)?, wide)
    })?;
    Ok(vec![out])
}

/// The factors in the gradient of the scores.
struct Factors {
    /// The labels, clamped to the classes: an ignored label may be out of range. `[N, 1, …]`.
    at: Tensor,
    /// The weight of the label's class times the cotangent; 0 for an ignored label. `[N, 1, …]`, in the compute type.
    factor: Tensor,
}

/// Computes the factors, in float32 or float64.
fn factors(cx: &KernelCx, scores: &Tensor) -> Result<Factors> {
    let (dloss, labels) = (cx.x(0)?, labels(cx, 2)?);
    let kind = compute_kind(scores.kind());
    let classes = scores.size()[1];
    let at = labels.clamp(0, (classes - 1).max(0));
    let factor = empty_as(&labels, kind)?;
    match cx.opt(3) {
        None => copy_into(&factor, &scalar(kind, 1.0)?)?,
        Some(weights) => {
            write(
                "aten::index_select.out",
                args![
                    &weights.to_kind(kind),
                    0,
                    &at.view([-1]),
                    &factor.view([-1])
                ],
            )?;
        }
    }
    if let Some(index) = cx.attrs.opt_int("ignore_index") {
        let ignored = empty_as(&labels, Kind::Bool)?;
        let index = lent_scalar(&Constant::int(index))?;
        write("aten::eq.Tensor_out", args![&labels, &index, &ignored])?;
        let zero = scalar(kind, 0.0)?;
        write("aten::masked_fill_.Tensor", args![&factor, &ignored, &zero])?;
    }
    if cx.attrs.str("reduction") == "mean" {
        let total = factor.sum(kind);
        write("aten::div_.Tensor", args![&factor, &total])?;
        // If every label is ignored, the loss is 0/0. Its gradient is 0, as in PyTorch.
        if cx.deferred.is_some() {
            let zero = scalar(kind, 0.0)?;
            let is_none = call("aten::eq.Tensor", args![&total, &zero])?;
            write("aten::masked_fill_.Tensor", args![&factor, &is_none, &zero])?;
        } else if total.double_value(&[]) == 0.0 {
            zero(&factor)?;
        }
    }
    let by = dloss.to_kind(kind);
    mul_into(&factor, &by)?;
    drop(by);
    Ok(Factors {
        at: at.unsqueeze(1),
        factor: factor.unsqueeze(1),
    })
}

/// Computes (softmax − one-hot)·factor in the result; for 16-bit scores, a few rows at a time in float32.
fn cross_entropy_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(1)?;
    if x.kind() == compute_kind(x.kind()) {
        let scores = dense(x)?;
        let out = cx.result_like(&scores)?;
        write("aten::_softmax.out", args![&scores, 1, false, &out])?;
        let Factors { at, factor } = factors(cx, &scores)?;
        take_labels(&out, &at, &factor)?;
        return Ok(vec![out]);
    }
    let out = cx.result_like(x)?;
    if x.numel() == 0 {
        return Ok(vec![out]);
    }
    let Factors { at, factor } = factors(cx, x)?;
    for_blocks(cx, x, |first, wide| {
        normalize("aten::_softmax.out", wide)?;
        let count = wide.size()[0];
        let (at, factor) = (rows(&at, first, count)?, rows(&factor, first, count)?);
        take_labels(wide, &at, &factor)?;
        copy_into(&rows(&out, first, count)?, wide)
    })?;
    Ok(vec![out])
}

/// Multiplies probabilities by the factors and subtracts the factors from the labels' elements. Negates the factors.
fn take_labels(probabilities: &Tensor, at: &Tensor, factor: &Tensor) -> Result<()> {
    write("aten::mul_.Tensor", args![probabilities, factor])?;
    write("aten::neg_", args![factor])?;
    write_apart("aten::scatter_add_", args![probabilities, 1, at, factor])
}

fn nll_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scores = cx.x(1)?;
    let out = empty_like(scores)?;
    zero(&out)?;
    let Factors { at, factor } = factors(cx, scores)?;
    write("aten::neg_", args![&factor])?;
    let narrow = factor.to_kind(scores.kind());
    drop(factor);
    write_apart("aten::scatter_.src", args![&out, 1, &at, &narrow])?;
    Ok(vec![out])
}
