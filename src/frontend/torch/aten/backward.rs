//! Ops of a backward pass, for programs that take gradients themselves: forces as gradients of an energy, penalties on
//! gradients. Most of them are rows that gradient rules emit, so they are differentiated like those.
//!
//! What the forward pass saved for them and ours computes itself (log-sum-exps, results that only stand for their operand)
//! is not read. The statistics of a norm become results of its node.

use super::super::value::Value;
use super::arrange::id;
use super::attention::scale_of;
use super::loss::reduction;
use super::norm::{normalized_axes, scale};
use super::signature::{Call, Formula, Op, along};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{Attrs, DType, NodeId, Same, ValueId};
use ckpt_passes::ops::loss::NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD;
use ckpt_passes::ops::{EmitExt, activation, attention, index, norm};

pub const FORMULAS: &[Formula] = &[
    "_log_softmax_backward_data(grad_output: t, output: t, dim: i, input_dtype: d) => \
     in_type(LogSoftmaxGrad(saved(output), grad_output, axis=axis(output, dim)), input_dtype)",
    "_softmax_backward_data(grad_output: t, output: t, dim: i, input_dtype: d) => \
     in_type(SoftmaxGrad(saved(output), grad_output, axis=axis(output, dim)), input_dtype)",
    // 2·(x − target), over the number of elements for a mean.
    "mse_loss_backward(grad_output: t, self: t, target: t, reduction: i) => \
     d = (self - target) * 2.0; (reduction == 1 ? d / numel(self) : d) * grad_output",
    // `grad_output` where a view took its elements from, zeros elsewhere.
    "select_backward(grad_output: t, input_sizes: I, dim: i, index: i) => \
     select_scatter(new_zeros(grad_output, input_sizes), grad_output, dim, index)",
    "slice_backward(grad_output: t, input_sizes: I, dim: i, start: i, end: i, step: i) => \
     slice_scatter(new_zeros(grad_output, input_sizes), grad_output, dim, start, end, step)",
    // The slope of ELU below 0 is y + alpha.
    "elu_backward(grad_output: t, alpha: f, scale: f, input_scale: f, is_result: b, self_or_result: t) => \
     scale == 1.0 & input_scale == 1.0 ? (is_result ? (y = saved(self_or_result); \
     below = grad_output * (y + alpha); where(y > 0, grad_output, below)) : \
     EluGrad(saved(self_or_result), grad_output, alpha=alpha)) : unsupported('a scale')",
    "hardswish_backward(grad_output: t, self: t) => HardSwishGrad(saved(self), grad_output)",
    "leaky_relu_backward(grad_output: t, self: t, negative_slope: f, self_is_result: b) => \
     LeakyReluGrad(saved(self), grad_output, alpha=negative_slope)",
    "mish_backward(grad_output: t, self: t) => MishGrad(saved(self), grad_output)",
    "sigmoid_backward(grad_output: t, output: t) => SigmoidGrad(saved(output), grad_output)",
    "silu_backward(grad_output: t, self: t) => SiluGrad(saved(self), grad_output)",
    "softplus_backward(grad_output: t, self: t, beta: s, threshold: s) => \
     inner = self * beta; curved = grad_output * sigmoid(inner); where(inner > threshold, grad_output, curved)",
    "tanh_backward(grad_output: t, output: t) => TanhGrad(saved(output), grad_output)",
    "threshold_backward(grad_output: t, self: t, threshold: s) => \
     threshold == 0 ? ReluGrad(saved(self), grad_output) : masked_fill(grad_output, self <= threshold, 0)",
];

pub const OPS: &[Op] = &[
    (
        "_fused_rms_norm_backward(grad_out: t, input: t, normalized_shape: I, rstd: _, weight: t?, output_mask: _)",
        |c| norm(c, &norm::RMS_NORM, &norm::RMS_NORM_GRAD, 2),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward(grad_out: t, query: t, key: t, value: t, out: t, logsumexp: _, dropout_p: f, is_causal: b, *, attn_mask: t?, scale: f?)",
        attention,
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
            let (x, dy) = (saved(c, "self")?, c.value("grad_output")?);
            c.result_with(&activation::GELU_GRAD, &[x, dy], attrs)
        },
    ),
    (
        "native_layer_norm_backward(grad_out: t, input: t, normalized_shape: I, mean: _, rstd: _, weight: t?, bias: t?, output_mask: _)",
        |c| norm(c, &norm::LAYER_NORM, &norm::LAYER_NORM_GRAD, 3),
    ),
    (
        "nll_loss_backward(grad_output: t, self: t, target: t, weight: t?, reduction: i, ignore_index: i, total_weight: _)",
        labelled,
    ),
];

/// Returns a tensor that the forward pass saved.
fn saved(c: &mut Call, name: &str) -> Result<ValueId> {
    let x = c.value(name)?;
    c.low.warn_of_detached(x);
    Ok(x)
}

/// Lowers the gradient of an embedding. The padding row gets none.
fn embedding(c: &mut Call) -> Result<Value> {
    if c.bool("scale_grad_by_freq", false)? {
        return Err(c.unsupported("`scale_grad_by_freq`"));
    }
    let padding = c.int("padding_idx", -1)?;
    let mut dy = c.value("grad_output")?;
    if padding >= 0 {
        let kept = c.formula(
            &[],
            "masked_fill(grad_output, unsqueeze(indices == padding_idx, -1), 0)",
        )?;
        dy = c.low.read(id(c, &kept)?)?;
    }
    let indices = c.value("indices")?;
    let width = c.size_in(&c.low.b.ty(dy).dims, c.rank(dy).wrapping_sub(1))?;
    let shape = [c.dim("num_weights", 0)?, width];
    let shape = c.low.int_vector(&shape)?;
    c.result_with(&index::GATHER_GRAD, &[shape, indices, dy], along(0))
}

fn labelled(c: &mut Call) -> Result<Value> {
    let scores = c.value("self")?;
    if c.rank(scores) < 2 {
        return Err(c.unsupported("scores without a batch"));
    }
    let attrs = Attrs::new()
        .with("reduction", reduction(c)?)
        .with("ignore_index", c.int("ignore_index", -100)?);
    let mut ins = vec![
        Some(c.value("grad_output")?),
        Some(scores),
        Some(c.value("target")?),
    ];
    if let Some(weight) = c.opt_value("weight")? {
        ins.push(Some(weight));
    }
    let op = &NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD;
    let dx = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    c.made(dx)
}

/// Returns the operands whose gradients the program wants.
fn wanted(c: &Call) -> Result<Vec<i64>> {
    let Some(Value::List(mask) | Value::Tuple(mask)) = c.get("output_mask") else {
        return Err(c.unsupported("an `output_mask` that is no list"));
    };
    let wanted = mask.iter().zip(0..);
    let wanted = wanted.filter(|(m, _)| **m == Value::Bool(true));
    Ok(wanted.map(|(_, slot)| slot).collect())
}

/// Returns the node of `op` that normalised `x` over so many axes. Only this node knows epsilon.
fn forward_of(c: &Call, op: &'static OpDef, x: ValueId, axes: i64) -> Result<NodeId> {
    let graph = &c.low.b.graph;
    let rank = c.rank(x) as i64;
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

/// Returns the results of a node as the gradients of `slots` operands, with `None` for those that nobody wants.
fn gradients(c: &mut Call, wants: &[i64], found: Vec<ValueId>, slots: i64) -> Result<Value> {
    let mut all = vec![Value::None; slots as usize];
    for (slot, gradient) in wants.iter().zip(found) {
        all[*slot as usize] = c.made(gradient)?;
    }
    Ok(Value::Tuple(all))
}

/// Lowers the gradient of a norm to the row `grad`. Layer norms below 64 bits reuse the statistics of the forward node.
fn norm(c: &mut Call, op: &'static OpDef, grad: &'static OpDef, slots: i64) -> Result<Value> {
    let wants = wanted(c)?;
    let x = c.value("input")?;
    let axes = normalized_axes(c, x)?;
    let forward = forward_of(c, op, x, axes as i64)?;
    let epsilon = c.low.b.graph.node(forward).attrs.float("epsilon");
    let scale = scale(c, x, axes)?;
    let mut ins = vec![Some(c.value("grad_out")?), Some(x), Some(scale)];
    if op == &norm::LAYER_NORM && c.dtype(x) != DType::F64 {
        let (mean, inv_std) = norm::statistics(&mut c.low.b, forward);
        ins.extend([Some(mean), Some(inv_std)]);
    }
    let attrs = Attrs::new()
        .with("axis", -(axes as i64))
        .with("epsilon", epsilon)
        .with("wants", wants.clone());
    let found = c.low.b.emit_n(grad, ins, attrs, wants.len())?;
    gradients(c, &wants, found, slots)
}

fn attention(c: &mut Call) -> Result<Value> {
    if c.float("dropout_p", 0.0)? != 0.0 {
        return Err(c.unsupported("dropout"));
    }
    let (q, k, v) = (saved(c, "query")?, saved(c, "key")?, saved(c, "value")?);
    let rank = c.rank(q);
    let (queries, keys) = (c.shape_of(q), c.shape_of(k));
    let causal = c.bool("is_causal", false)?;
    // PyTorch's causal mask is aligned to the first key, that of our row to the last.
    if causal && queries[rank - 2].same(&keys[rank - 2]) != Same::Yes {
        return Err(c.unsupported("`is_causal` with as many queries as keys not for certain"));
    }
    let scale = scale_of(c, &queries[rank - 1])?;
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
