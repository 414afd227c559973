//! Arithmetic: elementwise with broadcasting, into row-major results.
//!
//! libtorch lets the result of an elementwise op take over the strides of its operands; ours are always row-major, so
//! the result is allocated here, or is an operand that dies, and the operator writes into it.

use super::{Kernel, KernelCx, broadcast, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::arith::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&ADD, |cx| binary(cx, "aten::add", "out", &[Arg::Int(1)])),
    (&SUB, |cx| binary(cx, "aten::sub", "out", &[Arg::Int(1)])),
    (&MUL, |cx| binary(cx, "aten::mul", "out", &[])),
    (&DIV, div),
    (&NEG, |cx| unary(cx, "aten::neg", "out", &[])),
    (&SUM, sum),
    (&ABS, |cx| unary(cx, "aten::abs", "out", &[])),
    (&SIGN, |cx| unary(cx, "aten::sign", "out", &[])),
    (&MOD, modulo),
    (&FLOOR, |cx| unary(cx, "aten::floor", "out", &[])),
    (&CEIL, |cx| unary(cx, "aten::ceil", "out", &[])),
    (&ROUND, |cx| unary(cx, "aten::round", "out", &[])),
    (&ROUND_THROUGH, |cx| unary(cx, "aten::round", "out", &[])),
];

/// Calls `name.overload(a, b, extra…, out)`.
pub fn binary(cx: &KernelCx, name: &str, overload: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&broadcast(&[a, b]), a.kind(), a.device())?;
    let mut args = vec![Arg::Tensor(a), Arg::Tensor(b)];
    args.extend_from_slice(extra);
    args.push(Arg::Tensor(&out));
    write(name, overload, &args)?;
    Ok(vec![out])
}

/// Calls `name.overload(x, extra…, out)`.
pub fn unary(cx: &KernelCx, name: &str, overload: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result(&x.size(), x.kind(), x.device())?;
    let mut args = vec![Arg::Tensor(x)];
    args.extend_from_slice(extra);
    args.push(Arg::Tensor(&out));
    write(name, overload, &args)?;
    Ok(vec![out])
}

/// ONNX integer division truncates towards zero.
fn div(cx: &KernelCx) -> Result<Vec<Tensor>> {
    match cx.x(0)?.kind() {
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16 => {
            binary(cx, "aten::div", "out", &[])
        }
        _ => binary(cx, "aten::div", "out_mode", &[Arg::Str("trunc")]),
    }
}

/// Adds operand after operand into one result.
fn sum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let all: Vec<&Tensor> = cx.ins.iter().flatten().copied().collect();
    let first = cx.x(0)?;
    let out = cx.result(&broadcast(&all), first.kind(), first.device())?;
    write(
        "aten::copy_",
        "",
        &[Arg::Tensor(&out), Arg::Tensor(first), Arg::Bool(false)],
    )?;
    for next in &all[1..] {
        write(
            "aten::add",
            "out",
            &[
                Arg::Tensor(&out),
                Arg::Tensor(next),
                Arg::Int(1),
                Arg::Tensor(&out),
            ],
        )?;
    }
    Ok(vec![out])
}

/// `fmod = 1`: the sign of the dividend; else of the divisor.
fn modulo(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let name = if cx.attrs.int("fmod") == 1 {
        "aten::fmod"
    } else {
        "aten::remainder"
    };
    binary(cx, name, "Tensor_out", &[])
}
