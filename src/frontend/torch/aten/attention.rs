//! Attention, and the fused encoder layer that PyTorch records for inference.
//!
//! `scaled_dot_product_attention` becomes products, a bias and a softmax, which the pass `fuse` puts together again. So its
//! dropout is a node like any other. A query that may see no key gives zeros and has a zero gradient: the bias decides
//! that, not a test for NaN in the weights.

use super::super::value::Value;
use super::activation::dropped;
use super::arrange::repeated;
use super::products::affine;
use super::reduce::over;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Same, ValueId};
use ckpt_passes::ops::reduce::REDUCE_MAX;
use ckpt_passes::ops::{EmitExt, activation, logic, matmul, norm, shape, softmax};

pub const OPS: &[Op] = &[
    (
        "_scaled_dot_product_flash_attention(query: t, key: t, value: t, dropout_p: f?, is_causal: b?, return_debug_mask: b?, *, scale: f?)",
        flash,
    ),
    (
        "_transformer_encoder_layer_fwd(src: t, embed_dim: i, num_heads: i, qkv_weight: t, qkv_bias: t, proj_weight: t, proj_bias: t, use_gelu: b, norm_first: b, eps: f, norm_weight_1: t, norm_bias_1: t, norm_weight_2: t, norm_bias_2: t, ffn_weight_1: t, ffn_bias_1: t, ffn_weight_2: t, ffn_bias_2: t, mask: t?, mask_type: i?)",
        encoder_layer,
    ),
    (
        "scaled_dot_product_attention(query: t, key: t, value: t, attn_mask: t?, dropout_p: f?, is_causal: b?, *, scale: f?, enable_gqa: b?)",
        attention,
    ),
];

fn flash(c: &mut Call) -> Result<Value> {
    if c.bool("return_debug_mask", false)? {
        return Err(c.unsupported("`return_debug_mask`"));
    }
    c.formula(
        &[],
        "y = scaled_dot_product_attention(query, key, value, none, dropout_p, is_causal, scale=scale); \
         (y, unknown, unknown, unknown, unknown, unknown, unknown, unknown, unknown)",
    )
}

/// Returns the factor of the scores: `scale`, or 1/√size of a head.
pub(super) fn scale_of(c: &Call, size: &Dim) -> Result<f64> {
    match (c.has("scale"), size.as_const()) {
        (true, _) => c.float("scale", 1.0),
        (false, Some(size)) => Ok(1.0 / (size as f64).sqrt()),
        (false, None) => Err(c.fail("shape", "the size of a head is not known")),
    }
}

fn attention(c: &mut Call) -> Result<Value> {
    let (q, mut k, mut v) = (c.value("query")?, c.value("key")?, c.value("value")?);
    let rank = c.rank(q);
    if rank < 2 || c.rank(k) != rank || c.rank(v) != rank {
        return Err(c.unsupported("operands of different ranks"));
    }
    if c.bool("enable_gqa", false)? && rank > 2 {
        (k, v) = (widened(c, q, k)?, widened(c, q, v)?);
    }
    let scale = scale_of(c, &c.low.b.ty(q).dims[rank - 1])?;
    let mask = c.opt_value("attn_mask")?;
    let (mut bias, mut alive) = (None, None);
    if let Some(mask) = mask {
        if c.bool("is_causal", false)? {
            return Err(c.fail("op", "`attn_mask` and `is_causal` exclude each other"));
        }
        let (b, a) = masked(c, mask, q)?;
        (bias, alive) = (Some(b), Some(a));
    } else if c.bool("is_causal", false)? {
        bias = Some(causal(c, q, k)?);
    }
    let p = c.float("dropout_p", 0.0)?;
    let y = attend(c, [q, k, v], scale, bias, alive, p)?;
    // PyTorch's kernels leave the axes of heads and queries swapped in memory.
    let y = c.low.fresh(y);
    c.low.set_strided(y);
    Ok(Value::Tensor(y))
}

/// Repeats the heads of keys or values [.., heads, keys, size] until there are as many as in the queries.
fn widened(c: &mut Call, q: ValueId, k: ValueId) -> Result<ValueId> {
    let at = c.rank(q) - 3;
    let mut dims = c.shape_of(k);
    let wide = c.shape_of(q)[at].clone();
    if wide.same(&dims[at]) == Same::Yes {
        return Ok(k);
    }
    let times = wide
        .exact_div(&dims[at])
        .ok_or_else(|| c.fail("shape", "the key heads do not divide the query heads"))?;
    let apart = repeated(c, k, at, &times)?;
    dims[at] = wide;
    c.reshape(apart, &dims)
}

/// Returns 0 and −∞ as scalars of that type: the biases of keys that count and that do not.
fn biases(c: &mut Call, dtype: DType) -> (ValueId, ValueId) {
    let zero = c.low.b.scalar(dtype, 0.0);
    (zero, c.low.b.scalar(dtype, f64::NEG_INFINITY))
}

/// Returns the bias of a mask, and which queries may see any key.
fn masked(c: &mut Call, mask: ValueId, q: ValueId) -> Result<(ValueId, ValueId)> {
    let dtype = c.dtype(q);
    let (zero, low) = biases(c, dtype);
    let bias = match c.dtype(mask) {
        DType::Bool => c.emit(&logic::WHERE, &[mask, zero, low])?,
        _ => c.low.b.cast(mask, dtype)?,
    };
    let Some(last) = c.rank(bias).checked_sub(1) else {
        return Err(c.unsupported("a mask without axes"));
    };
    let top = over(c, &REDUCE_MAX, bias, &[last], true)?;
    let alive = c.emit(&logic::GREATER, &[top, low])?;
    let bias = c.emit(&logic::WHERE, &[alive, bias, zero])?;
    Ok((bias, alive))
}

/// Returns the bias of a causal mask: 0 for keys up to the query's own index, −∞ for later ones.
fn causal(c: &mut Call, q: ValueId, k: ValueId) -> Result<ValueId> {
    let at = c.rank(q) - 2;
    let rows = c.numbers_to(&c.shape_of(q)[at])?;
    let columns = c.numbers_to(&c.shape_of(k)[at])?;
    let rows = c.low.unsqueeze(rows, &[1])?;
    let allowed = c.emit(&logic::LESS_OR_EQUAL, &[columns, rows])?;
    let (zero, low) = biases(c, c.dtype(q));
    c.emit(&logic::WHERE, &[allowed, zero, low])
}

/// Emits softmax(scale·q·kᵀ + bias)·v with dropout of the weights. Queries that are not `alive` give zeros.
fn attend(
    c: &mut Call,
    [q, k, v]: [ValueId; 3],
    scale: f64,
    bias: Option<ValueId>,
    alive: Option<ValueId>,
    p: f64,
) -> Result<ValueId> {
    let rank = c.rank(k) as i64;
    let q = match scale {
        1.0 => q,
        scale => {
            let scale = c.scalar_like(q, scale);
            c.low.b.mul(q, scale)?
        }
    };
    let perm = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    let k = shape::transpose(&mut c.low.b, k, perm)?;
    let mut scores = c.emit(&matmul::MATMUL, &[q, k])?;
    if let Some(bias) = bias {
        scores = c.low.b.add(scores, bias)?;
    }
    let attrs = Attrs::new().with("axis", -1);
    let mut weights = c.emit_with(&softmax::SOFTMAX, &[scores], attrs)?;
    if p != 0.0 {
        weights = dropped(c, weights, p)?;
    }
    let y = c.emit(&matmul::MATMUL, &[weights, v])?;
    match alive {
        None => Ok(y),
        Some(alive) => {
            let zero = c.scalar_like(q, 0.0);
            c.emit(&logic::WHERE, &[alive, y, zero])
        }
    }
}

/// Lowers a `nn.TransformerEncoderLayer` that is one op, as tracing in evaluation mode without gradients records it. `src`
/// is [batch, sequence, embed_dim]. As in PyTorch, masked keys get no weight, and a query without any key gives NaN.
fn encoder_layer(c: &mut Call) -> Result<Value> {
    let x = c.value("src")?;
    let first = c.bool("norm_first", false)?;
    let normed = if first { norm_of(c, x, "1")? } else { x };
    let attended = self_attention(c, normed)?;
    let mut y = c.low.b.add(x, attended)?;
    if !first {
        y = norm_of(c, y, "1")?;
    }
    let normed = if first { norm_of(c, y, "2")? } else { y };
    let inner = linear(c, normed, "ffn_weight_1", "ffn_bias_1")?;
    let op = match c.bool("use_gelu", false)? {
        true => &activation::GELU,
        false => &activation::RELU,
    };
    let inner = c.emit(op, &[inner])?;
    let inner = linear(c, inner, "ffn_weight_2", "ffn_bias_2")?;
    y = c.low.b.add(y, inner)?;
    if !first {
        y = norm_of(c, y, "2")?;
    }
    c.made(y)
}

/// Emits a linear layer by the names of its weight and bias.
fn linear(c: &mut Call, x: ValueId, weight: &str, bias: &str) -> Result<ValueId> {
    let (weight, bias) = (c.value(weight)?, c.value(bias)?);
    affine(c, x, weight, Some(bias))
}

/// Emits one of the two layer norms.
fn norm_of(c: &mut Call, x: ValueId, which: &str) -> Result<ValueId> {
    let scale = c.value(&format!("norm_weight_{which}"))?;
    let bias = c.value(&format!("norm_bias_{which}"))?;
    let attrs = Attrs::new()
        .with("axis", -1)
        .with("epsilon", c.float("eps", 1e-5)? as f32);
    let ins = vec![Some(x), Some(scale), Some(bias)];
    Ok(c.low.b.emit_n(&norm::LAYER_NORM, ins, attrs, 1)?[0])
}

/// Returns the bias of the scores [batch, heads, query, key]: −∞ wherever the mask is not 0, be it bool or float
/// (aten/src/ATen/native/transformers/attention.cpp). `mask_type` says which axes the mask has: 0 [query, key],
/// 1 [batch, key], 2 all.
fn encoder_mask(c: &mut Call, dtype: DType) -> Result<Option<ValueId>> {
    let Some(mask) = c.opt_value("mask")? else {
        return Ok(None);
    };
    let (kind, rank) = (c.int("mask_type", -1)?, c.rank(mask));
    let mask = match (kind, rank) {
        (0, 2) | (2, 4) => mask,
        (1, 2) => c.low.unsqueeze(mask, &[1, 2])?,
        _ => return Err(c.unsupported(format!("a mask of type {kind} with {rank} axes"))),
    };
    let hidden = c.low.truth(mask)?;
    let (zero, low) = biases(c, dtype);
    c.emit(&logic::WHERE, &[hidden, low, zero]).map(Some)
}

fn self_attention(c: &mut Call, x: ValueId) -> Result<ValueId> {
    let heads = c.int("num_heads", 1)?;
    let dims = c.shape_of(x);
    let [batch, sequence, hidden] = dims.as_slice() else {
        return Err(c.fail("shape", "`src` is not [batch, sequence, embed_dim]"));
    };
    let size = hidden
        .exact_div(&Dim::from(heads))
        .ok_or_else(|| c.fail("shape", "the heads do not divide the embedding"))?;
    let scale = size.as_const().map(|n| 1.0 / (n as f64).sqrt());
    let scale = scale.ok_or_else(|| c.fail("shape", "the size of a head is not known"))?;
    let packed = linear(c, x, "qkv_weight", "qkv_bias")?;
    let parts = c.split(packed, -1, 3)?;
    let apart = [batch.clone(), sequence.clone(), Dim::from(heads), size];
    let mut operands = [x; 3];
    for (operand, part) in operands.iter_mut().zip(parts) {
        let part = c.reshape(part, &apart)?;
        *operand = shape::transpose(&mut c.low.b, part, vec![0, 2, 1, 3])?;
    }
    let bias = encoder_mask(c, c.dtype(x))?;
    let y = attend(c, operands, scale, bias, None, 0.0)?;
    let y = shape::transpose(&mut c.low.b, y, vec![0, 2, 1, 3])?;
    let y = c.reshape(y, &dims)?;
    linear(c, y, "proj_weight", "proj_bias")
}
