//! ONNX `Attention` (23 to 25), with caches inside and outside the op, windows, and the scores as a result.
//!
//! A row whose keys are all masked gives zeros (ONNX Attention, errata). The bias decides that, not NaNs among the
//! weights. So the gradient of such a row is zero too, and a NaN from elsewhere stays visible.

use super::attention::{Heads, allowed_bias, grouped, merge_heads, scale_of, score, split_heads};
use super::call::{Call, Lowered, Out, UNREAD, same};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, OpDef, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::logic::{AND, GREATER, GREATER_OR_EQUAL, LESS, LESS_OR_EQUAL, WHERE};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::reduce::REDUCE_MAX;

/// The keys that each query may see by the op's attributes.
struct Visibility {
    /// Bool that broadcasts to [batch, heads, queries, keys]; `None`: all keys.
    allowed: Option<ValueId>,
    /// Whether a query may see no key at all.
    may_be_empty: bool,
}

/// ONNX Attention-25; older ones are special cases of it.
pub fn attention(call: &mut Call) -> Lowered {
    let [q, k, v] = call.operands(["Q", "K", "V"])?;
    let flat = call.rank(q) == 3;
    let rank = [if flat { 3 } else { 4 }];
    for (operand, name) in [(q, "Q"), (k, "K"), (v, "V")] {
        call.want_rank(operand, &rank, name)?;
    }
    let (q, mut k, mut v) = if flat {
        let (wide, narrow) = (
            call.attr_positive("q_num_heads")?,
            call.attr_positive("kv_num_heads")?,
        );
        (
            split_heads(call, q, wide)?,
            split_heads(call, k, narrow)?,
            split_heads(call, v, narrow)?,
        )
    } else {
        // Only for 3-D operands; the shape says how many there are.
        call.ignore_attr("q_num_heads");
        call.ignore_attr("kv_num_heads");
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
    let mode = call.attr_int("qk_matmul_output_mode", 0)?;
    let size = call.size(q, 3, "the size of a head")?;
    let scale = scale_of(call.attr_float("scale", 0.0)?, size);
    let softcap = f64::from(call.attr_float("softcap", 0.0)?);
    let precision = softmax_precision(call, q)?;
    let mask = call.opt(3);
    let visible = visibility(call, q, k, past)?;
    let Bias { full, safe, alive } = bias_of(call, mask, &visible, k, call.dtype(q))?;
    let present = (k, v);
    let (k, v) = grouped(call, q, k, v)?;
    let heads = Heads {
        q,
        k,
        v,
        scale,
        softcap,
        bias: safe,
        sink: None,
        precision,
    };
    let scores = score(call, &heads)?;
    let mut y = call.op(&MATMUL, &[scores.weights, v])?;
    if let Some(alive) = alive {
        let zero = call.scalar_like(y, 0.0);
        y = call.op(&WHERE, &[alive, y, zero])?;
    }
    if flat {
        y = merge_heads(call, y)?;
    }
    let shown = if !call.wants(3) {
        Out::Absent(UNREAD)
    } else {
        Out::Value(match (mode, full, alive) {
            (0, ..) => scores.raw,
            (1, ..) | (2, None, _) => scores.capped,
            (2, Some(full), _) => call.add(scores.capped, full)?,
            (3, _, None) => scores.weights,
            (3, _, Some(alive)) => {
                let zero = call.scalar_like(scores.weights, 0.0);
                let ins = [alive, scores.weights, zero];
                call.op(&WHERE, &ins)?
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
    let code = call.attr_int("softmax_precision", 0)?;
    if code == 0 {
        return Ok(call.dtype(q));
    }
    i32::try_from(code)
        .ok()
        .and_then(DType::from_onnx_code)
        .filter(|d| d.is_float())
        .ok_or_else(|| call.unsupported(format!("`softmax_precision` = {code}")))
}

/// Combines causal order, windows, and the padding of a cache that `nonpad_kv_seqlen` measures. Query `i` has position
/// `i` + offset among the keys; the offset is the number of keys before the first query.
fn visibility(
    call: &mut Call,
    q: ValueId,
    k: ValueId,
    past: Option<ValueId>,
) -> Result<Visibility> {
    let causal = call.attr_flag("is_causal")?;
    let (left, right) = (
        call.attr_int("left_window_size", -1)?,
        call.attr_int("right_window_size", -1)?,
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
            rows = call.add(rows, before)?;
        } else if let Some(lengths) = lengths {
            let queries = call.axis_size(q, 2)?;
            let before = call.sub(lengths, queries)?;
            let before = call.unsqueeze(before, &[1, 2, 3])?;
            rows = call.add(rows, before)?;
        }
        let columns = call.positions(k, 2)?;
        if causal {
            let seen = [columns, rows];
            allowed = also(call, allowed, &LESS_OR_EQUAL, seen)?;
        }
        if left >= 0 {
            let left = call.int(left);
            let first = call.sub(rows, left)?;
            allowed = also(call, allowed, &GREATER_OR_EQUAL, [columns, first])?;
        }
        if right >= 0 {
            let right = call.int(right);
            let last = call.add(rows, right)?;
            allowed = also(call, allowed, &LESS_OR_EQUAL, [columns, last])?;
        }
    }
    if let Some(lengths) = lengths {
        let columns = call.positions(k, 2)?;
        let lengths = call.unsqueeze(lengths, &[1, 2, 3])?;
        allowed = also(call, allowed, &LESS, [columns, lengths])?;
    }
    Ok(Visibility {
        allowed,
        may_be_empty: lengths.is_some() || left >= 0 || right >= 0,
    })
}

/// Returns `allowed` and a comparison.
fn also(
    call: &mut Call,
    allowed: Option<ValueId>,
    compare: &'static OpDef,
    operands: [ValueId; 2],
) -> Result<Option<ValueId>> {
    let more = call.op(compare, &operands)?;
    Ok(Some(match allowed {
        Some(so_far) => call.op(&AND, &[so_far, more])?,
        None => more,
    }))
}

/// The bias that is added to the scores.
#[derive(Default)]
struct Bias {
    /// Of mask and visibility together.
    full: Option<ValueId>,
    /// `full` with zeros in the rows that see no key.
    safe: Option<ValueId>,
    /// Which rows see a key; `None` if all do.
    alive: Option<ValueId>,
}

fn bias_of(
    call: &mut Call,
    mask: Option<ValueId>,
    visible: &Visibility,
    k: ValueId,
    dtype: DType,
) -> Result<Bias> {
    let low = f64::NEG_INFINITY;
    let bias = match (mask, visible.allowed) {
        (None, None) => return Ok(Bias::default()),
        (None, Some(allowed)) => allowed_bias(call, allowed, dtype, low)?,
        (Some(mask), allowed) => {
            let mask = as_long_as(call, mask, k)?;
            if call.dtype(mask) == DType::Bool {
                let both = match allowed {
                    Some(allowed) => call.op(&AND, &[mask, allowed])?,
                    None => mask,
                };
                allowed_bias(call, both, dtype, low)?
            } else {
                match allowed {
                    Some(allowed) => {
                        let hidden = allowed_bias(call, allowed, dtype, low)?;
                        call.add(mask, hidden)?
                    }
                    None => mask,
                }
            }
        }
    };
    if mask.is_none() && !visible.may_be_empty {
        return Ok(Bias {
            full: Some(bias),
            safe: Some(bias),
            alive: None,
        });
    }
    let last = call.ints(&[-1]);
    let top = call.op(&REDUCE_MAX, &[bias, last])?;
    let lowest = call.scalar(dtype, low);
    let alive = call.op(&GREATER, &[top, lowest])?;
    let zero = call.scalar(dtype, 0.0);
    let guarded = call.op(&WHERE, &[alive, bias, zero])?;
    Ok(Bias {
        full: Some(bias),
        safe: Some(guarded),
        alive: Some(alive),
    })
}

/// Extends a mask to all keys: those beyond its end are masked.
fn as_long_as(call: &mut Call, mask: ValueId, k: ValueId) -> Result<ValueId> {
    let rank = call.rank(mask);
    if rank == 0 {
        return call.unsqueeze(mask, &[0]);
    }
    let (own, keys) = (call.dims(mask)[rank - 1].clone(), call.dims(k)[2].clone());
    let shorter = keys.sub(&own).bounds().0.is_some_and(|least| least > 0);
    if own.is_one() || !shorter || same(&own, &keys) {
        return Ok(mask);
    }
    let (keys, own) = (call.axis_vector(k, 2)?, call.axis_vector(mask, rank - 1)?);
    let missing = call.sub(keys, own)?;
    let none = call.ints(&vec![0; 2 * rank - 1]);
    let pads = call.concat(&[none, missing], 0)?;
    let fill = match call.dtype(mask) {
        DType::Bool => None,
        dtype => Some(call.scalar(dtype, f64::NEG_INFINITY)),
    };
    let ins = vec![Some(mask), Some(pads), fill];
    Ok(call.emit_n(&PAD, ins, Attrs::new(), 1)?[0])
}
