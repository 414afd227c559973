//! `Max`, `Min`, `Clip`: selection by size. Where operands tie, `Max` and `Min` share the gradient evenly.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Grad, GradCx, Indices, InferCx, OpClass, OpDef, OpRef, Slot, fresh};
use ckpt_ir::{Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&MAX, &MIN, &CLIP];

const fn selection(name: &'static str, first: i64, aten: &'static [&'static str]) -> OpDef {
    OpDef {
        aten,
        memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
        ..standard(
            name,
            onnx(first, 13),
            OpClass::Elementwise,
            BatchAxes::Pointwise,
        )
    }
}

/// The result of `op` on one operand after the other.
fn extreme(cx: &scalar::ScalarCx, op: scalar::Op) -> Option<Vec<scalar::Expr>> {
    let all = (0..cx.ins.len()).map(scalar::x);
    Some(vec![all.reduce(|best, x| scalar::apply(op, [best, x]))?])
}

/// ONNX `Max`.
pub static MAX: OpDef = OpDef {
    ins: &[Slot::var("data_0")],
    outs: slots!["max"],
    infer: variadic_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(x[1..].iter().fold(x[0].clone(), |best, d| best.larger(d)))
        })
    },
    scalar: |cx| extreme(cx, scalar::Op::Max),
    grad: Grad::Rule(|cx| grad_extreme(cx, (&LESS).into())),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    ..selection("Max", 8, &["aten.maximum"])
};

/// ONNX `Min`.
pub static MIN: OpDef = OpDef {
    ins: &[Slot::var("data_0")],
    outs: slots!["min"],
    infer: variadic_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(x[1..].iter().fold(x[0].clone(), |best, d| best.smaller(d)))
        })
    },
    scalar: |cx| extreme(cx, scalar::Op::Min),
    grad: Grad::Rule(|cx| grad_extreme(cx, (&GREATER).into())),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    ..selection("Min", 8, &["aten.minimum"])
};

/// `loses(a, b)`: whether `b` is chosen over `a`.
fn grad_extreme(cx: &mut GradCx, loses: OpRef) -> Result<()> {
    let (n, dy) = (cx.wants.len(), cx.cotangent());
    let zero = cx.number(dy, 0.0);
    if n == 1 {
        return cx.give_expr(0, dy);
    }
    if n == 2 {
        // As PyTorch: with a NaN on either side no comparison holds and both get the gradient.
        let tie = cx.bind(binary_op(EQUAL, cx.operand(0), cx.operand(1)))?;
        let shared = cx.bind(select(tie, dy * 0.5, dy))?;
        for i in 0..2 {
            if cx.wants(i) {
                let lost = binary_op(loses, cx.operand(i), cx.operand(1 - i));
                cx.give_summed(i, select(lost, zero, shared))?;
            }
        }
        return Ok(());
    }
    let dtype = cx.ty(dy.0).dtype;
    let mut chosen = Vec::with_capacity(n);
    let mut count: Option<Term> = None;
    for i in 0..n {
        let mask = cx.bind(binary_op(EQUAL, cx.operand(i), cx.result(0)))?;
        let one = cx.bind(cast(mask, dtype))?;
        count = Some(match count {
            None => one,
            Some(sum) => cx.bind(sum + one)?,
        });
        chosen.push(mask);
    }
    let Some(count) = count else { return Ok(()) };
    let share = cx.bind(dy / count)?;
    for (i, mask) in chosen.into_iter().enumerate() {
        if cx.wants(i) {
            cx.give_summed(i, select(mask, share, zero))?;
        }
    }
    Ok(())
}

/// `min(max(x, lo), hi)`: where `lo > hi`, every element is `hi`.
pub static CLIP: OpDef = OpDef {
    ins: slots!["input"; "min", "max"],
    outs: OUTPUT,
    indices: Indices::PassedOn,
    infer: infer_clip,
    fold: |cx, _| {
        let bound = |slot| match cx.opt_ty(slot) {
            None => Some(None),
            Some(_) => cx.ints(slot).map(|d| d.first().cloned()),
        };
        let (lo, hi) = (bound(1)?, bound(2)?);
        let clip = |x: &Dim| {
            let x = lo.as_ref().map_or(x.clone(), |lo| x.larger(lo));
            hi.as_ref().map_or(x.clone(), |hi| x.smaller(hi))
        };
        Some(vec![cx.ints(0)?.iter().map(clip).collect()])
    },
    grad: Grad::Rule(grad_clip),
    cost: |cx| cx.elementwise(2),
    ..selection("Clip", 11, &["aten.clamp"])
};

fn infer_clip(cx: &InferCx) -> Result<Vec<Ty>> {
    let dtype = cx.want_dtype(0, is_number, "a number type")?;
    for slot in 1..3 {
        let Some(bound) = cx.opt_ty(slot) else {
            continue;
        };
        if bound.dtype != dtype || bound.rank() > 1 || !bound.elements().is_one() {
            return Err(cx
                .fail("type", "a bound is not one element of the operand's type")
                .expected(format!("{dtype}[]"))
                .found(bound.to_string()));
        }
    }
    Ok(vec![cx.ty(0)?.clone()])
}

/// The gradient passes where lo ≤ x ≤ hi; a bound gets it where the bound is the result.
fn grad_clip(cx: &mut GradCx) -> Result<()> {
    let (x, dy) = (cx.operand(0), cx.cotangent());
    let zero = cx.number(x, 0.0);
    let (lo, hi) = (cx.opt_x(1).map(Term), cx.opt_x(2).map(Term));
    if cx.wants(0) {
        let mut d = dy;
        for (bound, inside) in [(lo, &GREATER_OR_EQUAL), (hi, &LESS_OR_EQUAL)] {
            if let Some(bound) = bound {
                d = cx.bind(select(binary_op(inside, x, bound), d, zero))?;
            }
        }
        cx.give_summed(0, d)?;
    }
    if let Some(lo) = lo
        && cx.wants(1)
    {
        let mut chosen = binary_op(LESS, x, lo);
        if let Some(hi) = hi {
            chosen = binary_op(AND, chosen, binary_op(LESS, lo, hi));
        }
        cx.give_summed(1, select(chosen, dy, zero))?;
    }
    if let Some(hi) = hi
        && cx.wants(2)
    {
        let mut chosen = binary_op(GREATER, x, hi);
        if let Some(lo) = lo {
            chosen = binary_op(OR, chosen, binary_op(LESS, hi, lo));
        }
        cx.give_summed(2, select(chosen, dy, zero))?;
    }
    Ok(())
}
