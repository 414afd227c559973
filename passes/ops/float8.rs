//! Values stored as floats of 8 bits with a scale: [`QUANTIZE_FLOAT8`] makes them, [`DEQUANTIZE_FLOAT8`] reads them.
//!
//! Where both have the same scale, the gradient passes straight through them, as in TransformerEngine: neither op rounds or
//! masks it, and none flows into a scale. A plan may keep what was quantised, one byte an element, and dequantise it again.

use super::arith::MUL;
use super::cast::*;
use super::names::DIV;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, Grad, GradCx, InferCx, MemoryCx, OpClass, OpDef, Slot, fresh,
};
use ckpt_ir::{AttrKind, AttrSpec, DType, Emit, NodeId, OpRef, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&QUANTIZE_FLOAT8, &DEQUANTIZE_FLOAT8];

const SCALE: Slot = Slot::req("scale").stopped();

/// `x / scale`, rounded once to a type of 8 bits. The scale broadcasts to `x`.
pub static QUANTIZE_FLOAT8: OpDef = OpDef {
    attrs: &[
        AttrSpec::optional(SATURATE, AttrKind::Int),
        AttrSpec::required(TO, AttrKind::DType),
    ],
    ins: &[Slot::req("x").weight(), SCALE],
    outs: Y,
    infer: |cx| {
        let to = cx.attrs.dtype(TO);
        if !to.is_float8() {
            return Err(cx
                .fail("attribute", format!("`to` is {to}"))
                .expected("a float of 8 bits"));
        }
        cx.want_dtype(0, DType::is_float, "a floating-point type")?;
        scaled(cx, to)
    },
    grad: Grad::First(grad_quantize),
    cost: |cx| cx.elementwise(3),
    memory: |cx| {
        let wide = wide_of(cx, &[0, 1]);
        fresh(cx).with_temp(buffer_bytes(cx, wide) + copied_scale_bytes(cx, wide))
    },
    ..ours(
        "QuantizeFloat8",
        OpClass::Other,
        BatchAxes::Pointwise,
        |cx| {
            let steps = in_wide(cx, DIV, &[0, 1])?;
            let (to, saturate) = (cx.attrs.dtype(TO), saturates(cx.attrs));
            Ok(vec![rounded(cx.b, steps, to, saturate)?])
        },
    )
};

/// `codes · scale`, computed in float32 or float64. The scale broadcasts to the codes.
pub static DEQUANTIZE_FLOAT8: OpDef = OpDef {
    attrs: &[AttrSpec::required(TO, AttrKind::DType)],
    ins: &[Slot::req("codes"), SCALE],
    outs: Y,
    infer: |cx| {
        let to = cx.attrs.dtype(TO);
        if !to.is_float() {
            return Err(cx
                .fail("attribute", format!("`to` is {to}"))
                .expected("a floating-point type"));
        }
        cx.want_dtype(0, DType::is_float8, "a float of 8 bits")?;
        scaled(cx, to)
    },
    grad: Grad::First(|cx| {
        let [dy, scale] = in_wider(cx, cx.dy0())?;
        cx.b.mul(dy, scale)
    }),
    cost: |cx| cx.elementwise(2),
    memory: |cx| {
        let wide = widest(wide_of(cx, &[1]), cx.attrs.dtype(TO));
        let buffer = match wide == cx.attrs.dtype(TO) {
            true => 0,
            false => buffer_bytes(cx, wide),
        };
        fresh(cx).with_temp(buffer + copied_scale_bytes(cx, wide))
    },
    ..ours(
        "DequantizeFloat8",
        OpClass::Other,
        BatchAxes::Pointwise,
        |cx| {
            let y = in_wide(cx, super::names::MUL, &[0, 1])?;
            let to = cx.attrs.dtype(TO);
            Ok(vec![cx.b.cast(y, to)?])
        },
    )
};

/// Returns the type of the first operand with another element type; the scale may not enlarge it.
fn scaled(cx: &InferCx, to: DType) -> Result<Vec<Ty>> {
    cx.want_dtype(1, DType::is_float, "a floating-point type")?;
    let x = cx.ty(0)?;
    if !may_be_same(&broadcast_dims(cx, 0..2)?, &x.dims) {
        return Err(cx
            .fail("shape", "the scale does not broadcast to the operand")
            .expected(x.to_string())
            .found(cx.ty(1)?.to_string()));
    }
    Ok(vec![x.with_dtype(to)])
}

/// x' = y' / scale. Where y' is what [`DEQUANTIZE_FLOAT8`] makes of a gradient by the same scale, that gradient.
fn grad_quantize(cx: &mut GradCx) -> Result<ValueId> {
    let (dy, scale) = (cx.dy0(), cx.x(1));
    let dtype = cx.ty(cx.x(0)).dtype;
    let made_by = |cx: &GradCx, v: ValueId, op: &'static OpDef| -> Option<NodeId> {
        let node = cx.b.def_node(v)?;
        (cx.b.node(node).op == op).then_some(node)
    };
    if let Some(product) = made_by(cx, dy, &MUL)
        && let [Some(through), Some(by)] = *cx.b.node(product).ins
        && is_same_scale(cx.b, by, scale)
    {
        // A cast there and back changes nothing.
        let narrow = made_by(cx, through, &CAST).and_then(|cast| cx.b.node(cast).ins[0]);
        let through = narrow
            .filter(|v| cx.ty(*v).dtype == dtype)
            .unwrap_or(through);
        return cx.b.cast(through, dtype);
    }
    let [dy, scale] = in_wider(cx, dy)?;
    let dx = cx.b.div(dy, scale)?;
    cx.b.cast(dx, dtype)
}

/// Returns a gradient and the scale in the wider of their types.
fn in_wider(cx: &mut GradCx, dy: ValueId) -> Result<[ValueId; 2]> {
    let scale = cx.x(1);
    let wide = widest(cx.ty(dy).dtype, cx.ty(scale).dtype);
    Ok([cx.b.cast(dy, wide)?, cx.b.cast(scale, wide)?])
}

/// Returns true for one scale, or one that two nodes lay out alike.
fn is_same_scale(b: &dyn Emit, a: ValueId, other: ValueId) -> bool {
    let laid_out = |v: ValueId| {
        let node = b.node(b.def_node(v)?);
        node.op.is_layout().then(|| node.ins[0])
    };
    a == other
        || (b.ty(a) == b.ty(other) && laid_out(a).is_some() && laid_out(a) == laid_out(other))
}

fn wide_of(cx: &MemoryCx, slots: &[usize]) -> DType {
    wide_type(
        slots
            .iter()
            .filter_map(|slot| Some(cx.operand(*slot)?.dtype)),
    )
}

fn copied_scale_bytes(cx: &MemoryCx, wide: DType) -> u64 {
    let other = cx.operand(1).filter(|scale| scale.dtype != wide);
    other.map_or(0, |scale| scale.elements() * wide.size_bytes())
}

/// Emits an op on operands in the type in which kernels scale.
fn in_wide(cx: &mut BodyCx, op: OpRef, slots: &[usize]) -> Result<ValueId> {
    let to = Some(cx.attrs.dtype(TO)).filter(|to| to.is_float());
    let types = slots.iter().map(|slot| cx.ty(cx.x(*slot)).dtype).chain(to);
    let wide = wide_type(types);
    let mut ins = Vec::new();
    for slot in slots {
        let x = cx.x(*slot);
        ins.push(cx.b.cast(x, wide)?);
    }
    cx.b.op(op, &ins)
}
