//! Attention, and the fused encoder layer that PyTorch records for inference.
//!
//! `scaled_dot_product_attention` is written as products, a bias and a softmax, which fusion puts together again; so
//! its dropout is a node like any other. A query that may see no key gives zeros, and its gradient is zero: the bias
//! decides that, not a look for NaN in the weights.

use super::activation::dropped;
use super::products::affine;
use super::signature::{Call, Op};
use super::{Value, reduce};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, Same, ValueId};
use ckpt_passes::ops::*;

pub const OPS: &[Op] = &[
    (
        "_transformer_encoder_layer_fwd(src: t, embed_dim: i, num_heads: i, qkv_weight: t, qkv_bias: t, proj_weight: t, proj_bias: t, use_gelu: b, norm_first: b, eps: f, norm_weight_1: t, norm_bias_1: t, norm_weight_2: t, norm_bias_2: t, ffn_weight_1: t, ffn_bias_1: t, ffn_weight_2: t, ffn_bias_2: t, mask: t?, mask_type: i?)",
        encoder_layer,
    ),
    (
        "scaled_dot_product_attention(query: t, key: t, value: t, attn_mask: t?, dropout_p: f?, is_causal: b?, *, scale: f?, enable_gqa: b?)",
        attention,
    ),
];

fn attention(c: &mut Call) -> Result<Value> {
    let (q, mut k, mut v) = (c.value("query")?, c.value("key")?, c.value("value")?);
    let rank = c.low.b.rank(q);
    if rank < 2 || c.low.b.rank(k) != rank || c.low.b.rank(v) != rank {
        return Err(c.unsupported("operands of different ranks"));
    }
    if c.bool("enable_gqa", false)? && rank > 2 {
        (k, v) = (widened(c, q, k)?, widened(c, q, v)?);
    }
    let size = c.low.b.ty(q).dims[rank - 1].clone();
    let scale = match (c.has("scale"), size.as_const()) {
        (true, _) => c.float("scale", 1.0)?,
        (false, Some(size)) => 1.0 / (size as f64).sqrt(),
        (false, None) => return Err(c.fail("shape", "the size of a head is not known")),
    };
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
    // Its kernels leave the axes of heads and queries swapped in memory.
    let Value::Tensor(y) = c.made(y)? else {
        return Err(c.unsupported("this"));
    };
    c.low.set_strided(y);
    Ok(Value::Tensor(y))
}

/// Keys or values [.., heads, keys, size] with each head as often in a row as the queries have more heads.
fn widened(c: &mut Call, q: ValueId, k: ValueId) -> Result<ValueId> {
    let at = c.low.b.rank(q) - 3;
    let (wide, narrow) = (
        c.low.b.ty(q).dims[at].clone(),
        c.low.b.ty(k).dims[at].clone(),
    );
    if wide.same(&narrow) == Same::Yes {
        return Ok(k);
    }
    let times = wide
        .exact_div(&narrow)
        .ok_or_else(|| c.fail("shape", "the key heads do not divide the query heads"))?;
    let mut dims = c.low.b.ty(k).dims.clone();
    let apart = c.low.apply_unsqueeze(k, &[at as i64 + 1])?;
    let mut expanded = dims.clone();
    expanded.insert(at + 1, times);
    let apart = c.low.broadcast_to(apart, &expanded)?;
    dims[at] = wide;
    let shape = c.low.int_vector(&dims)?;
    c.low.emit(&shape::RESHAPE, &[apart, shape])
}

/// What is added to the scores, and for which queries any key counts.
fn masked(c: &mut Call, mask: ValueId, q: ValueId) -> Result<(ValueId, ValueId)> {
    let dtype = c.low.b.ty(q).dtype;
    let (zero, low) = (
        c.low.b.scalar(dtype, 0.0),
        c.low.b.scalar(dtype, f64::NEG_INFINITY),
    );
    let bias = match c.low.b.ty(mask).dtype {
        DType::Bool => c.low.emit(&logic::WHERE, &[mask, zero, low])?,
        _ => c.low.b.cast(mask, dtype)?,
    };
    if c.low.b.rank(bias) == 0 {
        return Err(c.unsupported("a mask without axes"));
    }
    let last = c.low.b.rank(bias) - 1;
    let top = reduce::over(
        c,
        &ckpt_passes::ops::reduce::REDUCE_MAX,
        bias,
        &[last],
        true,
    )?;
    let alive = c.low.emit(&logic::GREATER, &[top, low])?;
    let bias = c.low.emit(&logic::WHERE, &[alive, bias, zero])?;
    Ok((bias, alive))
}

/// 0 for keys up to the query's own place, −∞ behind it.
fn causal(c: &mut Call, q: ValueId, k: ValueId) -> Result<ValueId> {
    let at = c.low.b.rank(q) - 2;
    let places = |c: &mut Call, v: ValueId| {
        let size = c.low.b.ty(v).dims[at].clone();
        let size = c.low.int_scalar(&size)?;
        let (zero, one) = (c.low.b.int(0), c.low.b.int(1));
        c.low.emit(&fill::RANGE, &[zero, size, one])
    };
    let (rows, columns) = (places(c, q)?, places(c, k)?);
    let rows = c.low.apply_unsqueeze(rows, &[1])?;
    let allowed = c.low.emit(&logic::LESS_OR_EQUAL, &[columns, rows])?;
    let dtype = c.low.b.ty(q).dtype;
    let (zero, low) = (
        c.low.b.scalar(dtype, 0.0),
        c.low.b.scalar(dtype, f64::NEG_INFINITY),
    );
    c.low.emit(&logic::WHERE, &[allowed, zero, low])
}

/// softmax(scale·q·kᵀ + bias)·v with dropout of the weights; zeros where no key counts.
fn attend(
    c: &mut Call,
    [q, k, v]: [ValueId; 3],
    scale: f64,
    bias: Option<ValueId>,
    alive: Option<ValueId>,
    p: f64,
) -> Result<ValueId> {
    let dtype = c.low.b.ty(q).dtype;
    let rank = c.low.b.rank(k) as i64;
    let q = match scale {
        1.0 => q,
        scale => {
            let scale = c.low.b.scalar(dtype, scale);
            c.low.b.mul(q, scale)?
        }
    };
    let perm = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    let k = shape::transpose(&mut c.low.b, k, perm)?;
    let mut scores = c.low.emit(&matmul::MATMUL, &[q, k])?;
    if let Some(bias) = bias {
        scores = c.low.b.add(scores, bias)?;
    }
    let attrs = Attrs::new().with("axis", -1);
    let mut weights = c.low.b.emit(&softmax::SOFTMAX, &[scores], attrs)?;
    if p != 0.0 {
        weights = dropped(c, weights, p)?;
    }
    let y = c.low.emit(&matmul::MATMUL, &[weights, v])?;
    match alive {
        None => Ok(y),
        Some(alive) => {
            let zero = c.low.b.scalar(dtype, 0.0);
            c.low.emit(&logic::WHERE, &[alive, y, zero])
        }
    }
}

/// A `nn.TransformerEncoderLayer` as one op, which tracing without gradients in evaluation mode records: `src`
/// [batch, sequence, embed_dim]. What is masked gets no weight; a query that may see nothing gives NaN, as there.
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
    let (w, b) = (c.value("ffn_weight_1")?, c.value("ffn_bias_1")?);
    let inner = affine(c, normed, w, Some(b))?;
    let inner = match c.bool("use_gelu", false)? {
        true => c.low.emit(&activation::GELU, &[inner])?,
        false => c.low.emit(&activation::RELU, &[inner])?,
    };
    let (w, b) = (c.value("ffn_weight_2")?, c.value("ffn_bias_2")?);
    let inner = affine(c, inner, w, Some(b))?;
    y = c.low.b.add(y, inner)?;
    if !first {
        y = norm_of(c, y, "2")?;
    }
    c.made(y)
}

fn norm_of(c: &mut Call, x: ValueId, which: &str) -> Result<ValueId> {
    let scale = c.value(&format!("norm_weight_{which}"))?;
    let bias = c.value(&format!("norm_bias_{which}"))?;
    let attrs = Attrs::new()
        .with("axis", -1)
        .with("epsilon", c.float("eps", 1e-5)? as f32);
    let ins = vec![Some(x), Some(scale), Some(bias)];
    Ok(c.low.b.emit_n(&norm::LAYER_NORM, ins, attrs, 1)?[0])
}

/// What is added to the scores [batch, heads, query, key]: −∞ wherever the mask is not 0, be it bool or float
/// (aten/src/ATen/native/transformers/attention.cpp). Its type says which axes it has: 0 [query, key], 1 [batch, key],
/// 2 all.
fn encoder_mask(c: &mut Call, dtype: DType) -> Result<Option<ValueId>> {
    let Some(mask) = c.opt_value("mask")? else {
        return Ok(None);
    };
    let (kind, rank) = (c.int("mask_type", -1)?, c.low.b.rank(mask));
    let mask = match (kind, rank) {
        (0, 2) | (2, 4) => mask,
        (1, 2) => c.low.apply_unsqueeze(mask, &[1, 2])?,
        _ => return Err(c.unsupported(format!("a mask of type {kind} with {rank} axes"))),
    };
    let hidden = super::compare::truth(c, mask)?;
    let (zero, low) = (
        c.low.b.scalar(dtype, 0.0),
        c.low.b.scalar(dtype, f64::NEG_INFINITY),
    );
    c.low.emit(&logic::WHERE, &[hidden, low, zero]).map(Some)
}

fn self_attention(c: &mut Call, x: ValueId) -> Result<ValueId> {
    let heads = c.int("num_heads", 1)?;
    let dims = c.low.b.ty(x).dims.clone();
    let [batch, sequence, hidden] = dims.as_slice() else {
        return Err(c.fail("shape", "`src` is not [batch, sequence, embed_dim]"));
    };
    let size = hidden
        .exact_div(&Dim::from(heads))
        .ok_or_else(|| c.fail("shape", "the heads do not divide the embedding"))?;
    let scale = size.as_const().map(|n| 1.0 / (n as f64).sqrt());
    let scale = scale.ok_or_else(|| c.fail("shape", "the size of a head is not known"))?;
    let (w, b) = (c.value("qkv_weight")?, c.value("qkv_bias")?);
    let packed = affine(c, x, w, Some(b))?;
    let attrs = Attrs::new().with("axis", -1).with("num_outputs", 3);
    let parts = c
        .low
        .b
        .emit_n(&concat::SPLIT, vec![Some(packed)], attrs, 3)?;
    let apart = [batch.clone(), sequence.clone(), Dim::from(heads), size];
    let mut operands = [x; 3];
    for (operand, part) in operands.iter_mut().zip(parts) {
        let shape = c.low.int_vector(&apart)?;
        let part = c.low.emit(&shape::RESHAPE, &[part, shape])?;
        *operand = shape::transpose(&mut c.low.b, part, vec![0, 2, 1, 3])?;
    }
    let bias = encoder_mask(c, c.low.b.ty(x).dtype)?;
    let y = attend(c, operands, scale, bias, None, 0.0)?;
    let y = shape::transpose(&mut c.low.b, y, vec![0, 2, 1, 3])?;
    let shape = c.low.int_vector(&dims)?;
    let y = c.low.emit(&shape::RESHAPE, &[y, shape])?;
    let (w, b) = (c.value("proj_weight")?, c.value("proj_bias")?);
    affine(c, y, w, Some(b))
}
