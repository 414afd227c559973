//! Activation functions, softmax, and dropout.

use super::super::value::Value;
use super::pointwise::{float_self, unary_float};
use super::signature::{Call, Op, along};
use ckpt_passes::ir::{Attrs, DType, OpDef, Tensor, Ty, ValueId};
use ckpt_passes::ops::random::SEED;
use ckpt_passes::ops::{EmitExt, activation, arith, extreme, logic, piecewise, random, softmax};
use ckpt_passes::{Error, Result};

pub const OPS: &[Op] = &[
    ("celu(self: t, alpha: s?)", celu),
    ("dropout(input: t, p: f, train: b)", dropout),
    ("elu(self: t, alpha: f?, scale: f?, input_scale: f?)", elu),
    ("gelu(self: t, *, approximate: S?)", gelu),
    ("glu(self: t, dim: i?)", glu),
    ("hardsigmoid(self: t)", hard_sigmoid),
    ("hardswish(self: t)", |c| {
        unary_float(c, &piecewise::HARD_SWISH)
    }),
    ("hardtanh(self: t, min_val: s?, max_val: s?)", hard_tanh),
    ("leaky_relu(self: t, negative_slope: s?)", leaky_relu),
    ("log_sigmoid(self: t)", log_sigmoid),
    ("mish(self: t)", |c| unary_float(c, &piecewise::MISH)),
    ("prelu(self: t, weight: t)", prelu),
    ("relu(self: t)", relu),
    ("relu6(self: t)", |c| clipped(c, 0.0, 6.0)),
    ("selu(self: t)", selu),
    ("sigmoid(self: t)", |c| unary_float(c, &activation::SIGMOID)),
    ("silu(self: t)", silu),
    (
        "{softmax,log_softmax}(self: t, dim: i, dtype: d?); \
         {_softmax,_log_softmax}(self: t, dim: i, half_to_float: b)",
        softmax,
    ),
    ("softplus(self: t, beta: s?, threshold: s?)", softplus),
];

fn relu(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    if c.dtype(x).is_float() {
        return unary_float(c, &activation::RELU);
    }
    let zero = c.scalar_like(x, 0.0);
    c.result(&extreme::MAX, &[x, zero])
}

/// Lowers x·σ(x), as exporters write it.
fn silu(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let gate = c.emit(&activation::SIGMOID, &[x])?;
    c.result(&arith::MUL, &[x, gate])
}

fn gelu(c: &mut Call) -> Result<Value> {
    let form = c.str("approximate", "none")?.to_string();
    if form != "none" && form != "tanh" {
        return Err(c.unsupported(format!("`approximate` {form}")));
    }
    let x = float_self(c)?;
    let attrs = Attrs::new().with("approximate", form.as_str());
    c.result_with(&activation::GELU, &[x], attrs)
}

/// Emits an activation with a slope `alpha`.
fn with_alpha(c: &mut Call, op: &'static OpDef, alpha: f64) -> Result<ValueId> {
    let x = float_self(c)?;
    c.emit_with(op, &[x], Attrs::new().with("alpha", alpha as f32))
}

fn leaky_relu(c: &mut Call) -> Result<Value> {
    let slope = c.float("negative_slope", 0.01)?;
    let y = with_alpha(c, &piecewise::LEAKY_RELU, slope)?;
    c.made(y)
}

/// Lowers scale·x above 0 and scale·α·(exp(input_scale·x) − 1) below.
fn elu(c: &mut Call) -> Result<Value> {
    let (scale, slope) = (c.float("scale", 1.0)?, c.float("input_scale", 1.0)?);
    let alpha = c.float("alpha", 1.0)?;
    if (scale, slope) != (1.0, 1.0) {
        return c.formula(
            &[
                ("slope", slope.into()),
                ("factor", (alpha * scale).into()),
                ("scale", scale.into()),
            ],
            "above = self > 0; low = elu(clamp_max(self, 0) * slope) * factor; where(above, self * scale, low)",
        );
    }
    let y = with_alpha(c, &piecewise::ELU, alpha)?;
    c.made(y)
}

/// Lowers SELU with the scale and alpha of Klambauer et al. 2017, arXiv 1706.02515.
fn selu(c: &mut Call) -> Result<Value> {
    let y = with_alpha(c, &piecewise::ELU, 1.673_263_242_354_377_2)?;
    let scale = c.scalar_like(y, 1.050_700_987_355_480_5);
    c.result(&arith::MUL, &[y, scale])
}

/// Lowers α·ELU(x/α), where the ELU has an alpha of 1.
fn celu(c: &mut Call) -> Result<Value> {
    let alpha = c.float("alpha", 1.0)?;
    let x = float_self(c)?;
    let alpha = c.scalar_like(x, alpha);
    let x = c.low.b.div(x, alpha)?;
    let attrs = Attrs::new().with("alpha", 1.0f32);
    let y = c.emit_with(&piecewise::ELU, &[x], attrs)?;
    c.result(&arith::MUL, &[y, alpha])
}

fn prelu(c: &mut Call) -> Result<Value> {
    let (x, mut slope) = (c.value("self")?, c.value("weight")?);
    let rank = c.rank(x);
    if rank > 2 && c.rank(slope) == 1 {
        // Each channel has a slope. The axis of channels follows the batch.
        let axes: Vec<i64> = (1..rank as i64 - 1).collect();
        slope = c.low.unsqueeze(slope, &axes)?;
    }
    c.result(&piecewise::PRELU, &[x, slope])
}

fn hard_sigmoid(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let attrs = Attrs::new()
        .with("alpha", 1.0f32 / 6.0)
        .with("beta", 0.5f32);
    c.result_with(&piecewise::HARD_SIGMOID, &[x], attrs)
}

fn clipped(c: &mut Call, least: f64, most: f64) -> Result<Value> {
    let x = c.value("self")?;
    let (least, most) = (c.scalar_like(x, least), c.scalar_like(x, most));
    c.result(&extreme::CLIP, &[x, least, most])
}

fn hard_tanh(c: &mut Call) -> Result<Value> {
    let (least, most) = (c.float("min_val", -1.0)?, c.float("max_val", 1.0)?);
    clipped(c, least, most)
}

/// Lowers log(1 + e^(βx))/β, and x itself where βx is above the threshold.
fn softplus(c: &mut Call) -> Result<Value> {
    let (beta, threshold) = (c.float("beta", 1.0)?, c.float("threshold", 20.0)?);
    let x = float_self(c)?;
    let factor = c.scalar_like(x, beta);
    let scaled = c.low.b.mul(x, factor)?;
    let soft = c.emit(&activation::SOFTPLUS, &[scaled])?;
    let soft = c.low.b.div(soft, factor)?;
    let limit = c.scalar_like(x, threshold);
    let above = c.emit(&logic::GREATER, &[scaled, limit])?;
    c.result(&logic::WHERE, &[above, x, soft])
}

/// Lowers −softplus(−x).
fn log_sigmoid(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let x = c.low.b.neg(x)?;
    let y = c.emit(&activation::SOFTPLUS, &[x])?;
    c.result(&arith::NEG, &[y])
}

fn glu(c: &mut Call) -> Result<Value> {
    let x = float_self(c)?;
    let axis = c.axis("dim", -1, c.rank(x))?;
    let halves = c.split(x, axis as i64, 2)?;
    let gate = c.emit(&activation::SIGMOID, &[halves[1]])?;
    c.result(&arith::MUL, &[halves[0], gate])
}

fn softmax(c: &mut Call) -> Result<Value> {
    let op = match c.name.contains("log") {
        true => &softmax::LOG_SOFTMAX,
        false => &softmax::SOFTMAX,
    };
    let x = float_self(c)?;
    if c.bool("half_to_float", false)? {
        return Err(c.unsupported("`half_to_float`"));
    }
    let dtype = c.dtype_or(c.dtype(x))?;
    let x = c.low.b.cast(x, dtype)?;
    let axis = c.axis("dim", -1, c.rank(x))?;
    c.result_with(op, &[x], along(axis))
}

fn dropout(c: &mut Call) -> Result<Value> {
    let p = c.float("p", 0.5)?;
    if !c.bool("train", false)? || p == 0.0 {
        return Ok(c.given("input"));
    }
    let x = c.value("input")?;
    let y = dropped(c, x, p)?;
    c.made(y)
}

/// Sets elements of `x` to 0 with probability `p` and divides the others by 1 − p. Each call draws from its own stream.
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
    c.emit(&random::DROPOUT, &[x, ratio, seed, stream])
}

/// Returns the graph input with the seed of a step. The first random op declares it.
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
