//! `GridSample` (ONNX GridSample-22): reads an image or volume at fractional places.
//!
//! A place is between 2ⁿ pixels along n axes. Each of these is one gather of rows of channels, weighted by how close it is.
//! The gradients follow from that: a scatter to the pixels, and the differences of neighbours to the grid. The formulas are
//! PyTorch's (ATen/native/GridSampler.h).

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::{ABS, FLOOR, MOD, ROUND};
use ckpt_passes::ops::extreme::{CLIP, MAX};
use ckpt_passes::ops::logic::{AND, EQUAL, GREATER, LESS, WHERE};
use ckpt_passes::ops::rule::{Formulas, Term, binary_op, select, unary_op};
use ckpt_passes::ops::shape::STOP_GRADIENT;

/// What a place outside of the image reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outside {
    Zeros,
    Border,
    Reflection,
}

/// The places of all samples along one axis of the image.
struct Places {
    /// Coordinates in pixels, [samples].
    at: Term,
    /// The number of pixels as a scalar, in the coordinates' type and as an integer.
    size: Term,
    count: ValueId,
}

/// `GridSample`: [batch, channels, image…] at [batch, samples…, axes] is [batch, channels, samples…].
pub fn grid_sample(call: &mut Call) -> Lowered {
    let [x, grid] = call.operands(["X", "grid"])?;
    let mode = call.attr_text("mode", "linear")?;
    let outside = match call.attr_text("padding_mode", "zeros")?.as_str() {
        "zeros" => Outside::Zeros,
        "border" => Outside::Border,
        "reflection" => Outside::Reflection,
        other => return Err(call.unsupported(format!("`padding_mode` {other}"))),
    };
    let corners = call.attr_flag("align_corners")?;
    call.want_rank(x, &[4, 5], "X")?;
    let rank = call.rank(x);
    call.want_rank(grid, &[rank], "grid")?;
    let axes = rank - 2;
    if call.size(grid, rank - 1, "the number of coordinates")? != axes as i64 {
        return Err(call
            .fail(
                "shape",
                "a place has one coordinate for each axis of the image",
            )
            .expected(axes.to_string())
            .found(call.ty(grid).to_string()));
    }
    // Coordinates are computed in the type that kernels compute in.
    let wide = call.widen(grid)?;
    let ones = vec![1; axes];
    let columns = call.split(wide, &ones, -1)?;
    let mut places = Vec::with_capacity(axes);
    // The first coordinate is that of the last axis.
    for (i, column) in columns.into_iter().rev().enumerate() {
        let at = call.reshape(column, &[-1])?;
        places.push(places_along(call, x, i + 2, at, (corners, outside))?);
    }
    let y = match mode.as_str() {
        "linear" | "bilinear" => linear(call, x, &places)?,
        "nearest" => {
            let mut pixel = Vec::with_capacity(axes);
            for place in &places {
                pixel.push(call.bind(unary_op(&ROUND, place.at))?);
            }
            let (value, inside) = pixels(call, x, &places, &pixel)?;
            weighted(call, value, None, inside)?
        }
        other => return Err(call.unsupported(format!("`mode` {other}"))),
    };
    // [samples of all images, channels] to [batch, channels, samples…].
    let (batch, channels) = (call.axis_vector(x, 0)?, call.axis_vector(x, 1)?);
    let mut apart = vec![batch];
    apart.extend(call.axis_vectors(grid, 1..rank - 1)?);
    apart.push(channels);
    let y = call.reshape_to_all(y, &apart)?;
    let last = rank as i64 - 1;
    let perm: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
    one(call.transpose(y, &perm)?)
}

/// Returns the coordinates along an axis of the image in pixels, moved inside as `outside` says.
fn places_along(
    call: &mut Call,
    x: ValueId,
    axis: usize,
    at: ValueId,
    (corners, outside): (bool, Outside),
) -> Result<Places> {
    let count = call.axis_size(x, axis)?;
    let dtype = call.dtype(at);
    let (size, last) = match call.dims(x)[axis].as_const() {
        Some(n) => (
            call.scalar(dtype, n as f64),
            call.scalar(dtype, n as f64 - 1.0),
        ),
        None => {
            let size = call.cast(count, dtype)?;
            (size, call.eval(Term(size) - 1.0)?)
        }
    };
    let (at, size, last) = (Term(at), Term(size), Term(last));
    let at = match corners {
        true => call.bind((at + 1.0) * 0.5 * last)?,
        false => call.bind(((at + 1.0) * size - 1.0) * 0.5)?,
    };
    let at = match outside {
        Outside::Zeros => at,
        Outside::Border => clipped(call, at, last)?,
        Outside::Reflection => {
            let (low, span) = if corners { (0.0, last) } else { (-0.5, size) };
            let at = reflected(call, at, low, span)?;
            clipped(call, at, last)?
        }
    };
    Ok(Places { at, size, count })
}

/// Returns coordinates moved to the first or last pixel where they are outside. No gradient goes to those.
fn clipped(call: &mut Call, at: Term, last: Term) -> Result<Term> {
    let zero = call.number(at, 0.0);
    let moved = call.op(&CLIP, &[at.0, zero.0, last.0])?;
    let moved = call.op(&STOP_GRADIENT, &[moved])?;
    let above = binary_op(&GREATER, at, zero);
    let inside = binary_op(&AND, above, binary_op(&LESS, at, last));
    call.bind(select(inside, at, Term(moved)))
}

/// Returns coordinates reflected at `low` and `low + span` until they are between these.
fn reflected(call: &mut Call, at: Term, low: f64, span: Term) -> Result<Term> {
    let [zero, one, two] = [0.0, 1.0, 2.0].map(|n| call.number(at, n));
    // An image of one pixel may have no span: all coordinates are `low` then.
    let divisor = call.bind(binary_op(&MAX, span, one))?;
    let beyond = call.bind(unary_op(&ABS, at - low))?;
    let attrs = Attrs::new().with("fmod", 1);
    let rest = Term(call.emit(&MOD, &[beyond.0, divisor.0], attrs.clone())?);
    let turns = call.eval(unary_op(&FLOOR, beyond / divisor))?;
    let odd = call.emit(&MOD, &[turns, two.0], attrs)?;
    let odd = Term(call.op(&EQUAL, &[odd, one.0])?);
    let flat = Term(call.op(&EQUAL, &[span.0, zero.0])?);
    let there = call.bind(rest + low)?;
    let back = call.bind(span - rest + low)?;
    let low = call.number(at, low);
    call.bind(select(flat, low, select(odd, back, there)))
}

/// Returns the weighted sum of the pixels around each place: [samples, channels].
fn linear(call: &mut Call, x: ValueId, places: &[Places]) -> Result<ValueId> {
    let mut sides = Vec::with_capacity(places.len());
    for place in places {
        let below = call.bind(unary_op(&FLOOR, place.at))?;
        let above = call.bind(below + 1.0)?;
        let far = call.bind(place.at - below)?;
        let near = call.bind(above - place.at)?;
        sides.push([(below, near), (above, far)]);
    }
    let mut sum = None;
    for corner in 0..1usize << places.len() {
        let chosen: Vec<(Term, Term)> = sides
            .iter()
            .enumerate()
            .map(|(axis, side)| side[corner >> (places.len() - 1 - axis) & 1])
            .collect();
        let mut weight = chosen[0].1;
        for (_, factor) in &chosen[1..] {
            weight = call.bind(weight * *factor)?;
        }
        let pixel: Vec<Term> = chosen.iter().map(|(at, _)| *at).collect();
        let (value, inside) = pixels(call, x, places, &pixel)?;
        let part = weighted(call, value, Some(weight), inside)?;
        sum = Some(call.added(sum, part)?);
    }
    sum.ok_or_else(|| call.fail("shape", "the image has no axes"))
}

/// Returns pixels [samples, channels] times their weights, and 0 for those outside of the image.
fn weighted(
    call: &mut Call,
    value: ValueId,
    weight: Option<Term>,
    inside: ValueId,
) -> Result<ValueId> {
    let one = call.scalar(DType::F32, 1.0);
    let weight = match weight {
        Some(weight) => weight.0,
        None => call.cast_like(one, value)?,
    };
    let zero = call.scalar_like(weight, 0.0);
    let weight = call.op(&WHERE, &[inside, weight, zero])?;
    let weight = call.cast_like(weight, value)?;
    let weight = call.unsqueeze(weight, &[1])?;
    call.mul(value, weight)
}

/// Returns the pixels at whole coordinates, [samples, channels], and whether each is inside of the image. Those outside,
/// and at coordinates that are no numbers, are the first pixel.
fn pixels(
    call: &mut Call,
    x: ValueId,
    places: &[Places],
    pixel: &[Term],
) -> Result<(ValueId, ValueId)> {
    let mut inside: Option<ValueId> = None;
    let mut row: Option<ValueId> = None;
    for (place, at) in places.iter().zip(pixel) {
        let minus = call.number(*at, -1.0);
        let low = call.op(&GREATER, &[at.0, minus.0])?;
        let high = call.op(&LESS, &[at.0, place.size.0])?;
        let both = call.op(&AND, &[low, high])?;
        inside = Some(match inside {
            None => both,
            Some(others) => call.op(&AND, &[others, both])?,
        });
        let zero = call.number(*at, 0.0);
        let held = call.op(&WHERE, &[both, at.0, zero.0])?;
        let held = call.cast(held, DType::I64)?;
        row = Some(match row {
            None => held,
            Some(before) => {
                let before = call.mul(before, place.count)?;
                call.add(before, held)?
            }
        });
    }
    let (Some(inside), Some(mut row)) = (inside, row) else {
        return Err(call.fail("shape", "the image has no axes"));
    };
    // Rows of channels, those of an image behind those of the one before.
    let rank = call.rank(x) as i64;
    let perm: Vec<i64> = [0].into_iter().chain(2..rank).chain([1]).collect();
    let rows = call.transpose(x, &perm)?;
    let channels = call.axis_vector(x, 1)?;
    let all = call.ints(&[-1]);
    let rows = call.reshape_to_all(rows, &[all, channels])?;
    if !call.dims(x)[0].is_one() {
        let mut pixels = call.int(1);
        for place in places {
            pixels = call.mul(pixels, place.count)?;
        }
        let image = call.positions(x, 0)?;
        let first = call.mul(image, pixels)?;
        let first = call.unsqueeze(first, &[1])?;
        let batch = call.axis_vector(x, 0)?;
        let apart = call.reshape_to_all(row, &[batch, all])?;
        let moved = call.add(apart, first)?;
        row = call.reshape(moved, &[-1])?;
    }
    Ok((call.gather(rows, row, 0)?, inside))
}
