//! Layer and RMS normalisation and their gradients.
//!
//! libtorch's layer norm takes a scale of exactly one row and, for 16-bit operands, parameters and statistics in
//! float32. Any other scale is applied after normalising. RMS norm has no backward on the CPU: it is spelled out.

use super::reduce::sum;
use super::softmax::dense;
use super::{Kernel, KernelCx, call_n, copy_into, empty, scalar, write};
use ckpt_passes::ir::{Attrs, OpDef};
use ckpt_passes::ops::norm::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::{Arg, Ret};
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&LAYER_NORM, layer_norm),
    (&LAYER_NORM_GRAD, layer_norm_grad),
    (&RMS_NORM, rms_norm),
    (&RMS_NORM_GRAD, rms_norm_grad),
];

fn axis_of(attrs: &Attrs, rank: usize) -> usize {
    let axis = attrs.int("axis");
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

fn is_narrow(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// The type the kernel computes in.
fn wide(kind: Kind) -> Kind {
    if is_narrow(kind) { Kind::Float } else { kind }
}

fn widened(x: &Tensor, kind: Kind) -> Result<Tensor> {
    if x.kind() == kind {
        return dense(x);
    }
    let out = empty(&x.size(), kind, x.device())?;
    write(
        "aten::copy_",
        "",
        &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
    )?;
    Ok(out)
}

fn in_place(name: &str, overload: &str, x: &Tensor, args: &[Arg]) -> Result<()> {
    let mut all = vec![Arg::Tensor(x)];
    all.extend_from_slice(args);
    write(name, overload, &all)
}

fn mul_into(x: &Tensor, by: &Tensor) -> Result<()> {
    in_place("aten::mul_", "Tensor", x, &[Arg::Tensor(by)])
}

/// Sizes of the statistics: 1 on the normalised axes.
fn stats_size(size: &[i64], axis: usize) -> Vec<i64> {
    size.iter()
        .enumerate()
        .map(|(i, d)| if i < axis { *d } else { 1 })
        .collect()
}

fn layer_norm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = dense(cx.x(0)?)?;
    let size = x.size();
    let axis = axis_of(cx.attrs, size.len());
    let (scale, bias) = (cx.x(1)?, cx.opt(2));
    let kind = wide(x.kind());
    let row = &size[axis..];
    let fused =
        scale_is_row(cx.attrs, &size, &scale.size()) && bias.is_none_or(|b| b.size() == row);
    let (weight, offset) = match fused {
        true => (
            Some(widened(scale, kind)?),
            bias.map(|b| widened(b, kind)).transpose()?,
        ),
        // Statistics in float32 come with a scale in float32 only.
        false if is_narrow(x.kind()) => (Some(ones(row, &x, kind)?), None),
        false => (None, None),
    };
    let epsilon = f64::from(cx.attrs.float("epsilon"));
    let (y, mean, inv_std) = normalised(&x, axis, weight.as_ref(), offset.as_ref(), epsilon, kind)?;
    if !fused {
        mul_into(&y, scale)?;
        if let Some(bias) = bias {
            in_place(
                "aten::add_",
                "Tensor",
                &y,
                &[Arg::Tensor(bias), Arg::Int(1)],
            )?;
        }
    }
    let mut outs = vec![y];
    for statistic in [&mean, &inv_std].into_iter().take(cx.n_outs - 1) {
        outs.push(widened(statistic, Kind::Float)?);
    }
    Ok(outs)
}

fn ones(dims: &[i64], like: &Tensor, kind: Kind) -> Result<Tensor> {
    let out = empty(dims, kind, like.device())?;
    copy_into(&out, &scalar(kind, 1.0)?)?;
    Ok(out)
}

/// Result, mean and 1/σ of `aten::native_layer_norm`; the statistics in `kind`.
fn normalised(
    x: &Tensor,
    axis: usize,
    weight: Option<&Tensor>,
    offset: Option<&Tensor>,
    epsilon: f64,
    kind: Kind,
) -> Result<(Tensor, Tensor, Tensor)> {
    let size = x.size();
    if x.numel() == 0 {
        // libtorch wants a row of at least one element; the statistics of none are not numbers.
        let stats = empty(&stats_size(&size, axis), kind, x.device())?;
        copy_into(&stats, &scalar(kind, f64::NAN)?)?;
        return Ok((empty(&size, x.kind(), x.device())?, stats.copy(), stats));
    }
    let args = [
        Arg::Tensor(x),
        Arg::Ints(&size[axis..]),
        Arg::OptTensor(weight),
        Arg::OptTensor(offset),
        Arg::Double(epsilon),
    ];
    let mut results = call_n("aten::native_layer_norm", "", &args)?.into_iter();
    match (results.next(), results.next(), results.next()) {
        (Some(Ret::Tensor(y)), Some(Ret::Tensor(mean)), Some(Ret::Tensor(inv_std))) => {
            Ok((y, mean, inv_std))
        }
        _ => Err(Error::bug(
            "kernel",
            "aten::native_layer_norm gave no tensors",
        )),
    }
}

/// With x̂ = (x − μ)·s and g = dy·scale: dx = s·(g − mean g − x̂·mean(g·x̂)), dscale = Σ dy·x̂, dB = Σ dy. libtorch's
/// kernel gives dx; what it takes for the sums depends on the number of threads, so that those are taken here.
fn layer_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scale = cx.x(2)?;
    let (target, size) = (cx.x(1)?.kind(), cx.x(1)?.size());
    let (axis, kind) = (axis_of(cx.attrs, size.len()), wide(target));
    let wants = cx.attrs.ints("wants");
    let device = scale.device();
    if size.contains(&0) {
        let zeros = wants.iter().map(|want| {
            let out = match want {
                0 => empty(&size, target, device)?,
                _ => empty(&scale.size(), scale.kind(), device)?,
            };
            write("aten::zero_", "", &[Arg::Tensor(&out)]).map(|()| out)
        });
        return zeros.collect();
    }
    let fused = scale_is_row(cx.attrs, &size, &scale.size());
    let (dy, x) = match fused {
        true => (dense(cx.x(0)?)?, dense(cx.x(1)?)?),
        false => (widened(cx.x(0)?, kind)?, widened(cx.x(1)?, kind)?),
    };
    let weight = widened(scale, kind)?;
    let gamma = fused.then_some(&weight);
    let (mean, inv_std) = match (cx.opt(3), cx.opt(4)) {
        (Some(mean), Some(inv_std)) => (widened(mean, kind)?, widened(inv_std, kind)?),
        _ => {
            let epsilon = f64::from(cx.attrs.float("epsilon"));
            let (_, mean, inv_std) = normalised(&x, axis, gamma, None, epsilon, kind)?;
            (mean, inv_std)
        }
    };
    let mut outs = Vec::new();
    for want in wants {
        outs.push(match (want, fused) {
            (0, _) => {
                let g = match fused {
                    true => dy.alias(),
                    false => product(&dy, &weight, kind)?,
                };
                widened(&through_norm(&g, &x, axis, &mean, &inv_std, gamma)?, target)?
            }
            (_, true) => {
                let rows: i64 = size[..axis].iter().product();
                let flat = |t: &Tensor| t.reshape([rows, -1]);
                let normal = (flat(&x), flat(&mean), flat(&inv_std));
                let normal = (*want == 1).then_some(&normal);
                row_sums(&flat(&dy), normal, kind, scale)?
            }
            (1, false) => {
                let terms = empty(&size, kind, device)?;
                let args = [
                    Arg::Tensor(&x),
                    Arg::Tensor(&mean),
                    Arg::Int(1),
                    Arg::Tensor(&terms),
                ];
                write("aten::sub", "out", &args)?;
                mul_into(&terms, &inv_std)?;
                mul_into(&terms, &dy)?;
                summed_like(&terms, scale)?
            }
            _ => summed_like(&dy, scale)?,
        });
    }
    Ok(outs)
}

fn product(a: &Tensor, b: &Tensor, kind: Kind) -> Result<Tensor> {
    let out = empty(&a.size(), kind, a.device())?;
    mul_to(a, b, &out)?;
    Ok(out)
}

fn mul_to(a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    let args = [Arg::Tensor(a), Arg::Tensor(b), Arg::Tensor(out)];
    write("aten::mul", "out", &args)
}

/// dx of a layer norm.
fn through_norm(
    g: &Tensor,
    x: &Tensor,
    axis: usize,
    mean: &Tensor,
    inv_std: &Tensor,
    gamma: Option<&Tensor>,
) -> Result<Tensor> {
    let args = [
        Arg::Tensor(g),
        Arg::Tensor(x),
        Arg::Ints(&x.size()[axis..]),
        Arg::Tensor(mean),
        Arg::Tensor(inv_std),
        Arg::OptTensor(gamma),
        Arg::None,
        Arg::Bools(&[true, false, false]),
    ];
    let results = call_n("aten::native_layer_norm_backward", "", &args)?;
    match results.into_iter().next() {
        Some(Ret::Tensor(dx)) => Ok(dx),
        _ => Err(Error::bug(
            "kernel",
            "LayerNormGrad: no gradient of the operand",
        )),
    }
}

/// Σ dy, or Σ dy·(x − μ)·s with `normal` = (x, μ, s), over rows, as `like`. A few rows at a time
/// (`ops::norm::rows_at_once`), so that the terms take little memory.
fn row_sums(
    dy: &Tensor,
    normal: Option<&(Tensor, Tensor, Tensor)>,
    kind: Kind,
    like: &Tensor,
) -> Result<Tensor> {
    let (rows, width, device) = (dy.size()[0], dy.size()[1], dy.device());
    let step = rows_at_once(rows, width);
    let out = empty(&like.size(), like.kind(), device)?;
    let total = match like.kind() == kind {
        true => out.view([width]),
        false => empty(&[width], kind, device)?,
    };
    let part = (step < rows)
        .then(|| empty(&[width], kind, device))
        .transpose()?;
    let narrow = dy.kind() != kind;
    let block = || empty(&[step, width], kind, device);
    let terms = (narrow || normal.is_some()).then(block).transpose()?;
    let wide_dy = (narrow && normal.is_some()).then(block).transpose()?;
    let mut start = 0;
    while start < rows {
        let count = step.min(rows - start);
        let these = |t: &Tensor| t.narrow(0, start, count);
        let first = |t: &Tensor| t.narrow(0, 0, count);
        let mut summands = these(dy);
        if let Some(terms) = &terms {
            let terms = first(terms);
            match normal {
                None => copy_into(&terms, &summands)?,
                Some((x, mean, inv_std)) => {
                    if let Some(wide) = &wide_dy {
                        copy_into(&first(wide), &summands)?;
                        summands = first(wide);
                    }
                    copy_into(&terms, &these(x))?;
                    let mean = these(mean);
                    in_place(
                        "aten::sub_",
                        "Tensor",
                        &terms,
                        &[Arg::Tensor(&mean), Arg::Int(1)],
                    )?;
                    mul_into(&terms, &these(inv_std))?;
                    mul_into(&terms, &summands)?;
                }
            }
            summands = terms;
        }
        match &part {
            Some(part) if start > 0 => {
                sum(&summands, &[0], false, part)?;
                in_place(
                    "aten::add_",
                    "Tensor",
                    &total,
                    &[Arg::Tensor(part), Arg::Int(1)],
                )?;
            }
            _ => sum(&summands, &[0], false, &total)?,
        }
        start += count;
    }
    if like.kind() != kind {
        copy_into(&out.view([width]), &total)?;
    }
    Ok(out)
}

/// The sum over the axes along which `like` was broadcast, of its type.
fn summed_like(x: &Tensor, like: &Tensor) -> Result<Tensor> {
    let (full, size) = (x.size(), like.size());
    let lead = full.len() - size.len();
    let axes: Vec<i64> = (0..full.len())
        .filter(|i| *i < lead || (size[i - lead] == 1 && full[*i] != 1))
        .map(|i| i as i64)
        .collect();
    let kept: Vec<i64> = (0..full.len())
        .map(|i| if i < lead { 1 } else { size[i - lead] })
        .collect();
    let out = empty(&size, like.kind(), x.device())?;
    let total = match like.kind() == x.kind() {
        true => out.alias(),
        false => empty(&size, x.kind(), x.device())?,
    };
    let target = total.view(kept.as_slice());
    match axes.is_empty() {
        true => copy_into(&target, x)?,
        false => sum(x, &axes, true, &target)?,
    }
    if like.kind() != x.kind() {
        copy_into(&out, &total)?;
    }
    Ok(out)
}

/// The mean over the normalised axes, kept.
fn row_means(x: &Tensor, axis: usize) -> Result<Tensor> {
    let out = empty(&stats_size(&x.size(), axis), x.kind(), x.device())?;
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    sum(x, &axes, true, &out)?;
    let n: i64 = x.size()[axis..].iter().product();
    let n = scalar(x.kind(), n as f64)?;
    in_place("aten::div_", "Tensor", &out, &[Arg::Tensor(&n)])?;
    Ok(out)
}

/// 1/√(mean x² + ε) over the normalised axes; `buffer` is overwritten, and may be `x`.
fn root_factor(x: &Tensor, buffer: &Tensor, axis: usize, epsilon: f64) -> Result<Tensor> {
    mul_to(x, x, buffer)?;
    let factor = row_means(buffer, axis)?;
    let epsilon = scalar(x.kind(), epsilon)?;
    in_place(
        "aten::add_",
        "Tensor",
        &factor,
        &[Arg::Tensor(&epsilon), Arg::Int(1)],
    )?;
    in_place("aten::rsqrt_", "", &factor, &[])?;
    Ok(factor)
}

fn joint(a: Kind, b: Kind) -> Kind {
    if a == Kind::Double || b == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

fn rms_norm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, scale) = (cx.x(0)?, cx.x(1)?);
    let (kind, axis) = (joint(x.kind(), scale.kind()), axis_of(cx.attrs, x.dim()));
    let epsilon = f64::from(cx.attrs.float("epsilon"));
    let out = empty(&x.size(), scale.kind(), x.device())?;
    let buffer = match scale.kind() == kind {
        true => out.alias(),
        false => empty(&x.size(), kind, x.device())?,
    };
    if x.kind() == kind {
        let factor = root_factor(x, &buffer, axis, epsilon)?;
        mul_to(x, &factor, &buffer)?;
    } else {
        copy_into(&buffer, x)?;
        let factor = root_factor(&buffer, &buffer, axis, epsilon)?;
        copy_into(&buffer, x)?;
        mul_into(&buffer, &factor)?;
    }
    if scale.kind() == kind {
        mul_into(&buffer, scale)?;
    } else {
        mul_into(&buffer, &widened(scale, kind)?)?;
        copy_into(&out, &buffer)?;
    }
    Ok(vec![out])
}

/// With r the factor and g = dy·scale: dx = r·(g − x̂·mean(g·x̂)), dscale = Σ dy·x̂. Two buffers hold all, x̂ being worked
/// out twice; the first of them is the result where the types allow.
fn rms_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (dy, x, scale) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let (kind, axis) = (joint(x.kind(), scale.kind()), axis_of(cx.attrs, x.dim()));
    let wants = cx.attrs.ints("wants");
    let new = |kind| empty(&x.size(), kind, x.device());
    let dx = wants.contains(&0).then(|| new(x.kind())).transpose()?;
    let work = match &dx {
        Some(dx) if x.kind() == kind => dx.alias(),
        _ => new(kind)?,
    };
    let normal = new(kind)?;
    copy_into(&normal, x)?;
    let factor = root_factor(&normal, &work, axis, f64::from(cx.attrs.float("epsilon")))?;
    mul_into(&normal, &factor)?;
    let mut dscale = None;
    if wants.contains(&1) {
        copy_into(&work, dy)?;
        mul_into(&work, &normal)?;
        dscale = Some(summed_like(&work, scale)?);
    }
    if let Some(dx) = &dx {
        copy_into(&work, dy)?;
        mul_into(&work, &widened_strided(scale, kind)?)?;
        mul_into(&normal, &work)?;
        let along = row_means(&normal, axis)?;
        copy_into(&normal, x)?;
        mul_into(&normal, &factor)?;
        mul_into(&normal, &along)?;
        in_place(
            "aten::sub_",
            "Tensor",
            &work,
            &[Arg::Tensor(&normal), Arg::Int(1)],
        )?;
        mul_into(&work, &factor)?;
        if x.kind() != kind {
            copy_into(dx, &work)?;
        }
    }
    Ok(dx.into_iter().chain(dscale).collect())
}

/// In `kind`; as it lies where it has that type.
fn widened_strided(x: &Tensor, kind: Kind) -> Result<Tensor> {
    if x.kind() == kind {
        return Ok(x.alias());
    }
    widened(x, kind)
}
