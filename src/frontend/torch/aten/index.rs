//! Lookups, writes by index, sorting, and the index tables that are known when the file is read.

use super::super::value::Value;
use super::arrange::id;
use super::create::{MAX_TABLE, table};
use super::lowering::{DEFAULT_FLOAT, View, inverse};
use super::signature::{Call, Formula, Op, along};
use super::views;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Same, ValueId, same_dims};
use ckpt_passes::ops::{EmitExt, extreme, index, logic, scatter, shape};

pub const FORMULAS: &[Formula] = &[
    "argsort(self: t, dim: i?, descending: b?) => sort(self, dim, descending)[1]",
    "argsort(self: t, *, stable: b, dim: i?, descending: b?) => sort(self, stable=stable, dim=dim, descending=descending)[1]",
    "argwhere(self: t) => nonzero(self)",
    "gather(self: t, dim: i, index: t, *, sparse_grad: b?) => GatherElements(self, index, axis=axis(self, dim))",
    // The number of elements in each of `bins` equal intervals of [min, max], of which the last one includes its end.
    "histc(self: t, bins: i = 100, min: f = 0.0, max: f = 0.0) => is_whole(self) & min == 0 & min < max & max == bins - 1 ? \
     (x = Reshape(self, [-1]); numbers = in_type(Range(whole(0), whole(bins), whole(1)), dtype(x)); \
     hits = Cast(Equal(Unsqueeze(x, [1]), numbers), to=dtype(x)); \
     ReduceSum(hits, [0], keepdims=0, noop_with_empty_axes=1)) : is_float(self) & min < max & bins >= 1 ? \
     (x = Reshape(self, [-1]); low = like(min, x); high = like(max, x); \
     place = Min(Floor(Div(Mul(Sub(x, low), bins), max - min)), bins - 1); \
     counts = And(GreaterOrEqual(x, low), LessOrEqual(x, high)); \
     place = Unsqueeze(Where(counts, place, -1.0), [1]); zero = whole(0); one = whole(1); \
     numbers = Cast(Range(zero, whole(bins), one), to=dtype(x)); hits = Cast(Equal(place, numbers), to=dtype(x)); \
     ReduceSum(hits, [0], keepdims=0, noop_with_empty_axes=1)) : \
     is_float(self) & min == max & bins == 1 ? \
     (x = Reshape(self, [-1]); ReduceSum(Cast(Equal(x, x), to=dtype(x)), [0], keepdims=1, noop_with_empty_axes=1)) : \
     unsupported('a range that the data decides')",
    "index_select(self: t, dim: i, index: t) => Gather(self, index, axis=axis(self, dim))",
    // Both halves count from their own end, as PyTorch's do.
    "linspace(start: ts, end: ts, steps: i, *, dtype: d?, layout, device, pin_memory) => \
     kind = given(dtype) ? dtype : float32; at = arange(steps, dtype=kind); last = steps - 1; \
     step = (end - start) / (last == 0 ? 1 : last); first = at * step + start; second = end - (last - at) * step; \
     in_type(where(at < steps / 2, first, second), kind)",
    "masked_scatter_from(self: t, mask: t, source: t) => \
     mask = expand(mask, size(self)); places = clamp_min(cumsum(flatten(mask), 0) - 1, 0); \
     taken = reshape(take(source, places), size(self)); where(mask, taken, self)",
    "masked_select(self: t, mask: t) => both = broadcast_tensors([self, mask]); index(both[0], [both[1]])",
    "one_hot(self: t, num_classes: i = -1) => \
     num_classes == -1 ? to(unsqueeze(self, -1) == arange(max(self) + 1), int64) : \
     OneHot(self, whole(num_classes), [0, 1], axis=-1)",
    "put(self: t, index: t, source: t, accumulate: b?) => \
     y = index_put(flatten(self), [flatten(index)], flatten(source), accumulate); reshape(y, size(self))",
    "scatter(self: t, dim: i, index: t, src: t) => \
     ScatterElements(self, index, like(src, self), axis=axis(self, dim), reduction='none')",
    "scatter(self: t, dim: i, index: t, value: s) => updates = expand(like(value, self), size(index)); \
     ScatterElements(self, index, updates, axis=axis(self, dim), reduction='none')",
    "scatter_add(self: t, dim: i, index: t, src: t) => \
     ScatterElements(self, index, like(src, self), axis=axis(self, dim), reduction='add')",
    "select_scatter(self: t, src: t, dim: i, index: i) => \
     copy = clone(self); copy_(select(copy, dim, index), src); copy",
    "slice_scatter(self: t, src: t, dim: i?, start: i?, end: i?, step: i?) => \
     copy = clone(self); copy_(slice(copy, dim, start, end, step), src); copy",
    // Equal elements keep their order, which PyTorch promises only for stable sorts.
    "sort(self: t, dim: i = -1, descending: b?); \
     sort(self: t, *, stable: b?, dim: i = -1, descending: b?) => \
     TopK(self, [size(self, dim)], axis=axis(self, dim), largest=descending, sorted=1, results=2)",
    "take(self: t, index: t) => index(flatten(self), [index])",
    "topk(self: t, k: i, dim: i = -1, largest: b = true, sorted: b?) => \
     TopK(self, [k], axis=axis(self, dim), largest=largest, sorted=1, results=2)",
    // A run of equal elements starts at the first one and at each that differs from the one before it.
    "unique_consecutive(self: t, return_inverse: b?, return_counts: b?) => \
     x = flatten(self); later = narrow(x, 0, 1, numel(x) - 1) != narrow(x, 0, 0, numel(x) - 1); \
     first = cat([ones([1], dtype=bool), later], 0); at = flatten(nonzero(first)); \
     bounds = cat([at, reshape(whole(numel(x)), [1])], 0); \
     ends = index_select(bounds, 0, arange(size(at, 0)) + 1); \
     (index_select(x, 0, at), reshape(cumsum(first, 0) - 1, size(self)), ends - at)",
    "where(condition: t) => unbind(nonzero(condition), 1)",
];

pub const OPS: &[Op] = &[
    (
        "{bitwise_left_shift,__lshift__,bitwise_right_shift,__rshift__}(self: ts, other: s)",
        shifted,
    ),
    (
        "bucketize(self: ts, boundaries: t, *, out_int32: b?, right: b?)",
        |c| ranked(c, "boundaries"),
    ),
    (
        "embedding(weight: t, indices: t, padding_idx: i?, scale_grad_by_freq: b?, sparse: b?)",
        embedding,
    ),
    ("index(self: t, indices: l)", by_tensors),
    (
        "index_add(self: t, dim: i, index: t, source: t, *, alpha: s?)",
        |c| rows_put(c, "add"),
    ),
    ("index_copy(self: t, dim: i, index: t, source: t)", |c| {
        rows_put(c, "none")
    }),
    (
        "index_fill(self: t, dim: i, index: t, value: ts)",
        index_fill,
    ),
    (
        "index_put(self: t, indices: l, values: t, accumulate: b?)",
        index_put,
    ),
    ("masked_scatter(self: t, mask: t, source: t)", |c| {
        // With no element marked, the source may be empty, and every element looks one up all the same.
        let source = c.sizes("source")?;
        let is_filled = source
            .iter()
            .all(|d| d.bounds().0.is_some_and(|least| least > 0));
        c.formula(
            &[],
            match is_filled {
                true => "masked_scatter_from(self, mask, source)",
                false => {
                    "masked_scatter_from(self, mask, cat([flatten(source), zeros([1], dtype=dtype(source))], 0))"
                }
            },
        )
    }),
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
    ("nonzero(self: t)", nonzero),
    (
        "repeat_interleave(self: t, repeats: t, dim: i?, *, output_size: i?)",
        repeated,
    ),
    ("repeat_interleave(repeats: t, *, output_size: i?)", |c| {
        Ok(repeats(c)?.1)
    }),
    (
        "scatter(self: t, dim: i, index: t, src: ts, *, reduce: S); \
         scatter(self: t, dim: i, index: t, value: s, *, reduce: S); \
         scatter_reduce(self: t, dim: i, index: t, src: t, reduce: S, *, include_self: b?)",
        combined,
    ),
    (
        "searchsorted(sorted_sequence: t, self: ts, *, out_int32: b?, right: b?, side: S?, sorter: t?)",
        |c| ranked(c, "sorted_sequence"),
    ),
    ("take_along_dim(self: t, indices: t, dim: i?)", take_along),
    (
        "tri{l,u}_indices(row: i, col: i, offset: i?, *, dtype: d?, layout, device, pin_memory)",
        triangle,
    ),
];

/// Lowers a lookup of rows of a table. No gradient goes to the row of `padding_idx`.
fn embedding(c: &mut Call) -> Result<Value> {
    let (table, rows) = (c.value("weight")?, c.value("indices")?);
    if c.bool("scale_grad_by_freq", false)? {
        return Err(c.unsupported("`scale_grad_by_freq`"));
    }
    let mut y = c.emit_with(&index::GATHER, &[table, rows], along(0))?;
    let padding = c.int("padding_idx", -1)?;
    if padding >= 0 && c.low.depends(y) {
        let padding = c.low.operand(&padding.into(), c.dtype(rows))?;
        let is_padding = c.emit(&logic::EQUAL, &[rows, padding])?;
        let is_padding = c.low.unsqueeze(is_padding, &[-1])?;
        let fixed = c.low.stopped(y)?;
        y = c.emit(&logic::WHERE, &[is_padding, fixed, y])?;
    }
    c.made(y)
}

/// The axes that an index by several tensors replaces, and the indices along each of them.
struct Places {
    axes: Vec<usize>,
    tensors: Vec<ValueId>,
}

/// Returns the indices of a call. A mask becomes the indices of its true elements, one tensor an axis.
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
        let tensors = match c.dtype(value) {
            DType::Bool => mask_indices(c, value)?,
            dtype if dtype.is_float() => return Err(c.fail("type", "an index is no integer")),
            _ => vec![value],
        };
        for tensor in tensors {
            found.axes.push(axis);
            found.tensors.push(tensor);
            axis += 1;
        }
    }
    if found.axes.is_empty() || axis > rank {
        return Err(c.fail("shape", "the indices do not fit the tensor"));
    }
    Ok(found)
}

/// Returns the indices of the true elements of a mask, one vector for each of its axes.
fn mask_indices(c: &mut Call, mask: ValueId) -> Result<Vec<ValueId>> {
    let count = c.rank(mask);
    let all = c.emit(&index::NON_ZERO, &[mask])?;
    c.low.read_sizes(all);
    let mut rows = Vec::with_capacity(count);
    for i in 0..count as i64 {
        let row = c.low.apply(&View::range(0, i, i + 1), all)?;
        rows.push(c.low.apply(&View::Squeeze(vec![0]), row)?);
    }
    Ok(rows)
}

/// Returns the indices as one tensor [.., axes], and the sizes before its last axis.
fn joined(c: &mut Call, tensors: &[ValueId]) -> Result<(ValueId, Vec<Dim>)> {
    let mut dims: Vec<Dim> = Vec::new();
    for t in tensors {
        dims = views::broadcast(c, &dims, &c.low.b.ty(*t).dims)?;
    }
    let mut columns = Vec::with_capacity(tensors.len());
    for t in tensors {
        let wide = c.low.b.cast(*t, DType::I64)?;
        let wide = c.low.broadcast_to(wide, &dims)?;
        columns.push(c.low.unsqueeze(wide, &[-1])?);
    }
    let all = c.low.concat(&columns, dims.len())?;
    Ok((all, dims))
}

/// Returns the permutation that puts the indexed axes first and keeps the others in order.
fn to_front(axes: &[usize], rank: usize) -> Vec<i64> {
    let rest = (0..rank).filter(|a| !axes.contains(a));
    axes.iter().copied().chain(rest).map(|a| a as i64).collect()
}

/// Returns how many axes stand before the indexed ones, if these are adjacent. An index then replaces them in place;
/// else the new axes come first.
fn axes_before(found: &Places) -> usize {
    let adjacent = found.axes.windows(2).all(|w| w[0] + 1 == w[1]);
    if adjacent { found.axes[0] } else { 0 }
}

fn by_tensors(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let rank = c.rank(x);
    let found = places(c, rank)?;
    if let ([axis], [places]) = (found.axes.as_slice(), found.tensors.as_slice()) {
        return c.result_with(&index::GATHER, &[x, *places], along(*axis));
    }
    let (all, dims) = joined(c, &found.tensors)?;
    let front = shape::transpose(&mut c.low.b, x, to_front(&found.axes, rank))?;
    let mut y = c.emit(&index::GATHER_ND, &[front, all])?;
    let (first, new) = (axes_before(&found), dims.len());
    if first > 0 {
        let perm = (new..new + first).chain(0..new);
        let perm = perm.chain(new + first..c.rank(y)).map(|a| a as i64);
        y = shape::transpose(&mut c.low.b, y, perm.collect())?;
    }
    c.made(y)
}

/// Emits a write at indices [.., axes] of the first axes, and brings the axes back into their order before `perm`.
fn put(c: &mut Call, ins: [ValueId; 3], reduction: &str, perm: &[i64]) -> Result<Value> {
    let attrs = Attrs::new().with("reduction", reduction);
    let y = c.emit_with(&scatter::SCATTER_ND, &ins, attrs)?;
    let y = shape::transpose(&mut c.low.b, y, inverse(perm))?;
    c.made(y)
}

fn index_put(c: &mut Call) -> Result<Value> {
    let (x, values) = (c.value("self")?, c.value("values")?);
    let rank = c.rank(x);
    let found = places(c, rank)?;
    let (all, dims) = joined(c, &found.tensors)?;
    let perm = to_front(&found.axes, rank);
    let front = shape::transpose(&mut c.low.b, x, perm.clone())?;
    let rest = c.shape_of(front)[found.axes.len()..].to_vec();
    let values = c.low.b.cast(values, c.dtype(x))?;
    // The values have the sizes that a read at these indices has.
    let (first, new) = (axes_before(&found), dims.len());
    let wanted = [&rest[..first], &dims, &rest[first..]].concat();
    let back = (first..first + new).chain(0..first);
    let back = back.chain(first + new..wanted.len()).map(|a| a as i64);
    let values = c.low.broadcast_to(values, &wanted)?;
    let values = shape::transpose(&mut c.low.b, values, back.collect())?;
    let reduction = match c.bool("accumulate", false)? {
        true => "add",
        false => "none",
    };
    put(c, [front, all, values], reduction, &perm)
}

/// Writes or adds rows at indices of an axis.
fn rows_put(c: &mut Call, reduction: &str) -> Result<Value> {
    let (x, at, mut rows) = (c.value("self")?, c.value("index")?, c.value("source")?);
    if let Some(alpha) = c.get("alpha").cloned() {
        let alpha = c.low.operand(&alpha, c.dtype(rows))?;
        rows = c.low.b.mul(rows, alpha)?;
    }
    let rank = c.rank(x);
    let axis = c.axis("dim", 0, rank)?;
    let perm = to_front(&[axis], rank);
    let front = shape::transpose(&mut c.low.b, x, perm.clone())?;
    let rows = shape::transpose(&mut c.low.b, rows, perm.clone())?;
    let at = c.low.b.cast(at, DType::I64)?;
    let at = c.low.unsqueeze(at, &[-1])?;
    put(c, [front, at, rows], reduction, &perm)
}

fn nonzero(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let places = c.emit(&index::NON_ZERO, &[x])?;
    c.low.read_sizes(places);
    let y = shape::transpose(&mut c.low.b, places, vec![1, 0])?;
    c.made(y)
}

/// Lowers a shift to a product with a power of two, or to a rounded quotient.
fn shifted(c: &mut Call) -> Result<Value> {
    let by = c.int("other", 0)?;
    let float = matches!(c.get("self"), Some(Value::Tensor(t)) if c.low.dtype(*t).is_float());
    if float || !(0..=62).contains(&by) {
        return Err(c.unsupported("this shift"));
    }
    let op = match c.name.contains("right") || c.name.contains("rshift") {
        true => "floor_divide",
        false => "mul",
    };
    c.run(op, [c.given("self"), (1i64 << by).into()])
}

/// Counts the elements of a sorted vector that come before each element of `self`. NaN comes behind all numbers.
fn ranked(c: &mut Call, sorted: &'static str) -> Result<Value> {
    let right = c.bool("right", false)? || c.str("side", "")? == "right";
    if c.has("sorter") || c.low.dims(c.tensor(sorted)?).len() != 1 {
        return Err(c.unsupported("a sequence that is no vector"));
    }
    c.formula(
        &[("sorted", c.given(sorted)), ("right", right.into())],
        "each = is_tensor(self) ? unsqueeze(self, -1) : self; \
         count = sum(~(right ? sorted > each : sorted >= each), -1); out_int32 ? to(count, int32) : count",
    )
}

fn index_fill(c: &mut Call) -> Result<Value> {
    let (x, axis) = c.self_axis()?;
    let at = c.tensor("index")?;
    let mut wanted = c.low.dims(x).to_vec();
    if let Some(size) = wanted.get_mut(axis) {
        *size = c.low.dims(at).first().cloned().unwrap_or(Dim::ONE);
    }
    let value = c.low.operand(&c.given("value"), c.low.dtype(x))?;
    let rows = c.low.broadcast_to(value, &wanted)?;
    let rows = c.made(rows)?;
    c.formula(
        &[("axis", (axis as i64).into()), ("rows", rows)],
        "index_copy(self, axis, atleast_1d(index), rows)",
    )
}

/// Lowers numbers at equal distances, or powers of `base` with such exponents.
fn spaced(c: &mut Call, base: Option<f64>) -> Result<Value> {
    let (start, end) = (c.float("start", 0.0)?, c.float("end", 1.0)?);
    let steps = c.int("steps", 100)?;
    let dtype = c.dtype_or(DEFAULT_FLOAT)?;
    if !(0..=MAX_TABLE).contains(&steps) || !dtype.is_float() {
        return Err(c.unsupported("this many steps, or steps of integers,"));
    }
    let step = if steps > 1 {
        (end - start) / (steps - 1) as f64
    } else {
        0.0
    };
    // PyTorch counts from both ends to the middle.
    let number = |i: i64| match i < steps / 2 || steps == 1 {
        true => start + step * i as f64,
        false => end - step * (steps - 1 - i) as f64,
    };
    let all = (0..steps).map(|i| base.map_or(number(i), |b| b.powf(number(i))));
    table(c, dtype, all)
}

/// Returns the numbers of the vector `repeats` if they are known, and each of its indices as often as its number says.
fn repeats(c: &mut Call) -> Result<(Option<Vec<i64>>, Value)> {
    let times = c.tensor("repeats")?;
    let known = c.low.known(times)?;
    let numbers: Option<Vec<i64>> = known.and_then(|k| k.iter().map(Dim::as_const).collect());
    let few = |n: &Vec<i64>| {
        let all = n.iter().try_fold(0i64, |sum, n| sum.checked_add(*n));
        n.iter().all(|n| *n >= 0) && all.is_some_and(|sum| sum <= MAX_TABLE)
    };
    let Some(numbers) = numbers.filter(few) else {
        // As many of the repeats end before a place as its index says.
        let text = "searchsorted(cumsum(repeats, 0), arange(sum(repeats)), right=true)";
        return Ok((None, c.formula(&[], text)?));
    };
    let each = numbers.iter().enumerate();
    let places = each.flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n as usize));
    let places = c.low.b.ints(&places.collect::<Vec<_>>());
    Ok((Some(numbers), c.made(places)?))
}

/// Repeats each slice along an axis as often as a vector says.
fn repeated(c: &mut Call) -> Result<Value> {
    let (numbers, places) = repeats(c)?;
    let (x, axis) = match c.has("dim") {
        true => (c.given("self"), c.int("dim", 0)?),
        false => (c.run("flatten", [c.given("self")])?, 0),
    };
    let dims = c.low.dims(id(c, &x)?).to_vec();
    let size = c.size_in(&dims, c.in_rank(axis, dims.len())?)?;
    let count = c.size(c.tensor("repeats")?, 0)?;
    if let Some([one]) = numbers.as_deref() {
        return c.run("repeat_interleave", [x, (*one).into(), axis.into()]);
    }
    if size.same(&count) != Same::Yes {
        return Err(c
            .fail("shape", "`repeats` does not fit the axis")
            .expected(size.to_string())
            .found(count.to_string()));
    }
    c.run("index_select", [x, axis.into(), places])
}

/// Combines updates with the elements at their indices, or, without `include_self`, with each other alone.
fn combined(c: &mut Call) -> Result<Value> {
    let own = c.bool("include_self", true)?;
    let how = c.str("reduce", "sum")?.to_string();
    let (reduction, neutral) = match how.as_str() {
        "sum" | "add" | "mean" => ("add", 0.0),
        "prod" | "multiply" => ("mul", 1.0),
        "amax" => ("max", f64::NEG_INFINITY),
        "amin" => ("min", f64::INFINITY),
        other => return Err(c.unsupported(format!("`reduce` {other}"))),
    };
    let ((x, axis), at) = (c.self_axis()?, c.value("index")?);
    let dtype = c.low.dtype(x);
    let src = c.given(c.either(&["value", "src"]));
    let mut updates = c.low.operand(&src, dtype)?;
    let dims = c.shape_of(at);
    if c.rank(updates) == 0 {
        updates = c.low.broadcast_to(updates, &dims)?;
    } else if !same_dims(&c.low.b.ty(updates).dims, &dims) {
        // The source may be larger than the index. The rest of it does not count.
        let mut used = c.low.fresh(updates);
        for (i, size) in dims.iter().enumerate() {
            used = views::sliced(c, used, i, &Dim::ZERO, size, 1)?;
        }
        updates = c.low.read(used)?;
    }
    let attrs = |reduction: &'static str| along(axis).with("reduction", reduction);
    let put = &scatter::SCATTER_ELEMENTS;
    let value = c.low.read(x)?;
    let target = match own {
        true => value,
        false => {
            let fill = c.low.b.scalar(dtype, neutral);
            let fill = c.low.broadcast_to(fill, &dims)?;
            c.emit_with(put, &[value, at, fill], attrs("none"))?
        }
    };
    let mut y = c.emit_with(put, &[target, at, updates], attrs(reduction))?;
    if how == "mean" {
        let begin = c.low.b.filled_like(value, if own { 1.0 } else { 0.0 })?;
        let one = c.low.b.scalar(dtype, 1.0);
        let ones = c.low.broadcast_to(one, &dims)?;
        let count = c.emit_with(put, &[begin, at, ones], attrs("add"))?;
        let count = c.emit(&extreme::MAX, &[count, one])?;
        y = match dtype.is_float() {
            true => c.low.b.div(y, count)?,
            false => return Err(c.unsupported("a mean of integers")),
        };
    }
    c.made(y)
}

/// Lowers `gather` along an axis, where the other sizes of both tensors broadcast.
fn take_along(c: &mut Call) -> Result<Value> {
    if !c.has("dim") {
        return c.run("take", [c.given("self"), c.given("indices")]);
    }
    let (x, at) = (c.tensor("self")?, c.tensor("indices")?);
    let (own, places) = (c.low.dims(x).to_vec(), c.low.dims(at).to_vec());
    let axis = c.axis("dim", 0, own.len())?;
    if own.len() != places.len() || own.is_empty() {
        return Err(c.fail("shape", "the tensors have different ranks"));
    }
    let with = |dims: &[Dim], size: &Dim| {
        let mut dims = dims.to_vec();
        dims[axis] = size.clone();
        dims
    };
    let both = views::broadcast(c, &with(&own, &Dim::ONE), &with(&places, &Dim::ONE))?;
    c.formula(
        &[
            ("own", with(&both, &own[axis]).into()),
            ("places", with(&both, &places[axis]).into()),
            ("axis", (axis as i64).into()),
        ],
        "x = expand(self, own); gather(x, axis, expand(indices, places))",
    )
}

/// Lowers the rows and columns of the elements on and below (or above) a diagonal, row by row.
fn triangle(c: &mut Call) -> Result<Value> {
    let upper = c.name == "triu_indices";
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
    let rows = places.iter().map(|p| p.0);
    let list: Vec<i64> = rows.chain(places.iter().map(|p| p.1)).collect();
    let list = c.low.b.ints(&list);
    let list = c.made(list)?;
    c.formula(
        &[("list", list), ("count", (places.len() as i64).into())],
        "y = reshape(list, [2, count]); given(dtype) ? to(y, dtype) : y",
    )
}
