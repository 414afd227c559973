//! Sums of narrow terms, widened some rows at a time, and sums of products that never exist whole.

use super::matmul::{check_inner, prepared, sized};
use super::{Kernel, KernelCx, arith, call, copy_into, empty, write, write_product};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::accumulate::*;
use ckpt_passes::ops::matmul::gemm_plan;
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&ACCUMULATE, accumulate), (&ADD_PRODUCT, add_product)];

fn accumulate(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (sum, part) = (cx.x(0)?, cx.x(1)?);
    if sum.kind() == part.kind() {
        return arith::binary(cx, "aten::add", "out", &[Arg::Int(1)]);
    }
    let size = part.size();
    let out = cx.result(&sum.size(), sum.kind(), sum.device())?;
    if part.numel() == 0 {
        return Ok(vec![out]);
    }
    let buffer = wide_rows(&size, sum)?;
    add_widened(sum, part, &out, &buffer)?;
    Ok(vec![out])
}

/// Some rows of `size`, in the type of the sum.
fn wide_rows(size: &[i64], sum: &Tensor) -> Result<Tensor> {
    let mut dims = size.to_vec();
    if let Some(rows) = dims.first_mut() {
        *rows = stretch(size);
    }
    empty(&dims, sum.kind(), sum.device())
}

/// sum + part into `out`, as many rows at a time as `buffer` has.
fn add_widened(sum: &Tensor, part: &Tensor, out: &Tensor, buffer: &Tensor) -> Result<()> {
    let size = part.size();
    let total = size.first().copied().unwrap_or(1);
    let most = buffer.size().first().copied().unwrap_or(1);
    let mut at = 0;
    while at < total {
        let count = most.min(total - at);
        let wide = rows(buffer, 0, count)?;
        copy_into(&wide, &rows(part, at, count)?)?;
        let (own, target) = (rows(sum, at, count)?, rows(out, at, count)?);
        let args = [
            Arg::Tensor(&own),
            Arg::Tensor(&wide),
            Arg::Int(1),
            Arg::Tensor(&target),
        ];
        write("aten::add", "out", &args)?;
        at += count;
    }
    Ok(())
}

/// sum + A'·B': one call where both have one type, else some rows of the product at a time.
fn add_product(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (sum, a, b) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let flip = |name: &str| cx.attrs.int(name) != 0;
    let plan = gemm_plan(&sized(a)?, &sized(b)?, flip("transA"), flip("transB"));
    let out = cx.result(&sum.size(), sum.kind(), sum.device())?;
    if plan.is_empty() {
        if out.data_ptr() != sum.data_ptr() {
            copy_into(&out, sum)?;
        }
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    check_inner(cx, a, b, left.size()[1], right.size()[0])?;
    if a.kind() == sum.kind() {
        let args = [
            Arg::Tensor(sum),
            Arg::Tensor(&left),
            Arg::Tensor(&right),
            Arg::Double(1.0),
            Arg::Double(1.0),
            Arg::Tensor(&out),
        ];
        write_product("aten::addmm", "out", &args)?;
        return Ok(vec![out]);
    }
    let most = product_stretch(&plan.out);
    let made = empty(&[most, plan.out[1]], a.kind(), a.device())?;
    let buffer = wide_rows(&plan.out, sum)?;
    let mut at = 0;
    while at < plan.out[0] {
        let count = most.min(plan.out[0] - at);
        let (some, part) = (rows(&left, at, count)?, rows(&made, 0, count)?);
        let args = [Arg::Tensor(&some), Arg::Tensor(&right), Arg::Tensor(&part)];
        write_product("aten::mm", "out", &args)?;
        add_widened(
            &rows(sum, at, count)?,
            &part,
            &rows(&out, at, count)?,
            &buffer,
        )?;
        at += count;
    }
    Ok(vec![out])
}

/// Rows of a tensor; all of it where it has none.
fn rows(x: &Tensor, at: i64, count: i64) -> Result<Tensor> {
    if x.dim() == 0 {
        return Ok(x.alias());
    }
    let args = [Arg::Tensor(x), Arg::Int(0), Arg::Int(at), Arg::Int(count)];
    call("aten::narrow", "", &args)
}
