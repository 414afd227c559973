//! Arithmetic: elementwise with broadcasting, into row-major results.
//!
//! libtorch may give the result of an elementwise op the strides of its operands, but our results are always row-major. So the
//! operator writes into a tensor that is allocated here, or over an operand that is not read again.

use super::context::*;
use ckpt_passes::ops::arith::*;

kernels! {
    ADD => binary("aten::add.out", args![1]);
    SUB => binary("aten::sub.out", args![1]);
    MUL => binary("aten::mul.out", &[]);
    DIV => div;
    NEG => unary("aten::neg.out", &[]);
    SUM => sum;
    ABS => unary("aten::abs.out", &[]);
    SIGN => unary("aten::sign.out", &[]);
    MOD => modulo;
    FLOOR => unary("aten::floor.out", &[]);
    CEIL => unary("aten::ceil.out", &[]);
    ROUND => unary("aten::round.out", &[]);
    ROUND_THROUGH => unary("aten::round.out", &[]);
}

/// Calls `name(a, b, extra…, out)`.
pub fn binary(cx: &KernelCx, name: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result(&broadcast(&[a, b]), a.kind(), a.device())?;
    write_with(name, args![a, b], extra, &out)?;
    Ok(vec![out])
}

/// Calls `name(x, extra…, out)`.
pub fn unary(cx: &KernelCx, name: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = cx.result_like(x)?;
    write_with(name, args![x], extra, &out)?;
    Ok(vec![out])
}

/// Calls `name(dy, saved, extra…, grad_input)`; our rows take (saved, dy).
pub fn gradient(cx: &KernelCx, name: &str, extra: &[Arg]) -> Result<Vec<Tensor>> {
    let (saved, dy) = (cx.x(0)?, cx.x(1)?);
    let out = cx.result_like(saved)?;
    write_with(name, args![dy, saved], extra, &out)?;
    Ok(vec![out])
}

/// ONNX integer division truncates towards zero.
fn div(cx: &KernelCx) -> Result<Vec<Tensor>> {
    match is_float(cx.x(0)?.kind()) {
        true => binary(cx, "aten::div.out", &[]),
        false => binary(cx, "aten::div.out_mode", args!["trunc"]),
    }
}

/// Adds operand after operand into one result.
fn sum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let all = cx.all();
    let first = cx.x(0)?;
    let out = cx.result(&broadcast(&all), first.kind(), first.device())?;
    copy_into(&out, first)?;
    for next in &all[1..] {
        write("aten::add.out", args![&out, *next, 1, &out])?;
    }
    Ok(vec![out])
}

/// With `fmod` the result has the sign of the dividend, else of the divisor.
fn modulo(cx: &KernelCx) -> Result<Vec<Tensor>> {
    match cx.attrs.int("fmod") == 1 {
        true => binary(cx, "aten::fmod.Tensor_out", &[]),
        false => binary(cx, "aten::remainder.Tensor_out", &[]),
    }
}
