//! Selection along an axis: `ArgMax`, `ArgMin`, `TopK` (ONNX operator specifications of those names).

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, DataSizes, Footprint, Grad, GradCx, InferCx, MemoryCx, OpClass, OpDef, Slot, fresh,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ARG_MAX, &ARG_MIN, &TOP_K];

const ARG_ATTRS: &[AttrSpec] = &[
    AttrSpec::int("axis", 0),
    AttrSpec::int("keepdims", 1),
    AttrSpec::int("select_last_index", 0),
];

fn infer_arg(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let x = cx.ty(0)?;
    let axis = cx.axis(cx.attrs.int("axis"), x.rank())?;
    let mut dims = x.dims.clone();
    if cx.attrs.int("keepdims") != 0 {
        dims[axis] = Dim::ONE;
    } else {
        dims.remove(axis);
    }
    Ok(vec![Ty::new(DType::I64, dims)])
}

/// `aten::argmax` returns the first of several; for the last one the kernel searches a reversed copy.
fn arg_memory(cx: &MemoryCx) -> Footprint {
    let reversed = cx.attrs.int("select_last_index") != 0;
    fresh(cx).with_temp(if reversed { cx.bytes(0) } else { 0 })
}

const DATA: &[Slot] = slots!["data"];
const REDUCED: &[Slot] = slots!["reduced"];

/// The place of an extreme along an axis.
const fn arg(name: &'static str, aten: &'static [&'static str]) -> OpDef {
    OpDef {
        aten,
        attrs: ARG_ATTRS,
        ins: DATA,
        outs: REDUCED,
        infer: infer_arg,
        grad: Grad::Zero("an index is piecewise constant"),
        cost: |cx| cx.work(cx.elements(0)),
        memory: arg_memory,
        ..mixed(name, onnx(1, 13))
    }
}

/// ONNX `ArgMax`.
pub static ARG_MAX: OpDef = arg("ArgMax", &["aten.argmax"]);

/// ONNX `ArgMin`.
pub static ARG_MIN: OpDef = arg("ArgMin", &["aten.argmin"]);

/// The `K` largest (or smallest) elements along an axis and where they are. Of equal elements the first comes first, and a run on
/// the CPU names the nodes that have such elements.
///
/// `aten::topk` leaves the order of equal elements open, so the kernel sorts, stably: values and places of the whole axis
/// are temporaries.
pub static TOP_K: OpDef = OpDef {
    aten: &["aten.topk"],
    attrs: &[
        AttrSpec::int("axis", -1),
        AttrSpec::int("largest", 1),
        AttrSpec::int("sorted", 1),
    ],
    ins: slots!["X", "K"],
    outs: slots!["Values", "Indices"],
    data_sizes: DataSizes::LongestAxis,
    infer: infer_top_k,
    grad: Grad::Rule(grad_top_k),
    cost: |cx| cx.work(10 * cx.elements(0)),
    memory: top_k_memory,
    ..standard(
        "TopK",
        onnx(11, 11),
        OpClass::Selection,
        BatchAxes::AlongAxis,
    )
};

fn infer_top_k(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let (x, k) = (cx.ty(0)?, cx.ty(1)?);
    if k.dtype != DType::I64 || k.rank() != 1 || !may_be_same(&k.dims, &[Dim::ONE]) {
        return Err(cx
            .fail("type", "`K` is not one int64")
            .expected("i64[1]")
            .found(k.to_string()));
    }
    let axis = cx.axis(cx.attrs.int("axis"), x.rank())?;
    let kept = match cx.ints(1).and_then(|k| k.first()) {
        Some(k) => k.clone(),
        None => cx.fresh(0, axis),
    };
    if x.dims[axis].sub(&kept).bounds().1.is_some_and(|hi| hi < 0)
        || kept.bounds().1.is_some_and(|hi| hi < 0)
    {
        return Err(cx
            .fail("shape", "`K` is out of range")
            .expected(format!("0..={}", x.dims[axis]))
            .found(kept.to_string()));
    }
    let mut dims = x.dims.clone();
    dims[axis] = kept;
    let values = x.with_dims(dims);
    let indices = values.with_dtype(DType::I64);
    Ok(vec![values, indices])
}

/// Sorted values and places, and the places of one row before it is sorted.
fn top_k_memory(cx: &MemoryCx) -> Footprint {
    let Some(x) = &cx.ins[0] else {
        return fresh(cx);
    };
    let axis = cx.attrs.int("axis").rem_euclid(x.dims.len().max(1) as i64);
    let row = x.dims.get(axis as usize).copied().unwrap_or(1) as u64;
    fresh(cx).with_temp(x.bytes() + (x.elements() + row) * DType::I64.size_bytes())
}

/// The gradient is the cotangent at selected elements and 0 elsewhere. The indices of one selection are all different.
fn grad_top_k(cx: &mut GradCx) -> Result<()> {
    let Some(dy) = cx.dy(0) else { return Ok(()) };
    let zeros = cx.b.filled_like(cx.x(0), 0.0)?;
    let axis = Attrs::new().with("axis", cx.attrs().int("axis"));
    let dx = cx.b.emit(SCATTER_ELEMENTS, &[zeros, cx.y(1), dy], axis)?;
    cx.give(0, dx);
    Ok(())
}
