//! `Resize` (ONNX Resize-19, back to 10) and `Upsample`, one axis after another.
//!
//! Along an axis every element of the result is a weighted sum of a few elements of the operand. Which ones and with what
//! weights is worked out here, so that the graph holds gathers by constant indices, and their gradients are there
//! already. Sizes that are not fixed are read where the indices are simple: the nearest element at a whole scale.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Dim, Same, Tensor, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::logic::WHERE;
use ckpt_passes::ops::matmul::MATMUL;

/// Weighted sums of more elements than this are a product with a matrix.
const MOST_GATHERS: usize = 4;

/// Elements of an axis of the result, and those times the operand's: tables of that size are written into the model.
const MAX_RESULT: i64 = 1 << 24;
const MAX_TABLE: i64 = 1 << 28;

/// How to resize along an axis.
#[derive(Clone, Debug)]
struct Axis {
    at: usize,
    size: i64,
    result: i64,
    /// What the file gives, or result / size.
    scale: f64,
    /// Whether the scale is exactly result / size.
    exact: bool,
    roi: (f64, f64),
}

/// The attributes.
struct Form {
    mode: String,
    coordinates: String,
    nearest: String,
    antialias: bool,
    exclude_outside: bool,
    cubic_a: f64,
    extrapolation: f64,
}

/// The elements that one element of the result is made of; none for one that lies outside.
type Taps = Vec<(i64, f64)>;

/// `Resize`.
pub fn resize(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    let rank = call.rank(x);
    let old = call.opset < 11;
    let default = if old { "asymmetric" } else { "half_pixel" };
    let form = Form {
        mode: call.attr_text("mode", "nearest")?,
        coordinates: call.attr_text("coordinate_transformation_mode", default)?,
        nearest: call.attr_text(
            "nearest_mode",
            if old { "floor" } else { "round_prefer_floor" },
        )?,
        antialias: call.attr_flag("antialias")?,
        exclude_outside: call.attr_flag("exclude_outside")?,
        cubic_a: f64::from(call.attr_float("cubic_coeff_a", -0.75)?),
        extrapolation: f64::from(call.attr_float("extrapolation_value", 0.0)?),
    };
    let policy = call.attr_text("keep_aspect_ratio_policy", "stretch")?;
    let axes = axes(call, rank)?;
    let (roi, scales, sizes) = match old {
        true => (None, call.opt(1), None),
        false => (call.opt(1), call.opt(2), call.opt(3)),
    };
    let roi = match roi {
        Some(roi) if form.coordinates == "tf_crop_and_resize" => numbers(call, roi, "roi")?,
        _ => Vec::new(),
    };
    // A file may give an empty vector for what it leaves out.
    let given = |call: &Call, v: Option<ValueId>| {
        v.filter(|v| call.ty(*v).elements().same(&Dim::ZERO) != Same::Yes)
    };
    match (given(call, scales), given(call, sizes)) {
        (Some(scales), None) => {
            let scales = numbers(call, scales, "scales")?;
            by_scales(call, x, &form, &axes, &scales, &roi)
        }
        (None, Some(sizes)) => by_sizes(call, x, &form, &axes, sizes, &roi, &policy),
        _ => Err(call.fail("arity", "one of `scales` and `sizes` has to be given")),
    }
}

/// `Upsample`, which `Resize` replaced: the nearest element or a linear interpolation, by scales.
pub fn upsample(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    let form = Form {
        mode: call.attr_text("mode", "nearest")?,
        coordinates: "asymmetric".into(),
        nearest: "floor".into(),
        antialias: false,
        exclude_outside: false,
        cubic_a: -0.75,
        extrapolation: 0.0,
    };
    let scales = call.need(1, "scales")?;
    let scales = numbers(call, scales, "scales")?;
    let axes: Vec<usize> = (0..call.rank(x)).collect();
    by_scales(call, x, &form, &axes, &scales, &[])
}

fn axes(call: &mut Call, rank: usize) -> Result<Vec<usize>> {
    let Some(given) = call.attr_ints("axes")? else {
        return Ok((0..rank).collect());
    };
    let mut axes = Vec::with_capacity(given.len());
    for axis in given {
        match call.axis_of(axis, rank)? {
            at if !axes.contains(&at) => axes.push(at),
            _ => return Err(call.fail("axis", format!("axis {axis} of {rank}"))),
        }
    }
    Ok(axes)
}

/// The contents of a constant vector of numbers.
fn numbers(call: &Call, v: ValueId, what: &str) -> Result<Vec<f64>> {
    let tensor = call.graph.value(v).tensor();
    let known = tensor.and_then(|t| (0..t.elements() as usize).map(|i| t.get_f64(i)).collect());
    known.ok_or_else(|| {
        call.unsupported(format!("`{what}` computed from data"))
            .help("export with fixed sizes of the image")
    })
}

fn one_each(call: &Call, what: &str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(call
        .fail("shape", format!("`{what}` does not have one entry an axis"))
        .expected(expected.to_string())
        .found(found.to_string()))
}

/// The part of axis `i` that is resized; all of it unless the file says so.
fn roi_of(call: &Call, roi: &[f64], axes: usize, i: usize) -> Result<(f64, f64)> {
    if roi.is_empty() {
        return Ok((0.0, 1.0));
    }
    one_each(call, "roi", 2 * axes, roi.len())?;
    Ok((roi[i], roi[i + axes]))
}

fn by_scales(
    call: &mut Call,
    x: ValueId,
    form: &Form,
    axes: &[usize],
    scales: &[f64],
    roi: &[f64],
) -> Lowered {
    one_each(call, "scales", axes.len(), scales.len())?;
    let mut y = x;
    for (i, (at, scale)) in axes.iter().zip(scales).enumerate() {
        let roi = roi_of(call, roi, axes.len(), i)?;
        if scale.is_nan() || *scale <= 0.0 {
            return Err(call.fail("attribute", format!("the scale {scale}")));
        }
        if *scale == 1.0 && roi == (0.0, 1.0) {
            continue;
        }
        let Some(size) = call.dims(y)[*at].as_const() else {
            y = repeated(call, y, form, *at, *scale)?;
            continue;
        };
        let axis = Axis {
            at: *at,
            size,
            result: (size as f64 * (roi.1 - roi.0) * scale).floor() as i64,
            scale: *scale,
            exact: false,
            roi,
        };
        y = along(call, y, form, &axis)?;
    }
    one(y)
}

fn by_sizes(
    call: &mut Call,
    x: ValueId,
    form: &Form,
    axes: &[usize],
    sizes: ValueId,
    roi: &[f64],
    policy: &str,
) -> Lowered {
    let dynamic = |call: &Call| {
        call.unsupported("a size that is not fixed")
            .help("export with fixed sizes of the image")
    };
    let wanted = call.contents.get(sizes).map(<[Dim]>::to_vec);
    let wanted = wanted.ok_or_else(|| dynamic(call))?;
    one_each(call, "sizes", axes.len(), wanted.len())?;
    let mut all = Vec::new();
    for (i, (at, wanted)) in axes.iter().zip(&wanted).enumerate() {
        let roi = roi_of(call, roi, axes.len(), i)?;
        let own = call.dims(x)[*at].clone();
        let same = own.same(wanted) == Same::Yes && roi == (0.0, 1.0);
        if same && policy == "stretch" {
            continue;
        }
        let (Some(size), Some(result)) = (own.as_const(), wanted.as_const()) else {
            return Err(dynamic(call));
        };
        if size < 1 || result < 0 {
            return Err(call.fail("shape", format!("from {size} to {result} elements")));
        }
        all.push(Axis {
            at: *at,
            size,
            result,
            scale: result as f64 / size as f64,
            exact: true,
            roi,
        });
    }
    if policy != "stretch" {
        let scales = all.iter().map(|a| a.scale);
        let scale = match policy {
            "not_larger" => scales.fold(f64::INFINITY, f64::min),
            "not_smaller" => scales.fold(0.0, f64::max),
            other => return Err(call.fail("attribute", format!("unknown policy {other}"))),
        };
        for axis in &mut all {
            // Halves are rounded up.
            axis.result = (scale * axis.size as f64 + 0.5).floor() as i64;
            (axis.scale, axis.exact) = (scale, false);
        }
    }
    let mut y = x;
    for axis in &all {
        y = along(call, y, form, axis)?;
    }
    one(y)
}

/// Every element of an axis of any size so many times in a row.
fn repeated(call: &mut Call, x: ValueId, form: &Form, axis: usize, scale: f64) -> Result<ValueId> {
    let simple = matches!(
        (form.coordinates.as_str(), form.nearest.as_str()),
        ("asymmetric", "floor")
            | (
                "half_pixel" | "pytorch_half_pixel" | "half_pixel_symmetric",
                "round_prefer_floor" | "round_prefer_ceil",
            )
    );
    if form.mode != "nearest" || !simple || scale.fract() != 0.0 {
        return Err(call
            .unsupported("interpolation along an axis whose size is not fixed")
            .help("export with fixed sizes of the image"));
    }
    let times = call.int(scale as i64);
    let size = call.axis_size(x, axis)?;
    let whole = call.mul(size, times)?;
    let places = call.counted(whole)?;
    let places = call.op(&DIV, &[places, times])?;
    call.gather(x, places, axis)
}

/// `x` resized along one axis.
fn along(call: &mut Call, x: ValueId, form: &Form, axis: &Axis) -> Result<ValueId> {
    let taps = taps(call, form, axis)?;
    let most = taps.iter().map(Vec::len).max().unwrap_or(1).max(1);
    let dtype = call.dtype(x);
    let gather = |call: &mut Call, places: Vec<i64>| {
        let places = call.ints(&places);
        call.gather(x, places, axis.at)
    };
    let tap = |taps: &Taps, j: usize| taps.get(j).copied().unwrap_or((0, 0.0));
    let mut y = if form.mode == "nearest" {
        gather(call, taps.iter().map(|t| tap(t, 0).0).collect())?
    } else if !dtype.is_float() {
        return Err(call.unsupported(format!("interpolation between numbers of type {dtype}")));
    } else if most > MOST_GATHERS {
        multiplied(call, x, axis, &taps)?
    } else {
        let mut sum = None;
        for j in 0..most {
            let part = gather(call, taps.iter().map(|t| tap(t, j).0).collect())?;
            let weights: Vec<f64> = taps.iter().map(|t| tap(t, j).1).collect();
            let weights = column(call, x, axis.at, &weights, dtype);
            let part = call.mul(part, weights)?;
            sum = Some(call.added(sum, part)?);
        }
        sum.unwrap_or(x)
    };
    if taps.iter().any(Vec::is_empty) {
        let inside: Vec<f64> = taps
            .iter()
            .map(|t| if t.is_empty() { 0.0 } else { 1.0 })
            .collect();
        let inside = column(call, x, axis.at, &inside, DType::Bool);
        let outside = call.scalar(dtype, form.extrapolation);
        y = call.op(&WHERE, &[inside, y, outside])?;
    }
    Ok(y)
}

/// Constants along `axis` that broadcast against the axes behind it.
fn column(call: &mut Call, x: ValueId, axis: usize, values: &[f64], dtype: DType) -> ValueId {
    let mut dims = vec![values.len() as u64];
    dims.resize(call.rank(x) - axis, 1);
    let tensor = tensor(dtype, dims, values);
    call.constant("resize", tensor)
}

fn tensor(dtype: DType, dims: Vec<u64>, values: &[f64]) -> Tensor {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size_bytes() as usize);
    for value in values {
        if let Some(one) = Tensor::scalar(dtype, *value).bytes() {
            bytes.extend_from_slice(one);
        }
    }
    Tensor::new(dtype, dims, bytes)
}

/// The weighted sums as a product with a matrix [size, result].
fn multiplied(call: &mut Call, x: ValueId, axis: &Axis, taps: &[Taps]) -> Result<ValueId> {
    let (rows, columns) = (axis.size as usize, taps.len());
    let mut matrix = vec![0.0; rows * columns];
    for (o, taps) in taps.iter().enumerate() {
        for (i, weight) in taps {
            matrix[*i as usize * columns + o] += weight;
        }
    }
    let matrix = tensor(call.dtype(x), vec![rows as u64, columns as u64], &matrix);
    let matrix = call.constant("resize", matrix);
    let rows = call.swap_last(x, axis.at)?;
    let y = call.op(&MATMUL, &[rows, matrix])?;
    call.swap_last(y, axis.at)
}

/// Where in the operand element `o` of the result lies.
fn source(call: &Call, form: &Form, axis: &Axis, o: i64) -> Result<f64> {
    let (o, size) = (o as f64, axis.size as f64);
    let width = if axis.exact {
        axis.result as f64
    } else {
        axis.scale * size
    };
    // Multiplied before it is divided, so that what is whole stays whole.
    let unscaled = |v: f64| {
        if axis.exact {
            v * size / axis.result as f64
        } else {
            v / axis.scale
        }
    };
    let centred = || unscaled(o + 0.5) - 0.5;
    Ok(match form.coordinates.as_str() {
        "half_pixel" => centred(),
        "half_pixel_symmetric" => size / 2.0 * (1.0 - axis.result as f64 / width) + centred(),
        "pytorch_half_pixel" if axis.result > 1 => centred(),
        "pytorch_half_pixel" => 0.0,
        "align_corners" if width == 1.0 => 0.0,
        "align_corners" => o * (size - 1.0) / (width - 1.0),
        "asymmetric" => unscaled(o),
        "tf_crop_and_resize" => {
            let (start, end) = axis.roi;
            let span = (end - start) * (size - 1.0);
            let within = if axis.result > 1 {
                o * span / (axis.result as f64 - 1.0)
            } else {
                span / 2.0
            };
            start * (size - 1.0) + within
        }
        other => {
            return Err(call.unsupported(format!("`coordinate_transformation_mode` {other}")));
        }
    })
}

/// What each element of the result is made of.
fn taps(call: &Call, form: &Form, axis: &Axis) -> Result<Vec<Taps>> {
    let crops = form.coordinates == "tf_crop_and_resize";
    let tables = axis.size.checked_mul(axis.result);
    if axis.result < 0 || axis.result > MAX_RESULT || tables.is_none_or(|n| n > MAX_TABLE) {
        return Err(call
            .fail("shape", "an image of this size is not supported")
            .found(format!("{} of {}", axis.result, axis.size)));
    }
    let mut all = Vec::with_capacity(axis.result as usize);
    for o in 0..axis.result {
        let x = source(call, form, axis, o)?;
        if crops && !(0.0..=(axis.size - 1) as f64).contains(&x) {
            all.push(Taps::new());
            continue;
        }
        all.push(match form.mode.as_str() {
            "nearest" => vec![(nearest(call, form, x)?, 1.0)],
            "linear" | "cubic" => interpolated(form, axis, x),
            other => return Err(call.fail("attribute", format!("unknown mode {other}"))),
        });
    }
    for (i, _) in all.iter_mut().flatten() {
        // The element at the edge stands for those beyond.
        *i = (*i).clamp(0, axis.size - 1);
    }
    Ok(all)
}

fn nearest(call: &Call, form: &Form, x: f64) -> Result<i64> {
    Ok(match form.nearest.as_str() {
        "round_prefer_floor" => (x - 0.5).ceil(),
        "round_prefer_ceil" => (x + 0.5).floor(),
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        other => return Err(call.fail("attribute", format!("unknown rounding {other}"))),
    } as i64)
}

/// The filter around `x`, stretched by 1/scale where it is to smooth.
fn interpolated(form: &Form, axis: &Axis, x: f64) -> Taps {
    let cubic = form.mode == "cubic";
    let reach = if cubic { 2.0 } else { 1.0 };
    let shrink = if form.antialias {
        axis.scale.min(1.0)
    } else {
        1.0
    };
    let weight = |i: i64| {
        let distance = ((i as f64 - x) * shrink).abs();
        if cubic {
            keys(distance, form.cubic_a)
        } else {
            (1.0 - distance).max(0.0)
        }
    };
    let first = (x - reach / shrink).floor() as i64;
    let last = (x + reach / shrink).ceil() as i64;
    let mut taps: Taps = (first..=last)
        .map(|i| (i, weight(i)))
        .filter(|(_, w)| *w != 0.0)
        .collect();
    if form.exclude_outside {
        taps.retain(|(i, _)| (0..axis.size).contains(i));
    }
    let sum: f64 = taps.iter().map(|(_, w)| w).sum();
    if (form.antialias || form.exclude_outside) && sum != 0.0 {
        taps.iter_mut().for_each(|(_, w)| *w /= sum);
    }
    taps
}

/// The cubic convolution filter (Keys 1981, IEEE TASSP 29(6), equation 4).
fn keys(distance: f64, a: f64) -> f64 {
    let d = distance;
    if d <= 1.0 {
        ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
    } else if d < 2.0 {
        ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    } else {
        0.0
    }
}
