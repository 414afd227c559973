//! Complex tensors, as pairs of real ones.
//!
//! A complex tensor ([`Value::Complex`]) is a real tensor whose last axis holds the real and the imaginary part. PyTorch lays
//! it out like this, and `view_as_real` sees it so. Its gradient is that of the pair, as PyTorch defines it. An op takes a
//! complex tensor only if its signature says so, so no op takes the pair for a real tensor by mistake.

use super::super::value::{TensorId, Value};
use super::lowering::{DEFAULT_FLOAT, Lowering, View};
use super::signature::{Call, Op, along};
use super::views::broadcast;
use ckpt_passes::Result;
use ckpt_passes::ir::same_dims;
use ckpt_passes::ir::{DType, Dim, ValueId};
use ckpt_passes::ops::concat::{CONCAT, SPLIT};
use ckpt_passes::ops::rule::{Formulas, Term};
use ckpt_passes::ops::shape::{SQUEEZE, UNSQUEEZE};
use ckpt_passes::ops::{EmitExt, arith, extreme, math};

pub const OPS: &[Op] = &[
    ("abs(self: c)", |c| {
        let (x, axis) = (pair(c, "self")?, rank(c)?);
        c.run("linalg_vector_norm", [x.into(), 2.0.into(), axis.into()])
    }),
    ("{add,sub}(self: c, other: cts)", sum),
    ("{add,sub}(self: ts, other: c)", sum),
    ("alias(self: c)", |c| {
        super::views::warn_of_alias(c);
        Ok(c.given("self"))
    }),
    ("angle(self: c)", |c| {
        let [re, im] = [part(c, 0)?, part(c, 1)?];
        c.run("atan2", [im, re])
    }),
    ("cat(tensors: C, dim: i?)", |c| joined(c, 0)),
    ("complex(real: t, imag: t)", |c| {
        let (re, im) = (c.value("real")?, c.value("imag")?);
        let dims = broadcast(c, &c.low.b.ty(re).dims, &c.low.b.ty(im).dims)?;
        let re = c.low.broadcast_to(re, &dims)?;
        made(c, re, im)
    }),
    ("{conj,_conj}(self: c)", seen_conjugate),
    ("conj_physical(self: c)", |c| {
        let value = conjugate(c)?;
        Ok(Value::Complex(c.low.fresh(value)))
    }),
    ("{conj,real}(self: t)", |c| Ok(c.given("self"))),
    // The axis of pairs is behind the indexed axes.
    (
        "chunk(self: c, chunks: i, dim: i?); \
         {clone,contiguous}(self: c, *, memory_format); \
         {detach,neg,squeeze}(self: c); \
         index(self: c, indices: l); \
         index_select(self: c, dim: i, index: t); \
         narrow(self: c, dim: i, start: i, length: i); \
         select(self: c, dim: i, index: i); \
         slice(self: c, dim: i?, start: i?, end: i?, step: i?); \
         split(self: c, split_size: iI, dim: i?); \
         transpose(self: c, dim0: i, dim1: i); \
         unbind(self: c, dim: i?)",
        of_pairs,
    ),
    (
        "div(self: c, other: cts); div(self: ts, other: c)",
        quotient,
    ),
    ("exp(self: c)", |c| {
        let x = pair(c, "self")?;
        let (angle, size) = (c.low.parts(x)?[1], c.low.parts(x)?[0]);
        let size = c.emit(&math::EXP, &[size])?;
        turned(c, size, angle)
    }),
    ("expand(self: c, size: I, *, implicit)", |c| {
        sized(c, "size", 2)
    }),
    ("{view,_unsafe_view}(self: c, size: I)", |c| {
        sized(c, "size", 2)
    }),
    ("flatten(self: c, start_dim: i?, end_dim: i?)", |c| {
        if rank(c)? == 0 {
            return c.run("unsqueeze", [c.given("self"), 0.into()]);
        }
        let (start, end) = (axis(c, "start_dim", 0, 0)?, axis(c, "end_dim", -1, 0)?);
        on_pairs(c, vec![start, end])
    }),
    ("flip(self: c, dims: I)", |c| {
        if c.given("dims").members().is_empty() {
            return c.run("clone", [c.given("self")]);
        }
        let axes = axes(c, "dims")?;
        on_pairs(c, vec![axes.into()])
    }),
    ("imag(self: c)", |c| part(c, 1)),
    ("is_complex(self: c)", |_| Ok(true.into())),
    ("is_complex(self: t)", |_| Ok(false.into())),
    ("{mean,sum}(self: c, dim: I?, keepdim: b?)", reduced),
    ("mul(self: c, other: cts); mul(self: ts, other: c)", product),
    ("numel(self: c)", |c| Ok(Dim::product(&sizes(c)?).into())),
    ("permute(self: c, dims: I)", |c| {
        let mut order = axes(c, "dims")?;
        order.push(rank(c)?);
        on_pairs(c, vec![order.into()])
    }),
    ("polar(abs: t, angle: t)", |c| {
        let (size, angle) = (c.value("abs")?, c.value("angle")?);
        turned(c, size, angle)
    }),
    ("real(self: c)", |c| part(c, 0)),
    ("repeat(self: c, repeats: I)", |c| sized(c, "repeats", 1)),
    ("reshape(self: c, shape: I)", |c| sized(c, "shape", 2)),
    ("{resolve_conj,resolve_neg}(self: ct)", |c| {
        Ok(c.given("self"))
    }),
    ("squeeze(self: c, dim: I)", |c| {
        if c.given("dim").members().is_empty() || rank(c)? == 0 {
            return Ok(c.given("self"));
        }
        let axes = axes(c, "dim")?;
        on_pairs(c, vec![axes.into()])
    }),
    ("stack(tensors: C, dim: i?)", |c| joined(c, 1)),
    ("sym_size(self: c)", |c| Ok(sizes(c)?.into())),
    ("sym_size(self: c, dim: i)", |c| {
        let sizes = sizes(c)?;
        let axis = c.axis("dim", 0, sizes.len())?;
        Ok(c.size_in(&sizes, axis)?.into())
    }),
    (
        "to(self: ct, dtype: z, non_blocking: b?, copy: b?, memory_format); \
         to(self: c, device: p, dtype: z?, non_blocking: b?, copy: b?, memory_format); \
         to(self: ct, device: p, dtype: z, non_blocking: b?, copy: b?, memory_format); \
         {to,_to_copy}(self: c, *, dtype: z?, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format); \
         {to,_to_copy}(self: t, *, dtype: z, layout, device, pin_memory, non_blocking: b?, copy: b?, memory_format)",
        converted,
    ),
    ("unsqueeze(self: c, dim: i)", |c| {
        let axis = axis(c, "dim", 0, 1)?;
        on_pairs(c, vec![axis])
    }),
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
];

/// Returns the pairs of a complex argument.
pub(super) fn pair(c: &Call, name: &str) -> Result<TensorId> {
    match c.get(name) {
        Some(Value::Complex(id)) => Ok(*id),
        _ => Err(c.unsupported("a tensor that is not complex")),
    }
}

/// Returns the sizes of `self`, without the axis of its parts.
fn sizes(c: &Call) -> Result<Vec<Dim>> {
    Ok(c.low.complex_dims(pair(c, "self")?).to_vec())
}

fn rank(c: &Call) -> Result<i64> {
    Ok(sizes(c)?.len() as i64)
}

/// Returns an axis of `self`, counted from the first. There may be `more` axes than it has.
fn axis(c: &Call, name: &str, default: i64, more: usize) -> Result<Value> {
    let axis = c.axis(name, default, sizes(c)?.len() + more)?;
    Ok(Value::from(axis as i64))
}

/// Returns axes of `self`, by default all of them.
fn axes(c: &Call, name: &str) -> Result<Vec<i64>> {
    let axes = c.axes(name, sizes(c)?.len())?;
    Ok(axes.into_iter().map(|a| a as i64).collect())
}

/// Applies the same op with these arguments to the pairs of `self`. The op must leave the axis of parts as it is.
fn on_pairs(c: &mut Call, rest: Vec<Value>) -> Result<Value> {
    let mut args = vec![Value::Tensor(pair(c, "self")?)];
    args.extend(rest);
    let name = c.name.clone();
    c.run_named(&name, args, Vec::new()).map(as_complex)
}

/// Applies the same op with its own arguments to the pairs of `self`. Axes are counted from the first.
fn of_pairs(c: &mut Call) -> Result<Value> {
    const NAMES: &str = "chunks end index indices length split_size start step";
    let given = NAMES.split(' ').filter(|name| c.has(name));
    let mut kwargs: Vec<(&str, Value)> = given.map(|name| (name, c.given(name))).collect();
    for name in ["dim", "dim0", "dim1"]
        .into_iter()
        .filter(|name| c.has(name))
    {
        kwargs.push((name, axis(c, name, 0, 0)?));
    }
    let (name, pair) = (c.name.clone(), pair(c, "self")?.into());
    c.run_named(&name, vec![pair], kwargs).map(as_complex)
}

fn as_complex(value: Value) -> Value {
    match value {
        Value::Tensor(id) => Value::Complex(id),
        Value::List(items) => Value::List(items.into_iter().map(as_complex).collect()),
        Value::Tuple(items) => Value::Tuple(items.into_iter().map(as_complex).collect()),
        other => other,
    }
}

/// Lowers a reduction over axes, which leaves a number as it is.
fn reduced(c: &mut Call) -> Result<Value> {
    if rank(c)? == 0 {
        return c.run("clone", [c.given("self")]);
    }
    let axes = axes(c, "dim")?;
    let keep = c.bool("keepdim", false)?;
    on_pairs(c, vec![axes.into(), keep.into()])
}

/// Applies the same op with sizes to the pairs, whose axis of parts gets the size `last`.
fn sized(c: &mut Call, name: &str, last: i64) -> Result<Value> {
    let mut sizes = c.given(name).members().to_vec();
    sizes.push(last.into());
    on_pairs(c, vec![sizes.into()])
}

/// Lowers `cat`, or `stack` along one axis `more`.
fn joined(c: &mut Call, more: usize) -> Result<Value> {
    let pairs: Vec<TensorId> = c.given("tensors").tensors();
    let Some(first) = pairs.first() else {
        return Err(c.unsupported("an empty list"));
    };
    let rank = c.low.complex_dims(*first).len();
    let axis = c.axis("dim", 0, rank + more)? as i64;
    let name = c.name.clone();
    let done = c.run(&name, [pairs.into(), axis.into()]);
    done.map(as_complex)
}

/// Returns a part of `self` as a view of it.
fn part(c: &mut Call, k: usize) -> Result<Value> {
    let id = pair(c, "self")?;
    let value = c.low.parts(id)?[k];
    let axis = c.low.complex_dims(id).len();
    let kept = c.low.unsqueeze(value, &[axis as i64])?;
    let seen = View::range(axis, k as i64, k as i64 + 1);
    let kept = c.low.view_as(id, seen, kept);
    let seen = View::Squeeze(vec![axis as i64]);
    Ok(c.low.view_as(kept, seen, value).into())
}

/// Returns a complex tensor of its parts, of which the imaginary one may have to be expanded.
pub(super) fn made(c: &mut Call, re: ValueId, im: ValueId) -> Result<Value> {
    let value = joined_parts(c, re, im)?;
    Ok(Value::Complex(c.low.fresh(value)))
}

fn joined_parts(c: &mut Call, re: ValueId, im: ValueId) -> Result<ValueId> {
    let axis = c.rank(re);
    let im = c.low.broadcast_to(im, &c.shape_of(re))?;
    let parts = [
        c.low.unsqueeze(re, &[axis as i64])?,
        c.low.unsqueeze(im, &[axis as i64])?,
    ];
    c.emit_with(&CONCAT, &parts, along(axis))
}

/// Lowers `size · (cos angle + i sin angle)`.
fn turned(c: &mut Call, size: ValueId, angle: ValueId) -> Result<Value> {
    let cos = c.emit(&math::COS, &[angle])?;
    let sin = c.emit(&math::SIN, &[angle])?;
    let (re, im) = (c.low.b.mul(size, cos)?, c.low.b.mul(size, sin)?);
    made(c, re, im)
}

fn conjugate(c: &mut Call) -> Result<ValueId> {
    let x = pair(c, "self")?;
    let (re, im) = (c.low.parts(x)?[0], c.low.parts(x)?[1]);
    let im = c.low.b.neg(im)?;
    joined_parts(c, re, im)
}

/// Lowers a conjugate. PyTorch's is a view; ours is computed, so it may not be read after a write to the tensor.
fn seen_conjugate(c: &mut Call) -> Result<Value> {
    let value = conjugate(c)?;
    let id = pair(c, "self")?;
    Ok(Value::Complex(c.low.perhaps_shared(id, value)))
}

/// The real part of an operand and, if it is complex, the imaginary part.
struct Parts {
    re: ValueId,
    im: Option<ValueId>,
}

/// Returns both operands of a call, with parts of one type.
fn operands(c: &mut Call) -> Result<[Parts; 2]> {
    let both = [c.need("self")?, c.need("other")?];
    let mut typed = both.clone();
    for value in &mut typed {
        // A real part has as many axes as the number, and type promotion counts by them.
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

/// Lowers `add` and `sub`.
fn sum(c: &mut Call) -> Result<Value> {
    let op = match c.name.as_str() {
        "add" => &arith::ADD,
        _ => &arith::SUB,
    };
    let [a, b] = operands(c)?;
    let re = c.emit(op, &[a.re, b.re])?;
    let im = match (a.im, b.im) {
        (Some(a), Some(b)) => c.emit(op, &[a, b])?,
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
    let (ar, br) = (Term(a.re), Term(b.re));
    let (re, im) = match (a.im.map(Term), b.im.map(Term)) {
        (Some(ai), Some(bi)) => (ar * br - ai * bi, ar * bi + ai * br),
        (Some(ai), None) => (ar * br, ai * br),
        (None, Some(bi)) => (ar * br, ar * bi),
        (None, None) => return Err(c.unsupported("a product of real tensors")),
    };
    Ok((c.low.b.eval(re)?, c.low.b.eval(im)?))
}

/// Lowers `a / b`. A complex `b` becomes a product with its conjugate over the square of its size. The larger part of `b` is
/// divided out first, so that the square is in range. It cancels, so no gradient flows through it.
fn quotient(c: &mut Call) -> Result<Value> {
    let [a, b] = operands(c)?;
    let (re, im, by) = match (a.im, b.im) {
        (Some(im), None) => (a.re, im, b.re),
        (_, Some(bi)) => {
            let sizes = [c.emit(&arith::ABS, &[b.re])?, c.emit(&arith::ABS, &[bi])?];
            let larger = c.emit(&extreme::MAX, &sizes)?;
            let larger = c.low.stopped(larger)?;
            let (br, bi) = (c.low.b.div(b.re, larger)?, c.low.b.div(bi, larger)?);
            let conjugate = Parts {
                re: br,
                im: Some(c.low.b.neg(bi)?),
            };
            let (re, im) = times(c, &a, &conjugate)?;
            let (br, bi) = (Term(br), Term(bi));
            (re, im, c.low.b.eval((br * br + bi * bi) * larger)?)
        }
        (None, None) => return Err(c.unsupported("a quotient of real tensors")),
    };
    let (re, im) = (c.low.b.div(re, by)?, c.low.b.div(im, by)?);
    made(c, re, im)
}

/// Lowers a conversion to another complex type, or of a real tensor to a complex one.
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
    let re = c.low.b.cast(x, wanted.unwrap_or(DEFAULT_FLOAT))?;
    let zero = c.scalar_like(re, 0.0);
    made(c, re, zero)
}

impl Lowering<'_> {
    /// Returns the real and the imaginary part of a complex tensor.
    pub(super) fn parts(&mut self, pair: TensorId) -> Result<[ValueId; 2]> {
        let value = self.read(pair)?;
        if let Some(parts) = self.made_of(value) {
            return Ok(parts);
        }
        let axis = self.b.rank(value) as i64 - 1;
        let (ones, axes) = (self.b.ints(&[1, 1]), self.b.ints(&[axis]));
        let ins = vec![Some(value), Some(ones)];
        let split = self.b.emit_n(&SPLIT, ins, along(axis as usize), 2)?;
        Ok([
            self.emit(&SQUEEZE, &[split[0], axes])?,
            self.emit(&SQUEEZE, &[split[1], axes])?,
        ])
    }

    /// Returns the parts of which a pair was just made, so that a reader of one part does not need the other.
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
