//! Ops that join and split tensors along an axis: `Concat`, `Split`, `Tile`, `Pad`.

use super::names::*;
use super::rule::*;
use super::shape::{give_shaped, reshape_like};
use ckpt_ir::error::Result;
use ckpt_ir::layout::count;
use ckpt_ir::op::{
    BatchAxes, DataSizes, Footprint, Grad, GradCx, Indices, InferCx, OpDef, Place, Slot,
    contiguous_strides, fresh,
};
use ckpt_ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CONCAT, &SPLIT, &TILE, &PAD];

/// Operands one after another along an axis (ONNX Concat-13).
pub static CONCAT: OpDef = OpDef {
    aten: &["aten.cat", "aten.stack"],
    attrs: &[AttrSpec::required("axis", AttrKind::Int)],
    ins: &[Slot::var("inputs")],
    outs: slots!["concat_result"],
    infer: infer_concat,
    fold: fold_concat,
    grad: Grad::Rule(grad_concat),
    ..mixed("Concat", onnx(4, 13))
};

fn infer_concat(cx: &InferCx) -> Result<Vec<Ty>> {
    let slots: Vec<usize> = (0..cx.ins.len()).collect();
    cx.same_dtype(&slots)?;
    let first = cx.ty(0)?;
    let axis = cx.axis(cx.attrs.int("axis"), first.rank())?;
    let mut dims = first.dims.clone();
    for slot in 1..cx.ins.len() {
        let ty = cx.ty(slot)?;
        if ty.rank() != first.rank() {
            return Err(cx
                .fail(
                    "shape",
                    format!("operand {slot} has another number of axes"),
                )
                .expected(first.to_string())
                .found(ty.to_string()));
        }
        for (i, (dim, other)) in dims.iter_mut().zip(&ty.dims).enumerate() {
            if i == axis {
                *dim = dim.add(other);
                continue;
            }
            match dim.same(other) {
                Same::No => {
                    return Err(cx
                        .fail("shape", format!("operand {slot} differs along axis {i}"))
                        .expected(dim.to_string())
                        .found(other.to_string()));
                }
                // Equal in every valid run: a number says more than a name.
                Same::Unknown if other.as_const().is_some() => *dim = other.clone(),
                _ => {}
            }
        }
    }
    Ok(vec![first.with_dims(dims)])
}

fn fold_concat(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let out = types.first()?.static_dims()?;
    let axis = cx.axis(cx.attrs.int("axis"), out.len()).ok()?;
    let outer = count(&out[..axis]);
    if types.first()?.elements().as_const()? as u64 > MAX_KNOWN_ELEMENTS {
        return None;
    }
    let mut operands = Vec::new();
    for slot in 0..cx.ins.len() {
        let run = count(&cx.ty(slot).ok()?.static_dims()?[axis..]);
        operands.push((cx.ints(slot)?, run as usize));
    }
    let mut result = Vec::new();
    for i in 0..outer as usize {
        for (ints, run) in &operands {
            result.extend_from_slice(ints.get(i * run..(i + 1) * run)?);
        }
    }
    Some(vec![result])
}

/// Each operand gets its piece of the cotangent: one `Split`, whose results are views.
fn grad_concat(cx: &mut GradCx) -> Result<()> {
    let count = cx.b.node(cx.node).ins.len();
    let operands: Vec<ValueId> = (0..count).map(|i| cx.x(i)).collect();
    let rank = cx.b.rank(cx.y(0));
    let axis = normal_axis(cx, rank)?;
    let known: Option<Vec<i64>> = operands
        .iter()
        .map(|v| cx.b.ty(*v).dims[axis].as_const())
        .collect();
    let lengths = match known {
        Some(lengths) => cx.b.ints(&lengths),
        None => {
            let mut pieces = Vec::with_capacity(count);
            for v in operands {
                pieces.push(cx.b.sizes(v, axis..axis + 1)?);
            }
            cx.b.concat(&pieces, 0)?
        }
    };
    let attrs = Attrs::new().with("axis", axis as i64);
    let ins = vec![Some(cx.dy0()), Some(lengths)];
    let pieces = cx.b.emit_n(&SPLIT, ins, attrs, count)?;
    for (i, piece) in pieces.into_iter().enumerate() {
        if cx.wants(i) {
            give_shaped(cx, i, piece)?;
        }
    }
    Ok(())
}

/// The attribute `axis` as `0..rank`.
fn normal_axis(cx: &GradCx, rank: usize) -> Result<usize> {
    let axis = cx.attrs().int("axis");
    let at = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(at)
        .ok()
        .filter(|at| *at < rank)
        .ok_or_else(|| no_rule(cx, "its axis is out of range"))
}

/// Consecutive pieces along an axis, of given lengths or `num_outputs` of them (ONNX Split-18); views.
pub static SPLIT: OpDef = OpDef {
    aten: &["aten.chunk", "aten.split", "aten.split_with_sizes"],
    attrs: &[
        AttrSpec::int("axis", 0),
        AttrSpec::optional("num_outputs", AttrKind::Int),
    ],
    ins: slots!["input"; "split"],
    outs: &[Slot::var("outputs")],
    data_sizes: DataSizes::LongestAxis,
    fold: fold_split,
    grad: Grad::Rule(grad_split),
    memory: |cx| match cx.ins.first() {
        Some(Some(x)) => Footprint::new(vec![
            Place::View {
                of: 0,
                strides: x.strides.clone()
            };
            cx.outs.len()
        ]),
        _ => fresh(cx),
    },
    ..layout("Split", onnx(18, 18), BatchAxes::Mixed, infer_split)
};

fn infer_split(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    let axis = cx.axis(cx.attrs.int("axis"), x.rank())?;
    let (whole, count) = (&x.dims[axis], cx.out_names.len());
    let lengths = match (cx.opt_ty(1).is_some(), cx.attrs.opt_int("num_outputs")) {
        (true, Some(_)) => {
            return Err(cx.fail("attribute", "both `split` and `num_outputs` are given"));
        }
        (false, None) => {
            return Err(cx.fail("attribute", "neither `split` nor `num_outputs` is given"));
        }
        (false, Some(n)) => {
            if n != count as i64 {
                return Err(cx
                    .fail("attribute", "`num_outputs` is not the number of results")
                    .expected(count.to_string())
                    .found(n.to_string()));
            }
            let each = whole.ceil_div(&Dim::from(n));
            let mut lengths = vec![each.clone(); count];
            lengths[count - 1] = whole.sub(&each.mul(&Dim::from(n - 1)));
            lengths
        }
        (true, None) => {
            let given = int_vector(cx, 1)?;
            if given.is_some_and(|n| n != count) {
                return Err(cx
                    .fail("shape", "`split` does not have one length a result")
                    .expected(count.to_string())
                    .found(cx.ty(1)?.to_string()));
            }
            match cx.ints(1) {
                None => (0..count).map(|i| cx.fresh(i, axis)).collect(),
                Some(lengths) => {
                    let total = lengths.iter().fold(Dim::ZERO, |sum, d| sum.add(d));
                    if total.same(whole) == Same::No {
                        return Err(cx
                            .fail("shape", format!("the lengths do not add up to axis {axis}"))
                            .expected(whole.to_string())
                            .found(format!("{total} from {lengths:?}")));
                    }
                    lengths.to_vec()
                }
            }
        }
    };
    let mut types = Vec::with_capacity(count);
    for length in lengths {
        if length.bounds().1.is_some_and(|hi| hi < 0) {
            return Err(cx.fail("shape", format!("a piece has the length {length}")));
        }
        let mut dims = x.dims.clone();
        dims[axis] = length;
        types.push(x.with_dims(dims));
    }
    Ok(types)
}

fn fold_split(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let dims = cx.ty(0).ok()?.static_dims()?;
    let axis = cx.axis(cx.attrs.int("axis"), dims.len()).ok()?;
    let (ints, strides) = (cx.ints(0)?, contiguous_strides(&dims));
    let mut offset = 0;
    let mut pieces = Vec::with_capacity(types.len());
    for ty in types {
        let out = ty.static_dims()?;
        pieces.push(strided_contents(ints, &out, &strides, offset)?);
        offset += out[axis] * strides[axis];
    }
    Some(pieces)
}

/// Concatenates the cotangents, with zeros for a piece that does not reach the loss.
fn grad_split(cx: &mut GradCx) -> Result<()> {
    let outs = cx.b.node(cx.node).outs.to_vec();
    let mut pieces = Vec::with_capacity(outs.len());
    for (i, out) in outs.into_iter().enumerate() {
        pieces.push(match cx.dy(i) {
            Some(dy) => dy,
            None => cx.b.filled_like(out, 0.0)?,
        });
    }
    let d = match pieces.as_slice() {
        [only] => *only,
        _ => {
            let attrs = Attrs::new().with("axis", cx.attrs().int("axis"));
            cx.b.emit(&CONCAT, &pieces, attrs)?
        }
    };
    give_shaped(cx, 0, d)
}

/// The operand repeated along each axis (ONNX Tile-13).
pub static TILE: OpDef = OpDef {
    aten: &["aten.repeat"],
    ins: slots!["input", "repeats"],
    outs: OUTPUT,
    infer: |cx| {
        let x = cx.ty(0)?;
        if int_vector(cx, 1)?.is_some_and(|n| n != x.rank()) {
            return Err(cx
                .fail("shape", "`repeats` does not have one entry an axis")
                .expected(x.rank().to_string())
                .found(cx.ty(1)?.to_string()));
        }
        let dims: Vec<Dim> = match cx.ints(1) {
            Some(repeats) => x.dims.iter().zip(repeats).map(|(d, r)| d.mul(r)).collect(),
            None => (0..x.rank()).map(|i| cx.fresh(0, i)).collect(),
        };
        Ok(vec![x.with_dims(dims)])
    },
    fold: fold_tile,
    grad: Grad::Rule(grad_tile),
    ..mixed("Tile", onnx(6, 13))
};

fn fold_tile(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let (out, dims) = (types.first()?.static_dims()?, cx.ty(0).ok()?.static_dims()?);
    let (ints, strides) = (cx.ints(0)?, contiguous_strides(&dims));
    let total = types.first()?.elements().as_const()?;
    if total as u64 > MAX_KNOWN_ELEMENTS {
        return None;
    }
    let steps = contiguous_strides(&out);
    (0..total)
        .map(|flat| {
            let at: i64 = (0..out.len())
                .map(|i| flat / steps[i] % out[i] % dims[i] * strides[i])
                .sum();
            ints.get(at as usize).cloned()
        })
        .collect::<Option<Vec<Dim>>>()
        .map(|result| vec![result])
}

/// With every axis as [repeats, size], the cotangent summed over the repeats.
fn grad_tile(cx: &mut GradCx) -> Result<()> {
    let (x, repeats, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let rank = cx.b.rank(x);
    if rank == 0 {
        cx.give(0, dy);
        return Ok(());
    }
    let one = cx.b.ints(&[1]);
    let (mut split, mut kept) = (Vec::new(), Vec::new());
    for axis in 0..rank {
        let (from, to) = (cx.b.ints(&[axis as i64]), cx.b.ints(&[axis as i64 + 1]));
        let repeat = cx.b.op(SLICE, &[repeats, from, to])?;
        let repeat = cx.b.cast(repeat, DType::I64)?;
        let size = cx.b.sizes(x, axis..axis + 1)?;
        split.extend([repeat, size]);
        kept.extend([one, size]);
    }
    let (split, kept) = (cx.b.concat(&split, 0)?, cx.b.concat(&kept, 0)?);
    let paired = cx.b.reshape_to(dy, split)?;
    let summed = cx.b.op(SUM_TO_SHAPE, &[paired, kept])?;
    let d = reshape_like(cx, summed, x)?;
    cx.give(0, d);
    Ok(())
}

/// Adds elements before and after each axis, or removes them where a count is negative (ONNX Pad-18).
///
/// Only in the mode `constant`. The reader rewrites the other modes as gathers.
pub static PAD: OpDef = OpDef {
    aten: &["aten.constant_pad_nd", "aten.pad"],
    attrs: &[AttrSpec::str("mode", "constant")],
    ins: slots!["data", "pads"; "constant_value", "axes"],
    outs: OUTPUT,
    indices: Indices::PassedOn,
    infer: infer_pad,
    grad: Grad::Rule(grad_pad),
    ..mixed("Pad", onnx(11, 18))
};

fn infer_pad(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    let mode = cx.attrs.str("mode");
    if mode != "constant" {
        return Err(cx
            .fail("attribute", format!("the mode `{mode}` is not supported"))
            .expected("constant"));
    }
    if cx.opt_ty(2).is_some() {
        cx.same_dtype(&[0, 2])?;
    }
    let axes = const_axes(cx, 3, x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    if int_vector(cx, 1)?.is_some_and(|n| n != 2 * axes.len()) {
        return Err(cx
            .fail("shape", "`pads` does not have two entries an axis")
            .expected((2 * axes.len()).to_string())
            .found(cx.ty(1)?.to_string()));
    }
    let mut dims = x.dims.clone();
    for (i, axis) in axes.iter().enumerate() {
        dims[*axis] = match cx.ints(1) {
            Some(pads) => dims[*axis].add(&pads[i]).add(&pads[i + axes.len()]),
            None => cx.fresh(0, *axis),
        };
        if dims[*axis].bounds().1.is_some_and(|hi| hi < 0) {
            return Err(cx
                .fail(
                    "shape",
                    format!("more is taken from axis {axis} than it has"),
                )
                .found(dims[*axis].to_string()));
        }
    }
    Ok(vec![x.with_dims(dims)])
}

/// The gradient removes what was added, and is 0 where elements were removed.
fn grad_pad(cx: &mut GradCx) -> Result<()> {
    let pads = cx.x(1);
    if let Some(fill) = cx.opt_x(2).filter(|_| cx.wants(2)) {
        // The sum of what did not come from the operand.
        let inside = cx.b.filled_like(cx.x(0), 1.0)?;
        let ins = vec![Some(inside), Some(pads), None, cx.opt_x(3)];
        let inside = cx.b.emit_n(&PAD, ins, Attrs::new(), 1)?[0];
        let one = cx.b.scalar_like(inside, 1.0);
        let outside = cx.b.sub(one, inside)?;
        let d = cx.b.mul(cx.dy0(), outside)?;
        let d = cx.b.sum_to(d, fill)?;
        cx.give(2, d);
    }
    if !cx.wants(0) {
        return Ok(());
    }
    let negative = match cx.b.known(pads).map(|ints| {
        let negated = ints.iter().map(|d| Dim::ZERO.sub(d).as_const());
        negated.collect::<Option<Vec<i64>>>()
    }) {
        Some(Some(pads)) => cx.b.ints(&pads),
        _ => cx.b.neg(pads)?,
    };
    let ins = vec![Some(cx.dy0()), Some(negative), None, cx.opt_x(3)];
    let d = cx.b.emit_n(&PAD, ins, Attrs::new(), 1)?[0];
    give_shaped(cx, 0, d)
}
