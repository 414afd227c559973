//! Matrix products as `ops::matmul` plans them. Only operands that BLAS cannot read are copied.

use super::context::*;
use super::product::Product;
use ckpt_passes::ops::matmul::*;

/// The kernels of this family, by op.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&MATMUL, matmul), (&GEMM, gemm)];

/// Returns an operand with the strides of the plan, copied first if the plan says so.
pub fn prepared(x: &Tensor, plan: &MatrixOperand) -> Result<Tensor> {
    let base = match &plan.copy {
        Copied::No => x.alias(),
        Copied::Plain => copied_as(x, x.kind())?,
        Copied::Expanded(dims) => {
            let out = empty(dims, x.kind(), x.device())?;
            copy_into(&out, x)?;
            out
        }
    };
    strided(&base, &plan.dims, &plan.strides)
}

/// Checks that the inner sizes of a product are equal.
pub fn check_inner(cx: &KernelCx, a: &Tensor, b: &Tensor, k_a: i64, k_b: i64) -> Result<()> {
    if k_a == k_b {
        return Ok(());
    }
    let found = format!("{:?} and {:?}", a.size(), b.size());
    Err(cx.shape_error("inner dimensions differ").found(found))
}

fn matmul(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let (sa, sb) = (a.size(), b.size());
    check_inner(cx, a, b, sa[sa.len() - 1], sb[sb.len().saturating_sub(2)])?;
    let plan = matmul_plan(&sized(a)?, &sized(b)?);
    // The shape of the result: broadcast batch axes, then rows and columns if the operands have them.
    let lead_a = &sa[..sa.len().saturating_sub(2)];
    let lead_b = &sb[..sb.len().saturating_sub(2)];
    let mut dims = broadcast_sizes(&[lead_b, lead_a]);
    if sa.len() > 1 {
        dims.push(sa[sa.len() - 2]);
    }
    if sb.len() > 1 {
        dims.push(sb[sb.len() - 1]);
    }
    let out = empty(&dims, a.kind(), a.device())?;
    if plan.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    Product::plain(&left, &right, &out.view(plan.out.as_slice())).write()?;
    Ok(vec![out])
}

/// Computes α·A'·B' + β·C in one call; C is broadcast.
fn gemm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let plan = gemm_plan(&sized(a)?, &sized(b)?, cx.flag("transA"), cx.flag("transB"));
    let out = empty(&plan.out, a.kind(), a.device())?;
    let (alpha, beta) = (cx.number("alpha"), cx.number("beta"));
    if plan.is_empty() {
        zero(&out)?;
        if let Some(c) = cx.opt(2) {
            write("aten::add_.Tensor", args![&out, c, beta])?;
        }
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    check_inner(cx, a, b, left.size()[1], right.size()[0])?;
    Product {
        alpha,
        sum: Some(cx.opt(2).map_or((&out, 0.0), |c| (c, beta))),
        ..Product::plain(&left, &right, &out)
    }
    .write()?;
    Ok(vec![out])
}
