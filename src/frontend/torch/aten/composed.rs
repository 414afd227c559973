//! Ops that PyTorch itself defines by others (torch/_decomp, torch/_refs), written as those.

use super::arrange::sizes;
use super::signature::{Call, Op};
use super::{TensorId, Value};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Dim};
use std::f64::consts::{LN_2, PI};

pub const OPS: &[Op] = &[
    ("alpha_dropout(input: t, p: f, train: b)", only_evaluated),
    ("aminmax(self: t, *, dim: i?, keepdim: b?)", aminmax),
    ("atan2(self: t, other: t)", atan2),
    ("copysign(self: ts, other: ts)", copysign),
    (
        "cosine_similarity(x1: t, x2: t, dim: i?, eps: f?)",
        cosine_similarity,
    ),
    ("count_nonzero(self: t, dim: I?)", count_nonzero),
    ("cross(self: t, other: t, dim: i?)", cross),
    ("deg2rad(self: t)", |c| times(c, PI / 180.0)),
    ("dist(self: t, other: t, p: f?)", |c| {
        let off = subtracted(c)?;
        let p = c.float("p", 2.0)?;
        c.run("norm", [off, p.into()])
    }),
    ("exp2(self: t)", |c| {
        let x = times(c, LN_2)?;
        c.run("exp", [x])
    }),
    ("feature_dropout(input: t, p: f, train: b)", only_evaluated),
    (
        "feature_alpha_dropout(input: t, p: f, train: b)",
        only_evaluated,
    ),
    ("float_power(self: ts, exponent: ts)", float_power),
    ("fmax(self: t, other: t)", |c| extreme(c, "maximum")),
    ("fmin(self: t, other: t)", |c| extreme(c, "minimum")),
    ("frac(self: t)", |c| {
        let whole = c.run("trunc", [c.given("self")])?;
        c.run("sub", [c.given("self"), whole])
    }),
    ("hardshrink(self: t, lambd: s?)", hardshrink),
    ("heaviside(self: t, values: t)", heaviside),
    ("hypot(self: t, other: t)", hypot),
    ("inner(self: t, other: t)", inner),
    (
        "isclose(self: t, other: t, rtol: f?, atol: f?, equal_nan: b?)",
        isclose,
    ),
    (
        "isin(elements: t, test_elements: t, *, assume_unique: b?, invert: b?)",
        isin,
    ),
    ("isneginf(self: t)", |c| {
        c.run("eq", [c.given("self"), f64::NEG_INFINITY.into()])
    }),
    ("isposinf(self: t)", |c| {
        c.run("eq", [c.given("self"), f64::INFINITY.into()])
    }),
    ("kthvalue(self: t, k: i, dim: i?, keepdim: b?)", |c| {
        let k = c.int("k", 1)?;
        kth(c, k)
    }),
    ("linalg_cross(self: t, other: t, *, dim: i?)", cross),
    ("logaddexp(self: t, other: t)", logaddexp),
    ("logaddexp2(self: t, other: t)", |c| {
        let a = c.run("mul", [c.given("self"), LN_2.into()])?;
        let b = c.run("mul", [c.given("other"), LN_2.into()])?;
        let y = c.run("logaddexp", [a, b])?;
        c.run("mul", [y, LN_2.recip().into()])
    }),
    ("logit(self: t, eps: f?)", logit),
    ("median(self: t)", |c| {
        let flat = c.run("flatten", [c.given("self")])?;
        let all = c.run("median", [flat, 0.into()])?;
        first(c, all)
    }),
    ("median(self: t, dim: i, keepdim: b?)", median),
    (
        "nan_to_num(self: t, nan: f?, posinf: f?, neginf: f?)",
        nan_to_num,
    ),
    (
        "nanmean(self: t, dim: I?, keepdim: b?, *, dtype: d?)",
        |c| {
            let sum = nansum(c)?;
            let bare = c.run("isnan", [c.given("self")])?;
            let known = c.run("logical_not", [bare])?;
            let count = c.run("sum", [known, c.given("dim"), c.given("keepdim")])?;
            c.run("div", [sum, count])
        },
    ),
    (
        "nansum(self: t, dim: I?, keepdim: b?, *, dtype: d?)",
        nansum,
    ),
    (
        "pairwise_distance(x1: t, x2: t, p: f?, eps: f?, keepdim: b?)",
        pairwise_distance,
    ),
    ("rad2deg(self: t)", |c| times(c, 180.0 / PI)),
    (
        "rrelu(self: t, lower: f?, upper: f?, training: b?, generator)",
        rrelu,
    ),
    (
        "rrelu_with_noise(self: t, noise: t, lower: f?, upper: f?, training: b?, generator)",
        rrelu,
    ),
    (
        "rrelu_with_noise_functional(self: t, noise: t, lower: f?, upper: f?, training: b?, generator)",
        |c| {
            let y = rrelu(c)?;
            Ok(Value::Tuple(vec![y, c.given("noise")]))
        },
    ),
    ("sgn(self: t)", |c| c.run("sign", [c.given("self")])),
    ("signbit(self: t)", signbit),
    ("sinc(self: t)", sinc),
    ("softshrink(self: t, lambd: s?)", softshrink),
    ("std_mean(self: t, unbiased: b?)", |c| with_mean(c, "std")),
    (
        "std_mean(self: t, dim: I?, unbiased: b?, keepdim: b?)",
        |c| with_mean(c, "std"),
    ),
    (
        "std_mean(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        |c| with_mean(c, "std"),
    ),
    ("threshold(self: t, threshold: s, value: s)", |c| {
        let above = c.run("gt", [c.given("self"), c.given("threshold")])?;
        c.run("where", [above, c.given("self"), c.given("value")])
    }),
    ("var_mean(self: t, unbiased: b?)", |c| with_mean(c, "var")),
    (
        "var_mean(self: t, dim: I?, unbiased: b?, keepdim: b?)",
        |c| with_mean(c, "var"),
    ),
    (
        "var_mean(self: t, dim: I?, *, correction: f?, keepdim: b?)",
        |c| with_mean(c, "var"),
    ),
    ("xlogy(self: ts, other: ts)", xlogy),
];

/// The tensor that a call gave.
pub(super) fn id(c: &Call, value: &Value) -> Result<TensorId> {
    match value {
        Value::Tensor(id) => Ok(*id),
        other => Err(c.fail("op", "a tensor is needed").found(other.kind())),
    }
}

/// The first of several results.
fn first(c: &Call, results: Value) -> Result<Value> {
    match results {
        Value::Tuple(items) | Value::List(items) if !items.is_empty() => Ok(items[0].clone()),
        other => Err(c.fail("op", "results are needed").found(other.kind())),
    }
}

fn times(c: &mut Call, factor: f64) -> Result<Value> {
    c.run("mul", [c.given("self"), factor.into()])
}

fn subtracted(c: &mut Call) -> Result<Value> {
    c.run("sub", [c.given("self"), c.given("other")])
}

/// A dropout of another distribution: nothing where the model is evaluated.
fn only_evaluated(c: &mut Call) -> Result<Value> {
    if c.bool("train", false)? && c.float("p", 0.5)? != 0.0 {
        return Err(c
            .unsupported("training")
            .help("use dropout, or export the model in evaluation mode"));
    }
    Ok(c.given("input"))
}

fn aminmax(c: &mut Call) -> Result<Value> {
    let (x, keep) = (c.given("self"), c.given("keepdim"));
    let axes = match c.get("dim") {
        Some(axis) => Value::List(vec![axis.clone()]),
        None => Value::None,
    };
    let least = c.run("amin", [x.clone(), axes.clone(), keep.clone()])?;
    let most = c.run("amax", [x, axes, keep])?;
    Ok(Value::Tuple(vec![least, most]))
}

/// The angle of the point (other, self), −π to π; atan of the smaller coordinate over the larger, so that no slope is
/// infinite. Without a slope, and 0 or ±π, where both are 0.
fn atan2(c: &mut Call) -> Result<Value> {
    let (y, x) = (c.given("self"), c.given("other"));
    for name in ["self", "other"] {
        if !c.low.dtype(c.tensor(name)?).is_float() {
            return Err(c.unsupported("an integer").help("use to(torch.float32)"));
        }
    }
    let (tall, wide) = (c.run("abs", [y.clone()])?, c.run("abs", [x.clone()])?);
    let flat = c.run("ge", [wide.clone(), tall])?;
    let zero = c.run("eq", [wide, 0.into()])?;
    let none = c.run("logical_and", [flat.clone(), zero])?;
    // Each quotient only where it is the one that counts.
    let over = |c: &mut Call, top: &Value, bottom: &Value, counts: &Value| {
        let bottom = c.run("where", [counts.clone(), bottom.clone(), 1.0.into()])?;
        let ratio = c.run("div", [top.clone(), bottom])?;
        c.run("atan", [ratio])
    };
    let some = c.run("logical_not", [none.clone()])?;
    let counts = c.run("logical_and", [flat.clone(), some])?;
    let along = over(c, &y, &x, &counts)?;
    let along = c.run("where", [none, 0.0.into(), along])?;
    let behind = c.run("signbit", [x.clone()])?;
    let half = |c: &mut Call, turn: f64| {
        let turn = c.run("full_like", [y.clone(), turn.into()])?;
        c.run("copysign", [turn, y.clone()])
    };
    let turned = half(c, PI)?;
    let turned = c.run("add", [along.clone(), turned])?;
    let along = c.run("where", [behind, turned, along])?;
    let steep = c.run("logical_not", [flat.clone()])?;
    let across = over(c, &x, &y, &steep)?;
    let quarter = half(c, PI / 2.0)?;
    let across = c.run("sub", [quarter, across])?;
    c.run("where", [flat, along, across])
}

fn copysign(c: &mut Call) -> Result<Value> {
    let negative = match c.given("other") {
        Value::Tensor(t) => c.run("signbit", [t.into()])?,
        Value::Float(x) => {
            let x = c.run("scalar_tensor", [x.into()])?;
            c.run("signbit", [x])?
        }
        _ => return Err(c.unsupported("this operand")),
    };
    let size = c.run("abs", [c.given("self")])?;
    let other = c.run("neg", [size.clone()])?;
    c.run("where", [negative, other, size])
}

/// x·y/(max(|x|, ε)·max(|y|, ε)).
fn cosine_similarity(c: &mut Call) -> Result<Value> {
    let axis = Value::ints(&[c.int("dim", 1)?]);
    let eps = c.float("eps", 1e-8)?;
    let mut unit = Vec::with_capacity(2);
    for name in ["x1", "x2"] {
        let norm = c.run(
            "linalg_vector_norm",
            [c.given(name), 2.0.into(), axis.clone(), true.into()],
        )?;
        let norm = c.run("clamp_min", [norm, eps.into()])?;
        unit.push(c.run("div", [c.given(name), norm])?);
    }
    let product = c.run("mul", [unit[0].clone(), unit[1].clone()])?;
    c.run("sum", [product, axis])
}

fn pairwise_distance(c: &mut Call) -> Result<Value> {
    let off = c.run("sub", [c.given("x1"), c.given("x2")])?;
    let off = c.run("add", [off, c.float("eps", 1e-6)?.into()])?;
    let p = c.float("p", 2.0)?;
    let axes = Value::ints(&[-1]);
    c.run(
        "linalg_vector_norm",
        [off, p.into(), axes, c.given("keepdim")],
    )
}

fn count_nonzero(c: &mut Call) -> Result<Value> {
    let set = c.run("ne", [c.given("self"), 0.into()])?;
    c.run("sum", [set, c.given("dim")])
}

/// The cross product along an axis of size 3.
fn cross(c: &mut Call) -> Result<Value> {
    let axis = match c.get("dim") {
        Some(_) => c.int("dim", -1)?,
        None if c.name == "cross" => {
            let dims = sizes(c, "self")?;
            let three = dims.iter().position(|d| *d == Dim::from(3));
            three.ok_or_else(|| c.fail("shape", "no axis has size 3"))? as i64
        }
        None => -1,
    };
    let rolled = |c: &mut Call, name: &str, by: i64| {
        let shifts = [by, axis].map(|n| Value::ints(&[n]));
        let [by, axis] = shifts;
        c.run("roll", [c.given(name), by, axis])
    };
    let (a1, b2) = (rolled(c, "self", -1)?, rolled(c, "other", -2)?);
    let (a2, b1) = (rolled(c, "self", -2)?, rolled(c, "other", -1)?);
    let plus = c.run("mul", [a1, b2])?;
    let minus = c.run("mul", [a2, b1])?;
    c.run("sub", [plus, minus])
}

/// A power in float64.
fn float_power(c: &mut Call) -> Result<Value> {
    let wide = |c: &mut Call, name: &str| match c.given(name) {
        Value::Tensor(t) => c.run("to", [t.into(), Value::DType(DType::F64)]),
        number => Ok(number),
    };
    let (x, p) = (wide(c, "self")?, wide(c, "exponent")?);
    c.run("pow", [x, p])
}

/// The larger or smaller one; where one is no number, the other.
fn extreme(c: &mut Call, name: &str) -> Result<Value> {
    let (a, b) = (c.given("self"), c.given("other"));
    let y = c.run(name, [a.clone(), b.clone()])?;
    let bare = c.run("isnan", [a.clone()])?;
    let y = c.run("where", [bare, b.clone(), y])?;
    let bare = c.run("isnan", [b])?;
    c.run("where", [bare, a, y])
}

fn hardshrink(c: &mut Call) -> Result<Value> {
    let size = c.run("abs", [c.given("self")])?;
    let kept = c.run("gt", [size, c.float("lambd", 0.5)?.into()])?;
    c.run("where", [kept, c.given("self"), 0.0.into()])
}

fn softshrink(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let limit = c.float("lambd", 0.5)?;
    let (above, below) = (
        c.run("gt", [x.clone(), limit.into()])?,
        c.run("lt", [x.clone(), (-limit).into()])?,
    );
    let less = c.run("sub", [x.clone(), limit.into()])?;
    let more = c.run("add", [x, limit.into()])?;
    let y = c.run("where", [below, more, 0.0.into()])?;
    c.run("where", [above, less, y])
}

fn heaviside(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let above = c.run("gt", [x.clone(), 0.into()])?;
    let dtype = c.low.dtype(c.tensor("self")?);
    let step = c.run("to", [above, Value::DType(dtype)])?;
    let zero = c.run("eq", [x, 0.into()])?;
    c.run("where", [zero, c.given("values"), step])
}

fn hypot(c: &mut Call) -> Result<Value> {
    let mut squares = Vec::with_capacity(2);
    for name in ["self", "other"] {
        squares.push(c.run("mul", [c.given(name), c.given(name)])?);
    }
    let sum = c.run("add", [squares[0].clone(), squares[1].clone()])?;
    c.run("sqrt", [sum])
}

/// The product over the last axes of both.
fn inner(c: &mut Call) -> Result<Value> {
    let (a, b) = (sizes(c, "self")?.len(), sizes(c, "other")?.len());
    if a == 0 || b == 0 {
        return c.run("mul", [c.given("self"), c.given("other")]);
    }
    let last = Value::ints(&[-1]);
    c.run(
        "tensordot",
        [c.given("self"), c.given("other"), last.clone(), last],
    )
}

fn isclose(c: &mut Call) -> Result<Value> {
    let off = subtracted(c)?;
    let off = c.run("abs", [off])?;
    let size = c.run("abs", [c.given("other")])?;
    let allowed = c.run("mul", [size, c.float("rtol", 1e-5)?.into()])?;
    let allowed = c.run("add", [allowed, c.float("atol", 1e-8)?.into()])?;
    let near = c.run("le", [off.clone(), allowed])?;
    // An infinity is close to itself alone.
    let finite = c.run("isfinite", [off])?;
    let near = c.run("logical_and", [near, finite])?;
    let same = c.run("eq", [c.given("self"), c.given("other")])?;
    let mut close = c.run("logical_or", [near, same])?;
    if c.bool("equal_nan", false)? {
        let a = c.run("isnan", [c.given("self")])?;
        let b = c.run("isnan", [c.given("other")])?;
        let both = c.run("logical_and", [a, b])?;
        close = c.run("logical_or", [close, both])?;
    }
    Ok(close)
}

fn isin(c: &mut Call) -> Result<Value> {
    let each = c.run("unsqueeze", [c.given("elements"), (-1).into()])?;
    let tests = c.run("flatten", [c.given("test_elements")])?;
    let hits = c.run("eq", [each, tests])?;
    let found = c.run("any", [hits, Value::ints(&[-1])])?;
    match c.bool("invert", false)? {
        true => c.run("logical_not", [found]),
        false => Ok(found),
    }
}

/// The k-th smallest along an axis and where it is.
fn kth(c: &mut Call, k: i64) -> Result<Value> {
    let axis = c.int("dim", -1)?;
    if k < 1 {
        return Err(c.fail("shape", format!("there is no element number {k}")));
    }
    let least = c.run(
        "topk",
        [
            c.given("self"),
            k.into(),
            axis.into(),
            false.into(),
            true.into(),
        ],
    )?;
    let keep = c.bool("keepdim", false)?;
    let mut results = Vec::with_capacity(2);
    for part in least.listed().to_vec() {
        let last = c.run("narrow", [part, axis.into(), (k - 1).into(), 1.into()])?;
        results.push(match keep {
            true => last,
            false => c.run("squeeze", [last, Value::ints(&[axis])])?,
        });
    }
    Ok(Value::Tuple(results))
}

/// The lower one of the two in the middle.
fn median(c: &mut Call) -> Result<Value> {
    let dims = sizes(c, "self")?;
    let axis = c.axis("dim", -1, dims.len())?;
    let size = dims.get(axis).map_or(Some(1), Dim::as_const);
    let size = size.ok_or_else(|| c.fail("shape", "the size along the axis is not known"))?;
    kth(c, size - size / 2)
}

/// log(eᵃ + eᵇ).
fn logaddexp(c: &mut Call) -> Result<Value> {
    let (a, b) = (c.given("self"), c.given("other"));
    let top = c.run("maximum", [a.clone(), b.clone()])?;
    let bare = c.run("isinf", [top.clone()])?;
    let top = c.run("where", [bare, 0.0.into(), top])?;
    let top = c.run("detach", [top])?;
    let mut powers = Vec::with_capacity(2);
    for x in [a, b] {
        let off = c.run("sub", [x, top.clone()])?;
        powers.push(c.run("exp", [off])?);
    }
    let sum = c.run("add", [powers[0].clone(), powers[1].clone()])?;
    let log = c.run("log", [sum])?;
    c.run("add", [log, top])
}

fn logit(c: &mut Call) -> Result<Value> {
    let x = match c.has("eps") {
        true => {
            let eps = c.float("eps", 0.0)?;
            c.run("clamp", [c.given("self"), eps.into(), (1.0 - eps).into()])?
        }
        false => c.given("self"),
    };
    let rest = c.run("rsub", [x.clone(), 1.0.into()])?;
    let odds = c.run("div", [x, rest])?;
    c.run("log", [odds])
}

fn nan_to_num(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let dtype = c.low.dtype(c.tensor("self")?);
    if !dtype.is_float() {
        return Ok(x);
    }
    let most = match dtype {
        DType::F16 => 65504.0,
        DType::BF16 => f64::from(f32::from_bits(0x7f7f_0000)),
        DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
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

fn nansum(c: &mut Call) -> Result<Value> {
    let bare = c.run("isnan", [c.given("self")])?;
    let x = c.run("masked_fill", [c.given("self"), bare, 0.into()])?;
    let x = match c.opt_dtype("dtype")? {
        Some(dtype) => c.run("to", [x, Value::DType(dtype)])?,
        None => x,
    };
    c.run("sum", [x, c.given("dim"), c.given("keepdim")])
}

/// Evaluated, the slope is the middle one.
fn rrelu(c: &mut Call) -> Result<Value> {
    if c.bool("training", false)? {
        return Err(c
            .unsupported("training")
            .help("export the model in evaluation mode"));
    }
    let slope = (c.float("lower", 0.125)? + c.float("upper", 1.0 / 3.0)?) / 2.0;
    c.run("leaky_relu", [c.given("self"), slope.into()])
}

/// Whether the sign is set; that of a zero shows in its reciprocal.
fn signbit(c: &mut Call) -> Result<Value> {
    let x = c.given("self");
    let below = c.run("lt", [x.clone(), 0.into()])?;
    if !c.low.dtype(c.tensor("self")?).is_float() {
        return Ok(below);
    }
    let turned = c.run("reciprocal", [x])?;
    let turned = c.run("lt", [turned, 0.into()])?;
    c.run("logical_or", [below, turned])
}

/// sin(πx)/(πx), and 1 at 0.
fn sinc(c: &mut Call) -> Result<Value> {
    let x = times(c, PI)?;
    let zero = c.run("eq", [x.clone(), 0.into()])?;
    let safe = c.run("where", [zero.clone(), 1.0.into(), x])?;
    let y = c.run("sin", [safe.clone()])?;
    let y = c.run("div", [y, safe])?;
    c.run("where", [zero, 1.0.into(), y])
}

fn with_mean(c: &mut Call, spread: &str) -> Result<Value> {
    let (x, axes) = (c.given("self"), c.given("dim"));
    let kwargs: Vec<(&str, Value)> = ["unbiased", "correction", "keepdim"]
        .into_iter()
        .filter_map(|name| Some((name, c.get(name)?.clone())))
        .collect();
    let mut all = vec![x.clone()];
    if axes != Value::None {
        all.push(axes.clone());
    }
    let spread = super::vocabulary::run(c.low, spread, all, kwargs)?;
    let mean = c.run("mean", [x, axes, c.given("keepdim")])?;
    Ok(Value::Tuple(vec![spread, mean]))
}

/// x·log(y), and 0 where x is 0.
fn xlogy(c: &mut Call) -> Result<Value> {
    let (x, y) = (c.given("self"), c.given("other"));
    let zero = c.run("eq", [x.clone(), 0.into()])?;
    let bare = match &y {
        Value::Tensor(_) => c.run("isnan", [y.clone()])?,
        _ => c.run("ne", [x.clone(), x.clone()])?,
    };
    let known = c.run("logical_not", [bare])?;
    let nothing = c.run("logical_and", [zero, known])?;
    let safe = c.run("where", [nothing.clone(), 1.0.into(), y])?;
    let log = c.run("log", [safe])?;
    let product = c.run("mul", [x, log])?;
    c.run("where", [nothing, 0.0.into(), product])
}
