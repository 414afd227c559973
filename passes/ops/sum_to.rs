//! `SumToShape`, the adjoint of broadcasting: an op of ours, with a body whose ranks are all known.

use super::names::*;
use super::reduce::{per_input, reduce_axes, sum_kept, wide_sum_bytes};
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Grad, InferCx, OpClass, OpDef, fresh};
use ckpt_ir::{DType, Dim, Emit, Same, Tensor, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SUM_TO_SHAPE];

/// `SumToShape(x, shape)`: `x` summed over the axes along which a tensor of `shape` was broadcast to the shape of `x`.
pub static SUM_TO_SHAPE: OpDef = OpDef {
    ins: slots!["x", "shape"],
    outs: SMALL_Y,
    infer: infer_sum_to,
    grad: Grad::First(|cx| {
        let shape = cx.b.shape(cx.x(0))?;
        cx.b.op(EXPAND, &[cx.dy0(), shape])
    }),
    cost: per_input,
    memory: |cx| {
        let Some(x) = &cx.ins[0] else {
            return fresh(cx);
        };
        let target = &cx.outs[0].dims;
        let lead = x.dims.len().saturating_sub(target.len());
        let axes: Vec<usize> = (0..x.dims.len())
            .filter(|i| *i < lead || (target[i - lead] == 1 && x.dims[*i] != 1))
            .collect();
        fresh(cx).with_temp(wide_sum_bytes(cx.device, x, &axes, cx.outs[0].elements()))
    },
    ..ours(
        "SumToShape",
        OpClass::Other,
        BatchAxes::SummedToShape,
        |cx| {
            let (x, shape) = (cx.x(0), cx.x(1));
            let dims = cx.outs[0].dims.clone();
            Ok(vec![sum_down(cx.b, x, &dims, |_| Ok(shape))?])
        },
    )
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

/// `x` summed down to a shape it was broadcast from, in standard ops; `shape` makes that shape as a value if needed.
///
/// Leading axes and those that are 1 in the target for certain are summed. An axis of size s whose target t could be
/// s or 1 is split into (s/t, t), of which the first part is summed: so the axes are constants and every rank is
/// known, whatever the sizes turn out to be.
pub fn sum_down(
    b: &mut dyn Emit,
    x: ValueId,
    target: &[Dim],
    shape: impl FnOnce(&mut dyn Emit) -> Result<ValueId>,
) -> Result<ValueId> {
    let from = b.ty(x).dims.clone();
    let lead = from.len() - target.len();
    let leading: Vec<usize> = (0..lead).collect();
    let x = reduce_axes(b, REDUCE_SUM, x, &leading, false)?;
    let from = &from[lead..];
    let mut summed = Vec::new();
    let mut open = false;
    for (i, (s, t)) in from.iter().zip(target).enumerate() {
        if s.is_one() || s.same(t) == Same::Yes {
            continue;
        }
        match t.same(&Dim::ONE) {
            Same::Yes => summed.push(i),
            Same::No => {}
            Same::Unknown => open = true,
        }
    }
    if !open {
        return sum_kept(b, x, &summed);
    }
    let shape = shape(b)?;
    let rank = target.len();
    let sizes = b.shape(x)?;
    let one = b.int(1);
    // 1 also where the target is 0, which only an operand of size 0 has.
    let at_least_one = b.op(MAX, &[shape, one])?;
    let groups = b.div(sizes, at_least_one)?;
    let groups = b.unsqueeze(groups, &[1])?;
    let kept = b.unsqueeze(shape, &[1])?;
    let first = Tensor::new(DType::Bool, [2], vec![1u8, 0]);
    let first = b.constant("const.first_of_two", first);
    let pairs = b.op(WHERE, &[first, groups, kept])?;
    let pairs = b.reshape(pairs, &[2 * rank as i64])?;
    let x = b.reshape_to(x, pairs)?;
    let group_axes: Vec<usize> = (0..rank).map(|i| 2 * i).collect();
    reduce_axes(b, REDUCE_SUM, x, &group_axes, false)
}
