//! Lookups and writes by index.

use super::pointwise::need;
use super::signature::{Call, Op};
use super::tensors::View;
use super::{Value, reduce};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::{concat, index, logic, scatter, select, shape};

pub const OPS: &[Op] = &[
    ("argsort(self: t, dim: i?, descending: b?)", |c| {
        sorted(c).map(second)
    }),
    (
        "argsort(self: t, *, stable: b, dim: i?, descending: b?)",
        |c| sorted(c).map(second),
    ),
    (
        "embedding(weight: t, indices: t, padding_idx: i?, scale_grad_by_freq: b?, sparse: b?)",
        embedding,
    ),
    (
        "gather(self: t, dim: i, index: t, *, sparse_grad: b?)",
        gather,
    ),
    ("histc(self: t, bins: i?, min: f?, max: f?)", histogram),
    ("index(self: t, indices: l)", by_tensors),
    (
        "index_add(self: t, dim: i, index: t, source: t, *, alpha: s?)",
        index_add,
    ),
    (
        "index_copy(self: t, dim: i, index: t, source: t)",
        index_copy,
    ),
    (
        "index_put(self: t, indices: l, values: t, accumulate: b?)",
        index_put,
    ),
    ("index_select(self: t, dim: i, index: t)", index_select),
    ("nonzero(self: t)", nonzero),
    ("one_hot(self: t, num_classes: i?)", one_hot),
    ("scatter(self: t, dim: i, index: t, src: t)", |c| {
        scattered(c, "src", "none")
    }),
    ("scatter(self: t, dim: i, index: t, value: s)", |c| {
        scattered(c, "value", "none")
    }),
    ("scatter_add(self: t, dim: i, index: t, src: t)", |c| {
        scattered(c, "src", "add")
    }),
    ("sort(self: t, dim: i?, descending: b?)", sorted),
    (
        "sort(self: t, *, stable: b?, dim: i?, descending: b?)",
        sorted,
    ),
    (
        "topk(self: t, k: i, dim: i?, largest: b?, sorted: b?)",
        topk,
    ),
];

/// Rows of a table. No gradient goes to the row of `padding_idx`.
fn embedding(c: &mut Call) -> Result<Value> {
    let (table, rows) = (c.value("weight")?, c.value("indices")?);
    if c.bool("scale_grad_by_freq", false)? {
        return Err(c.unsupported("`scale_grad_by_freq`"));
    }
    let mut y = c
        .low
        .b
        .emit(&index::GATHER, &[table, rows], Attrs::new().with("axis", 0))?;
    let padding = c.int("padding_idx", -1)?;
    if padding >= 0 && c.low.depends(y) {
        let dtype = c.low.b.ty(rows).dtype;
        let padding = c.low.scalar_of(&Value::Int(Dim::from(padding)), dtype)?;
        let is_padding = c.low.emit(&logic::EQUAL, &[rows, padding])?;
        let is_padding = c.low.apply_unsqueeze(is_padding, &[-1])?;
        let fixed = c.low.stopped(y)?;
        y = c.low.emit(&logic::WHERE, &[is_padding, fixed, y])?;
    }
    c.made(y)
}

fn gather(c: &mut Call) -> Result<Value> {
    let (x, at) = (c.value("self")?, c.value("index")?);
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let y = c.low.b.emit(&index::GATHER_ELEMENTS, &[x, at], attrs)?;
    c.made(y)
}

fn index_select(c: &mut Call) -> Result<Value> {
    let (x, at) = (c.value("self")?, c.value("index")?);
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let y = c.low.b.emit(&index::GATHER, &[x, at], attrs)?;
    c.made(y)
}

/// Where an index of several tensors looks: the axes that it takes the place of, and the places, [.., axes].
struct Places {
    axes: Vec<usize>,
    tensors: Vec<ValueId>,
}

/// Indices with masks taken apart into the places where they are true.
fn places(c: &mut Call, rank: usize) -> Result<Places> {
    let mut found = Places {
        axes: Vec::new(),
        tensors: Vec::new(),
    };
    let mut axis = 0;
    for given in c.opt_tensors("indices")? {
        let Some(tensor) = given else {
            axis += 1;
            continue;
        };
        let value = c.low.read(tensor)?;
        let dtype = c.low.b.ty(value).dtype;
        if dtype == DType::Bool {
            let count = c.low.b.rank(value);
            let all = c.low.emit(&index::NON_ZERO, &[value])?;
            c.low.read_sizes(all);
            for i in 0..count {
                let row = View::Slice {
                    axis: 0,
                    start: Dim::from(i as i64),
                    end: Dim::from(i as i64 + 1),
                    step: 1,
                };
                let row = c.low.apply(&row, all)?;
                let row = c.low.apply(&View::Squeeze(vec![0]), row)?;
                found.axes.push(axis);
                found.tensors.push(row);
                axis += 1;
            }
            continue;
        }
        if dtype.is_float() {
            return Err(c.fail("type", "an index is no integer"));
        }
        found.axes.push(axis);
        found.tensors.push(value);
        axis += 1;
    }
    if found.axes.is_empty() || axis > rank {
        return Err(c.fail("shape", "the indices do not fit the tensor"));
    }
    Ok(found)
}

/// The places as one tensor [.., axes], and the sizes before its last axis.
fn joined(c: &mut Call, tensors: &[ValueId]) -> Result<(ValueId, Vec<Dim>)> {
    let mut dims: Vec<Dim> = Vec::new();
    for t in tensors {
        let own = c.low.b.ty(*t).dims.clone();
        dims = super::views::broadcast(c, &dims, &own)?;
    }
    let mut columns = Vec::with_capacity(tensors.len());
    for t in tensors {
        let wide = c.low.b.cast(*t, DType::I64)?;
        let wide = c.low.broadcast_to(wide, &dims)?;
        columns.push(c.low.apply_unsqueeze(wide, &[-1])?);
    }
    let all = match columns.as_slice() {
        [one] => *one,
        many => {
            let attrs = Attrs::new().with("axis", dims.len() as i64);
            c.low.b.emit(&concat::CONCAT, many, attrs)?
        }
    };
    Ok((all, dims))
}

/// The indexed axes first, the others in order behind them.
fn to_front(axes: &[usize], rank: usize) -> Vec<i64> {
    let rest = (0..rank).filter(|a| !axes.contains(a));
    axes.iter().copied().chain(rest).map(|a| a as i64).collect()
}

fn by_tensors(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let rank = c.low.b.rank(x);
    let found = places(c, rank)?;
    if let ([axis], [places]) = (found.axes.as_slice(), found.tensors.as_slice()) {
        let attrs = Attrs::new().with("axis", *axis as i64);
        let y = c.low.b.emit(&index::GATHER, &[x, *places], attrs)?;
        return c.made(y);
    }
    let (all, dims) = joined(c, &found.tensors)?;
    let front = shape::transpose(&mut c.low.b, x, to_front(&found.axes, rank))?;
    let y = c.low.emit(&index::GATHER_ND, &[front, all])?;
    // Next to each other, the indexed axes are replaced where they stand; else the new ones come first.
    let first = found.axes[0];
    let adjacent = found.axes.windows(2).all(|w| w[0] + 1 == w[1]);
    let y = if adjacent && first > 0 {
        let new = dims.len();
        let perm = (new..new + first)
            .chain(0..new)
            .chain(new + first..c.low.b.rank(y));
        let perm = perm.map(|a| a as i64).collect();
        shape::transpose(&mut c.low.b, y, perm)?
    } else {
        y
    };
    c.made(y)
}

fn index_put(c: &mut Call) -> Result<Value> {
    let (x, values) = (c.value("self")?, c.value("values")?);
    let rank = c.low.b.rank(x);
    let found = places(c, rank)?;
    let (all, dims) = joined(c, &found.tensors)?;
    let perm = to_front(&found.axes, rank);
    let front = shape::transpose(&mut c.low.b, x, perm.clone())?;
    let rest = c.low.b.ty(front).dims[found.axes.len()..].to_vec();
    let first = found.axes[0];
    let adjacent = found.axes.windows(2).all(|w| w[0] + 1 == w[1]);
    let values = c.low.b.cast(values, c.low.b.ty(x).dtype)?;
    // The values have the sizes that reading at these places would give.
    let (wanted, back) = if adjacent && first > 0 {
        let wanted = [&rest[..first], &dims, &rest[first..]].concat();
        let (new, end) = (dims.len(), wanted.len());
        let back = (first..first + new).chain(0..first).chain(first + new..end);
        (wanted, back.map(|a| a as i64).collect())
    } else {
        let wanted = [dims, rest].concat();
        let back = (0..wanted.len() as i64).collect();
        (wanted, back)
    };
    let values = c.low.broadcast_to(values, &wanted)?;
    let values = shape::transpose(&mut c.low.b, values, back)?;
    let reduction = if c.bool("accumulate", false)? {
        "add"
    } else {
        "none"
    };
    let attrs = Attrs::new().with("reduction", reduction);
    let y = c
        .low
        .b
        .emit(&scatter::SCATTER_ND, &[front, all, values], attrs)?;
    let y = turned_back(c, y, &perm)?;
    c.made(y)
}

fn turned_back(c: &mut Call, y: ValueId, perm: &[i64]) -> Result<ValueId> {
    let mut inverse = vec![0; perm.len()];
    for (i, p) in perm.iter().enumerate() {
        inverse[*p as usize] = i as i64;
    }
    shape::transpose(&mut c.low.b, y, inverse)
}

/// Rows along an axis, written or added at places of that axis.
fn rows_put(c: &mut Call, reduction: &str) -> Result<Value> {
    let (x, at, mut rows) = (c.value("self")?, c.value("index")?, c.value("source")?);
    if let Some(alpha) = c.get("alpha").cloned() {
        let alpha = c.low.scalar_of(&alpha, c.low.b.ty(rows).dtype)?;
        rows = c.low.b.mul(rows, alpha)?;
    }
    let rank = c.low.b.rank(x);
    let axis = c.axis("dim", 0, rank)?;
    let perm = to_front(&[axis], rank);
    let front = shape::transpose(&mut c.low.b, x, perm.clone())?;
    let rows = shape::transpose(&mut c.low.b, rows, perm.clone())?;
    let at = c.low.b.cast(at, DType::I64)?;
    let at = c.low.apply_unsqueeze(at, &[-1])?;
    let attrs = Attrs::new().with("reduction", reduction);
    let y = c
        .low
        .b
        .emit(&scatter::SCATTER_ND, &[front, at, rows], attrs)?;
    let y = turned_back(c, y, &perm)?;
    c.made(y)
}

fn index_add(c: &mut Call) -> Result<Value> {
    rows_put(c, "add")
}

fn index_copy(c: &mut Call) -> Result<Value> {
    rows_put(c, "none")
}

fn scattered(c: &mut Call, source: &str, reduction: &str) -> Result<Value> {
    let (x, at) = (c.value("self")?, c.value("index")?);
    let axis = c.axis("dim", 0, c.low.b.rank(x))?;
    let given = need(c, source)?;
    let updates = c.low.operand(&given, c.low.b.ty(x).dtype)?;
    let updates = match given {
        Value::Tensor(_) => updates,
        _ => {
            let dims = c.low.b.ty(at).dims.clone();
            c.low.broadcast_to(updates, &dims)?
        }
    };
    let attrs = Attrs::new()
        .with("axis", axis as i64)
        .with("reduction", reduction);
    let y = c
        .low
        .b
        .emit(&scatter::SCATTER_ELEMENTS, &[x, at, updates], attrs)?;
    c.made(y)
}

fn nonzero(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let places = c.low.emit(&index::NON_ZERO, &[x])?;
    c.low.read_sizes(places);
    let y = shape::transpose(&mut c.low.b, places, vec![1, 0])?;
    c.made(y)
}

fn one_hot(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let classes = c.dim("num_classes", -1)?;
    if classes == Dim::from(-1) {
        return Err(c.unsupported("a number of classes that the data decides"));
    }
    let classes = c.low.int_scalar(&classes)?;
    let values = c.low.b.ints(&[0, 1]);
    let attrs = Attrs::new().with("axis", -1);
    let y = c
        .low
        .b
        .emit(&scatter::ONE_HOT, &[x, classes, values], attrs)?;
    c.made(y)
}

fn chosen(c: &mut Call, x: ValueId, k: &Dim, largest: bool) -> Result<Value> {
    let axis = c.axis("dim", -1, c.low.b.rank(x))?;
    let k = c.low.int_vector(std::slice::from_ref(k))?;
    let attrs = Attrs::new()
        .with("axis", axis as i64)
        .with("largest", i64::from(largest))
        .with("sorted", 1);
    let ins = vec![Some(x), Some(k)];
    let outs = c.low.b.emit_n(&select::TOP_K, ins, attrs, 2)?;
    Ok(Value::Tuple(vec![c.made(outs[0])?, c.made(outs[1])?]))
}

fn topk(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let k = c.dim("k", 1)?;
    let largest = c.bool("largest", true)?;
    chosen(c, x, &k, largest)
}

/// Equal elements stay in order, which PyTorch promises only of stable sorts.
fn sorted(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    if c.low.b.rank(x) == 0 {
        return Err(c.unsupported("a scalar"));
    }
    let axis = c.axis("dim", -1, c.low.b.rank(x))?;
    let size = c.low.b.ty(x).dims[axis].clone();
    let down = c.bool("descending", false)?;
    chosen(c, x, &size, down)
}

fn second(pair: Value) -> Value {
    match pair {
        Value::Tuple(mut items) if items.len() == 2 => items.remove(1),
        other => other,
    }
}

/// How many elements fall into each of `bins` equal parts of [min, max]; others are not counted.
fn histogram(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let dtype = c.low.b.ty(x).dtype;
    let bins = c.int("bins", 100)?;
    let (least, most) = (c.float("min", 0.0)?, c.float("max", 0.0)?);
    if least >= most || bins < 1 || !dtype.is_float() {
        return Err(c.unsupported("a range that the data decides"));
    }
    let all = c.low.b.ints(&[-1]);
    let x = c.low.emit(&shape::RESHAPE, &[x, all])?;
    let (low, high) = (c.low.b.scalar(dtype, least), c.low.b.scalar(dtype, most));
    let off = c.low.b.sub(x, low)?;
    let factor = c.low.b.scalar(dtype, bins as f64);
    let scaled = c.low.b.mul(off, factor)?;
    let width = c.low.b.scalar(dtype, most - least);
    let place = c.low.b.div(scaled, width)?;
    let place = c.low.emit(&ckpt_passes::ops::arith::FLOOR, &[place])?;
    // The last part has its end.
    let last = c.low.b.scalar(dtype, (bins - 1) as f64);
    let place = c
        .low
        .emit(&ckpt_passes::ops::extreme::MIN, &[place, last])?;
    let above = c.low.emit(&logic::GREATER_OR_EQUAL, &[x, low])?;
    let below = c.low.emit(&logic::LESS_OR_EQUAL, &[x, high])?;
    let counts = c.low.emit(&logic::AND, &[above, below])?;
    let none = c.low.b.scalar(dtype, -1.0);
    let place = c.low.emit(&logic::WHERE, &[counts, place, none])?;
    let place = c.low.apply_unsqueeze(place, &[1])?;
    let (zero, one) = (c.low.b.int(0), c.low.b.int(1));
    let end = c.low.b.int(bins);
    let numbers = c
        .low
        .emit(&ckpt_passes::ops::fill::RANGE, &[zero, end, one])?;
    let numbers = c.low.b.cast(numbers, dtype)?;
    let hits = c.low.emit(&logic::EQUAL, &[place, numbers])?;
    let hits = c.low.b.cast(hits, dtype)?;
    let y = reduce::over(c, &ckpt_passes::ops::reduce::REDUCE_SUM, hits, &[0], false)?;
    c.made(y)
}
