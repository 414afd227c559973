//! Attention ops as products, a bias and a softmax: `Attention` of ONNX 23, and ONNX Runtime's `Attention` with packed
//! weights and `MultiHeadAttention`.
//!
//! The scale goes on the queries alone: the same product as √scale on both sides, one node and one saved tensor fewer.
//! Rows in which every key is masked give zeros (ONNX Attention, errata). The bias decides that, not a look for NaN in
//! the weights: so the gradient of such a row is zero as well, and a NaN that comes from elsewhere stays visible.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::activation::TANH;
use ckpt_passes::ops::logic::{AND, GREATER, LESS, LESS_OR_EQUAL, WHERE};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::reduce::REDUCE_MAX;
use ckpt_passes::ops::softmax::SOFTMAX;

/// Attention over heads that stand in an axis of their own.
pub(super) struct Heads {
    /// [batch, heads, queries, size].
    pub(super) q: ValueId,
    /// [batch, heads, keys, size].
    pub(super) k: ValueId,
    /// [batch, heads, keys, value size].
    pub(super) v: ValueId,
    pub(super) scale: f64,
    pub(super) softcap: f64,
    /// Added to the scores, whose shape it broadcasts to.
    pub(super) bias: Option<ValueId>,
    /// The softmax computes in this type.
    pub(super) precision: DType,
}

/// softmax(cap(scale·q·kᵀ) + bias)·v: [batch, heads, queries, value size].
pub(super) fn attend(call: &mut Call, heads: &Heads) -> Result<ValueId> {
    let q = match heads.scale {
        1.0 => heads.q,
        scale => call.scaled(heads.q, scale)?,
    };
    let k = call.transpose(heads.k, &[0, 1, 3, 2])?;
    let mut scores = call.b.emit(&MATMUL, &[q, k], Attrs::new())?;
    if heads.softcap != 0.0 {
        let small = call.scaled(scores, 1.0 / heads.softcap)?;
        let capped = call.b.emit(&TANH, &[small], Attrs::new())?;
        scores = call.scaled(capped, heads.softcap)?;
    }
    if let Some(bias) = heads.bias {
        scores = call.b.add(scores, bias)?;
    }
    let dtype = call.dtype(scores);
    let scores = call.b.cast(scores, heads.precision)?;
    let axis = Attrs::new().with("axis", -1);
    let weights = call.b.emit(&SOFTMAX, &[scores], axis)?;
    let weights = call.b.cast(weights, dtype)?;
    call.b.emit(&MATMUL, &[weights, heads.v], Attrs::new())
}

/// The scale that the file gives, or 1/√size where it gives none.
pub(super) fn scale_of(given: f32, size: i64) -> f64 {
    match given {
        0.0 => 1.0 / (size as f64).sqrt(),
        scale => f64::from(scale),
    }
}

/// [batch, sequence, heads·size] as [batch, heads, sequence, size].
pub(super) fn split_heads(call: &mut Call, x: ValueId, heads: i64) -> Result<ValueId> {
    let hidden = call.size(x, 2, "the hidden size")?;
    if hidden % heads != 0 {
        return Err(call
            .fail(
                "shape",
                format!("{heads} heads do not divide the hidden size"),
            )
            .found(call.b.ty(x).to_string()));
    }
    let apart = call.reshape(x, &[0, 0, heads, hidden / heads])?;
    call.transpose(apart, &[0, 2, 1, 3])
}

/// [batch, heads, sequence, size] as [batch, sequence, heads·size].
pub(super) fn merge_heads(call: &mut Call, x: ValueId) -> Result<ValueId> {
    let heads = call.size(x, 1, "the number of heads")?;
    let size = call.size(x, 3, "the size of a head")?;
    let together = call.transpose(x, &[0, 2, 1, 3])?;
    call.reshape(together, &[0, 0, heads * size])
}

/// Each head of [batch, heads, sequence, size] `times` times in a row.
fn repeat_heads(call: &mut Call, x: ValueId, times: i64) -> Result<ValueId> {
    let heads = call.size(x, 1, "the number of heads")?;
    let apart = call.unsqueeze(x, &[2])?;
    let group = call.b.ints(&[1, 1, times, 1, 1]);
    let wide = call.expand(apart, group)?;
    let together = call.b.ints(&[heads * times]);
    let shape = [
        call.axis_vector(x, 0)?,
        together,
        call.axis_vector(x, 2)?,
        call.axis_vector(x, 3)?,
    ];
    let shape = call.concat(&shape, 0)?;
    call.reshape_to(wide, shape)
}

/// Which keys a query may see if it sees none that come later: bool [queries, keys]. `past` keys come before the first
/// query.
fn causal(call: &mut Call, q: ValueId, k: ValueId, past: Option<ValueId>) -> Result<ValueId> {
    let mut rows = call.positions(q, 2)?;
    if let Some(past) = past {
        let before = call.axis_size(past, 2)?;
        rows = call.b.add(rows, before)?;
    }
    let rows = call.unsqueeze(rows, &[1])?;
    let columns = call.positions(k, 2)?;
    call.b.emit(&LESS_OR_EQUAL, &[columns, rows], Attrs::new())
}

/// 0 where `allowed`, `otherwise` elsewhere.
pub(super) fn allowed_bias(
    call: &mut Call,
    allowed: ValueId,
    dtype: DType,
    otherwise: f64,
) -> Result<ValueId> {
    let (zero, low) = (call.b.scalar(dtype, 0.0), call.b.scalar(dtype, otherwise));
    call.b.emit(&WHERE, &[allowed, zero, low], Attrs::new())
}

/// ONNX Attention-23. Not supported: `qk_matmul_output`.
pub fn standard(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (q, k, v) = (call.need(0, "Q")?, call.need(1, "K")?, call.need(2, "V")?);
    let flat = call.b.rank(q) == 3;
    let rank = [if flat { 3 } else { 4 }];
    for (operand, name) in [(q, "Q"), (k, "K"), (v, "V")] {
        call.want_rank(operand, &rank, name)?;
    }
    let (q, mut k, mut v) = if flat {
        let (wide, narrow) = (call.heads("q_num_heads")?, call.heads("kv_num_heads")?);
        (
            split_heads(call, q, wide)?,
            split_heads(call, k, narrow)?,
            split_heads(call, v, narrow)?,
        )
    } else {
        // Only for 3-D operands; the shape says how many there are.
        call.ignore("q_num_heads");
        call.ignore("kv_num_heads");
        (q, k, v)
    };
    let past = match (call.opt(4), call.opt(5)) {
        (Some(past_k), Some(past_v)) => {
            k = call.concat(&[past_k, k], 2)?;
            v = call.concat(&[past_v, v], 2)?;
            Some(past_k)
        }
        (None, None) => None,
        _ => return Err(call.fail("arity", "past_key and past_value go together")),
    };
    call.refuse(6, "nonpad_kv_seqlen")?;
    call.int("qk_matmul_output_mode", 0)?;
    let size = call.size(q, 3, "the size of a head")?;
    let scale = scale_of(call.float("scale", 0.0)?, size);
    let softcap = f64::from(call.float("softcap", 0.0)?);
    let precision = softmax_precision(call, q)?;
    let masked = call.opt(3);
    let mask = match call.int("is_causal", 0)? {
        0 => None,
        _ => Some(causal(call, q, k, past)?),
    };
    let (bias, alive) = standard_bias(call, masked, mask, call.dtype(q))?;
    let present = (k, v);
    let (k, v) = grouped(call, q, k, v)?;
    let heads = Heads {
        q,
        k,
        v,
        scale,
        softcap,
        bias,
        precision,
    };
    let mut y = attend(call, &heads)?;
    if let Some(alive) = alive {
        let zero = call.b.scalar(call.dtype(y), 0.0);
        y = call.b.emit(&WHERE, &[alive, y, zero], Attrs::new())?;
    }
    if flat {
        y = merge_heads(call, y)?;
    }
    Ok(Some(vec![
        Out::Value(y),
        Out::Value(present.0),
        Out::Value(present.1),
        Out::Absent("the scores are not a result that we compute"),
    ]))
}

fn softmax_precision(call: &mut Call, q: ValueId) -> Result<DType> {
    let code = call.int("softmax_precision", 0)?;
    if code == 0 {
        return Ok(call.dtype(q));
    }
    i32::try_from(code)
        .ok()
        .and_then(DType::from_onnx_code)
        .filter(|d| d.is_float())
        .ok_or_else(|| call.unsupported(format!("`softmax_precision` = {code}")))
}

/// The bias of mask and causal order together, and which rows see any key at all; without a mask all do.
fn standard_bias(
    call: &mut Call,
    mask: Option<ValueId>,
    causal: Option<ValueId>,
    dtype: DType,
) -> Result<(Option<ValueId>, Option<ValueId>)> {
    let low = f64::NEG_INFINITY;
    let Some(mut mask) = mask else {
        let bias = causal
            .map(|c| allowed_bias(call, c, dtype, low))
            .transpose()?;
        return Ok((bias, None));
    };
    if call.b.rank(mask) == 0 {
        mask = call.unsqueeze(mask, &[0])?;
    }
    let bias = if call.dtype(mask) == DType::Bool {
        let allowed = match causal {
            Some(causal) => call.b.emit(&AND, &[mask, causal], Attrs::new())?,
            None => mask,
        };
        allowed_bias(call, allowed, dtype, low)?
    } else {
        match causal {
            Some(causal) => {
                let causal = allowed_bias(call, causal, dtype, low)?;
                call.b.add(mask, causal)?
            }
            None => mask,
        }
    };
    let last = call.b.ints(&[-1]);
    let top = call.b.emit(&REDUCE_MAX, &[bias, last], Attrs::new())?;
    let lowest = call.b.scalar(dtype, low);
    let alive = call.b.emit(&GREATER, &[top, lowest], Attrs::new())?;
    let zero = call.b.scalar(dtype, 0.0);
    let bias = call.b.emit(&WHERE, &[alive, bias, zero], Attrs::new())?;
    Ok((Some(bias), Some(alive)))
}

/// Keys and values with as many heads as the queries have.
pub(super) fn grouped(
    call: &mut Call,
    q: ValueId,
    k: ValueId,
    v: ValueId,
) -> Result<(ValueId, ValueId)> {
    if call.same(&call.dims(q)[1], &call.dims(k)[1]) {
        return Ok((k, v));
    }
    let wide = call.size(q, 1, "the number of query heads")?;
    let narrow = call.size(k, 1, "the number of key heads")?;
    if narrow == 0 || wide % narrow != 0 {
        return Err(call
            .fail("shape", "the query heads are no multiple of the key heads")
            .found(format!("{wide} and {narrow}")));
    }
    let times = wide / narrow;
    Ok((repeat_heads(call, k, times)?, repeat_heads(call, v, times)?))
}

/// `com.microsoft::Attention`: one product makes queries, keys and values. Not supported: caches, rotary embedding,
/// mask indices that are not lengths.
pub fn packed(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, weights) = (call.need(0, "input")?, call.need(1, "weights")?);
    call.want_rank(x, &[3], "input")?;
    call.want_rank(weights, &[2], "weights")?;
    let heads = call.heads("num_heads")?;
    call.refuse(4, "past")?;
    call.refuse(6, "past_sequence_length")?;
    call.refuse_attribute("do_rotary")?;
    call.refuse_attribute("past_present_share_buffer")?;
    call.ignore("rotary_embedding_dim");
    let width = call.size(weights, 1, "the width of the weights")?;
    let sizes = match call.ints("qkv_hidden_sizes")? {
        Some(sizes) if sizes.len() == 3 && sizes.iter().sum::<i64>() == width => sizes,
        None if width % 3 == 0 => vec![width / 3; 3],
        other => {
            return Err(call
                .fail("shape", "the weights do not split into three")
                .found(format!("width {width}, qkv_hidden_sizes {other:?}")));
        }
    };
    let mut all = call.b.emit(&MATMUL, &[x, weights], Attrs::new())?;
    if let Some(bias) = call.opt(2) {
        all = call.b.add(all, bias)?;
    }
    let parts = call.split(all, &sizes, -1)?;
    let q = split_heads(call, parts[0], heads)?;
    let k = split_heads(call, parts[1], heads)?;
    let v = split_heads(call, parts[2], heads)?;
    let mask = call.opt(3);
    let extra = call.opt(5);
    let y = ort_attend(call, [q, k, v], mask, extra)?;
    Ok(Some(vec![
        Out::Value(y),
        Out::Absent("the cache is not a result that we compute"),
    ]))
}

/// `com.microsoft::MultiHeadAttention` on queries, keys and values that stand apart, are packed into the query or two of
/// them into the key, or come with heads in an axis of their own. Not supported: caches.
pub fn multi_head(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let heads = call.heads("num_heads")?;
    let query = call.need(0, "query")?;
    let mut parts = match (call.opt(1), call.opt(2)) {
        (None, None) => unpacked(call, query, "a packed query", 3)?,
        (Some(key), None) => {
            let mut parts = vec![query];
            parts.extend(unpacked(call, key, "a packed key", 2)?);
            parts
        }
        (Some(key), Some(value)) => vec![query, key, value],
        (None, Some(_)) => return Err(call.fail("arity", "a value without a key")),
    };
    call.want_rank(parts[0], &[3], "query")?;
    for (part, name) in parts[1..].iter().zip(["key", "value"]) {
        call.want_rank(*part, &[3, 4], name)?;
    }
    for (slot, name) in [
        (6, "past_key"),
        (7, "past_value"),
        (8, "past_sequence_length"),
        (9, "cache_indirection"),
    ] {
        call.refuse(slot, name)?;
    }
    if let Some(bias) = call.opt(3) {
        let mut sizes = Vec::new();
        for part in &parts {
            call.want_rank(*part, &[3], "an operand that a bias is added to")?;
            sizes.push(call.size(*part, 2, "the hidden size")?);
        }
        let biases = call.split(bias, &sizes, 0)?;
        for (part, bias) in parts.iter_mut().zip(biases) {
            *part = call.b.add(*part, bias)?;
        }
    }
    for part in &mut parts {
        if call.b.rank(*part) == 3 {
            *part = split_heads(call, *part, heads)?;
        }
    }
    let mask = call.opt(4);
    let extra = call.opt(5);
    let y = ort_attend(call, [parts[0], parts[1], parts[2]], mask, extra)?;
    Ok(Some(vec![
        Out::Value(y),
        Out::Value(parts[1]),
        Out::Value(parts[2]),
        Out::Absent("the scores are not a result that we compute"),
    ]))
}

/// [batch, sequence, heads, `count`, size] as so many operands [batch, sequence, heads·size].
fn unpacked(call: &mut Call, x: ValueId, what: &str, count: i64) -> Result<Vec<ValueId>> {
    call.want_rank(x, &[5], what)?;
    let heads = call.size(x, 2, "the number of heads")?;
    let size = call.size(x, 4, "the size of a head")?;
    if call.size(x, 3, "the number of packed operands")? != count {
        return Err(call
            .fail("shape", format!("{what} does not hold {count} operands"))
            .found(call.b.ty(x).to_string()));
    }
    let parts = call.split(x, &vec![1; count as usize], 3)?;
    let mut apart = Vec::with_capacity(parts.len());
    for part in parts {
        apart.push(call.reshape(part, &[0, 0, heads * size])?);
    }
    Ok(apart)
}

/// What ONNX Runtime's attention ops share behind their projections.
fn ort_attend(
    call: &mut Call,
    [q, k, v]: [ValueId; 3],
    mask: Option<ValueId>,
    extra: Option<ValueId>,
) -> Result<ValueId> {
    let dtype = call.dtype(q);
    let size = call.size(q, 3, "the size of a head")?;
    let scale = scale_of(call.float("scale", 0.0)?, size);
    let filter = f64::from(call.float("mask_filter_value", -10000.0)?);
    let mut bias = None;
    if let Some(mask) = mask {
        let allowed = ort_mask(call, mask, k)?;
        bias = Some(allowed_bias(call, allowed, dtype, filter)?);
    }
    if call.int("unidirectional", 0)? != 0 {
        let order = causal(call, q, k, None)?;
        let order = allowed_bias(call, order, dtype, f64::NEG_INFINITY)?;
        bias = Some(match bias {
            Some(bias) => call.b.add(bias, order)?,
            None => order,
        });
    }
    if let Some(extra) = extra {
        bias = Some(match bias {
            Some(bias) => call.b.add(bias, extra)?,
            None => extra,
        });
    }
    let heads = Heads {
        q,
        k,
        v,
        scale,
        softcap: 0.0,
        bias,
        precision: dtype,
    };
    let y = attend(call, &heads)?;
    merge_heads(call, y)
}

/// Which keys count, as a bool that broadcasts to the scores: from a mask [batch, keys] or [batch, queries, keys] in
/// which 0 means padding, or from the number of keys [batch].
fn ort_mask(call: &mut Call, mask: ValueId, k: ValueId) -> Result<ValueId> {
    let zero = Tensor::scalar_int(call.dtype(mask), 0);
    let zero = call.b.constant("const.0", zero);
    match call.b.rank(mask) {
        1 if call.same(&call.dims(mask)[0], &call.dims(k)[0]) => {
            let lengths = call.b.cast(mask, DType::I64)?;
            let lengths = call.unsqueeze(lengths, &[1, 2, 3])?;
            let columns = call.positions(k, 2)?;
            call.b.emit(&LESS, &[columns, lengths], Attrs::new())
        }
        2 => {
            let counts = call.b.emit(&GREATER, &[mask, zero], Attrs::new())?;
            call.unsqueeze(counts, &[1, 2])
        }
        3 => {
            let counts = call.b.emit(&GREATER, &[mask, zero], Attrs::new())?;
            call.unsqueeze(counts, &[1])
        }
        _ => Err(call
            .unsupported("a mask of this shape")
            .expected("[batch, keys], [batch, queries, keys] or [batch]")
            .found(call.b.ty(mask).to_string())),
    }
}
