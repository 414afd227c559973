//! Tensors from nothing, copies, and changes of element type.

use super::super::value::{TensorId, Value};
use super::lowering::{DEFAULT_FLOAT, Lowering};
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::analysis::ranges::{self, Ranges};
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::ir::{DType, Dim, Tensor};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::fill;

/// The largest number of elements of a table that is written into the model.
pub(super) const MAX_TABLE: i64 = 1 << 24;

pub const FORMULAS: &[Formula] = &[
    "_to_copy(self: t, *, dtype: d?, layout, device, pin_memory, non_blocking: b?, memory_format) => \
     given(dtype) ? in_type(self, dtype) : clone(self)",
    "bool(self: t) => to(self, bool)",
    "double(self: t) => to(self, float64)",
    "eye(n: i, *, dtype: d?, layout, device, pin_memory); \
     eye(n: i, m: i, *, dtype: d?, layout, device, pin_memory) => \
     rows = whole(n); zero = whole(0); one = whole(1); down = Range(zero, rows, one); \
     columns = given(m) ? whole(m) : rows; across = Range(zero, columns, one); \
     in_type(Equal(Unsqueeze(down, [1]), across), given(dtype) ? dtype : float32)",
    "float(self: t) => to(self, float32)",
    "hamming_window(window_length: i, periodic: b = true, *, dtype: d?, layout, device, pin_memory) => \
     raised_cosine(window_length, periodic, 0.54, dtype)",
    "hann_window(window_length: i, periodic: b = true, *, dtype: d?, layout, device, pin_memory) => \
     raised_cosine(window_length, periodic, 0.5, dtype)",
    "raised_cosine(length: i, periodic: b, middle: f, dtype: d?) => period = periodic ? length : length - 1; \
     in_type(middle - cos(arange(length) * (2.0 * pi / period)) * (1.0 - middle), given(dtype) ? dtype : float32)",
    "long(self: t) => to(self, int64)",
    "scalar_tensor(s: s, *, dtype: d?, layout, device, pin_memory) => in_type(s, given(dtype) ? dtype : float32)",
    "tril(self: t, diagonal: i = 0) => Trilu(self, whole(diagonal), upper=0)",
    "triu(self: t, diagonal: i = 0) => Trilu(self, whole(diagonal), upper=1)",
];

pub const OPS: &[Op] = &[
    (
        "arange(end: sn, *, dtype: d?, layout, device, pin_memory); \
         arange(start: sn, end: sn, *, dtype: d?, layout, device, pin_memory); \
         arange(start: sn, end: sn, step: s, *, dtype: d?, layout, device, pin_memory)",
        arange,
    ),
    (
        "{clone,lift,lift_fresh,lift_fresh_copy}(self: t, *, memory_format); \
         copy(self: t, src: t, non_blocking)",
        copied,
    ),
    (
        "{empty,ones,zeros}(size: N, *, dtype: d?, layout, device, pin_memory, memory_format); \
         {empty,ones,zeros}_like(self: t, *, dtype: d?, layout, device, pin_memory, memory_format); \
         empty_permuted(size: N, physical_layout: I, *, dtype: d?, layout, device, pin_memory); \
         empty_strided(size: N, stride: I, *, dtype: d?, layout, device, pin_memory); \
         fill(self: t, value: ts); \
         full(size: N, fill_value: ts, *, dtype: d?, layout, device, pin_memory); \
         full_like(self: t, fill_value: ts, *, dtype: d?, layout, device, pin_memory, memory_format); \
         new_{empty,ones,zeros}(self: t, size: N, *, dtype: d?, layout, device, pin_memory); \
         new_full(self: t, size: N, fill_value: ts, *, dtype: d?, layout, device, pin_memory); \
         zero(self: t)",
        filled,
    ),
    (
        "to(self: t, dtype: d, non_blocking: b?, copy: b?, memory_format); \
         to(self: t, device: p?, dtype: d?, non_blocking: b?, copy: b?, memory_format); \
         to(self: t, *, dtype: d?, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format)",
        to,
    ),
    (
        "to(self: t, other: t, non_blocking: b?, copy: b?, memory_format); \
         type_as(self: t, other: t)",
        to_other,
    ),
];

/// Lowers a copy: the same value in memory of its own.
fn copied(c: &mut Call) -> Result<Value> {
    let x = c.value(c.either(&["src", "self"]))?;
    c.made(x)
}

/// Lowers `arange` of one to three numbers.
fn arange(c: &mut Call) -> Result<Value> {
    let given = |name: &str, natural: i64| match c.given(name) {
        Value::None => Value::from(natural),
        number => number,
    };
    let numbers = [given("start", 0), given("end", 0), given("step", 1)];
    let floats = numbers.iter().any(|n| matches!(n, Value::Float(_)));
    let computed = if floats { DEFAULT_FLOAT } else { DType::I64 };
    let dtype = c.dtype_or(computed)?;
    let known = numbers.each_ref().map(Value::number);
    if let (true, [Some(start), Some(end), Some(step)]) = (floats, known) {
        return progression(c, dtype, start, end, step);
    }
    // Whole numbers are counted as such, so that the size of the result is known.
    let whole = |number: &Value| match number {
        Value::Int(n) => Some(Value::Int(n.clone())),
        Value::Float(x) if x.fract() == 0.0 && x.abs() < MAX_TABLE as f64 => {
            Some(Value::from(*x as i64))
        }
        _ => None,
    };
    let (computed, numbers) = match numbers.each_ref().map(whole) {
        [Some(start), Some(end), Some(step)] => (DType::I64, [start, end, step]),
        _ => (computed, numbers),
    };
    let mut ins = Vec::with_capacity(3);
    for number in &numbers {
        ins.push(c.low.operand(number, computed)?);
    }
    let y = c.emit(&fill::RANGE, &ins)?;
    let y = c.low.b.cast(y, dtype)?;
    c.made(y)
}

/// Lowers `arange` of known floats, so that the size of its result is known, too.
fn progression(c: &mut Call, dtype: DType, start: f64, end: f64, step: f64) -> Result<Value> {
    let count = ((end - start) / step).ceil();
    if !(0.0..=MAX_TABLE as f64).contains(&count) {
        return Err(c
            .fail("shape", "no such range")
            .found(format!("{:?}", [start, end, step])));
    }
    let all = (0..count as i64).map(|i| start + step * i as f64);
    table(c, dtype, all)
}

/// Returns a vector that is known when the file is read.
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
    let tensor = Tensor::new(dtype, vec![count], bytes);
    let value = c.low.b.constant(&name, tensor);
    c.made(value)
}

/// Returns a tensor of these sizes filled with a number.
fn of_sizes(c: &mut Call, value: &Value, dtype: DType, dims: &[Dim]) -> Result<Value> {
    let scalar = c.low.operand(value, dtype)?;
    let y = c.low.broadcast_to(scalar, dims)?;
    c.made(y)
}

/// Lowers `full`, `ones`, `zeros` and `empty` in all their forms: with the sizes given or those of `self`, in the type given
/// or in that of `self`.
fn filled(c: &mut Call) -> Result<Value> {
    let number = match c.get(c.either(&["fill_value", "value"])) {
        Some(number) => number.clone(),
        None => Value::Float(f64::from(u8::from(c.name.contains("ones")))),
    };
    let natural = match c.get("self") {
        Some(_) => c.low.dtype(c.tensor("self")?),
        None if c.name == "full" => c.low.promoted(&[&number])?,
        None => DEFAULT_FLOAT,
    };
    let dtype = c.dtype_or(natural)?;
    let dims = match c.dims("size")? {
        Some(dims) => dims,
        None => c.sizes("self")?,
    };
    of_sizes(c, &number, dtype, &dims)
}

/// Returns a tensor in another element type, or itself if it has that type already.
fn converted(c: &mut Call, x: TensorId, dtype: DType) -> Result<Value> {
    if c.low.dtype(x) == dtype && !c.bool("copy", false)? {
        return Ok(Value::Tensor(x));
    }
    let value = c.low.read(x)?;
    let y = c.low.cast(value, dtype)?;
    c.made(y)
}

fn to(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dtype = c.dtype_or(c.low.dtype(x))?;
    converted(c, x, dtype)
}

fn to_other(c: &mut Call) -> Result<Value> {
    let (x, dtype) = (c.tensor("self")?, c.low.dtype(c.tensor("other")?));
    converted(c, x, dtype)
}

impl Lowering<'_> {
    /// Returns a tensor of one element as a plain number of the program: beside tensors it does not decide the element type.
    ///
    /// # Errors
    /// A tensor whose value is not certain.
    pub fn as_number(&mut self, tensor: TensorId) -> Result<TensorId> {
        let number = self.snapshot(tensor)?;
        self.plain.insert(number);
        Ok(number)
    }

    /// Records the ranges of the named sizes that the inputs have. Ops may mean something else outside of them.
    ///
    /// # Errors
    /// A range without sizes.
    pub fn declare_ranges(&mut self, ranges: &Ranges) -> Result<()> {
        let kinds = dim_kinds(self.b.graph);
        for (name, range) in ranges {
            if kinds.contains_key(name) && !ranges::narrow(self.b.graph, name, *range)? {
                bail!("pt2", "no size `{name}` is within its range");
            }
        }
        Ok(())
    }
}
