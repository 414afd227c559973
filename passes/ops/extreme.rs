//! `Max`, `Min`, `Clip`: selection by size. Where operands tie, `Max` and `Min` share the gradient evenly.

use super::logic::{AND, EQUAL, GREATER, GREATER_OR_EQUAL, LESS, LESS_OR_EQUAL, OR};
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{Body, Domain, Effect, Grad, GradCx, Import, InferCx, OpDef, Slot, fresh};
use crate::ir::{Dim, Ty};

pub const ROWS: &[&OpDef] = &[&MAX, &MIN, &CLIP];

pub static MAX: OpDef = OpDef {
    name: "Max",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Max", 8), Import::Aten("aten.maximum")],
    attrs: &[],
    ins: &[Slot::var("data_0")],
    outs: &[Slot::req("max")],
    effect: Effect::Pure,
    infer: variadic_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(x[1..].iter().fold(x[0].clone(), |best, d| best.larger(d)))
        })
    },
    grad: Grad::Rule(|cx| grad_extreme(cx, &LESS)),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Standard,
};

pub static MIN: OpDef = OpDef {
    name: "Min",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Min", 8), Import::Aten("aten.minimum")],
    attrs: &[],
    ins: &[Slot::var("data_0")],
    outs: &[Slot::req("min")],
    effect: Effect::Pure,
    infer: variadic_number,
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            Some(x[1..].iter().fold(x[0].clone(), |best, d| best.smaller(d)))
        })
    },
    grad: Grad::Rule(|cx| grad_extreme(cx, &GREATER)),
    cost: |cx| cx.elementwise(cx.ins.len() as u64),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Standard,
};

/// `loses(a, b)`: whether `b` is chosen over `a`.
fn grad_extreme(cx: &mut GradCx, loses: &'static OpDef) -> Result<()> {
    let (n, dy) = (cx.wants.len(), cx.dy0());
    let dtype = cx.ty(dy).dtype;
    let zero = cx.b.scalar(dtype, 0.0);
    if n == 1 {
        cx.give(0, dy);
        return Ok(());
    }
    if n == 2 {
        // As PyTorch: with a NaN on either side no comparison holds and both get the gradient.
        let tie = emit(cx.b, &EQUAL, &[cx.x(0), cx.x(1)])?;
        let half = cx.b.scalar(dtype, 0.5);
        let half = cx.b.mul(dy, half)?;
        let shared = choose(cx.b, tie, half, dy)?;
        for i in 0..2 {
            if cx.wants(i) {
                let lost = emit(cx.b, loses, &[cx.x(i), cx.x(1 - i)])?;
                let d = choose(cx.b, lost, zero, shared)?;
                cx.give_summed(i, d)?;
            }
        }
        return Ok(());
    }
    let mut chosen = Vec::with_capacity(n);
    let mut count = None;
    for i in 0..n {
        let mask = emit(cx.b, &EQUAL, &[cx.x(i), cx.y(0)])?;
        let one = cx.b.cast(mask, dtype)?;
        count = Some(match count {
            None => one,
            Some(sum) => cx.b.add(sum, one)?,
        });
        chosen.push(mask);
    }
    let Some(count) = count else { return Ok(()) };
    let share = cx.b.div(dy, count)?;
    for (i, mask) in chosen.into_iter().enumerate() {
        if cx.wants(i) {
            let d = choose(cx.b, mask, share, zero)?;
            cx.give_summed(i, d)?;
        }
    }
    Ok(())
}

/// `min(max(x, lo), hi)`: where `lo > hi`, every element is `hi`.
pub static CLIP: OpDef = OpDef {
    name: "Clip",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Clip", 11)],
    attrs: &[],
    ins: &[Slot::req("input"), Slot::opt("min"), Slot::opt("max")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
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
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    body: Body::Standard,
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
    let (x, dy) = (cx.x(0), cx.dy0());
    let dtype = cx.ty(x).dtype;
    let zero = cx.b.scalar(dtype, 0.0);
    let (lo, hi) = (cx.opt_x(1), cx.opt_x(2));
    if cx.wants(0) {
        let mut d = dy;
        if let Some(lo) = lo {
            let inside = emit(cx.b, &GREATER_OR_EQUAL, &[x, lo])?;
            d = choose(cx.b, inside, d, zero)?;
        }
        if let Some(hi) = hi {
            let inside = emit(cx.b, &LESS_OR_EQUAL, &[x, hi])?;
            d = choose(cx.b, inside, d, zero)?;
        }
        cx.give_summed(0, d)?;
    }
    if let Some(lo) = lo
        && cx.wants(1)
    {
        let mut chosen = emit(cx.b, &LESS, &[x, lo])?;
        if let Some(hi) = hi {
            let apart = emit(cx.b, &LESS, &[lo, hi])?;
            chosen = emit(cx.b, &AND, &[chosen, apart])?;
        }
        let d = choose(cx.b, chosen, dy, zero)?;
        cx.give_summed(1, d)?;
    }
    if let Some(hi) = hi
        && cx.wants(2)
    {
        let mut chosen = emit(cx.b, &GREATER, &[x, hi])?;
        if let Some(lo) = lo {
            let crossed = emit(cx.b, &LESS, &[hi, lo])?;
            chosen = emit(cx.b, &OR, &[chosen, crossed])?;
        }
        let d = choose(cx.b, chosen, dy, zero)?;
        cx.give_summed(2, d)?;
    }
    Ok(())
}
