//! Activation functions, softmax, and dropout.

use super::super::value::Value;
use super::pointwise::float_self;
use super::signature::{Call, Formula, Op};
use crate::frontend::lower::by_channel;
use ckpt_passes::ir::{Attrs, DType, Tensor, Ty, ValueId};
use ckpt_passes::ops::random::SEED;
use ckpt_passes::ops::{EmitExt, activation, piecewise, random};
use ckpt_passes::{Error, Result};

pub const FORMULAS: &[Formula] = &[
    // α·ELU(x/α), where the ELU has an alpha of 1.
    "celu(self: t, alpha: s = 1.0) => x = floating(self); a = like(alpha, x); Mul(Elu(Div(x, a), alpha=1.0), a)",
    // scale·x above 0 and scale·α·(exp(input_scale·x) − 1) below.
    "elu(self: t, alpha: f = 1.0, scale: f = 1.0, input_scale: f = 1.0) => \
     scale == 1.0 & input_scale == 1.0 ? Elu(floating(self), alpha=alpha) : \
     (factor = alpha * scale; above = self > 0; \
     low = elu(clamp_max(self, 0) * input_scale) * factor; where(above, self * scale, low))",
    "glu(self: t, dim: i = -1) => \
     x = floating(self); halves = Split(x, axis=axis(x, dim), num_outputs=2, results=2); \
     Mul(halves[0], Sigmoid(halves[1]))",
    "hardsigmoid(self: t) => HardSigmoid(floating(self), alpha=1.0 / 6.0, beta=0.5)",
    "hardswish(self: t) => HardSwish(floating(self))",
    "hardtanh(self: t, min_val: s = -1.0, max_val: s = 1.0) => Clip(self, min_val, max_val)",
    "leaky_relu(self: t, negative_slope: f = 0.01) => LeakyRelu(floating(self), alpha=negative_slope)",
    // −softplus(−x).
    "log_sigmoid(self: t) => Neg(Softplus(Neg(floating(self))))",
    "log_softmax(self: t, dim: i, dtype: d?); _log_softmax(self: t, dim: i, half_to_float: b) => \
     half_to_float ? unsupported('`half_to_float`') : \
     (x = in_type(floating(self), dtype); LogSoftmax(x, axis=axis(x, dim)))",
    "mish(self: t) => Mish(floating(self))",
    "relu(self: t) => is_float(self) ? Relu(self) : Max(self, 0.0)",
    "relu6(self: t) => Clip(self, 0.0, 6.0)",
    // The scale and alpha of Klambauer et al. 2017, arXiv 1706.02515.
    "selu(self: t) => Mul(Elu(floating(self), alpha=1.6732632423543772), 1.0507009873554805)",
    "sigmoid(self: t) => Sigmoid(floating(self))",
    // x·σ(x), as exporters write it.
    "silu(self: t) => x = floating(self); Mul(x, Sigmoid(x))",
    "softmax(self: t, dim: i, dtype: d?); _softmax(self: t, dim: i, half_to_float: b) => \
     half_to_float ? unsupported('`half_to_float`') : \
     (x = in_type(floating(self), dtype); Softmax(x, axis=axis(x, dim)))",
    // log(1 + e^(βx))/β, and x itself where βx is above the threshold.
    "softplus(self: t, beta: s = 1.0, threshold: s = 20.0) => \
     x = floating(self); b = like(beta, x); scaled = Mul(x, b); soft = Div(Softplus(scaled), b); \
     Where(Greater(scaled, threshold), x, soft)",
];

pub const OPS: &[Op] = &[
    ("dropout(input: t, p: f, train: b)", dropout),
    ("gelu(self: t, *, approximate: S?)", gelu),
    ("prelu(self: t, weight: t)", prelu),
];

fn gelu(c: &mut Call) -> Result<Value> {
    let form = c.str("approximate", "none")?.to_string();
    if form != "none" && form != "tanh" {
        return Err(c.unsupported(format!("`approximate` {form}")));
    }
    let x = float_self(c)?;
    let attrs = Attrs::new().with("approximate", form.as_str());
    c.result_with(&activation::GELU, &[x], attrs)
}

fn prelu(c: &mut Call) -> Result<Value> {
    let (x, mut slope) = (c.value("self")?, c.value("weight")?);
    if c.rank(x) > 2 && c.rank(slope) == 1 {
        slope = by_channel(&mut c.low.b, slope, x)?;
    }
    c.result(&piecewise::PRELU, &[x, slope])
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
