//! Normalisations that ONNX Runtime fuses: over a residual sum, over a sum of embeddings, and by root mean square.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, ValueId};
use ckpt_passes::ops::logic::EQUAL;
use ckpt_passes::ops::norm::{LAYER_NORM, RMS_NORM};
use ckpt_passes::ops::reduce::REDUCE_SUM;

const STATISTICS: &str = "the statistics of a fused normalisation are not computed";

/// Default of `epsilon` in the fused normalisations.
const FUSED_EPSILON: f32 = 1e-12;

fn layer_norm(
    call: &mut Call,
    x: ValueId,
    gamma: ValueId,
    beta: Option<ValueId>,
    epsilon: f32,
) -> Result<ValueId> {
    let attrs = Attrs::new().with("axis", -1).with("epsilon", epsilon);
    let mut ins = vec![Some(x), Some(gamma)];
    ins.extend(beta.map(Some));
    Ok(call.b.emit_n(&LAYER_NORM, ins, attrs, 1)?[0])
}

/// input + skip (+ bias); `skip` may lack the batch axis.
fn residual(call: &mut Call, bias: usize) -> Result<ValueId> {
    let (x, skip) = (call.need(0, "input")?, call.need(1, "skip")?);
    let sum = call.b.add(x, skip)?;
    match call.opt(bias) {
        Some(bias) => call.b.add(sum, bias),
        None => Ok(sum),
    }
}

/// `SkipLayerNormalization`: LayerNormalization over the last axis of a residual sum, which is a result too.
pub fn skip(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let epsilon = call.float("epsilon", FUSED_EPSILON)?;
    let sum = residual(call, 4)?;
    let gamma = call.need(2, "gamma")?;
    let beta = call.opt(3);
    let y = layer_norm(call, sum, gamma, beta, epsilon)?;
    Ok(Some(with_sum(y, sum)))
}

/// `SkipSimplifiedLayerNormalization`: RMSNormalization over the last axis of a residual sum, which is a result too.
pub fn skip_simplified(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let epsilon = call.float("epsilon", FUSED_EPSILON)?;
    let sum = residual(call, 3)?;
    let gamma = call.need(2, "gamma")?;
    let attrs = Attrs::new().with("axis", -1).with("epsilon", epsilon);
    let y = call.b.emit(&RMS_NORM, &[sum, gamma], attrs)?;
    Ok(Some(with_sum(y, sum)))
}

fn with_sum(y: ValueId, sum: ValueId) -> Vec<Out> {
    vec![
        Out::Value(y),
        Out::Absent(STATISTICS),
        Out::Absent(STATISTICS),
        Out::Value(sum),
    ]
}

/// `SimplifiedLayerNormalization`, as ONNX Runtime writes it: RMSNormalization under its old name.
pub fn simplified(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, scale) = (call.need(0, "X")?, call.need(1, "scale")?);
    let attrs = Attrs::new()
        .with("axis", call.int("axis", -1)?)
        .with("epsilon", call.float("epsilon", 1e-5)?)
        .with("stash_type", call.int("stash_type", 1)?);
    let y = call.b.emit(&RMS_NORM, &[x, scale], attrs)?;
    Ok(Some(vec![Out::Value(y), Out::Absent(STATISTICS)]))
}

/// `EmbedLayerNormalization`: LayerNormalization of word + position (+ segment) embeddings.
///
/// Without `position_ids` the positions are 0, 1, … along the sequence.
pub fn embed(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let ids = call.need(0, "input_ids")?;
    call.want_rank(ids, &[2], "input_ids")?;
    let words = call.need(2, "word_embedding")?;
    let position_table = call.need(3, "position_embedding")?;
    let epsilon = call.float("epsilon", FUSED_EPSILON)?;
    call.ignore("mask_index_type"); // Whether the mask index is asked for shows in the results.
    let mask = call.opt(7);
    let words = call.gather_rows(words, ids)?;
    let positions = match call.opt(8) {
        Some(positions) => positions,
        None => call.positions(ids, 1)?,
    };
    let positions = call.gather_rows(position_table, positions)?;
    let mut sum = call.b.add(words, positions)?;
    match (call.opt(1), call.opt(4)) {
        (Some(segments), Some(table)) => {
            let segments = call.gather_rows(table, segments)?;
            sum = call.b.add(sum, segments)?;
        }
        (None, None) => {}
        _ => {
            return Err(call.fail("arity", "segment ids and the segment embedding go together"));
        }
    }
    let (gamma, beta) = (call.need(5, "gamma")?, call.need(6, "beta")?);
    let y = layer_norm(call, sum, gamma, Some(beta), epsilon)?;
    let index = if call.wants(1) {
        Out::Value(mask_index(call, ids, mask)?)
    } else {
        Out::Absent("nobody asked for the mask index")
    };
    Ok(Some(vec![Out::Value(y), index, Out::Value(sum)]))
}

/// How many words count in each row, those whose mask is 1: int32 [batch]; 0 without a mask.
fn mask_index(call: &mut Call, ids: ValueId, mask: Option<ValueId>) -> Result<ValueId> {
    let Some(mask) = mask else {
        let zero = call.b.scalar(DType::I32, 0.0);
        let batch = call.axis_vector(ids, 0)?;
        return call.expand(zero, batch);
    };
    call.want_rank(mask, &[2], "mask")?;
    let one = call.b.scalar(call.dtype(mask), 1.0);
    let words = call.b.emit(&EQUAL, &[mask, one], Attrs::new())?;
    let words = call.b.cast(words, DType::I32)?;
    let axis = call.b.ints(&[1]);
    let attrs = Attrs::new().with("keepdims", 0);
    call.b.emit(&REDUCE_SUM, &[words, axis], attrs)
}
