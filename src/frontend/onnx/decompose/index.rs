//! Ops that read or write at computed places, as gathers and scatters: `Compress`, `OneHot` of a fractional depth, `Pad`
//! with the operand's own elements, `ReverseSequence`, `Scatter`, `TensorScatter` (ONNX operator specifications).

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::arith::{ABS, MOD};
use ckpt_passes::ops::extreme::{CLIP, MAX};
use ckpt_passes::ops::fill::RANGE;
use ckpt_passes::ops::index::{GATHER, GATHER_ELEMENTS, NON_ZERO};
use ckpt_passes::ops::logic::{LESS, WHERE};
use ckpt_passes::ops::rule::known_scalar;
use ckpt_passes::ops::scatter::{ONE_HOT, SCATTER_ELEMENTS};

fn one(v: ValueId) -> Result<Option<Vec<Out>>> {
    Ok(Some(vec![Out::Value(v)]))
}

/// `axis` of a tensor of `rank` axes, counted from 0.
fn axis_of(call: &Call, axis: i64, rank: usize) -> Result<usize> {
    let from_start = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(from_start)
        .ok()
        .filter(|a| *a < rank)
        .ok_or_else(|| call.fail("axis", format!("axis {axis} of {rank}")))
}

/// `Compress`: the slices along an axis (or, without one, the elements) for which a vector of booleans says yes.
pub fn compress(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (mut x, condition) = (call.need(0, "input")?, call.need(1, "condition")?);
    call.want_rank(condition, &[1], "condition")?;
    let axis = match call.opt_int("axis")? {
        Some(axis) => axis_of(call, axis, call.b.rank(x))?,
        None => {
            x = call.reshape(x, &[-1])?;
            0
        }
    };
    let places = call.b.emit(&NON_ZERO, &[condition], Attrs::new())?;
    let places = call.reshape(places, &[-1])?;
    let attrs = Attrs::new().with("axis", axis as i64);
    one(call.b.emit(&GATHER, &[x, places], attrs)?)
}

/// `OneHot` whose depth the file gives as a fractional type; an integer depth is the row's own form.
pub fn one_hot(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (indices, depth) = (call.need(0, "indices")?, call.need(1, "depth")?);
    let values = call.need(2, "values")?;
    if !call.dtype(depth).is_float() {
        return Ok(None);
    }
    let depth = match known_scalar(&call.b, depth) {
        Some(n) => call.b.int(n as i64),
        None => call.b.cast(depth, DType::I64)?,
    };
    let attrs = Attrs::new().with("axis", call.int("axis", -1)?);
    one(call.b.emit(&ONE_HOT, &[indices, depth, values], attrs)?)
}

/// `Pad` in the modes `edge`, `reflect` and `wrap`: one gather an axis.
pub fn pad(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let mode = call.str("mode", "constant")?;
    if mode == "constant" {
        return Ok(None);
    }
    let mut x = call.need(0, "data")?;
    call.opt(2); // What to fill with, which these modes do not.
    let rank = call.b.rank(x);
    let pads = match call.opt(1) {
        Some(pads) => pads,
        None => return Err(call.fail("arity", "operand 1 (`pads`) is missing")),
    };
    let axes = match call.opt(3) {
        None => (0..rank).collect(),
        Some(axes) => {
            let known = call.b.contents.get(axes);
            let known: Option<Vec<i64>> =
                known.and_then(|ints| ints.iter().map(Dim::as_const).collect());
            let Some(known) = known else {
                return Err(call.unsupported("`axes` computed from data"));
            };
            let mut axes = Vec::with_capacity(known.len());
            for axis in known {
                axes.push(axis_of(call, axis, rank)?);
            }
            axes
        }
    };
    let count = call.b.ty(pads).elements();
    if call.same(&count, &Dim::from(2 * axes.len() as i64)) {
        for (i, axis) in axes.iter().enumerate() {
            x = pad_axis(call, x, *axis, mode, [(pads, i), (pads, i + axes.len())])?;
        }
        // A name of its own for a result that pads nothing comes from `finish`.
        return one(x);
    }
    Err(call
        .fail("shape", "`pads` does not have two entries an axis")
        .expected((2 * axes.len()).to_string())
        .found(count.to_string()))
}

/// Entry `at` of an int64 vector, as a scalar.
fn entry(call: &mut Call, (vector, at): (ValueId, usize)) -> Result<ValueId> {
    let known = call.b.contents.get(vector).and_then(|ints| ints.get(at));
    if let Some(n) = known.and_then(Dim::as_const) {
        return Ok(call.b.int(n));
    }
    let at = call.b.int(at as i64);
    call.gather_rows(vector, at)
}

fn pad_axis(
    call: &mut Call,
    x: ValueId,
    axis: usize,
    mode: &str,
    pads: [(ValueId, usize); 2],
) -> Result<ValueId> {
    let [before, after] = [entry(call, pads[0])?, entry(call, pads[1])?];
    let nothing = |call: &Call, v| call.b.contents.get(v).is_some_and(|n| *n == [Dim::ZERO]);
    if nothing(call, before) && nothing(call, after) {
        return Ok(x);
    }
    let (zero, unit) = (call.b.int(0), call.b.int(1));
    let size = call.axis_size(x, axis)?;
    let start = call.b.sub(zero, before)?;
    let stop = call.b.add(size, after)?;
    let places = call.b.emit(&RANGE, &[start, stop, unit], Attrs::new())?;
    let last = call.b.sub(size, unit)?;
    let whole = |call: &mut Call, places, period| {
        // The sign is the divisor's: places before the first count from the end.
        call.b.emit(&MOD, &[places, period], Attrs::new())
    };
    let places = match mode {
        "edge" => call.b.emit(&CLIP, &[places, zero, last], Attrs::new())?,
        "wrap" => whole(call, places, size)?,
        "reflect" => {
            // There and back again: a period of 2(size − 1), of 1 where there is one element.
            let period = call.b.add(last, last)?;
            let period = call.b.emit(&MAX, &[period, unit], Attrs::new())?;
            let places = whole(call, places, period)?;
            let beyond = call.b.sub(places, last)?;
            let beyond = call.b.emit(&ABS, &[beyond], Attrs::new())?;
            call.b.sub(last, beyond)?
        }
        other => {
            return Err(call
                .fail("attribute", format!("the mode `{other}` is not known"))
                .expected("constant, edge, reflect or wrap"));
        }
    };
    let attrs = Attrs::new().with("axis", axis as i64);
    call.b.emit(&GATHER, &[x, places], attrs)
}

/// `ReverseSequence`: of each sample the first so many steps, backwards.
pub fn reverse_sequence(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, lengths) = (call.need(0, "input")?, call.need(1, "sequence_lens")?);
    call.want_rank(lengths, &[1], "sequence_lens")?;
    let (batch, time) = (call.int("batch_axis", 1)?, call.int("time_axis", 0)?);
    let rank = call.b.rank(x);
    if rank < 2 || !matches!((batch, time), (0, 1) | (1, 0)) {
        return Err(call
            .fail("axis", format!("`batch_axis` {batch}, `time_axis` {time}"))
            .expected("0 and 1, of an operand with two axes at least"));
    }
    let steps = call.positions(x, time as usize)?;
    let steps = call.unsqueeze(steps, &[batch])?;
    let lengths = call.unsqueeze(lengths, &[time])?;
    let unit = call.b.int(1);
    let last = call.b.sub(lengths, unit)?;
    let back = call.b.sub(last, steps)?;
    let inside = call.b.emit(&LESS, &[steps, lengths], Attrs::new())?;
    let mut places = call.b.emit(&WHERE, &[inside, back, steps], Attrs::new())?;
    let rest: Vec<i64> = (2..rank as i64).collect();
    if !rest.is_empty() {
        places = call.unsqueeze(places, &rest)?;
    }
    let shape = call.b.shape(x)?;
    let places = call.expand(places, shape)?;
    let attrs = Attrs::new().with("axis", time);
    one(call.b.emit(&GATHER_ELEMENTS, &[x, places], attrs)?)
}

/// `Scatter`: what `ScatterElements` was called before opset 11.
pub fn scatter(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let ins = [
        call.need(0, "data")?,
        call.need(1, "indices")?,
        call.need(2, "updates")?,
    ];
    let attrs = Attrs::new().with("axis", call.int("axis", 0)?);
    one(call.b.emit(&SCATTER_ELEMENTS, &ins, attrs)?)
}

/// `TensorScatter`: each sample's part of a cache overwritten from its own place on, around the end if `circular`.
pub fn tensor_scatter(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (cache, update) = (call.need(0, "past_cache")?, call.need(1, "update")?);
    let rank = call.b.rank(cache);
    call.want_rank(update, &[rank], "update")?;
    let axis = call.int("axis", -2)?;
    let axis = axis_of(call, axis, rank)?;
    if axis == 0 {
        return Err(call.fail("axis", "the first axis is that of the samples"));
    }
    let circular = match call.str("mode", "linear")? {
        "linear" => false,
        "circular" => true,
        other => return Err(call.fail("attribute", format!("unknown mode {other}"))),
    };
    let mut places = call.positions(update, axis)?;
    let mut column = vec![1; rank];
    column[axis] = -1;
    places = call.reshape(places, &column)?;
    if let Some(first) = call.opt(2) {
        call.want_rank(first, &[1], "write_indices")?;
        let rest: Vec<i64> = (1..rank as i64).collect();
        let first = call.unsqueeze(first, &rest)?;
        places = call.b.add(places, first)?;
    }
    if circular {
        let size = call.axis_size(cache, axis)?;
        places = call.b.emit(&MOD, &[places, size], Attrs::new())?;
    }
    let shape = call.b.shape(update)?;
    let places = call.expand(places, shape)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    one(call
        .b
        .emit(&SCATTER_ELEMENTS, &[cache, places, update], attrs)?)
}
