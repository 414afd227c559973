//! Moving values out of the device's memory and back: where they wait while nothing reads them.
//!
//! Both ops are the identity in values, so any runtime can run a file that has them; only ours moves anything. What is
//! moved is the storage, whole and row-major, so that what comes back has the bits, strides and alignment of what left.
//!
//! A transfer may run beside what follows it. When memory is free must not depend on how fast that is: `Release` reads
//! what left, so its storage lives until there, and waits until it has arrived outside. What comes back has its storage from
//! `Fetch` on; whatever reads it first waits for it, and until then what it comes from stays outside.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Footprint, Grad, InferCx, MemoryCx, OpClass, OpDef, Place, free};
use ckpt_ir::{AttrSpec, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&OFFLOAD, &RELEASE, &FETCH];

/// Where the bytes wait: the host's memory, or a file. A run whose device is the CPU uses a file for both.
pub const TO: &str = "to";
/// Offloads to host memory.
pub const TO_HOST: &str = "host";
/// Offloads to a file.
pub const TO_DISK: &str = "disk";

/// A copy of its operand outside the device's memory.
pub static OFFLOAD: OpDef = OpDef {
    attrs: &[AttrSpec::str(TO, TO_HOST)],
    ins: slots!["value"],
    outs: slots!["outside"],
    infer: |cx| match cx.attrs.str(TO) {
        TO_HOST | TO_DISK => same(cx),
        other => Err(cx
            .fail("attr", format!("values cannot be moved to `{other}`"))
            .expected(format!("{TO_HOST} or {TO_DISK}"))),
    },
    grad: Grad::First(|cx| Ok(cx.dy0())),
    memory: |cx: &MemoryCx| Footprint::new(vec![Place::Outside]).with_temp(strided_bytes(cx, &[0])),
    ..ours("Offload", OpClass::Transfer, BatchAxes::Mixed, |cx| {
        Ok(vec![cx.b.op(IDENTITY, &[cx.x(0)])?])
    })
};

/// What is outside, once all of it is: its first operand is what left and is needed here no longer.
pub static RELEASE: OpDef = OpDef {
    ins: slots!["value", "outside"],
    outs: slots!["outside"],
    infer: |cx| match cx.ty(0)? == cx.ty(1)? {
        true => same(cx),
        false => Err(cx
            .fail("type", "what is outside is not of the type of what left")
            .expected(cx.ty(0)?.to_string())
            .found(cx.ty(1)?.to_string())),
    },
    grad: Grad::Rule(|cx| {
        cx.give(1, cx.dy0());
        // No element of the result follows what left.
        if cx.wants(0) {
            let (value, dtype) = (cx.x(0), cx.ty(cx.x(0)).dtype);
            let dims = cx.b.shape(value)?;
            let zero = cx.b.scalar(dtype, 0.0);
            let zeros = cx.b.expand(zero, dims)?;
            cx.give(0, zeros);
        }
        Ok(())
    }),
    cost: free,
    memory: |cx: &MemoryCx| {
        Footprint::new(match cx.ins.get(1) {
            Some(Some(outside)) => vec![Place::View {
                of: 1,
                strides: outside.strides.clone(),
            }],
            _ => Vec::new(),
        })
    },
    ..ours("Release", OpClass::Transfer, BatchAxes::Mixed, |cx| {
        Ok(vec![cx.b.op(IDENTITY, &[cx.x(1)])?])
    })
};

/// What was moved out, in the device's memory again.
pub static FETCH: OpDef = OpDef {
    ins: slots!["outside"],
    outs: slots!["value"],
    grad: Grad::First(|cx| Ok(cx.dy0())),
    ..ours("Fetch", OpClass::Transfer, BatchAxes::Mixed, |cx| {
        Ok(vec![cx.b.op(IDENTITY, &[cx.x(0)])?])
    })
};

fn same(cx: &InferCx) -> Result<Vec<Ty>> {
    Ok(vec![cx.ty(0)?.clone()])
}
