//! Complex tensors, as pairs of real ones.
//!
//! A complex tensor ([`Value::Complex`]) is a real tensor whose last axis holds real and imaginary part, which is how PyTorch
//! lays it out in memory and what `view_as_real` sees. Its gradient is that of the pair, as PyTorch defines it. An op takes one only
//! where its signature says so, so that no op takes the pair for a real tensor by mistake.

use super::pointwise::need;
use super::signature::{Call, Op};
use super::tensors::View;
use super::views::broadcast;
use super::{Lowering, TensorId, Value};
use ckpt_passes::Result;
use ckpt_passes::ir::build::same_dims;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::concat::{CONCAT, SPLIT};
use ckpt_passes::ops::shape::{SQUEEZE, UNSQUEEZE};
use ckpt_passes::ops::{arith, extreme, math};

pub const OPS: &[Op] = &[
    ("abs(self: c)", |c| {
        let (x, axis) = (pair(c, "self")?, rank(c)?);
        c.run("linalg_vector_norm", [x.into(), 2.0.into(), axis.into()])
    }),
    ("add(self: c, other: cts)", |c| sum(c, &arith::ADD)),
    ("add(self: ts, other: c)", |c| sum(c, &arith::ADD)),
    ("alias(self: c)", |c| {
        c.low.warn_of_aliases();
        Ok(c.given("self"))
    }),
    ("angle(self: c)", |c| {
        let [re, im] = [part(c, 0)?, part(c, 1)?];
        c.run("atan2", [im, re])
    }),
    ("cat(tensors: C, dim: i?)", |c| joined(c, 0)),
    ("chunk(self: c, chunks: i, dim: i?)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![c.given("chunks"), axis])
    }),
    ("clone(self: c, *, memory_format)", |c| of_pairs(c, vec![])),
    ("complex(real: t, imag: t)", |c| {
        let (re, im) = (c.value("real")?, c.value("imag")?);
        let dims = [re, im].map(|v| c.low.b.ty(v).dims.clone());
        let dims = broadcast(c, &dims[0], &dims[1])?;
        let re = c.low.broadcast_to(re, &dims)?;
        made(c, re, im)
    }),
    ("conj(self: c)", seen_conjugate),
    ("_conj(self: c)", seen_conjugate),
    ("conj_physical(self: c)", |c| {
        let value = conjugate(c)?;
        Ok(Value::Complex(c.low.fresh(value)))
    }),
    ("conj(self: t)", |c| Ok(c.given("self"))),
    ("contiguous(self: c, *, memory_format)", |c| {
        of_pairs(c, vec![])
    }),
    ("detach(self: c)", |c| of_pairs(c, vec![])),
    ("div(self: c, other: cts)", quotient),
    ("div(self: ts, other: c)", quotient),
    ("exp(self: c)", |c| {
        let [angle, size] = [c.parts_of("self", 1)?, c.parts_of("self", 0)?];
        let size = c.low.emit(&math::EXP, &[size])?;
        turned(c, size, angle)
    }),
    ("expand(self: c, size: I, *, implicit)", |c| {
        sized(c, "size", 2)
    }),
    ("flatten(self: c, start_dim: i?, end_dim: i?)", |c| {
        if rank(c)? == 0 {
            return c.run("unsqueeze", [c.given("self"), 0.into()]);
        }
        let (start, end) = (axis(c, "start_dim", 0, 0)?, axis(c, "end_dim", -1, 0)?);
        of_pairs(c, vec![start, end])
    }),
    ("flip(self: c, dims: I)", |c| {
        if c.given("dims").listed().is_empty() {
            return c.run("clone", [c.given("self")]);
        }
        let axes = axes(c, "dims")?;
        of_pairs(c, vec![axes])
    }),
    ("imag(self: c)", |c| part(c, 1)),
    // An index for each of the first axes; the pairs are behind all of them.
    ("index(self: c, indices: l)", |c| {
        of_pairs(c, vec![c.given("indices")])
    }),
    ("index_select(self: c, dim: i, index: t)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![axis, c.given("index")])
    }),
    ("is_complex(self: c)", |_| Ok(true.into())),
    ("is_complex(self: t)", |_| Ok(false.into())),
    ("mean(self: c, dim: I?, keepdim: b?)", reduced),
    ("mul(self: c, other: cts)", product),
    ("mul(self: ts, other: c)", product),
    ("narrow(self: c, dim: i, start: i, length: i)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![axis, c.given("start"), c.given("length")])
    }),
    ("neg(self: c)", |c| of_pairs(c, vec![])),
    ("numel(self: c)", |c| Ok(Dim::product(&sizes(c)?).into())),
    ("permute(self: c, dims: I)", |c| {
        let mut order = axes(c, "dims")?.listed().to_vec();
        order.push(rank(c)?.into());
        of_pairs(c, vec![Value::List(order)])
    }),
    ("polar(abs: t, angle: t)", |c| {
        let (size, angle) = (c.value("abs")?, c.value("angle")?);
        turned(c, size, angle)
    }),
    ("real(self: c)", |c| part(c, 0)),
    ("real(self: t)", |c| Ok(c.given("self"))),
    ("repeat(self: c, repeats: I)", |c| sized(c, "repeats", 1)),
    ("reshape(self: c, shape: I)", |c| sized(c, "shape", 2)),
    ("resolve_conj(self: ct)", |c| Ok(c.given("self"))),
    ("resolve_neg(self: ct)", |c| Ok(c.given("self"))),
    ("select(self: c, dim: i, index: i)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![axis, c.given("index")])
    }),
    (
        "slice(self: c, dim: i?, start: i?, end: i?, step: i?)",
        |c| {
            let axis = axis(c, "dim", 0, 0)?;
            of_pairs(
                c,
                vec![axis, c.given("start"), c.given("end"), c.given("step")],
            )
        },
    ),
    ("split(self: c, split_size: iI, dim: i?)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![c.given("split_size"), axis])
    }),
    ("squeeze(self: c)", |c| of_pairs(c, vec![])),
    ("squeeze(self: c, dim: I)", |c| {
        if c.given("dim").listed().is_empty() || rank(c)? == 0 {
            return Ok(c.given("self"));
        }
        let axes = axes(c, "dim")?;
        of_pairs(c, vec![axes])
    }),
    ("stack(tensors: C, dim: i?)", |c| joined(c, 1)),
    ("sub(self: c, other: cts)", |c| sum(c, &arith::SUB)),
    ("sub(self: ts, other: c)", |c| sum(c, &arith::SUB)),
    ("sum(self: c, dim: I?, keepdim: b?)", reduced),
    ("sym_size(self: c)", |c| {
        Ok(Value::List(sizes(c)?.into_iter().map(Value::Int).collect()))
    }),
    ("sym_size(self: c, dim: i)", |c| {
        let sizes = sizes(c)?;
        let axis = c.axis("dim", 0, sizes.len())?;
        let size = sizes.get(axis).cloned();
        let size = size.ok_or_else(|| c.fail("axis", "a scalar has no axis"))?;
        Ok(size.into())
    }),
    (
        "to(self: ct, dtype: z, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    (
        "to(self: c, device: p, dtype: z?, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    (
        "to(self: ct, device: p, dtype: z, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    (
        "to(self: c, *, dtype: z?, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    (
        "to(self: t, *, dtype: z, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    (
        "_to_copy(self: c, *, dtype: z?, layout, device, pin_memory, non_blocking: b?, memory_format)",
        converted,
    ),
    (
        "_to_copy(self: t, *, dtype: z, layout, device, pin_memory, non_blocking: b?, memory_format)",
        converted,
    ),
    ("transpose(self: c, dim0: i, dim1: i)", |c| {
        let (a, b) = (axis(c, "dim0", 0, 0)?, axis(c, "dim1", 0, 0)?);
        of_pairs(c, vec![a, b])
    }),
    ("unbind(self: c, dim: i?)", |c| {
        let axis = axis(c, "dim", 0, 0)?;
        of_pairs(c, vec![axis])
    }),
    ("unsqueeze(self: c, dim: i)", |c| {
        let axis = axis(c, "dim", 0, 1)?;
        of_pairs(c, vec![axis])
    }),
    ("view(self: c, size: I)", |c| sized(c, "size", 2)),
    ("view_as_complex(self: t)", |c| {
        let x = c.tensor("self")?;
        let last = c.low.dims(x).last().and_then(Dim::as_const);
        if last != Some(2) || !c.low.dtype(x).is_float() {
            let value = c.low.read(x)?;
            return Err(c
                .fail("shape", "the last axis is not of two parts")
                .found(c.low.b.ty(value).to_string()));
        }
        Ok(Value::Complex(x))
    }),
    ("view_as_real(self: c)", |c| Ok(pair(c, "self")?.into())),
    ("_unsafe_view(self: c, size: I)", |c| sized(c, "size", 2)),
];

/// The pairs that a complex argument is.
pub(super) fn pair(c: &Call, name: &str) -> Result<TensorId> {
    match c.get(name) {
        Some(Value::Complex(id)) => Ok(*id),
        _ => Err(c.unsupported("a tensor that is not complex")),
    }
}

/// Sizes of `self`, without the axis of its parts.
fn sizes(c: &Call) -> Result<Vec<Dim>> {
    Ok(c.low.complex_dims(pair(c, "self")?).to_vec())
}

fn rank(c: &Call) -> Result<i64> {
    Ok(sizes(c)?.len() as i64)
}

/// An axis of `self`, counted from the first; there may be `more` than it has.
fn axis(c: &Call, name: &str, default: i64, more: usize) -> Result<Value> {
    let axis = c.axis(name, default, sizes(c)?.len() + more)?;
    Ok(Value::from(axis as i64))
}

/// Axes of `self`, all of them where none are given.
fn axes(c: &Call, name: &str) -> Result<Value> {
    let axes = c.axes(name, sizes(c)?.len())?;
    let axes: Vec<i64> = axes.into_iter().map(|a| a as i64).collect();
    Ok(Value::ints(&axes))
}

/// The same op on the pairs of `self`, whose axis of parts it leaves as it is.
fn of_pairs(c: &mut Call, rest: Vec<Value>) -> Result<Value> {
    let mut args = vec![Value::Tensor(pair(c, "self")?)];
    args.extend(rest);
    let name = c.name.clone();
    super::vocabulary::run(c.low, &name, args, Vec::new()).map(as_complex)
}

fn as_complex(value: Value) -> Value {
    match value {
        Value::Tensor(id) => Value::Complex(id),
        Value::List(items) => Value::List(items.into_iter().map(as_complex).collect()),
        Value::Tuple(items) => Value::Tuple(items.into_iter().map(as_complex).collect()),
        other => other,
    }
}

/// A reduction over axes, which leaves a number as it is.
fn reduced(c: &mut Call) -> Result<Value> {
    if rank(c)? == 0 {
        return c.run("clone", [c.given("self")]);
    }
    let axes = axes(c, "dim")?;
    of_pairs(c, vec![axes, c.bool("keepdim", false)?.into()])
}

/// The same op on the pairs with sizes, of which the axis of parts has `last`.
fn sized(c: &mut Call, name: &str, last: i64) -> Result<Value> {
    let mut sizes = c.given(name).listed().to_vec();
    sizes.push(last.into());
    of_pairs(c, vec![Value::List(sizes)])
}

/// `cat`, or `stack` along one axis `more`.
fn joined(c: &mut Call, more: usize) -> Result<Value> {
    let items = c.given("tensors");
    let pairs: Vec<Value> = items
        .listed()
        .iter()
        .filter_map(|item| match item {
            Value::Complex(id) => Some(Value::Tensor(*id)),
            _ => None,
        })
        .collect();
    let Some(Value::Tensor(first)) = pairs.first() else {
        return Err(c.unsupported("an empty list"));
    };
    let rank = c.low.complex_dims(*first).len();
    let axis = c.axis("dim", 0, rank + more)? as i64;
    let name = c.name.clone();
    let done = c.run(&name, [Value::List(pairs), axis.into()]);
    done.map(as_complex)
}

/// A part of `self`, as a view of it.
fn part(c: &mut Call, k: usize) -> Result<Value> {
    let id = pair(c, "self")?;
    let value = c.parts_of("self", k)?;
    let axis = c.low.complex_dims(id).len();
    let kept = c.low.apply_unsqueeze(value, &[axis as i64])?;
    let seen = View::Slice {
        axis,
        start: Dim::from(k as i64),
        end: Dim::from(k as i64 + 1),
        step: 1,
    };
    let kept = c.low.view_as(id, seen, kept);
    let seen = View::Squeeze(vec![axis as i64]);
    Ok(c.low.view_as(kept, seen, value).into())
}

/// A complex tensor of its parts, of which the imaginary one may have to be expanded.
pub(super) fn made(c: &mut Call, re: ValueId, im: ValueId) -> Result<Value> {
    let value = joined_parts(c, re, im)?;
    Ok(Value::Complex(c.low.fresh(value)))
}

fn joined_parts(c: &mut Call, re: ValueId, im: ValueId) -> Result<ValueId> {
    let dims = c.low.b.ty(re).dims.clone();
    let im = c.low.broadcast_to(im, &dims)?;
    let axis = dims.len() as i64;
    let parts = [
        c.low.apply_unsqueeze(re, &[axis])?,
        c.low.apply_unsqueeze(im, &[axis])?,
    ];
    let attrs = Attrs::new().with("axis", axis);
    c.low.b.emit(&CONCAT, &parts, attrs)
}

/// `size · (cos angle + i sin angle)`.
fn turned(c: &mut Call, size: ValueId, angle: ValueId) -> Result<Value> {
    let (cos, sin) = (
        c.low.emit(&math::COS, &[angle])?,
        c.low.emit(&math::SIN, &[angle])?,
    );
    let (re, im) = (c.low.b.mul(size, cos)?, c.low.b.mul(size, sin)?);
    made(c, re, im)
}

fn conjugate(c: &mut Call) -> Result<ValueId> {
    let (re, im) = (c.parts_of("self", 0)?, c.parts_of("self", 1)?);
    let im = c.low.b.neg(im)?;
    joined_parts(c, re, im)
}

/// PyTorch's is a view; of one that is computed nothing may be read once the other is written to.
fn seen_conjugate(c: &mut Call) -> Result<Value> {
    let value = conjugate(c)?;
    let id = pair(c, "self")?;
    Ok(Value::Complex(c.low.perhaps_shared(id, value)))
}

/// Real part and, of what is complex, imaginary part of an operand.
struct Parts {
    re: ValueId,
    im: Option<ValueId>,
}

/// Both operands of a call, their parts of one type.
fn operands(c: &mut Call) -> Result<[Parts; 2]> {
    let both = [need(c, "self")?, need(c, "other")?];
    let mut typed = both.clone();
    for value in &mut typed {
        // A real part has as many axes as the number, which is what its type counts by.
        if let Value::Complex(id) = value {
            let [re, _] = c.low.parts(*id)?;
            *value = Value::Tensor(c.low.fresh(re));
        }
    }
    let dtype = c.low.promoted_float(&[&typed[0], &typed[1]])?;
    let [a, b] = both;
    Ok([operand(c, &a, dtype)?, operand(c, &b, dtype)?])
}

fn operand(c: &mut Call, value: &Value, dtype: DType) -> Result<Parts> {
    let Value::Complex(id) = value else {
        let re = c.low.operand(value, dtype)?;
        return Ok(Parts { re, im: None });
    };
    let [re, im] = c.low.parts(*id)?;
    Ok(Parts {
        re: c.low.b.cast(re, dtype)?,
        im: Some(c.low.b.cast(im, dtype)?),
    })
}

fn sum(c: &mut Call, op: &'static ckpt_passes::ir::OpDef) -> Result<Value> {
    let [a, b] = operands(c)?;
    let re = c.low.emit(op, &[a.re, b.re])?;
    let im = match (a.im, b.im) {
        (Some(a), Some(b)) => c.low.emit(op, &[a, b])?,
        (None, Some(b)) if op == &arith::SUB => c.low.b.neg(b)?,
        (Some(only), None) | (None, Some(only)) => only,
        (None, None) => return Err(c.unsupported("a sum of real tensors")),
    };
    made(c, re, im)
}

fn product(c: &mut Call) -> Result<Value> {
    let [a, b] = operands(c)?;
    let (re, im) = times(c, &a, &b)?;
    made(c, re, im)
}

fn times(c: &mut Call, a: &Parts, b: &Parts) -> Result<(ValueId, ValueId)> {
    let re = c.low.b.mul(a.re, b.re)?;
    let (x, y) = match (a.im, b.im) {
        (Some(ai), Some(bi)) => {
            let both = c.low.b.mul(ai, bi)?;
            let re = c.low.b.sub(re, both)?;
            let (x, y) = (c.low.b.mul(a.re, bi)?, c.low.b.mul(ai, b.re)?);
            return Ok((re, c.low.b.add(x, y)?));
        }
        (Some(im), None) => (im, b.re),
        (None, Some(im)) => (a.re, im),
        (None, None) => return Err(c.unsupported("a product of real tensors")),
    };
    Ok((re, c.low.b.mul(x, y)?))
}

/// `a / b`: of a complex `b` by its conjugate, over the square of its size. The larger part of `b` is divided out first, so
/// that the square is in range; it cancels, so that no gradient flows through it.
fn quotient(c: &mut Call) -> Result<Value> {
    let [a, b] = operands(c)?;
    let (re, im, by) = match (a.im, b.im) {
        (Some(im), None) => (a.re, im, b.re),
        (_, Some(bi)) => {
            let sizes = [
                c.low.emit(&arith::ABS, &[b.re])?,
                c.low.emit(&arith::ABS, &[bi])?,
            ];
            let larger = c.low.emit(&extreme::MAX, &sizes)?;
            let larger = c.low.stopped(larger)?;
            let (br, bi) = (c.low.b.div(b.re, larger)?, c.low.b.div(bi, larger)?);
            let conjugate = Parts {
                re: br,
                im: Some(c.low.b.neg(bi)?),
            };
            let (re, im) = times(c, &a, &conjugate)?;
            let (x, y) = (c.low.b.mul(br, br)?, c.low.b.mul(bi, bi)?);
            let square = c.low.b.add(x, y)?;
            (re, im, c.low.b.mul(square, larger)?)
        }
        (None, None) => return Err(c.unsupported("a quotient of real tensors")),
    };
    let (re, im) = (c.low.b.div(re, by)?, c.low.b.div(im, by)?);
    made(c, re, im)
}

/// Another complex type, or a real tensor as a complex one.
fn converted(c: &mut Call) -> Result<Value> {
    let wanted = match c.get("dtype") {
        Some(Value::ComplexType(dtype)) => Some(*dtype),
        _ => None,
    };
    if let Value::Complex(id) = c.given("self") {
        let own = c.low.dtype(id);
        let is_copy = c.name == "_to_copy" || c.bool("copy", false)?;
        if !is_copy && wanted.is_none_or(|dtype| dtype == own) {
            return Ok(Value::Complex(id));
        }
        let value = c.low.read(id)?;
        let value = c.low.b.cast(value, wanted.unwrap_or(own))?;
        return Ok(Value::Complex(c.low.fresh(value)));
    }
    let x = c.value("self")?;
    let re = c
        .low
        .b
        .cast(x, wanted.unwrap_or(super::types::DEFAULT_FLOAT))?;
    let zero = c.low.b.scalar(c.low.b.ty(re).dtype, 0.0);
    made(c, re, zero)
}

impl Call<'_, '_> {
    /// Part `k` of a complex argument.
    fn parts_of(&mut self, name: &str, k: usize) -> Result<ValueId> {
        let id = pair(self, name)?;
        Ok(self.low.parts(id)?[k])
    }
}

impl Lowering<'_> {
    /// The sizes of a complex tensor.
    pub fn complex_dims(&self, pair: TensorId) -> &[Dim] {
        self.dims(pair).split_last().map_or(&[], |(_, dims)| dims)
    }

    /// Real and imaginary part of a complex tensor.
    pub(super) fn parts(&mut self, pair: TensorId) -> Result<[ValueId; 2]> {
        let value = self.read(pair)?;
        if let Some(parts) = self.made_of(value) {
            return Ok(parts);
        }
        let axis = self.b.rank(value) as i64 - 1;
        let (ones, axes) = (self.b.ints(&[1, 1]), self.b.ints(&[axis]));
        let attrs = Attrs::new().with("axis", axis);
        let split = self
            .b
            .emit_n(&SPLIT, vec![Some(value), Some(ones)], attrs, 2)?;
        Ok([
            self.emit(&SQUEEZE, &[split[0], axes])?,
            self.emit(&SQUEEZE, &[split[1], axes])?,
        ])
    }

    /// The parts that a pair was just made of, so that what needs one does not need the other.
    fn made_of(&self, value: ValueId) -> Option<[ValueId; 2]> {
        let graph = &*self.b.graph;
        let node = graph.node(graph.def_node(value)?);
        let [Some(re), Some(im)] = node.ins.as_slice() else {
            return None;
        };
        let axis = self.b.rank(value) as i64 - 1;
        let part = |kept: ValueId| {
            let node = graph.node(graph.def_node(kept)?);
            let of = node.ins.first().copied().flatten()?;
            let (own, whole) = (&self.b.ty(of).dims, &self.b.ty(value).dims);
            let fits = whole
                .split_last()
                .is_some_and(|(_, dims)| same_dims(own, dims));
            (node.op == &UNSQUEEZE && fits).then_some(of)
        };
        (node.op == &CONCAT && node.attrs.int("axis") == axis)
            .then(|| Some([part(*re)?, part(*im)?]))?
    }
}
