//! ONNX `Attention` (23 to 25): with caches inside and outside the op, windows, and the scores as a result.
//!
//! Rows in which every key is masked give zeros (ONNX Attention, errata). The bias decides that, not a look for NaN in
//! the weights: so the gradient of such a row is zero as well, and a NaN that comes from elsewhere stays visible.

use super::attention::{Heads, allowed_bias, grouped, merge_heads, scale_of, score, split_heads};
use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Same, ValueId};
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::logic::{AND, GREATER, GREATER_OR_EQUAL, LESS, LESS_OR_EQUAL, WHERE};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::reduce::REDUCE_MAX;

/// Which keys each query may see, as far as the op's own attributes say.
struct Sight {
    /// Bool that broadcasts to [batch, heads, queries, keys]; `None`: all of them.
    allowed: Option<ValueId>,
    /// Whether a query may be left without a key.
    may_be_blind: bool,
}

/// ONNX Attention-25; older ones are special cases of it.
pub fn attention(call: &mut Call) -> Result<Option<Vec<Out>>> {
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
    let mode = call.int("qk_matmul_output_mode", 0)?;
    let size = call.size(q, 3, "the size of a head")?;
    let scale = scale_of(call.float("scale", 0.0)?, size);
    let softcap = f64::from(call.float("softcap", 0.0)?);
    let precision = softmax_precision(call, q)?;
    let mask = call.opt(3);
    let sight = sight(call, q, k, past)?;
    let Bias { full, safe, alive } = bias_of(call, mask, &sight, k, call.dtype(q))?;
    let present = (k, v);
    let (k, v) = grouped(call, q, k, v)?;
    let heads = Heads {
        q,
        k,
        v,
        scale,
        softcap,
        bias: safe,
        precision,
    };
    let scores = score(call, &heads)?;
    let mut y = call.b.emit(&MATMUL, &[scores.weights, v], Attrs::new())?;
    if let Some(alive) = alive {
        let zero = call.b.scalar(call.dtype(y), 0.0);
        y = call.b.emit(&WHERE, &[alive, y, zero], Attrs::new())?;
    }
    if flat {
        y = merge_heads(call, y)?;
    }
    let shown = if !call.wants(3) {
        Out::Absent("nobody asked for it")
    } else {
        Out::Value(match (mode, full, alive) {
            (0, ..) => scores.raw,
            (1, ..) | (2, None, _) => scores.capped,
            (2, Some(full), _) => call.b.add(scores.capped, full)?,
            (3, _, None) => scores.weights,
            (3, _, Some(alive)) => {
                let zero = call.b.scalar(call.dtype(scores.weights), 0.0);
                let ins = [alive, scores.weights, zero];
                call.b.emit(&WHERE, &ins, Attrs::new())?
            }
            (other, ..) => {
                return Err(call.unsupported(format!("`qk_matmul_output_mode` = {other}")));
            }
        })
    };
    Ok(Some(vec![
        Out::Value(y),
        Out::Value(present.0),
        Out::Value(present.1),
        shown,
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

/// Causal order, windows, and the padding of a cache that `nonpad_kv_seqlen` measures. Query `i` stands at the place
/// `i` + offset among the keys, where the offset is the number of keys that come before the first query.
fn sight(call: &mut Call, q: ValueId, k: ValueId, past: Option<ValueId>) -> Result<Sight> {
    let causal = call.int("is_causal", 0)? != 0;
    let (left, right) = (
        call.int("left_window_size", -1)?,
        call.int("right_window_size", -1)?,
    );
    if left < -1 || right < -1 {
        return Err(call.fail("attribute", format!("a window from {left} to {right}")));
    }
    let lengths = call.opt(6);
    if lengths.is_some() && past.is_some() {
        return Err(call.fail("arity", "nonpad_kv_seqlen and past_key are both given"));
    }
    if let Some(lengths) = lengths {
        call.want_rank(lengths, &[1], "nonpad_kv_seqlen")?;
    }
    let mut allowed = None;
    if causal || left >= 0 || right >= 0 {
        let rows = call.positions(q, 2)?;
        let mut rows = call.unsqueeze(rows, &[1])?;
        if let Some(past) = past {
            let before = call.axis_size(past, 2)?;
            rows = call.b.add(rows, before)?;
        } else if let Some(lengths) = lengths {
            let queries = call.axis_size(q, 2)?;
            let before = call.b.sub(lengths, queries)?;
            let before = call.unsqueeze(before, &[1, 2, 3])?;
            rows = call.b.add(rows, before)?;
        }
        let columns = call.positions(k, 2)?;
        if causal {
            let seen = [columns, rows];
            allowed = also(call, allowed, &LESS_OR_EQUAL, seen)?;
        }
        if left >= 0 {
            let left = call.b.int(left);
            let first = call.b.sub(rows, left)?;
            allowed = also(call, allowed, &GREATER_OR_EQUAL, [columns, first])?;
        }
        if right >= 0 {
            let right = call.b.int(right);
            let last = call.b.add(rows, right)?;
            allowed = also(call, allowed, &LESS_OR_EQUAL, [columns, last])?;
        }
    }
    if let Some(lengths) = lengths {
        let columns = call.positions(k, 2)?;
        let lengths = call.unsqueeze(lengths, &[1, 2, 3])?;
        allowed = also(call, allowed, &LESS, [columns, lengths])?;
    }
    Ok(Sight {
        allowed,
        may_be_blind: lengths.is_some() || left >= 0 || right >= 0,
    })
}

/// `allowed` where a comparison holds, too.
fn also(
    call: &mut Call,
    allowed: Option<ValueId>,
    compare: &'static ckpt_passes::ir::OpDef,
    operands: [ValueId; 2],
) -> Result<Option<ValueId>> {
    let more = call.b.emit(compare, &operands, Attrs::new())?;
    Ok(Some(match allowed {
        Some(so_far) => call.b.emit(&AND, &[so_far, more], Attrs::new())?,
        None => more,
    }))
}

/// What is added to the scores.
#[derive(Default)]
struct Bias {
    /// Of mask and sight together.
    full: Option<ValueId>,
    /// The same with zeros in the rows that see no key.
    safe: Option<ValueId>,
    /// Which rows see a key, where there may be others.
    alive: Option<ValueId>,
}

fn bias_of(
    call: &mut Call,
    mask: Option<ValueId>,
    sight: &Sight,
    k: ValueId,
    dtype: DType,
) -> Result<Bias> {
    let low = f64::NEG_INFINITY;
    let bias = match (mask, sight.allowed) {
        (None, None) => return Ok(Bias::default()),
        (None, Some(allowed)) => allowed_bias(call, allowed, dtype, low)?,
        (Some(mask), allowed) => {
            let mask = as_long_as(call, mask, k)?;
            if call.dtype(mask) == DType::Bool {
                let both = match allowed {
                    Some(allowed) => call.b.emit(&AND, &[mask, allowed], Attrs::new())?,
                    None => mask,
                };
                allowed_bias(call, both, dtype, low)?
            } else {
                match allowed {
                    Some(allowed) => {
                        let hidden = allowed_bias(call, allowed, dtype, low)?;
                        call.b.add(mask, hidden)?
                    }
                    None => mask,
                }
            }
        }
    };
    if mask.is_none() && !sight.may_be_blind {
        return Ok(Bias {
            full: Some(bias),
            safe: Some(bias),
            alive: None,
        });
    }
    let last = call.b.ints(&[-1]);
    let top = call.b.emit(&REDUCE_MAX, &[bias, last], Attrs::new())?;
    let lowest = call.b.scalar(dtype, low);
    let alive = call.b.emit(&GREATER, &[top, lowest], Attrs::new())?;
    let zero = call.b.scalar(dtype, 0.0);
    let guarded = call.b.emit(&WHERE, &[alive, bias, zero], Attrs::new())?;
    Ok(Bias {
        full: Some(bias),
        safe: Some(guarded),
        alive: Some(alive),
    })
}

/// A mask with an entry for every key: those that it does not reach are masked.
fn as_long_as(call: &mut Call, mask: ValueId, k: ValueId) -> Result<ValueId> {
    let rank = call.b.rank(mask);
    if rank == 0 {
        return call.unsqueeze(mask, &[0]);
    }
    let (own, keys) = (call.dims(mask)[rank - 1].clone(), call.dims(k)[2].clone());
    let shorter = keys.sub(&own).bounds().0.is_some_and(|least| least > 0);
    if own.is_one() || !shorter || own.same(&keys) == Same::Yes {
        return Ok(mask);
    }
    let (keys, own) = (call.axis_vector(k, 2)?, call.axis_vector(mask, rank - 1)?);
    let missing = call.b.sub(keys, own)?;
    let none = call.b.ints(&vec![0; 2 * rank - 1]);
    let pads = call.concat(&[none, missing], 0)?;
    let fill = match call.dtype(mask) {
        DType::Bool => None,
        dtype => Some(call.b.scalar(dtype, f64::NEG_INFINITY)),
    };
    let ins = vec![Some(mask), Some(pads), fill];
    Ok(call.b.emit_n(&PAD, ins, Attrs::new(), 1)?[0])
}
