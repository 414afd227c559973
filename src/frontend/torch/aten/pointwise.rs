//! Arithmetic and functions of single elements, with PyTorch's promotion of element types.

use super::Value;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{DType, Dim, ValueId};
use ckpt_passes::ops::*;

pub const OPS: &[Op] = &[
    ("abs(self: t)", |c| unary(c, &arith::ABS)),
    ("acos(self: t)", |c| unary_float(c, &trig::ACOS)),
    ("acosh(self: t)", |c| unary_float(c, &trig::ACOSH)),
    ("add(self: ts, other: ts, alpha: s?)", |c| {
        scaled(c, &arith::ADD)
    }),
    ("addcdiv(self: t, tensor1: t, tensor2: t, value: s?)", |c| {
        added(c, &arith::DIV)
    }),
    ("addcmul(self: t, tensor1: t, tensor2: t, value: s?)", |c| {
        added(c, &arith::MUL)
    }),
    ("asin(self: t)", |c| unary_float(c, &trig::ASIN)),
    ("asinh(self: t)", |c| unary_float(c, &trig::ASINH)),
    ("atan(self: t)", |c| unary_float(c, &trig::ATAN)),
    ("atanh(self: t)", |c| unary_float(c, &trig::ATANH)),
    ("ceil(self: t)", |c| rounded(c, &arith::CEIL)),
    ("clamp(self: t, min: ts?, max: ts?)", clamp),
    ("clamp_max(self: t, max: ts)", clamp),
    ("clamp_min(self: t, min: ts)", clamp),
    ("clip(self: t, min: ts?, max: ts?)", clamp),
    ("cos(self: t)", |c| unary_float(c, &math::COS)),
    ("cosh(self: t)", |c| unary_float(c, &trig::COSH)),
    ("div(self: ts, other: ts, rounding_mode: S?)", divide),
    ("divide(self: ts, other: ts, rounding_mode: S?)", divide),
    ("erf(self: t)", |c| unary_float(c, &math::ERF)),
    ("erfc(self: t)", |c| one_minus(c, &math::ERF)),
    ("exp(self: t)", |c| unary_float(c, &math::EXP)),
    ("floor(self: t)", |c| rounded(c, &arith::FLOOR)),
    ("floor_divide(self: ts, other: ts)", |c| {
        whole_quotient(c, true)
    }),
    ("fmod(self: t, other: ts)", |c| remainder(c, 1)),
    ("lerp(self: t, end: t, weight: ts)", lerp),
    ("log(self: t)", |c| unary_float(c, &math::LOG)),
    ("log10(self: t)", |c| log_of_base(c, 10.0)),
    ("log2(self: t)", |c| log_of_base(c, 2.0)),
    ("maximum(self: t, other: t)", |c| binary(c, &extreme::MAX)),
    ("minimum(self: t, other: t)", |c| binary(c, &extreme::MIN)),
    ("mul(self: ts, other: ts)", |c| product(c)),
    ("multiply(self: ts, other: ts)", |c| product(c)),
    ("neg(self: t)", |c| unary(c, &arith::NEG)),
    ("negative(self: t)", |c| unary(c, &arith::NEG)),
    ("positive(self: t)", |c| {
        Ok(Value::Tensor(c.tensor("self")?))
    }),
    ("pow(self: ts, exponent: ts)", power),
    ("reciprocal(self: t)", |c| unary_float(c, &math::RECIPROCAL)),
    ("remainder(self: ts, other: ts)", |c| remainder(c, 0)),
    ("round(self: t)", |c| rounded(c, &arith::ROUND)),
    ("rsqrt(self: t)", rsqrt),
    ("rsub(self: t, other: ts, alpha: s?)", reversed_sub),
    ("sign(self: t)", |c| unary(c, &arith::SIGN)),
    ("sin(self: t)", |c| unary_float(c, &math::SIN)),
    ("sinh(self: t)", |c| unary_float(c, &trig::SINH)),
    ("sqrt(self: t)", |c| unary_float(c, &math::SQRT)),
    ("square(self: t)", square),
    ("sub(self: ts, other: ts, alpha: s?)", |c| {
        scaled(c, &arith::SUB)
    }),
    ("subtract(self: ts, other: ts, alpha: s?)", |c| {
        scaled(c, &arith::SUB)
    }),
    ("tan(self: t)", |c| unary_float(c, &trig::TAN)),
    ("tanh(self: t)", |c| unary_float(c, &activation::TANH)),
    ("true_divide(self: ts, other: ts)", divide),
    ("trunc(self: t)", truncate),
];

/// An argument that its signature requires.
pub(super) fn need(c: &Call, name: &str) -> Result<Value> {
    let given = c.get(name).cloned();
    given.ok_or_else(|| c.fail("op", format!("`{name}` is missing")))
}

/// `op(self)` in the operand's type.
pub(super) fn unary(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    let y = c.low.emit(op, &[x])?;
    c.made(y)
}

/// The operand in floating point.
pub(super) fn float_self(c: &mut Call) -> Result<ValueId> {
    let x = need(c, "self")?;
    let dtype = c.low.promoted_float(&[&x])?;
    c.low.operand(&x, dtype)
}

/// `op(self)`; integers are converted.
pub(super) fn unary_float(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = float_self(c)?;
    let y = c.low.emit(op, &[x])?;
    c.made(y)
}

/// `op(self)`, which changes nothing of an integer.
fn rounded(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.tensor("self")?;
    if !c.low.dtype(x).is_float() {
        let x = c.low.read(x)?;
        return c.made(x);
    }
    unary(c, op)
}

fn truncate(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let y = toward_zero(c, x)?;
    c.made(y)
}

/// Rounded toward zero.
fn toward_zero(c: &mut Call, x: ValueId) -> Result<ValueId> {
    if !c.low.b.ty(x).dtype.is_float() {
        return Ok(x);
    }
    let sign = c.low.emit(&arith::SIGN, &[x])?;
    let size = c.low.emit(&arith::ABS, &[x])?;
    let size = c.low.emit(&arith::FLOOR, &[size])?;
    c.low.b.mul(sign, size)
}

/// Both operands in their common type.
pub(super) fn both(c: &mut Call, a: &str, b: &str) -> Result<[ValueId; 2]> {
    let (a, b) = (need(c, a)?, need(c, b)?);
    let dtype = c.low.promoted(&[&a, &b])?;
    Ok([c.low.operand(&a, dtype)?, c.low.operand(&b, dtype)?])
}

fn binary(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let operands = both(c, "self", "other")?;
    let y = c.low.emit(op, &operands)?;
    c.made(y)
}

/// Whether a number is 1.
fn is_one(value: Option<&Value>) -> bool {
    match value {
        None => true,
        Some(Value::Int(n)) => n.is_one(),
        Some(Value::Float(x)) => *x == 1.0,
        Some(_) => false,
    }
}

/// `self op alpha·other`. Of truth values the sum is their disjunction.
fn scaled(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let [a, mut b] = both(c, "self", "other")?;
    let dtype = c.low.b.ty(a).dtype;
    if !is_one(c.get("alpha")) {
        let alpha = need(c, "alpha")?;
        let alpha = c.low.operand(&alpha, dtype)?;
        b = c.low.b.mul(b, alpha)?;
    }
    let op = match dtype {
        DType::Bool if op == &arith::ADD => &logic::OR,
        _ => op,
    };
    let y = c.low.emit(op, &[a, b])?;
    c.made(y)
}

fn reversed_sub(c: &mut Call) -> Result<Value> {
    let [mut a, b] = both(c, "self", "other")?;
    if !is_one(c.get("alpha")) {
        let alpha = need(c, "alpha")?;
        let alpha = c.low.operand(&alpha, c.low.b.ty(a).dtype)?;
        a = c.low.b.mul(a, alpha)?;
    }
    let y = c.low.b.sub(b, a)?;
    c.made(y)
}

/// Of truth values the product is their conjunction.
fn product(c: &mut Call) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let op = match c.low.b.ty(a).dtype {
        DType::Bool => &logic::AND,
        _ => &arith::MUL,
    };
    let y = c.low.emit(op, &[a, b])?;
    c.made(y)
}

/// `self + value·(tensor1 op tensor2)`.
fn added(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (x, a, b) = (need(c, "self")?, need(c, "tensor1")?, need(c, "tensor2")?);
    let dtype = c.low.promoted(&[&x, &a, &b])?;
    let (x, a, b) = (
        c.low.operand(&x, dtype)?,
        c.low.operand(&a, dtype)?,
        c.low.operand(&b, dtype)?,
    );
    let mut y = c.low.emit(op, &[a, b])?;
    if !is_one(c.get("value")) {
        let value = need(c, "value")?;
        let value = c.low.operand(&value, dtype)?;
        y = c.low.b.mul(y, value)?;
    }
    let y = c.low.b.add(x, y)?;
    c.made(y)
}

fn divide(c: &mut Call) -> Result<Value> {
    match c.str("rounding_mode", "")? {
        "" => {
            let (a, b) = (need(c, "self")?, need(c, "other")?);
            let dtype = c.low.promoted_float(&[&a, &b])?;
            let (a, b) = (c.low.operand(&a, dtype)?, c.low.operand(&b, dtype)?);
            let y = c.low.b.div(a, b)?;
            c.made(y)
        }
        "floor" => whole_quotient(c, true),
        "trunc" => whole_quotient(c, false),
        other => Err(c.unsupported(format!("`rounding_mode` {other}"))),
    }
}

/// The quotient rounded down, or toward zero.
fn whole_quotient(c: &mut Call, down: bool) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let dtype = c.low.b.ty(a).dtype;
    let y = if dtype.is_float() {
        let y = c.low.b.div(a, b)?;
        match down {
            true => c.low.emit(&arith::FLOOR, &[y])?,
            false => toward_zero(c, y)?,
        }
    } else {
        // Division of integers goes toward zero (ONNX Div); rounded down it is exact once the remainder is taken off,
        // which has the sign of the divisor.
        let known = [a, b].map(|v| c.low.b.contents.get(v).map(<[Dim]>::to_vec));
        let positive = |v: &Option<Vec<Dim>>, least: i64| {
            v.as_ref()
                .is_some_and(|v| v.iter().all(|d| d.bounds().0.is_some_and(|lo| lo >= least)))
        };
        match down && !(positive(&known[0], 0) && positive(&known[1], 1)) {
            true => {
                let rest = c.low.emit(&arith::MOD, &[a, b])?;
                let whole = c.low.b.sub(a, rest)?;
                c.low.b.div(whole, b)?
            }
            false => c.low.b.div(a, b)?,
        }
    };
    c.made(y)
}

/// With the sign of the divisor (`fmod` 0), or of the dividend.
fn remainder(c: &mut Call, fmod: i64) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    if fmod == 0 && c.low.b.ty(a).dtype.is_float() {
        // ONNX Mod takes floats only with the sign of the dividend.
        let q = c.low.b.div(a, b)?;
        let q = c.low.emit(&arith::FLOOR, &[q])?;
        let whole = c.low.b.mul(q, b)?;
        let y = c.low.b.sub(a, whole)?;
        return c.made(y);
    }
    let attrs = ckpt_passes::ir::Attrs::new().with("fmod", fmod);
    let y = c.low.b.emit(&arith::MOD, &[a, b], attrs)?;
    c.made(y)
}

fn power(c: &mut Call) -> Result<Value> {
    let exponent = need(c, "exponent")?;
    let base = need(c, "self")?;
    let dtype = c.low.promoted(&[&base, &exponent])?;
    let x = c.low.operand(&base, dtype)?;
    let number = match &exponent {
        Value::Float(p) => Some(*p),
        Value::Int(p) => p.as_const().map(|p| p as f64),
        _ => None,
    };
    let y = match number {
        Some(1.0) => x,
        Some(0.5) if dtype.is_float() => c.low.emit(&math::SQRT, &[x])?,
        // A whole exponent keeps its type: no float32 holds every one.
        _ => {
            let p = c.low.operand(&exponent, dtype)?;
            c.low.emit(&power::POW, &[x, p])?
        }
    };
    c.made(y)
}

fn square(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let y = c.low.b.mul(x, x)?;
    c.made(y)
}

/// 1/√x, as exporters write it.
fn rsqrt(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let root = c.low.emit(&math::SQRT, &[x])?;
    let y = c.low.emit(&math::RECIPROCAL, &[root])?;
    c.made(y)
}

fn one_minus(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = float_self(c)?;
    let y = c.low.emit(op, &[x])?;
    let one = c.low.b.scalar(c.low.b.ty(y).dtype, 1.0);
    let y = c.low.b.sub(one, y)?;
    c.made(y)
}

fn log_of_base(c: &mut Call, base: f64) -> Result<Value> {
    let x = float_self(c)?;
    let y = c.low.emit(&math::LOG, &[x])?;
    let factor = c.low.b.scalar(c.low.b.ty(y).dtype, 1.0 / base.ln());
    let y = c.low.b.mul(y, factor)?;
    c.made(y)
}

fn lerp(c: &mut Call) -> Result<Value> {
    let (a, b, w) = (need(c, "self")?, need(c, "end")?, need(c, "weight")?);
    let dtype = c.low.promoted(&[&a, &b])?;
    let (a, b, w) = (
        c.low.operand(&a, dtype)?,
        c.low.operand(&b, dtype)?,
        c.low.operand(&w, dtype)?,
    );
    let way = c.low.b.sub(b, a)?;
    let way = c.low.b.mul(way, w)?;
    let y = c.low.b.add(a, way)?;
    c.made(y)
}

fn clamp(c: &mut Call) -> Result<Value> {
    let bounds = [c.get("min").cloned(), c.get("max").cloned()];
    let x = need(c, "self")?;
    let mut operands = vec![&x];
    operands.extend(bounds.iter().flatten());
    let dtype = c.low.promoted(&operands)?;
    let x = c.low.operand(&x, dtype)?;
    let numbers = bounds
        .iter()
        .flatten()
        .all(|b| !matches!(b, Value::Tensor(_)));
    if numbers {
        let mut ins = vec![Some(x)];
        for bound in &bounds {
            ins.push(match bound {
                Some(value) => Some(c.low.operand(value, dtype)?),
                None => None,
            });
        }
        let attrs = ckpt_passes::ir::Attrs::new();
        let y = c.low.b.emit_n(&extreme::CLIP, ins, attrs, 1)?[0];
        return c.made(y);
    }
    let mut y = x;
    for (bound, op) in bounds.iter().zip([&extreme::MAX, &extreme::MIN]) {
        if let Some(bound) = bound {
            let bound = c.low.operand(bound, dtype)?;
            y = c.low.emit(op, &[y, bound])?;
        }
    }
    c.made(y)
}
