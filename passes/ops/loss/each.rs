//! How the loss of every label by itself is differentiated, computed by other runtimes, and what it takes.

use super::*;
use crate::ops::index::GATHER_ELEMENTS;
use crate::ops::shape::SQUEEZE;
use crate::ops::softmax::LOG_SOFTMAX;

/// That of the loss with no reduction.
pub fn grad(cx: &mut GradCx) -> Result<()> {
    if cx.wants(2) {
        return Err(weights_are_constants(cx));
    }
    let dy = cx.dy0();
    let narrow = cx.b.ty(cx.x(0)).dtype;
    let dloss = cx.b.cast(dy, narrow)?;
    let mut ins = vec![Some(dloss), Some(cx.x(0)), Some(cx.x(1))];
    ins.extend(cx.opt_x(2).map(Some));
    let own = cx.attrs();
    let mut attrs = Attrs::new().with("reduction", "none");
    if let Some(index) = own.opt_int("ignore_index") {
        attrs.set("ignore_index", index.into());
    }
    let op = match own.int("normalized") {
        0 => &SOFTMAX_CROSS_ENTROPY_LOSS_GRAD,
        _ => &NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD,
    };
    let dx = cx.b.emit_n(op, ins, attrs, 1)?[0];
    cx.give(0, dx);
    Ok(())
}

/// Some rows of scores and of losses, in the type computed in; labels and weights as libtorch wants them.
pub fn memory(cx: &MemoryCx) -> Footprint {
    let (Some(scores), Some(labels)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    if labels.elements() == 0 {
        return fresh(cx);
    }
    let wide = compute_type(scores.dtype).size_bytes();
    let weights = match cx.operand(2) {
        Some(w) if w.dtype.size_bytes() < wide => wide * w.elements(),
        _ => strided_bytes(cx, &[2]),
    };
    let row: i64 = labels.dims.iter().skip(1).product();
    let losses = (score_stretch(&scores.dims) * row) as u64 * wide;
    fresh(cx).with_temp(label_bytes(cx, 1) + weights + stretch_bytes(scores) + losses + wide)
}

/// In standard ops.
pub fn body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let mut scores = widen(cx.b, cx.x(0))?;
    let dtype = cx.ty(scores).dtype;
    if cx.attrs.int("normalized") == 0 {
        scores =
            cx.b.emit(&LOG_SOFTMAX, &[scores], Attrs::new().with("axis", 1))?;
    }
    let labels = cx.b.cast(cx.x(1), DType::I64)?;
    // Labels that are ignored may be no class at all.
    let (counts, labels) = match cx.attrs.opt_int("ignore_index") {
        Some(_) => {
            let counts = counting(cx.b, labels, cx.attrs)?;
            let first = cx.b.int(0);
            (Some(counts), cx.eval(select(counts, labels, first))?)
        }
        None => (None, labels),
    };
    let along = |axis: i64| Attrs::new().with("axis", axis);
    let axis = cx.b.ints(&[1]);
    let at = cx.eval(binary_op(&UNSQUEEZE, labels, axis))?;
    let picked = cx.b.emit(&GATHER_ELEMENTS, &[scores, at], along(1))?;
    let mut loss = cx.bind(-binary_op(&SQUEEZE, picked, axis))?;
    if let Some(weights) = cx.opt_x(2) {
        let weights = cx.b.cast(weights, dtype)?;
        let weight = cx.b.emit(&GATHER, &[weights, labels], along(0))?;
        loss = cx.bind(loss * weight)?;
    }
    if let Some(counts) = counts {
        loss = cx.bind(select(counts, loss, 0.0))?;
    }
    Ok(vec![loss.0])
}
