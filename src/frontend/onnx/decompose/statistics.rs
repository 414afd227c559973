//! Reductions and normalisations over fixed groups of axes: batch, group, instance, local response and mean-variance
//! normalisation, `LpNormalization`, `ReduceLogSum` (ONNX operator specifications).
//!
//! Group and instance normalisation are a LayerNormalization of the flattened group, whose gradient is one kernel.

use super::pool::spatial;
use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::concat::{CONCAT, PAD};
use ckpt_passes::ops::logic::{EQUAL, WHERE};
use ckpt_passes::ops::math::{LOG, SQRT};
use ckpt_passes::ops::norm::LAYER_NORM;
use ckpt_passes::ops::power::POW;
use ckpt_passes::ops::reduce::{REDUCE_L1, REDUCE_L2, REDUCE_MEAN, REDUCE_SUM, reduce_axes};
use ckpt_passes::ops::slice::SLICE;

fn one(v: ValueId) -> Result<Option<Vec<Out>>> {
    Ok(Some(vec![Out::Value(v)]))
}

/// A vector over channels (axis 1) that broadcasts against `x`.
fn by_channel(call: &mut Call, v: ValueId, x: ValueId) -> Result<ValueId> {
    let axes: Vec<i64> = (1..call.b.rank(x) as i64 - 1).collect();
    if axes.is_empty() {
        return Ok(v);
    }
    call.unsqueeze(v, &axes)
}

/// x·scale + bias, both of them vectors over channels.
fn affine(call: &mut Call, x: ValueId, scale: ValueId, bias: ValueId) -> Result<ValueId> {
    let (scale, bias) = (by_channel(call, scale, x)?, by_channel(call, bias, x)?);
    let y = call.b.mul(x, scale)?;
    call.b.add(y, bias)
}

/// `x` as [batch, groups, everything else], normalised along the last axis, in its own shape again.
fn normalised(call: &mut Call, x: ValueId, groups: i64, epsilon: f32) -> Result<ValueId> {
    let shape = call.b.shape(x)?;
    let flat = call.reshape(x, &[0, groups, -1])?;
    let mut unit = Tensor::scalar(call.dtype(x), 1.0);
    unit.dims = vec![1];
    let ones = call.b.constant("ones", unit);
    let attrs = Attrs::new().with("axis", -1).with("epsilon", epsilon);
    let flat = call.b.emit(&LAYER_NORM, &[flat, ones], attrs)?;
    call.reshape_to(flat, shape)
}

/// `InstanceNormalization`: each channel of each sample by itself.
pub fn instance(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, scale) = (call.need(0, "input")?, call.need(1, "scale")?);
    let bias = call.need(2, "B")?;
    let epsilon = call.float("epsilon", 1e-5)?;
    spatial(call, x)?;
    let y = normalised(call, x, 0, epsilon)?;
    one(affine(call, y, scale, bias)?)
}

/// `GroupNormalization`: groups of channels of each sample; until opset 20 scale and bias are by group.
pub fn group(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, mut scale) = (call.need(0, "X")?, call.need(1, "scale")?);
    let mut bias = call.need(2, "bias")?;
    let groups = call.heads("num_groups")?;
    let epsilon = call.float("epsilon", 1e-5)?;
    match call.int("stash_type", 1)? {
        1 => {}
        other => return Err(call.unsupported(format!("stash_type = {other}"))),
    }
    let y = normalised(call, x, groups, epsilon)?;
    if call.opset < 21 {
        let channels = call.size(x, 1, "the number of channels")?;
        if channels % groups != 0 {
            return Err(call.fail("shape", format!("{channels} channels in {groups} groups")));
        }
        for v in [&mut scale, &mut bias] {
            let wide = call.unsqueeze(*v, &[1])?;
            let shape = call.b.ints(&[groups, channels / groups]);
            let wide = call.expand(wide, shape)?;
            *v = call.reshape(wide, &[-1])?;
        }
    }
    one(affine(call, y, scale, bias)?)
}

/// `BatchNormalization`: by given statistics, or in training mode by those of the batch, which move the given ones.
pub fn batch(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, scale) = (call.need(0, "X")?, call.need(1, "scale")?);
    let (bias, mean) = (call.need(2, "B")?, call.need(3, "input_mean")?);
    let variance = call.need(4, "input_var")?;
    let epsilon = call.float("epsilon", 1e-5)?;
    let momentum = f64::from(call.float("momentum", 0.9)?);
    let training = call.int("training_mode", 0)? != 0;
    call.ignore("spatial"); // Gone since opset 9, whose only meaning is the one of 1.
    let dtype = call.dtype(x);
    let rank = call.b.rank(x);
    if rank < 2 {
        return Err(call.fail("shape", "the operand has no channels"));
    }
    let stat = |call: &mut Call, v: ValueId| -> Result<ValueId> {
        let v = by_channel(call, v, x)?;
        call.b.cast(v, dtype)
    };
    if !training {
        let (mean, variance) = (stat(call, mean)?, stat(call, variance)?);
        let y = scaled(call, x, mean, variance, epsilon)?;
        let y = by_scale(call, y, scale, bias, dtype)?;
        let absent = "running statistics are results in training mode only";
        return Ok(Some(vec![
            Out::Value(y),
            Out::Absent(absent),
            Out::Absent(absent),
            Out::Absent(absent),
            Out::Absent(absent),
        ]));
    }
    let axes: Vec<usize> = (0..rank).filter(|a| *a != 1).collect();
    let centre = reduce_axes(&mut call.b, &REDUCE_MEAN, x, &axes, true)?;
    let away = call.b.sub(x, centre)?;
    let square = call.b.mul(away, away)?;
    let spread = reduce_axes(&mut call.b, &REDUCE_MEAN, square, &axes, true)?;
    let y = scaled(call, x, centre, spread, epsilon)?;
    let y = by_scale(call, y, scale, bias, dtype)?;
    let mut results = vec![Out::Value(y)];
    for (slot, (old, new)) in [(mean, centre), (variance, spread)].into_iter().enumerate() {
        if !call.wants(slot + 1) {
            results.push(Out::Absent("nobody asked for it"));
            continue;
        }
        let new = call.reshape(new, &[-1])?;
        let new = call.b.cast(new, call.dtype(old))?;
        let (old, new) = (
            call.scaled(old, momentum)?,
            call.scaled(new, 1.0 - momentum)?,
        );
        results.push(Out::Value(call.b.add(old, new)?));
    }
    Ok(Some(results))
}

/// (x - mean) / √(variance + epsilon).
fn scaled(
    call: &mut Call,
    x: ValueId,
    mean: ValueId,
    variance: ValueId,
    epsilon: f32,
) -> Result<ValueId> {
    let epsilon = call.b.scalar(call.dtype(variance), f64::from(epsilon));
    let away = call.b.sub(x, mean)?;
    let spread = call.b.add(variance, epsilon)?;
    let deviation = call.b.emit(&SQRT, &[spread], Attrs::new())?;
    call.b.div(away, deviation)
}

fn by_scale(
    call: &mut Call,
    y: ValueId,
    scale: ValueId,
    bias: ValueId,
    dtype: DType,
) -> Result<ValueId> {
    let (scale, bias) = (call.b.cast(scale, dtype)?, call.b.cast(bias, dtype)?);
    affine(call, y, scale, bias)
}

/// `LRN`: by (bias + alpha/size·Σ x²)^beta, the sum over `size` neighbouring channels.
pub fn local_response(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    spatial(call, x)?;
    let size = call.heads("size")?;
    let (alpha, beta) = (call.float("alpha", 1e-4)?, call.float("beta", 0.75)?);
    let bias = call.float("bias", 1.0)?;
    let dtype = call.dtype(x);
    let square = call.b.mul(x, x)?;
    let (before, after) = ((size - 1) / 2, size - 1 - (size - 1) / 2);
    let zero = call.b.scalar(dtype, 0.0);
    let rank = call.b.rank(x);
    let mut pads = vec![0; 2 * rank];
    (pads[1], pads[rank + 1]) = (before, after);
    let (pads, axis) = (call.b.ints(&pads), call.b.ints(&[1]));
    let padded = call.b.emit(&PAD, &[square, pads, zero], Attrs::new())?;
    let channels = call.axis_vector(x, 1)?;
    let mut sum: Option<ValueId> = None;
    for offset in 0..size {
        let start = call.b.ints(&[offset]);
        let end = call.b.add(channels, start)?;
        let part = call
            .b
            .emit(&SLICE, &[padded, start, end, axis], Attrs::new())?;
        sum = Some(match sum {
            None => part,
            Some(sum) => call.b.add(sum, part)?,
        });
    }
    let Some(sum) = sum else {
        return Err(call.fail("attribute", "`size` is not positive"));
    };
    let sum = call.scaled(sum, f64::from(alpha) / size as f64)?;
    let bias = call.b.scalar(dtype, f64::from(bias));
    let base = call.b.add(bias, sum)?;
    let beta = call.b.scalar(dtype, f64::from(beta));
    let divisor = call.b.emit(&POW, &[base, beta], Attrs::new())?;
    one(call.b.div(x, divisor)?)
}

/// `MeanVarianceNormalization`: (x - mean) / (deviation + 1e-9) over the axes.
pub fn mean_variance(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let axes = call.ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
    let axes = call.b.ints(&axes);
    let keep = || Attrs::new().with("keepdims", 1);
    let mean = call.b.emit(&REDUCE_MEAN, &[x, axes], keep())?;
    let away = call.b.sub(x, mean)?;
    let square = call.b.mul(away, away)?;
    let variance = call.b.emit(&REDUCE_MEAN, &[square, axes], keep())?;
    let deviation = call.b.emit(&SQRT, &[variance], Attrs::new())?;
    let epsilon = call.b.scalar(call.dtype(x), 1e-9);
    let deviation = call.b.add(deviation, epsilon)?;
    one(call.b.div(away, deviation)?)
}

/// `LpNormalization`: by the 1- or 2-norm along an axis; a row of norm 0 gives zeros.
pub fn lp(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    let axis = call.int("axis", -1)?;
    let norm = match call.int("p", 2)? {
        1 => &REDUCE_L1,
        2 => &REDUCE_L2,
        other => return Err(call.unsupported(format!("p = {other}"))),
    };
    let axes = call.b.ints(&[axis]);
    let size = call
        .b
        .emit(norm, &[x, axes], Attrs::new().with("keepdims", 1))?;
    let dtype = call.dtype(x);
    let (zero, unit) = (call.b.scalar(dtype, 0.0), call.b.scalar(dtype, 1.0));
    let flat = call.b.emit(&EQUAL, &[size, zero], Attrs::new())?;
    // Zeros by one are zeros, and no infinity enters the gradient.
    let size = call.b.emit(&WHERE, &[flat, unit, size], Attrs::new())?;
    one(call.b.div(x, size)?)
}

/// `ReduceLogSum`: the logarithm of a sum.
pub fn log_sum(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "data")?;
    let mut ins = vec![x];
    // An attribute before opset 18.
    match (call.ints("axes")?, call.opt(1)) {
        (Some(axes), None) => ins.push(call.b.ints(&axes)),
        (None, Some(axes)) => ins.push(axes),
        (None, None) => {}
        _ => return Err(call.fail("arity", "the axes are given twice")),
    }
    let attrs = Attrs::new()
        .with("keepdims", call.int("keepdims", 1)?)
        .with("noop_with_empty_axes", call.int("noop_with_empty_axes", 0)?);
    let sum = call.b.emit(&REDUCE_SUM, &ins, attrs)?;
    one(call.b.emit(&LOG, &[sum], Attrs::new())?)
}

/// `DepthToSpace`: blocks of channels become blocks of pixels.
pub fn depth_to_space(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    call.want_rank(x, &[4], "input")?;
    let block = call.heads("blocksize")?;
    let by_column = match call.string("mode", "DCR")?.as_str() {
        "DCR" => false,
        "CRD" => true,
        other => return Err(call.fail("attribute", format!("unknown mode {other}"))),
    };
    let channels = call.size(x, 1, "the number of channels")?;
    if channels % (block * block) != 0 {
        return Err(call.fail(
            "shape",
            format!("{channels} channels in blocks of {block}×{block}"),
        ));
    }
    let rest = channels / (block * block);
    let (batch, height, width) = (
        call.axis_vector(x, 0)?,
        call.axis_vector(x, 2)?,
        call.axis_vector(x, 3)?,
    );
    let side = call.b.ints(&[block]);
    let depth = call.b.ints(&[rest]);
    let (split, perm) = if by_column {
        (
            vec![batch, depth, side, side, height, width],
            [0, 1, 4, 2, 5, 3],
        )
    } else {
        (
            vec![batch, side, side, depth, height, width],
            [0, 3, 4, 1, 5, 2],
        )
    };
    let split = call.b.emit(&CONCAT, &split, Attrs::new().with("axis", 0))?;
    let parts = call.reshape_to(x, split)?;
    let parts = call.transpose(parts, &perm)?;
    let (height, width) = (call.b.mul(height, side)?, call.b.mul(width, side)?);
    let shape = [batch, depth, height, width];
    let shape = call.b.emit(&CONCAT, &shape, Attrs::new().with("axis", 0))?;
    one(call.reshape_to(parts, shape)?)
}

/// `SpaceToDepth`: blocks of pixels become blocks of channels.
pub fn space_to_depth(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "input")?;
    call.want_rank(x, &[4], "input")?;
    let block = call.heads("blocksize")?;
    let by_column = match call.string("mode", "DCR")?.as_str() {
        "DCR" => false,
        "CRD" => true,
        other => return Err(call.fail("attribute", format!("unknown mode {other}"))),
    };
    let (batch, channels) = (call.axis_vector(x, 0)?, call.axis_vector(x, 1)?);
    let side = call.b.ints(&[block]);
    let (height, width) = (call.axis_vector(x, 2)?, call.axis_vector(x, 3)?);
    let (height, width) = (call.b.div(height, side)?, call.b.div(width, side)?);
    let split = [batch, channels, height, side, width, side];
    let split = call.b.emit(&CONCAT, &split, Attrs::new().with("axis", 0))?;
    let parts = call.reshape_to(x, split)?;
    let perm = if by_column {
        [0, 1, 3, 5, 2, 4]
    } else {
        [0, 3, 5, 1, 2, 4]
    };
    let parts = call.transpose(parts, &perm)?;
    let squared = call.b.ints(&[block * block]);
    let depth = call.b.mul(channels, squared)?;
    let shape = [batch, depth, height, width];
    let shape = call.b.emit(&CONCAT, &shape, Attrs::new().with("axis", 0))?;
    one(call.reshape_to(parts, shape)?)
}
