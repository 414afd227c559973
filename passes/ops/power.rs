//! `Pow` (ONNX Pow-15): the base decides the element type of the result, the exponent may have another.

use super::logic::{AND, EQUAL, GREATER_OR_EQUAL};
use super::math::LOG;
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, Domain, Effect, Footprint, Grad, GradCx, Import, MemoryCx, OpDef, Slot, fresh,
};
use crate::ir::{Dim, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&POW];

pub static POW: OpDef = OpDef {
    name: "Pow",
    domain: Domain::Onnx { since: 15 },
    imports: &[Import::Onnx("Pow", 7), Import::Aten("aten.pow")],
    attrs: &[],
    ins: &[Slot::req("X"), Slot::req("Y")],
    outs: &[Slot::req("Z")],
    effect: Effect::Pure,
    infer: |cx| {
        let dtype = cx.want_dtype(0, is_number, "a number type")?;
        cx.want_dtype(1, is_number, "a number type")?;
        Ok(vec![Ty::new(dtype, broadcast_dims(cx, 0..2)?)])
    },
    fold: |cx, ty| {
        fold_elementwise(cx, ty, |x| {
            let exponent = x[1].as_const().filter(|e| (0..=8).contains(e))?;
            (0..exponent).try_fold(Dim::ONE, |product, _| exact(product.mul(x[0])))
        })
    },
    grad: Grad::Rule(grad_pow),
    cost: ten_flops,
    memory: pow_memory,
    body: Body::Standard,
};

/// `aten::pow` wants one element type. An exponent that fits the base's type is converted to it; else the base is
/// converted and the power taken in the exponent's type, in one buffer of the result's shape.
fn pow_memory(cx: &MemoryCx) -> Footprint {
    let (Some(base), Some(exponent)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    let (b, e) = (base.dtype, exponent.dtype);
    let fits = !e.is_float() || (b.is_float() && e.size_bytes() <= b.size_bytes());
    let temp_bytes = if b == e {
        0
    } else if fits {
        exponent.elements() * b.size_bytes()
    } else {
        cx.outs[0].elements() * e.size_bytes()
    };
    Footprint {
        temp_bytes,
        ..fresh(cx)
    }
    .in_place_operands(cx, &[0])
}

/// y = xᵉ: dx = dy·e·xᵉ⁻¹ (0 where e = 0, also at x = 0), de = dy·y·log x (0 where x = 0 and e ≥ 0).
fn grad_pow(cx: &mut GradCx) -> Result<()> {
    let (x, e, dy) = (cx.x(0), cx.x(1), cx.dy0());
    if cx.wants(0) {
        let frozen = if cx.wants(1) {
            None
        } else {
            known_scalar(cx.b, e)
        };
        match frozen {
            Some(k) => grad_of_known_power(cx, x, e, k)?,
            None => {
                let dx = grad_of_base(cx, x, e)?;
                cx.give_summed(0, dx)?;
            }
        }
    }
    if cx.wants(1) {
        let (xt, et) = (cx.ty(x).dtype, cx.ty(e).dtype);
        let log = emit(cx.b, &LOG, &[x])?;
        let slope = cx.b.mul(cx.y(0), log)?;
        let zero = cx.b.scalar(xt, 0.0);
        let at_zero = emit(cx.b, &EQUAL, &[x, zero])?;
        let e_zero = cx.b.scalar(et, 0.0);
        let not_negative = emit(cx.b, &GREATER_OR_EQUAL, &[e, e_zero])?;
        let flat = emit(cx.b, &AND, &[at_zero, not_negative])?;
        let slope = choose(cx.b, flat, zero, slope)?;
        let de = cx.b.mul(dy, slope)?;
        let de = cx.b.cast(de, et)?;
        cx.give_summed(1, de)?;
    }
    Ok(())
}

/// The gradient of the base for an exponent that is the same number `k` everywhere; squares and cubes are products.
fn grad_of_known_power(cx: &mut GradCx, x: ValueId, e: ValueId, k: f64) -> Result<()> {
    let (dtype, dy) = (cx.ty(x).dtype, cx.dy0());
    if k == 0.0 {
        let zero = cx.b.filled_like(x, 0.0)?;
        cx.give(0, zero);
        return Ok(());
    }
    if k == 1.0 {
        return cx.give_summed(0, dy);
    }
    let power = if k == 2.0 {
        x
    } else if k == 3.0 {
        cx.b.mul(x, x)?
    } else {
        let exponent_type = cx.ty(e).dtype;
        let held_in = if exponent_type.is_float() {
            exponent_type
        } else {
            dtype
        };
        let less_one = cx.b.scalar(held_in, k - 1.0);
        emit(cx.b, &POW, &[x, less_one])?
    };
    let factor = cx.b.scalar(dtype, k);
    let slope = cx.b.mul(power, factor)?;
    let dx = cx.b.mul(dy, slope)?;
    cx.give_summed(0, dx)
}

fn grad_of_base(cx: &mut GradCx, x: ValueId, e: ValueId) -> Result<ValueId> {
    let dtype = cx.ty(x).dtype;
    let float_e = if cx.ty(e).dtype.is_float() {
        e
    } else {
        cx.b.cast(e, dtype)?
    };
    let held_in = cx.ty(float_e).dtype;
    let (one, zero_e) = (cx.b.scalar(held_in, 1.0), cx.b.scalar(held_in, 0.0));
    let less_one = cx.b.sub(float_e, one)?;
    let power = emit(cx.b, &POW, &[x, less_one])?;
    let factor = cx.b.cast(float_e, dtype)?;
    let slope = cx.b.mul(power, factor)?;
    let dx = cx.b.mul(cx.dy0(), slope)?;
    let constant = emit(cx.b, &EQUAL, &[float_e, zero_e])?;
    let zero = cx.b.scalar(dtype, 0.0);
    choose(cx.b, constant, zero, dx)
}
