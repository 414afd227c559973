//! Ops of a backward pass, which a program holds that takes gradients itself: forces as gradients of an energy, penalties
//! on gradients. Most are rows that gradient rules emit, so that they are differentiated once more like those.
//!
//! What the forward saved for them and ours makes itself (log-sum-exps, results that only stand for their operand) is not
//! looked at. Statistics of a norm are results of its node from here on.

use super::Value;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, Dim, NodeId, Same, ValueId};
use ckpt_passes::ops::*;

pub const OPS: &[Op] = &[
    (
        "_fused_rms_norm_backward(grad_out: t, input: t, normalized_shape: I, rstd: _, weight: t?, output_mask: _)",
        rms_norm,
    ),
    (
        "_log_softmax_backward_data(grad_output: t, output: t, dim: i, input_dtype: d)",
        |c| softmax(c, &softmax::LOG_SOFTMAX_GRAD),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward(grad_out: t, query: t, key: t, value: t, out: t, logsumexp: _, dropout_p: f, is_causal: b, *, attn_mask: t?, scale: f?)",
        attention,
    ),
    (
        "_softmax_backward_data(grad_output: t, output: t, dim: i, input_dtype: d)",
        |c| softmax(c, &softmax::SOFTMAX_GRAD),
    ),
    (
        "elu_backward(grad_output: t, alpha: f, scale: f, input_scale: f, is_result: b, self_or_result: t)",
        elu,
    ),
    (
        "embedding_dense_backward(grad_output: t, indices: t, num_weights: i, padding_idx: i, scale_grad_by_freq: b)",
        embedding,
    ),
    (
        "gelu_backward(grad_output: t, self: t, *, approximate: S?)",
        |c| {
            let form = c.str("approximate", "none")?.to_string();
            let attrs = Attrs::new().with("approximate", form.as_str());
            pointwise(c, &activation::GELU_GRAD, "self", attrs)
        },
    ),
    ("hardswish_backward(grad_output: t, self: t)", |c| {
        pointwise(c, &piecewise::HARD_SWISH_GRAD, "self", Attrs::new())
    }),
    (
        "leaky_relu_backward(grad_output: t, self: t, negative_slope: f, self_is_result: b)",
        |c| {
            let slope = c.float("negative_slope", 0.01)? as f32;
            let attrs = Attrs::new().with("alpha", slope);
            pointwise(c, &piecewise::LEAKY_RELU_GRAD, "self", attrs)
        },
    ),
    ("mish_backward(grad_output: t, self: t)", |c| {
        pointwise(c, &piecewise::MISH_GRAD, "self", Attrs::new())
    }),
    (
        "mse_loss_backward(grad_output: t, self: t, target: t, reduction: i)",
        squares,
    ),
    (
        "native_layer_norm_backward(grad_out: t, input: t, normalized_shape: I, mean: _, rstd: _, weight: t?, bias: t?, output_mask: _)",
        layer_norm,
    ),
    (
        "nll_loss_backward(grad_output: t, self: t, target: t, weight: t?, reduction: i, ignore_index: i, total_weight: _)",
        labelled,
    ),
    (
        "select_backward(grad_output: t, input_sizes: I, dim: i, index: i)",
        |c| placed(c, "select_scatter", &["dim", "index"]),
    ),
    ("sigmoid_backward(grad_output: t, output: t)", |c| {
        pointwise(c, &activation::SIGMOID_GRAD, "output", Attrs::new())
    }),
    ("silu_backward(grad_output: t, self: t)", |c| {
        pointwise(c, &gated::SILU_GRAD, "self", Attrs::new())
    }),
    (
        "slice_backward(grad_output: t, input_sizes: I, dim: i, start: i, end: i, step: i)",
        |c| placed(c, "slice_scatter", &["dim", "start", "end", "step"]),
    ),
    (
        "softplus_backward(grad_output: t, self: t, beta: f, threshold: f)",
        |c| {
            let inner = c.run("mul", [c.given("self"), c.given("beta")])?;
            let slope = c.run("sigmoid", [inner.clone()])?;
            let curved = c.run("mul", [c.given("grad_output"), slope])?;
            let linear = c.run("gt", [inner, c.given("threshold")])?;
            c.run("where", [linear, c.given("grad_output"), curved])
        },
    ),
    ("tanh_backward(grad_output: t, output: t)", |c| {
        pointwise(c, &activation::TANH_GRAD, "output", Attrs::new())
    }),
    (
        "threshold_backward(grad_output: t, self: t, threshold: f)",
        |c| {
            if c.float("threshold", 0.0)? == 0.0 {
                return pointwise(c, &activation::RELU_GRAD, "self", Attrs::new());
            }
            let off = c.run("le", [c.given("self"), c.given("threshold")])?;
            c.run("masked_fill", [c.given("grad_output"), off, 0.into()])
        },
    ),
];

/// A row of what the forward read or made, and of what arrives.
fn pointwise(c: &mut Call, op: &'static OpDef, of: &str, attrs: Attrs) -> Result<Value> {
    let (x, dy) = (saved(c, of)?, c.value("grad_output")?);
    let dx = c.low.b.emit(op, &[x, dy], attrs)?;
    c.made(dx)
}

/// A tensor that the forward saved.
fn saved(c: &mut Call, name: &str) -> Result<ValueId> {
    let x = c.value(name)?;
    c.low.warn_of_detached(x);
    Ok(x)
}

fn softmax(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (y, dy) = (saved(c, "output")?, c.value("grad_output")?);
    let axis = c.axis("dim", -1, c.low.b.rank(y))?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let dx = c.low.b.emit(op, &[y, dy], attrs)?;
    let dx = match c.opt_dtype("input_dtype")? {
        Some(dtype) => c.low.b.cast(dx, dtype)?,
        None => dx,
    };
    c.made(dx)
}

/// Of the operand, or of the result y: there the slope below 0 is y + alpha.
fn elu(c: &mut Call) -> Result<Value> {
    if (c.float("scale", 1.0)?, c.float("input_scale", 1.0)?) != (1.0, 1.0) {
        return Err(c.unsupported("a scale"));
    }
    if !c.bool("is_result", false)? {
        let attrs = Attrs::new().with("alpha", c.float("alpha", 1.0)? as f32);
        return pointwise(c, &piecewise::ELU_GRAD, "self_or_result", attrs);
    }
    saved(c, "self_or_result")?;
    let (y, dy) = (c.given("self_or_result"), c.given("grad_output"));
    let slope = c.run("add", [y.clone(), c.given("alpha")])?;
    let below = c.run("mul", [dy.clone(), slope])?;
    let above = c.run("gt", [y, 0.into()])?;
    c.run("where", [above, dy, below])
}

/// `grad_output` where a view took its elements from, zeros elsewhere.
fn placed(c: &mut Call, scatter: &str, place: &[&str]) -> Result<Value> {
    let zeros = c.run(
        "new_zeros",
        [c.given("grad_output"), c.given("input_sizes")],
    )?;
    let mut args = vec![zeros, c.given("grad_output")];
    args.extend(place.iter().map(|name| c.given(name)));
    super::vocabulary::run(c.low, scatter, args, Vec::new())
}

/// What a padding row gets is dropped.
fn embedding(c: &mut Call) -> Result<Value> {
    if c.bool("scale_grad_by_freq", false)? {
        return Err(c.unsupported("`scale_grad_by_freq`"));
    }
    let padding = c.int("padding_idx", -1)?;
    let mut dy = c.value("grad_output")?;
    if padding >= 0 {
        let pad = c.run("eq", [c.given("indices"), padding.into()])?;
        let pad = c.run("unsqueeze", [pad, (-1).into()])?;
        let kept = c.run("masked_fill", [c.given("grad_output"), pad, 0.into()])?;
        dy = c.low.read(super::composed::id(c, &kept)?)?;
    }
    let indices = c.value("indices")?;
    let rank = c.low.b.rank(dy);
    let width = c.low.b.ty(dy).dims[rank - 1].clone();
    let shape = [c.dim("num_weights", 0)?, width];
    let shape = c.low.int_vector(&shape)?;
    let attrs = Attrs::new().with("axis", 0);
    let dx = c
        .low
        .b
        .emit(&index::GATHER_GRAD, &[shape, indices, dy], attrs)?;
    c.made(dx)
}

/// 2·(x − target), over the number of elements for a mean.
fn squares(c: &mut Call) -> Result<Value> {
    let off = c.run("sub", [c.given("self"), c.given("target")])?;
    let mut d = c.run("mul", [off, 2.0.into()])?;
    if c.int("reduction", 1)? == 1 {
        let dims = c.low.dims(c.tensor("self")?);
        let count = Value::Int(Dim::product(dims));
        d = c.run("div", [d, count])?;
    }
    c.run("mul", [d, c.given("grad_output")])
}

fn labelled(c: &mut Call) -> Result<Value> {
    let scores = c.value("self")?;
    if c.low.b.rank(scores) < 2 {
        return Err(c.unsupported("scores without a batch"));
    }
    let reduction = super::loss::reduction(c)?;
    let attrs = Attrs::new()
        .with("reduction", reduction)
        .with("ignore_index", c.int("ignore_index", -100)?);
    let mut ins = vec![
        Some(c.value("grad_output")?),
        Some(scores),
        Some(c.value("target")?),
    ];
    if let Some(weight) = c.opt_value("weight")? {
        ins.push(Some(weight));
    }
    let op = &ckpt_passes::ops::loss::NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD;
    let dx = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    c.made(dx)
}

/// Slots of the wanted gradients.
fn wanted(c: &Call) -> Result<Vec<i64>> {
    let Some(Value::List(mask) | Value::Tuple(mask)) = c.get("output_mask") else {
        return Err(c.unsupported("an `output_mask` that is no list"));
    };
    let on = mask
        .iter()
        .zip(0..)
        .filter(|(m, _)| **m == Value::Bool(true));
    Ok(on.map(|(_, slot)| slot).collect())
}

/// The node of `op` that normalised `x` over as many axes: it knows epsilon.
fn forward_of(c: &Call, op: &'static OpDef, x: ValueId, axes: i64) -> Result<NodeId> {
    let graph = &c.low.b.graph;
    let rank = c.low.b.rank(x) as i64;
    let fits = |id: &NodeId| {
        let node = graph.node(*id);
        let axis = node.attrs.opt_int("axis").unwrap_or(-1);
        node.op == op && node.ins[0] == Some(x) && axis.rem_euclid(rank) == rank - axes
    };
    let mut found = graph.order().iter().copied().filter(fits);
    let first = found
        .next()
        .ok_or_else(|| c.fail("op", format!("no {} before it reads its operand", op.name)))?;
    let epsilon = |id: NodeId| graph.node(id).attrs.float("epsilon");
    match found.any(|other| epsilon(other) != epsilon(first)) {
        true => Err(c.unsupported("a tensor that is normalised in two ways")),
        false => Ok(first),
    }
}

/// The gradients that are wanted of `slots`, `None` for the others.
fn gradients(c: &mut Call, wants: &[i64], found: Vec<ValueId>, slots: i64) -> Result<Value> {
    let mut all = vec![Value::None; slots as usize];
    for (slot, gradient) in wants.iter().zip(found) {
        all[*slot as usize] = c.made(gradient)?;
    }
    Ok(Value::Tuple(all))
}

/// Operand, attributes and scale that both norms have.
fn norm(c: &mut Call, op: &'static OpDef) -> Result<(ValueId, ValueId, NodeId, Attrs)> {
    let x = c.value("input")?;
    let axes = super::norm::normalized_axes(c, x)?;
    let forward = forward_of(c, op, x, axes as i64)?;
    let epsilon = c.low.b.graph.node(forward).attrs.float("epsilon");
    let attrs = Attrs::new()
        .with("axis", -(axes as i64))
        .with("epsilon", epsilon);
    let scale = super::norm::scale(c, x, axes)?;
    Ok((x, scale, forward, attrs))
}

fn layer_norm(c: &mut Call) -> Result<Value> {
    let wants = wanted(c)?;
    let (x, scale, forward, attrs) = norm(c, &norm::LAYER_NORM)?;
    let mut ins = vec![Some(c.value("grad_out")?), Some(x), Some(scale)];
    if c.low.b.ty(x).dtype != DType::F64 {
        let (mean, inv_std) = norm::statistics(c.low.b.graph, forward);
        ins.extend([Some(mean), Some(inv_std)]);
    }
    let attrs = attrs.with("wants", wants.clone());
    let found = c
        .low
        .b
        .emit_n(&norm::LAYER_NORM_GRAD, ins, attrs, wants.len())?;
    gradients(c, &wants, found, 3)
}

fn rms_norm(c: &mut Call) -> Result<Value> {
    let wants = wanted(c)?;
    let (x, scale, _, attrs) = norm(c, &norm::RMS_NORM)?;
    let ins = vec![Some(c.value("grad_out")?), Some(x), Some(scale)];
    let attrs = attrs.with("wants", wants.clone());
    let found = c
        .low
        .b
        .emit_n(&norm::RMS_NORM_GRAD, ins, attrs, wants.len())?;
    gradients(c, &wants, found, 2)
}

fn attention(c: &mut Call) -> Result<Value> {
    if c.float("dropout_p", 0.0)? != 0.0 {
        return Err(c.unsupported("dropout"));
    }
    let (q, k, v) = (saved(c, "query")?, saved(c, "key")?, saved(c, "value")?);
    let rank = c.low.b.rank(q);
    let dims = |c: &Call, v: ValueId, at: usize| c.low.b.ty(v).dims[at].clone();
    let causal = c.bool("is_causal", false)?;
    // Causal there counts from the first key, and here from the last.
    if causal && dims(c, q, rank - 2).same(&dims(c, k, rank - 2)) != Same::Yes {
        return Err(c.unsupported("`is_causal` with as many queries as keys not for certain"));
    }
    let scale = match (c.has("scale"), dims(c, q, rank - 1).as_const()) {
        (true, _) => c.float("scale", 1.0)?,
        (false, Some(size)) => 1.0 / (size as f64).sqrt(),
        (false, None) => return Err(c.fail("shape", "the size of a head is not known")),
    };
    let wants = vec![0i64, 1, 2];
    let attrs = Attrs::new()
        .with("scale", scale as f32)
        .with("causal", i64::from(causal))
        .with("wants", wants.clone());
    let mut ins = vec![Some(c.value("grad_out")?), Some(q), Some(k), Some(v)];
    if let Some(mask) = c.opt_value("attn_mask")? {
        ins.push(Some(mask));
    }
    let found = c.low.b.emit_n(&attention::ATTENTION_GRAD, ins, attrs, 3)?;
    gradients(c, &wants, found, 3)
}
