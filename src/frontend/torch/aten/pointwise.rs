//! Ops of single elements: arithmetic, comparisons and functions, with PyTorch's promotion of element types.

use super::super::value::Value;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::{EmitExt, activation, arith, bits, extreme, logic, math, power, trig};
use std::f64::consts::PI;

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
    (
        "{bitwise_and,__and__,bitwise_or,__or__,bitwise_xor,__xor__}(self: ts, other: ts)",
        bitwise,
    ),
    ("bitwise_not(self: t)", bitwise_not),
    ("ceil(self: t)", |c| rounded(c, &arith::CEIL)),
    ("{clamp,clip}(self: t, min: ts?, max: ts?)", clamp),
    ("clamp_max(self: t, max: ts)", clamp),
    ("clamp_min(self: t, min: ts)", clamp),
    ("cos(self: t)", |c| unary_float(c, &math::COS)),
    ("cosh(self: t)", |c| unary_float(c, &trig::COSH)),
    (
        "{div,divide,true_divide}(self: ts, other: ts, rounding_mode: S?)",
        divide,
    ),
    (
        "{eq,ge,greater_equal,gt,greater,le,less_equal,lt,less}(self: ts, other: ts)",
        compared,
    ),
    ("erf(self: t)", |c| unary_float(c, &math::ERF)),
    ("erfc(self: t)", erfc),
    ("erfinv(self: t)", erfinv),
    ("exp(self: t)", |c| unary_float(c, &math::EXP)),
    ("expm1(self: t)", expm1),
    ("floor(self: t)", |c| rounded(c, &arith::FLOOR)),
    ("floor_divide(self: ts, other: ts)", |c| {
        whole_quotient(c, true)
    }),
    ("fmod(self: t, other: ts)", |c| remainder(c, 1)),
    ("isfinite(self: t)", isfinite),
    ("isinf(self: t)", |c| special(c, &logic::IS_INF)),
    ("isnan(self: t)", |c| special(c, &logic::IS_NAN)),
    ("lerp(self: t, end: t, weight: ts)", lerp),
    ("log(self: t)", |c| unary_float(c, &math::LOG)),
    ("log10(self: t)", |c| log_of_base(c, 10.0)),
    ("log1p(self: t)", log1p),
    ("log2(self: t)", |c| log_of_base(c, 2.0)),
    ("logical_{and,or,xor}(self: t, other: t)", logical),
    ("logical_not(self: t)", logical_not),
    ("masked_fill(self: t, mask: t, value: ts)", masked_fill),
    ("maximum(self: t, other: t)", |c| binary(c, &extreme::MAX)),
    ("minimum(self: t, other: t)", |c| binary(c, &extreme::MIN)),
    ("{mul,multiply}(self: ts, other: ts)", product),
    ("{ne,not_equal}(self: ts, other: ts)", not_equal),
    ("{neg,negative}(self: t)", |c| unary(c, &arith::NEG)),
    ("positive(self: t)", |c| Ok(c.given("self"))),
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
    ("{sub,subtract}(self: ts, other: ts, alpha: s?)", |c| {
        scaled(c, &arith::SUB)
    }),
    ("tan(self: t)", |c| unary_float(c, &trig::TAN)),
    ("tanh(self: t)", |c| unary_float(c, &activation::TANH)),
    ("trunc(self: t)", truncate),
    ("where(condition: t, self: ts, other: ts)", choice),
];

/// Lowers `op(self)` in the operand's type.
fn unary(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    c.result(op, &[x])
}

/// Returns `self` in floating point.
pub(super) fn float_self(c: &mut Call) -> Result<ValueId> {
    let x = c.need("self")?;
    let dtype = c.low.promoted_float(&[&x])?;
    c.low.operand(&x, dtype)
}

/// Lowers `op(self)` and converts integers.
pub(super) fn unary_float(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = float_self(c)?;
    c.result(op, &[x])
}

/// Lowers a rounding, which leaves integers as they are.
fn rounded(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    match c.dtype(x).is_float() {
        true => c.result(op, &[x]),
        false => c.made(x),
    }
}

fn truncate(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let y = toward_zero(c, x)?;
    c.made(y)
}

/// Rounds toward zero.
fn toward_zero(c: &mut Call, x: ValueId) -> Result<ValueId> {
    if !c.dtype(x).is_float() {
        return Ok(x);
    }
    let sign = c.emit(&arith::SIGN, &[x])?;
    let size = c.emit(&arith::ABS, &[x])?;
    let size = c.emit(&arith::FLOOR, &[size])?;
    c.low.b.mul(sign, size)
}

/// Returns several arguments in one element type.
fn operands<const N: usize>(c: &mut Call, names: [&str; N], dtype: DType) -> Result<[ValueId; N]> {
    let mut values = Vec::with_capacity(N);
    for name in names {
        values.push(c.low.operand(&c.given(name), dtype)?);
    }
    Ok(std::array::from_fn(|i| values[i]))
}

/// Returns the element type that arguments have in common.
fn common<const N: usize>(c: &Call, names: [&str; N]) -> Result<DType> {
    let given = names.map(|name| c.given(name));
    c.low.promoted(&given.each_ref())
}

/// Returns both operands in their common type.
pub(super) fn both(c: &mut Call, a: &str, b: &str) -> Result<[ValueId; 2]> {
    let dtype = common(c, [a, b])?;
    operands(c, [a, b], dtype)
}

pub(super) fn binary(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let operands = both(c, "self", "other")?;
    c.result(op, &operands)
}

/// Returns true if a factor is 1 or not given.
pub(super) fn is_one(value: Option<&Value>) -> bool {
    value.is_none_or(|v| v.number() == Some(1.0))
}

/// Multiplies `x` by a factor, unless that is 1.
pub(super) fn times_factor(c: &mut Call, x: ValueId, name: &str) -> Result<ValueId> {
    if is_one(c.get(name)) {
        return Ok(x);
    }
    let factor = c.low.operand(&c.given(name), c.dtype(x))?;
    c.low.b.mul(x, factor)
}

/// Lowers `self op alpha·other`. The sum of truth values is their disjunction.
fn scaled(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let b = times_factor(c, b, "alpha")?;
    let op = match c.dtype(a) {
        DType::Bool if op == &arith::ADD => &logic::OR,
        _ => op,
    };
    c.result(op, &[a, b])
}

fn reversed_sub(c: &mut Call) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let a = times_factor(c, a, "alpha")?;
    c.result(&arith::SUB, &[b, a])
}

/// Lowers a product. The product of truth values is their conjunction.
fn product(c: &mut Call) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let op = match c.dtype(a) {
        DType::Bool => &logic::AND,
        _ => &arith::MUL,
    };
    c.result(op, &[a, b])
}

/// Lowers `self + value·(tensor1 op tensor2)`.
fn added(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let names = ["self", "tensor1", "tensor2"];
    let dtype = common(c, names)?;
    let [x, a, b] = operands(c, names, dtype)?;
    let y = c.emit(op, &[a, b])?;
    let y = times_factor(c, y, "value")?;
    c.result(&arith::ADD, &[x, y])
}

fn divide(c: &mut Call) -> Result<Value> {
    match c.str("rounding_mode", "")? {
        "" => {
            let given = ["self", "other"].map(|name| c.given(name));
            let dtype = c.low.promoted_float(&given.each_ref())?;
            let [a, b] = operands(c, ["self", "other"], dtype)?;
            c.result(&arith::DIV, &[a, b])
        }
        "floor" => whole_quotient(c, true),
        "trunc" => whole_quotient(c, false),
        other => Err(c.unsupported(format!("`rounding_mode` {other}"))),
    }
}

/// Lowers the quotient rounded down, or toward zero.
fn whole_quotient(c: &mut Call, down: bool) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    if c.dtype(a).is_float() {
        let y = c.low.b.div(a, b)?;
        let y = match down {
            true => c.emit(&arith::FLOOR, &[y])?,
            false => toward_zero(c, y)?,
        };
        return c.made(y);
    }
    // ONNX Div rounds integers toward zero. To round down, the remainder with the sign of the divisor comes off first.
    let at_least = |c: &Call, v: ValueId, least: i64| {
        let known = c.low.b.contents.get(v);
        known.is_some_and(|v| v.iter().all(|d| d.bounds().0.is_some_and(|lo| lo >= least)))
    };
    if down && !(at_least(c, a, 0) && at_least(c, b, 1)) {
        let rest = c.emit(&arith::MOD, &[a, b])?;
        let whole = c.low.b.sub(a, rest)?;
        return c.result(&arith::DIV, &[whole, b]);
    }
    c.result(&arith::DIV, &[a, b])
}

/// Lowers a remainder with the sign of the divisor (`fmod` 0) or of the dividend (`fmod` 1).
fn remainder(c: &mut Call, fmod: i64) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    if fmod == 0 && c.dtype(a).is_float() {
        // ONNX Mod takes floats only with the sign of the dividend.
        let q = c.low.b.div(a, b)?;
        let q = c.emit(&arith::FLOOR, &[q])?;
        let whole = c.low.b.mul(q, b)?;
        return c.result(&arith::SUB, &[a, whole]);
    }
    c.result_with(&arith::MOD, &[a, b], Attrs::new().with("fmod", fmod))
}

fn power(c: &mut Call) -> Result<Value> {
    let (base, exponent) = (c.need("self")?, c.need("exponent")?);
    let dtype = c.low.promoted(&[&base, &exponent])?;
    let x = c.low.operand(&base, dtype)?;
    match exponent.number() {
        Some(1.0) => c.made(x),
        Some(0.5) if dtype.is_float() => c.result(&math::SQRT, &[x]),
        // A whole exponent keeps its type, because float32 does not hold every integer.
        _ => {
            let p = c.low.operand(&exponent, dtype)?;
            c.result(&power::POW, &[x, p])
        }
    }
}

fn square(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    c.result(&arith::MUL, &[x, x])
}

/// Lowers 1/√x, as exporters write it.
fn rsqrt(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let root = c.emit(&math::SQRT, &[x])?;
    c.result(&math::RECIPROCAL, &[root])
}

/// Lowers 1 − erf(x).
fn erfc(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let y = c.emit(&math::ERF, &[x])?;
    let one = c.scalar_like(y, 1.0);
    c.result(&arith::SUB, &[one, y])
}

fn log_of_base(c: &mut Call, base: f64) -> Result<Value> {
    let x = float_self(c)?;
    let y = c.emit(&math::LOG, &[x])?;
    let factor = c.scalar_like(y, 1.0 / base.ln());
    c.result(&arith::MUL, &[y, factor])
}

fn lerp(c: &mut Call) -> Result<Value> {
    let dtype = common(c, ["self", "end"])?;
    let [a, b, w] = operands(c, ["self", "end", "weight"], dtype)?;
    let way = c.low.b.sub(b, a)?;
    let way = c.low.b.mul(way, w)?;
    c.result(&arith::ADD, &[a, way])
}

fn clamp(c: &mut Call) -> Result<Value> {
    let bounds = [c.get("min").cloned(), c.get("max").cloned()];
    let x = c.need("self")?;
    let mut all = vec![&x];
    all.extend(bounds.iter().flatten());
    let dtype = c.low.promoted(&all)?;
    let mut y = c.low.operand(&x, dtype)?;
    let is_tensor = |b: &Value| matches!(b, Value::Tensor(_));
    if bounds.iter().flatten().any(is_tensor) {
        for (bound, op) in bounds.iter().zip([&extreme::MAX, &extreme::MIN]) {
            if let Some(bound) = bound {
                let bound = c.low.operand(bound, dtype)?;
                y = c.emit(op, &[y, bound])?;
            }
        }
        return c.made(y);
    }
    let mut ins = vec![Some(y)];
    for bound in &bounds {
        let bound = bound.as_ref().map(|value| c.low.operand(value, dtype));
        ins.push(bound.transpose()?);
    }
    let y = c.low.b.emit_n(&extreme::CLIP, ins, Attrs::new(), 1)?[0];
    c.made(y)
}

/// Lowers a comparison. An order of truth values is that of their numbers.
fn compared(c: &mut Call) -> Result<Value> {
    let op = match c.name.as_str() {
        "ge" | "greater_equal" => &logic::GREATER_OR_EQUAL,
        "gt" | "greater" => &logic::GREATER,
        "le" | "less_equal" => &logic::LESS_OR_EQUAL,
        "lt" | "less" => &logic::LESS,
        _ => &logic::EQUAL,
    };
    let [mut a, mut b] = both(c, "self", "other")?;
    if c.name != "eq" && c.dtype(a) == DType::Bool {
        (a, b) = (c.low.b.cast(a, DType::I32)?, c.low.b.cast(b, DType::I32)?);
    }
    c.result(op, &[a, b])
}

fn not_equal(c: &mut Call) -> Result<Value> {
    let operands = both(c, "self", "other")?;
    let y = c.emit(&logic::EQUAL, &operands)?;
    c.result(&logic::NOT, &[y])
}

/// Returns true where an element is not 0.
pub(super) fn truth(c: &mut Call, x: ValueId) -> Result<ValueId> {
    let dtype = c.dtype(x);
    if dtype == DType::Bool {
        return Ok(x);
    }
    let zero = c.low.operand(&Value::Int(Dim::ZERO), dtype)?;
    let y = c.emit(&logic::EQUAL, &[x, zero])?;
    c.emit(&logic::NOT, &[y])
}

/// Returns the ops of truth values and of bits that the name of the call ends with.
fn connective(c: &Call) -> (&'static OpDef, &'static OpDef) {
    match c.name.trim_end_matches('_').rsplit('_').next() {
        Some("and") => (&logic::AND, &bits::BITWISE_AND),
        Some("or") => (&logic::OR, &bits::BITWISE_OR),
        _ => (&logic::XOR, &bits::BITWISE_XOR),
    }
}

fn logical(c: &mut Call) -> Result<Value> {
    let (a, b) = (c.value("self")?, c.value("other")?);
    let (a, b) = (truth(c, a)?, truth(c, b)?);
    c.result(connective(c).0, &[a, b])
}

fn logical_not(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let x = truth(c, x)?;
    c.result(&logic::NOT, &[x])
}

fn bitwise(c: &mut Call) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let (of_truth, of_bits) = connective(c);
    let op = match c.dtype(a) {
        DType::Bool => of_truth,
        _ => of_bits,
    };
    c.result(op, &[a, b])
}

fn bitwise_not(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let op = match c.dtype(x) {
        DType::Bool => &logic::NOT,
        _ => &bits::BITWISE_NOT,
    };
    c.result(op, &[x])
}

/// Lowers a test for special numbers. Integers are finite.
fn special(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    if c.dtype(x).is_float() {
        return c.result(op, &[x]);
    }
    let no = c.low.b.scalar(DType::Bool, 0.0);
    let y = c.low.broadcast_to(no, &c.shape_of(x))?;
    c.made(y)
}

fn isfinite(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    // x − x is 0 for a finite number, and NaN for every other.
    let zero = c.emit(&arith::SUB, &[x, x])?;
    let y = c.emit(&logic::IS_NAN, &[zero])?;
    c.result(&logic::NOT, &[y])
}

fn masked_fill(c: &mut Call) -> Result<Value> {
    let (x, mask) = (c.value("self")?, c.value("mask")?);
    let value = c.low.operand(&c.given("value"), c.dtype(x))?;
    c.result(&logic::WHERE, &[mask, value, x])
}

fn choice(c: &mut Call) -> Result<Value> {
    let condition = c.value("condition")?;
    let condition = truth(c, condition)?;
    let [a, b] = both(c, "self", "other")?;
    c.result(&logic::WHERE, &[condition, a, b])
}

/// Lowers exp(x) − 1 without cancellation near 0: 2·exp(x/2)·sinh(x/2).
fn expm1(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let (half, two) = (c.scalar_like(x, 0.5), c.scalar_like(x, 2.0));
    let x = c.low.b.mul(x, half)?;
    let grow = c.emit(&math::EXP, &[x])?;
    let sinh = c.emit(&trig::SINH, &[x])?;
    let y = c.low.b.mul(grow, sinh)?;
    c.result(&arith::MUL, &[y, two])
}

/// Lowers log(1 + x) without cancellation near 0: x·log(u)/(u − 1) with u = 1 + x as it is rounded, and x where u is 1
/// (W. Kahan, in HP-15C Advanced Functions Handbook, 1982).
fn log1p(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let one = c.scalar_like(x, 1.0);
    let u = c.low.b.add(x, one)?;
    let rounded = c.low.b.sub(u, one)?;
    let tiny = c.emit(&logic::EQUAL, &[u, one])?;
    let divisor = c.emit(&logic::WHERE, &[tiny, one, rounded])?;
    let log = c.emit(&math::LOG, &[u])?;
    let ratio = c.low.b.div(log, divisor)?;
    let ratio = c.emit(&logic::WHERE, &[tiny, one, ratio])?;
    c.result(&arith::MUL, &[x, ratio])
}

/// Lowers the inverse of erf: a first guess to 2·10⁻³ (S. Winitzki, 2008), then three steps of Newton's method, each of
/// which squares the error. The derivative of the last step is that of the inverse.
fn erfinv(c: &mut Call) -> Result<Value> {
    const A: f64 = 0.147;
    let y = float_self(c)?;
    let one = c.scalar_like(y, 1.0);
    let square = c.low.b.mul(y, y)?;
    let rest = c.low.b.sub(one, square)?;
    let log = c.emit(&math::LOG, &[rest])?;
    let (half, inverse) = (c.scalar_like(y, 0.5), c.scalar_like(y, 1.0 / A));
    let shift = c.scalar_like(y, 2.0 / (PI * A));
    let half_log = c.low.b.mul(log, half)?;
    let first = c.low.b.add(half_log, shift)?;
    let second = c.low.b.mul(log, inverse)?;
    let under = c.low.b.mul(first, first)?;
    let under = c.low.b.sub(under, second)?;
    let root = c.emit(&math::SQRT, &[under])?;
    let size = c.low.b.sub(root, first)?;
    let size = c.emit(&math::SQRT, &[size])?;
    let sign = c.emit(&arith::SIGN, &[y])?;
    let mut x = c.low.b.mul(sign, size)?;
    for _ in 0..3 {
        x = newton(c, x, y)?;
    }
    // The inverse is ±∞ at ±1.
    let far = c.emit(&arith::ABS, &[y])?;
    let far = c.emit(&logic::EQUAL, &[far, one])?;
    let infinity = c.scalar_like(y, f64::INFINITY);
    let infinity = c.low.b.mul(sign, infinity)?;
    c.result(&logic::WHERE, &[far, infinity, x])
}

/// Returns x − (erf(x) − y)·(√π/2)·exp(x²).
fn newton(c: &mut Call, x: ValueId, y: ValueId) -> Result<ValueId> {
    let erf = c.emit(&math::ERF, &[x])?;
    let off = c.low.b.sub(erf, y)?;
    let square = c.low.b.mul(x, x)?;
    let grow = c.emit(&math::EXP, &[square])?;
    let factor = c.scalar_like(x, PI.sqrt() / 2.0);
    let step = c.low.b.mul(off, grow)?;
    let step = c.low.b.mul(step, factor)?;
    c.low.b.sub(x, step)
}
