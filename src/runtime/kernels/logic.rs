//! Comparisons, boolean algebra and selection.

use super::arith::{binary, unary};
use super::{Kernel, KernelCx, broadcast, empty, scalar, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::logic::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&AND, |cx| binary(cx, "aten::logical_and", "out", &[])),
    (&OR, |cx| binary(cx, "aten::logical_or", "out", &[])),
    (&XOR, |cx| binary(cx, "aten::logical_xor", "out", &[])),
    (&NOT, |cx| unary(cx, "aten::logical_not", "out", &[])),
    (&EQUAL, |cx| compare(cx, "aten::eq")),
    (&LESS, |cx| compare(cx, "aten::lt")),
    (&LESS_OR_EQUAL, |cx| compare(cx, "aten::le")),
    (&GREATER, |cx| compare(cx, "aten::gt")),
    (&GREATER_OR_EQUAL, |cx| compare(cx, "aten::ge")),
    (&IS_NAN, is_nan),
    (&IS_INF, is_inf),
    (&WHERE, select),
];

fn compare(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let out = empty(&broadcast(&[a, b]), Kind::Bool, a.device())?;
    write(
        name,
        "Tensor_out",
        &[Arg::Tensor(a), Arg::Tensor(b), Arg::Tensor(&out)],
    )?;
    Ok(vec![out])
}

/// NaN is what differs from itself: one comparison, no temporary.
fn is_nan(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = empty(&x.size(), Kind::Bool, x.device())?;
    write(
        "aten::ne",
        "Tensor_out",
        &[Arg::Tensor(x), Arg::Tensor(x), Arg::Tensor(&out)],
    )?;
    Ok(vec![out])
}

fn is_inf(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = empty(&x.size(), Kind::Bool, x.device())?;
    let (positive, negative) = (
        cx.attrs.int("detect_positive") != 0,
        cx.attrs.int("detect_negative") != 0,
    );
    let (name, bound) = match (positive, negative) {
        (true, true) => return is_either_inf(x, &out).map(|()| vec![out]),
        (true, false) => ("aten::eq", f64::INFINITY),
        (false, true) => ("aten::eq", f64::NEG_INFINITY),
        // Nothing equals NaN.
        (false, false) => ("aten::eq", f64::NAN),
    };
    write(
        name,
        "Tensor_out",
        &[
            Arg::Tensor(x),
            Arg::Tensor(&scalar(x.kind(), bound)?),
            Arg::Tensor(&out),
        ],
    )?;
    Ok(vec![out])
}

/// `+inf`, then `-inf` or-ed in; the second comparison is the declared temporary.
fn is_either_inf(x: &Tensor, out: &Tensor) -> Result<()> {
    write(
        "aten::eq",
        "Tensor_out",
        &[
            Arg::Tensor(x),
            Arg::Tensor(&scalar(x.kind(), f64::INFINITY)?),
            Arg::Tensor(out),
        ],
    )?;
    let negative = empty(&x.size(), Kind::Bool, x.device())?;
    write(
        "aten::eq",
        "Tensor_out",
        &[
            Arg::Tensor(x),
            Arg::Tensor(&scalar(x.kind(), f64::NEG_INFINITY)?),
            Arg::Tensor(&negative),
        ],
    )?;
    write(
        "aten::logical_or",
        "out",
        &[Arg::Tensor(out), Arg::Tensor(&negative), Arg::Tensor(out)],
    )?;
    Ok(())
}

fn select(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (condition, a, b) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let out = cx.result(&broadcast(&[condition, a, b]), a.kind(), a.device())?;
    write(
        "aten::where",
        "self_out",
        &[
            Arg::Tensor(condition),
            Arg::Tensor(a),
            Arg::Tensor(b),
            Arg::Tensor(&out),
        ],
    )?;
    Ok(vec![out])
}
