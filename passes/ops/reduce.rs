//! Reductions, and `SumToShape`, the adjoint of broadcasting.

use super::rules::one_flop;
use crate::error::Result;
use crate::ir::op::{Body, BodyCx, Domain, Effect, Grad, InferCx, OpDef, Slot, fresh, no_fold};
use crate::ir::{DType, Dim, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&SUM_TO_SHAPE];

/// `SumToShape(x, shape)`: `x` summed over the axes along which a tensor of `shape` was broadcast to the shape of `x`.
pub static SUM_TO_SHAPE: OpDef = OpDef {
    name: "SumToShape",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("x"), Slot::req("shape")],
    outs: &[Slot::req("y")],
    effect: Effect::Pure,
    infer: infer_sum_to,
    fold: no_fold,
    grad: Grad::Missing("gradients of gradients are not supported"),
    cost: one_flop,
    memory: fresh,
    body: Body::Function(sum_to_body),
};

fn infer_sum_to(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    if cx.ty(1)?.dtype != DType::I64 || cx.ty(1)?.rank() != 1 {
        return Err(cx
            .fail("type", "`shape` is not an int64 vector")
            .found(cx.ty(1)?.to_string()));
    }
    if let Some(dims) = cx.ints(1) {
        if dims.len() > x.rank() {
            return Err(cx.fail("shape", "the target has more axes than the operand"));
        }
        return Ok(vec![x.with_dims(dims.to_vec())]);
    }
    let rank = cx.ty(1)?.dims[0].as_const();
    let rank = rank.ok_or_else(|| cx.fail("shape", "the target's rank is not known"))?;
    Ok(vec![
        x.with_dims(
            (0..rank as usize)
                .map(|i| cx.fresh(0, i))
                .collect::<Vec<Dim>>(),
        ),
    ])
}

/// Pads the target shape with leading ones, sums every axis where it is 1, and drops the padding.
fn sum_to_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let _ = cx;
    todo!("written with the reduce family")
}
