//! Ops of single elements: arithmetic, comparisons and functions, with PyTorch's promotion of element types.

use super::super::value::Value;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::ValueId;
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith;

/// `ordered` and `erfinv_step` are of other formulas here.
pub const FORMULAS: &[Formula] = &[
    "abs(self: t) => Abs(self)",
    "acos(self: t) => Acos(floating(self))",
    "acosh(self: t) => Acosh(floating(self))",
    // The sum of truth values is their disjunction.
    "add(self: ts, other: ts, alpha: s?) => \
     both = common(self, other); b = times(both[1], alpha); is_bool(b) ? Or(both[0], b) : Add(both[0], b)",
    "addcdiv(self: t, tensor1: t, tensor2: t, value: s?) => \
     all = common(self, tensor1, tensor2); Add(all[0], times(Div(all[1], all[2]), value))",
    "addcmul(self: t, tensor1: t, tensor2: t, value: s?) => \
     all = common(self, tensor1, tensor2); Add(all[0], times(Mul(all[1], all[2]), value))",
    "asin(self: t) => Asin(floating(self))",
    "asinh(self: t) => Asinh(floating(self))",
    "atan(self: t) => Atan(floating(self))",
    "atanh(self: t) => Atanh(floating(self))",
    "{bitwise_and,__and__}(self: ts, other: ts) => \
     both = common(self, other); is_bool(both[0]) ? And(both) : BitwiseAnd(both)",
    "bitwise_not(self: t) => is_bool(self) ? Not(self) : BitwiseNot(self)",
    "{bitwise_or,__or__}(self: ts, other: ts) => \
     both = common(self, other); is_bool(both[0]) ? Or(both) : BitwiseOr(both)",
    "{bitwise_xor,__xor__}(self: ts, other: ts) => \
     both = common(self, other); is_bool(both[0]) ? Xor(both) : BitwiseXor(both)",
    "ceil(self: t) => is_float(self) ? Ceil(self) : clone(self)",
    "{clamp,clip}(self: t, min: ts?, max: ts?); clamp_max(self: t, max: ts); clamp_min(self: t, min: ts) => \
     x = typed(self, min, max); is_tensor(min) | is_tensor(max) ? \
     (x = given(min) ? Max(x, like(min, x)) : x; given(max) ? Min(x, like(max, x)) : x) : Clip(x, min, max)",
    "cos(self: t) => Cos(floating(self))",
    "cosh(self: t) => Cosh(floating(self))",
    "eq(self: ts, other: ts) => Equal(common(self, other))",
    "erf(self: t) => Erf(floating(self))",
    "erfc(self: t) => Sub(1.0, Erf(floating(self)))",
    // A first guess to 2·10⁻³ (S. Winitzki, 2008), then three steps of Newton's method, each of which squares the error. The
    // derivative of the last step is that of the inverse. The inverse is ±∞ at ±1.
    "erfinv(self: t) => \
     y = floating(self); one = like(1.0, y); log = Log(Sub(one, Mul(y, y))); \
     half = like(0.5, y); inverse = like(1.0 / 0.147, y); shift = like(2.0 / (pi * 0.147), y); \
     first = Add(Mul(log, half), shift); second = Mul(log, inverse); \
     size = Sqrt(Sub(Sqrt(Sub(Mul(first, first), second)), first)); sign = Sign(y); \
     x = erfinv_step(erfinv_step(erfinv_step(Mul(sign, size), y), y), y); \
     Where(Equal(Abs(y), one), Mul(sign, inf), x)",
    // x − (erf(x) − y)·(√π/2)·exp(x²).
    "erfinv_step(self: t, y: t) => \
     Sub(self, Mul(Mul(Sub(Erf(self), y), Exp(Mul(self, self))), 0.8862269254527579))",
    "exp(self: t) => Exp(floating(self))",
    // 2·exp(x/2)·sinh(x/2), without cancellation near 0.
    "expm1(self: t) => x = Mul(floating(self), 0.5); Mul(Mul(Exp(x), Sinh(x)), 2.0)",
    "floor(self: t) => is_float(self) ? Floor(self) : clone(self)",
    // Remainders have the sign of the dividend in `fmod`, and of the divisor in `remainder`. ONNX Mod takes floats only with
    // that of the dividend.
    "fmod(self: t, other: ts) => Mod(common(self, other), fmod=1)",
    "{ge,greater_equal}(self: ts, other: ts) => GreaterOrEqual(ordered(self, other))",
    "{gt,greater}(self: ts, other: ts) => Greater(ordered(self, other))",
    // x − x is 0 for a finite number, and NaN for every other.
    "isfinite(self: t) => x = floating(self); Not(IsNaN(Sub(x, x)))",
    "isinf(self: t) => is_float(self) ? IsInf(self) : zeros_like(self, dtype=bool)",
    "isnan(self: t) => is_float(self) ? IsNaN(self) : zeros_like(self, dtype=bool)",
    "{le,less_equal}(self: ts, other: ts) => LessOrEqual(ordered(self, other))",
    "lerp(self: t, end: t, weight: ts) => \
     both = common(self, end); w = like(weight, both[0]); Add(both[0], Mul(Sub(both[1], both[0]), w))",
    "log(self: t) => Log(floating(self))",
    "log10(self: t) => Mul(Log(floating(self)), 1.0 / ln10)",
    // x·log(u)/(u − 1) with u = 1 + x as it is rounded, and x where u is 1, without cancellation near 0 (W. Kahan, in HP-15C
    // Advanced Functions Handbook, 1982).
    "log1p(self: t) => \
     x = floating(self); u = Add(x, 1.0); rounded = Sub(u, 1.0); tiny = Equal(u, 1.0); \
     divisor = Where(tiny, 1.0, rounded); ratio = Div(Log(u), divisor); Mul(x, Where(tiny, 1.0, ratio))",
    "log2(self: t) => Mul(Log(floating(self)), 1.0 / ln2)",
    "logical_and(self: t, other: t) => And(truth(self), truth(other))",
    "logical_not(self: t) => Not(truth(self))",
    "logical_or(self: t, other: t) => Or(truth(self), truth(other))",
    "logical_xor(self: t, other: t) => Xor(truth(self), truth(other))",
    "{lt,less}(self: ts, other: ts) => Less(ordered(self, other))",
    "masked_fill(self: t, mask: t, value: ts) => Where(mask, like(value, self), self)",
    "maximum(self: t, other: t) => Max(common(self, other))",
    "minimum(self: t, other: t) => Min(common(self, other))",
    // The product of truth values is their conjunction.
    "{mul,multiply}(self: ts, other: ts) => both = common(self, other); is_bool(both[0]) ? And(both) : Mul(both)",
    "{ne,not_equal}(self: ts, other: ts) => Not(Equal(common(self, other)))",
    "{neg,negative}(self: t) => Neg(self)",
    // The order of truth values is that of their numbers.
    "ordered(self: ts, other: ts) => \
     both = common(self, other); is_bool(both[0]) ? (Cast(both[0], to=int32), Cast(both[1], to=int32)) : both",
    "positive(self: t) => self",
    // A whole exponent keeps its type, because float32 does not hold every integer.
    "pow(self: ts, exponent: ts) => \
     x = typed(self, exponent); is_tensor(exponent) ? Pow(x, like(exponent, x)) : exponent == 1 ? x : \
     exponent == 0.5 & is_float(x) ? Sqrt(x) : Pow(x, exponent)",
    "reciprocal(self: t) => Reciprocal(floating(self))",
    "remainder(self: ts, other: ts) => \
     both = common(self, other); \
     is_float(both[0]) ? Sub(both[0], Mul(Floor(Div(both)), both[1])) : Mod(both, fmod=0)",
    "round(self: t) => is_float(self) ? Round(self) : clone(self)",
    "rsqrt(self: t) => Reciprocal(Sqrt(floating(self)))",
    "rsub(self: t, other: ts, alpha: s?) => both = common(self, other); Sub(both[1], times(both[0], alpha))",
    "sign(self: t) => Sign(self)",
    "sin(self: t) => Sin(floating(self))",
    "sinh(self: t) => Sinh(floating(self))",
    "sqrt(self: t) => Sqrt(floating(self))",
    "square(self: t) => Mul(self, self)",
    "{sub,subtract}(self: ts, other: ts, alpha: s?) => both = common(self, other); Sub(both[0], times(both[1], alpha))",
    "tan(self: t) => Tan(floating(self))",
    "tanh(self: t) => Tanh(floating(self))",
    "trunc(self: t) => is_float(self) ? (sign = Sign(self); Mul(sign, Floor(Abs(self)))) : clone(self)",
    "where(condition: t, self: ts, other: ts) => hit = truth(condition); Where(hit, common(self, other))",
];

pub const OPS: &[Op] = &[
    (
        "{div,divide,true_divide}(self: ts, other: ts, rounding_mode: S?)",
        divide,
    ),
    ("floor_divide(self: ts, other: ts)", |c| {
        whole_quotient(c, true)
    }),
];

/// Returns `self` in floating point.
pub(super) fn float_self(c: &mut Call) -> Result<ValueId> {
    let x = c.need("self")?;
    let dtype = c.low.promoted_float(&[&x])?;
    c.low.operand(&x, dtype)
}

fn divide(c: &mut Call) -> Result<Value> {
    match c.str("rounding_mode", "")? {
        "" => c.formula(&[], "Div(floating(self, other))"),
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
        let names = [("y", c.made(y)?)];
        return c.formula(&names, if down { "Floor(y)" } else { "trunc(y)" });
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

/// Returns both operands in their common type.
pub(super) fn both(c: &mut Call, a: &str, b: &str) -> Result<[ValueId; 2]> {
    let given = [a, b].map(|name| c.given(name));
    let dtype = c.low.promoted(&given.each_ref())?;
    Ok([
        c.low.operand(&given[0], dtype)?,
        c.low.operand(&given[1], dtype)?,
    ])
}
