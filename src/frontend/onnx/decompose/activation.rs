//! GELU in ONNX Runtime's spellings (com.microsoft: `Gelu`, `BiasGelu`, `FastGelu`, `QuickGelu`), and the standard's
//! relatives of ELU.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, ValueId};
use ckpt_passes::ops::activation::{GELU, SIGMOID};
use ckpt_passes::ops::piecewise::ELU;

fn emit_gelu(call: &mut Call, x: ValueId, approximate: &str) -> Result<Option<Vec<Out>>> {
    let attrs = Attrs::new().with("approximate", approximate);
    Ok(Some(vec![Out::Value(call.b.emit(&GELU, &[x], attrs)?)]))
}

/// x·Φ(x) by the error function.
pub fn gelu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    emit_gelu(call, x, "none")
}

/// `gelu(A + B)`.
pub fn bias_gelu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (a, bias) = (call.need(0, "A")?, call.need(1, "B")?);
    let x = call.b.add(a, bias)?;
    emit_gelu(call, x, "none")
}

/// x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) of the operand plus an optional bias.
pub fn fast_gelu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let mut x = call.need(0, "X")?;
    if let Some(bias) = call.opt(1) {
        x = call.b.add(x, bias)?;
    }
    emit_gelu(call, x, "tanh")
}

/// x·σ(alpha·x); alpha defaults to 1.702.
pub fn quick_gelu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let alpha = call.float("alpha", 1.702)?;
    let steep = if alpha == 1.0 {
        x
    } else {
        call.scaled(x, f64::from(alpha))?
    };
    let gate = call.b.emit(&SIGMOID, &[steep], Attrs::new())?;
    Ok(Some(vec![Out::Value(call.b.mul(x, gate)?)]))
}

/// ONNX Selu-6: gamma·ELU of slope alpha.
pub fn selu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let alpha = call.float("alpha", 1.673_263_2)?;
    let gamma = f64::from(call.float("gamma", 1.050_701)?);
    let y = call.b.emit(&ELU, &[x], Attrs::new().with("alpha", alpha))?;
    Ok(Some(vec![Out::Value(call.scaled(y, gamma)?)]))
}

/// ONNX Celu-12: max(0, x) + min(0, alpha·(exp(x/alpha) − 1)), which is alpha·ELU(x/alpha).
pub fn celu(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let alpha = f64::from(call.float("alpha", 1.0)?);
    if alpha <= 0.0 {
        return Err(call.unsupported(format!("`alpha` = {alpha}")));
    }
    let scaled = call.scaled(x, 1.0 / alpha)?;
    let y = call
        .b
        .emit(&ELU, &[scaled], Attrs::new().with("alpha", 1.0f32))?;
    Ok(Some(vec![Out::Value(call.scaled(y, alpha)?)]))
}
