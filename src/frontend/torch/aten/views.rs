//! Views: ops whose result is memory of their operand, seen otherwise.

use super::signature::{Call, Op};
use super::tensors::View;
use super::{TensorId, Value};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, Same};
use ckpt_passes::ops::concat::SPLIT;
use ckpt_passes::ops::{arith, index, shape};

pub const OPS: &[Op] = &[
    ("adjoint(self: t)", |c| swap(c, -2, -1)),
    ("alias(self: t)", |c| {
        c.low.warn_of_aliases();
        same(c)
    }),
    ("atleast_1d(self: t)", |c| at_least(c, 1)),
    ("atleast_2d(self: t)", |c| at_least(c, 2)),
    ("atleast_3d(self: t)", |c| at_least(c, 3)),
    ("broadcast_tensors(tensors: l)", broadcast_tensors),
    ("broadcast_to(self: t, size: I)", |c| expand(c, "size")),
    ("chunk(self: t, chunks: i, dim: i?)", chunk),
    ("contiguous(self: t, *, memory_format)", contiguous),
    ("detach(self: t)", detach),
    // Of what nothing here computes.
    ("detach(self: _)", |c| Ok(c.given("self"))),
    ("expand(self: t, size: I, *, implicit)", |c| {
        expand(c, "size")
    }),
    ("expand_as(self: t, other: t)", expand_as),
    ("flatten(self: t, start_dim: i?, end_dim: i?)", flatten),
    ("mH(self: t)", |c| swap(c, -2, -1)),
    ("mT(self: t)", |c| swap(c, -2, -1)),
    ("movedim(self: t, source: I, destination: I)", movedim),
    ("narrow(self: t, dim: i, start: i, length: i)", narrow),
    ("numpy_T(self: t)", reversed),
    ("permute(self: t, dims: I)", permute),
    ("requires_grad_(self: t, requires_grad: b?)", same),
    ("reshape(self: t, shape: I)", |c| reshape(c, "shape")),
    ("reshape_as(self: t, other: t)", reshape_as),
    ("select(self: t, dim: i, index: i)", select),
    (
        "slice(self: t, dim: i?, start: i?, end: i?, step: i?)",
        slice,
    ),
    ("split(self: t, split_size: i, dim: i?)", split),
    ("split(self: t, split_size: I, dim: i?)", split_sizes),
    ("split(self: t, split_sizes: I, dim: i?)", split_sizes),
    (
        "split_with_sizes(self: t, split_sizes: I, dim: i?)",
        split_sizes,
    ),
    ("squeeze(self: t)", squeeze),
    ("squeeze(self: t, dim: I)", squeeze),
    ("swapaxes(self: t, axis0: i, axis1: i)", |c| {
        swap_named(c, "axis0", "axis1")
    }),
    ("swapdims(self: t, dim0: i, dim1: i)", |c| {
        swap_named(c, "dim0", "dim1")
    }),
    ("t(self: t)", |c| {
        if rank(c)? < 2 { same(c) } else { swap(c, 0, 1) }
    }),
    ("transpose(self: t, dim0: i, dim1: i)", |c| {
        swap_named(c, "dim0", "dim1")
    }),
    ("unbind(self: t, dim: i?)", unbind),
    ("unflatten(self: t, dim: i, sizes: I)", unflatten),
    ("unfold(self: t, dimension: i, size: i, step: i)", unfold),
    ("unsqueeze(self: t, dim: i)", unsqueeze),
    ("unsafe_chunk(self: t, chunks: i, dim: i?)", chunk),
    ("unsafe_split(self: t, split_size: i, dim: i?)", split),
    (
        "unsafe_split_with_sizes(self: t, split_sizes: I, dim: i?)",
        split_sizes,
    ),
    ("view(self: t, size: I)", |c| reshape(c, "size")),
    ("view(self: t, dtype: d)", |c| {
        Err(c
            .unsupported("memory as another element type")
            .help("convert with `to`, or pack and unpack outside of the model"))
    }),
    ("view_as(self: t, other: t)", reshape_as),
    ("_unsafe_view(self: t, size: I)", |c| reshape(c, "size")),
];

fn rank(c: &Call) -> Result<usize> {
    Ok(c.low.dims(c.tensor("self")?).len())
}

fn same(c: &mut Call) -> Result<Value> {
    Ok(Value::Tensor(c.tensor("self")?))
}

/// With as many axes: a vector is a row, and a matrix gets its third axis behind the others.
fn at_least(c: &mut Call, axes: usize) -> Result<Value> {
    let x = c.tensor("self")?;
    let new: Vec<i64> = match (c.low.dims(x).len(), axes) {
        (0, n) => (0..n as i64).collect(),
        (1, 2) => vec![0],
        (1, 3) => vec![0, 2],
        (2, 3) => vec![2],
        _ => return same(c),
    };
    c.low.view(x, View::Unsqueeze(new)).map(Value::Tensor)
}

fn detach(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    c.low.view(x, View::Detach).map(Value::Tensor)
}

/// The operand where it is row-major already; else a copy, if the strides ask for one.
fn contiguous(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    if c.low.is_dense(x) {
        return Ok(Value::Tensor(x));
    }
    let value = c.low.read(x)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, value)))
}

fn permuted(c: &mut Call, perm: Vec<usize>) -> Result<Value> {
    let x = c.tensor("self")?;
    let perm: Vec<i64> = perm.into_iter().map(|p| p as i64).collect();
    if perm.iter().enumerate().all(|(i, p)| i as i64 == *p) {
        return c
            .low
            .view(x, View::Reshape(c.low.dims(x).to_vec()))
            .map(Value::Tensor);
    }
    c.low.view(x, View::Permute(perm)).map(Value::Tensor)
}

fn permute(c: &mut Call) -> Result<Value> {
    let rank = rank(c)?;
    let dims = c.ints("dims")?.unwrap_or_default();
    let mut perm = Vec::with_capacity(rank);
    for axis in dims {
        let axis = c.in_rank(axis, rank)?;
        if perm.contains(&axis) {
            return Err(c.fail("axis", format!("axis {axis} is listed twice")));
        }
        perm.push(axis);
    }
    if perm.len() != rank {
        return Err(c.fail("axis", "`dims` is no permutation of the axes"));
    }
    permuted(c, perm)
}

fn swap_named(c: &mut Call, a: &str, b: &str) -> Result<Value> {
    let (a, b) = (c.int(a, 0)?, c.int(b, 0)?);
    swap(c, a, b)
}

fn swap(c: &mut Call, a: i64, b: i64) -> Result<Value> {
    let rank = rank(c)?;
    if rank == 0 {
        return same(c);
    }
    let (a, b) = (c.in_rank(a, rank)?, c.in_rank(b, rank)?);
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a, b);
    permuted(c, perm)
}

fn reversed(c: &mut Call) -> Result<Value> {
    let perm = (0..rank(c)?).rev().collect();
    permuted(c, perm)
}

fn movedim(c: &mut Call) -> Result<Value> {
    let rank = rank(c)?;
    let (from, to) = (c.axes("source", rank)?, c.axes("destination", rank)?);
    if from.len() != to.len() {
        return Err(c.fail("axis", "`source` and `destination` have different lengths"));
    }
    let mut perm: Vec<Option<usize>> = vec![None; rank];
    for (from, to) in from.iter().zip(&to) {
        perm[*to] = Some(*from);
    }
    let mut rest = (0..rank).filter(|a| !from.contains(a));
    let perm: Vec<usize> = perm
        .into_iter()
        .filter_map(|p| p.or_else(|| rest.next()))
        .collect();
    permuted(c, perm)
}

/// Sizes of which one may be -1: what is left of the elements.
fn resolved(c: &Call, x: TensorId, wanted: &[Dim]) -> Result<Vec<Dim>> {
    let minus = Dim::from(-1);
    let Some(free) = wanted.iter().position(|d| *d == minus) else {
        return Ok(wanted.to_vec());
    };
    let others: Vec<Dim> = wanted
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != free)
        .map(|(_, d)| d.clone())
        .collect();
    let (all, others) = (Dim::product(c.low.dims(x)), Dim::product(&others));
    if others == Dim::ZERO || wanted[free + 1..].contains(&minus) {
        return Err(c.fail("shape", "the size that -1 stands for is not determined"));
    }
    let mut dims = wanted.to_vec();
    dims[free] = all.exact_div(&others).unwrap_or_else(|| all.div(&others));
    Ok(dims)
}

fn reshape(c: &mut Call, sizes: &str) -> Result<Value> {
    let x = c.tensor("self")?;
    let wanted = c.dims(sizes)?.unwrap_or_default();
    let dims = resolved(c, x, &wanted)?;
    c.low.reshaped(x, dims).map(Value::Tensor)
}

fn reshape_as(c: &mut Call) -> Result<Value> {
    let (x, like) = (c.tensor("self")?, c.tensor("other")?);
    let dims = c.low.dims(like).to_vec();
    c.low.reshaped(x, dims).map(Value::Tensor)
}

fn flatten(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dims = c.low.dims(x).to_vec();
    let (first, last) = (
        c.axis("start_dim", 0, dims.len())?,
        c.axis("end_dim", -1, dims.len())?,
    );
    if dims.is_empty() {
        return c.low.reshaped(x, vec![Dim::ONE]).map(Value::Tensor);
    }
    if first > last {
        return Err(c.fail("axis", "`start_dim` is behind `end_dim`"));
    }
    let mut flat = dims[..first].to_vec();
    flat.push(Dim::product(&dims[first..=last]));
    flat.extend_from_slice(&dims[last + 1..]);
    c.low.reshaped(x, flat).map(Value::Tensor)
}

fn unflatten(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dims = c.low.dims(x).to_vec();
    let axis = c.axis("dim", 0, dims.len())?;
    c.size(x, axis)?;
    let mut parts = c.dims("sizes")?.unwrap_or_default();
    let minus = Dim::from(-1);
    if let Some(free) = parts.iter().position(|d| *d == minus) {
        let others: Vec<Dim> = parts.iter().filter(|d| **d != minus).cloned().collect();
        let (all, others) = (dims[axis].clone(), Dim::product(&others));
        parts[free] = all.exact_div(&others).unwrap_or_else(|| all.div(&others));
    }
    let wanted = [&dims[..axis], &parts, &dims[axis + 1..]].concat();
    c.low.reshaped(x, wanted).map(Value::Tensor)
}

fn expand(c: &mut Call, sizes: &str) -> Result<Value> {
    let x = c.tensor("self")?;
    let mut dims = c.dims(sizes)?.unwrap_or_default();
    let own = c.low.dims(x).to_vec();
    let Some(new) = dims.len().checked_sub(own.len()) else {
        return Err(c.fail("shape", "fewer sizes than the tensor has axes"));
    };
    for (dim, own) in dims[new..].iter_mut().zip(own) {
        if *dim == Dim::from(-1) {
            *dim = own;
        }
    }
    expanded(c, x, dims).map(Value::Tensor)
}

fn expand_as(c: &mut Call) -> Result<Value> {
    let (x, like) = (c.tensor("self")?, c.tensor("other")?);
    let dims = c.low.dims(like).to_vec();
    expanded(c, x, dims).map(Value::Tensor)
}

fn expanded(c: &mut Call, x: TensorId, dims: Vec<Dim>) -> Result<TensorId> {
    c.low.view(x, View::Expand(dims))
}

fn broadcast_tensors(c: &mut Call) -> Result<Value> {
    let tensors = c.tensors("tensors")?;
    let mut dims: Vec<Dim> = Vec::new();
    for t in &tensors {
        dims = broadcast(c, &dims, c.low.dims(*t))?;
    }
    let mut views = Vec::with_capacity(tensors.len());
    for t in tensors {
        views.push(Value::Tensor(expanded(c, t, dims.clone())?));
    }
    Ok(Value::List(views))
}

/// The sizes that two lists of sizes broadcast to.
pub(super) fn broadcast(c: &Call, a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], i: usize| match (i + dims.len()).checked_sub(rank) {
        Some(i) => dims[i].clone(),
        None => Dim::ONE,
    };
    (0..rank)
        .map(|i| {
            let (a, b) = (at(a, i), at(b, i));
            a.broadcast(&b)
                .ok_or_else(|| c.fail("shape", format!("sizes {a} and {b} do not broadcast")))
        })
        .collect()
}

fn squeeze(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dims = c.low.dims(x).to_vec();
    let mut chosen = Vec::new();
    for axis in c.axes("dim", dims.len())? {
        // PyTorch's programs fix the rank: a size that may be 1 was not when the program was traced.
        if dims[axis].same(&Dim::ONE) == Same::Yes {
            chosen.push(axis as i64);
        }
    }
    chosen.sort_unstable();
    if chosen.is_empty() {
        return c.low.view(x, View::Reshape(dims)).map(Value::Tensor);
    }
    c.low.view(x, View::Squeeze(chosen)).map(Value::Tensor)
}

fn unsqueeze(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let rank = c.low.dims(x).len() + 1;
    let axis = c.axis("dim", 0, rank)?;
    c.low
        .view(x, View::Unsqueeze(vec![axis as i64]))
        .map(Value::Tensor)
}

/// A place along an axis of size `size`, counted from its end where it is negative, and kept inside.
fn inside(c: &Call, at: &Dim, size: &Dim) -> Result<Dim> {
    let at = match at.bounds() {
        (Some(least), _) if least >= 0 => at.clone(),
        (_, Some(most)) if most < 0 => size.add(at).larger(&Dim::ZERO),
        _ => {
            return Err(c
                .fail(
                    "shape",
                    "whether a place counts from the end depends on sizes",
                )
                .found(at.to_string()));
        }
    };
    Ok(match at.same(size) {
        Same::Yes => size.clone(),
        _ => at.smaller(size),
    })
}

pub(super) fn sliced(
    c: &mut Call,
    x: TensorId,
    axis: usize,
    start: &Dim,
    end: &Dim,
    step: i64,
) -> Result<TensorId> {
    let size = c.size(x, axis)?;
    let start = inside(c, start, &size)?;
    let end = match end.as_const() {
        Some(i64::MAX) => size.clone(),
        _ => inside(c, end, &size)?,
    };
    let end = match end.sub(&start).bounds().0 {
        Some(least) if least >= 0 => end,
        _ => end.larger(&start),
    };
    c.low.view(
        x,
        View::Slice {
            axis,
            start,
            end,
            step,
        },
    )
}

fn slice(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let (start, end) = (c.dim("start", 0)?, c.dim("end", i64::MAX)?);
    let step = c.int("step", 1)?;
    if step < 1 {
        return Err(c.fail("shape", "a step below 1"));
    }
    sliced(c, x, axis, &start, &end, step).map(Value::Tensor)
}

fn narrow(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let (start, length) = (c.dim("start", 0)?, c.dim("length", 0)?);
    let size = c.size(x, axis)?;
    let start = inside(c, &start, &size)?;
    let end = start.add(&length);
    sliced(c, x, axis, &start, &end, 1).map(Value::Tensor)
}

fn select(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let at = c.dim("index", 0)?;
    let size = c.size(x, axis)?;
    let start = inside(c, &at, &size)?;
    if start.same(&size) == Same::Yes {
        return Err(c.fail(
            "shape",
            format!("there is no element {at} along axis {axis}"),
        ));
    }
    let end = start.add(&Dim::ONE);
    let view = View::Slice {
        axis,
        start,
        end,
        step: 1,
    };
    let row = c.low.view(x, view)?;
    c.low
        .view(row, View::Squeeze(vec![axis as i64]))
        .map(Value::Tensor)
}

/// Views of parts of these sizes, one after the other along an axis: one node for all.
fn parts(c: &mut Call, x: TensorId, axis: usize, sizes: &[Dim]) -> Result<Vec<TensorId>> {
    let total = sizes.iter().fold(Dim::ZERO, |sum, s| sum.add(s));
    if total.same(&c.size(x, axis)?) == Same::No {
        return Err(c
            .fail("shape", "the parts do not make up the axis")
            .expected(c.size(x, axis)?.to_string())
            .found(total.to_string()));
    }
    let value = c.low.read(x)?;
    let cuts = c.low.int_vector(sizes)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let ins = vec![Some(value), Some(cuts)];
    let values = c.low.b.emit_n(&SPLIT, ins, attrs, sizes.len())?;
    let mut start = Dim::ZERO;
    let mut views = Vec::with_capacity(sizes.len());
    for (size, value) in sizes.iter().zip(values) {
        let end = start.add(size);
        let view = View::Slice {
            axis,
            start,
            end: end.clone(),
            step: 1,
        };
        views.push(c.low.view_as(x, view, value));
        start = end;
    }
    Ok(views)
}

fn listed(views: Vec<TensorId>) -> Value {
    Value::List(views.into_iter().map(Value::Tensor).collect())
}

/// Parts of `each` along an axis, the last one what is left.
fn equal_parts(c: &mut Call, each: &Dim) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let size = c.size(x, axis)?;
    let unknown = || {
        c.fail(
            "shape",
            format!("the number of parts of size {each} is not known"),
        )
    };
    if each.as_const() == Some(0) {
        return Err(c.fail("shape", "parts of size 0"));
    }
    let count = size.ceil_div(each).as_const().ok_or_else(unknown)?.max(1);
    if count > 1 << 16 {
        return Err(c.fail("shape", format!("{count} parts are too many")));
    }
    let mut sizes = vec![each.clone(); count as usize];
    let before = each.mul(&Dim::from(count - 1));
    sizes[count as usize - 1] = size.sub(&before);
    parts(c, x, axis, &sizes).map(listed)
}

fn split(c: &mut Call) -> Result<Value> {
    let each = c.dim("split_size", 1)?;
    equal_parts(c, &each)
}

fn chunk(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let count = c.dim("chunks", 1)?;
    let size = c.size(x, axis)?;
    let each = size.ceil_div(&count);
    equal_parts(c, &each)
}

fn split_sizes(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let named = if c.has("split_sizes") {
        "split_sizes"
    } else {
        "split_size"
    };
    let sizes = c.dims(named)?.unwrap_or_default();
    parts(c, x, axis, &sizes).map(listed)
}

fn unbind(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", 0, c.low.dims(x).len())?;
    let size = c.size(x, axis)?;
    let Some(count) = size.as_const().filter(|n| (1..=1 << 16).contains(n)) else {
        return Err(c
            .fail("shape", "the number of results is not known")
            .found(size.to_string())
            .help("what data decides cannot be taken apart, such as the tokens of each expert: compute all, and mask"));
    };
    let rows = parts(c, x, axis, &vec![Dim::ONE; count as usize])?;
    let mut views = Vec::with_capacity(rows.len());
    for row in rows {
        views.push(c.low.view(row, View::Squeeze(vec![axis as i64]))?);
    }
    Ok(listed(views))
}

/// Windows of `size` elements, `step` apart: [.., windows, .., size]. They overlap in memory, so here they are copies.
fn unfold(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let rank = c.low.dims(x).len();
    let axis = c.axis("dimension", 0, rank)?;
    let (size, step) = (c.int("size", 1)?, c.int("step", 1)?);
    if rank == 0 || size < 0 || step < 1 {
        return Err(c.unsupported("this window"));
    }
    let room = c.size(x, axis)?.sub(&Dim::from(size));
    let count = room.div(&Dim::from(step)).add(&Dim::ONE);
    let (zero, one) = (c.low.b.int(0), c.low.b.int(1));
    let count = c.low.int_scalar(&count)?;
    let range = &ckpt_passes::ops::fill::RANGE;
    let windows = c.low.emit(range, &[zero, count, one])?;
    let step = c.low.b.int(step);
    let starts = c.low.emit(&arith::MUL, &[windows, step])?;
    let starts = c.low.apply_unsqueeze(starts, &[1])?;
    let size = c.low.b.int(size);
    let within = c.low.emit(range, &[zero, size, one])?;
    let places = c.low.emit(&arith::ADD, &[starts, within])?;
    let value = c.low.read(x)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let taken = c.low.b.emit(&index::GATHER, &[value, places], attrs)?;
    // The elements of a window stand right behind the windows: to the end with them.
    let mut perm: Vec<i64> = (0..=rank as i64)
        .filter(|a| *a != axis as i64 + 1)
        .collect();
    perm.push(axis as i64 + 1);
    let y = shape::transpose(&mut c.low.b, taken, perm)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, y)))
}
