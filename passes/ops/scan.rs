//! Running sums: `CumSum` (ONNX CumSum-14).

use super::rules::*;
use crate::ir::op::{
    Body, Domain, Effect, Footprint, Grad, Import, MemoryCx, OpDef, Sized, Slot, fresh,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, Attrs, Dim};

pub const ROWS: &[&OpDef] = &[&CUM_SUM];

pub static CUM_SUM: OpDef = OpDef {
    name: "CumSum",
    domain: Domain::Onnx { since: 14 },
    imports: &[Import::Onnx("CumSum", 11)],
    attrs: &[
        AttrSpec {
            name: "exclusive",
            kind: AttrKind::Int,
            default: AttrDefault::Int(0),
        },
        AttrSpec {
            name: "reverse",
            kind: AttrKind::Int,
            default: AttrDefault::Int(0),
        },
    ],
    ins: &[Slot::req("x"), Slot::req("axis")],
    outs: &[Slot::req("y")],
    effect: Effect::Pure,
    infer: |cx| {
        cx.want_dtype(0, is_number, "a number type")?;
        let (x, axis) = (cx.ty(0)?, cx.ty(1)?);
        if !axis.dtype.is_int() || !axis.elements().is_one() {
            return Err(cx
                .fail("type", "`axis` is not one integer")
                .found(axis.to_string()));
        }
        if let Some([axis]) = cx.const_ints(1).as_deref() {
            cx.axis(*axis, x.rank())?;
        }
        Ok(vec![x.clone()])
    },
    // Position ids are running sums of small masks: vectors are enough.
    fold: |cx, types| {
        if types.first()?.rank() != 1 {
            return None;
        }
        let ints = cx.ints(0)?;
        let (exclusive, reverse) = (cx.attrs.int("exclusive") != 0, cx.attrs.int("reverse") != 0);
        let mut out = vec![Dim::ZERO; ints.len()];
        let mut sum = Dim::ZERO;
        for k in 0..ints.len() {
            let i = if reverse { ints.len() - 1 - k } else { k };
            let with = sum.add(&ints[i]);
            out[i] = if exclusive { sum } else { with.clone() };
            sum = with;
        }
        Some(vec![out])
    },
    // Every element adds to those after it; so its gradient is the sum of theirs.
    grad: Grad::Rule(|cx| {
        let attrs = cx.attrs();
        let back = Attrs::new()
            .with("exclusive", attrs.int("exclusive"))
            .with("reverse", (attrs.int("reverse") == 0) as i64);
        let d = cx.b.emit(&CUM_SUM, &[cx.dy0(), cx.x(1)], back)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: cum_sum_memory,
    body: Body::Standard,
};

/// `aten::cumsum` runs forward; a sum from the end is taken of the flipped operand, and flipped.
fn cum_sum_memory(cx: &MemoryCx) -> Footprint {
    Footprint {
        temp_bytes: if cx.attrs.int("reverse") == 0 {
            0
        } else {
            cx.ins[0].as_ref().map_or(0, Sized::bytes)
        },
        ..fresh(cx)
    }
}
