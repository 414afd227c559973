//! Tensors from nothing, copies, and changes of element type.

use super::pointwise::need;
use super::signature::{Call, Op};
use super::types::DEFAULT_FLOAT;
use super::{TensorId, Value};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Tensor, ValueId};
use ckpt_passes::ops::{fill, logic};

/// Elements of a table that is written into the model.
pub(super) const MAX_TABLE: f64 = (1 << 24) as f64;

pub const OPS: &[Op] = &[
    (
        "arange(end: s, *, dtype: d?, layout, device, pin_memory)",
        arange,
    ),
    (
        "arange(start: s, end: s, *, dtype: d?, layout, device, pin_memory)",
        arange,
    ),
    (
        "arange(start: s, end: s, step: s, *, dtype: d?, layout, device, pin_memory)",
        arange,
    ),
    ("clone(self: t, *, memory_format)", copied),
    ("copy(self: t, src: t, non_blocking)", copy),
    (
        "empty(size: I, *, dtype: d?, layout, device, pin_memory, memory_format)",
        |c| filled(c, 0.0),
    ),
    (
        "empty_like(self: t, *, dtype: d?, layout, device, pin_memory, memory_format)",
        |c| like(c, 0.0),
    ),
    (
        "empty_permuted(size: I, physical_layout: I, *, dtype: d?, layout, device, pin_memory)",
        |c| filled(c, 0.0),
    ),
    (
        "empty_strided(size: I, stride: I, *, dtype: d?, layout, device, pin_memory)",
        |c| filled(c, 0.0),
    ),
    ("eye(n: i, *, dtype: d?, layout, device, pin_memory)", eye),
    (
        "eye(n: i, m: i, *, dtype: d?, layout, device, pin_memory)",
        eye,
    ),
    ("fill(self: t, value: ts)", |c| full_like(c, "value")),
    (
        "full(size: I, fill_value: s, *, dtype: d?, layout, device, pin_memory)",
        full,
    ),
    (
        "full_like(self: t, fill_value: s, *, dtype: d?, layout, device, pin_memory, memory_format)",
        |c| full_like(c, "fill_value"),
    ),
    ("lift(self: t)", copied),
    ("lift_fresh(self: t)", copied),
    ("lift_fresh_copy(self: t)", copied),
    (
        "new_empty(self: t, size: I, *, dtype: d?, layout, device, pin_memory)",
        |c| new(c, 0.0),
    ),
    (
        "new_full(self: t, size: I, fill_value: s, *, dtype: d?, layout, device, pin_memory)",
        new_full,
    ),
    (
        "new_ones(self: t, size: I, *, dtype: d?, layout, device, pin_memory)",
        |c| new(c, 1.0),
    ),
    (
        "new_zeros(self: t, size: I, *, dtype: d?, layout, device, pin_memory)",
        |c| new(c, 0.0),
    ),
    (
        "ones(size: I, *, dtype: d?, layout, device, pin_memory)",
        |c| filled(c, 1.0),
    ),
    (
        "ones_like(self: t, *, dtype: d?, layout, device, pin_memory, memory_format)",
        |c| like(c, 1.0),
    ),
    (
        "scalar_tensor(s: s, *, dtype: d?, layout, device, pin_memory)",
        scalar_tensor,
    ),
    (
        "to(self: t, dtype: d, non_blocking: b?, copy: b?, memory_format)",
        to,
    ),
    (
        "to(self: t, other: t, non_blocking: b?, copy: b?, memory_format)",
        to_other,
    ),
    (
        "to(self: t, device: p?, dtype: d?, non_blocking: b?, copy: b?, memory_format)",
        to,
    ),
    (
        "to(self: t, *, dtype: d?, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format)",
        to,
    ),
    (
        "_to_copy(self: t, *, dtype: d?, layout, device, pin_memory, non_blocking: b?, memory_format)",
        to_copy,
    ),
    ("bool(self: t)", |c| to_type(c, DType::Bool)),
    ("double(self: t)", |c| to_type(c, DType::F64)),
    ("float(self: t)", |c| to_type(c, DType::F32)),
    ("long(self: t)", |c| to_type(c, DType::I64)),
    ("tril(self: t, diagonal: i?)", |c| triangle(c, 0)),
    ("triu(self: t, diagonal: i?)", |c| triangle(c, 1)),
    ("type_as(self: t, other: t)", to_other),
    ("zero(self: t)", |c| like(c, 0.0)),
    (
        "zeros(size: I, *, dtype: d?, layout, device, pin_memory)",
        |c| filled(c, 0.0),
    ),
    (
        "zeros_like(self: t, *, dtype: d?, layout, device, pin_memory, memory_format)",
        |c| like(c, 0.0),
    ),
];

/// A copy is memory of its own; its value is the same.
fn copied(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    c.made(x)
}

/// What `copy_` writes.
fn copy(c: &mut Call) -> Result<Value> {
    let x = c.value("src")?;
    c.made(x)
}

/// Start, end and step, by the number of numbers that are given.
fn arange(c: &mut Call) -> Result<Value> {
    let numbers: Vec<Value> = ["start", "end", "step"]
        .iter()
        .filter_map(|n| c.get(n).cloned())
        .collect();
    let floats = numbers.iter().any(|n| matches!(n, Value::Float(_)));
    let natural = if floats { DEFAULT_FLOAT } else { DType::I64 };
    let dtype = c.opt_dtype("dtype")?.unwrap_or(natural);
    let known: Option<Vec<f64>> = numbers.iter().map(number).collect();
    if let (true, Some(known)) = (floats, known) {
        return progression(c, dtype, &known);
    }
    let computed = if floats { DEFAULT_FLOAT } else { DType::I64 };
    let (zero, one) = (Value::Int(Dim::ZERO), Value::Int(Dim::ONE));
    let (start, end, step) = match numbers.as_slice() {
        [end] => (&zero, end, &one),
        [start, end] => (start, end, &one),
        [start, end, step] => (start, end, step),
        _ => return Err(c.fail("op", "no end")),
    };
    let ins = [
        c.low.scalar_of(start, computed)?,
        c.low.scalar_of(end, computed)?,
        c.low.scalar_of(step, computed)?,
    ];
    let y = c.low.emit(&fill::RANGE, &ins)?;
    let y = c.low.b.cast(y, dtype)?;
    c.made(y)
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Int(n) => n.as_const().map(|n| n as f64),
        Value::Float(x) => Some(*x),
        _ => None,
    }
}

/// `arange` of known floats, so that the size of its result is known, too.
fn progression(c: &mut Call, dtype: DType, numbers: &[f64]) -> Result<Value> {
    let (start, end, step) = match *numbers {
        [end] => (0.0, end, 1.0),
        [start, end] => (start, end, 1.0),
        [start, end, step] => (start, end, step),
        _ => return Err(c.fail("op", "no end")),
    };
    let count = ((end - start) / step).ceil();
    if !(0.0..=MAX_TABLE).contains(&count) {
        return Err(c
            .fail("shape", "no such range")
            .found(format!("{numbers:?}")));
    }
    let all = (0..count as i64).map(|i| start + step * i as f64);
    table(c, dtype, all)
}

/// A vector that is known when the file is read.
pub(super) fn table(
    c: &mut Call,
    dtype: DType,
    numbers: impl Iterator<Item = f64>,
) -> Result<Value> {
    let (mut bytes, mut count) = (Vec::new(), 0);
    for x in numbers {
        let number = Tensor::scalar(dtype, x);
        bytes.extend_from_slice(number.bytes().map_or(&[], |b| &b[..]));
        count += 1;
    }
    let name = format!("{}.table", c.low.b.prefix);
    let value = c
        .low
        .b
        .constant(&name, Tensor::new(dtype, vec![count], bytes));
    c.made(value)
}

fn of_sizes(c: &mut Call, value: &Value, dtype: DType, dims: &[Dim]) -> Result<Value> {
    let scalar = c.low.scalar_of(value, dtype)?;
    let y = c.low.broadcast_to(scalar, dims)?;
    c.made(y)
}

fn filled(c: &mut Call, value: f64) -> Result<Value> {
    let dtype = c.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT);
    let dims = c.dims("size")?.unwrap_or_default();
    of_sizes(c, &Value::Float(value), dtype, &dims)
}

fn full(c: &mut Call) -> Result<Value> {
    let value = need(c, "fill_value")?;
    let natural = c.low.promoted(&[&value])?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(natural);
    let dims = c.dims("size")?.unwrap_or_default();
    of_sizes(c, &value, dtype, &dims)
}

fn like(c: &mut Call, value: f64) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    let dims = c.low.dims(x).to_vec();
    of_sizes(c, &Value::Float(value), dtype, &dims)
}

fn full_like(c: &mut Call, name: &str) -> Result<Value> {
    let x = c.tensor("self")?;
    let value = need(c, name)?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    let dims = c.low.dims(x).to_vec();
    of_sizes(c, &value, dtype, &dims)
}

fn new(c: &mut Call, value: f64) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    let dims = c.dims("size")?.unwrap_or_default();
    of_sizes(c, &Value::Float(value), dtype, &dims)
}

fn new_full(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    let dims = c.dims("size")?.unwrap_or_default();
    let value = need(c, "fill_value")?;
    of_sizes(c, &value, dtype, &dims)
}

fn scalar_tensor(c: &mut Call) -> Result<Value> {
    let value = need(c, "s")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT);
    of_sizes(c, &value, dtype, &[])
}

fn eye(c: &mut Call) -> Result<Value> {
    let dtype = c.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT);
    let rows = c.dim("n", 0)?;
    let columns = if c.has("m") {
        c.dim("m", 0)?
    } else {
        rows.clone()
    };
    let places = |c: &mut Call, n: &Dim| {
        let n = c.low.int_scalar(n)?;
        let (zero, one) = (c.low.b.int(0), c.low.b.int(1));
        c.low.emit(&fill::RANGE, &[zero, n, one])
    };
    let (down, across) = (places(c, &rows)?, places(c, &columns)?);
    let down = c.low.apply_unsqueeze(down, &[1])?;
    let y = c.low.emit(&logic::EQUAL, &[down, across])?;
    let y = c.low.b.cast(y, dtype)?;
    c.made(y)
}

/// Another element type; a truth value is whether a number is not 0.
pub(super) fn cast(c: &mut Call, x: ValueId, dtype: DType) -> Result<ValueId> {
    c.low.b.cast(x, dtype)
}

fn converted(c: &mut Call, x: TensorId, dtype: DType) -> Result<Value> {
    if c.low.dtype(x) == dtype && !c.bool("copy", false)? {
        return Ok(Value::Tensor(x));
    }
    let value = c.low.read(x)?;
    let y = cast(c, value, dtype)?;
    c.made(y)
}

fn to(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    converted(c, x, dtype)
}

fn to_other(c: &mut Call) -> Result<Value> {
    let (x, other) = (c.tensor("self")?, c.tensor("other")?);
    let dtype = c.low.dtype(other);
    converted(c, x, dtype)
}

fn to_type(c: &mut Call, dtype: DType) -> Result<Value> {
    let x = c.tensor("self")?;
    converted(c, x, dtype)
}

fn to_copy(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.dtype(x));
    let value = c.low.read(x)?;
    let y = cast(c, value, dtype)?;
    c.made(y)
}

fn triangle(c: &mut Call, upper: i64) -> Result<Value> {
    let x = c.value("self")?;
    let k = c.dim("diagonal", 0)?;
    let k = c.low.int_scalar(&k)?;
    let attrs = Attrs::new().with("upper", upper);
    let y = c.low.b.emit(&fill::TRILU, &[x, k], attrs)?;
    c.made(y)
}
