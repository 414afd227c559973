//! Ops that PyTorch itself defines by others (torch/_decomp, torch/_refs), as formulas.

use super::super::value::Value;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Dim};

pub const FORMULAS: &[Formula] = &[
    "aminmax(self: t, *, dim: i?, keepdim: b?) => (amin(self, dim, keepdim), amax(self, dim, keepdim))",
    "cosine_similarity(x1: t, x2: t, dim: i = 1, eps: f = 1e-8) => \
     a = x1 / clamp_min(linalg_vector_norm(x1, 2.0, dim, true), eps); \
     b = x2 / clamp_min(linalg_vector_norm(x2, 2.0, dim, true), eps); sum(a * b, dim)",
    "count_nonzero(self: t, dim: I?) => sum(self != 0, dim)",
    "deg2rad(self: t) => self * (pi / 180.0)",
    "dist(self: t, other: t, p: f = 2.0) => norm(self - other, p)",
    "exp2(self: t) => exp(self * ln2)",
    "float_power(self: ts, exponent: ts) => \
     pow(is_tensor(self) ? to(self, float64) : self, is_tensor(exponent) ? to(exponent, float64) : exponent)",
    // Where one operand is NaN, the result is the other one.
    "fmax(self: t, other: t) => \
     y = maximum(self, other); y = where(isnan(self), other, y); where(isnan(other), self, y)",
    "fmin(self: t, other: t) => \
     y = minimum(self, other); y = where(isnan(self), other, y); where(isnan(other), self, y)",
    "frac(self: t) => self - trunc(self)",
    "hardshrink(self: t, lambd: f = 0.5) => where(abs(self) > lambd, self, 0.0)",
    "heaviside(self: t, values: t) => step = to(self > 0, dtype(self)); where(self == 0, values, step)",
    "hypot(self: t, other: t) => sqrt(self * self + other * other)",
    "inner(self: t, other: t) => dim(self) == 0 | dim(other) == 0 ? self * other : tensordot(self, other, -1, -1)",
    // An infinity is close to itself alone.
    "isclose(self: t, other: t, rtol: f = 1e-5, atol: f = 1e-8, equal_nan: b?) => \
     off = abs(self - other); near = off <= abs(other) * rtol + atol & isfinite(off); \
     close = near | self == other; equal_nan ? close | isnan(self) & isnan(other) : close",
    "isin(elements: t, test_elements: t, *, assume_unique: b?, invert: b?) => \
     found = any(unsqueeze(elements, -1) == flatten(test_elements), -1); invert ? ~found : found",
    "isneginf(self: t) => self == -inf",
    "isposinf(self: t) => self == inf",
    "logaddexp(self: t, other: t) => \
     top = maximum(self, other); top = detach(where(isinf(top), 0.0, top)); \
     log(exp(self - top) + exp(other - top)) + top",
    "logaddexp2(self: t, other: t) => logaddexp(self * ln2, other * ln2) * (1.0 / ln2)",
    "logit(self: t, eps: f?) => \
     x = given(eps) ? clamp(self, eps, 1.0 - eps) : self; rest = rsub(x, 1.0); log(x / rest)",
    "median(self: t) => median(flatten(self), 0)[0]",
    "nanmean(self: t, dim: I?, keepdim: b?, *, dtype: d?) => \
     nansum(self, dim, keepdim, dtype=dtype) / sum(~isnan(self), dim, keepdim)",
    "nansum(self: t, dim: I?, keepdim: b?, *, dtype: d?) => \
     x = masked_fill(self, isnan(self), 0); sum(given(dtype) ? to(x, dtype) : x, dim, keepdim)",
    "pairwise_distance(x1: t, x2: t, p: f = 2.0, eps: f = 1e-6, keepdim: b?) => \
     linalg_vector_norm(x1 - x2 + eps, p, -1, keepdim)",
    "rad2deg(self: t) => self * (180.0 / pi)",
    "sgn(self: t) => sign(self)",
    // The sign of a zero shows in its reciprocal.
    "signbit(self: t) => below = self < 0; is_float(self) ? below | reciprocal(self) < 0 : below",
    "sinc(self: t) => x = self * pi; zero = x == 0; safe = where(zero, 1.0, x); where(zero, 1.0, sin(safe) / safe)",
    "softshrink(self: t, lambd: f = 0.5) => \
     above = self > lambd; below = self < -lambd; less = self - lambd; \
     where(above, less, where(below, self + lambd, 0.0))",
    "threshold(self: t, threshold: s, value: s) => where(self > threshold, self, value)",
    // x·log(y), and 0 where x is 0.
    "xlogy(self: ts, other: ts) => \
     zero = eq(self, 0); bare = is_tensor(other) ? isnan(other) : ne(self, self); both = zero & ~bare; \
     product = mul(self, log(where(both, 1.0, other))); where(both, 0.0, product)",
];

pub const OPS: &[Op] = &[
    (
        "{alpha_dropout,feature_dropout,feature_alpha_dropout}(input: t, p: f, train: b)",
        only_evaluated,
    ),
    ("atan2(self: t, other: t)", atan2),
    ("copysign(self: ts, other: ts)", copysign),
    ("cross(self: t, other: t, dim: i?)", cross),
    ("linalg_cross(self: t, other: t, *, dim: i?)", cross),
    ("kthvalue(self: t, k: i, dim: i?, keepdim: b?)", |c| {
        let k = c.int("k", 1)?;
        kth(c, k)
    }),
    ("logcumsumexp(self: t, dim: i)", logcumsumexp),
    ("median(self: t, dim: i, keepdim: b?)", median),
    (
        "nan_to_num(self: t, nan: f?, posinf: f?, neginf: f?)",
        nan_to_num,
    ),
    (
        "rrelu(self: t, lower: f?, upper: f?, training: b?, generator); \
         rrelu_with_noise(self: t, noise: t, lower: f?, upper: f?, training: b?, generator)",
        rrelu,
    ),
    (
        "rrelu_with_noise_functional(self: t, noise: t, lower: f?, upper: f?, training: b?, generator)",
        |c| Ok(Value::Tuple(vec![rrelu(c)?, c.given("noise")])),
    ),
    (
        "{std,var}_mean(self: t, unbiased: b?); \
         {std,var}_mean(self: t, dim: I?, unbiased: b?, keepdim: b?); \
         {std,var}_mean(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        with_mean,
    ),
];

/// Lowers a dropout of another distribution, which does nothing in an evaluated model.
fn only_evaluated(c: &mut Call) -> Result<Value> {
    if c.bool("train", false)? && c.float("p", 0.5)? != 0.0 {
        return Err(c
            .unsupported("training")
            .help("use dropout, or export the model in evaluation mode"));
    }
    Ok(c.given("input"))
}

/// Lowers the angle of the point (other, self), −π to π. It takes atan of the smaller coordinate over the larger, so that
/// no slope is infinite, and each quotient only where it counts. Where both are 0, the angle is 0 or ±π, without a slope.
fn atan2(c: &mut Call) -> Result<Value> {
    for name in ["self", "other"] {
        if !c.low.dtype(c.tensor(name)?).is_float() {
            return Err(c.unsupported("an integer").help("use to(torch.float32)"));
        }
    }
    c.formula(
        &[],
        "tall = abs(self); wide = abs(other); flat = wide >= tall; zero = flat & wide == 0; \
         along = atan(self / where(flat & ~zero, other, 1.0)); along = where(zero, 0.0, along); \
         behind = signbit(other); turned = along + copysign(full_like(self, pi), self); \
         along = where(behind, turned, along); across = atan(other / where(~flat, self, 1.0)); \
         where(flat, along, copysign(full_like(self, pi / 2.0), self) - across)",
    )
}

fn copysign(c: &mut Call) -> Result<Value> {
    let sign = match c.given("other") {
        tensor @ Value::Tensor(_) => tensor,
        number @ Value::Float(_) => c.run("scalar_tensor", [number])?,
        _ => return Err(c.unsupported("this operand")),
    };
    c.formula(
        &[("sign", sign)],
        "negative = signbit(sign); size = abs(self); where(negative, -size, size)",
    )
}

/// Lowers the cross product along an axis of size 3.
fn cross(c: &mut Call) -> Result<Value> {
    let axis = match c.get("dim") {
        Some(_) => c.int("dim", -1)?,
        None if c.name == "cross" => {
            let dims = c.sizes("self")?;
            let three = dims.iter().position(|d| *d == Dim::from(3));
            three.ok_or_else(|| c.fail("shape", "no axis has size 3"))? as i64
        }
        None => -1,
    };
    c.formula(
        &[("axis", axis.into())],
        "a1 = roll(self, -1, axis); b2 = roll(other, -2, axis); a2 = roll(self, -2, axis); b1 = roll(other, -1, axis); \
         a1 * b2 - a2 * b1",
    )
}

/// Lowers the k-th smallest element along an axis, and its index.
fn kth(c: &mut Call, k: i64) -> Result<Value> {
    let axis = c.int("dim", -1)?;
    if k < 1 {
        return Err(c.fail("shape", format!("there is no element number {k}")));
    }
    c.formula(
        &[("axis", axis.into()), ("k", k.into())],
        "least = topk(self, k, axis, false, true); \
         value = narrow(least[0], axis, k - 1, 1); value = keepdim ? value : squeeze(value, axis); \
         index = narrow(least[1], axis, k - 1, 1); (value, keepdim ? index : squeeze(index, axis))",
    )
}

/// Lowers the median along an axis: the lower one of the two elements in the middle.
fn median(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let axis = c.axis("dim", -1, dims.len())?;
    let size = dims.get(axis).map_or(Some(1), Dim::as_const);
    let size = size.ok_or_else(|| c.fail("shape", "the size along the axis is not known"))?;
    kth(c, size - size / 2)
}

/// Returns the largest number of a float type.
fn largest(dtype: DType) -> Option<f64> {
    match dtype {
        DType::F16 => Some(65504.0),
        DType::BF16 => Some(f64::from(f32::from_bits(0x7f7f_0000))),
        DType::F32 => Some(f64::from(f32::MAX)),
        DType::F64 => Some(f64::MAX),
        _ => None,
    }
}

/// Lowers logarithms of running sums of exponentials. Each step doubles the number of elements that a sum spans (Hillis and
/// Steele, "Data parallel algorithms", 1986). No sum overflows, because each is scaled by its own largest element.
fn logcumsumexp(c: &mut Call) -> Result<Value> {
    let dims = c.sizes("self")?;
    let axis = c.axis("dim", -1, dims.len())?;
    let size = dims.get(axis).map_or(Some(1), Dim::as_const);
    let size = size.ok_or_else(|| c.fail("shape", "the size along the axis is not known"))?;
    if !c.low.dtype(c.tensor("self")?).is_float() {
        return Err(c.unsupported("an integer").help("use to(torch.float32)"));
    }
    let mut sums = c.given("self");
    let mut span = 1;
    while span < size {
        let mut pads = vec![0; 2 * (dims.len() - axis)];
        let front = pads.len() - 2;
        pads[front] = span;
        let [along, from, length] = [axis as i64, 0, size - span].map(Value::from);
        let before = c.run("narrow", [sums.clone(), along, from, length])?;
        let before = c.run(
            "constant_pad_nd",
            [before, pads.into(), f64::NEG_INFINITY.into()],
        )?;
        sums = c.run("logaddexp", [sums, before])?;
        span *= 2;
    }
    Ok(sums)
}

fn nan_to_num(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let Some(most) = largest(c.low.dtype(c.tensor("self")?)) else {
        return Ok(x);
    };
    let mut y = x.clone();
    for (test, name, natural) in [
        ("isnan", "nan", 0.0),
        ("isposinf", "posinf", most),
        ("isneginf", "neginf", -most),
    ] {
        let number = c.float(name, natural)?;
        let hit = c.run(test, [x.clone()])?;
        y = c.run("where", [hit, number.into(), y])?;
    }
    Ok(y)
}

/// Lowers an evaluated `rrelu`, whose slope is the middle one.
fn rrelu(c: &mut Call) -> Result<Value> {
    if c.bool("training", false)? {
        return Err(c
            .unsupported("training")
            .help("export the model in evaluation mode"));
    }
    let slope = (c.float("lower", 0.125)? + c.float("upper", 1.0 / 3.0)?) / 2.0;
    c.run("leaky_relu", [c.given("self"), slope.into()])
}

/// Lowers `std_mean` and `var_mean`.
fn with_mean(c: &mut Call) -> Result<Value> {
    let (x, axes) = (c.given("self"), c.given("dim"));
    let given = ["unbiased", "correction", "keepdim"];
    let given = given.map(|name| (name, c.given(name)));
    let kwargs = given.into_iter().filter(|(_, v)| *v != Value::None);
    let mut args = vec![x.clone(), axes.clone()];
    args.retain(|v| *v != Value::None);
    let spread = c.name[..3].to_string();
    let spread = c.run_named(&spread, args, kwargs.collect())?;
    let mean = c.run("mean", [x, axes, c.given("keepdim")])?;
    Ok(Value::Tuple(vec![spread, mean]))
}
