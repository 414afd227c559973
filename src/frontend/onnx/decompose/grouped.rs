//! `com.microsoft::GroupQueryAttention` on a whole sequence, without a cache of earlier keys.
//!
//! A query sees no later key, and with a window not those too far before it either. Rows behind a sequence's length,
//! which are padding, see what they would see if they were not: no other row sees them.

use super::attention::{Heads, allowed_bias, attend, grouped, merge_heads, scale_of, split_heads};
use super::rotary::turned_at;
use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, ValueId};
use ckpt_passes::ops::logic::{AND, LESS_OR_EQUAL};

/// Fails unless a cache is absent or empty.
fn refuse_cache(call: &mut Call, slot: usize, name: &str) -> Result<()> {
    let Some(cache) = call.opt(slot) else {
        return Ok(());
    };
    match call.dims(cache).get(2).and_then(|d| d.as_const()) {
        Some(0) => Ok(()),
        _ => Err(call
            .unsupported(format!("operand {slot} (`{name}`) that is not empty"))
            .found(call.b.ty(cache).to_string())
            .help("export the model without caches")),
    }
}

/// Not supported: caches, sinks, quantised keys.
pub fn grouped_query(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let query = call.need(0, "query")?;
    call.want_rank(query, &[3], "query")?;
    let (wide, narrow) = (call.heads("num_heads")?, call.heads("kv_num_heads")?);
    let parts = match (call.opt(1), call.opt(2)) {
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
                    .found(call.b.ty(query).to_string()));
            }
            let size = width / all;
            call.split(query, &[wide * size, narrow * size, narrow * size], -1)?
        }
        _ => return Err(call.fail("arity", "key and value go together")),
    };
    refuse_cache(call, 3, "past_key")?;
    refuse_cache(call, 4, "past_value")?;
    // Without a cache every sequence is as long as the operands say.
    call.need(5, "seqlens_k")?;
    call.need(6, "total_sequence_length")?;
    call.refuse(11, "head_sink")?;
    call.refuse_attribute("smooth_softmax")?;
    call.refuse_attribute("qk_output")?;
    let mut q = split_heads(call, parts[0], wide)?;
    let mut k = split_heads(call, parts[1], narrow)?;
    let v = split_heads(call, parts[2], narrow)?;
    if call.int("do_rotary", 0)? != 0 {
        let tables = [call.need(7, "cos_cache")?, call.need(8, "sin_cache")?];
        let interleaved = call.int("rotary_interleaved", 0)? != 0;
        let positions = call.opt(9);
        q = turned_at(call, q, tables, positions, interleaved)?;
        k = turned_at(call, k, tables, positions, interleaved)?;
    } else {
        // What only turning reads.
        for slot in 7..10 {
            call.opt(slot);
        }
        call.ignore("rotary_interleaved");
    }
    let window = match call.int("local_window_size", -1)? {
        0 => return Err(call.unsupported("`local_window_size` = 0")),
        window => window,
    };
    let dtype = call.dtype(q);
    let seen = seen_keys(call, q, window)?;
    let mut bias = allowed_bias(call, seen, dtype, f64::NEG_INFINITY)?;
    if let Some(extra) = call.opt(10) {
        bias = call.b.add(bias, extra)?;
    }
    let size = call.size(q, 3, "the size of a head")?;
    let present = [k, v];
    let (k, v) = grouped(call, q, k, v)?;
    let heads = Heads {
        q,
        k,
        v,
        scale: scale_of(call.float("scale", 0.0)?, size),
        softcap: f64::from(call.float("softcap", 0.0)?),
        bias: Some(bias),
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

/// Which keys a query sees: none later, and of the others the last `window`, itself included, unless that is negative.
fn seen_keys(call: &mut Call, q: ValueId, window: i64) -> Result<ValueId> {
    let columns = call.positions(q, 2)?;
    let rows = call.unsqueeze(columns, &[1])?;
    let mut seen = call
        .b
        .emit(&LESS_OR_EQUAL, &[columns, rows], Attrs::new())?;
    if window > 0 {
        let width = call.b.int(window - 1);
        let first = call.b.sub(rows, width)?;
        let near = call
            .b
            .emit(&LESS_OR_EQUAL, &[first, columns], Attrs::new())?;
        seen = call.b.emit(&AND, &[seen, near], Attrs::new())?;
    }
    Ok(seen)
}
