//! Running sums: `CumSum` (ONNX CumSum-14).

use super::rule::*;
use ckpt_ir::op::{Footprint, Grad, MemoryCx, OpDef, fresh};
use ckpt_ir::{AttrSpec, Attrs, Dim};
/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CUM_SUM];

/// ONNX `CumSum`.
pub static CUM_SUM: OpDef = OpDef {
    aten: &["aten.cumsum"],
    attrs: &[AttrSpec::int("exclusive", 0), AttrSpec::int("reverse", 0)],
    ins: slots!["x", "axis"],
    outs: SMALL_Y,
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
    grad: Grad::First(|cx| {
        let attrs = cx.attrs();
        let back = Attrs::new()
            .with("exclusive", attrs.int("exclusive"))
            .with("reverse", (attrs.int("reverse") == 0) as i64);
        cx.b.emit(&CUM_SUM, &[cx.dy0(), cx.x(1)], back)
    }),
    cost: one_flop,
    memory: cum_sum_memory,
    ..mixed("CumSum", onnx(11, 14))
};

/// `aten::cumsum` runs forward; a sum from the end is taken of the flipped operand, and flipped.
fn cum_sum_memory(cx: &MemoryCx) -> Footprint {
    fresh(cx).with_temp(if cx.attrs.int("reverse") == 0 {
        0
    } else {
        cx.bytes(0)
    })
}
