//! `com.microsoft::GroupQueryAttention` on a whole sequence, without a cache of earlier keys.
//!
//! A query sees no later key, and with a window no key too far before it. Padding rows beyond the length of a sequence are
//! computed like any other, because no other row sees them.

use super::attention::{Heads, allowed_bias, attend, grouped, merge_heads, scale_of, split_heads};
use super::call::{Call, Lowered, Out};
use super::rotary::rotated_at;
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::logic::{AND, LESS_OR_EQUAL};

/// Fails unless a cache operand is absent or empty.
fn refuse_cache(call: &mut Call, slot: usize, name: &str) -> Result<()> {
    let Some(cache) = call.opt(slot) else {
        return Ok(());
    };
    match call.dims(cache).get(2).and_then(|d| d.as_const()) {
        Some(0) => Ok(()),
        _ => Err(call
            .unsupported(format!("operand {slot} (`{name}`) that is not empty"))
            .found(call.ty(cache).to_string())
            .help("export the model without caches")),
    }
}

/// `GroupQueryAttention`. Not supported: caches, quantised keys.
pub fn grouped_query(call: &mut Call) -> Lowered {
    let query = call.need(0, "query")?;
    call.want_rank(query, &[3], "query")?;
    let (wide, narrow) = (
        call.attr_positive("num_heads")?,
        call.attr_positive("kv_num_heads")?,
    );
    let pieces = match (call.opt(1), call.opt(2)) {
        (Some(key), Some(value)) => {
            call.want_rank(key, &[3], "key")?;
            call.want_rank(value, &[3], "value")?;
            vec![query, key, value]
        }
        (None, None) => {
            let width = call.size(query, 2, "the width of the packed query")?;
            let all = wide + 2 * narrow;
            if width % all != 0 {
                return Err(call
                    .fail(
                        "shape",
                        format!("{all} heads do not divide the packed query"),
                    )
                    .found(call.ty(query).to_string()));
            }
            let size = width / all;
            call.split(query, &[wide * size, narrow * size, narrow * size], -1)?
        }
        _ => return Err(call.fail("arity", "key and value go together")),
    };
    refuse_cache(call, 3, "past_key")?;
    refuse_cache(call, 4, "past_value")?;
    // Without a cache the shapes give the length of every sequence.
    call.need(5, "seqlens_k")?;
    call.need(6, "total_sequence_length")?;
    call.refuse_attr("qk_output")?;
    let mut q = split_heads(call, pieces[0], wide)?;
    let mut k = split_heads(call, pieces[1], narrow)?;
    let v = split_heads(call, pieces[2], narrow)?;
    if call.attr_flag("do_rotary")? {
        let tables = [call.need(7, "cos_cache")?, call.need(8, "sin_cache")?];
        let interleaved = call.attr_flag("rotary_interleaved")?;
        let positions = call.opt(9);
        q = rotated_at(call, q, tables, positions, interleaved)?;
        k = rotated_at(call, k, tables, positions, interleaved)?;
    } else {
        // Only the rotation reads these.
        for slot in 7..10 {
            call.opt(slot);
        }
        call.ignore_attr("rotary_interleaved");
    }
    let window = match call.attr_int("local_window_size", -1)? {
        0 => return Err(call.unsupported("`local_window_size` = 0")),
        window => window,
    };
    let dtype = call.dtype(q);
    let seen = seen_keys(call, q, window)?;
    let mut bias = allowed_bias(call, seen, dtype, f64::NEG_INFINITY)?;
    if let Some(extra) = call.opt(10) {
        bias = call.add(bias, extra)?;
    }
    let size = call.size(q, 3, "the size of a head")?;
    let present = [k, v];
    let (k, v) = grouped(call, q, k, v)?;
    let heads = Heads {
        q,
        k,
        v,
        scale: scale_of(call.attr_float("scale", 0.0)?, size),
        softcap: f64::from(call.attr_float("softcap", 0.0)?),
        bias: Some(bias),
        sink: sink_of(call, wide, dtype)?,
        precision: dtype,
    };
    let y = attend(call, &heads)?;
    let y = merge_heads(call, y)?;
    Ok(Some(vec![
        Out::Value(y),
        Out::Value(present[0]),
        Out::Value(present[1]),
        Out::Absent("the scores are not a result that we compute"),
    ]))
}

/// Returns the scores that enter the softmax without a value vector, [heads]: zeros for `smooth_softmax`.
fn sink_of(call: &mut Call, heads: i64, dtype: DType) -> Result<Option<ValueId>> {
    // The default is -1.
    let is_smooth = call.attr_int("smooth_softmax", -1)? == 1;
    if let Some(sink) = call.opt(11) {
        call.want_rank(sink, &[1], "head_sink")?;
        return Ok(Some(sink));
    }
    if !is_smooth {
        return Ok(None);
    }
    let zero = call.scalar(dtype, 0.0);
    let shape = call.ints(&[heads]);
    call.expand(zero, shape).map(Some)
}

/// Returns which keys a query sees: the last `window` up to and including its own, or all of those if `window` is negative.
fn seen_keys(call: &mut Call, q: ValueId, window: i64) -> Result<ValueId> {
    let columns = call.positions(q, 2)?;
    let rows = call.unsqueeze(columns, &[1])?;
    let mut seen = call.op(&LESS_OR_EQUAL, &[columns, rows])?;
    if window > 0 {
        let width = call.int(window - 1);
        let first = call.sub(rows, width)?;
        let near = call.op(&LESS_OR_EQUAL, &[first, columns])?;
        seen = call.op(&AND, &[seen, near])?;
    }
    Ok(seen)
}
