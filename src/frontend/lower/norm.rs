//! Normalisations that ONNX Runtime fuses: of a residual sum, of a sum of embeddings, and by root mean square.

use super::call::{Call, Lowered, Out, UNREAD};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::logic::EQUAL;
use ckpt_passes::ops::norm::{LAYER_NORM, RMS_NORM};
use ckpt_passes::ops::reduce::REDUCE_SUM;
use ckpt_passes::ops::rule::{Formulas, binary_op, cast};

const STATISTICS: &str = "the statistics of a fused normalisation are not computed";

/// Default of `epsilon` in the fused normalisations.
const FUSED_EPSILON: f32 = 1e-12;

/// Normalises over the last axis: LayerNormalization, or with `rms` RMSNormalization.
fn normalised(
    call: &mut Call,
    rms: bool,
    ins: [Option<ValueId>; 3],
    epsilon: f32,
) -> Result<ValueId> {
    let attrs = Attrs::new().with("axis", -1).with("epsilon", epsilon);
    let op = if rms { &RMS_NORM } else { &LAYER_NORM };
    let given = 2 + usize::from(ins[2].is_some());
    Ok(call.emit_n(op, ins[..given].to_vec(), attrs, 1)?[0])
}

/// `SkipLayerNormalization`: LayerNormalization of a residual sum, which is a result too.
pub fn skip(call: &mut Call) -> Lowered {
    of_residual(call, false)
}

/// `SkipSimplifiedLayerNormalization`: RMSNormalization of a residual sum, which is a result too.
pub fn skip_simplified(call: &mut Call) -> Lowered {
    of_residual(call, true)
}

/// Normalises input + skip (+ bias); `skip` may lack the batch axis.
fn of_residual(call: &mut Call, rms: bool) -> Lowered {
    let epsilon = call.attr_float("epsilon", FUSED_EPSILON)?;
    let [x, skip] = call.operands(["input", "skip"])?;
    let mut sum = call.add(x, skip)?;
    if let Some(bias) = call.opt(if rms { 3 } else { 4 }) {
        sum = call.add(sum, bias)?;
    }
    let gamma = call.need(2, "gamma")?;
    let beta = if rms { None } else { call.opt(3) };
    let y = normalised(call, rms, [Some(sum), Some(gamma), beta], epsilon)?;
    Ok(Some(vec![
        Out::Value(y),
        Out::Absent(STATISTICS),
        Out::Absent(STATISTICS),
        Out::Value(sum),
    ]))
}

/// `SimplifiedLayerNormalization`, as ONNX Runtime writes it: RMSNormalization under its old name.
pub fn simplified(call: &mut Call) -> Lowered {
    let ins = call.operands(["X", "scale"])?;
    let attrs = Attrs::new()
        .with("axis", call.attr_int("axis", -1)?)
        .with("epsilon", call.attr_float("epsilon", 1e-5)?)
        .with("stash_type", call.attr_int("stash_type", 1)?);
    let y = call.emit(&RMS_NORM, &ins, attrs)?;
    Ok(Some(vec![Out::Value(y), Out::Absent(STATISTICS)]))
}

/// `EmbedLayerNormalization`: LayerNormalization of word + position (+ segment) embeddings.
///
/// Without `position_ids` the positions are 0, 1, … along the sequence.
pub fn embed(call: &mut Call) -> Lowered {
    let ids = call.need(0, "input_ids")?;
    call.want_rank(ids, &[2], "input_ids")?;
    let words = call.need(2, "word_embedding")?;
    let position_table = call.need(3, "position_embedding")?;
    let epsilon = call.attr_float("epsilon", FUSED_EPSILON)?;
    call.ignore_attr("mask_index_type"); // Whether the mask index is asked for shows in the results.
    let mask = call.opt(7);
    let words = call.gather(words, ids, 0)?;
    let positions = match call.opt(8) {
        Some(positions) => positions,
        None => call.positions(ids, 1)?,
    };
    let positions = call.gather(position_table, positions, 0)?;
    let mut sum = call.add(words, positions)?;
    match (call.opt(1), call.opt(4)) {
        (Some(segments), Some(table)) => {
            let segments = call.gather(table, segments, 0)?;
            sum = call.add(sum, segments)?;
        }
        (None, None) => {}
        _ => {
            return Err(call.fail("arity", "segment ids and the segment embedding go together"));
        }
    }
    let (gamma, beta) = (call.need(5, "gamma")?, call.need(6, "beta")?);
    let y = normalised(call, false, [Some(sum), Some(gamma), Some(beta)], epsilon)?;
    let index = if call.wants(1) {
        Out::Value(mask_index(call, ids, mask)?)
    } else {
        Out::Absent(UNREAD)
    };
    Ok(Some(vec![Out::Value(y), index, Out::Value(sum)]))
}

/// Counts the words of each row whose mask is 1: int32 [batch]; 0 without a mask.
fn mask_index(call: &mut Call, ids: ValueId, mask: Option<ValueId>) -> Result<ValueId> {
    let Some(mask) = mask else {
        let zero = call.scalar(DType::I32, 0.0);
        let batch = call.axis_vector(ids, 0)?;
        return call.expand(zero, batch);
    };
    call.want_rank(mask, &[2], "mask")?;
    let words = call.eval(cast(binary_op(&EQUAL, mask, 1.0), DType::I32))?;
    let axis = call.ints(&[1]);
    let attrs = Attrs::new().with("keepdims", 0);
    call.emit(&REDUCE_SUM, &[words, axis], attrs)
}
