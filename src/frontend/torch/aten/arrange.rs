//! Tensors joined, repeated, padded and reordered.

use super::super::value::{TensorId, Value};
use super::lowering::View;
use super::signature::{Call, Formula, Op};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Same, ValueId};
use ckpt_passes::ops::{EmitExt, arith, concat, logic, slice};

pub const FORMULAS: &[Formula] = &[
    "diag(self: t, diagonal: i?) => dim(self) == 1 ? diag_embed(self, diagonal) : diagonal(self, diagonal)",
    "fliplr(self: t) => flip(self, 1)",
    "flipud(self: t) => flip(self, 0)",
    "ravel(self: t) => flatten(self)",
    "reflection_pad{1,2,3}d(self: t, padding: I) => pad(self, padding, 'reflect')",
    "replication_pad{1,2,3}d(self: t, padding: I) => pad(self, padding, 'replicate')",
    "trace(self: t) => sum(diagonal(self))",
];

pub const OPS: &[Op] = &[
    ("block_diag(tensors: l)", block_diagonal),
    ("cartesian_prod(tensors: l)", cartesian),
    ("{cat,concat,concatenate}(tensors: l, dim: i?)", cat),
    ("channel_shuffle(self: t, groups: i)", channel_shuffle),
    ("column_stack(tensors: l)", column_stack),
    ("constant_pad_nd(self: t, pad: I, value: s?)", pad),
    ("pad(self: t, pad: I, mode: S?, value: f?)", pad),
    (
        "diag_embed(self: t, offset: i?, dim1: i?, dim2: i?)",
        diag_embed,
    ),
    (
        "diagonal(self: t, offset: i?, dim1: i?, dim2: i?)",
        diagonal,
    ),
    (
        "diff(self: t, n: i?, dim: i?, prepend: t?, append: t?)",
        diff,
    ),
    ("dstack(tensors: l)", |c| stacked(c, "atleast_3d", 2)),
    ("flip(self: t, dims: I)", flip),
    (
        "{h,v,d}split(self: t, sections: i); {h,v,d}split(self: t, indices: I)",
        split_along,
    ),
    ("hstack(tensors: l)", hstack),
    ("kron(self: t, other: t)", kron),
    ("meshgrid(tensors: l, *, indexing: S?)", meshgrid),
    ("pixel_shuffle(self: t, upscale_factor: i)", pixel_shuffle),
    (
        "pixel_unshuffle(self: t, downscale_factor: i)",
        pixel_unshuffle,
    ),
    (
        "repeat(self: t, repeats: I); tile(self: t, dims: I)",
        repeat,
    ),
    (
        "repeat_interleave(self: t, repeats: i, dim: i?, *, output_size: i?)",
        repeat_each,
    ),
    ("roll(self: t, shifts: I, dims: I?)", roll),
    ("rot90(self: t, k: i?, dims: I?)", rot90),
    ("stack(tensors: l, dim: i?)", stack),
    (
        "tensor_split(self: t, sections: i, dim: i?); tensor_split(self: t, indices: I, dim: i?)",
        split_at,
    ),
    ("{vstack,row_stack}(tensors: l)", |c| {
        stacked(c, "atleast_2d", 0)
    }),
];

fn block_diagonal(c: &mut Call) -> Result<Value> {
    let mut blocks = Vec::new();
    let mut width = Dim::ZERO;
    for t in c.tensors("tensors")? {
        let block = c.run("atleast_2d", [t.into()])?;
        let size = c.low.dims(id(c, &block)?)[1].clone();
        width = width.add(&size);
        blocks.push((block, size));
    }
    let mut before = Dim::ZERO;
    let mut rows = Vec::with_capacity(blocks.len());
    for (block, size) in blocks {
        let behind = width.sub(&before).sub(&size);
        let pads = Value::from(vec![before.clone(), behind]);
        rows.push(c.run("constant_pad_nd", [block, pads])?);
        before = before.add(&size);
    }
    c.run("cat", [rows.into(), 0.into()])
}

fn cartesian(c: &mut Call) -> Result<Value> {
    if let [Value::Tensor(one)] = c.given("tensors").members() {
        return Ok(Value::Tensor(*one));
    }
    let grids = c.run("meshgrid", [c.given("tensors")])?;
    let columns = each(c, grids.members(), "flatten")?;
    c.run("stack", [columns.into(), 1.into()])
}

/// Calls an op on each of several values.
fn each(c: &mut Call, values: &[Value], op: &str) -> Result<Vec<Value>> {
    let results = values.iter().map(|value| c.run(op, [value.clone()]));
    results.collect()
}

/// Returns the tensor that a call gave.
pub(super) fn id(c: &Call, value: &Value) -> Result<TensorId> {
    match value {
        Value::Tensor(id) => Ok(*id),
        other => Err(c.fail("op", "a tensor is needed").found(other.kind())),
    }
}

/// Returns the distance of a diagonal from the main one.
fn offset(c: &Call) -> Result<i64> {
    let offset = c.int("offset", 0)?;
    if offset.unsigned_abs() > 1 << 30 {
        return Err(c.fail("axis", format!("there is no diagonal {offset}")));
    }
    Ok(offset)
}

/// Returns `size / n`, which must be whole.
fn share(c: &Call, size: &Dim, n: i64) -> Result<Dim> {
    let share = (n > 0).then(|| size.exact_div(&Dim::from(n))).flatten();
    share.ok_or_else(|| {
        c.fail("shape", "the size is no multiple")
            .expected(format!("a multiple of {n}"))
            .found(size.to_string())
    })
}

fn channel_shuffle(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let groups = c.int("groups", 1)?;
    if dims.len() < 3 {
        return Err(c.fail("shape", "the tensor has no channels"));
    }
    let per_group = share(c, &dims[1], groups)?;
    let mut apart = dims.clone();
    apart.splice(1..2, [Dim::from(groups), per_group]);
    c.formula(
        &[("apart", apart.into()), ("sizes", dims.into())],
        "reshape(transpose(reshape(self, apart), 1, 2), sizes)",
    )
}

/// Reshapes an image, permutes the last five axes, and reshapes it again. `lead` are the axes before them.
fn repacked(
    c: &mut Call,
    lead: &[Dim],
    apart: [&Dim; 5],
    order: [i64; 5],
    tail: &[Dim; 3],
) -> Result<Value> {
    let n = lead.len() as i64;
    let perm: Vec<i64> = (0..n).chain(order.map(|axis| n + axis)).collect();
    c.formula(
        &[
            ("apart", [lead, &apart.map(Dim::clone)].concat().into()),
            ("perm", perm.into()),
            ("sizes", [lead, tail].concat().into()),
        ],
        "reshape(permute(reshape(self, apart), perm), sizes)",
    )
}

/// Lowers [.., channels·r², height, width] to [.., channels, height·r, width·r].
fn pixel_shuffle(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let r = c.int("upscale_factor", 1)?;
    let [lead @ .., channels, height, width] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor is no image"));
    };
    let channels = share(c, channels, r.saturating_mul(r))?;
    let r = Dim::from(r);
    let tail = [channels.clone(), height.mul(&r), width.mul(&r)];
    let apart = [&channels, &r, &r, height, width];
    repacked(c, lead, apart, [0, 3, 1, 4, 2], &tail)
}

/// Lowers the inverse of `pixel_shuffle`.
fn pixel_unshuffle(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let r = c.int("downscale_factor", 1)?;
    let [lead @ .., channels, height, width] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor is no image"));
    };
    let (height, width) = (share(c, height, r)?, share(c, width, r)?);
    let r = Dim::from(r);
    let tail = [channels.mul(&r).mul(&r), height.clone(), width.clone()];
    let apart = [channels, &height, &r, &width, &r];
    repacked(c, lead, apart, [0, 2, 4, 1, 3], &tail)
}

/// Concatenates tensors along `axis`, each lifted to a rank by `lift`.
fn stacked(c: &mut Call, lift: &str, axis: i64) -> Result<Value> {
    let tensors = c.given("tensors");
    let lifted = each(c, tensors.members(), lift)?;
    c.run("cat", [lifted.into(), axis.into()])
}

fn hstack(c: &mut Call) -> Result<Value> {
    let tensors = c.tensors("tensors")?;
    let flat = tensors.iter().all(|t| c.low.dims(*t).len() < 2);
    stacked(c, "atleast_1d", i64::from(!flat))
}

fn column_stack(c: &mut Call) -> Result<Value> {
    let mut columns = Vec::new();
    for t in c.tensors("tensors")? {
        columns.push(match c.low.dims(t).len() {
            0 | 1 => c.formula(&[("x", t.into())], "unsqueeze(atleast_1d(x), 1)")?,
            _ => t.into(),
        });
    }
    c.run("cat", [columns.into(), 1.into()])
}

/// Lowers the elements (i, i + offset) of two axes to a last axis.
fn diagonal(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let dims = c.low.dims(x).to_vec();
    let rank = dims.len();
    let offset = offset(c)?;
    let (down, across) = (c.axis("dim1", 0, rank)?, c.axis("dim2", 1, rank)?);
    if rank < 2 || down == across {
        return Err(c.fail("axis", "a diagonal needs two axes"));
    }
    let (rows, columns) = (&dims[down], &dims[across]);
    let (above, left) = (Dim::from((-offset).max(0)), Dim::from(offset.max(0)));
    let room = columns.sub(&left);
    let count = rows.sub(&above).smaller(&room).larger(&Dim::ZERO);
    let rest = (0..rank).filter(|a| *a != down && *a != across);
    let perm: Vec<i64> = rest.chain([down, across]).map(|a| a as i64).collect();
    let lead = perm[..rank - 2].iter().map(|a| dims[*a as usize].clone());
    // One element of each row, so that rows stay rows.
    let places: Vec<Dim> = lead.chain([count.clone(), Dim::ONE]).collect();
    let y = c.formula(
        &[
            ("perm", perm.into()),
            ("places", places.into()),
            ("count", count.into()),
            ("above", above.into()),
            ("left", left.into()),
        ],
        "rows = narrow(permute(self, perm), -2, above, count); \
         places = expand(unsqueeze(arange(count) + left, 1), places); squeeze(gather(rows, -1, places), -1)",
    )?;
    let y = id(c, &y)?;
    let y = c.low.read(y)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, y)))
}

/// Lowers the last axis to the diagonal of two axes, with zeros beside it.
fn diag_embed(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let rank = dims.len() + 1;
    let Some(size) = dims.last() else {
        return Err(c.fail("shape", "a scalar has no axis"));
    };
    let offset = offset(c)?;
    let (dim1, dim2) = (c.axis("dim1", -2, rank)?, c.axis("dim2", -1, rank)?);
    // A row holds its own element above the diagonal, a column holds its own below it.
    let (low, high) = (dim1.min(dim2), dim1.max(dim2));
    let offset = if dim1 < dim2 { offset } else { -offset };
    let behind = if offset >= 0 { -1 } else { -2 };
    c.formula(
        &[
            ("whole", size.add(&Dim::from(offset.abs())).into()),
            ("offset", offset.into()),
            ("pads", Value::ints(&[0, offset.abs()])),
            ("behind", behind.into()),
            ("to_axes", Value::ints(&[low as i64, high as i64])),
        ],
        "places = arange(whole); own = unsqueeze(places, 1) + offset == places; \
         x = unsqueeze(constant_pad_nd(self, pads), behind); \
         movedim(to(where(own, x, 0.0), dtype(self)), [-2, -1], to_axes)",
    )
}

fn kron(c: &mut Call) -> Result<Value> {
    let (mut a, mut b) = (c.sizes("self")?, c.sizes("other")?);
    let rank = a.len().max(b.len());
    for dims in [&mut a, &mut b] {
        dims.splice(0..0, vec![Dim::ONE; rank - dims.len()]);
    }
    let left = a.iter().flat_map(|d| [d.clone(), Dim::ONE]);
    let right = b.iter().flat_map(|d| [Dim::ONE, d.clone()]);
    let whole = a.iter().zip(&b).map(|(a, b)| a.mul(b));
    c.formula(
        &[
            ("left", left.collect::<Vec<_>>().into()),
            ("right", right.collect::<Vec<_>>().into()),
            ("whole", whole.collect::<Vec<_>>().into()),
        ],
        "reshape(reshape(self, left) * reshape(other, right), whole)",
    )
}

fn meshgrid(c: &mut Call) -> Result<Value> {
    let swapped = match c.str("indexing", "ij")? {
        "ij" => false,
        "xy" => true,
        other => return Err(c.unsupported(format!("`indexing` {other}"))),
    };
    let mut given = c.tensors("tensors")?;
    let swapped = swapped && given.len() > 1;
    if swapped {
        given.swap(0, 1);
    }
    let mut dims = Vec::with_capacity(given.len());
    for t in &given {
        dims.push(match c.low.dims(*t) {
            [] => Dim::ONE,
            [size] => size.clone(),
            _ => return Err(c.fail("shape", "the tensors have to be vectors")),
        });
    }
    let mut grids = Vec::with_capacity(given.len());
    for (i, t) in given.iter().enumerate() {
        let mut own = vec![Dim::ONE; given.len()];
        own[i] = dims[i].clone();
        let apart = c.run("reshape", [(*t).into(), own.into()])?;
        grids.push(c.run("expand", [apart, dims.clone().into()])?);
    }
    if swapped {
        grids.swap(0, 1);
    }
    Ok(Value::List(grids))
}

fn rot90(c: &mut Call) -> Result<Value> {
    let axes = c.ints("dims")?.unwrap_or_else(|| vec![0, 1]);
    let [a, b] = axes[..] else {
        return Err(c.fail("axis", "a rotation needs two axes"));
    };
    let text = match c.int("k", 1)?.rem_euclid(4) {
        1 => "transpose(flip(self, b), a, b)",
        2 => "flip(self, [a, b])",
        3 => "transpose(flip(self, a), a, b)",
        _ => "clone(self)",
    };
    c.formula(&[("a", a.into()), ("b", b.into())], text)
}

/// Splits along `dim`.
fn split_at(c: &mut Call) -> Result<Value> {
    let axis = c.int("dim", 0)?;
    sections(c, axis)
}

/// Lowers `hsplit`, `vsplit` and `dsplit`: along columns, rows or depth. A vector has its columns along its only axis.
fn split_along(c: &mut Call) -> Result<Value> {
    let axis = match c.name.as_str() {
        "hsplit" => i64::from(c.sizes("self")?.len() > 1),
        "vsplit" => 0,
        _ => 2,
    };
    sections(c, axis)
}

/// Splits into a number of chunks that are as equal as possible, the first ones one larger, or at the given indices.
fn sections(c: &mut Call, axis: i64) -> Result<Value> {
    let dims = c.sizes("self")?;
    let at = c.in_rank(axis, dims.len())?;
    let size = dims.get(at).and_then(Dim::as_const);
    let count = c.int("sections", 1)?;
    let (Some(size), 1..=65_536) = (size, count) else {
        return Err(c.fail("shape", "the sizes of the parts are not known"));
    };
    let chunks: Vec<i64> = if c.has("sections") {
        let (each, more) = (size / count, size % count);
        (0..count).map(|i| each + i64::from(i < more)).collect()
    } else {
        let mut ends = vec![0];
        for end in c.ints("indices")?.unwrap_or_default() {
            let end = if end < 0 { end + size } else { end };
            ends.push(end.clamp(ends[ends.len() - 1], size));
        }
        ends.push(size);
        ends.windows(2).map(|w| w[1] - w[0]).collect()
    };
    let x = c.given("self");
    c.run("split_with_sizes", [x, chunks.into(), axis.into()])
}

/// Returns tensors as values of their common element type.
pub(super) fn promoted(c: &mut Call, tensors: &[TensorId]) -> Result<Vec<ValueId>> {
    let operands: Vec<Value> = tensors.iter().map(|t| Value::Tensor(*t)).collect();
    let dtype = c.low.promoted(&operands.iter().collect::<Vec<_>>())?;
    let values = operands.iter().map(|operand| c.low.operand(operand, dtype));
    values.collect()
}

/// Returns the axis `dim` of the first of several tensors, which may have one axis `more`.
fn axis_of_first(c: &Call, tensors: &[TensorId], more: usize) -> Result<usize> {
    let Some(first) = tensors.first() else {
        return Err(c.fail("op", "no tensors"));
    };
    c.axis("dim", 0, c.low.dims(*first).len() + more)
}

fn cat(c: &mut Call) -> Result<Value> {
    let all = c.tensors("tensors")?;
    // PyTorch has always let an empty vector be concatenated with a tensor of any rank.
    let is_nothing = |t: &TensorId| matches!(c.low.dims(*t), [n] if *n == Dim::ZERO);
    let kept: Vec<TensorId> = all.iter().copied().filter(|t| !is_nothing(t)).collect();
    let tensors = if kept.is_empty() { all } else { kept };
    let axis = axis_of_first(c, &tensors, 0)?;
    let values = promoted(c, &tensors)?;
    let y = c.low.concat(&values, axis)?;
    c.made(y)
}

fn stack(c: &mut Call) -> Result<Value> {
    let tensors = c.tensors("tensors")?;
    let axis = axis_of_first(c, &tensors, 1)?;
    let operands: Vec<Value> = tensors.iter().map(|t| Value::Tensor(*t)).collect();
    let dtype = c.low.promoted(&operands.iter().collect::<Vec<_>>())?;
    let mut rows = Vec::with_capacity(tensors.len());
    for operand in &operands {
        let value = c.low.operand(operand, dtype)?;
        rows.push(c.low.unsqueeze(value, &[axis as i64])?);
    }
    let y = c.low.concat(&rows, axis)?;
    c.made(y)
}

fn pad(c: &mut Call) -> Result<Value> {
    let mode = c.str("mode", "constant")?.to_string();
    let x = c.value("self")?;
    let rank = c.rank(x);
    let pairs = c.dims("pad")?.unwrap_or_default();
    if pairs.len() % 2 != 0 || pairs.len() > 2 * rank {
        return Err(c.fail("shape", "`pad` does not fit the tensor"));
    }
    if mode != "constant" {
        return padded(c, x, &pairs, &mode);
    }
    // Pairs start from the last axis. All axes are named, because ONNX Runtime turns a transposed `Pad` as if it had no
    // `axes`.
    let mut pads = vec![Dim::ZERO; 2 * rank];
    for (i, pair) in pairs.chunks_exact(2).enumerate() {
        let axis = rank - 1 - i;
        pads[axis].clone_from(&pair[0]);
        pads[rank + axis].clone_from(&pair[1]);
    }
    let pads = c.low.int_vector(&pads)?;
    let value = c.get("value").cloned().unwrap_or(Value::Float(0.0));
    let value = c.low.operand(&value, c.dtype(x))?;
    let attrs = Attrs::new().with("mode", "constant");
    c.result_with(&concat::PAD, &[x, pads, value], attrs)
}

/// Pads with the operand's own elements. `pairs` of amounts before and behind start from the last axis.
fn padded(c: &mut Call, x: ValueId, pairs: &[Dim], mode: &str) -> Result<Value> {
    let mode = match mode {
        "reflect" => "reflect",
        "replicate" => "edge",
        "circular" => "wrap",
        other => return Err(c.unsupported(format!("`mode` {other}"))),
    };
    let last = c.rank(x) as i64 - 1;
    let axes: Vec<i64> = (0..pairs.len() as i64 / 2).map(|i| last - i).collect();
    let before = pairs.iter().step_by(2).cloned();
    let behind = pairs.iter().skip(1).step_by(2).cloned();
    let pads: Vec<Dim> = before.chain(behind).collect();
    let pads = c.low.int_vector(&pads)?;
    let axes = c.low.b.ints(&axes);
    let ins = [Some(x), Some(pads), None, Some(axes)];
    let attrs = Attrs::new().with("mode", mode);
    let y = standard(&mut c.low.b, "Pad", &attrs, &ins, 1)?[0];
    c.made(y)
}

/// Lowers the differences of neighbours along an axis, `n` times. Truth values differ by exclusive or.
fn diff(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let axis = c.axis("dim", -1, c.low.dims(x).len())?;
    let given = ["prepend", "self", "append"].into_iter();
    let given: Result<Vec<TensorId>> = given.filter(|n| c.has(n)).map(|n| c.tensor(n)).collect();
    let values = promoted(c, &given?)?;
    let mut y = c.low.concat(&values, axis)?;
    for _ in 0..c.int("n", 1)?.clamp(0, 64) {
        let size = c.shape_of(y)[axis].clone();
        let less = size.sub(&Dim::ONE).larger(&Dim::ZERO);
        let earlier = c.low.apply(&View::range(axis, Dim::ZERO, less), y)?;
        let start = Dim::ONE.smaller(&size);
        let later = c.low.apply(&View::range(axis, start, size), y)?;
        let op = match c.dtype(y) {
            DType::Bool => &logic::XOR,
            _ => &arith::SUB,
        };
        y = c.emit(op, &[later, earlier])?;
    }
    c.made(y)
}

fn flip(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let rank = c.rank(x);
    if c.ints("dims")?.is_none_or(|d| d.is_empty()) || rank == 0 {
        return c.made(x);
    }
    let axes: Vec<i64> = c.axes("dims", rank)?.iter().map(|a| *a as i64).collect();
    let vector = |c: &mut Call, n: i64| c.low.b.ints(&vec![n; axes.len()]);
    let (starts, ends, steps) = (vector(c, -1), vector(c, i64::MIN), vector(c, -1));
    let axes = c.low.b.ints(&axes);
    c.result(&slice::SLICE, &[x, starts, ends, axes, steps])
}

fn repeat(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let named = c.either(&["repeats", "dims"]);
    let mut times = c.dims(named)?.unwrap_or_default();
    let new = times.len().saturating_sub(c.rank(x)) as i64;
    x = c.low.unsqueeze(x, &(0..new).collect::<Vec<_>>())?;
    times.splice(0..0, vec![Dim::ONE; c.rank(x) - times.len()]);
    if times.iter().all(Dim::is_one) {
        return c.made(x);
    }
    let times = c.low.int_vector(&times)?;
    c.result(&concat::TILE, &[x, times])
}

/// Repeats each slice along an axis, given as `value`, right behind itself.
pub(super) fn repeated(c: &mut Call, value: ValueId, axis: usize, times: &Dim) -> Result<ValueId> {
    let mut wide = c.shape_of(value);
    let apart = c.low.unsqueeze(value, &[axis as i64 + 1])?;
    wide.insert(axis + 1, times.clone());
    c.low.broadcast_to(apart, &wide)
}

fn repeat_each(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let times = c.dim("repeats", 1)?;
    let axis = if c.has("dim") {
        c.axis("dim", 0, c.rank(x))?
    } else {
        x = c.flattened(x)?;
        0
    };
    let mut flat = c.shape_of(x);
    let wide = repeated(c, x, axis, &times)?;
    flat[axis] = flat[axis].mul(&times);
    let y = c.low.apply(&View::Reshape(flat), wide)?;
    c.made(y)
}

fn roll(c: &mut Call) -> Result<Value> {
    let mut x = c.value("self")?;
    let shifts = c.dims("shifts")?.unwrap_or_default();
    let own = c.shape_of(x);
    let mut axes = c.listed_axes("dims", own.len())?;
    let flat = axes.is_empty();
    if flat {
        x = c.flattened(x)?;
        axes.push(0);
    }
    if axes.len() != shifts.len() {
        return Err(c.fail("shape", "`shifts` and `dims` have different lengths"));
    }
    for (axis, shift) in axes.into_iter().zip(shifts) {
        let size = c.size_in(&c.low.b.ty(x).dims, axis)?;
        if size.same(&Dim::ZERO) == Same::Yes {
            continue;
        }
        // The last `shift` elements come first.
        let cut = size.sub(&shift).modulo(&size);
        let tail = c.low.apply(&View::range(axis, cut.clone(), size), x)?;
        let head = c.low.apply(&View::range(axis, Dim::ZERO, cut), x)?;
        x = c.low.concat(&[tail, head], axis)?;
    }
    if flat {
        x = c.low.apply(&View::Reshape(own), x)?;
    }
    c.made(x)
}
