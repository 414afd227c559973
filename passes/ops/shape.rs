//! Shapes and changes of shape.

use super::rules::*;
use crate::ir::op::{Body, Domain, Effect, Grad, Import, OpDef, Slot, free, fresh};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Dim, Ty};

pub const ROWS: &[&OpDef] = &[&SHAPE, &EXPAND];

pub static SHAPE: OpDef = OpDef {
    name: "Shape",
    domain: Domain::Onnx { since: 15 },
    imports: &[Import::Onnx("Shape", 1)],
    attrs: &[
        AttrSpec {
            name: "start",
            kind: AttrKind::Int,
            default: AttrDefault::Int(0),
        },
        AttrSpec {
            name: "end",
            kind: AttrKind::Int,
            default: AttrDefault::Absent,
        },
    ],
    ins: &[Slot::req("data")],
    outs: &[Slot::req("shape")],
    effect: Effect::Pure,
    infer: |cx| {
        Ok(vec![Ty::new(
            DType::I64,
            [Dim::from(span(cx)?.len() as i64)],
        )])
    },
    fold: |cx, _| Some(vec![cx.ty(0).ok()?.dims[span(cx).ok()?].to_vec()]),
    grad: Grad::Zero("a shape does not change with the data"),
    cost: free,
    memory: fresh,
    body: Body::Standard,
};

/// The axes `Shape` returns: `start..end`, clamped (ONNX Shape-15).
fn span(cx: &crate::ir::op::InferCx) -> crate::Result<std::ops::Range<usize>> {
    let rank = cx.ty(0)?.rank() as i64;
    let clamp = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
    let start = clamp(cx.attrs.int("start"));
    let end = clamp(cx.attrs.opt_int("end").unwrap_or(rank));
    Ok(start..end.max(start))
}

/// Broadcasts to a shape; a view of its operand.
pub static EXPAND: OpDef = OpDef {
    name: "Expand",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Expand", 8), Import::Aten("aten.expand")],
    attrs: &[],
    ins: &[Slot::req("input"), Slot::req("shape")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
    infer: |cx| {
        let x = cx.ty(0)?;
        let Some(target) = cx.ints(1) else {
            let rank = cx.ty(1)?.dims.first().and_then(Dim::as_const);
            let rank = rank.ok_or_else(|| cx.fail("shape", "the target's rank is not known"))?;
            let dims: Vec<Dim> = (0..x.rank().max(rank as usize))
                .map(|i| cx.fresh(0, i))
                .collect();
            return Ok(vec![x.with_dims(dims)]);
        };
        let dims = broadcast_two(&x.dims, target).ok_or_else(|| {
            cx.fail("shape", "the operand does not broadcast to the target")
                .expected(format!("{target:?}"))
        })?;
        Ok(vec![x.with_dims(dims)])
    },
    fold: |cx, types| {
        let (out, dims) = (types.first()?.static_dims()?, cx.ty(0).ok()?.static_dims()?);
        let ints = cx.ints(0)?;
        let total: i64 = out.iter().product();
        if total > 64 {
            return None;
        }
        Some(vec![
            (0..total)
                .map(|i| ints.get(broadcast_index(i, &out, &dims)).cloned())
                .collect::<Option<_>>()?,
        ])
    },
    grad: Grad::Rule(|cx| cx.give_summed(0, cx.dy0())),
    cost: free,
    memory: fresh,
    body: Body::Standard,
};
