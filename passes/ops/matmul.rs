//! Matrix products: `MatMul` with numpy's semantics and `Gemm`; [`plan`] says how both reach BLAS.

pub mod plan;

pub use plan::{Copied, MatmulPlan, MatrixOperand, gemm_plan, matmul_plan};

use super::names::*;
use super::rule::*;
use super::shape::{give_shaped, transpose, transposed};
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Cost, CostCx, Footprint, Grad, GradCx, InferCx, OpClass, OpDef, Place, Sized,
};
use ckpt_ir::{AttrSpec, Attrs, Dim, Emit, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&MATMUL, &GEMM];

fn footprint(plan: Option<MatmulPlan>) -> Footprint {
    Footprint::new(vec![Place::Fresh]).with_temp(plan.map_or(0, |p| p.temp_bytes))
}

fn priced(cx: &CostCx, plan: Option<MatmulPlan>) -> Cost {
    let (flops, copied) = plan.map_or((0, 0), |p| (p.flops(), p.temp_bytes));
    Cost {
        flops,
        bytes: cx.traffic_bytes() + 2 * copied,
    }
}

fn operands(ins: &[Option<Sized>]) -> Option<(&Sized, &Sized)> {
    Some((ins.first()?.as_ref()?, ins.get(1)?.as_ref()?))
}

/// `numpy.matmul` (ONNX MatMul-13).
pub static MATMUL: OpDef = OpDef {
    aten: &[
        "aten.addmm",
        "aten.baddbmm",
        "aten.bmm",
        "aten.linear",
        "aten.matmul",
        "aten.mm",
    ],
    ins: A_B,
    outs: Y,
    infer: infer_matmul,
    grad: Grad::Rule(grad_matmul),
    cost: |cx| priced(cx, operands(cx.ins).map(|(a, b)| matmul_plan(a, b))),
    memory: |cx| footprint(operands(cx.ins).map(|(a, b)| matmul_plan(a, b))),
    ..standard("MatMul", onnx(1, 13), OpClass::Product, BatchAxes::Product)
};

fn infer_matmul(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let dtype = cx.same_dtype(&[0, 1])?;
    let (a, b) = (&cx.ty(0)?.dims, &cx.ty(1)?.dims);
    if a.is_empty() || b.is_empty() {
        return Err(cx.fail("shape", "a scalar is not a matrix"));
    }
    let inner = |dims: &[Dim], back: usize| dims[dims.len().saturating_sub(back)].clone();
    let (left, right) = (inner(a, 1), inner(b, 2));
    if left.same(&right) == Same::No {
        return Err(cx
            .fail("shape", "the inner sizes of the product differ")
            .expected(format!("{left}, the last size of A"))
            .found(format!("{right} in B")));
    }
    let batch = |dims: &[Dim]| dims[..dims.len().saturating_sub(2)].to_vec();
    let mut dims = broadcast_two(&batch(a), &batch(b)).ok_or_else(|| {
        cx.fail("shape", "batch axes do not broadcast")
            .expected(format!("{:?}", batch(a)))
            .found(format!("{:?}", batch(b)))
    })?;
    if a.len() > 1 {
        dims.push(a[a.len() - 2].clone());
    }
    if b.len() > 1 {
        dims.push(b[b.len() - 1].clone());
    }
    Ok(vec![Ty::new(dtype, dims)])
}

/// dA = dY·Bᵀ and dB = Aᵀ·dY, summed over broadcast batch axes.
///
/// If A has batch axes and B is a matrix, B is a weight. Its gradient is one product over batch and rows together, so
/// no gradient for each batch entry exists.
fn grad_matmul(cx: &mut GradCx) -> Result<()> {
    let (a, b, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let (ra, rb) = (cx.b.rank(a), cx.b.rank(b));
    // Vectors as matrices; `dy` lacks the axes that they lack.
    let a2 = if ra == 1 { cx.b.unsqueeze(a, &[0])? } else { a };
    let b2 = if rb == 1 { cx.b.unsqueeze(b, &[1])? } else { b };
    let mut dy2 = dy;
    if rb == 1 {
        dy2 = cx.b.unsqueeze(dy2, &[-1])?;
    }
    if ra == 1 {
        dy2 = cx.b.unsqueeze(dy2, &[-2])?;
    }
    let (ra2, rb2) = (ra.max(2), rb.max(2));
    if cx.wants(0) {
        let bt = swap_last(cx.b, b2)?;
        let da = cx.b.op(&MATMUL, &[dy2, bt])?;
        let da = cx.b.sum_to(da, a2)?;
        let da = if ra == 1 { cx.b.squeeze(da, &[0])? } else { da };
        give_shaped(cx, 0, da)?;
    }
    if cx.wants(1) {
        let db = if rb2 == 2 && ra2 > 2 {
            let last = Attrs::new().with("axis", ra2 as i64 - 1);
            let a_flat = cx.b.emit(FLATTEN, &[a2], last.clone())?;
            let dy_flat = cx.b.emit(FLATTEN, &[dy2], last)?;
            weight_gradient(cx.b, b2, a_flat, dy_flat)?
        } else if rb2 == 2 && ra2 == 2 {
            weight_gradient(cx.b, b2, a2, dy2)?
        } else {
            let at = swap_last(cx.b, a2)?;
            let db = cx.b.op(&MATMUL, &[at, dy2])?;
            cx.b.sum_to(db, b2)?
        };
        let db = if rb == 1 { cx.b.squeeze(db, &[1])? } else { db };
        give_shaped(cx, 1, db)?;
    }
    Ok(())
}

/// Returns Aᵀ·dY for matrices. For a transposed weight it is computed as (dYᵀ·A)ᵀ, so that the gradient has the
/// weight's strides.
fn weight_gradient(b: &mut dyn Emit, weight: ValueId, a: ValueId, dy: ValueId) -> Result<ValueId> {
    if transposed(b, weight).is_some() {
        let dyt = swap_last(b, dy)?;
        let product = b.op(&MATMUL, &[dyt, a])?;
        return swap_last(b, product);
    }
    let at = swap_last(b, a)?;
    b.op(&MATMUL, &[at, dy])
}

/// Each matrix transposed.
pub(super) fn swap_last(b: &mut dyn Emit, v: ValueId) -> Result<ValueId> {
    let rank = b.rank(v);
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(rank - 1, rank - 2);
    transpose(b, v, perm)
}

/// `alpha·A'·B' + beta·C`, where `'` transposes if the attribute says so (ONNX Gemm-13).
pub static GEMM: OpDef = OpDef {
    aten: &["aten.addmm", "aten.linear"],
    attrs: &[
        AttrSpec::float("alpha", 1.0),
        AttrSpec::float("beta", 1.0),
        AttrSpec::int("transA", 0),
        AttrSpec::int("transB", 0),
    ],
    ins: slots!["A", "B"; "C"],
    outs: Y,
    infer: infer_gemm,
    grad: Grad::Rule(grad_gemm),
    cost: |cx| priced(cx, plan_of_gemm(cx.attrs, cx.ins)),
    memory: |cx| footprint(plan_of_gemm(cx.attrs, cx.ins)),
    ..standard(
        "Gemm",
        onnx(7, 13),
        OpClass::BiasedProduct,
        BatchAxes::BiasedProduct,
    )
};

fn plan_of_gemm(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<MatmulPlan> {
    let (a, b) = operands(ins)?;
    Some(gemm_plan(
        a,
        b,
        attrs.int("transA") != 0,
        attrs.int("transB") != 0,
    ))
}

fn infer_gemm(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let dtype = cx.same_dtype(&[0, 1])?;
    let matrix = |slot: usize, flip: &str| -> Result<(Dim, Dim)> {
        match cx.ty(slot)?.dims.as_slice() {
            [rows, columns] if cx.attrs.int(flip) == 0 => Ok((rows.clone(), columns.clone())),
            [rows, columns] => Ok((columns.clone(), rows.clone())),
            _ => Err(cx.fail("shape", format!("operand {slot} is not a matrix"))),
        }
    };
    let ((m, left), (right, n)) = (matrix(0, "transA")?, matrix(1, "transB")?);
    if left.same(&right) == Same::No {
        return Err(cx
            .fail("shape", "the inner sizes of the product differ")
            .expected(format!("{left}, from A"))
            .found(format!("{right} in B")));
    }
    let dims = vec![m, n];
    if let Some(c) = cx.opt_ty(2) {
        cx.same_dtype(&[0, 2])?;
        let fits = c.rank() <= 2
            && broadcast_two(&c.dims, &dims)
                .is_some_and(|wide| wide.iter().zip(&dims).all(|(w, d)| w.same(d) != Same::No));
        if !fits {
            return Err(cx
                .fail("shape", "C does not broadcast to the product")
                .expected(format!("{dims:?}"))
                .found(c.to_string()));
        }
    }
    Ok(vec![Ty::new(dtype, dims)])
}

/// With A' and B' the operands as multiplied: dA' = alpha·dY·B'ᵀ, dB' = alpha·A'ᵀ·dY, dC = beta·(dY summed to C).
fn grad_gemm(cx: &mut GradCx) -> Result<()> {
    let attrs = cx.attrs();
    let flip = |name: &str| (attrs.int(name) != 0) as i64;
    let (flip_a, flip_b) = (flip("transA"), flip("transB"));
    let (a, b, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let product = |left: (ValueId, i64), right: (ValueId, i64)| {
        let attrs = Attrs::new()
            .with("alpha", attrs.float("alpha"))
            .with("transA", left.1)
            .with("transB", right.1);
        (attrs, [left.0, right.0])
    };
    if cx.wants(0) {
        let (attrs, ins) = match flip_a {
            0 => product((dy, 0), (b, 1 - flip_b)),
            _ => product((b, flip_b), (dy, 1)),
        };
        let da = cx.b.emit(&GEMM, &ins, attrs)?;
        give_shaped(cx, 0, da)?;
    }
    if cx.wants(1) {
        let (attrs, ins) = match flip_b {
            0 => product((a, 1 - flip_a), (dy, 0)),
            _ => product((dy, 1), (a, flip_a)),
        };
        let db = cx.b.emit(&GEMM, &ins, attrs)?;
        give_shaped(cx, 1, db)?;
    }
    if cx.wants(2) {
        let mut dc = cx.b.sum_to(dy, cx.x(2))?;
        if attrs.float("beta") != 1.0 {
            let dtype = cx.ty(dc).dtype;
            let beta = cx.b.scalar(dtype, attrs.float("beta").into());
            dc = cx.b.mul(dc, beta)?;
        }
        cx.give(2, dc);
    }
    Ok(())
}
