//! Tensors put in another order: diagonals, grids, stacks and shuffles, written as views and joins.

use super::Value;
use super::composed::id;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::Dim;

pub const OPS: &[Op] = &[
    ("block_diag(tensors: l)", block_diagonal),
    ("cartesian_prod(tensors: l)", cartesian),
    ("channel_shuffle(self: t, groups: i)", channel_shuffle),
    ("column_stack(tensors: l)", column_stack),
    ("diag(self: t, diagonal: i?)", diag),
    (
        "diag_embed(self: t, offset: i?, dim1: i?, dim2: i?)",
        diag_embed,
    ),
    (
        "diagonal(self: t, offset: i?, dim1: i?, dim2: i?)",
        diagonal,
    ),
    ("dsplit(self: t, sections: i)", |c| split_along(c, 2)),
    ("dsplit(self: t, indices: I)", |c| split_along(c, 2)),
    ("dstack(tensors: l)", |c| stacked(c, "atleast_3d", 2)),
    ("fliplr(self: t)", |c| {
        c.run("flip", [c.given("self"), Value::ints(&[1])])
    }),
    ("flipud(self: t)", |c| {
        c.run("flip", [c.given("self"), Value::ints(&[0])])
    }),
    ("hsplit(self: t, sections: i)", hsplit),
    ("hsplit(self: t, indices: I)", hsplit),
    ("hstack(tensors: l)", hstack),
    ("kron(self: t, other: t)", kron),
    ("meshgrid(tensors: l, *, indexing: S?)", meshgrid),
    ("pixel_shuffle(self: t, upscale_factor: i)", pixel_shuffle),
    (
        "pixel_unshuffle(self: t, downscale_factor: i)",
        pixel_unshuffle,
    ),
    ("ravel(self: t)", |c| c.run("flatten", [c.given("self")])),
    ("rot90(self: t, k: i?, dims: I?)", rot90),
    ("row_stack(tensors: l)", |c| stacked(c, "atleast_2d", 0)),
    ("tensor_split(self: t, sections: i, dim: i?)", sections),
    ("tensor_split(self: t, indices: I, dim: i?)", |c| {
        let axis = c.int("dim", 0)?;
        cut_at(c, axis, "indices")
    }),
    ("trace(self: t)", |c| {
        let line = c.run("diagonal", [c.given("self")])?;
        c.run("sum", [line])
    }),
    ("vsplit(self: t, sections: i)", |c| split_along(c, 0)),
    ("vsplit(self: t, indices: I)", |c| split_along(c, 0)),
    ("vstack(tensors: l)", |c| stacked(c, "atleast_2d", 0)),
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
        let pads = Value::List(vec![before.clone().into(), behind.into()]);
        rows.push(c.run("constant_pad_nd", [block, pads])?);
        before = before.add(&size);
    }
    c.run("cat", [Value::List(rows), 0.into()])
}

fn cartesian(c: &mut Call) -> Result<Value> {
    if let [Value::Tensor(one)] = c.given("tensors").listed() {
        return Ok(Value::Tensor(*one));
    }
    let grids = c.run("meshgrid", [c.given("tensors")])?;
    let mut columns = Vec::new();
    for grid in grids.listed() {
        columns.push(c.run("flatten", [grid.clone()])?);
    }
    c.run("stack", [Value::List(columns), 1.into()])
}

/// How far a diagonal is from the main one.
fn offset(c: &Call, name: &str) -> Result<i64> {
    let offset = c.int(name, 0)?;
    if offset.unsigned_abs() > 1 << 30 {
        return Err(c.fail("axis", format!("there is no diagonal {offset}")));
    }
    Ok(offset)
}

/// A tensor's sizes.
pub(super) fn sizes(c: &Call, name: &str) -> Result<Vec<Dim>> {
    Ok(c.low.dims(c.tensor(name)?).to_vec())
}

fn shape(dims: Vec<Dim>) -> Value {
    Value::List(dims.into_iter().map(Value::Int).collect())
}

/// `size / n`, which has to be whole.
fn share(c: &Call, size: &Dim, n: i64) -> Result<Dim> {
    let share = if n > 0 {
        size.exact_div(&Dim::from(n))
    } else {
        None
    };
    share.ok_or_else(|| {
        c.fail("shape", "the size is no multiple")
            .expected(format!("a multiple of {n}"))
            .found(size.to_string())
    })
}

fn channel_shuffle(c: &mut Call) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let groups = c.int("groups", 1)?;
    if dims.len() < 3 {
        return Err(c.fail("shape", "the tensor has no channels"));
    }
    let each = share(c, &dims[1], groups)?;
    let mut apart = dims.clone();
    apart.splice(1..2, [Dim::from(groups), each]);
    let y = c.run("reshape", [c.given("self"), shape(apart)])?;
    let y = c.run("transpose", [y, 1.into(), 2.into()])?;
    c.run("reshape", [y, shape(dims)])
}

/// [.., channels·r², height, width] as [.., channels, height·r, width·r].
fn pixel_shuffle(c: &mut Call) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let r = c.int("upscale_factor", 1)?;
    let [lead @ .., channels, height, width] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor is no image"));
    };
    let channels = share(c, channels, r.saturating_mul(r))?;
    let (n, r) = (lead.len() as i64, Dim::from(r));
    let tail = [&channels, &r, &r, height, width].map(Dim::clone);
    let y = c.run("reshape", [c.given("self"), shape([lead, &tail].concat())])?;
    let order = [n, n + 3, n + 1, n + 4, n + 2];
    let perm: Vec<i64> = (0..n).chain(order).collect();
    let y = c.run("permute", [y, Value::ints(&perm)])?;
    let tail = [channels, height.mul(&r), width.mul(&r)];
    c.run("reshape", [y, shape([lead, &tail].concat())])
}

/// The inverse of `pixel_shuffle`.
fn pixel_unshuffle(c: &mut Call) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let r = c.int("downscale_factor", 1)?;
    let [lead @ .., channels, height, width] = dims.as_slice() else {
        return Err(c.fail("shape", "the tensor is no image"));
    };
    let (height, width) = (share(c, height, r)?, share(c, width, r)?);
    let (n, r) = (lead.len() as i64, Dim::from(r));
    let tail = [channels, &height, &r, &width, &r].map(Dim::clone);
    let y = c.run("reshape", [c.given("self"), shape([lead, &tail].concat())])?;
    let order = [n, n + 2, n + 4, n + 1, n + 3];
    let perm: Vec<i64> = (0..n).chain(order).collect();
    let y = c.run("permute", [y, Value::ints(&perm)])?;
    let tail = [channels.mul(&r).mul(&r), height, width];
    c.run("reshape", [y, shape([lead, &tail].concat())])
}

/// The tensors with at least as many axes as `lift` gives, one after the other along `axis`.
fn stacked(c: &mut Call, lift: &str, axis: i64) -> Result<Value> {
    let mut lifted = Vec::new();
    for t in c.tensors("tensors")? {
        lifted.push(c.run(lift, [t.into()])?);
    }
    c.run("cat", [Value::List(lifted), axis.into()])
}

fn hstack(c: &mut Call) -> Result<Value> {
    let flat = c
        .tensors("tensors")?
        .iter()
        .all(|t| c.low.dims(*t).len() < 2);
    stacked(c, "atleast_1d", i64::from(!flat))
}

fn column_stack(c: &mut Call) -> Result<Value> {
    let mut columns = Vec::new();
    for t in c.tensors("tensors")? {
        columns.push(match c.low.dims(t).len() {
            0 | 1 => {
                let flat = c.run("atleast_1d", [t.into()])?;
                c.run("unsqueeze", [flat, 1.into()])?
            }
            _ => t.into(),
        });
    }
    c.run("cat", [Value::List(columns), 1.into()])
}

fn diag(c: &mut Call) -> Result<Value> {
    let name = match c.low.dims(c.tensor("self")?).len() {
        1 => "diag_embed",
        _ => "diagonal",
    };
    c.run(name, [c.given("self"), c.given("diagonal")])
}

/// The elements (i, i + offset) of two axes, as a last one.
fn diagonal(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let rank = c.low.dims(x).len();
    let offset = offset(c, "offset")?;
    let (down, across) = (c.axis("dim1", 0, rank)?, c.axis("dim2", 1, rank)?);
    if rank < 2 || down == across {
        return Err(c.fail("axis", "a diagonal needs two axes"));
    }
    let dims = c.low.dims(x).to_vec();
    let (rows, columns) = (&dims[down], &dims[across]);
    let (above, left) = ((-offset).max(0), offset.max(0));
    let rows = rows.sub(&Dim::from(above));
    let room = columns.sub(&Dim::from(left));
    let count = rows.smaller(&room).larger(&Dim::ZERO);
    let rest = (0..rank).filter(|a| *a != down && *a != across);
    let perm: Vec<i64> = rest.chain([down, across]).map(|a| a as i64).collect();
    let lead = perm[..rank - 2].iter().map(|a| dims[*a as usize].clone());
    let flat: Vec<Dim> = lead.chain([dims[down].mul(columns)]).collect();
    let y = c.run("permute", [x.into(), Value::ints(&perm)])?;
    let y = c.run("reshape", [y, shape(flat)])?;
    let places = c.run("arange", [count.into()])?;
    let step = columns.add(&Dim::ONE);
    let places = c.run("mul", [places, step.into()])?;
    let begin = columns.mul(&Dim::from(above)).add(&Dim::from(left));
    let places = c.run("add", [places, begin.into()])?;
    let y = c.run("index_select", [y, (-1).into(), places])?;
    let y = id(c, &y)?;
    let y = c.low.read(y)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, y)))
}

/// The last axis as the diagonal of two; zeros beside it.
fn diag_embed(c: &mut Call) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let rank = dims.len() + 1;
    let Some(size) = dims.last() else {
        return Err(c.fail("shape", "a scalar has no axis"));
    };
    let (offset, dim1, dim2) = (
        offset(c, "offset")?,
        c.axis("dim1", -2, rank)?,
        c.axis("dim2", -1, rank)?,
    );
    // A row holds its own element above the diagonal, a column its own below it.
    let (low, high) = (dim1.min(dim2), dim1.max(dim2));
    let offset = if dim1 < dim2 { offset } else { -offset };
    let whole = size.add(&Dim::from(offset.abs()));
    let places = c.run("arange", [whole.into()])?;
    let rows = c.run("unsqueeze", [places.clone(), 1.into()])?;
    let rows = c.run("add", [rows, offset.into()])?;
    let own = c.run("eq", [rows, places])?;
    let pads = Value::ints(&[0, offset.abs()]);
    let x = c.run("constant_pad_nd", [c.given("self"), pads])?;
    let x = c.run("unsqueeze", [x, if offset >= 0 { -1 } else { -2 }.into()])?;
    let y = c.run("where", [own, x, 0.0.into()])?;
    let dtype = c.low.dtype(c.tensor("self")?);
    let y = c.run("to", [y, Value::DType(dtype)])?;
    let (from, to) = ([-2, -1], [low as i64, high as i64]);
    c.run("movedim", [y, Value::ints(&from), Value::ints(&to)])
}

fn kron(c: &mut Call) -> Result<Value> {
    let (mut a, mut b) = (sizes(c, "self")?, sizes(c, "other")?);
    while a.len() < b.len() {
        a.insert(0, Dim::ONE);
    }
    while b.len() < a.len() {
        b.insert(0, Dim::ONE);
    }
    let pairs = |first: &[Dim], own: bool| -> Vec<Dim> {
        let each = |d: &Dim| match own {
            true => [d.clone(), Dim::ONE],
            false => [Dim::ONE, d.clone()],
        };
        first.iter().flat_map(each).collect()
    };
    let x = c.run("reshape", [c.given("self"), shape(pairs(&a, true))])?;
    let y = c.run("reshape", [c.given("other"), shape(pairs(&b, false))])?;
    let y = c.run("mul", [x, y])?;
    let whole = a.iter().zip(&b).map(|(a, b)| a.mul(b)).collect();
    c.run("reshape", [y, shape(whole)])
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
        let apart = c.run("reshape", [(*t).into(), shape(own)])?;
        let grid = c.run("expand", [apart, shape(dims.clone())])?;
        grids.push(grid);
    }
    if swapped {
        grids.swap(0, 1);
    }
    Ok(Value::List(grids))
}

fn rot90(c: &mut Call) -> Result<Value> {
    let axes = c.ints("dims")?.unwrap_or_else(|| vec![0, 1]);
    let [a, b] = axes.as_slice() else {
        return Err(c.fail("axis", "a rotation needs two axes"));
    };
    let (a, b) = (*a, *b);
    let x = c.given("self");
    let flip = |c: &mut Call, x: Value, axes: &[i64]| c.run("flip", [x, Value::ints(axes)]);
    match c.int("k", 1)?.rem_euclid(4) {
        1 => {
            let y = flip(c, x, &[b])?;
            c.run("transpose", [y, a.into(), b.into()])
        }
        2 => flip(c, x, &[a, b]),
        3 => {
            let y = flip(c, x, &[a])?;
            c.run("transpose", [y, a.into(), b.into()])
        }
        _ => c.run("clone", [x]),
    }
}

/// As equal parts as can be, the first ones one larger.
fn sections(c: &mut Call) -> Result<Value> {
    let axis = c.int("dim", 0)?;
    let count = c.int("sections", 1)?;
    sections_of(c, axis, count)
}

fn sections_of(c: &mut Call, axis: i64, count: i64) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let at = c.in_rank(axis, dims.len())?;
    let size = dims.get(at).and_then(Dim::as_const);
    let (Some(size), 1..=65_536) = (size, count) else {
        return Err(c.fail("shape", "the sizes of the parts are not known"));
    };
    let (each, more) = (size / count, size % count);
    let parts: Vec<i64> = (0..count).map(|i| each + i64::from(i < more)).collect();
    c.run(
        "split_with_sizes",
        [c.given("self"), Value::ints(&parts), axis.into()],
    )
}

/// Cut at these places.
fn cut_at(c: &mut Call, axis: i64, name: &str) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let at = c.in_rank(axis, dims.len())?;
    let Some(size) = dims.get(at).and_then(Dim::as_const) else {
        return Err(c.fail("shape", "the sizes of the parts are not known"));
    };
    let mut places = vec![0];
    for place in c.ints(name)?.unwrap_or_default() {
        let place = if place < 0 { place + size } else { place };
        let last = places[places.len() - 1];
        places.push(place.clamp(last, size));
    }
    places.push(size);
    let parts: Vec<i64> = places.windows(2).map(|w| w[1] - w[0]).collect();
    c.run(
        "split_with_sizes",
        [c.given("self"), Value::ints(&parts), axis.into()],
    )
}

fn split_along(c: &mut Call, axis: i64) -> Result<Value> {
    if c.has("sections") {
        let count = c.int("sections", 1)?;
        return sections_of(c, axis, count);
    }
    cut_at(c, axis, "indices")
}

/// Along the columns; a vector has none.
fn hsplit(c: &mut Call) -> Result<Value> {
    let axis = i64::from(sizes(c, "self")?.len() > 1);
    split_along(c, axis)
}
