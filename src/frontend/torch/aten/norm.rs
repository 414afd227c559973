//! Normalisations.

use super::Value;
use super::reduce::over;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::{math, norm, reduce, shape};

pub const OPS: &[Op] = &[
    (
        "batch_norm(input: t, weight: t?, bias: t?, running_mean: t?, running_var: t?, training: b, momentum: f, eps: f, cudnn_enabled: b?)",
        batch_norm,
    ),
    (
        "group_norm(input: t, num_groups: i, weight: t?, bias: t?, eps: f?, cudnn_enabled: b?)",
        group_norm,
    ),
    (
        "instance_norm(input: t, weight: t?, bias: t?, running_mean: t?, running_var: t?, use_input_stats: b, momentum: f, eps: f, cudnn_enabled: b?)",
        instance_norm,
    ),
    (
        "layer_norm(input: t, normalized_shape: I, weight: t?, bias: t?, eps: f?, cudnn_enable: b?)",
        layer_norm,
    ),
    (
        "rms_norm(input: t, normalized_shape: I, weight: t?, eps: f?)",
        rms_norm,
    ),
];

/// Ones in the sizes that are normalised over, where there is no scale.
pub(super) fn scale(c: &mut Call, x: ValueId, axes: usize) -> Result<ValueId> {
    if let Some(scale) = c.opt_value("weight")? {
        return Ok(scale);
    }
    let dtype = c.low.b.ty(x).dtype;
    let dims = c.low.b.ty(x).dims[c.low.b.rank(x) - axes..].to_vec();
    let one = c.low.b.scalar(dtype, 1.0);
    c.low.broadcast_to(one, &dims)
}

pub(super) fn normalized_axes(c: &Call, x: ValueId) -> Result<usize> {
    let shape = c.dims("normalized_shape")?.unwrap_or_default();
    let rank = c.low.b.rank(x);
    if shape.is_empty() || shape.len() > rank {
        return Err(c.fail("shape", "`normalized_shape` does not fit the tensor"));
    }
    Ok(shape.len())
}

fn layer_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let axes = normalized_axes(c, x)?;
    let scale = scale(c, x, axes)?;
    let attrs = Attrs::new()
        .with("axis", -(axes as i64))
        .with("epsilon", c.float("eps", 1e-5)? as f32);
    let mut ins = vec![Some(x), Some(scale)];
    if let Some(bias) = c.opt_value("bias")? {
        ins.push(Some(bias));
    }
    let y = c.low.b.emit_n(&norm::LAYER_NORM, ins, attrs, 1)?[0];
    c.made(y)
}

fn rms_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let axes = normalized_axes(c, x)?;
    // Where none is given, the distance from 1 to the next number of the type.
    let natural = match c.low.b.ty(x).dtype {
        DType::F64 => f64::EPSILON,
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => f64::from(f32::EPSILON),
    };
    let eps = c.float("eps", natural)?;
    let scale = scale(c, x, axes)?;
    let attrs = Attrs::new()
        .with("axis", -(axes as i64))
        .with("epsilon", eps as f32);
    let y = c.low.b.emit(&norm::RMS_NORM, &[x, scale], attrs)?;
    c.made(y)
}

/// A vector [channels] as [channels, 1, …], to stand behind the batch axis of `x`.
fn channels(c: &mut Call, v: ValueId, x: ValueId) -> Result<ValueId> {
    let axes: Vec<i64> = (1..c.low.b.rank(x) as i64 - 1).collect();
    if axes.is_empty() {
        return Ok(v);
    }
    c.low.apply_unsqueeze(v, &axes)
}

fn affine(c: &mut Call, mut y: ValueId) -> Result<Value> {
    if let Some(weight) = c.opt_value("weight")? {
        let weight = channels(c, weight, y)?;
        y = c.low.b.mul(y, weight)?;
    }
    if let Some(bias) = c.opt_value("bias")? {
        let bias = channels(c, bias, y)?;
        y = c.low.b.add(y, bias)?;
    }
    c.made(y)
}

/// (x − mean)/√(var + ε).
fn normalised(c: &mut Call, x: ValueId, mean: ValueId, var: ValueId, eps: f64) -> Result<ValueId> {
    let off = c.low.b.sub(x, mean)?;
    let eps = c.low.b.scalar(c.low.b.ty(var).dtype, eps);
    let var = c.low.b.add(var, eps)?;
    let deviation = c.low.emit(&math::SQRT, &[var])?;
    c.low.b.div(off, deviation)
}

/// Mean and variance (of the whole, not of a sample) over axes that stay.
fn moments(c: &mut Call, x: ValueId, axes: &[usize]) -> Result<(ValueId, ValueId)> {
    let mean = over(c, &reduce::REDUCE_MEAN, x, axes, true)?;
    let off = c.low.b.sub(x, mean)?;
    let square = c.low.b.mul(off, off)?;
    let var = over(c, &reduce::REDUCE_MEAN, square, axes, true)?;
    Ok((mean, var))
}

fn group_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let dims = c.low.b.ty(x).dims.clone();
    let groups = c.int("num_groups", 1)?;
    let eps = c.float("eps", 1e-5)?;
    let [batch, channels, ..] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor has no channels"));
    };
    let each = channels
        .exact_div(&Dim::from(groups))
        .ok_or_else(|| c.fail("shape", "the groups do not divide the channels"))?;
    let rest = Dim::product(&dims[2..]).mul(&each);
    let wanted = [batch.clone(), Dim::from(groups), rest];
    let wanted = c.low.int_vector(&wanted)?;
    let apart = c.low.emit(&shape::RESHAPE, &[x, wanted])?;
    let (mean, var) = moments(c, apart, &[2])?;
    let y = normalised(c, apart, mean, var, eps)?;
    let back = c.low.b.shape(x)?;
    let y = c.low.emit(&shape::RESHAPE, &[y, back])?;
    affine(c, y)
}

/// With the statistics of each channel of each example.
fn instance_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let (rank, eps) = (c.low.b.rank(x), c.float("eps", 1e-5)?);
    let running = (c.opt_value("running_mean")?, c.opt_value("running_var")?);
    let own = c.bool("use_input_stats", true)?;
    let y = match running {
        (Some(mean), Some(var)) if !own => {
            let (mean, var) = (channels(c, mean, x)?, channels(c, var, x)?);
            normalised(c, x, mean, var, eps)?
        }
        (None, None) if rank > 2 => {
            let axes: Vec<usize> = (2..rank).collect();
            let (mean, var) = moments(c, x, &axes)?;
            normalised(c, x, mean, var, eps)?
        }
        _ => {
            return Err(c
                .unsupported("keeping running statistics")
                .help("export with track_running_stats=False, or in evaluation mode"));
        }
    };
    affine(c, y)
}

/// With the statistics of the batch in training, which become part of the running ones as `momentum` says.
fn batch_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let rank = c.low.b.rank(x);
    let eps = c.float("eps", 1e-5)?;
    let training = c.bool("training", false)?;
    let running = (c.opt_value("running_mean")?, c.opt_value("running_var")?);
    if let (false, (Some(mean), Some(var))) = (training, running) {
        let (mean, var) = (channels(c, mean, x)?, channels(c, var, x)?);
        let y = normalised(c, x, mean, var, eps)?;
        return affine(c, y);
    }
    let axes: Vec<usize> = (0..rank).filter(|a| *a != 1).collect();
    let (mean, var) = moments(c, x, &axes)?;
    if let (true, (Some(old_mean), Some(old_var))) = (training, running) {
        let dtype = c.low.b.ty(x).dtype;
        let count = super::reduce::count(c, x, &axes, dtype)?;
        let one = c.low.b.scalar(dtype, 1.0);
        let less = c.low.b.sub(count, one)?;
        let sample = c.low.b.mul(var, count)?;
        let sample = c.low.b.div(sample, less)?;
        let momentum = c.float("momentum", 0.1)?;
        for (name, old, new) in [
            ("running_mean", old_mean, mean),
            ("running_var", old_var, sample),
        ] {
            let target = c.tensor(name)?;
            let shape = c.low.b.shape(old)?;
            let new = c.low.emit(&shape::RESHAPE, &[new, shape])?;
            let new = c.low.stopped(new)?;
            let (share, rest) = (
                c.low.b.scalar(dtype, momentum),
                c.low.b.scalar(dtype, 1.0 - momentum),
            );
            let new = c.low.b.mul(new, share)?;
            let kept = c.low.b.mul(old, rest)?;
            let updated = c.low.b.add(kept, new)?;
            c.low.write(target, updated)?;
        }
    }
    let y = normalised(c, x, mean, var, eps)?;
    affine(c, y)
}
