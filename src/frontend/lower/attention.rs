//! Attention as products, a bias and a softmax: the steps that all attention ops share, and ONNX Runtime's `Attention` with
//! packed weights and `MultiHeadAttention`.
//!
//! Only the queries are scaled. That gives the same product as √scale on both sides, with one node and one saved tensor
//! fewer.

use super::call::{Call, Lowered, Out, same};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::activation::TANH;
use ckpt_passes::ops::logic::{GREATER, LESS, LESS_OR_EQUAL, WHERE};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::rule::{Formulas, Term, unary_op};
use ckpt_passes::ops::softmax::SOFTMAX;

/// Operands of attention, with the heads in an axis of their own.
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
    /// [heads]: one more score for each query, without a value vector.
    pub(super) sink: Option<ValueId>,
    /// The element type of the softmax.
    pub(super) precision: DType,
}

/// Intermediate results of attention, each [batch, heads, queries, keys].
pub(super) struct Scores {
    /// scale·q·kᵀ.
    pub(super) raw: ValueId,
    /// After the soft cap.
    pub(super) capped: ValueId,
    /// After the softmax.
    pub(super) weights: ValueId,
}

/// Returns softmax(cap(scale·q·kᵀ) + bias)·v: [batch, heads, queries, value size].
pub(super) fn attend(call: &mut Call, heads: &Heads) -> Result<ValueId> {
    let scores = score(call, heads)?;
    call.op(&MATMUL, &[scores.weights, heads.v])
}

/// Returns attention up to the product with the values.
pub(super) fn score(call: &mut Call, heads: &Heads) -> Result<Scores> {
    let q = match heads.scale {
        1.0 => heads.q,
        scale => call.scaled(heads.q, scale)?,
    };
    let k = call.transpose(heads.k, &[0, 1, 3, 2])?;
    let raw = call.op(&MATMUL, &[q, k])?;
    let mut scores = raw;
    if heads.softcap != 0.0 {
        let small = Term(scores) * (1.0 / heads.softcap);
        scores = call.eval(unary_op(&TANH, small) * heads.softcap)?;
    }
    let capped = scores;
    if let Some(bias) = heads.bias {
        scores = call.add(scores, bias)?;
    }
    let dtype = call.dtype(scores);
    let scores = call.cast(scores, heads.precision)?;
    let weights = softmax(call, heads, scores)?;
    Ok(Scores {
        raw,
        capped,
        weights: call.cast(weights, dtype)?,
    })
}

/// Returns the weights of the keys. With a sink, they are the rest that it leaves.
fn softmax(call: &mut Call, heads: &Heads, scores: ValueId) -> Result<ValueId> {
    let last = || Attrs::new().with("axis", -1);
    let Some(sink) = heads.sink else {
        return call.emit(&SOFTMAX, &[scores], last());
    };
    let sink = call.reshape(sink, &[1, -1, 1, 1])?;
    let sink = call.cast(sink, heads.precision)?;
    let shape = [call.sizes(heads.q, 0..3)?, call.ints(&[1])];
    let shape = call.concat(&shape, 0)?;
    let column = call.expand(sink, shape)?;
    let all = call.concat(&[scores, column], 3)?;
    let all = call.emit(&SOFTMAX, &[all], last())?;
    let keys = [call.ints(&[0]), call.sizes(heads.k, 2..3)?];
    call.slice(all, keys, 3)
}

/// Returns the scale that the file gives, or 1/√size where it gives none.
pub(super) fn scale_of(given: f32, size: i64) -> f64 {
    match given {
        0.0 => 1.0 / (size as f64).sqrt(),
        scale => f64::from(scale),
    }
}

/// Turns [batch, sequence, heads·size] into [batch, heads, sequence, size].
pub(super) fn split_heads(call: &mut Call, x: ValueId, heads: i64) -> Result<ValueId> {
    let hidden = call.size(x, 2, "the hidden size")?;
    let size = call.head_size(x, hidden, heads)?;
    let apart = call.reshape(x, &[0, 0, heads, size])?;
    call.transpose(apart, &[0, 2, 1, 3])
}

/// Turns [batch, heads, sequence, size] into [batch, sequence, heads·size].
pub(super) fn merge_heads(call: &mut Call, x: ValueId) -> Result<ValueId> {
    let heads = call.size(x, 1, "the number of heads")?;
    let size = call.size(x, 3, "the size of a head")?;
    let together = call.transpose(x, &[0, 2, 1, 3])?;
    call.reshape(together, &[0, 0, heads * size])
}

/// Repeats each head of [batch, heads, sequence, size] `times` times.
fn repeat_heads(call: &mut Call, x: ValueId, times: i64) -> Result<ValueId> {
    let heads = call.size(x, 1, "the number of heads")?;
    let apart = call.unsqueeze(x, &[2])?;
    let group = call.ints(&[1, 1, times, 1, 1]);
    let wide = call.expand(apart, group)?;
    let together = call.ints(&[heads * times]);
    let shape = [
        call.axis_vector(x, 0)?,
        together,
        call.axis_vector(x, 2)?,
        call.axis_vector(x, 3)?,
    ];
    call.reshape_to_all(wide, &shape)
}

/// Returns the causal mask: bool [queries, keys], true where the key is not after the query.
fn causal(call: &mut Call, q: ValueId, k: ValueId) -> Result<ValueId> {
    let rows = call.positions(q, 2)?;
    let rows = call.unsqueeze(rows, &[1])?;
    let columns = call.positions(k, 2)?;
    call.op(&LESS_OR_EQUAL, &[columns, rows])
}

/// Returns 0 where `allowed`, and `otherwise` elsewhere.
pub(super) fn allowed_bias(
    call: &mut Call,
    allowed: ValueId,
    dtype: DType,
    otherwise: f64,
) -> Result<ValueId> {
    let (zero, low) = (call.scalar(dtype, 0.0), call.scalar(dtype, otherwise));
    call.op(&WHERE, &[allowed, zero, low])
}

/// Repeats keys and values to as many heads as the queries have.
pub(super) fn grouped(
    call: &mut Call,
    q: ValueId,
    k: ValueId,
    v: ValueId,
) -> Result<(ValueId, ValueId)> {
    if same(&call.dims(q)[1], &call.dims(k)[1]) {
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

/// `com.microsoft::Attention`: one product computes queries, keys and values. Not supported: caches, rotary embedding, and
/// mask indices that are not lengths.
pub fn packed(call: &mut Call) -> Lowered {
    let [x, weights] = call.operands(["input", "weights"])?;
    call.want_rank(x, &[3], "input")?;
    call.want_rank(weights, &[2], "weights")?;
    let heads = call.attr_positive("num_heads")?;
    call.refuse(4, "past")?;
    call.refuse(6, "past_sequence_length")?;
    call.refuse_attr("do_rotary")?;
    call.refuse_attr("past_present_share_buffer")?;
    call.ignore_attr("rotary_embedding_dim");
    let width = call.size(weights, 1, "the width of the weights")?;
    let sizes = match call.attr_ints("qkv_hidden_sizes")? {
        Some(sizes) if sizes.len() == 3 && sizes.iter().sum::<i64>() == width => sizes,
        None if width % 3 == 0 => vec![width / 3; 3],
        other => {
            return Err(call
                .fail("shape", "the weights do not split into three")
                .found(format!("width {width}, qkv_hidden_sizes {other:?}")));
        }
    };
    let mut all = call.op(&MATMUL, &[x, weights])?;
    if let Some(bias) = call.opt(2) {
        all = call.add(all, bias)?;
    }
    let pieces = call.split(all, &sizes, -1)?;
    let q = split_heads(call, pieces[0], heads)?;
    let k = split_heads(call, pieces[1], heads)?;
    let v = split_heads(call, pieces[2], heads)?;
    let mask = call.opt(3);
    let extra = call.opt(5);
    let y = ort_attend(call, [q, k, v], mask, extra)?;
    Ok(Some(vec![
        Out::Value(y),
        Out::Absent("the cache is not a result that we compute"),
    ]))
}

/// `com.microsoft::MultiHeadAttention`. Queries, keys and values are separate, all packed into the query, or the last two
/// packed into the key; keys and values may have an axis of heads. Not supported: caches.
pub fn multi_head(call: &mut Call) -> Lowered {
    let heads = call.attr_positive("num_heads")?;
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
            *part = call.add(*part, bias)?;
        }
    }
    for part in &mut parts {
        if call.rank(*part) == 3 {
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

/// Unpacks [batch, sequence, heads, `count`, size] into `count` operands [batch, sequence, heads·size].
fn unpacked(call: &mut Call, x: ValueId, what: &str, count: i64) -> Result<Vec<ValueId>> {
    call.want_rank(x, &[5], what)?;
    let heads = call.size(x, 2, "the number of heads")?;
    let size = call.size(x, 4, "the size of a head")?;
    if call.size(x, 3, "the number of packed operands")? != count {
        return Err(call
            .fail("shape", format!("{what} does not hold {count} operands"))
            .found(call.ty(x).to_string()));
    }
    let pieces = call.split(x, &vec![1; count as usize], 3)?;
    pieces
        .into_iter()
        .map(|piece| call.reshape(piece, &[0, 0, heads * size]))
        .collect()
}

/// Lowers what ONNX Runtime's attention ops share after their projections.
fn ort_attend(
    call: &mut Call,
    [q, k, v]: [ValueId; 3],
    mask: Option<ValueId>,
    extra: Option<ValueId>,
) -> Result<ValueId> {
    let dtype = call.dtype(q);
    let size = call.size(q, 3, "the size of a head")?;
    let scale = scale_of(call.attr_float("scale", 0.0)?, size);
    let filter = f64::from(call.attr_float("mask_filter_value", -10000.0)?);
    let mut bias = None;
    if let Some(mask) = mask {
        let allowed = ort_mask(call, mask, k)?;
        bias = Some(allowed_bias(call, allowed, dtype, filter)?);
    }
    if call.attr_flag("unidirectional")? {
        let order = causal(call, q, k)?;
        let order = allowed_bias(call, order, dtype, f64::NEG_INFINITY)?;
        bias = Some(call.added(bias, order)?);
    }
    if let Some(extra) = extra {
        bias = Some(call.added(bias, extra)?);
    }
    let heads = Heads {
        q,
        k,
        v,
        scale,
        softcap: 0.0,
        bias,
        sink: None,
        precision: dtype,
    };
    let y = attend(call, &heads)?;
    merge_heads(call, y)
}

/// Returns which keys count, as a bool that broadcasts to the scores. The mask is [batch, keys] or [batch, queries, keys],
/// where 0 means padding, or the number of keys [batch].
fn ort_mask(call: &mut Call, mask: ValueId, k: ValueId) -> Result<ValueId> {
    let zero = Tensor::scalar_int(call.dtype(mask), 0);
    let zero = call.constant("const.0", zero);
    match call.rank(mask) {
        1 if same(&call.dims(mask)[0], &call.dims(k)[0]) => {
            let lengths = call.cast(mask, DType::I64)?;
            let lengths = call.unsqueeze(lengths, &[1, 2, 3])?;
            let columns = call.positions(k, 2)?;
            call.op(&LESS, &[columns, lengths])
        }
        2 => {
            let counts = call.op(&GREATER, &[mask, zero])?;
            call.unsqueeze(counts, &[1, 2])
        }
        3 => {
            let counts = call.op(&GREATER, &[mask, zero])?;
            call.unsqueeze(counts, &[1])
        }
        _ => Err(call
            .unsupported("a mask of this shape")
            .expected("[batch, keys], [batch, queries, keys] or [batch]")
            .found(call.ty(mask).to_string())),
    }
}
