//! Activation functions, softmax, and dropout.

use super::Value;
use super::pointwise::{float_self, unary_float};
use super::signature::{Call, Op};
use ckpt_passes::ir::{Attrs, DType, Tensor, Ty, ValueId};
use ckpt_passes::ops::random::SEED;
use ckpt_passes::ops::*;
use ckpt_passes::{Error, Result};

pub const OPS: &[Op] = &[
    ("celu(self: t, alpha: s?)", celu),
    ("dropout(input: t, p: f, train: b)", dropout),
    ("elu(self: t, alpha: s?, scale: s?, input_scale: s?)", elu),
    ("gelu(self: t, *, approximate: S?)", gelu),
    ("glu(self: t, dim: i?)", glu),
    ("hardsigmoid(self: t)", hard_sigmoid),
    ("hardswish(self: t)", |c| {
        unary_float(c, &piecewise::HARD_SWISH)
    }),
    ("hardtanh(self: t, min_val: s?, max_val: s?)", hard_tanh),
    ("leaky_relu(self: t, negative_slope: s?)", leaky_relu),
    ("log_sigmoid(self: t)", log_sigmoid),
    ("log_softmax(self: t, dim: i, dtype: d?)", |c| {
        softmax(c, &softmax::LOG_SOFTMAX)
    }),
    ("_log_softmax(self: t, dim: i, half_to_float: b)", |c| {
        softmax(c, &softmax::LOG_SOFTMAX)
    }),
    ("mish(self: t)", |c| unary_float(c, &piecewise::MISH)),
    ("prelu(self: t, weight: t)", prelu),
    ("relu(self: t)", relu),
    ("relu6(self: t)", |c| clipped(c, 0.0, 6.0)),
    ("selu(self: t)", selu),
    ("sigmoid(self: t)", |c| unary_float(c, &activation::SIGMOID)),
    ("silu(self: t)", silu),
    ("softmax(self: t, dim: i, dtype: d?)", |c| {
        softmax(c, &softmax::SOFTMAX)
    }),
    ("_softmax(self: t, dim: i, half_to_float: b)", |c| {
        softmax(c, &softmax::SOFTMAX)
    }),
    ("softplus(self: t, beta: s?, threshold: s?)", softplus),
];

fn relu(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    if c.low.b.ty(x).dtype.is_float() {
        return unary_float(c, &activation::RELU);
    }
    let zero = c.low.b.scalar(c.low.b.ty(x).dtype, 0.0);
    let y = c.low.emit(&extreme::MAX, &[x, zero])?;
    c.made(y)
}

/// x·σ(x), as exporters write it.
fn silu(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let gate = c.low.emit(&activation::SIGMOID, &[x])?;
    let y = c.low.b.mul(x, gate)?;
    c.made(y)
}

fn gelu(c: &mut Call) -> Result<Value> {
    let form = c.str("approximate", "none")?.to_string();
    if form != "none" && form != "tanh" {
        return Err(c.unsupported(format!("`approximate` {form}")));
    }
    let x = float_self(c)?;
    let attrs = Attrs::new().with("approximate", form.as_str());
    let y = c.low.b.emit(&activation::GELU, &[x], attrs)?;
    c.made(y)
}

fn with_alpha(c: &mut Call, op: &'static ckpt_passes::ir::OpDef, alpha: f64) -> Result<ValueId> {
    let x = float_self(c)?;
    let attrs = Attrs::new().with("alpha", alpha as f32);
    c.low.b.emit(op, &[x], attrs)
}

fn leaky_relu(c: &mut Call) -> Result<Value> {
    let slope = c.float("negative_slope", 0.01)?;
    let y = with_alpha(c, &piecewise::LEAKY_RELU, slope)?;
    c.made(y)
}

fn elu(c: &mut Call) -> Result<Value> {
    let (scale, slope) = (c.float("scale", 1.0)?, c.float("input_scale", 1.0)?);
    let alpha = c.float("alpha", 1.0)?;
    if (scale, slope) != (1.0, 1.0) {
        return scaled_elu(c, alpha, scale, slope);
    }
    let y = with_alpha(c, &piecewise::ELU, alpha)?;
    c.made(y)
}

/// scale·x above 0 and scale·α·(exp(slope·x) − 1) below.
fn scaled_elu(c: &mut Call, alpha: f64, scale: f64, slope: f64) -> Result<Value> {
    let x = c.given("self");
    let above = c.run("gt", [x.clone(), 0.into()])?;
    let low = c.run("clamp_max", [x.clone(), 0.into()])?;
    let low = c.run("mul", [low, slope.into()])?;
    let low = c.run("elu", [low])?;
    let low = c.run("mul", [low, (alpha * scale).into()])?;
    let high = c.run("mul", [x, scale.into()])?;
    c.run("where", [above, high, low])
}

/// Scale and alpha of Klambauer et al. 2017, arXiv 1706.02515.
fn selu(c: &mut Call) -> Result<Value> {
    let y = with_alpha(c, &piecewise::ELU, 1.673_263_242_354_377_2)?;
    let scale = c.low.b.scalar(c.low.b.ty(y).dtype, 1.050_700_987_355_480_5);
    let y = c.low.b.mul(y, scale)?;
    c.made(y)
}

/// α·ELU(x/α) with the alpha of ELU 1.
fn celu(c: &mut Call) -> Result<Value> {
    let alpha = c.float("alpha", 1.0)?;
    let x = float_self(c)?;
    let alpha = c.low.b.scalar(c.low.b.ty(x).dtype, alpha);
    let x = c.low.b.div(x, alpha)?;
    let attrs = Attrs::new().with("alpha", 1.0f32);
    let y = c.low.b.emit(&piecewise::ELU, &[x], attrs)?;
    let y = c.low.b.mul(y, alpha)?;
    c.made(y)
}

fn prelu(c: &mut Call) -> Result<Value> {
    let (x, mut slope) = (c.value("self")?, c.value("weight")?);
    let rank = c.low.b.rank(x);
    if rank > 2 && c.low.b.rank(slope) == 1 {
        // One slope a channel, the axis behind the batch.
        let axes: Vec<i64> = (1..rank as i64 - 1).collect();
        slope = c.low.apply_unsqueeze(slope, &axes)?;
    }
    let y = c.low.emit(&piecewise::PRELU, &[x, slope])?;
    c.made(y)
}

fn hard_sigmoid(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let attrs = Attrs::new()
        .with("alpha", 1.0f32 / 6.0)
        .with("beta", 0.5f32);
    let y = c.low.b.emit(&piecewise::HARD_SIGMOID, &[x], attrs)?;
    c.made(y)
}

fn clipped(c: &mut Call, least: f64, most: f64) -> Result<Value> {
    let x = c.value("self")?;
    let dtype = c.low.b.ty(x).dtype;
    let (least, most) = (c.low.b.scalar(dtype, least), c.low.b.scalar(dtype, most));
    let y = c.low.emit(&extreme::CLIP, &[x, least, most])?;
    c.made(y)
}

fn hard_tanh(c: &mut Call) -> Result<Value> {
    let (least, most) = (c.float("min_val", -1.0)?, c.float("max_val", 1.0)?);
    clipped(c, least, most)
}

/// log(1 + e^(βx))/β, and x itself where βx is above the threshold.
fn softplus(c: &mut Call) -> Result<Value> {
    let (beta, threshold) = (c.float("beta", 1.0)?, c.float("threshold", 20.0)?);
    let x = float_self(c)?;
    let dtype = c.low.b.ty(x).dtype;
    let factor = c.low.b.scalar(dtype, beta);
    let scaled = c.low.b.mul(x, factor)?;
    let soft = c.low.emit(&activation::SOFTPLUS, &[scaled])?;
    let soft = c.low.b.div(soft, factor)?;
    let limit = c.low.b.scalar(dtype, threshold);
    let above = c.low.emit(&logic::GREATER, &[scaled, limit])?;
    let y = c.low.emit(&logic::WHERE, &[above, x, soft])?;
    c.made(y)
}

/// −softplus(−x).
fn log_sigmoid(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let x = c.low.b.neg(x)?;
    let y = c.low.emit(&activation::SOFTPLUS, &[x])?;
    let y = c.low.b.neg(y)?;
    c.made(y)
}

fn glu(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let axis = c.axis("dim", -1, c.low.b.rank(x))?;
    let attrs = Attrs::new()
        .with("axis", axis as i64)
        .with("num_outputs", 2);
    let halves = c.low.b.emit_n(&concat::SPLIT, vec![Some(x)], attrs, 2)?;
    let gate = c.low.emit(&activation::SIGMOID, &[halves[1]])?;
    let y = c.low.b.mul(halves[0], gate)?;
    c.made(y)
}

fn softmax(c: &mut Call, op: &'static ckpt_passes::ir::OpDef) -> Result<Value> {
    let x = float_self(c)?;
    if c.bool("half_to_float", false)? {
        return Err(c.unsupported("`half_to_float`"));
    }
    let dtype = c.opt_dtype("dtype")?.unwrap_or(c.low.b.ty(x).dtype);
    let x = c.low.b.cast(x, dtype)?;
    let axis = c.axis("dim", -1, c.low.b.rank(x))?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let y = c.low.b.emit(op, &[x], attrs)?;
    c.made(y)
}

fn dropout(c: &mut Call) -> Result<Value> {
    let p = c.float("p", 0.5)?;
    if !c.bool("train", false)? || p == 0.0 {
        return Ok(Value::Tensor(c.tensor("input")?));
    }
    let x = c.value("input")?;
    let y = dropped(c, x, p)?;
    c.made(y)
}

/// Elements of `x` are 0 with probability `p`, else divided by 1 − p; a stream of its own decides which.
pub(super) fn dropped(c: &mut Call, x: ValueId, p: f64) -> Result<ValueId> {
    if !(0.0..=1.0).contains(&p) {
        return Err(c.fail("op", format!("a probability of {p}")));
    }
    if p == 1.0 {
        return c.low.b.filled_like(x, 0.0);
    }
    let ratio = c.low.b.scalar(DType::F32, p);
    let seed = seed(c)?;
    let mut name = format!("{}.stream", c.low.b.prefix);
    if c.low.b.graph.has_value_name(&name) {
        name = format!("{name}.{}", c.low.b.graph.value_bound());
    }
    let number = Tensor::int(random::stream(&name));
    let stream = c.low.b.graph.add_init(&name, number);
    c.low.b.contents.read_init(c.low.b.graph, stream);
    c.low.emit(&random::DROPOUT, &[x, ratio, seed, stream])
}

/// The seed that comes with every step; the graph gets an input for it with its first random op.
fn seed(c: &mut Call) -> Result<ValueId> {
    if let Some(seed) = c.low.seed {
        return Ok(seed);
    }
    if c.low.b.graph.has_value_name(SEED) {
        return Err(Error::model(
            "name",
            format!("`{SEED}` is taken, and random ops need it for the seed"),
        )
        .help("rename it in the model"));
    }
    let seed = c.low.b.graph.add_input(SEED, Some(Ty::scalar(DType::I64)));
    c.low.seed = Some(seed);
    Ok(seed)
}
