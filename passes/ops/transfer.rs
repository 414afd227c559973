//! Moving values out of the device's memory and back: where they wait while nothing reads them.
//!
//! Both ops are the identity in values, so any runtime can run a file that has them; only ours moves anything. What is
//! moved is the storage, whole and row-major, so that what comes back has the bits, strides and alignment of what left.
//!
//! A transfer may run beside what follows it. When memory is free must not depend on how fast that is: `Release` reads
//! what left, so its storage lives until there, and waits until it has arrived outside. What comes back has its storage from
//! `Fetch` on; whatever reads it first waits for it, and until then what it comes from stays outside.

use super::rules::*;
use super::shape::{EXPAND, IDENTITY};
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Footprint, Grad, InferCx, MemoryCx, OpDef, Place, Slot, free, fresh,
    moves, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, Ty};

pub const ROWS: &[&OpDef] = &[&OFFLOAD, &RELEASE, &FETCH];

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
        in_place_operands: Vec::new(),
    },
    body: Body::Function(|cx| Ok(vec![emit(cx.b, &IDENTITY, &[cx.x(0)])?])),
};

/// What is outside, once all of it is: its first operand is what left and is needed here no longer.
pub static RELEASE: OpDef = OpDef {
    name: "Release",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("value"), Slot::req("outside")],
    outs: &[Slot::req("outside")],
    effect: Effect::Pure,
    infer: |cx| match cx.ty(0)? == cx.ty(1)? {
        true => same(cx),
        false => Err(cx
            .fail("type", "what is outside is not of the type of what left")
            .expected(cx.ty(0)?.to_string())
            .found(cx.ty(1)?.to_string())),
    },
    fold: no_fold,
    grad: Grad::Rule(|cx| {
        cx.give(1, cx.dy0());
        // No element of the result follows what left.
        if cx.wants(0) {
            let (value, dtype) = (cx.x(0), cx.ty(cx.x(0)).dtype);
            let dims = cx.b.shape(value)?;
            let zero = cx.b.scalar(dtype, 0.0);
            let zeros = emit(cx.b, &EXPAND, &[zero, dims])?;
            cx.give(0, zeros);
        }
        Ok(())
    }),
    cost: free,
    memory: |cx: &MemoryCx| Footprint {
        outs: match cx.ins.get(1) {
            Some(Some(outside)) => vec![Place::View {
                of: 1,
                strides: outside.strides.clone(),
            }],
            _ => Vec::new(),
        },
        temp_bytes: 0,
        in_place_operands: Vec::new(),
    },
    body: Body::Function(|cx| Ok(vec![emit(cx.b, &IDENTITY, &[cx.x(1)])?])),
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
