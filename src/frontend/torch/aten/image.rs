//! Pooling, patches and padding of images and signals: mostly what the standard's ops of the same purpose mean.

use super::reduce::over;
use super::signature::{Call, Op};
use super::{TensorId, Value};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Tensor, ValueId};
use ckpt_passes::ops::conv::{CONV, CONV_TRANSPOSE};
use ckpt_passes::ops::reduce::{REDUCE_MAX, REDUCE_MEAN};
use ckpt_passes::ops::{concat, shape};

/// Windows along an axis that are taken one by one.
const MAX_WINDOWS: i64 = 4096;

pub const OPS: &[Op] = &[
    ("_adaptive_avg_pool2d(self: t, output_size: I)", |c| {
        adaptive(c, 2, false)
    }),
    ("_adaptive_avg_pool3d(self: t, output_size: I)", |c| {
        adaptive(c, 3, false)
    }),
    ("adaptive_avg_pool1d(self: t, output_size: I)", |c| {
        adaptive(c, 1, false)
    }),
    ("adaptive_avg_pool2d(self: t, output_size: I)", |c| {
        adaptive(c, 2, false)
    }),
    ("adaptive_avg_pool3d(self: t, output_size: I)", |c| {
        adaptive(c, 3, false)
    }),
    ("adaptive_max_pool1d(self: t, output_size: I)", |c| {
        adaptive(c, 1, true)
    }),
    ("adaptive_max_pool2d(self: t, output_size: I)", |c| {
        adaptive(c, 2, true)
    }),
    ("adaptive_max_pool3d(self: t, output_size: I)", |c| {
        adaptive(c, 3, true)
    }),
    (
        "avg_pool1d(self: t, kernel_size: I, stride: I?, padding: I?, ceil_mode: b?, count_include_pad: b?)",
        |c| average(c, 1),
    ),
    (
        "avg_pool2d(self: t, kernel_size: I, stride: I?, padding: I?, ceil_mode: b?, count_include_pad: b?, divisor_override: i?)",
        |c| average(c, 2),
    ),
    (
        "avg_pool3d(self: t, kernel_size: I, stride: I?, padding: I?, ceil_mode: b?, count_include_pad: b?, divisor_override: i?)",
        |c| average(c, 3),
    ),
    (
        "col2im(self: t, output_size: I, kernel_size: I, dilation: I, padding: I, stride: I)",
        folded,
    ),
    (
        "im2col(self: t, kernel_size: I, dilation: I, padding: I, stride: I)",
        patches,
    ),
    (
        "max_pool1d(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 1, false),
    ),
    (
        "max_pool1d_with_indices(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 1, true),
    ),
    (
        "max_pool2d(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 2, false),
    ),
    (
        "max_pool2d_with_indices(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 2, true),
    ),
    (
        "max_pool3d(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 3, false),
    ),
    (
        "max_pool3d_with_indices(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        |c| largest(c, 3, true),
    ),
    ("reflection_pad1d(self: t, padding: I)", |c| {
        named_pad(c, "reflect")
    }),
    ("reflection_pad2d(self: t, padding: I)", |c| {
        named_pad(c, "reflect")
    }),
    ("reflection_pad3d(self: t, padding: I)", |c| {
        named_pad(c, "reflect")
    }),
    ("replication_pad1d(self: t, padding: I)", |c| {
        named_pad(c, "replicate")
    }),
    ("replication_pad2d(self: t, padding: I)", |c| {
        named_pad(c, "replicate")
    }),
    ("replication_pad3d(self: t, padding: I)", |c| {
        named_pad(c, "replicate")
    }),
];

/// The operand with batch and channels before `axes` axes, and how many were put in.
pub(super) fn batched(c: &mut Call, name: &str, axes: usize) -> Result<(ValueId, usize)> {
    let x = c.value(name)?;
    let more = (axes + 2).checked_sub(c.low.b.rank(x)).filter(|n| *n < 2);
    let Some(more) = more else {
        return Err(c
            .fail(
                "shape",
                format!("the operand is not batch, channels and {axes} axes"),
            )
            .found(c.low.b.ty(x).to_string()));
    };
    let new: Vec<i64> = (0..more as i64).collect();
    Ok((c.low.apply_unsqueeze(x, &new)?, more))
}

/// Without the axes that [`batched`] put in.
pub(super) fn unbatched(c: &mut Call, y: ValueId, more: usize) -> Result<ValueId> {
    if more == 0 {
        return Ok(y);
    }
    let new: Vec<i64> = (0..more as i64).collect();
    let new = c.low.b.ints(&new);
    c.low.emit(&shape::SQUEEZE, &[y, new])
}

/// Lengths and counts along an axis end here, so that sums and products of two are numbers.
const MAX_LENGTH: i64 = 1 << 30;

/// A list with one length an axis: one number stands for all, none for `default`.
fn each(c: &Call, name: &str, default: &[i64]) -> Result<Vec<i64>> {
    let list = c.ints(name)?.unwrap_or_default();
    if let Some(bad) = list.iter().find(|n| !(0..=MAX_LENGTH).contains(*n)) {
        return Err(c
            .fail("shape", format!("`{name}` is no list of lengths"))
            .found(bad.to_string()));
    }
    match list.len() {
        0 => Ok(default.to_vec()),
        1 => Ok(vec![list[0]; default.len()]),
        n if n == default.len() => Ok(list),
        n => Err(c.fail("shape", format!("`{name}` has {n} entries"))),
    }
}

/// The sizes of a window and how many elements it has.
fn window(c: &Call, axes: usize) -> Result<(Vec<i64>, i64)> {
    let kernel = each(c, "kernel_size", &vec![1; axes])?;
    let count = kernel.iter().try_fold(1i64, |n, k| n.checked_mul(*k));
    match count {
        Some(count @ 1..=MAX_LENGTH) => Ok((kernel, count)),
        _ => Err(c
            .fail("shape", "no such window")
            .found(format!("{kernel:?}"))),
    }
}

/// Returns the number of elements of a window and the attributes of a pooling op, whose padding is the same on both sides.
fn windows(c: &Call, axes: usize) -> Result<(i64, Attrs)> {
    let (kernel, count) = window(c, axes)?;
    let pads = each(c, "padding", &vec![0; axes])?;
    if kernel.iter().zip(&pads).any(|(k, p)| *p > k / 2) {
        return Err(c.fail("shape", "the padding is more than half of the kernel"));
    }
    let attrs = Attrs::new()
        .with("strides", each(c, "stride", &kernel)?)
        .with("kernel_shape", kernel)
        .with("pads", [pads.clone(), pads].concat())
        .with("ceil_mode", i64::from(c.bool("ceil_mode", false)?));
    Ok((count, attrs))
}

fn largest(c: &mut Call, axes: usize, with_places: bool) -> Result<Value> {
    let (x, more) = batched(c, "self", axes)?;
    let (_, attrs) = windows(c, axes)?;
    let attrs = attrs.with("dilations", each(c, "dilation", &vec![1; axes])?);
    let both = standard(&mut c.low.b, "MaxPool", &attrs, &[Some(x)], 2)?;
    let y = unbatched(c, both[0], more)?;
    let y = c.made(y)?;
    if !with_places {
        return Ok(y);
    }
    // Places are counted in each image, there in the whole tensor.
    let image = Dim::product(&c.low.b.ty(x).dims[2..]);
    let image = c.low.int_scalar(&image)?;
    let places = c
        .low
        .emit(&ckpt_passes::ops::arith::MOD, &[both[1], image])?;
    let places = unbatched(c, places, more)?;
    Ok(Value::Tuple(vec![y, c.made(places)?]))
}

fn average(c: &mut Call, axes: usize) -> Result<Value> {
    let (x, more) = batched(c, "self", axes)?;
    let (count, attrs) = windows(c, axes)?;
    let mut padding = c.bool("count_include_pad", true)?;
    let divisor = match c.has("divisor_override") {
        true => match c.int("divisor_override", 1)? {
            0 => return Err(c.fail("shape", "a divisor of 0")),
            divisor => Some(divisor),
        },
        false => None,
    };
    if divisor.is_some() {
        if c.bool("ceil_mode", false)? {
            return Err(c.unsupported("`divisor_override` with `ceil_mode`"));
        }
        padding = true;
    }
    let attrs = attrs.with("count_include_pad", i64::from(padding));
    let mut y = standard(&mut c.low.b, "AveragePool", &attrs, &[Some(x)], 1)?[0];
    if let Some(divisor) = divisor {
        let factor = c
            .low
            .b
            .scalar(c.low.b.ty(y).dtype, count as f64 / divisor as f64);
        y = c.low.b.mul(y, factor)?;
    }
    let y = unbatched(c, y, more)?;
    c.made(y)
}

/// Windows that cover an axis evenly: the o-th is from ⌊o·in/out⌋ to ⌈(o+1)·in/out⌉.
fn adaptive(c: &mut Call, axes: usize, largest: bool) -> Result<Value> {
    let (x, more) = batched(c, "self", axes)?;
    let Some(mut wanted) = c.dims("output_size")? else {
        return Err(c.fail("shape", "`output_size` is missing"));
    };
    if wanted.len() == 1 {
        wanted = vec![wanted[0].clone(); axes];
    }
    if wanted.len() != axes {
        return Err(c.fail("shape", "`output_size` does not fit the operand"));
    }
    let op = if largest { &REDUCE_MAX } else { &REDUCE_MEAN };
    let mut y = x;
    let whole: Vec<usize> = (0..axes)
        .filter(|i| wanted[*i].is_one())
        .map(|i| i + 2)
        .collect();
    if !whole.is_empty() {
        y = over(c, op, y, &whole, true)?;
    }
    for (i, wanted) in wanted.iter().enumerate().filter(|(_, w)| !w.is_one()) {
        y = along(c, y, i + 2, wanted, op)?;
    }
    let y = unbatched(c, y, more)?;
    let y = c.made(y)?;
    // Where the largest stand is not computed; a program that asks is refused where it does.
    Ok(match largest {
        true => Value::Tuple(vec![y, Value::Unknown]),
        false => y,
    })
}

fn along(
    c: &mut Call,
    x: ValueId,
    axis: usize,
    wanted: &Dim,
    op: &'static ckpt_passes::ir::OpDef,
) -> Result<ValueId> {
    let dims = c.low.b.ty(x).dims.clone();
    if dims[axis] == *wanted {
        return Ok(x);
    }
    if let Some(each) = dims[axis].exact_div(wanted) {
        let mut apart = dims;
        apart.splice(axis..axis + 1, [wanted.clone(), each]);
        let apart = c.low.int_vector(&apart)?;
        let apart = c.low.emit(&shape::RESHAPE, &[x, apart])?;
        return over(c, op, apart, &[axis + 1], false);
    }
    let (Some(size @ 0..=MAX_LENGTH), Some(count @ 1..=MAX_WINDOWS)) =
        (dims[axis].as_const(), wanted.as_const())
    else {
        return Err(c
            .fail("shape", "windows that depend on sizes which are not fixed")
            .help("export with fixed sizes of the image"));
    };
    let mut parts = Vec::with_capacity(count as usize);
    for o in 0..count {
        let window = super::tensors::View::Slice {
            axis,
            start: Dim::from(o * size / count),
            end: Dim::from(((o + 1) * size + count - 1) / count),
            step: 1,
        };
        let window = c.low.apply(&window, x)?;
        parts.push(over(c, op, window, &[axis], true)?);
    }
    let attrs = Attrs::new().with("axis", axis as i64);
    c.low.b.emit(&concat::CONCAT, &parts, attrs)
}

/// One channel for every element of a window, each a copy of the operand's.
fn window_weights(c: &mut Call, dtype: DType, channels: i64) -> Result<ValueId> {
    let (kernel, count) = window(c, 2)?;
    let elements = channels
        .checked_mul(count)
        .and_then(|n| n.checked_mul(count))
        .filter(|n| *n <= 1 << 26)
        .ok_or_else(|| c.fail("shape", "the windows are too many"))?;
    let (zero, one) = (Tensor::scalar(dtype, 0.0), Tensor::scalar(dtype, 1.0));
    let (Some(zero), Some(one)) = (zero.bytes(), one.bytes()) else {
        return Err(c.fail("type", "windows need numbers"));
    };
    let mut bytes = Vec::with_capacity(elements as usize * zero.len());
    for i in 0..elements {
        // Row r of [channels·count, 1, kernel…] looks at element r mod count.
        let looks = i % count == (i / count) % count;
        bytes.extend_from_slice(if looks { one } else { zero });
    }
    let mut dims = vec![(channels * count) as u64, 1];
    dims.extend(kernel.iter().map(|k| *k as u64));
    Ok(c.low.b.constant("windows", Tensor::new(dtype, dims, bytes)))
}

fn number(c: &Call, dim: &Dim, what: &str) -> Result<i64> {
    dim.as_const()
        .filter(|n| *n > 0)
        .ok_or_else(|| c.fail("shape", format!("{what} has to be a fixed number")))
}

fn window_attrs(c: &Call, axes: usize) -> Result<Attrs> {
    let pads = each(c, "padding", &vec![0; axes])?;
    Ok(Attrs::new()
        .with("strides", each(c, "stride", &vec![1; axes])?)
        .with("dilations", each(c, "dilation", &vec![1; axes])?)
        .with("pads", [pads.clone(), pads].concat()))
}

/// The elements of every window: [batch, channels·kernel, windows].
fn patches(c: &mut Call) -> Result<Value> {
    let (x, more) = batched(c, "self", 2)?;
    let dims = c.low.b.ty(x).dims.clone();
    let channels = number(c, &dims[1], "the number of channels")?;
    let weights = window_weights(c, c.low.b.ty(x).dtype, channels)?;
    let attrs = window_attrs(c, 2)?.with("group", channels);
    let y = c.low.b.emit(&CONV, &[x, weights], attrs)?;
    let out = c.low.b.ty(y).dims.clone();
    let flat = [out[0].clone(), out[1].clone(), out[2].mul(&out[3])];
    let flat = c.low.int_vector(&flat)?;
    let y = c.low.emit(&shape::RESHAPE, &[y, flat])?;
    let y = unbatched(c, y, more)?;
    c.made(y)
}

/// The sum of windows at their places: the adjoint of [`patches`].
fn folded(c: &mut Call) -> Result<Value> {
    let (x, more) = batched(c, "self", 1)?;
    let dims = c.low.b.ty(x).dims.clone();
    let wanted = each(c, "output_size", &[1, 1])?;
    let (kernel, count) = window(c, 2)?;
    let (strides, dilations, pads) = (
        each(c, "stride", &[1, 1])?,
        each(c, "dilation", &[1, 1])?,
        each(c, "padding", &[0, 0])?,
    );
    let rows = number(c, &dims[1], "the number of channels")?;
    if rows % count != 0 {
        return Err(c.fail("shape", "the windows do not divide the channels"));
    }
    let channels = rows / count;
    let mut windows = Vec::with_capacity(2);
    let mut beyond = Vec::with_capacity(2);
    for i in 0..2 {
        let room = wanted[i] + 2 * pads[i] - dilations[i] * (kernel[i] - 1) - 1;
        if room < 0 || strides[i] < 1 {
            return Err(c.fail("shape", "the windows do not fit the result"));
        }
        windows.push(Dim::from(room / strides[i] + 1));
        beyond.push(room % strides[i]);
    }
    let image = [
        dims[0].clone(),
        dims[1].clone(),
        windows[0].clone(),
        windows[1].clone(),
    ];
    let image = c.low.int_vector(&image)?;
    let x = c.low.emit(&shape::RESHAPE, &[x, image])?;
    let weights = window_weights(c, c.low.b.ty(x).dtype, channels)?;
    let attrs = window_attrs(c, 2)?
        .with("group", channels)
        .with("output_padding", beyond);
    let y = c.low.b.emit(&CONV_TRANSPOSE, &[x, weights], attrs)?;
    let y = unbatched(c, y, more)?;
    c.made(y)
}

fn named_pad(c: &mut Call, mode: &str) -> Result<Value> {
    c.run(
        "pad",
        [c.given("self"), c.given("padding"), Value::Str(mode.into())],
    )
}

/// Padding with the operand's own elements; `pairs` from the last axis on, before and behind.
pub(super) fn padded(c: &mut Call, x: TensorId, pairs: &[Dim], mode: &str) -> Result<Value> {
    let mode = match mode {
        "reflect" => "reflect",
        "replicate" => "edge",
        "circular" => "wrap",
        other => return Err(c.unsupported(format!("`mode` {other}"))),
    };
    let x = c.low.read(x)?;
    let rank = c.low.b.rank(x);
    let axes: Vec<i64> = (0..pairs.len() / 2)
        .map(|i| (rank - 1 - i) as i64)
        .collect();
    let before = pairs.iter().step_by(2).cloned();
    let behind = pairs.iter().skip(1).step_by(2).cloned();
    let pads: Vec<Dim> = before.chain(behind).collect();
    let pads = c.low.int_vector(&pads)?;
    let axes = c.low.b.ints(&axes);
    let ins = [Some(x), Some(pads), None, Some(axes)];
    let attrs = Attrs::new().with("mode", mode);
    let y = standard(&mut c.low.b, "Pad", &attrs, &ins, 1)?[0];
    c.made(y)
}
