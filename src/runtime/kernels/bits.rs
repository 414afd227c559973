//! Integers as bits.

use super::arith::{binary, unary};
use super::context::*;
use ckpt_passes::ops::bits::*;

kernels! {
    BITWISE_AND => binary("aten::bitwise_and.Tensor_out", &[]);
    BITWISE_OR => binary("aten::bitwise_or.Tensor_out", &[]);
    BITWISE_XOR => binary("aten::bitwise_xor.Tensor_out", &[]);
    BITWISE_NOT => unary("aten::bitwise_not.out", &[]);
    BIT_SHIFT => shift;
}

/// Operands are unsigned, so a right shift fills with zeros.
fn shift(cx: &KernelCx) -> Result<Vec<Tensor>> {
    match cx.attrs.str("direction") {
        "LEFT" => binary(cx, "aten::bitwise_left_shift.Tensor_out", &[]),
        _ => binary(cx, "aten::bitwise_right_shift.Tensor_out", &[]),
    }
}
