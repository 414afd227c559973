//! Comparisons, boolean algebra and selection.

use super::arith::{binary, unary};
use super::context::*;
use ckpt_passes::ops::logic::*;

kernels! {
    AND => binary("aten::logical_and.out", &[]);
    OR => binary("aten::logical_or.out", &[]);
    XOR => binary("aten::logical_xor.out", &[]);
    NOT => unary("aten::logical_not.out", &[]);
    EQUAL => compare("aten::eq.Tensor_out");
    LESS => compare("aten::lt.Tensor_out");
    LESS_OR_EQUAL => compare("aten::le.Tensor_out");
    GREATER => compare("aten::gt.Tensor_out");
    GREATER_OR_EQUAL => compare("aten::ge.Tensor_out");
    IS_NAN => is_nan;
    IS_INF => is_inf;
    WHERE => select;
}

fn compare(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let out = empty(&broadcast(&[a, b]), Kind::Bool, a.device())?;
    write(name, args![a, b, &out])?;
    Ok(vec![out])
}

/// Only NaN differs from itself, so one comparison without a temporary suffices.
fn is_nan(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = empty_as(x, Kind::Bool)?;
    write("aten::ne.Tensor_out", args![x, x, &out])?;
    Ok(vec![out])
}

/// If both signs count, the second comparison is the declared temporary.
fn is_inf(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let equals = |number: f64| -> Result<Tensor> {
        let out = empty_as(x, Kind::Bool)?;
        let number = scalar(x.kind(), number)?;
        write("aten::eq.Tensor_out", args![x, &number, &out])?;
        Ok(out)
    };
    let out = match (cx.flag("detect_positive"), cx.flag("detect_negative")) {
        (true, true) => {
            let out = equals(f64::INFINITY)?;
            let negative = equals(f64::NEG_INFINITY)?;
            write("aten::logical_or.out", args![&out, &negative, &out])?;
            Ok(out)
        }
        (true, false) => equals(f64::INFINITY),
        (false, true) => equals(f64::NEG_INFINITY),
        // Nothing equals NaN.
        (false, false) => equals(f64::NAN),
    };
    Ok(vec![out?])
}

fn select(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (condition, a, b) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let out = cx.result(&broadcast(&[condition, a, b]), a.kind(), a.device())?;
    write("aten::where.self_out", args![condition, a, b, &out])?;
    Ok(vec![out])
}
