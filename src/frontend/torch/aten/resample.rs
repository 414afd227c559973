//! Images and signals in another size (ONNX Resize), nearest, linear and cubic.
//!
//! PyTorch maps the places of a result to those of the operand by the scale that a call gives, ONNX by the sizes; where the
//! two differ the call is refused, since results would be close and wrong.

use super::Value;
use super::image::{batched, unbatched};
use super::signature::{Call, Op};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim};

pub const OPS: &[Op] = &[
    (
        "upsample_bicubic2d(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 2, "cubic", false),
    ),
    (
        "upsample_bicubic2d(self: t, output_size: I, align_corners: b, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "cubic", false),
    ),
    (
        "_upsample_bicubic2d_aa(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 2, "cubic", true),
    ),
    (
        "_upsample_bicubic2d_aa(self: t, output_size: I, align_corners: b, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "cubic", true),
    ),
    (
        "upsample_bilinear2d(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 2, "linear", false),
    ),
    (
        "upsample_bilinear2d(self: t, output_size: I, align_corners: b, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "linear", false),
    ),
    (
        "_upsample_bilinear2d_aa(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 2, "linear", true),
    ),
    (
        "_upsample_bilinear2d_aa(self: t, output_size: I, align_corners: b, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "linear", true),
    ),
    (
        "upsample_linear1d(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 1, "linear", false),
    ),
    (
        "upsample_linear1d(self: t, output_size: I, align_corners: b, scales: f?)",
        |c| resized(c, 1, "linear", false),
    ),
    (
        "upsample_nearest1d(input: t, output_size: I?, scale_factors: _?)",
        |c| resized(c, 1, "nearest", false),
    ),
    (
        "upsample_nearest1d(self: t, output_size: I, scales: f?)",
        |c| resized(c, 1, "nearest", false),
    ),
    (
        "upsample_nearest2d(input: t, output_size: I?, scale_factors: _?)",
        |c| resized(c, 2, "nearest", false),
    ),
    (
        "upsample_nearest2d(self: t, output_size: I, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "nearest", false),
    ),
    (
        "upsample_nearest3d(input: t, output_size: I?, scale_factors: _?)",
        |c| resized(c, 3, "nearest", false),
    ),
    (
        "upsample_nearest3d(self: t, output_size: I, scales_d: f?, scales_h: f?, scales_w: f?)",
        |c| resized(c, 3, "nearest", false),
    ),
    (
        "_upsample_nearest_exact1d(input: t, output_size: I?, scale_factors: _?)",
        |c| resized(c, 1, "nearest-exact", false),
    ),
    (
        "_upsample_nearest_exact1d(self: t, output_size: I, scales: f?)",
        |c| resized(c, 1, "nearest-exact", false),
    ),
    (
        "_upsample_nearest_exact2d(input: t, output_size: I?, scale_factors: _?)",
        |c| resized(c, 2, "nearest-exact", false),
    ),
    (
        "_upsample_nearest_exact2d(self: t, output_size: I, scales_h: f?, scales_w: f?)",
        |c| resized(c, 2, "nearest-exact", false),
    ),
    (
        "upsample_trilinear3d(input: t, output_size: I?, align_corners: b, scale_factors: _?)",
        |c| resized(c, 3, "linear", false),
    ),
    (
        "upsample_trilinear3d(self: t, output_size: I, align_corners: b, scales_d: f?, scales_h: f?, scales_w: f?)",
        |c| resized(c, 3, "linear", false),
    ),
];

/// As many scales as there are axes, from a list or from arguments of their own; 0 for one that is not given.
fn scales(c: &Call, axes: usize) -> Result<Vec<f64>> {
    let list = c.given("scale_factors");
    if let Value::List(items) | Value::Tuple(items) = &list {
        let numbers = items.iter().map(|item| match item {
            Value::Float(x) => Ok(*x),
            Value::Int(n) => Ok(n.as_const().unwrap_or(0) as f64),
            _ => Err(c.fail("op", "a scale is no number")),
        });
        return numbers.collect();
    }
    let names: &[&str] = match axes {
        1 => &["scales"],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    names.iter().map(|name| c.float(name, 0.0)).collect()
}

fn resized(c: &mut Call, axes: usize, form: &str, antialias: bool) -> Result<Value> {
    let named = if c.has("input") { "input" } else { "self" };
    let (x, more) = batched(c, named, axes)?;
    let given = scales(c, axes)?;
    let dims = c.low.b.ty(x).dims[2..].to_vec();
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
    let (mode, coordinates, nearest) = match form {
        "nearest" => ("nearest", "asymmetric", Some("floor")),
        "nearest-exact" => ("nearest", "half_pixel", Some("round_prefer_ceil")),
        _ if corners => (form, "align_corners", None),
        _ => (form, "half_pixel", None),
    };
    let mut attrs = Attrs::new()
        .with("mode", mode)
        .with("axes", (2..axes as i64 + 2).collect::<Vec<i64>>())
        .with("antialias", i64::from(antialias))
        .with("exclude_outside", i64::from(antialias))
        .with("coordinate_transformation_mode", coordinates);
    if let Some(nearest) = nearest {
        attrs = attrs.with("nearest_mode", nearest);
    }
    if form == "cubic" {
        // Keys' cubic of −0.5 with antialiasing, −0.75 without (ATen/native/UpSample.h).
        let a = if antialias { -0.5f32 } else { -0.75 };
        attrs = attrs.with("cubic_coeff_a", a);
    }
    // PyTorch maps places by the scale that it is given, where there is one; else by the sizes.
    let own = |(dim, scale, size): (&Dim, f64, &Dim)| {
        let whole = dim.mul(&Dim::from(scale as i64));
        scale == 0.0 || scale.fract() == 0.0 && whole == *size
    };
    let by_sizes = dims
        .iter()
        .zip(&given)
        .zip(&sizes)
        .all(|((d, s), n)| own((d, *s, n)));
    if !by_sizes && !corners {
        return Err(c
            .unsupported("a scale that is not the ratio of the sizes")
            .help("give the size of the result, or recompute_scale_factor=True"));
    }
    let sizes = c.low.int_vector(&sizes)?;
    let ins = [Some(x), None, None, Some(sizes)];
    let y = standard(&mut c.low.b, "Resize", &attrs, &ins, 1)?[0];
    let y = unbatched(c, y, more)?;
    c.made(y)
}
