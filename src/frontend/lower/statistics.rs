//! Reductions and normalisations over fixed groups of axes: batch, group, instance, local response and mean-variance
//! normalisation, `LpNormalization`, `ReduceLogSum`; and blocks of pixels (ONNX operator specifications).
//!
//! Group and instance normalisation become a LayerNormalization of the flattened group, whose gradient is one kernel.

use super::call::{Call, Lowered, Out, UNREAD, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::logic::EQUAL;
use ckpt_passes::ops::math::{LOG, SQRT};
use ckpt_passes::ops::norm::LAYER_NORM;
use ckpt_passes::ops::power::POW;
use ckpt_passes::ops::reduce::{REDUCE_L1, REDUCE_L2, REDUCE_MEAN, REDUCE_SUM, reduce_axes};
use ckpt_passes::ops::rule::{Formulas, Term, binary_op, select, unary_op};
use ckpt_passes::ops::slice::SLICE;
use ckpt_passes::ops::{Builder, EmitExt};

/// Makes a vector over channels (axis 1) broadcast against `x`.
///
/// # Errors
/// What `Unsqueeze` refuses.
pub fn by_channel(b: &mut Builder, v: ValueId, x: ValueId) -> Result<ValueId> {
    let axes: Vec<i64> = (1..b.rank(x) as i64 - 1).collect();
    b.unsqueeze(v, &axes)
}

/// Returns x·scale + bias; both are vectors over channels.
fn affine(call: &mut Call, x: ValueId, scale: ValueId, bias: ValueId) -> Result<ValueId> {
    let (scale, bias) = (by_channel(call, scale, x)?, by_channel(call, bias, x)?);
    let y = call.mul(x, scale)?;
    call.add(y, bias)
}

/// Normalises `x` as [batch, groups, all other axes] along the last axis, and restores its shape.
fn normalised(call: &mut Call, x: ValueId, groups: i64, epsilon: f32) -> Result<ValueId> {
    let shape = call.shape(x)?;
    let flat = call.reshape(x, &[0, groups, -1])?;
    let mut unit = Tensor::scalar(call.dtype(x), 1.0);
    unit.dims = vec![1];
    let ones = call.constant("ones", unit);
    let attrs = Attrs::new().with("axis", -1).with("epsilon", epsilon);
    let flat = call.emit(&LAYER_NORM, &[flat, ones], attrs)?;
    call.reshape_to(flat, shape)
}

/// `InstanceNormalization`: normalises each channel of each sample.
pub fn instance(call: &mut Call) -> Lowered {
    let [x, scale, bias] = call.operands(["input", "scale", "B"])?;
    let epsilon = call.attr_float("epsilon", 1e-5)?;
    call.spatial_axes(x)?;
    let y = normalised(call, x, 0, epsilon)?;
    one(affine(call, y, scale, bias)?)
}

/// `GroupNormalization`: normalises groups of channels of each sample. Until opset 20 scale and bias are by group.
pub fn group(call: &mut Call) -> Lowered {
    let [x, mut scale, mut bias] = call.operands(["X", "scale", "bias"])?;
    let groups = call.attr_positive("num_groups")?;
    let epsilon = call.attr_float("epsilon", 1e-5)?;
    match call.attr_int("stash_type", 1)? {
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
            let shape = call.ints(&[groups, channels / groups]);
            let wide = call.expand(wide, shape)?;
            *v = call.reshape(wide, &[-1])?;
        }
    }
    one(affine(call, y, scale, bias)?)
}

/// `BatchNormalization` by given statistics. In training mode the statistics of the batch count, and update the given ones.
pub fn batch(call: &mut Call) -> Lowered {
    let [x, scale, bias, mean, variance] =
        call.operands(["X", "scale", "B", "input_mean", "input_var"])?;
    let epsilon = call.attr_float("epsilon", 1e-5)?;
    let momentum = f64::from(call.attr_float("momentum", 0.9)?);
    let training = call.attr_flag("training_mode")?;
    call.ignore_attr("spatial"); // Removed in opset 9, which kept the meaning of 1.
    let dtype = call.dtype(x);
    let rank = call.rank(x);
    if rank < 2 {
        return Err(call.fail("shape", "the operand has no channels"));
    }
    let stat = |call: &mut Call, v: ValueId| -> Result<ValueId> {
        let v = by_channel(call, v, x)?;
        call.cast(v, dtype)
    };
    if !training {
        let (mean, variance) = (stat(call, mean)?, stat(call, variance)?);
        let y = scaled(call, x, mean, variance, epsilon)?;
        let y = by_scale(call, y, scale, bias, dtype)?;
        let absent = "running statistics are results in training mode only";
        let mut results = vec![Out::Value(y)];
        results.extend([(); 4].map(|()| Out::Absent(absent)));
        return Ok(Some(results));
    }
    let axes: Vec<usize> = (0..rank).filter(|a| *a != 1).collect();
    let centre = reduce_axes(&mut call.b, &REDUCE_MEAN, x, &axes, true)?;
    let away = call.sub(x, centre)?;
    let square = call.mul(away, away)?;
    let spread = reduce_axes(&mut call.b, &REDUCE_MEAN, square, &axes, true)?;
    let y = scaled(call, x, centre, spread, epsilon)?;
    let y = by_scale(call, y, scale, bias, dtype)?;
    let mut results = vec![Out::Value(y)];
    for (slot, (old, new)) in [(mean, centre), (variance, spread)].into_iter().enumerate() {
        if !call.wants(slot + 1) {
            results.push(Out::Absent(UNREAD));
            continue;
        }
        let new = call.reshape(new, &[-1])?;
        let new = call.cast_like(new, old)?;
        let updated = Term(old) * momentum + Term(new) * (1.0 - momentum);
        results.push(Out::Value(call.eval(updated)?));
    }
    Ok(Some(results))
}

/// Returns (x - mean) / √(variance + epsilon).
fn scaled(
    call: &mut Call,
    x: ValueId,
    mean: ValueId,
    variance: ValueId,
    epsilon: f32,
) -> Result<ValueId> {
    let spread = Term(variance) + f64::from(epsilon);
    call.eval((Term(x) - mean) / unary_op(&SQRT, spread))
}

fn by_scale(
    call: &mut Call,
    y: ValueId,
    scale: ValueId,
    bias: ValueId,
    dtype: DType,
) -> Result<ValueId> {
    let (scale, bias) = (call.cast(scale, dtype)?, call.cast(bias, dtype)?);
    affine(call, y, scale, bias)
}

/// `LRN`: divides by (bias + alpha/size·Σ x²)^beta; the sum runs over `size` neighbouring channels.
pub fn local_response(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    call.spatial_axes(x)?;
    let size = call.attr_positive("size")?;
    let (alpha, beta) = (
        call.attr_float("alpha", 1e-4)?,
        call.attr_float("beta", 0.75)?,
    );
    let bias = call.attr_float("bias", 1.0)?;
    let square = call.mul(x, x)?;
    let (before, after) = ((size - 1) / 2, size - 1 - (size - 1) / 2);
    let zero = call.scalar_like(x, 0.0);
    let rank = call.rank(x);
    let mut pads = vec![0; 2 * rank];
    (pads[1], pads[rank + 1]) = (before, after);
    let (pads, axis) = (call.ints(&pads), call.ints(&[1]));
    let padded = call.op(&PAD, &[square, pads, zero])?;
    let channels = call.axis_vector(x, 1)?;
    let mut sum = None;
    for offset in 0..size {
        let start = call.ints(&[offset]);
        let end = call.add(channels, start)?;
        let part = call.op(&SLICE, &[padded, start, end, axis])?;
        sum = Some(call.added(sum, part)?);
    }
    let Some(sum) = sum else {
        return Err(call.fail("attribute", "`size` is not positive"));
    };
    let base = f64::from(bias) + Term(sum) * (f64::from(alpha) / size as f64);
    one(call.eval(Term(x) / binary_op(&POW, base, f64::from(beta)))?)
}

/// `MeanVarianceNormalization`: (x - mean) / (deviation + 1e-9) over the axes.
pub fn mean_variance(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    let axes = call.attr_ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
    let axes = call.ints(&axes);
    let keep = || Attrs::new().with("keepdims", 1);
    let mean = call.emit(&REDUCE_MEAN, &[x, axes], keep())?;
    let away = call.sub(x, mean)?;
    let square = call.mul(away, away)?;
    let variance = call.emit(&REDUCE_MEAN, &[square, axes], keep())?;
    one(call.eval(Term(away) / (unary_op(&SQRT, variance) + 1e-9))?)
}

/// `LpNormalization`: divides by the 1- or 2-norm along an axis; a row of norm 0 gives zeros.
pub fn lp(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let axis = call.attr_int("axis", -1)?;
    let norm = match call.attr_int("p", 2)? {
        1 => &REDUCE_L1,
        2 => &REDUCE_L2,
        other => return Err(call.unsupported(format!("p = {other}"))),
    };
    let axes = call.ints(&[axis]);
    let size = call.emit(norm, &[x, axes], Attrs::new().with("keepdims", 1))?;
    // A zero row is divided by one, so no infinity enters the gradient.
    let divisor = select(binary_op(&EQUAL, size, 0.0), 1.0, size);
    one(call.eval(Term(x) / divisor)?)
}

/// `ReduceLogSum`: the logarithm of a sum.
pub fn log_sum(call: &mut Call) -> Lowered {
    let x = call.need(0, "data")?;
    let mut ins = vec![x];
    // The axes are an attribute before opset 18.
    match (call.attr_ints("axes")?, call.opt(1)) {
        (Some(axes), None) => ins.push(call.ints(&axes)),
        (None, Some(axes)) => ins.push(axes),
        (None, None) => {}
        _ => return Err(call.fail("arity", "the axes are given twice")),
    }
    let attrs = Attrs::new()
        .with("keepdims", call.attr_int("keepdims", 1)?)
        .with(
            "noop_with_empty_axes",
            call.attr_int("noop_with_empty_axes", 0)?,
        );
    let sum = call.emit(&REDUCE_SUM, &ins, attrs)?;
    one(call.op(&LOG, &[sum])?)
}

/// `DepthToSpace`: blocks of channels become blocks of pixels.
pub fn depth_to_space(call: &mut Call) -> Lowered {
    let (x, block, by_column) = blocks(call)?;
    let channels = call.size(x, 1, "the number of channels")?;
    if channels % (block * block) != 0 {
        return Err(call.fail(
            "shape",
            format!("{channels} channels in blocks of {block}×{block}"),
        ));
    }
    let [batch, height, width] = [
        call.axis_vector(x, 0)?,
        call.axis_vector(x, 2)?,
        call.axis_vector(x, 3)?,
    ];
    let side = call.ints(&[block]);
    let depth = call.ints(&[channels / (block * block)]);
    let (split, perm) = match by_column {
        true => (
            [batch, depth, side, side, height, width],
            [0, 1, 4, 2, 5, 3],
        ),
        false => (
            [batch, side, side, depth, height, width],
            [0, 3, 4, 1, 5, 2],
        ),
    };
    let pieces = call.reshape_to_all(x, &split)?;
    let pieces = call.transpose(pieces, &perm)?;
    let (height, width) = (call.mul(height, side)?, call.mul(width, side)?);
    one(call.reshape_to_all(pieces, &[batch, depth, height, width])?)
}

/// `SpaceToDepth`: blocks of pixels become blocks of channels.
pub fn space_to_depth(call: &mut Call) -> Lowered {
    let (x, block, by_column) = blocks(call)?;
    let (batch, channels) = (call.axis_vector(x, 0)?, call.axis_vector(x, 1)?);
    let side = call.ints(&[block]);
    let (height, width) = (call.axis_vector(x, 2)?, call.axis_vector(x, 3)?);
    let (height, width) = (call.div(height, side)?, call.div(width, side)?);
    let pieces = call.reshape_to_all(x, &[batch, channels, height, side, width, side])?;
    let perm = match by_column {
        true => [0, 1, 3, 5, 2, 4],
        false => [0, 3, 5, 1, 2, 4],
    };
    let pieces = call.transpose(pieces, &perm)?;
    let squared = call.ints(&[block * block]);
    let depth = call.mul(channels, squared)?;
    one(call.reshape_to_all(pieces, &[batch, depth, height, width])?)
}

/// Reads an image [batch, channels, height, width], the side of a block, and whether channels count first in it (CRD).
fn blocks(call: &mut Call) -> Result<(ValueId, i64, bool)> {
    let x = call.need(0, "input")?;
    call.want_rank(x, &[4], "input")?;
    let block = call.attr_positive("blocksize")?;
    Ok((x, block, call.attr_choice("mode", ["DCR", "CRD"], "DCR")?))
}
