//! Writing by index: `ScatterElements`, `ScatterND`, `OneHot`.
//!
//! The result is a row-major copy of the data with the updates written into it. If two updates have the same index and
//! the reduction is `none`, ONNX does not say which one stays, and the gradient is not defined.

use super::index::{
    by_position, copy_bytes, index_bytes, named_axes, sorted_put_bytes, tuple_bytes, want_index,
    widened_bytes,
};
use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::layout::count;
use ckpt_ir::op::{
    BatchAxes, DeviceKind, Grad, GradCx, Indices, InferCx, OpClass, OpDef, OpRef, fresh,
};
use ckpt_ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SCATTER_ELEMENTS, &SCATTER_ND, &ONE_HOT];

const REDUCTION: AttrSpec = AttrSpec::str("reduction", "none");

/// Each update written at its index along an axis (ONNX ScatterElements-18).
///
/// Temporary: the indices, normalised.
pub static SCATTER_ELEMENTS: OpDef = OpDef {
    aten: &["aten.scatter", "aten.scatter_add"],
    attrs: &[AttrSpec::int("axis", 0), REDUCTION],
    ins: slots!["data", "indices", "updates"],
    outs: OUTPUT,
    indices: Indices::OfAxis,
    infer: |cx| {
        want_index(cx, 1)?;
        check_scatter(cx)?;
        let (x, indices, updates) = (cx.ty(0)?, cx.ty(1)?, cx.ty(2)?);
        cx.axis(cx.attrs.int("axis"), x.rank())?;
        if indices.rank() != x.rank() || updates.rank() != x.rank() {
            return Err(cx.fail("shape", "the operands have different numbers of axes"));
        }
        same_sizes(cx, &indices.dims, &updates.dims)?;
        Ok(vec![x.clone()])
    },
    grad: Grad::Rule(|cx| {
        let axis = Attrs::new().with("axis", cx.attrs().int("axis"));
        grad_scatter(
            cx,
            (&SCATTER_ELEMENTS).into(),
            (&GATHER_ELEMENTS).into(),
            axis,
        )
    }),
    memory: |cx| match cx.ins.get(1) {
        Some(Some(indices)) => {
            let is_sorted = matches!(cx.attrs.str("reduction"), "none" | "add");
            let beside = match cx.device {
                DeviceKind::Cuda if is_sorted => {
                    let longest = indices.dims.iter().max().copied().unwrap_or(1) as u64;
                    let n = count(&indices.dims);
                    let put = sorted_put_bytes(n, count(&cx.outs[0].dims));
                    strided_bytes(cx, &[2]) + put.max(longest * DType::I64.size_bytes())
                }
                _ => widened_bytes(cx.device, &cx.outs[0]),
            };
            fresh(cx).with_temp(index_bytes(indices) + beside)
        }
        _ => fresh(cx),
    },
    ..standard(
        "ScatterElements",
        onnx(11, 18),
        OpClass::Other,
        BatchAxes::AlongAxis,
    )
};

/// Slices written at index tuples (ONNX ScatterND-18): the last axis of the indices holds the tuple.
///
/// Temporaries: the flat position of every tuple, one component beside it where a tuple has several, and a copy of the
/// updates where they cannot be seen as (tuples, slice).
pub static SCATTER_ND: OpDef = OpDef {
    attrs: &[REDUCTION],
    ins: slots!["data", "indices", "updates"],
    outs: OUTPUT,
    indices: Indices::Tuples,
    infer: |cx| {
        cx.want_dtype(1, |d| d == DType::I64, "int64")?;
        check_scatter(cx)?;
        let (x, indices, updates) = (cx.ty(0)?, cx.ty(1)?, cx.ty(2)?);
        let named = named_axes(cx, indices)?;
        if named > x.rank() {
            return Err(cx
                .fail("shape", "an index has more entries than the data has axes")
                .expected(format!("at most {}", x.rank()))
                .found(named.to_string()));
        }
        let mut dims = indices.dims[..indices.rank() - 1].to_vec();
        dims.extend_from_slice(&x.dims[named..]);
        same_sizes(cx, &dims, &updates.dims)?;
        Ok(vec![x.clone()])
    },
    grad: Grad::Rule(|cx| {
        grad_scatter(cx, (&SCATTER_ND).into(), (&GATHER_ND).into(), Attrs::new())
    }),
    memory: |cx| {
        let (Some(Some(x)), Some(Some(indices)), Some(Some(updates))) =
            (cx.ins.first(), cx.ins.get(1), cx.ins.get(2))
        else {
            return fresh(cx);
        };
        let slice = by_position(x, indices, 0)[1];
        let tuples = count(&indices.dims[..indices.dims.len().saturating_sub(1)]);
        let is_sorted = cx.device == DeviceKind::Cuda;
        let (wide, copied) = match cx.attrs.str("reduction") {
            "none" | "add" if is_sorted => {
                let places = by_position(x, indices, 0)[0];
                (sorted_put_bytes(tuples, places), strided_bytes(cx, &[2]))
            }
            "none" => (0, copy_bytes(updates, &[tuples, slice])),
            _ => (
                widened_bytes(cx.device, &cx.outs[0]),
                copy_bytes(updates, &[tuples, slice]),
            ),
        };
        // One component of the tuples is gone by the time the updates are written.
        let positions = tuples as u64 * DType::I64.size_bytes();
        fresh(cx).with_temp(copied + tuple_bytes(indices).max(positions + wide))
    },
    ..mixed("ScatterND", onnx(11, 18))
};

/// Types and the reduction of a scatter.
fn check_scatter(cx: &InferCx) -> Result<()> {
    cx.same_dtype(&[0, 2])?;
    match cx.attrs.str("reduction") {
        "none" => Ok(()),
        "add" | "mul" | "max" | "min" => {
            cx.want_dtype(0, is_number, "a number type")?;
            Ok(())
        }
        other => Err(cx
            .fail("attribute", format!("the reduction `{other}` is not known"))
            .expected("none, add, mul, max or min")),
    }
}

fn same_sizes(cx: &InferCx, expected: &[Dim], found: &[Dim]) -> Result<()> {
    let differ = expected.len() != found.len()
        || expected
            .iter()
            .zip(found)
            .any(|(a, b)| a.same(b) == Same::No);
    if differ {
        return Err(cx
            .fail(
                "shape",
                "the updates do not have the shape that the indices ask for",
            )
            .expected(format!("{expected:?}"))
            .found(format!("{found:?}")));
    }
    Ok(())
}

/// The nodes of a scatter's gradient: how it writes at its indices, and how to read there.
struct Places {
    scatter: OpRef,
    gather: OpRef,
    attrs: Attrs,
    indices: ValueId,
}

impl Places {
    fn read(&self, cx: &mut GradCx, v: Term) -> Result<Term> {
        let read =
            cx.b.emit(self.gather, &[v.0, self.indices], self.attrs.clone());
        read.map(Term)
    }

    fn write(
        &self,
        cx: &mut GradCx,
        reduction: &str,
        data: impl Into<Expr>,
        updates: impl Into<Expr>,
    ) -> Result<Term> {
        let (data, updates) = (cx.eval(data)?, cx.eval(updates)?);
        let attrs = self.attrs.clone().with("reduction", reduction);
        let written =
            cx.b.emit(self.scatter, &[data, self.indices, updates], attrs);
        written.map(Term)
    }
}

/// Gradients of data and updates; `attrs` are those that name the places.
fn grad_scatter(cx: &mut GradCx, scatter: OpRef, gather: OpRef, attrs: Attrs) -> Result<()> {
    let places = Places {
        scatter,
        gather,
        attrs,
        indices: cx.x(1),
    };
    match cx.attrs().str("reduction") {
        "mul" => grad_product(cx, &places),
        "max" | "min" => grad_extreme(cx, &places),
        reduction => grad_written(cx, &places, reduction == "add"),
    }
}

/// The gradient of an update is the cotangent at its index. That of the data is the cotangent where no update replaced
/// it.
fn grad_written(cx: &mut GradCx, places: &Places, added: bool) -> Result<()> {
    let (updates, dy) = (cx.x(2), cx.cotangent());
    if cx.wants(0) {
        let d = match added {
            true => dy,
            false => {
                let zeros = cx.b.filled_like(updates, 0.0)?;
                places.write(cx, "none", dy, zeros)?
            }
        };
        cx.give(0, d.0);
    }
    if cx.wants(2) {
        let d = places.read(cx, dy)?;
        cx.give(2, d.0);
    }
    Ok(())
}

/// What ties for the extreme of a place, data or updates, shares the cotangent evenly, as in PyTorch's `scatter_reduce`.
fn grad_extreme(cx: &mut GradCx, places: &Places) -> Result<()> {
    let (data, updates) = (cx.operand(0), cx.operand(2));
    let (y, dy) = (cx.result(0), cx.cotangent());
    let dtype = cx.ty(dy.0).dtype;
    let reached = places.read(cx, y)?;
    let of_data = cx.bind(binary_op(EQUAL, data, y))?;
    let of_updates = cx.bind(binary_op(EQUAL, updates, reached))?;
    let (counted, more) = (cast(of_data, dtype), cast(of_updates, dtype));
    let count = places.write(cx, "add", counted, more)?;
    let share = cx.bind(dy / count)?;
    let zero = cx.number(dy, 0.0);
    if cx.wants(0) {
        cx.give_expr(0, select(of_data, share, zero))?;
    }
    if cx.wants(2) {
        let there = places.read(cx, share)?;
        cx.give_expr(2, select(of_updates, there, zero))?;
    }
    Ok(())
}

/// Each factor of a place, data or update, gets the product of all the others: the whole over the factor. Where the
/// factor is 0, it gets the product of the rest, which is 0 again unless it is the only one.
fn grad_product(cx: &mut GradCx, places: &Places) -> Result<()> {
    let (data, updates, dy) = (cx.operand(0), cx.operand(2), cx.cotangent());
    let [zero, one] = [0.0, 1.0].map(|n| cx.number(dy, n));
    let bare_data = cx.bind(binary_op(EQUAL, data, zero))?;
    let bare_updates = cx.bind(binary_op(EQUAL, updates, zero))?;
    let data_rest = cx.bind(select(bare_data, one, data))?;
    let updates_rest = cx.bind(select(bare_updates, one, updates))?;
    // Zeros are counted in int64, exactly.
    let (ones, more) = (cast(bare_data, DType::I64), cast(bare_updates, DType::I64));
    let zeros = places.write(cx, "add", ones, more)?;
    let [none, single] = [0, 1].map(|n| cx.b.int(n));
    let none = cx.bind(binary_op(EQUAL, zeros, none))?;
    let single = cx.bind(binary_op(EQUAL, zeros, single))?;
    let product = places.write(cx, "mul", data_rest, updates_rest)?;
    let dy = cx.bind(dy * product)?;
    if cx.wants(0) {
        let each = cx.bind(dy / data_rest)?;
        let reached = select(bare_data, single, none);
        cx.give_expr(0, select(reached, each, zero))?;
    }
    if cx.wants(2) {
        let there = places.read(cx, dy)?;
        let each = cx.bind(there / updates_rest)?;
        let (none, single) = (places.read(cx, none)?, places.read(cx, single)?);
        let reached = select(bare_updates, single, none);
        cx.give_expr(2, select(reached, each, zero))?;
    }
    Ok(())
}

/// One axis of `depth` places put in: `values[1]` at the index, `values[0]` elsewhere, and everywhere where the index is
/// out of range (ONNX OneHot-11).
///
/// Temporaries: the indices as int64, the places they are compared with, and one boolean an element of the result.
pub static ONE_HOT: OpDef = OpDef {
    aten: &["aten.one_hot"],
    attrs: &[AttrSpec::int("axis", -1)],
    ins: slots!["indices", "depth", "values"],
    outs: OUTPUT,
    indices: Indices::Depth,
    infer: |cx| {
        let (indices, values) = (cx.ty(0)?, cx.ty(2)?);
        cx.want_dtype(0, is_number, "a number type")?;
        cx.want_dtype(1, is_number, "a number type")?;
        let one = cx.ty(1)?.elements().same(&Dim::ONE);
        if one == Same::No || cx.ty(1)?.rank() > 1 {
            return Err(cx.fail("shape", "`depth` is not one number"));
        }
        if values.rank() != 1 || values.dims[0].same(&Dim::from(2)) == Same::No {
            return Err(cx
                .fail("shape", "`values` is not a pair")
                .found(values.to_string()));
        }
        let axis = cx.axis(cx.attrs.int("axis"), indices.rank() + 1)?;
        let depth = cx.ints(1).and_then(|d| d.first().cloned());
        let mut dims = indices.dims.clone();
        dims.insert(axis, depth.unwrap_or_else(|| cx.fresh(0, axis)));
        Ok(vec![Ty::new(values.dtype, dims)])
    },
    fold: fold_one_hot,
    grad: Grad::Rule(grad_one_hot),
    cost: |cx| cx.elementwise(1),
    memory: |cx| {
        let (Some(Some(indices)), Some(out)) = (cx.ins.first(), cx.outs.first()) else {
            return fresh(cx);
        };
        let places = match indices.elements() {
            0 => 0,
            n => out.elements() / n,
        };
        let temp = index_bytes(indices) + places * DType::I64.size_bytes() + out.elements();
        fresh(cx).with_temp(temp)
    },
    ..standard("OneHot", onnx(11, 11), OpClass::Other, BatchAxes::OneHot)
};

/// The gradient of each of the two values is the sum of the cotangents where it was written. Indices have no gradient.
fn grad_one_hot(cx: &mut GradCx) -> Result<()> {
    if !cx.wants(2) {
        return Ok(());
    }
    let (dy, axis) = (cx.dy0(), cx.attrs().int("axis"));
    let dtype = cx.ty(dy).dtype;
    let mut sums = Vec::with_capacity(2);
    for chosen in [[1.0, 0.0], [0.0, 1.0]] {
        let [off, on] = chosen.map(|v| cx.b.scalar(dtype, v));
        let [off, on] = [cx.b.reshape(off, &[1])?, cx.b.reshape(on, &[1])?];
        let pair = cx.b.concat(&[off, on], 0)?;
        let ins = [cx.x(0), cx.x(1), pair];
        let went = cx.b.emit(&ONE_HOT, &ins, Attrs::new().with("axis", axis))?;
        let part = cx.b.mul(dy, went)?;
        let sum =
            cx.b.emit(REDUCE_SUM, &[part], Attrs::new().with("keepdims", 0))?;
        sums.push(cx.b.reshape(sum, &[1])?);
    }
    let d = cx.b.concat(&sums, 0)?;
    cx.give(2, d);
    Ok(())
}

/// Exporters pick entries of shapes this way.
fn fold_one_hot(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let out = types.first()?.static_dims()?;
    if count(&out) as u64 > MAX_KNOWN_ELEMENTS {
        return None;
    }
    let axis = cx.axis(cx.attrs.int("axis"), out.len()).ok()?;
    let (indices, values) = (cx.const_ints(0)?, cx.ints(2)?);
    let inner = count(&out[axis + 1..]);
    let mut result = Vec::new();
    for flat in 0..count(&out) {
        let place = flat / inner % out[axis];
        let outer = flat / inner / out[axis];
        let index = *indices.get((outer * inner + flat % inner) as usize)?;
        let hot = index == place || index.saturating_add(out[axis]) == place;
        result.push(values.get(hot as usize)?.clone());
    }
    Some(vec![result])
}
