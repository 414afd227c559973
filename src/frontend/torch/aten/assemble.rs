//! Tensors put together, repeated, padded and turned.

use super::signature::{Call, Op};
use super::{TensorId, Value};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, Same, ValueId};
use ckpt_passes::ops::{arith, concat, logic, shape, slice};

pub const OPS: &[Op] = &[
    ("cat(tensors: l, dim: i?)", cat),
    ("concat(tensors: l, dim: i?)", cat),
    ("concatenate(tensors: l, dim: i?)", cat),
    ("constant_pad_nd(self: t, pad: I, value: s?)", pad),
    (
        "diff(self: t, n: i?, dim: i?, prepend: t?, append: t?)",
        diff,
    ),
    ("flip(self: t, dims: I)", flip),
    ("pad(self: t, pad: I, mode: S?, value: f?)", pad),
    ("repeat(self: t, repeats: I)", repeat),
    (
        "repeat_interleave(self: t, repeats: i, dim: i?, *, output_size: i?)",
        repeat_each,
    ),
    ("roll(self: t, shifts: I, dims: I?)", roll),
    ("stack(tensors: l, dim: i?)", stack),
    ("tile(self: t, dims: I)", repeat),
];

/// Values in their common element type, one after the other along an axis.
fn concatenated(c: &mut Call, tensors: &[TensorId], axis: usize) -> Result<ValueId> {
    let operands: Vec<Value> = tensors.iter().map(|t| Value::Tensor(*t)).collect();
    let list: Vec<&Value> = operands.iter().collect();
    let dtype = c.low.promoted(&list)?;
    let mut values = Vec::with_capacity(tensors.len());
    for operand in &operands {
        values.push(c.low.operand(operand, dtype)?);
    }
    join(c, &values, axis)
}

fn join(c: &mut Call, values: &[ValueId], axis: usize) -> Result<ValueId> {
    match values {
        [one] => Ok(*one),
        many => {
            let attrs = Attrs::new().with("axis", axis as i64);
            c.low.b.emit(&concat::CONCAT, many, attrs)
        }
    }
}

fn cat(c: &mut Call) -> Result<Value> {
    let all = c.tensors("tensors")?;
    // An empty list of numbers goes with everything, as it always has.
    let is_nothing = |c: &Call, t: &TensorId| matches!(c.low.dims(*t), [n] if *n == Dim::ZERO);
    let kept: Vec<TensorId> = all.iter().copied().filter(|t| !is_nothing(c, t)).collect();
    let tensors = if kept.is_empty() { all } else { kept };
    let Some(first) = tensors.first() else {
        return Err(c.fail("op", "no tensors"));
    };
    let axis = c.axis("dim", 0, c.low.dims(*first).len())?;
    let y = concatenated(c, &tensors, axis)?;
    c.made(y)
}

fn stack(c: &mut Call) -> Result<Value> {
    let tensors = c.tensors("tensors")?;
    let Some(first) = tensors.first() else {
        return Err(c.fail("op", "no tensors"));
    };
    let axis = c.axis("dim", 0, c.low.dims(*first).len() + 1)?;
    let operands: Vec<Value> = tensors.iter().map(|t| Value::Tensor(*t)).collect();
    let list: Vec<&Value> = operands.iter().collect();
    let dtype = c.low.promoted(&list)?;
    let mut rows = Vec::with_capacity(tensors.len());
    for operand in &operands {
        let value = c.low.operand(operand, dtype)?;
        rows.push(c.low.apply_unsqueeze(value, &[axis as i64])?);
    }
    let y = join(c, &rows, axis)?;
    c.made(y)
}

fn pad(c: &mut Call) -> Result<Value> {
    let mode = c.str("mode", "constant")?.to_string();
    let target = c.tensor("self")?;
    let x = c.value("self")?;
    let rank = c.low.b.rank(x);
    let pairs = c.dims("pad")?.unwrap_or_default();
    if pairs.len() % 2 != 0 || pairs.len() > 2 * rank {
        return Err(c.fail("shape", "`pad` does not fit the tensor"));
    }
    if mode != "constant" {
        return super::image::padded(c, target, &pairs, &mode);
    }
    // Pairs are from the last axis on. Every axis is named: ONNX Runtime turns a transposed `Pad` as if it had no `axes`.
    let mut pads = vec![Dim::ZERO; 2 * rank];
    for (i, pair) in pairs.chunks_exact(2).enumerate() {
        let axis = rank - 1 - i;
        pads[axis].clone_from(&pair[0]);
        pads[rank + axis].clone_from(&pair[1]);
    }
    let pads = c.low.int_vector(&pads)?;
    let value = c.get("value").cloned().unwrap_or(Value::Float(0.0));
    let value = c.low.operand(&value, c.low.b.ty(x).dtype)?;
    let attrs = Attrs::new().with("mode", "constant");
    let y = c.low.b.emit(&concat::PAD, &[x, pads, value], attrs)?;
    c.made(y)
}

/// Differences of neighbours along an axis, `n` times; of truth values, whether they differ.
fn diff(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", -1, c.low.dims(x).len())?;
    let mut parts = Vec::new();
    for name in ["prepend", "self", "append"] {
        if c.has(name) {
            parts.push(c.tensor(name)?);
        }
    }
    let mut y = concatenated(c, &parts, axis)?;
    for _ in 0..c.int("n", 1)?.clamp(0, 64) {
        let size = c.low.b.ty(y).dims[axis].clone();
        let less = size.sub(&Dim::ONE).larger(&Dim::ZERO);
        let part = |start: Dim, end: Dim| super::tensors::View::Slice {
            axis,
            start,
            end,
            step: 1,
        };
        let earlier = c.low.apply(&part(Dim::ZERO, less), y)?;
        let later = c.low.apply(&part(Dim::ONE.smaller(&size), size), y)?;
        y = match c.low.b.ty(y).dtype {
            ckpt_passes::ir::DType::Bool => c.low.emit(&logic::XOR, &[later, earlier])?,
            _ => c.low.emit(&arith::SUB, &[later, earlier])?,
        };
    }
    c.made(y)
}

fn flip(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let rank = c.low.b.rank(x);
    if c.ints("dims")?.is_none_or(|d| d.is_empty()) || rank == 0 {
        return c.made(x);
    }
    let axes: Vec<i64> = c.axes("dims", rank)?.iter().map(|a| *a as i64).collect();
    let vector = |c: &mut Call, n: i64| c.low.b.ints(&vec![n; axes.len()]);
    let (starts, ends, steps) = (vector(c, -1), vector(c, i64::MIN), vector(c, -1));
    let axes = c.low.b.ints(&axes);
    let y = c.low.emit(&slice::SLICE, &[x, starts, ends, axes, steps])?;
    c.made(y)
}

fn repeat(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let named = if c.has("repeats") { "repeats" } else { "dims" };
    let mut times = c.dims(named)?.unwrap_or_default();
    let rank = c.low.b.rank(x);
    if times.len() > rank {
        let new: Vec<i64> = (0..(times.len() - rank) as i64).collect();
        x = c.low.apply_unsqueeze(x, &new)?;
    }
    while times.len() < c.low.b.rank(x) {
        times.insert(0, Dim::ONE);
    }
    let y = if times.iter().all(Dim::is_one) {
        x
    } else {
        let times = c.low.int_vector(&times)?;
        c.low.emit(&concat::TILE, &[x, times])?
    };
    c.made(y)
}

/// Each element so often in a row.
fn repeat_each(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let times = c.dim("repeats", 1)?;
    let axis = if c.has("dim") {
        c.axis("dim", 0, c.low.b.rank(x))?
    } else {
        let all = c.low.b.ints(&[-1]);
        x = c.low.emit(&shape::RESHAPE, &[x, all])?;
        0
    };
    let dims = c.low.b.ty(x).dims.clone();
    let apart = c.low.apply_unsqueeze(x, &[axis as i64 + 1])?;
    let mut wide = dims.clone();
    wide.insert(axis + 1, times.clone());
    let wide = c.low.broadcast_to(apart, &wide)?;
    let mut flat = dims;
    flat[axis] = flat[axis].mul(&times);
    let y = c.low.apply(&super::tensors::View::Reshape(flat), wide)?;
    c.made(y)
}

fn roll(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let shifts = c.dims("shifts")?.unwrap_or_default();
    let listed = c.ints("dims")?.unwrap_or_default();
    let own = c.low.b.ty(x).dims.clone();
    let flat = listed.is_empty();
    let axes = if flat {
        let all = c.low.b.ints(&[-1]);
        x = c.low.emit(&shape::RESHAPE, &[x, all])?;
        vec![0]
    } else {
        let rank = own.len();
        listed
            .iter()
            .map(|a| c.in_rank(*a, rank))
            .collect::<Result<Vec<usize>>>()?
    };
    if axes.len() != shifts.len() {
        return Err(c.fail("shape", "`shifts` and `dims` have different lengths"));
    }
    for (axis, shift) in axes.into_iter().zip(shifts) {
        let size = c.low.b.ty(x).dims.get(axis).cloned();
        let size = size.ok_or_else(|| c.fail("axis", "a scalar has no axis"))?;
        if size.same(&Dim::ZERO) == Same::Yes {
            continue;
        }
        // The last `shift` come first.
        let cut = size.sub(&shift).modulo(&size);
        let part = |start: Dim, end: Dim| super::tensors::View::Slice {
            axis,
            start,
            end,
            step: 1,
        };
        let tail = c.low.apply(&part(cut.clone(), size), x)?;
        let head = c.low.apply(&part(Dim::ZERO, cut), x)?;
        x = join(c, &[tail, head], axis)?;
    }
    if flat {
        x = c.low.apply(&super::tensors::View::Reshape(own), x)?;
    }
    c.made(x)
}
