//! Activations: ONNX Runtime's GELUs (com.microsoft `Gelu`, `BiasGelu`, `FastGelu`, `QuickGelu`), and the standard's `Swish`,
//! `Selu` and `Celu`.

use super::call::{Call, Lowered, one};
use ckpt_passes::ir::{Attrs, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::activation::{GELU, SIGMOID};
use ckpt_passes::ops::piecewise::ELU;
use ckpt_passes::ops::rule::{Formulas, Term, unary_op};

fn emit_gelu(call: &mut Call, x: ValueId, approximate: &str) -> Lowered {
    let attrs = Attrs::new().with("approximate", approximate);
    one(call.emit(&GELU, &[x], attrs)?)
}

/// x·Φ(x) by the error function.
pub fn gelu(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    emit_gelu(call, x, "none")
}

/// `gelu(A + B)`.
pub fn bias_gelu(call: &mut Call) -> Lowered {
    let [a, bias] = call.operands(["A", "B"])?;
    let x = call.add(a, bias)?;
    emit_gelu(call, x, "none")
}

/// x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) of the operand plus an optional bias.
pub fn fast_gelu(call: &mut Call) -> Lowered {
    let mut x = call.need(0, "X")?;
    if let Some(bias) = call.opt(1) {
        x = call.add(x, bias)?;
    }
    emit_gelu(call, x, "tanh")
}

/// x·σ(alpha·x) with ONNX Runtime's default of alpha.
pub fn quick_gelu(call: &mut Call) -> Lowered {
    gated(call, 1.702)
}

/// x·σ(alpha·x) (ONNX Swish-24).
pub fn swish(call: &mut Call) -> Lowered {
    gated(call, 1.0)
}

fn gated(call: &mut Call, default_alpha: f32) -> Lowered {
    let x = Term(call.need(0, "X")?);
    let steep = match call.attr_float("alpha", default_alpha)? {
        1.0 => x.into(),
        alpha => x * f64::from(alpha),
    };
    one(call.eval(x * unary_op(&SIGMOID, steep))?)
}

/// ONNX Selu-6: gamma·ELU of slope alpha.
pub fn selu(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    let alpha = call.attr_float("alpha", 1.673_263_2)?;
    let gamma = f64::from(call.attr_float("gamma", 1.050_701)?);
    let y = call.emit(&ELU, &[x], Attrs::new().with("alpha", alpha))?;
    one(call.scaled(y, gamma)?)
}

/// ONNX Celu-12: max(0, x) + min(0, alpha·(exp(x/alpha) − 1)), which is alpha·ELU(x/alpha).
pub fn celu(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    let alpha = f64::from(call.attr_float("alpha", 1.0)?);
    if alpha <= 0.0 {
        return Err(call.unsupported(format!("`alpha` = {alpha}")));
    }
    let scaled = call.scaled(x, 1.0 / alpha)?;
    let y = call.emit(&ELU, &[scaled], Attrs::new().with("alpha", 1.0f32))?;
    one(call.scaled(y, alpha)?)
}
