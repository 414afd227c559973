//! The one row for every op we do not know.
//!
//! Its attributes carry domain, type and the raw node; its results are typed from the file. It travels through, is
//! never copied and has no gradient.

use super::rule::*;
use ckpt_ir::op::{Body, Domain, Effect, Grad, OpDef, Slot};
/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&OPAQUE];

/// ONNX `Opaque`.
pub static OPAQUE: OpDef = OpDef {
    ins: &[Slot::opt("inputs"), Slot::var("more")],
    outs: &[Slot::var("outputs")],
    effect: Effect::Stateful,
    infer: |cx| Err(cx.fail("op", "an unknown op has the types the file gives it")),
    grad: Grad::Missing("ckpt-opt does not know this op"),
    body: Body::None("written back as it was read"),
    ..mixed("Opaque", Domain::Opaque)
};
