//! Integers as bits.

use super::arith::{binary, unary};
use super::context::*;
use ckpt_passes::ops::bits::*;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&BITWISE_AND, |cx| {
        binary(cx, "aten::bitwise_and.Tensor_out", &[])
    }),
    (&BITWISE_OR, |cx| {
        binary(cx, "aten::bitwise_or.Tensor_out", &[])
    }),
    (&BITWISE_XOR, |cx| {
        binary(cx, "aten::bitwise_xor.Tensor_out", &[])
    }),
    (&BITWISE_NOT, |cx| unary(cx, "aten::bitwise_not.out", &[])),
    (&BIT_SHIFT, shift),
];

/// The operand is unsigned, so that zeros come in from the top.
fn shift(cx: &KernelCx) -> Result<Vec<Tensor>> {
    match cx.attrs.str("direction") {
        "LEFT" => binary(cx, "aten::bitwise_left_shift.Tensor_out", &[]),
        _ => binary(cx, "aten::bitwise_right_shift.Tensor_out", &[]),
    }
}
