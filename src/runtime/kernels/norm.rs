//! Layer and RMS normalisation and their gradients.
//!
//! libtorch's layer norm takes a scale of exactly one row and, for 16-bit operands, parameters and statistics in
//! float32. Any other scale is applied after normalising. RMS norm has no backward on the CPU: it is spelled out.

use super::softmax::dense;
use super::{Kernel, KernelCx, call_n, empty, write};
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
    let out = empty(&x.size(), kind, x.device());
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
    let stats_kind = wide(x.kind());
    let y = empty(&size, x.kind(), x.device());
    let stats = stats_size(&size, axis);
    let (mean, inv_std) = (
        empty(&stats, stats_kind, x.device()),
        empty(&stats, stats_kind, x.device()),
    );
    let row = &size[axis..];
    let fused =
        scale_is_row(cx.attrs, &size, &scale.size()) && bias.is_none_or(|b| b.size() == row);
    let (weight, offset) = match fused {
        true => (
            Some(widened(scale, stats_kind)?),
            bias.map(|b| widened(b, stats_kind)).transpose()?,
        ),
        false => (None, None),
    };
    let args = [
        Arg::Tensor(&x),
        Arg::Ints(row),
        Arg::OptTensor(weight.as_ref()),
        Arg::OptTensor(offset.as_ref()),
        Arg::Double(f64::from(cx.attrs.float("epsilon"))),
        Arg::Tensor(&y),
        Arg::Tensor(&mean),
        Arg::Tensor(&inv_std),
    ];
    // The kernel wants a row of at least one element.
    if x.numel() > 0 {
        call_n("aten::native_layer_norm", "out", &args)?;
    }
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
    for statistic in [mean, inv_std].into_iter().take(cx.n_outs - 1) {
        outs.push(widened(&statistic, Kind::Float)?);
    }
    Ok(outs)
}

fn layer_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (dy, x, scale) = (dense(cx.x(0)?)?, dense(cx.x(1)?)?, cx.x(2)?);
    let size = x.size();
    let axis = axis_of(cx.attrs, size.len());
    let kind = wide(x.kind());
    let row = &size[axis..];
    let (mean, inv_std) = match (cx.opt(3), cx.opt(4)) {
        (Some(mean), Some(inv_std)) => (mean.alias(), inv_std.alias()),
        _ => statistics(&x, axis, f64::from(cx.attrs.float("epsilon")), kind)?,
    };
    let wants = cx.attrs.ints("wants");
    if !scale_is_row(cx.attrs, &size, &scale.size()) {
        return spelled_out(cx, &dy, &x, &mean, &inv_std, axis);
    }
    let weight = widened(scale, kind)?;
    let mask: Vec<bool> = (0..3).map(|i| wants.contains(&i)).collect();
    let args = [
        Arg::Tensor(&dy),
        Arg::Tensor(&x),
        Arg::Ints(row),
        Arg::Tensor(&mean),
        Arg::Tensor(&inv_std),
        Arg::Tensor(&weight),
        // Only its shape is read.
        Arg::Tensor(&weight),
        Arg::Bools(&mask),
    ];
    let results = call_n("aten::native_layer_norm_backward", "", &args)?;
    let mut outs = Vec::new();
    for (slot, result) in results.into_iter().enumerate() {
        if !mask[slot] {
            continue;
        }
        let Ret::Tensor(gradient) = result else {
            return Err(Error::bug(
                "kernel",
                format!("LayerNormGrad: no gradient for operand {slot}"),
            ));
        };
        let target = if slot == 0 { x.kind() } else { scale.kind() };
        outs.push(widened(&gradient, target)?);
    }
    Ok(outs)
}

fn statistics(x: &Tensor, axis: usize, epsilon: f64, kind: Kind) -> Result<(Tensor, Tensor)> {
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    let x = widened(x, kind)?;
    let args = [
        Arg::Tensor(&x),
        Arg::Ints(&axes),
        Arg::Int(0),
        Arg::Bool(true),
    ];
    let mut results = call_n("aten::var_mean", "correction", &args)?.into_iter();
    let (Some(Ret::Tensor(variance)), Some(Ret::Tensor(mean))) = (results.next(), results.next())
    else {
        return Err(Error::bug("kernel", "aten::var_mean gave no tensors"));
    };
    in_place(
        "aten::add_",
        "Scalar",
        &variance,
        &[Arg::Double(epsilon), Arg::Int(1)],
    )?;
    in_place("aten::rsqrt_", "", &variance, &[])?;
    Ok((mean, variance))
}

/// For a scale that is not one row. With x̂ = (x − μ)·s and g = dy·scale:
/// dx = s·(g − mean g − x̂·mean(g·x̂)), dscale = Σ dy·x̂, dB = Σ dy.
fn spelled_out(
    cx: &KernelCx,
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    inv_std: &Tensor,
    axis: usize,
) -> Result<Vec<Tensor>> {
    let scale = cx.x(2)?;
    let kind = wide(x.kind());
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    let normal = (x.to_kind(kind) - mean) * inv_std;
    let dy = dy.to_kind(kind);
    let mut outs = Vec::new();
    for want in cx.attrs.ints("wants") {
        let gradient = match want {
            0 => {
                let g = &dy * scale.to_kind(kind);
                let along = (&g * &normal).mean_dim(axes.as_slice(), true, kind);
                let level = g.mean_dim(axes.as_slice(), true, kind);
                (g - level - &normal * along) * inv_std
            }
            1 => summed_to(&(&dy * &normal), &scale.size()),
            _ => summed_to(&dy, &scale.size()),
        };
        let target = if *want == 0 { x.kind() } else { scale.kind() };
        outs.push(widened(&gradient, target)?);
    }
    Ok(outs)
}

/// Sums the axes along which `size` was broadcast.
fn summed_to(x: &Tensor, size: &[i64]) -> Tensor {
    let full = x.size();
    let lead = full.len() - size.len();
    let axes: Vec<i64> = (0..full.len())
        .filter(|i| *i < lead || (size[i - lead] == 1 && full[*i] != 1))
        .map(|i| i as i64)
        .collect();
    if axes.is_empty() {
        return x.shallow_clone();
    }
    x.sum_dim_intlist(axes.as_slice(), true, x.kind())
        .reshape(size)
}

/// 1/√(mean x² + ε) over the normalised axes; `buffer` is overwritten.
fn root_factor(x: &Tensor, buffer: &Tensor, axis: usize, epsilon: f64) -> Result<Tensor> {
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    write(
        "aten::mul",
        "out",
        &[Arg::Tensor(x), Arg::Tensor(x), Arg::Tensor(buffer)],
    )?;
    let factor = empty(&stats_size(&x.size(), axis), x.kind(), x.device());
    let args = [
        Arg::Tensor(buffer),
        Arg::Ints(&axes),
        Arg::Bool(true),
        Arg::None,
        Arg::Tensor(&factor),
    ];
    write("aten::mean", "out", &args)?;
    in_place(
        "aten::add_",
        "Scalar",
        &factor,
        &[Arg::Double(epsilon), Arg::Int(1)],
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
    let out = empty(&x.size(), scale.kind(), x.device());
    let exact = x.kind() == kind && scale.kind() == kind;
    let buffer = if exact {
        out.alias()
    } else {
        empty(&x.size(), kind, x.device())
    };
    if x.kind() == kind {
        let factor = root_factor(x, &buffer, axis, epsilon)?;
        write(
            "aten::mul",
            "out",
            &[Arg::Tensor(x), Arg::Tensor(&factor), Arg::Tensor(&buffer)],
        )?;
    } else {
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&buffer), Arg::Tensor(x), Arg::Bool(false)],
        )?;
        let square = empty(&x.size(), kind, x.device());
        let factor = root_factor(&buffer, &square, axis, epsilon)?;
        mul_into(&buffer, &factor)?;
    }
    mul_into(&buffer, scale)?;
    if !exact {
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(&buffer), Arg::Bool(false)],
        )?;
    }
    Ok(vec![out])
}

/// With r the factor and g = dy·scale: dx = r·(g − x̂·mean(g·x̂)), dscale = Σ dy·x̂.
fn rms_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (dy, x, scale) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let (kind, axis) = (joint(x.kind(), scale.kind()), axis_of(cx.attrs, x.dim()));
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    let wide_x = x.to_kind(kind);
    let buffer = empty(&x.size(), kind, x.device());
    let factor = root_factor(&wide_x, &buffer, axis, f64::from(cx.attrs.float("epsilon")))?;
    let normal = buffer;
    write(
        "aten::mul",
        "out",
        &[
            Arg::Tensor(&wide_x),
            Arg::Tensor(&factor),
            Arg::Tensor(&normal),
        ],
    )?;
    let wide_dy = dy.to_kind(kind);
    let mut outs = Vec::new();
    for want in cx.attrs.ints("wants") {
        let gradient = match want {
            0 => {
                let g = &wide_dy * scale.to_kind(kind);
                let along = (&g * &normal).mean_dim(axes.as_slice(), true, kind);
                (g - &normal * along) * &factor
            }
            _ => summed_to(&(&wide_dy * &normal), &scale.size()),
        };
        let target = if *want == 0 { x.kind() } else { scale.kind() };
        outs.push(widened(&gradient, target)?);
    }
    Ok(outs)
}
