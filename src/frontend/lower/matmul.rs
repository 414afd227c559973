//! `FusedMatMul` (com.microsoft): a scaled product of matrices that may be transposed.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::ValueId;
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::matmul::MATMUL;

/// alpha·(A or Aᵀ)·(B or Bᵀ); the last two axes are transposed.
pub fn fused(call: &mut Call) -> Lowered {
    let [a, b] = call.operands(["A", "B"])?;
    call.refuse_attr("transBatchA")?;
    call.refuse_attr("transBatchB")?;
    let a = transposed(call, a, "transA")?;
    let b = transposed(call, b, "transB")?;
    let alpha = call.attr_float("alpha", 1.0)?;
    let y = call.op(&MATMUL, &[a, b])?;
    one(match alpha {
        1.0 => y,
        alpha => call.scaled(y, f64::from(alpha))?,
    })
}

/// Swaps the last two axes of `v` where the attribute asks for it.
fn transposed(call: &mut Call, v: ValueId, attribute: &str) -> Result<ValueId> {
    let rank = call.rank(v);
    match call.attr_flag(attribute)? {
        false => Ok(v),
        true if rank >= 2 => call.swap_last(v, rank - 2),
        true => Err(call.unsupported(format!("`{attribute}` of a vector"))),
    }
}
