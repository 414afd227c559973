//! Integers as bits (ONNX operator specifications of those names).
//!
//! Nothing is folded: exporters do not compute shapes with bits.

use super::rules::*;
use crate::error::Result;
use crate::ir::op::{Body, Domain, Effect, Grad, Import, InferCx, OpDef, Slot, fresh, no_fold};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Ty};

pub const ROWS: &[&OpDef] = &[
    &BITWISE_AND,
    &BITWISE_OR,
    &BITWISE_XOR,
    &BITWISE_NOT,
    &BIT_SHIFT,
];

const WHY_ZERO: &str = "bits are of integers";

fn two_integers(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_int, "an integer type")?;
    binary_number(cx)
}

/// Bits set in both.
pub static BITWISE_AND: OpDef = OpDef {
    name: "BitwiseAnd",
    domain: Domain::Onnx { since: 18 },
    imports: &[Import::Onnx("BitwiseAnd", 18)],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_integers,
    fold: no_fold,
    grad: Grad::Zero(WHY_ZERO),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// Bits set in either.
pub static BITWISE_OR: OpDef = OpDef {
    name: "BitwiseOr",
    domain: Domain::Onnx { since: 18 },
    imports: &[Import::Onnx("BitwiseOr", 18)],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_integers,
    fold: no_fold,
    grad: Grad::Zero(WHY_ZERO),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// Bits set in one of the two.
pub static BITWISE_XOR: OpDef = OpDef {
    name: "BitwiseXor",
    domain: Domain::Onnx { since: 18 },
    imports: &[Import::Onnx("BitwiseXor", 18)],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("C")],
    effect: Effect::Pure,
    infer: two_integers,
    fold: no_fold,
    grad: Grad::Zero(WHY_ZERO),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// Every bit turned.
pub static BITWISE_NOT: OpDef = OpDef {
    name: "BitwiseNot",
    domain: Domain::Onnx { since: 18 },
    imports: &[Import::Onnx("BitwiseNot", 18)],
    attrs: &[],
    ins: &[Slot::req("X")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: |cx| {
        cx.want_dtype(0, DType::is_int, "an integer type")?;
        unary_number(cx)
    },
    fold: no_fold,
    grad: Grad::Zero(WHY_ZERO),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

/// The bits of the first operand moved up (`LEFT`) or down (`RIGHT`) by the second, zeros coming in.
pub static BIT_SHIFT: OpDef = OpDef {
    name: "BitShift",
    domain: Domain::Onnx { since: 11 },
    imports: &[Import::Onnx("BitShift", 11)],
    attrs: &[AttrSpec {
        name: "direction",
        kind: AttrKind::Str,
        default: AttrDefault::Required,
    }],
    ins: &[Slot::req("X"), Slot::req("Y")],
    outs: &[Slot::req("Z")],
    effect: Effect::Pure,
    infer: |cx| {
        cx.want_dtype(0, is_unsigned, "an unsigned integer type")?;
        match cx.attrs.str("direction") {
            "LEFT" | "RIGHT" => binary_number(cx),
            other => Err(cx
                .fail("attribute", "unknown value of `direction`")
                .expected("LEFT or RIGHT")
                .found(other)),
        }
    },
    fold: no_fold,
    grad: Grad::Zero(WHY_ZERO),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};

fn is_unsigned(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64)
}
