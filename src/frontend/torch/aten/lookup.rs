//! Lookups and writes that are others in other words, and tables that are known when the file is read.

use super::Value;
use super::composed::id;
use super::signature::{Call, Op};
use super::types::DEFAULT_FLOAT;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim};
use ckpt_passes::ops::scatter;

/// Elements of a table that is written into the model.
const MAX_TABLE: i64 = super::create::MAX_TABLE as i64;

pub const OPS: &[Op] = &[
    ("argwhere(self: t)", |c| c.run("nonzero", [c.given("self")])),
    ("bitwise_left_shift(self: ts, other: s)", |c| {
        shifted(c, "mul")
    }),
    ("bitwise_right_shift(self: ts, other: s)", |c| {
        shifted(c, "floor_divide")
    }),
    ("__lshift__(self: ts, other: s)", |c| shifted(c, "mul")),
    ("__rshift__(self: ts, other: s)", |c| {
        shifted(c, "floor_divide")
    }),
    (
        "bucketize(self: ts, boundaries: t, *, out_int32: b?, right: b?)",
        |c| ranked(c, "boundaries", "self"),
    ),
    (
        "index_fill(self: t, dim: i, index: t, value: ts)",
        index_fill,
    ),
    (
        "linspace(start: f, end: f, steps: i, *, dtype: d?, layout, device, pin_memory)",
        |c| spaced(c, None),
    ),
    (
        "logspace(start: f, end: f, steps: i, base: f?, *, dtype: d?, layout, device, pin_memory)",
        |c| {
            let base = c.float("base", 10.0)?;
            spaced(c, Some(base))
        },
    ),
    (
        "masked_scatter(self: t, mask: t, source: t)",
        masked_scatter,
    ),
    ("masked_select(self: t, mask: t)", |c| {
        let both = Value::List(vec![c.given("self"), c.given("mask")]);
        let both = c.run("broadcast_tensors", [both])?;
        let [x, mask] = both.listed() else {
            return Err(c.fail("op", "two tensors are needed"));
        };
        c.run("index", [x.clone(), Value::List(vec![mask.clone()])])
    }),
    ("put(self: t, index: t, source: t, accumulate: b?)", |c| {
        let dims = c.low.dims(c.tensor("self")?).to_vec();
        let flat = c.run("flatten", [c.given("self")])?;
        let at = Value::List(vec![c.run("flatten", [c.given("index")])?]);
        let rows = c.run("flatten", [c.given("source")])?;
        let y = c.run("index_put", [flat, at, rows, c.given("accumulate")])?;
        let dims = dims.into_iter().map(Value::Int).collect();
        c.run("reshape", [y, Value::List(dims)])
    }),
    (
        "repeat_interleave(self: t, repeats: t, dim: i?, *, output_size: i?)",
        repeated,
    ),
    ("repeat_interleave(repeats: t, *, output_size: i?)", |c| {
        let places = repeats(c)?.1;
        let places = c.low.b.ints(&places);
        c.made(places)
    }),
    (
        "scatter(self: t, dim: i, index: t, src: ts, *, reduce: S)",
        |c| scattered(c, true),
    ),
    (
        "scatter(self: t, dim: i, index: t, value: s, *, reduce: S)",
        |c| scattered(c, true),
    ),
    (
        "scatter_reduce(self: t, dim: i, index: t, src: t, reduce: S, *, include_self: b?)",
        |c| {
            let own = c.bool("include_self", true)?;
            scattered(c, own)
        },
    ),
    (
        "searchsorted(sorted_sequence: t, self: ts, *, out_int32: b?, right: b?, side: S?, sorter: t?)",
        |c| ranked(c, "sorted_sequence", "self"),
    ),
    ("select_scatter(self: t, src: t, dim: i, index: i)", |c| {
        let copy = c.run("clone", [c.given("self")])?;
        let part = c.run("select", [copy.clone(), c.given("dim"), c.given("index")])?;
        c.run("copy_", [part, c.given("src")])?;
        Ok(copy)
    }),
    (
        "slice_scatter(self: t, src: t, dim: i?, start: i?, end: i?, step: i?)",
        |c| {
            let copy = c.run("clone", [c.given("self")])?;
            let named = ["dim", "start", "end", "step"].map(|n| c.given(n));
            let [dim, start, end, step] = named;
            let part = c.run("slice", [copy.clone(), dim, start, end, step])?;
            c.run("copy_", [part, c.given("src")])?;
            Ok(copy)
        },
    ),
    ("take(self: t, index: t)", |c| {
        let flat = c.run("flatten", [c.given("self")])?;
        c.run("index", [flat, Value::List(vec![c.given("index")])])
    }),
    ("take_along_dim(self: t, indices: t, dim: i?)", along),
    (
        "tril_indices(row: i, col: i, offset: i?, *, dtype: d?, layout, device, pin_memory)",
        |c| triangle(c, false),
    ),
    (
        "triu_indices(row: i, col: i, offset: i?, *, dtype: d?, layout, device, pin_memory)",
        |c| triangle(c, true),
    ),
    ("where(condition: t)", |c| {
        let places = c.run("nonzero", [c.given("condition")])?;
        c.run("unbind", [places, 1.into()])
    }),
];

/// Times, or rounded down over, a power of two.
fn shifted(c: &mut Call, op: &str) -> Result<Value> {
    let by = c.int("other", 0)?;
    let float = match c.get("self") {
        Some(Value::Tensor(t)) => c.low.dtype(*t).is_float(),
        _ => false,
    };
    if float || !(0..=62).contains(&by) {
        return Err(c.unsupported("this shift"));
    }
    c.run(op, [c.given("self"), (1i64 << by).into()])
}

/// How many of a sorted vector come before each element.
fn ranked(c: &mut Call, sorted: &str, values: &str) -> Result<Value> {
    let side = c.str("side", "")?.to_string();
    let right = c.bool("right", false)? || side == "right";
    if c.has("sorter") || c.low.dims(c.tensor(sorted)?).len() != 1 {
        return Err(c.unsupported("a sequence that is no vector"));
    }
    let each = match c.given(values) {
        Value::Tensor(t) => c.run("unsqueeze", [t.into(), (-1).into()])?,
        number => number,
    };
    // What is no number comes behind all others.
    let behind = if right { "gt" } else { "ge" };
    let behind = c.run(behind, [c.given(sorted), each])?;
    let before = c.run("logical_not", [behind])?;
    let count = c.run("sum", [before, Value::ints(&[-1])])?;
    match c.bool("out_int32", false)? {
        true => c.run("to", [count, Value::DType(DType::I32)]),
        false => Ok(count),
    }
}

fn index_fill(c: &mut Call) -> Result<Value> {
    let (x, at) = (c.tensor("self")?, c.tensor("index")?);
    let dims = c.low.dims(x).to_vec();
    let axis = c.axis("dim", 0, dims.len())?;
    let mut wanted = dims;
    if let Some(size) = wanted.get_mut(axis) {
        *size = c.low.dims(at).first().cloned().unwrap_or(Dim::ONE);
    }
    let dtype = c.low.dtype(x);
    let value = c.low.operand(&c.given("value"), dtype)?;
    let rows = c.low.broadcast_to(value, &wanted)?;
    let rows = c.made(rows)?;
    let at = c.run("atleast_1d", [at.into()])?;
    c.run("index_copy", [x.into(), (axis as i64).into(), at, rows])
}

/// Numbers at equal distances, or powers of `base` at such.
fn spaced(c: &mut Call, base: Option<f64>) -> Result<Value> {
    let (start, end) = (c.float("start", 0.0)?, c.float("end", 1.0)?);
    let steps = c.int("steps", 100)?;
    let dtype = c.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT);
    if !(0..=MAX_TABLE).contains(&steps) || !dtype.is_float() {
        return Err(c.unsupported("this many steps, or steps of integers,"));
    }
    let step = if steps > 1 {
        (end - start) / (steps - 1) as f64
    } else {
        0.0
    };
    // From both ends to the middle, as PyTorch counts.
    let number = |i: i64| match i < steps / 2 || steps == 1 {
        true => start + step * i as f64,
        false => end - step * (steps - 1 - i) as f64,
    };
    let all = (0..steps).map(|i| base.map_or(number(i), |b| b.powf(number(i))));
    super::create::table(c, dtype, all)
}

/// Where the mask is set, the elements of `source` one after the other.
fn masked_scatter(c: &mut Call) -> Result<Value> {
    let dims: Vec<Value> = c
        .low
        .dims(c.tensor("self")?)
        .iter()
        .cloned()
        .map(Value::Int)
        .collect();
    let mask = c.run("expand", [c.given("mask"), Value::List(dims.clone())])?;
    let flat = c.run("flatten", [mask.clone()])?;
    let places = c.run("cumsum", [flat, 0.into()])?;
    let places = c.run("sub", [places, 1.into()])?;
    let places = c.run("clamp_min", [places, 0.into()])?;
    let taken = c.run("take", [c.given("source"), places])?;
    let taken = c.run("reshape", [taken, Value::List(dims)])?;
    c.run("where", [mask, taken, c.given("self")])
}

/// The numbers of a known vector `repeats`, and each place as often as its number says.
fn repeats(c: &mut Call) -> Result<(Vec<i64>, Vec<i64>)> {
    let times = c.tensor("repeats")?;
    let known = c.low.known(times)?;
    let numbers: Option<Vec<i64>> = known.and_then(|k| k.iter().map(Dim::as_const).collect());
    let few = |n: &Vec<i64>| {
        let all = n.iter().try_fold(0i64, |sum, n| sum.checked_add(*n));
        n.iter().all(|n| *n >= 0) && all.is_some_and(|sum| sum <= MAX_TABLE)
    };
    let Some(numbers) = numbers.filter(few) else {
        return Err(c
            .unsupported("a number of repeats that the data decides")
            .help("repeat by a number, or gather by indices that are an input"));
    };
    let each = numbers.iter().enumerate();
    let places = each.flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n as usize));
    let places = places.collect();
    Ok((numbers, places))
}

/// Each slice along an axis as often as a known vector says.
fn repeated(c: &mut Call) -> Result<Value> {
    let (numbers, places) = repeats(c)?;
    let (x, axis) = match c.has("dim") {
        true => (c.given("self"), c.int("dim", 0)?),
        false => (c.run("flatten", [c.given("self")])?, 0),
    };
    if let [one] = numbers.as_slice() {
        return c.run("repeat_interleave", [x, (*one).into(), axis.into()]);
    }
    let dims = c.low.dims(id(c, &x)?).to_vec();
    let at = c.in_rank(axis, dims.len())?;
    if dims.get(at) != Some(&Dim::from(numbers.len() as i64)) {
        return Err(c.fail("shape", "`repeats` does not fit the axis"));
    }
    let places = c.low.b.ints(&places);
    let places = c.made(places)?;
    c.run("index_select", [x, axis.into(), places])
}

/// Updates combined with what is at their places, or, without `own`, with each other alone.
fn scattered(c: &mut Call, own: bool) -> Result<Value> {
    let how = c.str("reduce", "sum")?.to_string();
    let (reduction, neutral) = match how.as_str() {
        "sum" | "add" | "mean" => ("add", 0.0),
        "prod" | "multiply" => ("mul", 1.0),
        "amax" => ("max", f64::NEG_INFINITY),
        "amin" => ("min", f64::INFINITY),
        other => return Err(c.unsupported(format!("`reduce` {other}"))),
    };
    let named = if c.has("value") { "value" } else { "src" };
    let (x, at) = (c.tensor("self")?, c.value("index")?);
    let dtype = c.low.dtype(x);
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let src = c.given(named);
    let mut updates = c.low.operand(&src, dtype)?;
    let dims = c.low.b.ty(at).dims.clone();
    if c.low.b.rank(updates) == 0 {
        updates = c.low.broadcast_to(updates, &dims)?;
    } else if !ckpt_passes::ir::build::same_dims(&c.low.b.ty(updates).dims, &dims) {
        // Only as much of the source counts as there are places.
        let t = c.low.fresh(updates);
        let mut part = t;
        for (i, size) in dims.iter().enumerate() {
            part = super::views::sliced(c, part, i, &Dim::ZERO, size, 1)?;
        }
        updates = c.low.read(part)?;
    }
    let attrs = |reduction: &'static str| {
        Attrs::new()
            .with("axis", axis as i64)
            .with("reduction", reduction)
    };
    let put = &scatter::SCATTER_ELEMENTS;
    let value = c.low.read(x)?;
    let target = match own {
        true => value,
        false => {
            let fill = c.low.b.scalar(dtype, neutral);
            let fill = c.low.broadcast_to(fill, &dims)?;
            c.low.b.emit(put, &[value, at, fill], attrs("none"))?
        }
    };
    let mut y = c
        .low
        .b
        .emit(put, &[target, at, updates], attrs(reduction))?;
    if how == "mean" {
        let begin = c.low.b.filled_like(value, if own { 1.0 } else { 0.0 })?;
        let one = c.low.b.scalar(dtype, 1.0);
        let ones = c.low.broadcast_to(one, &dims)?;
        let count = c.low.b.emit(put, &[begin, at, ones], attrs("add"))?;
        let count = c.low.emit(&ckpt_passes::ops::extreme::MAX, &[count, one])?;
        y = match dtype.is_float() {
            true => c.low.b.div(y, count)?,
            false => return Err(c.unsupported("a mean of integers")),
        };
    }
    c.made(y)
}

/// `gather` along an axis, the other sizes of both broadcast.
fn along(c: &mut Call) -> Result<Value> {
    if !c.has("dim") {
        return c.run("take", [c.given("self"), c.given("indices")]);
    }
    let (x, at) = (c.tensor("self")?, c.tensor("indices")?);
    let (own, places) = (c.low.dims(x).to_vec(), c.low.dims(at).to_vec());
    let axis = c.axis("dim", 0, own.len())?;
    if own.len() != places.len() || own.is_empty() {
        return Err(c.fail("shape", "the tensors have different ranks"));
    }
    let without = |dims: &[Dim]| {
        let mut dims = dims.to_vec();
        dims[axis] = Dim::ONE;
        dims
    };
    let both = super::views::broadcast(c, &without(&own), &without(&places))?;
    let sized = |c: &mut Call, t: Value, size: &Dim| {
        let mut dims = both.clone();
        dims[axis] = size.clone();
        let dims = dims.into_iter().map(Value::Int).collect();
        c.run("expand", [t, Value::List(dims)])
    };
    let x = sized(c, x.into(), &own[axis])?;
    let at = sized(c, at.into(), &places[axis])?;
    c.run("gather", [x, (axis as i64).into(), at])
}

/// Rows and columns of the elements on and below (or above) a diagonal, row by row.
fn triangle(c: &mut Call, upper: bool) -> Result<Value> {
    let (rows, columns) = (c.int("row", 0)?, c.int("col", 0)?);
    let offset = c.int("offset", 0)?;
    let within = rows.checked_mul(columns).is_some_and(|n| n <= MAX_TABLE);
    if rows < 0 || columns < 0 || !within {
        return Err(c.unsupported("a table of this size"));
    }
    let inside = |i: i64, j: i64| match upper {
        true => j - i >= offset,
        false => j - i <= offset,
    };
    let all = (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j)));
    let places: Vec<(i64, i64)> = all.filter(|(i, j)| inside(*i, *j)).collect();
    let list: Vec<i64> = places
        .iter()
        .map(|p| p.0)
        .chain(places.iter().map(|p| p.1))
        .collect();
    let list = c.low.b.ints(&list);
    let list = c.made(list)?;
    let y = c.run("reshape", [list, Value::ints(&[2, places.len() as i64])])?;
    match c.opt_dtype("dtype")? {
        Some(dtype) => c.run("to", [y, Value::DType(dtype)]),
        None => Ok(y),
    }
}
