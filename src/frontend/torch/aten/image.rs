//! Images and signals: pooling, patches, and resampling (ONNX Resize). Most of these are what the standard's ops of the same
//! purpose mean.

use super::super::value::Value;
use super::lowering::View;
use super::products;
use super::reduce::over;
use super::signature::{Call, Op, along};
use crate::frontend::lower::{copies, standard};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, OpDef, Tensor, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::MOD;
use ckpt_passes::ops::concat::CONCAT;
use ckpt_passes::ops::conv::CONV;
use ckpt_passes::ops::reduce::{REDUCE_MAX, REDUCE_MEAN};
use ckpt_passes::ops::shape::SQUEEZE;

/// The largest number of windows along an axis that become nodes one by one.
const MAX_WINDOWS: i64 = 4096;

pub const OPS: &[Op] = &[
    (
        "{adaptive_avg_pool1d,adaptive_avg_pool2d,adaptive_avg_pool3d,_adaptive_avg_pool2d,_adaptive_avg_pool3d,adaptive_max_pool1d,adaptive_max_pool2d,adaptive_max_pool3d}(self: t, output_size: I)",
        adaptive_pool,
    ),
    (
        "avg_pool1d(self: t, kernel_size: I, stride: I?, padding: I?, ceil_mode: b?, count_include_pad: b?); \
         avg_pool{2,3}d(self: t, kernel_size: I, stride: I?, padding: I?, ceil_mode: b?, count_include_pad: b?, divisor_override: i?)",
        average_pool,
    ),
    (
        "col2im(self: t, output_size: I, kernel_size: I, dilation: I, padding: I, stride: I)",
        folded,
    ),
    (
        "{grid_sampler,grid_sampler_2d,grid_sampler_3d,_grid_sampler_2d_cpu_fallback}(input: t, grid: t, interpolation_mode: i, padding_mode: i, align_corners: b)",
        grid_sampler,
    ),
    (
        "im2col(self: t, kernel_size: I, dilation: I, padding: I, stride: I)",
        patches,
    ),
    (
        "max_pool{1,2,3}d{,_with_indices}(self: t, kernel_size: I, stride: I?, padding: I?, dilation: I?, ceil_mode: b?)",
        max_pool,
    ),
    (
        "{upsample_linear1d,upsample_bilinear2d,_upsample_bilinear2d_aa,upsample_bicubic2d,_upsample_bicubic2d_aa,upsample_trilinear3d}(input: t, output_size: I?, align_corners: b, scale_factors: _?); \
         upsample_linear1d(self: t, output_size: I, align_corners: b, scales: f?); \
         {upsample_bilinear2d,_upsample_bilinear2d_aa,upsample_bicubic2d,_upsample_bicubic2d_aa}(self: t, output_size: I, align_corners: b, scales_h: f?, scales_w: f?); \
         upsample_trilinear3d(self: t, output_size: I, align_corners: b, scales_d: f?, scales_h: f?, scales_w: f?); \
         {upsample_nearest1d,upsample_nearest2d,upsample_nearest3d,_upsample_nearest_exact1d,_upsample_nearest_exact2d}(input: t, output_size: I?, scale_factors: _?); \
         {upsample_nearest,_upsample_nearest_exact}1d(self: t, output_size: I, scales: f?); \
         {upsample_nearest,_upsample_nearest_exact}2d(self: t, output_size: I, scales_h: f?, scales_w: f?); \
         upsample_nearest3d(self: t, output_size: I, scales_d: f?, scales_h: f?, scales_w: f?)",
        resized,
    ),
];

/// Returns the operand with batch and channels before `axes` axes, and how many of the two are new.
fn batched(c: &mut Call, name: &str, axes: usize) -> Result<(ValueId, usize)> {
    let x = c.value(name)?;
    let more = (axes + 2).checked_sub(c.rank(x)).filter(|n| *n < 2);
    let Some(more) = more else {
        let what = format!("the operand is not batch, channels and {axes} axes");
        return Err(c.fail("shape", what).found(c.low.b.ty(x).to_string()));
    };
    let new: Vec<i64> = (0..more as i64).collect();
    Ok((c.low.unsqueeze(x, &new)?, more))
}

/// Returns a result without the axes that [`batched`] added.
fn unbatched(c: &mut Call, y: ValueId, more: usize) -> Result<Value> {
    if more == 0 {
        return c.made(y);
    }
    let new: Vec<i64> = (0..more as i64).collect();
    let new = c.low.b.ints(&new);
    c.result(&SQUEEZE, &[y, new])
}

/// Returns the number of spatial axes, which the op's name tells: `max_pool2d`.
fn spatial_axes(c: &Call) -> usize {
    let digit = c.name.chars().find_map(|ch| ch.to_digit(10));
    digit.map_or(2, |n| n as usize)
}

/// The largest length or count along an axis, so that sums and products of two do not overflow.
const MAX_LENGTH: i64 = 1 << 30;

/// Returns a list with one length for each axis. A single number counts for all axes, an empty list for `default`.
fn each(c: &Call, name: &str, default: &[i64]) -> Result<Vec<i64>> {
    let list = products::each(c, name, default)?;
    match list.iter().find(|n| !(0..=MAX_LENGTH).contains(*n)) {
        None => Ok(list),
        Some(bad) => Err(c
            .fail("shape", format!("`{name}` is no list of lengths"))
            .found(bad.to_string())),
    }
}

/// Returns the sizes of a window, and its number of elements.
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

/// Lowers `max_pool`, and `max_pool_with_indices`.
fn max_pool(c: &mut Call) -> Result<Value> {
    let axes = spatial_axes(c);
    let (x, more) = batched(c, "self", axes)?;
    let (_, attrs) = windows(c, axes)?;
    let attrs = attrs.with("dilations", each(c, "dilation", &vec![1; axes])?);
    let both = standard(&mut c.low.b, "MaxPool", &attrs, &[Some(x)], 2)?;
    let y = unbatched(c, both[0], more)?;
    if !c.name.ends_with("_with_indices") {
        return Ok(y);
    }
    // PyTorch counts the indices of each image, ONNX those of the whole tensor.
    let image = Dim::product(&c.low.b.ty(x).dims[2..]);
    let image = c.low.int_scalar(&image)?;
    let places = c.emit(&MOD, &[both[1], image])?;
    Ok(Value::Tuple(vec![y, unbatched(c, places, more)?]))
}

fn average_pool(c: &mut Call) -> Result<Value> {
    let axes = spatial_axes(c);
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
        let factor = c.scalar_like(y, count as f64 / divisor as f64);
        y = c.low.b.mul(y, factor)?;
    }
    unbatched(c, y, more)
}

/// Lowers a pooling to given sizes. Its windows cover an axis evenly: the o-th one goes from ⌊o·in/out⌋ to ⌈(o+1)·in/out⌉.
fn adaptive_pool(c: &mut Call) -> Result<Value> {
    let axes = spatial_axes(c);
    let largest = c.name.contains("max");
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
    let whole = (0..axes).filter(|i| wanted[*i].is_one());
    let whole: Vec<usize> = whole.map(|i| i + 2).collect();
    if !whole.is_empty() {
        y = over(c, op, y, &whole, true)?;
    }
    for (i, wanted) in wanted.iter().enumerate().filter(|(_, w)| !w.is_one()) {
        y = pooled(c, y, i + 2, wanted, op)?;
    }
    let y = unbatched(c, y, more)?;
    // The indices of the largest elements are not computed. A program that reads them is refused.
    Ok(match largest {
        true => Value::Tuple(vec![y, Value::Unknown]),
        false => y,
    })
}

/// Pools along one axis to `wanted` windows.
fn pooled(
    c: &mut Call,
    x: ValueId,
    axis: usize,
    wanted: &Dim,
    op: &'static OpDef,
) -> Result<ValueId> {
    let dims = c.shape_of(x);
    if dims[axis] == *wanted {
        return Ok(x);
    }
    if let Some(each) = dims[axis].exact_div(wanted) {
        let mut apart = dims;
        apart.splice(axis..axis + 1, [wanted.clone(), each]);
        let apart = c.reshape(x, &apart)?;
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
        let end = ((o + 1) * size + count - 1) / count;
        let window = View::range(axis, o * size / count, end);
        let window = c.low.apply(&window, x)?;
        parts.push(over(c, op, window, &[axis], true)?);
    }
    c.emit_with(&CONCAT, &parts, along(axis))
}

/// Returns the weights of a convolution with one channel for each element of a window, a copy of that element.
fn window_weights(c: &mut Call, dtype: DType, channels: i64) -> Result<ValueId> {
    let (kernel, _) = window(c, 2)?;
    let weights = copies(&mut c.low.b, dtype, channels, &kernel);
    weights.ok_or_else(|| c.fail("shape", "the windows are too many"))
}

/// Returns a size that must be a fixed number.
fn number(c: &Call, dim: &Dim, what: &str) -> Result<i64> {
    dim.as_const()
        .filter(|n| *n > 0)
        .ok_or_else(|| c.fail("shape", format!("{what} has to be a fixed number")))
}

/// Returns the attributes of a convolution by windows.
fn window_attrs(c: &Call, axes: usize) -> Result<Attrs> {
    let pads = each(c, "padding", &vec![0; axes])?;
    Ok(Attrs::new()
        .with("strides", each(c, "stride", &vec![1; axes])?)
        .with("dilations", each(c, "dilation", &vec![1; axes])?)
        .with("pads", [pads.clone(), pads].concat()))
}

/// Lowers `im2col`, the elements of all windows: [batch, channels·kernel, windows].
fn patches(c: &mut Call) -> Result<Value> {
    let (x, more) = batched(c, "self", 2)?;
    let dims = c.shape_of(x);
    let channels = number(c, &dims[1], "the number of channels")?;
    let weights = window_weights(c, c.dtype(x), channels)?;
    let attrs = window_attrs(c, 2)?.with("group", channels);
    let y = c.emit_with(&CONV, &[x, weights], attrs)?;
    let out = c.shape_of(y);
    let flat = [out[0].clone(), out[1].clone(), out[2].mul(&out[3])];
    let y = c.reshape(y, &flat)?;
    unbatched(c, y, more)
}

/// Lowers `col2im`, the sum of windows at their places: the adjoint of [`patches`].
fn folded(c: &mut Call) -> Result<Value> {
    let (x, more) = batched(c, "self", 1)?;
    let image = each(c, "output_size", &[1, 1])?;
    let (kernel, _) = window(c, 2)?;
    let (image, kernel) = (c.low.b.ints(&image), c.low.b.ints(&kernel));
    let ins = [Some(x), Some(image), Some(kernel)];
    let attrs = window_attrs(c, 2)?;
    let y = standard(&mut c.low.b, "Col2Im", &attrs, &ins, 1)?[0];
    unbatched(c, y, more)
}

/// Lowers `grid_sampler`, whose modes are numbers (torch.nn.functional.grid_sample).
fn grid_sampler(c: &mut Call) -> Result<Value> {
    let word = |c: &Call, name: &str, words: &[&'static str]| {
        let number = c.int(name, 0)?;
        let word = usize::try_from(number).ok().and_then(|n| words.get(n));
        word.copied()
            .ok_or_else(|| c.unsupported(format!("`{name}` {number}")))
    };
    let mode = word(c, "interpolation_mode", &["linear", "nearest", "cubic"])?;
    let padding = word(c, "padding_mode", &["zeros", "border", "reflection"])?;
    let attrs = Attrs::new()
        .with("mode", mode)
        .with("padding_mode", padding)
        .with("align_corners", i64::from(c.bool("align_corners", false)?));
    let ins = [Some(c.value("input")?), Some(c.value("grid")?)];
    let y = standard(&mut c.low.b, "GridSample", &attrs, &ins, 1)?[0];
    c.made(y)
}

/// Returns the scales of a call, from a list or from one argument for each axis. A scale that is not given is 0.
fn scales(c: &Call, axes: usize) -> Result<Vec<f64>> {
    let list = c.given("scale_factors");
    if let Value::List(items) | Value::Tuple(items) = &list {
        let numbers = items.iter().map(Value::number).collect::<Option<_>>();
        return numbers.ok_or_else(|| c.fail("op", "a scale is no number"));
    }
    let names: &[&str] = match axes {
        1 => &["scales"],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    names.iter().map(|name| c.float(name, 0.0)).collect()
}

/// Lowers `upsample`. Coordinates of the result become those of the operand by the scale of a call, if it gives one, else by
/// the ratio of the sizes. PyTorch multiplies by a rounded scale, which may select other neighbours than a division: where
/// the result is the nearest element, such a scale is refused.
fn resized(c: &mut Call) -> Result<Value> {
    let axes = spatial_axes(c);
    let antialias = c.name.ends_with("_aa");
    let cubic = c.name.contains("cubic");
    let (x, more) = batched(c, c.either(&["input", "self"]), axes)?;
    let given = scales(c, axes)?;
    let dims = c.shape_of(x)[2..].to_vec();
    let sizes = match c.dims("output_size")? {
        Some(sizes) => sizes,
        None => {
            let mut sizes = Vec::with_capacity(axes);
            for (dim, scale) in dims.iter().zip(&given) {
                sizes.push(match (dim.as_const(), *scale) {
                    (Some(n), s) if s > 0.0 => Dim::from((n as f64 * s).floor() as i64),
                    (None, s) if s >= 1.0 && s.fract() == 0.0 => dim.mul(&Dim::from(s as i64)),
                    _ => return Err(c.fail("shape", "the sizes of the result are not known")),
                });
            }
            sizes
        }
    };
    let corners = c.bool("align_corners", false)?;
    let (mode, coordinates, rounding) = match c.name.contains("nearest") {
        true if c.name.contains("exact") => ("nearest", "half_pixel", Some("round_prefer_ceil")),
        true => ("nearest", "asymmetric", Some("floor")),
        false => {
            let coordinates = if corners {
                "align_corners"
            } else {
                "half_pixel"
            };
            (if cubic { "cubic" } else { "linear" }, coordinates, None)
        }
    };
    let mut attrs = Attrs::new()
        .with("mode", mode)
        .with("axes", (2..axes as i64 + 2).collect::<Vec<i64>>())
        .with("antialias", i64::from(antialias))
        .with("exclude_outside", i64::from(antialias))
        .with("coordinate_transformation_mode", coordinates);
    if let Some(rounding) = rounding {
        attrs = attrs.with("nearest_mode", rounding);
    }
    if cubic {
        // Keys' cubic has −0.5 with antialiasing, −0.75 without (ATen/native/UpSample.h).
        let a = if antialias { -0.5f32 } else { -0.75 };
        attrs = attrs.with("cubic_coeff_a", a);
    }
    let mut each = dims.iter().zip(&given).zip(&sizes);
    let by_sizes = each.all(|((dim, scale), size)| {
        let whole = dim.mul(&Dim::from(*scale as i64));
        *scale == 0.0 || scale.fract() == 0.0 && whole == *size
    });
    let ins = if by_sizes || corners {
        let sizes = c.low.int_vector(&sizes)?;
        [Some(x), None, None, Some(sizes)]
    } else if rounding.is_some() || given.contains(&0.0) {
        return Err(c
            .unsupported("a scale that is not the ratio of the sizes")
            .help("give the size of the result, or recompute_scale_factor=True"));
    } else {
        let bytes: Vec<u8> = given.iter().flat_map(|s| s.to_le_bytes()).collect();
        let scales = Tensor::new(DType::F64, [given.len() as u64], bytes);
        [
            Some(x),
            None,
            Some(c.low.b.constant("scales", scales)),
            None,
        ]
    };
    let y = standard(&mut c.low.b, "Resize", &attrs, &ins, 1)?[0];
    unbatched(c, y, more)
}
