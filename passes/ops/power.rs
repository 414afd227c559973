//! `Pow` (ONNX Pow-15): the base decides the element type of the result, the exponent may have another.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Footprint, Grad, GradCx, MemoryCx, OpClass, OpDef, fresh};
use ckpt_ir::{Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&POW];

/// ONNX `Pow`.
pub static POW: OpDef = OpDef {
    aten: &["aten.pow"],
    ins: slots!["X", "Y"],
    outs: slots!["Z"],
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
    ..standard("Pow", onnx(7, 15), OpClass::Power, BatchAxes::Pointwise)
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
    fresh(cx).with_temp(temp_bytes).in_place_operands(cx, &[0])
}

/// y = xᵉ: dx = dy·e·xᵉ⁻¹ (0 where e = 0, also at x = 0), de = dy·y·log x (0 where x = 0 and e ≥ 0).
fn grad_pow(cx: &mut GradCx) -> Result<()> {
    let (x, e, dy) = (cx.operand(0), cx.operand(1), cx.cotangent());
    if cx.wants(0) {
        let frozen = match cx.wants(1) {
            true => None,
            false => cx.b.known_scalar(e.0),
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
        let slope = cx.bind(cx.result(0) * unary_op(LOG, x))?;
        let zero = cx.number(x, 0.0);
        let at_zero = cx.bind(binary_op(EQUAL, x, zero))?;
        let flat = binary_op(AND, at_zero, binary_op(GREATER_OR_EQUAL, e, 0.0));
        let slope = cx.bind(select(flat, zero, slope))?;
        let exponent_type = cx.ty(e.0).dtype;
        cx.give_summed(1, cast(dy * slope, exponent_type))?;
    }
    Ok(())
}

/// The gradient of the base for an exponent that is the same number `k` everywhere; squares and cubes are products.
fn grad_of_known_power(cx: &mut GradCx, x: Term, e: Term, k: f64) -> Result<()> {
    let (dtype, dy) = (cx.ty(x.0).dtype, cx.cotangent());
    if k == 0.0 {
        let zero = cx.b.filled_like(x.0, 0.0)?;
        cx.give(0, zero);
        return Ok(());
    }
    if k == 1.0 {
        return cx.give_summed(0, dy);
    }
    let power = if k == 2.0 {
        x
    } else if k == 3.0 {
        cx.bind(x * x)?
    } else {
        let exponent_type = cx.ty(e.0).dtype;
        let held_in = match exponent_type.is_float() {
            true => exponent_type,
            false => dtype,
        };
        let less_one = cx.b.scalar(held_in, k - 1.0);
        cx.bind(binary_op(&POW, x, less_one))?
    };
    let factor = cx.b.scalar(dtype, k);
    let slope = cx.bind(power * Term(factor))?;
    cx.give_summed(0, dy * slope)
}

fn grad_of_base(cx: &mut GradCx, x: Term, e: Term) -> Result<Term> {
    let dtype = cx.ty(x.0).dtype;
    let float_e = match cx.ty(e.0).dtype.is_float() {
        true => e,
        false => cx.bind(cast(e, dtype))?,
    };
    let [one, zero_e] = [1.0, 0.0].map(|n| cx.number(float_e, n));
    let power = cx.bind(binary_op(&POW, x, float_e - one))?;
    let slope = cx.bind(power * cast(float_e, dtype))?;
    let dx = cx.bind(cx.cotangent() * slope)?;
    let constant = binary_op(EQUAL, float_e, zero_e);
    cx.bind(select(constant, 0.0, dx))
}
