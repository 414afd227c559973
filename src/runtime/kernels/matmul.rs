//! Matrix products, run as `ops::matmul` plans them: copies where BLAS cannot read an operand, nothing hidden.

use super::{Kernel, KernelCx, call, empty, write, write_product};
use crate::runtime::convert;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ir::op::Sized;
use ckpt_passes::ops::matmul::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::Arg;
use tch::Tensor;

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&MATMUL, matmul), (&GEMM, gemm)];

/// Sizes and strides of a tensor, as rules see them.
pub fn sized(x: &Tensor) -> Result<Sized> {
    let dtype = convert::dtype(x.kind())
        .ok_or_else(|| Error::bug("kernel", format!("a tensor of element type {:?}", x.kind())))?;
    Ok(Sized {
        dtype,
        dims: x.size(),
        strides: x.stride(),
        ints: None,
    })
}

/// The operand as the plan wants it: copied if it says so, then seen through its strides.
pub(super) fn prepared(x: &Tensor, plan: &MatrixOperand) -> Result<Tensor> {
    let copy = |dims: &[i64]| -> Result<Tensor> {
        let out = empty(dims, x.kind(), x.device())?;
        write(
            "aten::copy_",
            "",
            &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
        )?;
        Ok(out)
    };
    let base = match &plan.copy {
        Copied::No => x.alias(),
        Copied::Plain => copy(&x.size())?,
        Copied::Expanded(dims) => copy(dims)?,
    };
    call(
        "aten::as_strided",
        "",
        &[
            Arg::Tensor(&base),
            Arg::Ints(&plan.dims),
            Arg::Ints(&plan.strides),
            Arg::None,
        ],
    )
}

pub(super) fn check_inner(cx: &KernelCx, a: &Tensor, b: &Tensor, k_a: i64, k_b: i64) -> Result<()> {
    if k_a == k_b {
        return Ok(());
    }
    Err(
        Error::model("shape", format!("{}: inner dimensions differ", cx.op.name)).found(format!(
            "{:?} and {:?}",
            a.size(),
            b.size()
        )),
    )
}

fn matmul(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let (sa, sb) = (a.size(), b.size());
    check_inner(cx, a, b, sa[sa.len() - 1], sb[sb.len().saturating_sub(2)])?;
    let plan = matmul_plan(&sized(a)?, &sized(b)?);
    // The result's own shape: batch axes broadcast, then rows and columns where the operand has them.
    let (lead_a, lead_b) = (
        &sa[..sa.len().saturating_sub(2)],
        &sb[..sb.len().saturating_sub(2)],
    );
    let rank = lead_a.len().max(lead_b.len());
    let mut dims: Vec<i64> = (0..rank)
        .map(|i| {
            let at = |lead: &[i64]| (i + lead.len()).checked_sub(rank).map_or(1, |j| lead[j]);
            if at(lead_a) == 1 {
                at(lead_b)
            } else {
                at(lead_a)
            }
        })
        .collect();
    if sa.len() > 1 {
        dims.push(sa[sa.len() - 2]);
    }
    if sb.len() > 1 {
        dims.push(sb[sb.len() - 1]);
    }
    let out = empty(&dims, a.kind(), a.device())?;
    if plan.is_empty() {
        write("aten::zero_", "", &[Arg::Tensor(&out)])?;
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    let target = out.view(plan.out.as_slice());
    let name = if plan.out.len() == 2 {
        "aten::mm"
    } else {
        "aten::bmm"
    };
    write_product(
        name,
        "out",
        &[
            Arg::Tensor(&left),
            Arg::Tensor(&right),
            Arg::Tensor(&target),
        ],
    )?;
    Ok(vec![out])
}

/// α·A'·B' + β·C in one call; C is broadcast.
fn gemm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let plan = gemm_plan(
        &sized(a)?,
        &sized(b)?,
        cx.attrs.int("transA") != 0,
        cx.attrs.int("transB") != 0,
    );
    let out = empty(&plan.out, a.kind(), a.device())?;
    let (alpha, beta) = (
        f64::from(cx.attrs.float("alpha")),
        f64::from(cx.attrs.float("beta")),
    );
    if plan.is_empty() {
        write("aten::zero_", "", &[Arg::Tensor(&out)])?;
        if let Some(c) = cx.opt(2) {
            write(
                "aten::add_",
                "Tensor",
                &[Arg::Tensor(&out), Arg::Tensor(c), Arg::Double(beta)],
            )?;
        }
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    check_inner(cx, a, b, left.size()[1], right.size()[0])?;
    match cx.opt(2) {
        Some(c) => {
            let args = [
                Arg::Tensor(c),
                Arg::Tensor(&left),
                Arg::Tensor(&right),
                Arg::Double(beta),
                Arg::Double(alpha),
                Arg::Tensor(&out),
            ];
            write_product("aten::addmm", "out", &args)?;
        }
        None => {
            // With a factor of 0 what the result held before is not read.
            let args = [
                Arg::Tensor(&out),
                Arg::Tensor(&left),
                Arg::Tensor(&right),
                Arg::Double(0.0),
                Arg::Double(alpha),
            ];
            write_product("aten::addmm_", "", &args)?;
        }
    }
    Ok(vec![out])
}
