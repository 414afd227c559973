//! Integers as bits (ONNX operator specifications of those names).
//!
//! Nothing is folded: exporters do not compute shapes with bits.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{InferCx, OpDef};
use ckpt_ir::{AttrKind, AttrSpec, DType, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &BITWISE_AND,
    &BITWISE_OR,
    &BITWISE_XOR,
    &BITWISE_NOT,
    &BIT_SHIFT,
];

const WHY_ZERO: &str = "bits are of integers";

const fn bits(name: &'static str, infer: InferFn) -> OpDef {
    piecewise_constant(name, onnx(18, 18), &[], WHY_ZERO, infer)
}

fn two_integers(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_int, "an integer type")?;
    binary_number(cx)
}

/// Bits set in both.
pub static BITWISE_AND: OpDef = bits("BitwiseAnd", two_integers);

/// Bits set in either.
pub static BITWISE_OR: OpDef = bits("BitwiseOr", two_integers);

/// Bits set in one of the two.
pub static BITWISE_XOR: OpDef = bits("BitwiseXor", two_integers);

/// Every bit flipped.
pub static BITWISE_NOT: OpDef = OpDef {
    ins: X,
    outs: Y,
    ..bits("BitwiseNot", |cx| {
        cx.want_dtype(0, DType::is_int, "an integer type")?;
        unary_number(cx)
    })
};

/// The bits of the first operand shifted up (`LEFT`) or down (`RIGHT`) by the second; zeros are shifted in.
pub static BIT_SHIFT: OpDef = OpDef {
    domain: onnx(11, 11),
    attrs: &[AttrSpec::required("direction", AttrKind::Str)],
    ins: slots!["X", "Y"],
    outs: slots!["Z"],
    ..bits("BitShift", |cx| {
        cx.want_dtype(0, is_unsigned, "an unsigned integer type")?;
        match cx.attrs.str("direction") {
            "LEFT" | "RIGHT" => binary_number(cx),
            other => Err(cx
                .fail("attribute", "unknown value of `direction`")
                .expected("LEFT or RIGHT")
                .found(other)),
        }
    })
};

fn is_unsigned(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::U16 | DType::U32 | DType::U64)
}
