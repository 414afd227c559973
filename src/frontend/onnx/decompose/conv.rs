//! Convolutions whose padding the file leaves to be worked out: `auto_pad` SAME_UPPER and SAME_LOWER, and the
//! `output_shape` of a transposed one. What remains is the plain form, perhaps behind a `Pad`.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, ValueId};
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::conv::{CONV, CONV_TRANSPOSE};
use ckpt_passes::ops::extreme::MAX;

/// A convolution's operands and windows.
struct Windows {
    x: ValueId,
    /// Weights, and the bias if given.
    rest: Vec<ValueId>,
    /// Spatial axes.
    n: usize,
    strides: Vec<i64>,
    /// From the first to the last element of a window.
    extents: Vec<i64>,
    attrs: Attrs,
}

fn windows(call: &mut Call) -> Result<Windows> {
    let (x, w) = (call.need(0, "X")?, call.need(1, "W")?);
    let bias = call.opt(2);
    let rank = call.b.rank(x);
    if rank < 3 || call.b.rank(w) != rank {
        return Err(call
            .fail(
                "shape",
                "operand and weights do not have the same spatial axes",
            )
            .found(format!("{} and {}", call.b.ty(x), call.b.ty(w))));
    }
    let n = rank - 2;
    let group = call.int("group", 1)?;
    call.ignore("kernel_shape"); // The weights have it, and the row checks them.
    let mut attrs = Attrs::new().with("group", group);
    let mut each = |call: &mut Call, name: &str| -> Result<Vec<i64>> {
        let values = call.ints(name)?.unwrap_or_else(|| vec![1; n]);
        if values.len() != n || values.iter().any(|v| *v < 1) {
            return Err(call
                .fail(
                    "attribute",
                    format!("`{name}` does not fit {n} spatial axes"),
                )
                .found(format!("{values:?}")));
        }
        attrs = std::mem::take(&mut attrs).with(name, values.clone());
        Ok(values)
    };
    let (strides, dilations) = (each(call, "strides")?, each(call, "dilations")?);
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

/// Half of the padding, rounded down, and the rest: before and after, or the other way round.
fn halves(total: i64, upper: bool) -> (i64, i64) {
    let less = total.div_euclid(2);
    let more = total - less;
    if upper { (less, more) } else { (more, less) }
}

/// Before all axes, then after all.
fn pads_of(sides: &[(i64, i64)]) -> Vec<i64> {
    let before = sides.iter().map(|s| s.0);
    before.chain(sides.iter().map(|s| s.1)).collect()
}

/// As many places as the size divided by the stride, rounded up: padding ⌈i/s⌉·s − s + extent − i, at least 0.
pub fn conv(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let upper = match call.str("auto_pad", "NOTSET")? {
        "SAME_UPPER" => true,
        "SAME_LOWER" => false,
        _ => return Ok(None),
    };
    let w = windows(call)?;
    call.ignore("pads"); // SAME says what they are.
    let mut sides = Vec::with_capacity(w.n);
    for axis in 0..w.n {
        let (stride, extent) = (w.strides[axis], w.extents[axis]);
        sides.push(match call.dims(w.x)[axis + 2].as_const() {
            _ if stride == 1 => Some(extent - 1),
            Some(size) => {
                Some(((size + stride - 1) / stride * stride - stride + extent - size).max(0))
            }
            None => None,
        });
    }
    let known: Option<Vec<i64>> = sides.iter().copied().collect();
    let (mut x, mut attrs) = (w.x, w.attrs.clone());
    match known {
        Some(totals) => {
            let sides: Vec<_> = totals.iter().map(|t| halves(*t, upper)).collect();
            attrs = attrs.with("pads", pads_of(&sides));
        }
        None => x = padded(call, &w, upper)?,
    }
    let y = call
        .b
        .emit(&CONV, &[&[x], w.rest.as_slice()].concat(), attrs)?;
    Ok(Some(vec![Out::Value(y)]))
}

/// The operand with the padding that its sizes, which are not known, ask for.
fn padded(call: &mut Call, w: &Windows, upper: bool) -> Result<ValueId> {
    let mut parts = (Vec::new(), Vec::new());
    for axis in 0..w.n {
        let (stride, extent) = (w.strides[axis], w.extents[axis]);
        let size = call.axis_vector(w.x, axis + 2)?;
        let [up, by] = [stride - 1, stride].map(|n| call.b.ints(&[n]));
        let places = call.b.add(size, up)?;
        let places = call.b.emit(&DIV, &[places, by], Attrs::new())?;
        let covered = call.b.mul(places, by)?;
        let rest = call.b.ints(&[extent - stride]);
        let covered = call.b.add(covered, rest)?;
        let total = call.b.sub(covered, size)?;
        let (zero, two) = (call.b.ints(&[0]), call.b.ints(&[2]));
        let total = call.b.emit(&MAX, &[total, zero], Attrs::new())?;
        let less = call.b.emit(&DIV, &[total, two], Attrs::new())?;
        let more = call.b.sub(total, less)?;
        let (before, after) = if upper { (less, more) } else { (more, less) };
        parts.0.push(before);
        parts.1.push(after);
    }
    let others = call.b.ints(&[0, 0]);
    let mut pads = vec![others];
    pads.extend(parts.0);
    pads.push(others);
    pads.extend(parts.1);
    let pads = call.concat(&pads, 0)?;
    call.b.emit(&PAD, &[w.x, pads], Attrs::new())
}

/// The padding that makes a result of stride times the operand's size, or of `output_shape`.
///
/// A result one longer than all windows cover is zeros at its end, which `output_padding` says. Where it is longer still,
/// the formula of the specification and runtimes disagree about where the zeros are: refused.
pub fn transpose(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let auto = call.str("auto_pad", "NOTSET")?;
    let upper = auto == "SAME_UPPER";
    let wanted = call.ints("output_shape")?;
    if !upper && auto != "SAME_LOWER" && wanted.is_none() {
        return Ok(None);
    }
    let w = windows(call)?;
    call.ignore("pads"); // The shape of the result says what they are.
    let mut more = call.ints("output_padding")?.unwrap_or_else(|| vec![0; w.n]);
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
    let attrs = w
        .attrs
        .clone()
        .with("pads", pads_of(&sides))
        .with("output_padding", more);
    let y = call.b.emit(
        &CONV_TRANSPOSE,
        &[&[w.x], w.rest.as_slice()].concat(),
        attrs,
    )?;
    Ok(Some(vec![Out::Value(y)]))
}
