//! Products by groups of rows: one call of BLAS for each group that has rows.

use super::context::*;
use super::matmul::{check_inner, prepared};
use super::product::Product;
use ckpt_passes::ops::grouped::*;
use ckpt_passes::ops::matmul::plan::{grouped_plan, grouped_weight_plan};

/// The kernels of this family, by op.
pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&GROUPED_MATMUL, grouped_matmul),
    (&GROUPED_WEIGHT_GRAD, grouped_weight_grad),
];

fn grouped_matmul(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, b) = (cx.x(0)?, cx.x(1)?);
    let plan = grouped_plan(&sized(x)?, &sized(b)?, cx.flag("transB"));
    let ends = cx.ints(ENDS)?;
    if ends.len() as i64 != plan.b.dims[0] {
        let found = format!("{:?} and {} ends", b.size(), ends.len());
        return Err(cx.shape_error("the numbers of groups differ").found(found));
    }
    check_inner(cx, x, b, plan.k, plan.b.dims[1])?;
    let out = empty(&plan.out, x.kind(), x.device())?;
    if plan.is_empty() || ends.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(x, &plan.a)?, prepared(b, &plan.b)?);
    let mut done = 0;
    for (group, rows) in groups(&ends, plan.out[0]).into_iter().enumerate() {
        let count = rows.end - rows.start;
        if count > 0 {
            let own = |x: &Tensor| narrow(x, 0, rows.start, count);
            let matrix = right.select(0, group as i64);
            Product::plain(&own(&left)?, &matrix, &own(&out)?).write()?;
        }
        done = rows.end;
    }
    if done < plan.out[0] {
        zero(&narrow(&out, 0, done, plan.out[0] - done)?)?;
    }
    Ok(vec![out])
}

fn grouped_weight_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let ends = cx.ints(ENDS)?;
    let plan = grouped_weight_plan(&sized(a)?, &sized(b)?, ends.len() as i64);
    check_inner(cx, a, b, plan.k, plan.b.dims[0])?;
    let out = empty(&plan.out, a.kind(), a.device())?;
    if plan.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    for (group, rows) in groups(&ends, plan.k).into_iter().enumerate() {
        let matrix = out.select(0, group as i64);
        let count = rows.end - rows.start;
        if count == 0 {
            zero(&matrix)?;
            continue;
        }
        let own = |x: &Tensor| narrow(x, 0, rows.start, count);
        let turned = own(&left)?.transpose(0, 1);
        Product::plain(&turned, &own(&right)?, &matrix).write()?;
    }
    Ok(vec![out])
}
