//! Normalisations.

use super::super::value::Value;
use super::reduce::{count, over};
use super::signature::{Call, Op};
use crate::frontend::lower::by_channel;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::rule::{Formulas, Term, unary_op};
use ckpt_passes::ops::shape::RESHAPE;
use ckpt_passes::ops::{EmitExt, math, norm, reduce};

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

/// Returns the scale of a norm over the last `axes` axes, by default ones.
pub(super) fn scale(c: &mut Call, x: ValueId, axes: usize) -> Result<ValueId> {
    if let Some(scale) = c.opt_value("weight")? {
        return Ok(scale);
    }
    let dims = c.shape_of(x)[c.rank(x) - axes..].to_vec();
    let one = c.scalar_like(x, 1.0);
    c.low.broadcast_to(one, &dims)
}

/// Returns the number of axes in `normalized_shape`.
pub(super) fn normalized_axes(c: &Call, x: ValueId) -> Result<usize> {
    let shape = c.dims("normalized_shape")?.unwrap_or_default();
    if shape.is_empty() || shape.len() > c.rank(x) {
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
    // By default, epsilon is the distance from 1 to the next number of the type.
    let natural = match c.dtype(x) {
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
    c.result_with(&norm::RMS_NORM, &[x, scale], attrs)
}

/// Applies `weight` and `bias`, if they are given.
fn affine(c: &mut Call, mut y: ValueId) -> Result<Value> {
    if let Some(weight) = c.opt_value("weight")? {
        let weight = by_channel(&mut c.low.b, weight, y)?;
        y = c.low.b.mul(y, weight)?;
    }
    if let Some(bias) = c.opt_value("bias")? {
        let bias = by_channel(&mut c.low.b, bias, y)?;
        y = c.low.b.add(y, bias)?;
    }
    c.made(y)
}

/// Emits (x − mean)/√(var + ε).
fn normalised(c: &mut Call, x: ValueId, mean: ValueId, var: ValueId) -> Result<ValueId> {
    let eps = c.float("eps", 1e-5)?;
    let deviation = unary_op(&math::SQRT, Term(var) + eps);
    c.low.b.eval((Term(x) - mean) / deviation)
}

/// Emits the mean and the population variance over axes that stay.
fn moments(c: &mut Call, x: ValueId, axes: &[usize]) -> Result<(ValueId, ValueId)> {
    let mean = over(c, &reduce::REDUCE_MEAN, x, axes, true)?;
    let off = c.low.b.sub(x, mean)?;
    let square = c.low.b.mul(off, off)?;
    let var = over(c, &reduce::REDUCE_MEAN, square, axes, true)?;
    Ok((mean, var))
}

fn group_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let dims = c.shape_of(x);
    let groups = c.int("num_groups", 1)?;
    let [batch, channels, ..] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor has no channels"));
    };
    let each = channels
        .exact_div(&Dim::from(groups))
        .ok_or_else(|| c.fail("shape", "the groups do not divide the channels"))?;
    let rest = Dim::product(&dims[2..]).mul(&each);
    let apart = c.reshape(x, &[batch.clone(), Dim::from(groups), rest])?;
    let (mean, var) = moments(c, apart, &[2])?;
    let y = normalised(c, apart, mean, var)?;
    let y = reshaped_like(c, y, x)?;
    affine(c, y)
}

/// Reshapes a value to the shape of another.
fn reshaped_like(c: &mut Call, x: ValueId, like: ValueId) -> Result<ValueId> {
    let shape = c.low.b.shape(like)?;
    c.emit(&RESHAPE, &[x, shape])
}

/// Normalises by the running statistics of the channels.
fn by_running(c: &mut Call, x: ValueId, mean: ValueId, var: ValueId) -> Result<ValueId> {
    let mean = by_channel(&mut c.low.b, mean, x)?;
    let var = by_channel(&mut c.low.b, var, x)?;
    normalised(c, x, mean, var)
}

/// Lowers a norm by the statistics of each channel of each example.
fn instance_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let running = (c.opt_value("running_mean")?, c.opt_value("running_var")?);
    let own = c.bool("use_input_stats", true)?;
    let y = match running {
        (Some(mean), Some(var)) if !own => by_running(c, x, mean, var)?,
        (None, None) if c.rank(x) > 2 => {
            let axes: Vec<usize> = (2..c.rank(x)).collect();
            let (mean, var) = moments(c, x, &axes)?;
            normalised(c, x, mean, var)?
        }
        _ => {
            return Err(c
                .unsupported("keeping running statistics")
                .help("export with track_running_stats=False, or in evaluation mode"));
        }
    };
    affine(c, y)
}

/// Lowers a norm by running statistics, or in training by those of the batch, which update the running ones by `momentum`.
fn batch_norm(c: &mut Call) -> Result<Value> {
    let x = c.value("input")?;
    let training = c.bool("training", false)?;
    let running = (c.opt_value("running_mean")?, c.opt_value("running_var")?);
    if let (false, (Some(mean), Some(var))) = (training, running) {
        let y = by_running(c, x, mean, var)?;
        return affine(c, y);
    }
    let axes: Vec<usize> = (0..c.rank(x)).filter(|a| *a != 1).collect();
    let (mean, var) = moments(c, x, &axes)?;
    if let (true, (Some(old_mean), Some(old_var))) = (training, running) {
        let count = count(c, x, &axes, c.dtype(x))?;
        let one = c.scalar_like(x, 1.0);
        let less = c.low.b.sub(count, one)?;
        let sample = c.low.b.mul(var, count)?;
        let sample = c.low.b.div(sample, less)?;
        let momentum = c.float("momentum", 0.1)?;
        for (name, old, new) in [
            ("running_mean", old_mean, mean),
            ("running_var", old_var, sample),
        ] {
            let target = c.tensor(name)?;
            let new = reshaped_like(c, new, old)?;
            let new = c.low.stopped(new)?;
            let (share, rest) = (c.scalar_like(x, momentum), c.scalar_like(x, 1.0 - momentum));
            let new = c.low.b.mul(new, share)?;
            let kept = c.low.b.mul(old, rest)?;
            let updated = c.low.b.add(kept, new)?;
            c.low.write(target, updated)?;
        }
    }
    let y = normalised(c, x, mean, var)?;
    affine(c, y)
}
