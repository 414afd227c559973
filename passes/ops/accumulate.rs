//! Sums of narrow terms in a wide type: what gradients that are made part by part are added up with.
//!
//! Written as `Cast` and `Add`, a sum holds a wide copy of every term beside itself; as a row of its own it widens some
//! rows of the term at a time and is written over itself.

use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Footprint, Grad, InferCx, MemoryCx, OpDef, Slot, fresh, no_fold,
};
use crate::ir::{DType, Ty};

pub const ROWS: &[&OpDef] = &[&ACCUMULATE];

/// Elements that are widened at a time, in whole rows.
const STRETCH: u64 = 1 << 20;

/// sum + part, in the type of the sum: float32 where the part has 16 bits. Both have one shape.
pub static ACCUMULATE: OpDef = OpDef {
    name: "Accumulate",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("sum"), Slot::req("part")],
    outs: &[Slot::req("total")],
    effect: Effect::Pure,
    infer,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        let dy = cx.dy0();
        cx.give(0, dy);
        let narrow = cx.b.ty(cx.x(1)).dtype;
        let part = cx.b.cast(dy, narrow)?;
        cx.give(1, part);
        Ok(())
    }),
    cost: one_flop,
    memory,
    body: Body::Function(|cx| {
        let wide = cx.b.ty(cx.x(0)).dtype;
        let part = cx.b.cast(cx.x(1), wide)?;
        Ok(vec![cx.b.add(cx.x(0), part)?])
    }),
};

/// Whether terms of one type are added up in another without loss of range.
fn holds(sum: DType, part: DType) -> bool {
    sum == part || part.size_bytes() < sum.size_bytes()
}

fn infer(cx: &InferCx) -> Result<Vec<Ty>> {
    for slot in [0, 1] {
        cx.want_dtype(slot, DType::is_float, "a floating-point type")?;
    }
    let (sum, part) = (cx.ty(0)?, cx.ty(1)?);
    if !holds(sum.dtype, part.dtype) {
        return Err(cx
            .fail("dtype", "the part is wider than the sum")
            .expected(format!("{} or narrower", sum.dtype.name()))
            .found(part.dtype.name()));
    }
    if !may_be_same(&sum.dims, &part.dims) {
        return Err(cx
            .fail("shape", "the part has another shape than the sum")
            .expected(sum.to_string())
            .found(part.to_string()));
    }
    Ok(vec![sum.clone()])
}

/// How many rows of a tensor of `dims` are widened at a time.
pub fn stretch(dims: &[i64]) -> i64 {
    let row: i64 = dims.iter().skip(1).product();
    let rows = STRETCH as i64 / row.max(1);
    rows.clamp(1, dims.first().copied().unwrap_or(1).max(1))
}

fn memory(cx: &MemoryCx) -> Footprint {
    let (Some(sum), Some(part)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    let row: i64 = part.dims.iter().skip(1).product();
    let temp_bytes = match sum.dtype == part.dtype || part.elements() == 0 {
        true => 0,
        false => (stretch(&part.dims) * row) as u64 * sum.dtype.size_bytes(),
    };
    Footprint {
        temp_bytes,
        ..fresh(cx)
    }
    .over(cx, &[0])
}
