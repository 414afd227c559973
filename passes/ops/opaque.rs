//! The one row for every op we do not know.
//!
//! Its attributes carry domain, type and the raw node; its results are typed from the file. It travels through, is
//! never copied and has no gradient.

use crate::ir::op::{Body, Domain, Effect, Grad, OpDef, Slot, fresh, moves, no_fold};

pub const ROWS: &[&OpDef] = &[&OPAQUE];

pub static OPAQUE: OpDef = OpDef {
    name: "Opaque",
    domain: Domain::Opaque,
    imports: &[],
    attrs: &[],
    ins: &[Slot::opt("inputs"), Slot::var("more")],
    outs: &[Slot::var("outputs")],
    effect: Effect::Stateful,
    infer: |cx| Err(cx.fail("op", "an unknown op has the types the file gives it")),
    fold: no_fold,
    grad: Grad::Missing("ckpt-opt does not know this op"),
    cost: moves,
    memory: fresh,
    body: Body::None("written back as it was read"),
};
