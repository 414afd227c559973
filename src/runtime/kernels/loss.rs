//! Class losses and their gradients. The class axis is axis 1 (ONNX), as libtorch has it.

use super::softmax::dense;
use super::{Kernel, KernelCx, call_n, empty, write};
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::loss::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::{Arg, Ret};
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SOFTMAX_CROSS_ENTROPY_LOSS, cross_entropy),
    (&SOFTMAX_CROSS_ENTROPY_LOSS_GRAD, cross_entropy_grad),
    (&NEGATIVE_LOG_LIKELIHOOD_LOSS, |cx| {
        Ok(vec![nll(cx, &dense(cx.x(0)?)?)?])
    }),
    (&NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD, nll_grad),
];

/// libtorch's "ignore nothing": no label is this.
const NO_INDEX: i64 = -100;

fn ignore_index(cx: &KernelCx) -> i64 {
    cx.attrs.opt_int("ignore_index").unwrap_or(NO_INDEX)
}

fn reduction(cx: &KernelCx) -> Result<i64> {
    match cx.attrs.str("reduction") {
        "none" => Ok(0),
        "mean" => Ok(1),
        "sum" => Ok(2),
        other => Err(Error::bug(
            "kernel",
            format!("{}: reduction `{other}`", cx.op.name),
        )),
    }
}

fn labels(cx: &KernelCx, slot: usize) -> Result<Tensor> {
    let labels = cx.x(slot)?;
    if labels.kind() == Kind::Int64 {
        dense(labels)
    } else {
        Ok(labels.to_kind(Kind::Int64))
    }
}

/// Scores as `[N, C]` or, with more axes, `[N, C, 1, rest]`; labels alike. Views, since both are row-major.
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

/// Negative log-likelihood of row-major log-probabilities.
fn nll(cx: &KernelCx, log_prob: &Tensor) -> Result<Tensor> {
    let labels = labels(cx, 1)?;
    let (scores, targets) = folded(log_prob, &labels);
    let weights = cx.opt(2);
    let name = if scores.dim() == 4 {
        "aten::nll_loss2d_forward"
    } else {
        "aten::nll_loss_forward"
    };
    let args = [
        Arg::Tensor(&scores),
        Arg::Tensor(&targets),
        Arg::OptTensor(weights),
        Arg::Int(reduction(cx)?),
        Arg::Int(ignore_index(cx)),
    ];
    match call_n(name, "", &args)?.into_iter().next() {
        Some(Ret::Tensor(loss)) => Ok(if loss.dim() > 0 {
            loss.view(labels.size().as_slice())
        } else {
            loss
        }),
        _ => Err(Error::bug("kernel", format!("{name} gave no tensor"))),
    }
}

fn cross_entropy(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scores = dense(cx.x(0)?)?;
    let log_prob = empty(&scores.size(), scores.kind(), scores.device());
    let args = [
        Arg::Tensor(&scores),
        Arg::Int(1),
        Arg::Bool(false),
        Arg::Tensor(&log_prob),
    ];
    write("aten::_log_softmax", "out", &args)?;
    let loss = nll(cx, &log_prob)?;
    let mut outs = vec![loss];
    if cx.n_outs > 1 {
        outs.push(log_prob);
    }
    Ok(outs)
}

/// A factor a label: its class weight times the cotangent, 0 where the label is ignored. `[N, …]`, in `kind`.
fn factors(cx: &KernelCx, labels: &Tensor, kind: Kind) -> Result<Tensor> {
    let dloss = cx.x(0)?;
    let factor = match cx.opt(3) {
        None => Tensor::ones(labels.size(), (kind, labels.device())),
        Some(weights) => {
            let safe = labels.clamp_min(0);
            weights
                .to_kind(kind)
                .index_select(0, &safe.reshape([-1]))
                .reshape(labels.size())
        }
    };
    if cx.attrs.opt_int("ignore_index").is_some() {
        let ignored = empty(&labels.size(), Kind::Bool, labels.device());
        let args = [
            Arg::Tensor(labels),
            Arg::Int(ignore_index(cx)),
            Arg::Tensor(&ignored),
        ];
        write("aten::eq", "Scalar_out", &args)?;
        write(
            "aten::masked_fill_",
            "Scalar",
            &[Arg::Tensor(&factor), Arg::Tensor(&ignored), Arg::Int(0)],
        )?;
    }
    if cx.attrs.str("reduction") == "mean" {
        let total = factor.sum(kind);
        write(
            "aten::div_",
            "Tensor",
            &[Arg::Tensor(&factor), Arg::Tensor(&total)],
        )?;
        // Where every label is ignored the loss is 0/0; its gradient is 0, as PyTorch's.
        if total.double_value(&[]) == 0.0 {
            write("aten::zero_", "", &[Arg::Tensor(&factor)])?;
        }
    }
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&factor), Arg::Tensor(dloss)],
    )?;
    Ok(factor)
}

/// d scores = (softmax − one-hot)·factor, worked out in the result.
fn cross_entropy_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (scores, labels) = (dense(cx.x(1)?)?, labels(cx, 2)?);
    let kind = if matches!(scores.kind(), Kind::Half | Kind::BFloat16) {
        Kind::Float
    } else {
        scores.kind()
    };
    let out = empty(&scores.size(), scores.kind(), scores.device());
    write(
        "aten::_softmax",
        "out",
        &[
            Arg::Tensor(&scores),
            Arg::Int(1),
            Arg::Bool(false),
            Arg::Tensor(&out),
        ],
    )?;
    let factor = factors(cx, &labels, kind)?.unsqueeze(1);
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(&factor)],
    )?;
    subtract_at(&out, &labels.unsqueeze(1), &factor)?;
    Ok(vec![out])
}

/// Takes `amount` from `out` at each label along axis 1. Labels out of range (ignored ones) have an amount of 0.
fn subtract_at(out: &Tensor, labels: &Tensor, amount: &Tensor) -> Result<()> {
    let classes = out.size()[1];
    let at = labels.clamp(0, classes - 1);
    let taken = amount.to_kind(out.kind()).neg();
    let args = [
        Arg::Tensor(out),
        Arg::Int(1),
        Arg::Tensor(&at),
        Arg::Tensor(&taken),
    ];
    write("aten::scatter_add_", "", &args)
}

fn nll_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (scores, labels) = (cx.x(1)?, labels(cx, 2)?);
    let kind = if matches!(scores.kind(), Kind::Half | Kind::BFloat16) {
        Kind::Float
    } else {
        scores.kind()
    };
    let out = empty(&scores.size(), scores.kind(), scores.device());
    write("aten::zero_", "", &[Arg::Tensor(&out)])?;
    let factor = factors(cx, &labels, kind)?.unsqueeze(1);
    subtract_at(&out, &labels.unsqueeze(1), &factor)?;
    Ok(vec![out])
}
