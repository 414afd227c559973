//! Ops that make tensors from sizes and bounds, and masks: `ConstantOfShape`, `Range`, `Trilu`.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{Grad, InferCx, OpDef};
use ckpt_ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CONSTANT_OF_SHAPE, &RANGE, &TRILU];

/// A shape filled with one value, float 0 where none is given (ONNX ConstantOfShape-9).
pub static CONSTANT_OF_SHAPE: OpDef = OpDef {
    attrs: &[AttrSpec::optional("value", AttrKind::Tensor)],
    ins: INPUT,
    outs: OUTPUT,
    later_types: &[(DType::BF16, 20)],
    infer: |cx| {
        let rank = int_vector(cx, 0)?;
        let value = cx.attrs.opt_tensor("value");
        if let Some(value) = value
            && value.elements() != 1
        {
            return Err(cx
                .fail("attribute", "`value` does not have exactly one element")
                .found(value.ty().to_string()));
        }
        let dims = match (cx.ints(0), rank) {
            (Some(dims), _) => dims.to_vec(),
            (None, Some(rank)) => (0..rank).map(|i| cx.fresh(0, i)).collect(),
            (None, None) => return Err(cx.fail("shape", "the rank of the result is not known")),
        };
        Ok(vec![Ty::new(value.map_or(DType::F32, |v| v.dtype), dims)])
    },
    fold: |cx, types| {
        let total = u64::try_from(types.first()?.elements().as_const()?).ok()?;
        if total > MAX_KNOWN_ELEMENTS {
            return None;
        }
        let value = Dim::from(cx.attrs.opt_tensor("value")?.get_i64(0)?);
        Some(vec![vec![value; total as usize]])
    },
    grad: Grad::Zero("a shape does not change with the data"),
    ..mixed("ConstantOfShape", onnx(9, 9))
};

/// `start`, `start + delta`, … short of `limit` (ONNX Range-11).
pub static RANGE: OpDef = OpDef {
    ins: slots!["start", "limit", "delta"],
    outs: OUTPUT,
    infer: infer_range,
    fold: |cx, types| {
        let count = u64::try_from(types.first()?.dims[0].as_const()?).ok()?;
        if count > MAX_KNOWN_ELEMENTS {
            return None;
        }
        let (start, delta) = (cx.ints(0)?.first()?, cx.ints(2)?.first()?);
        let at = |i: u64| start.add(&delta.mul(&Dim::from(i as i64)));
        Some(vec![(0..count).map(at).collect()])
    },
    grad: Grad::Zero("its bounds decide how many elements there are"),
    ..mixed("Range", onnx(11, 11))
};

fn infer_range(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let dtype = cx.same_dtype(&[0, 1, 2])?;
    for slot in 0..3 {
        if cx.ty(slot)?.rank() != 0 {
            return Err(cx
                .fail("shape", format!("operand {slot} is not a scalar"))
                .found(cx.ty(slot)?.to_string()));
        }
    }
    let known = |slot: usize| cx.ints(slot).and_then(|ints| ints.first());
    let count = match (known(0), known(1), known(2)) {
        (Some(start), Some(limit), Some(delta)) => match (delta.as_const(), delta.bounds()) {
            (Some(0), _) => return Err(cx.fail("shape", "the step is 0")),
            (_, (Some(lo), _)) if lo > 0 => {
                Some(limit.sub(start).larger(&Dim::ZERO).ceil_div(delta))
            }
            (_, (_, Some(hi))) if hi < 0 => Some(
                start
                    .sub(limit)
                    .larger(&Dim::ZERO)
                    .ceil_div(&Dim::ZERO.sub(delta)),
            ),
            _ => None,
        },
        _ => None,
    };
    Ok(vec![Ty::new(
        dtype,
        [count.unwrap_or_else(|| cx.fresh(0, 0))],
    )])
}

/// The part of each matrix above (`upper`) or below the `k`-th diagonal, zeros elsewhere (ONNX Trilu-14).
pub static TRILU: OpDef = OpDef {
    aten: &["aten.tril", "aten.triu"],
    attrs: &[AttrSpec::int("upper", 1)],
    ins: slots!["input"; "k"],
    outs: OUTPUT,
    infer: |cx| {
        if cx.ty(0)?.rank() < 2 {
            return Err(cx.fail("shape", "the operand has fewer than two axes"));
        }
        if let Some(k) = cx.opt_ty(1)
            && (k.dtype != DType::I64 || k.elements().as_const().is_some_and(|n| n != 1))
        {
            return Err(cx.fail("type", "`k` is not one int64").found(k.to_string()));
        }
        Ok(vec![cx.ty(0)?.clone()])
    },
    grad: Grad::First(|cx| {
        let attrs = Attrs::new().with("upper", cx.attrs().int("upper"));
        let ins = vec![Some(cx.dy0()), cx.opt_x(1)];
        let d = cx.b.emit_n(&TRILU, ins, attrs, 1)?[0];
        Ok(d)
    }),
    ..mixed("Trilu", onnx(14, 14))
};
