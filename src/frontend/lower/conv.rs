//! Convolutions with computed padding: `auto_pad` SAME_UPPER and SAME_LOWER, and the `output_shape` of a transposed one.
//! They become plain convolutions, behind a `Pad` where the sizes are not fixed.

use super::call::{Call, Lowered, one};
use super::windows::{halves, pads_of, same_padding};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::conv::{CONV, CONV_TRANSPOSE};
use ckpt_passes::ops::extreme::MAX;

/// Operands and windows of a convolution.
struct Windows {
    x: ValueId,
    /// Weights, and the bias if given.
    rest: Vec<ValueId>,
    /// Spatial axes.
    n: usize,
    strides: Vec<i64>,
    /// Elements from the first to the last of a window, per axis.
    extents: Vec<i64>,
    attrs: Attrs,
}

/// Reads what both kinds of convolution share.
fn windows(call: &mut Call) -> Result<Windows> {
    let [x, w] = call.operands(["X", "W"])?;
    let bias = call.opt(2);
    let rank = call.rank(x);
    if rank < 3 || call.rank(w) != rank {
        return Err(call
            .fail(
                "shape",
                "operand and weights do not have the same spatial axes",
            )
            .found(format!("{} and {}", call.ty(x), call.ty(w))));
    }
    let n = rank - 2;
    let group = call.attr_int("group", 1)?;
    call.ignore_attr("kernel_shape"); // The weights have it, and the row checks them.
    let [strides, dilations] = [
        call.attr_each("strides", n, 1)?,
        call.attr_each("dilations", n, 1)?,
    ];
    let attrs = Attrs::new()
        .with("group", group)
        .with("strides", strides.clone())
        .with("dilations", dilations.clone());
    let mut extents = Vec::with_capacity(n);
    for (axis, dilation) in dilations.iter().enumerate() {
        extents.push((call.size(w, axis + 2, "the kernel")? - 1) * dilation + 1);
    }
    Ok(Windows {
        x,
        rest: [w].into_iter().chain(bias).collect(),
        n,
        strides,
        extents,
        attrs,
    })
}

/// `Conv` with `auto_pad` SAME_UPPER or SAME_LOWER: ⌈size/stride⌉ windows along each axis.
pub fn conv(call: &mut Call) -> Lowered {
    let upper = match call.attr_text("auto_pad", "NOTSET")?.as_str() {
        "SAME_UPPER" => true,
        "SAME_LOWER" => false,
        _ => return Ok(None),
    };
    let w = windows(call)?;
    call.ignore_attr("pads"); // SAME says what they are.
    let sides: Option<Vec<_>> = (0..w.n)
        .map(|axis| {
            let size = call.dims(w.x)[axis + 2].as_const();
            let total = same_padding(size, w.strides[axis], w.extents[axis])?;
            Some(halves(total, upper))
        })
        .collect();
    let (x, attrs) = match sides {
        Some(sides) => (w.x, w.attrs.with("pads", pads_of(&sides))),
        None => (padded(call, &w, upper)?, w.attrs),
    };
    one(call.emit(&CONV, &[&[x], w.rest.as_slice()].concat(), attrs)?)
}

/// Pads the operand by what its sizes ask for when the graph runs.
fn padded(call: &mut Call, w: &Windows, upper: bool) -> Result<ValueId> {
    let mut parts = (Vec::new(), Vec::new());
    for axis in 0..w.n {
        let (stride, extent) = (w.strides[axis], w.extents[axis]);
        let size = call.axis_vector(w.x, axis + 2)?;
        let [up, by] = [stride - 1, stride].map(|n| call.ints(&[n]));
        let places = call.add(size, up)?;
        let places = call.op(&DIV, &[places, by])?;
        let covered = call.mul(places, by)?;
        let rest = call.ints(&[extent - stride]);
        let covered = call.add(covered, rest)?;
        let total = call.sub(covered, size)?;
        let (zero, two) = (call.ints(&[0]), call.ints(&[2]));
        let total = call.op(&MAX, &[total, zero])?;
        let less = call.op(&DIV, &[total, two])?;
        let more = call.sub(total, less)?;
        let (before, after) = if upper { (less, more) } else { (more, less) };
        parts.0.push(before);
        parts.1.push(after);
    }
    let others = call.ints(&[0, 0]);
    let mut pads = vec![others];
    pads.extend(parts.0);
    pads.push(others);
    pads.extend(parts.1);
    let pads = call.concat(&pads, 0)?;
    call.op(&PAD, &[w.x, pads])
}

/// `ConvTranspose` with a result of stride times the operand's size, or of `output_shape`.
///
/// A result one element longer than all windows cover ends in zeros, as `output_padding` says. A longer one is refused,
/// because the formula of the specification and runtimes disagree about the place of the zeros.
pub fn transpose(call: &mut Call) -> Lowered {
    let auto = call.attr_text("auto_pad", "NOTSET")?;
    let upper = auto == "SAME_UPPER";
    let wanted = call.attr_ints("output_shape")?;
    if !upper && auto != "SAME_LOWER" && wanted.is_none() {
        return Ok(None);
    }
    let w = windows(call)?;
    call.ignore_attr("pads"); // The shape of the result says what they are.
    let mut more = call
        .attr_ints("output_padding")?
        .unwrap_or_else(|| vec![0; w.n]);
    let wanted = match wanted {
        Some(all) if all.len() == w.n + 2 => Some(all[2..].to_vec()),
        other => other,
    };
    if more.len() != w.n || wanted.as_ref().is_some_and(|o| o.len() != w.n) {
        return Err(call.fail(
            "attribute",
            format!(
                "`output_padding` or `output_shape` does not fit {} spatial axes",
                w.n
            ),
        ));
    }
    let mut sides = Vec::with_capacity(w.n);
    for axis in 0..w.n {
        let size = &call.dims(w.x)[axis + 2];
        let stride = Dim::from(w.strides[axis]);
        let full = size
            .sub(&Dim::ONE)
            .mul(&stride)
            .add(&Dim::from(w.extents[axis] + more[axis]));
        let result = match &wanted {
            Some(o) => Dim::from(o[axis]),
            None => size.mul(&stride),
        };
        let total = full.sub(&result).as_const();
        let known = total
            .map(|t| halves(t, upper))
            .filter(|(before, after)| *before >= 0 && *after >= -1);
        let Some((before, after)) = known else {
            return Err(call
                .unsupported("a result of these sizes")
                .expected("sizes that padding of a fixed number makes")
                .found(format!("{result} of {full} along spatial axis {axis}")));
        };
        more[axis] -= after.min(0);
        sides.push((before, after.max(0)));
    }
    let attrs = w.attrs.with("pads", pads_of(&sides));
    let attrs = attrs.with("output_padding", more);
    let ins = [&[w.x], w.rest.as_slice()].concat();
    one(call.emit(&CONV_TRANSPOSE, &ins, attrs)?)
}
