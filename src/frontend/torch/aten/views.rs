//! Views: ops whose results see the memory of their operand in another way. Also the sizes of tensors, and their contents
//! as numbers.

use super::super::value::{TensorId, Value};
use super::lowering::View;
use super::signature::{Call, Formula, Op, along};
use ckpt_passes::Result;
use ckpt_passes::analysis::ranges;
use ckpt_passes::ir::{DType, Dim, Same, ValueId};
use ckpt_passes::ops::concat::{CONCAT, SPLIT};
use ckpt_passes::ops::{EmitExt, arith, fill::RANGE, index, shape};

pub const FORMULAS: &[Formula] = &[
    "expand_as(self: t, other: t) => expand(self, size(other))",
    "{reshape_as,view_as}(self: t, other: t) => reshape(self, size(other))",
];

pub const OPS: &[Op] = &[
    ("{adjoint,mH,mT}(self: t)", |c| swap(c, -2, -1)),
    ("alias(self: t)", |c| {
        warn_of_alias(c);
        Ok(c.given("self"))
    }),
    ("atleast_{1,2,3}d(self: t)", at_least),
    ("broadcast_tensors(tensors: l)", broadcast_tensors),
    ("{chunk,unsafe_chunk}(self: t, chunks: i, dim: i?)", chunk),
    ("contiguous(self: t, *, memory_format)", contiguous),
    ("detach(self: t)", |c| view(c, View::Detach)),
    // Results that nothing here computes.
    ("detach(self: _)", |c| Ok(c.given("self"))),
    ("dim(self: t)", |c| Ok((rank(c)? as i64).into())),
    (
        "{expand,broadcast_to}(self: t, size: I, *, implicit)",
        expand,
    ),
    ("flatten(self: t, start_dim: i?, end_dim: i?)", flatten),
    (
        "{item,_local_scalar_dense}(self: t); {Int,ScalarImplicit}(a: t)",
        number,
    ),
    ("movedim(self: t, source: I, destination: I)", movedim),
    ("narrow(self: t, dim: i, start: i, length: i)", narrow),
    ("{numel,sym_numel}(self: t)", |c| {
        Ok(Dim::product(&c.sizes("self")?).into())
    }),
    ("numpy_T(self: t)", |c| {
        let perm = (0..rank(c)?).rev().collect();
        permuted(c, perm)
    }),
    ("permute(self: t, dims: I)", permute),
    ("requires_grad_(self: t, requires_grad: b?)", |c| {
        Ok(c.given("self"))
    }),
    (
        "reshape(self: t, shape: I); {view,_unsafe_view}(self: t, size: I)",
        reshape,
    ),
    ("select(self: t, dim: i, index: i)", select),
    ("select(self: t, dim: i, index: t)", select_by_data),
    ("{size,sym_size}(self: t)", |c| Ok(c.sizes("self")?.into())),
    ("{size,sym_size}(self: t, dim: i)", |c| {
        let (x, axis) = c.self_axis()?;
        Ok(c.size(x, axis)?.into())
    }),
    (
        "slice(self: t, dim: i?, start: i?, end: i?, step: i?)",
        slice,
    ),
    (
        "{split,unsafe_split}(self: t, split_size: i, dim: i?)",
        |c| {
            let each = c.dim("split_size", 1)?;
            equal_chunks(c, &each)
        },
    ),
    (
        "split(self: t, split_size: I, dim: i?); \
         {split,split_with_sizes,unsafe_split_with_sizes}(self: t, split_sizes: I, dim: i?)",
        split_sizes,
    ),
    (
        "split(self: t, split_size: l, dim: i?); \
         {split,split_with_sizes,unsafe_split_with_sizes}(self: t, split_sizes: l, dim: i?)",
        split_by_data,
    ),
    ("squeeze(self: t); squeeze(self: t, dim: I)", squeeze),
    ("t(self: t)", |c| {
        let last = rank(c)? as i64 - 1;
        swap(c, 0, last.clamp(0, 1))
    }),
    (
        "{transpose,swapdims}(self: t, dim0: i, dim1: i); \
         swapaxes(self: t, axis0: i, axis1: i)",
        |c| {
            let names = [c.either(&["dim0", "axis0"]), c.either(&["dim1", "axis1"])];
            let (a, b) = (c.int(names[0], 0)?, c.int(names[1], 0)?);
            swap(c, a, b)
        },
    ),
    ("unbind(self: t, dim: i?)", unbind),
    ("unflatten(self: t, dim: i, sizes: I)", unflatten),
    ("unfold(self: t, dimension: i, size: i, step: i)", unfold),
    ("unsqueeze(self: t, dim: i)", |c| {
        let axis = c.axis("dim", 0, rank(c)? + 1)?;
        view(c, View::Unsqueeze(vec![axis as i64]))
    }),
    ("view(self: t, dtype: d)", |c| {
        Err(c
            .unsupported("memory as another element type")
            .help("convert with `to`, or pack and unpack outside of the model"))
    }),
];

fn rank(c: &Call) -> Result<usize> {
    Ok(c.low.dims(c.tensor("self")?).len())
}

/// Returns a view of `self`.
fn view(c: &mut Call, view: View) -> Result<Value> {
    let x = c.tensor("self")?;
    c.low.view(x, view).map(Value::Tensor)
}

/// Returns `self` in other sizes.
fn reshaped(c: &mut Call, dims: Vec<Dim>) -> Result<Value> {
    let x = c.tensor("self")?;
    c.low.reshaped(x, dims).map(Value::Tensor)
}

/// Returns the content of a tensor of one integer. One that only a run can tell stays in its tensor, which may index
/// another or tell a size; later writes to that tensor do not change the number.
fn number(c: &mut Call) -> Result<Value> {
    let x = c.tensor(c.either(&["self", "a"]))?;
    let is_bool = c.low.dtype(x) == DType::Bool;
    Ok(match c.low.as_int(x)? {
        Some(n) if is_bool => n.as_const().map_or(Value::Unknown, |n| (n != 0).into()),
        Some(n) => Value::Int(n),
        None if c.low.dtype(x) == DType::I64 => Value::Tensor(c.low.snapshot(x)?),
        None => Value::Unknown,
    })
}

/// Adds axes up to a rank. A vector becomes a row, and the third axis of a matrix follows the others.
fn at_least(c: &mut Call) -> Result<Value> {
    let new = match (rank(c)?, c.name.as_str()) {
        (0, "atleast_1d") => vec![0],
        (0, "atleast_2d") => vec![0, 1],
        (0, _) => vec![0, 1, 2],
        (1, "atleast_2d") => vec![0],
        (1, "atleast_3d") => vec![0, 2],
        (2, "atleast_3d") => vec![2],
        _ => return Ok(c.given("self")),
    };
    view(c, View::Unsqueeze(new))
}

/// Returns the operand if it is certainly row-major, else a tensor that may be a copy.
fn contiguous(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    if c.low.is_dense(x) {
        return Ok(Value::Tensor(x));
    }
    let value = c.low.read(x)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, value)))
}

fn permuted(c: &mut Call, perm: Vec<usize>) -> Result<Value> {
    if perm.is_sorted() {
        let dims = c.sizes("self")?;
        return view(c, View::Reshape(dims));
    }
    let perm = perm.into_iter().map(|p| p as i64);
    view(c, View::Permute(perm.collect()))
}

fn permute(c: &mut Call) -> Result<Value> {
    let rank = rank(c)?;
    let perm = c.listed_axes("dims", rank)?;
    for (i, axis) in perm.iter().enumerate() {
        if perm[..i].contains(axis) {
            return Err(c.fail("axis", format!("axis {axis} is listed twice")));
        }
    }
    if perm.len() != rank {
        return Err(c.fail("axis", "`dims` is no permutation of the axes"));
    }
    permuted(c, perm)
}

fn swap(c: &mut Call, a: i64, b: i64) -> Result<Value> {
    let rank = rank(c)?;
    if rank == 0 {
        return Ok(c.given("self"));
    }
    let (a, b) = (c.in_rank(a, rank)?, c.in_rank(b, rank)?);
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a, b);
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

/// Returns sizes in which −1 stands for what is left of `all` elements.
fn resolved(c: &Call, all: &Dim, wanted: &[Dim]) -> Result<Vec<Dim>> {
    let minus = Dim::from(-1);
    let Some(free) = wanted.iter().position(|d| *d == minus) else {
        return Ok(wanted.to_vec());
    };
    let others = Dim::product(&[&wanted[..free], &wanted[free + 1..]].concat());
    if others == Dim::ZERO || wanted[free + 1..].contains(&minus) {
        return Err(c.fail("shape", "the size that -1 stands for is not determined"));
    }
    let mut dims = wanted.to_vec();
    dims[free] = all.exact_div(&others).unwrap_or_else(|| all.div(&others));
    Ok(dims)
}

fn reshape(c: &mut Call) -> Result<Value> {
    let wanted = c.dims(c.either(&["shape", "size"]))?.unwrap_or_default();
    let all = Dim::product(&c.sizes("self")?);
    let dims = resolved(c, &all, &wanted)?;
    reshaped(c, dims)
}

fn flatten(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let (first, last) = (
        c.axis("start_dim", 0, dims.len())?,
        c.axis("end_dim", -1, dims.len())?,
    );
    if dims.is_empty() {
        return reshaped(c, vec![Dim::ONE]);
    }
    if first > last {
        return Err(c.fail("axis", "`start_dim` is behind `end_dim`"));
    }
    let whole = [Dim::product(&dims[first..=last])];
    reshaped(c, [&dims[..first], &whole, &dims[last + 1..]].concat())
}

fn unflatten(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let size = c.size(x, axis)?;
    let dims = c.low.dims(x).to_vec();
    let sizes = resolved(c, &size, &c.dims("sizes")?.unwrap_or_default())?;
    reshaped(c, [&dims[..axis], &sizes, &dims[axis + 1..]].concat())
}

fn expand(c: &mut Call) -> Result<Value> {
    let mut dims = c.dims("size")?.unwrap_or_default();
    let own = c.sizes("self")?;
    let Some(new) = dims.len().checked_sub(own.len()) else {
        return Err(c.fail("shape", "fewer sizes than the tensor has axes"));
    };
    for (dim, own) in dims[new..].iter_mut().zip(own) {
        if *dim == Dim::from(-1) {
            *dim = own;
        }
    }
    view(c, View::Expand(dims))
}

fn broadcast_tensors(c: &mut Call) -> Result<Value> {
    let tensors = c.tensors("tensors")?;
    let mut dims: Vec<Dim> = Vec::new();
    for t in &tensors {
        dims = broadcast(c, &dims, c.low.dims(*t))?;
    }
    let views = tensors.into_iter();
    let views = views.map(|t| c.low.view(t, View::Expand(dims.clone())));
    Ok(views.collect::<Result<Vec<_>>>()?.into())
}

/// Returns the sizes to which two lists of sizes broadcast.
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
    let dims = c.sizes("self")?;
    let mut chosen = c.axes("dim", dims.len())?;
    let ranges = ranges::of(c.low.b.graph)?;
    let is_one = |dim: &Dim| dim.same(&Dim::ONE) == Same::Yes;
    // PyTorch's programs fix the rank: a size that may be 1 was not 1 when the program was traced.
    chosen.retain(|axis| is_one(&ranges::from_least(&dims[*axis], &ranges)));
    chosen.sort_unstable();
    // Sizes that are 1 only within the ranges of the program, such as `min(2, s) - 1`.
    if let Some(axis) = chosen.iter().copied().rfind(|axis| !is_one(&dims[*axis])) {
        let first = c.run("select", [c.given("self"), (axis as i64).into(), 0.into()])?;
        chosen.retain(|other| *other != axis);
        let left = chosen.iter().map(|a| (a - usize::from(*a > axis)) as i64);
        let left: Vec<i64> = left.collect();
        return match left.is_empty() {
            true => Ok(first),
            false => c.run("squeeze", [first, left.into()]),
        };
    }
    match chosen.is_empty() {
        true => view(c, View::Reshape(dims)),
        false => {
            let axes = chosen.into_iter().map(|axis| axis as i64);
            view(c, View::Squeeze(axes.collect()))
        }
    }
}

/// Returns an index along an axis of `size` elements, counted from its end if it is negative, and clamped.
///
/// If sizes decide whether it is negative, sizes at which it is are refused from here on; or the others, if no two would be left.
fn inside(c: &mut Call, at: &Dim, size: &Dim) -> Result<Dim> {
    let is_negative = match at.bounds() {
        (Some(least), _) if least >= 0 => false,
        (_, Some(most)) if most < 0 => true,
        _ if c.low.assume_not_negative(at, at)? => false,
        _ if c.low.assume_not_negative(&Dim::from(-1).sub(at), at)? => true,
        _ => {
            return Err(c
                .fail(
                    "shape",
                    "whether a place counts from the end depends on sizes",
                )
                .found(at.to_string()));
        }
    };
    let at = match is_negative {
        true => size.add(at).larger(&Dim::ZERO),
        false => at.larger(&Dim::ZERO),
    };
    Ok(match at.same(size) {
        Same::Yes => size.clone(),
        _ => at.clamped(size),
    })
}

/// Returns the slice of a tensor along an axis, with the rules of Python for `start` and `end`.
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
    let view = View::Slice {
        axis,
        start,
        end,
        step,
    };
    c.low.view(x, view)
}

fn slice(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let (start, end) = (c.dim("start", 0)?, c.dim("end", i64::MAX)?);
    let step = c.int("step", 1)?;
    if step < 1 {
        return Err(c.fail("shape", "a step below 1"));
    }
    sliced(c, x, axis, &start, &end, step).map(Value::Tensor)
}

fn narrow(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let (start, length) = (c.dim("start", 0)?, c.dim("length", 0)?);
    let size = c.size(x, axis)?;
    let start = inside(c, &start, &size)?;
    let end = start.add(&length);
    sliced(c, x, axis, &start, &end, 1).map(Value::Tensor)
}

fn select(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
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
    let row = c.low.view(x, View::range(axis, start, end))?;
    let squeezed = View::Squeeze(vec![axis as i64]);
    c.low.view(row, squeezed).map(Value::Tensor)
}

/// As [`select`] of an element that only a run can tell, such as the weights of an expert: a copy.
fn select_by_data(c: &mut Call) -> Result<Value> {
    let (_, axis) = c.self_axis()?;
    let (x, at) = (c.value("self")?, c.value("index")?);
    c.result_with(&index::GATHER, &[x, at], along(axis))
}

/// Returns views of chunks of these sizes along an axis, all by one node.
fn chunks(c: &mut Call, x: TensorId, axis: usize, sizes: &[Dim]) -> Result<Vec<TensorId>> {
    let total = sizes.iter().fold(Dim::ZERO, |sum, s| sum.add(s));
    let size = c.size(x, axis)?;
    if total.same(&size) == Same::No {
        return Err(c
            .fail("shape", "the parts do not make up the axis")
            .expected(size.to_string())
            .found(total.to_string()));
    }
    let cuts = c.low.int_vector(sizes)?;
    cut(c, x, axis, cuts, sizes.len())
}

/// Returns `count` views of chunks along an axis, whose sizes a vector holds.
fn cut(
    c: &mut Call,
    x: TensorId,
    axis: usize,
    sizes: ValueId,
    count: usize,
) -> Result<Vec<TensorId>> {
    let value = c.low.read(x)?;
    let ins = vec![Some(value), Some(sizes)];
    let values = c.low.b.emit_n(&SPLIT, ins, along(axis), count)?;
    let mut start = Dim::ZERO;
    let mut views = Vec::with_capacity(count);
    for value in values {
        c.low.read_sizes(value);
        let end = start.add(&c.low.b.ty(value).dims[axis]);
        let view = View::range(axis, start, end.clone());
        views.push(c.low.view_as(x, view, value));
        start = end;
    }
    Ok(views)
}

/// Returns chunks of size `each` along an axis. The last one holds the rest.
fn equal_chunks(c: &mut Call, each: &Dim) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let size = c.size(x, axis)?;
    if each.as_const() == Some(0) {
        return Err(c.fail("shape", "parts of size 0"));
    }
    let count = size.ceil_div(each).as_const().ok_or_else(|| {
        let what = format!("the number of parts of size {each} is not known");
        c.fail("shape", what)
    })?;
    let count = count.max(1);
    if count > 1 << 16 {
        return Err(c.fail("shape", format!("{count} parts are too many")));
    }
    let mut sizes = vec![each.clone(); count as usize];
    let before = each.mul(&Dim::from(count - 1));
    sizes[count as usize - 1] = size.sub(&before);
    Ok(chunks(c, x, axis, &sizes)?.into())
}

fn chunk(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let count = c.dim("chunks", 1)?;
    let size = c.size(x, axis)?;
    equal_chunks(c, &size.ceil_div(&count))
}

fn split_sizes(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let named = c.either(&["split_sizes", "split_size"]);
    let sizes = c.dims(named)?.unwrap_or_default();
    Ok(chunks(c, x, axis, &sizes)?.into())
}

/// Lowers a split whose sizes a run tells: each is in a tensor of one integer.
fn split_by_data(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let mut sizes = Vec::new();
    for size in c.tensors(c.either(&["split_sizes", "split_size"]))? {
        let size = c.low.read(size)?;
        let size = c.low.b.cast(size, DType::I64)?;
        sizes.push(c.reshape(size, &[Dim::ONE])?);
    }
    let count = sizes.len();
    let sizes = c.emit_with(&CONCAT, &sizes, along(0))?;
    Ok(cut(c, x, axis, sizes, count)?.into())
}

fn unbind(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let size = c.size(x, axis)?;
    let taken = c.low.results.and_then(|n| i64::try_from(n).ok());
    let count = size.as_const().or(taken);
    if size.as_const().is_none() && taken.is_some() {
        let line = format!(
            "{}: the trace took {} parts; in a run in which the data gives another number of them, it is an error",
            c.name,
            count.unwrap_or_default()
        );
        c.low.warn_once(&line);
    }
    let Some(count) = count.filter(|n| (1..=1 << 16).contains(n)) else {
        return Err(c
            .fail("shape", "the number of results is not known")
            .found(size.to_string())
            .help("what data decides cannot be taken apart, such as the tokens of each expert: compute all, and mask"));
    };
    let rows = chunks(c, x, axis, &vec![Dim::ONE; count as usize])?;
    let squeezed = View::Squeeze(vec![axis as i64]);
    let views = rows.into_iter();
    let views = views.map(|row| c.low.view(row, squeezed.clone()));
    Ok(views.collect::<Result<Vec<_>>>()?.into())
}

/// Lowers windows of `size` elements, `step` apart: [.., windows, .., size]. They overlap in memory, so here they are
/// copies.
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
    let windows = c.emit(&RANGE, &[zero, count, one])?;
    let step = c.low.b.int(step);
    let starts = c.emit(&arith::MUL, &[windows, step])?;
    let starts = c.low.unsqueeze(starts, &[1])?;
    let size = c.low.b.int(size);
    let within = c.emit(&RANGE, &[zero, size, one])?;
    let places = c.emit(&arith::ADD, &[starts, within])?;
    let value = c.low.read(x)?;
    let taken = c.emit_with(&index::GATHER, &[value, places], along(axis))?;
    // The elements of a window follow the axis of windows. They move to the end.
    let behind = axis as i64 + 1;
    let perm = (0..=rank as i64).filter(|a| *a != behind).chain([behind]);
    let y = shape::transpose(&mut c.low.b, taken, perm.collect())?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, y)))
}

/// Warns once of `alias`: a decomposed program writes `detach` so, and the stop of the gradient is lost.
pub(super) fn warn_of_alias(c: &mut Call) {
    if c.low.is_decomposed {
        c.low.warn_once(
            "the program was decomposed, which turns `detach` into `alias`: what was detached is trained here; \
             save it as torch.export gives it if it detaches anything",
        );
    }
}
