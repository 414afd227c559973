//! `FusedMatMul` (com.microsoft): a scaled product of perhaps transposed matrices.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, ValueId};
use ckpt_passes::ops::matmul::MATMUL;

/// alpha·(A or Aᵀ)·(B or Bᵀ), the transposes of the last two axes.
pub fn fused(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (a, b) = (call.need(0, "A")?, call.need(1, "B")?);
    call.refuse_attribute("transBatchA")?;
    call.refuse_attribute("transBatchB")?;
    let a = turned(call, a, "transA")?;
    let b = turned(call, b, "transB")?;
    let alpha = call.float("alpha", 1.0)?;
    let mut y = call.b.emit(&MATMUL, &[a, b], Attrs::new())?;
    if alpha != 1.0 {
        y = call.scaled(y, f64::from(alpha))?;
    }
    Ok(Some(vec![Out::Value(y)]))
}

/// `v` with its last two axes swapped where the attribute says so.
fn turned(call: &mut Call, v: ValueId, attribute: &str) -> Result<ValueId> {
    if call.int(attribute, 0)? == 0 {
        return Ok(v);
    }
    let rank = call.b.rank(v) as i64;
    if rank < 2 {
        return Err(call.unsupported(format!("`{attribute}` of a vector")));
    }
    let mut perm: Vec<i64> = (0..rank).collect();
    perm.swap(rank as usize - 1, rank as usize - 2);
    call.transpose(v, &perm)
}
