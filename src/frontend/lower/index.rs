//! Ops that read or write at computed places, as gathers and scatters: `Compress`, `OneHot` of a fractional depth, `Pad`
//! of some axes or with the operand's own elements, `ReverseSequence`, `Scatter`, `TensorScatter` (ONNX operator
//! specifications).

use super::call::{Call, Lowered, one, same};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::{ABS, MOD};
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::extreme::{CLIP, MAX};
use ckpt_passes::ops::fill::RANGE;
use ckpt_passes::ops::index::{GATHER_ELEMENTS, NON_ZERO};
use ckpt_passes::ops::logic::{LESS, WHERE};
use ckpt_passes::ops::scatter::{ONE_HOT, SCATTER_ELEMENTS};

/// `Compress`: the slices along an axis, or without one the elements, where a vector of booleans is true.
pub fn compress(call: &mut Call) -> Lowered {
    let [mut x, condition] = call.operands(["input", "condition"])?;
    call.want_rank(condition, &[1], "condition")?;
    let axis = match call.attr_opt_int("axis")? {
        Some(axis) => call.axis_of(axis, call.rank(x))?,
        None => {
            x = call.reshape(x, &[-1])?;
            0
        }
    };
    let places = call.op(&NON_ZERO, &[condition])?;
    let places = call.reshape(places, &[-1])?;
    one(call.gather(x, places, axis)?)
}

/// `OneHot` with a floating-point depth; the row takes an integer depth.
pub fn one_hot(call: &mut Call) -> Lowered {
    let [indices, depth, values] = call.operands(["indices", "depth", "values"])?;
    if !call.dtype(depth).is_float() {
        return Ok(None);
    }
    let depth = match call.known_scalar(depth) {
        Some(n) => call.int(n as i64),
        None => call.cast(depth, DType::I64)?,
    };
    let attrs = Attrs::new().with("axis", call.attr_int("axis", -1)?);
    one(call.emit(&ONE_HOT, &[indices, depth, values], attrs)?)
}

/// `Pad` in the modes `edge`, `reflect` and `wrap`: one gather an axis. `Pad` in the mode `constant` of some axes: of all,
/// because ONNX Runtime turns a transposed `Pad` as if it had no `axes`.
pub fn pad(call: &mut Call) -> Lowered {
    let mode = call.attr_text("mode", "constant")?;
    let mut x = call.need(0, "data")?;
    let fill = call.opt(2); // The other modes do not use it.
    let rank = call.rank(x);
    let pads = call.need(1, "pads")?;
    if mode == "constant" && call.opt(3).is_none() {
        return Ok(None);
    }
    let axes = match call.opt(3) {
        None => (0..rank).collect(),
        Some(axes) => {
            let Some(known) = call.known_ints(axes) else {
                return Err(call.unsupported("`axes` computed from data"));
            };
            let axes = known.into_iter().map(|axis| call.axis_of(axis, rank));
            axes.collect::<Result<Vec<usize>>>()?
        }
    };
    let count = call.ty(pads).elements();
    if same(&count, &Dim::from(2 * axes.len() as i64)) {
        if mode == "constant" {
            let pads = pads_of_all(call, pads, &axes, rank)?;
            let ins = vec![Some(x), Some(pads), fill];
            return one(call.emit_n(&PAD, ins, Attrs::new(), 1)?[0]);
        }
        for (i, axis) in axes.iter().enumerate() {
            x = pad_axis(call, x, *axis, &mode, [(pads, i), (pads, i + axes.len())])?;
        }
        return one(x);
    }
    Err(call
        .fail("shape", "`pads` does not have two entries an axis")
        .expected((2 * axes.len()).to_string())
        .found(count.to_string()))
}

/// Returns the paddings of all axes, those of `axes` being given: 0 for the others.
fn pads_of_all(call: &mut Call, pads: ValueId, axes: &[usize], rank: usize) -> Result<ValueId> {
    if let Some(known) = call.known_ints(pads) {
        let mut all = vec![0; 2 * rank];
        for (i, axis) in axes.iter().enumerate() {
            (all[*axis], all[rank + axis]) = (known[i], known[i + axes.len()]);
        }
        return Ok(call.ints(&all));
    }
    let zero = call.ints(&[0]);
    let mut all = vec![zero; 2 * rank];
    for (i, axis) in axes.iter().enumerate() {
        for (slot, at) in [(*axis, i), (rank + axis, i + axes.len())] {
            let at = call.ints(&[at as i64]);
            all[slot] = call.gather(pads, at, 0)?;
        }
    }
    call.concat(&all, 0)
}

/// Returns entry `at` of an int64 vector as a scalar.
fn entry(call: &mut Call, (vector, at): (ValueId, usize)) -> Result<ValueId> {
    let known = call.contents.get(vector).and_then(|ints| ints.get(at));
    if let Some(n) = known.and_then(Dim::as_const) {
        return Ok(call.int(n));
    }
    let at = call.int(at as i64);
    call.gather(vector, at, 0)
}

fn pad_axis(
    call: &mut Call,
    x: ValueId,
    axis: usize,
    mode: &str,
    pads: [(ValueId, usize); 2],
) -> Result<ValueId> {
    let [before, after] = [entry(call, pads[0])?, entry(call, pads[1])?];
    let nothing = |call: &Call, v| call.contents.get(v).is_some_and(|n| *n == [Dim::ZERO]);
    if nothing(call, before) && nothing(call, after) {
        return Ok(x);
    }
    let (zero, unit) = (call.int(0), call.int(1));
    let size = call.axis_size(x, axis)?;
    let start = call.sub(zero, before)?;
    let stop = call.add(size, after)?;
    let places = call.op(&RANGE, &[start, stop, unit])?;
    let last = call.sub(size, unit)?;
    // The remainder has the sign of the divisor, so places before the first count from the end.
    let places = match mode {
        "edge" => call.op(&CLIP, &[places, zero, last])?,
        "wrap" => call.op(&MOD, &[places, size])?,
        "reflect" => {
            // The period is 2(size − 1): there and back again. For one element it is 1.
            let period = call.add(last, last)?;
            let period = call.op(&MAX, &[period, unit])?;
            let places = call.op(&MOD, &[places, period])?;
            let beyond = call.sub(places, last)?;
            let beyond = call.op(&ABS, &[beyond])?;
            call.sub(last, beyond)?
        }
        other => {
            return Err(call
                .fail("attribute", format!("the mode `{other}` is not known"))
                .expected("constant, edge, reflect or wrap"));
        }
    };
    call.gather(x, places, axis)
}

/// `ReverseSequence`: reverses the first `sequence_lens` steps of each sample.
pub fn reverse_sequence(call: &mut Call) -> Lowered {
    let [x, lengths] = call.operands(["input", "sequence_lens"])?;
    call.want_rank(lengths, &[1], "sequence_lens")?;
    let (batch, time) = (
        call.attr_int("batch_axis", 1)?,
        call.attr_int("time_axis", 0)?,
    );
    let rank = call.rank(x);
    if rank < 2 || !matches!((batch, time), (0, 1) | (1, 0)) {
        return Err(call
            .fail("axis", format!("`batch_axis` {batch}, `time_axis` {time}"))
            .expected("0 and 1, of an operand with two axes at least"));
    }
    let steps = call.positions(x, time as usize)?;
    let steps = call.unsqueeze(steps, &[batch])?;
    let lengths = call.unsqueeze(lengths, &[time])?;
    let unit = call.int(1);
    let last = call.sub(lengths, unit)?;
    let back = call.sub(last, steps)?;
    let inside = call.op(&LESS, &[steps, lengths])?;
    let mut places = call.op(&WHERE, &[inside, back, steps])?;
    let rest: Vec<i64> = (2..rank as i64).collect();
    places = call.unsqueeze(places, &rest)?;
    let shape = call.shape(x)?;
    let places = call.expand(places, shape)?;
    let attrs = Attrs::new().with("axis", time);
    one(call.emit(&GATHER_ELEMENTS, &[x, places], attrs)?)
}

/// `Scatter`: the name of `ScatterElements` before opset 11.
pub fn scatter(call: &mut Call) -> Lowered {
    let ins = call.operands(["data", "indices", "updates"])?;
    let attrs = Attrs::new().with("axis", call.attr_int("axis", 0)?);
    one(call.emit(&SCATTER_ELEMENTS, &ins, attrs)?)
}

/// `TensorScatter`: overwrites each sample of a cache from its own place on, past the end to the start if `circular`.
pub fn tensor_scatter(call: &mut Call) -> Lowered {
    let [cache, update] = call.operands(["past_cache", "update"])?;
    let rank = call.rank(cache);
    call.want_rank(update, &[rank], "update")?;
    let axis = call.attr_int("axis", -2)?;
    let axis = call.axis_of(axis, rank)?;
    if axis == 0 {
        return Err(call.fail("axis", "the first axis is that of the samples"));
    }
    let circular = call.attr_choice("mode", ["linear", "circular"], "linear")?;
    let mut places = call.positions(update, axis)?;
    let mut column = vec![1; rank];
    column[axis] = -1;
    places = call.reshape(places, &column)?;
    if let Some(first) = call.opt(2) {
        call.want_rank(first, &[1], "write_indices")?;
        let rest: Vec<i64> = (1..rank as i64).collect();
        let first = call.unsqueeze(first, &rest)?;
        places = call.add(places, first)?;
    }
    if circular {
        let size = call.axis_size(cache, axis)?;
        places = call.op(&MOD, &[places, size])?;
    }
    let shape = call.shape(update)?;
    let places = call.expand(places, shape)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    one(call.emit(&SCATTER_ELEMENTS, &[cache, places, update], attrs)?)
}
