//! Moving values out of the device's memory and back: where they wait while nothing reads them.
//!
//! Both ops are the identity in values, so any runtime can run a file that has them; only ours moves anything. What is
//! moved is the storage, whole and row-major, so that what comes back has the bits, strides and alignment of what left.

use super::rules::*;
use super::shape::IDENTITY;
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Footprint, Grad, InferCx, MemoryCx, OpDef, Place, Slot, fresh, moves,
    no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, Ty};

pub const ROWS: &[&OpDef] = &[&OFFLOAD, &FETCH];

/// Where the bytes wait: the host's memory, or a file. A run whose device is the CPU uses a file for both.
pub const TO: &str = "to";
pub const TO_HOST: &str = "host";
pub const TO_DISK: &str = "disk";

/// A copy of its operand outside the device's memory.
pub static OFFLOAD: OpDef = OpDef {
    name: "Offload",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[AttrSpec {
        name: TO,
        kind: AttrKind::Str,
        default: AttrDefault::Str(TO_HOST),
    }],
    ins: &[Slot::req("value")],
    outs: &[Slot::req("outside")],
    effect: Effect::Pure,
    infer: |cx| match cx.attrs.str(TO) {
        TO_HOST | TO_DISK => same(cx),
        other => Err(cx
            .fail("attr", format!("values cannot be moved to `{other}`"))
            .expected(format!("{TO_HOST} or {TO_DISK}"))),
    },
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        cx.give(0, cx.dy0());
        Ok(())
    }),
    cost: moves,
    memory: |cx: &MemoryCx| Footprint {
        outs: vec![Place::Outside],
        temp_bytes: strided_bytes(cx, &[0]),
        over: Vec::new(),
    },
    body: Body::Function(|cx| Ok(vec![emit(cx.b, &IDENTITY, &[cx.x(0)])?])),
};

/// What was moved out, in the device's memory again.
pub static FETCH: OpDef = OpDef {
    name: "Fetch",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("outside")],
    outs: &[Slot::req("value")],
    effect: Effect::Pure,
    infer: same,
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        cx.give(0, cx.dy0());
        Ok(())
    }),
    cost: moves,
    memory: fresh,
    body: Body::Function(|cx| Ok(vec![emit(cx.b, &IDENTITY, &[cx.x(0)])?])),
};

fn same(cx: &InferCx) -> Result<Vec<Ty>> {
    Ok(vec![cx.ty(0)?.clone()])
}
