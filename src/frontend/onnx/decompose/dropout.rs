//! `Dropout` that drops nothing (ONNX Dropout-12, -13, -22): without `training_mode`, or where it is false.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType};
use ckpt_passes::ops::shape::IDENTITY;

/// The operand itself; the mask, if asked for, is all true. A dropout that drops is left as it is.
pub fn evaluation(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "data")?;
    call.opt(1); // The ratio does not matter where nothing is dropped.
    call.ignore("ratio");
    call.ignore("seed");
    // Opset 11 has no training mode: its node drops nothing.
    if call.opset >= 12
        && let Some(training) = call.opt(2)
    {
        let known = call
            .b
            .contents
            .get(training)
            .and_then(|c| c.first()?.as_const());
        if known != Some(0) {
            return Ok(None);
        }
    }
    let y = call.b.emit(&IDENTITY, &[x], Attrs::new())?;
    let mask = if call.opset < 12 {
        Out::Absent("what the mask holds is only said since opset 12")
    } else if call.wants(1) {
        let (shape, on) = (call.b.shape(x)?, call.b.scalar(DType::Bool, 1.0));
        Out::Value(call.expand(on, shape)?)
    } else {
        Out::Absent("nobody asked for the mask")
    };
    Ok(Some(vec![Out::Value(y), mask]))
}
