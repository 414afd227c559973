//! Matrix products: `MatMul` with numpy's semantics, `Gemm`, and the plan by which both reach BLAS.
//!
//! BLAS takes a matrix whose rows or columns lie one after another; anything else is first copied. Which operand is
//! copied is decided by [`matmul_plan`] and [`gemm_plan`] alone: the memory model counts those copies, the kernels make
//! exactly them and hand BLAS the strides that the plan states, so that libtorch has nothing left to copy by itself.

use super::rules::*;
use super::shape::{FLATTEN, SQUEEZE, UNSQUEEZE, give_shaped, transpose};
use crate::error::Result;
use crate::ir::layout::{count, expand_strides, view_strides};
use crate::ir::op::{
    Body, Cost, CostCx, Domain, Effect, Footprint, Grad, GradCx, Import, InferCx, OpDef, Place,
    Sized, Slot, contiguous_strides, no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, Attrs, Builder, Dim, Same, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&MATMUL, &GEMM];

/// One matrix operand as BLAS sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixOperand {
    pub copy: Copied,
    /// `[rows, columns]`, or `[batch, rows, columns]`; the operand (or its copy) seen through `strides`.
    pub dims: Vec<i64>,
    pub strides: Vec<i64>,
}

/// What is copied before a matrix product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Nothing: the operand's own storage is read.
    No,
    /// The operand, row-major.
    Plain,
    /// The operand broadcast to these sizes, row-major.
    Expanded(Vec<i64>),
}

/// How a matrix product runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatmulPlan {
    pub a: MatrixOperand,
    pub b: MatrixOperand,
    /// The result, row-major, as the product writes it: `[m, n]` or `[batch, m, n]`.
    pub out: Vec<i64>,
    /// Summed length; where it or the result is empty nothing is read or copied, and the result is zeros.
    pub k: i64,
    /// Bytes of all copies.
    pub temp_bytes: u64,
}

impl MatmulPlan {
    /// Whether there is nothing to multiply.
    pub fn is_empty(&self) -> bool {
        self.k == 0 || self.out.contains(&0)
    }

    fn flops(&self) -> u64 {
        let n = self
            .out
            .iter()
            .fold(2u64, |n, d| n.saturating_mul(*d as u64));
        n.saturating_mul(self.k as u64)
    }

    fn of(a: Matrix, b: Matrix, out: Vec<i64>, k: i64) -> MatmulPlan {
        let mut plan = MatmulPlan {
            temp_bytes: 0,
            a: a.operand,
            b: b.operand,
            out,
            k,
        };
        if plan.is_empty() {
            plan.a.copy = Copied::No;
            plan.b.copy = Copied::No;
        } else {
            plan.temp_bytes = a.copy_bytes + b.copy_bytes;
        }
        plan
    }
}

struct Matrix {
    operand: MatrixOperand,
    copy_bytes: u64,
}

/// Whether BLAS can read a matrix in place, row-major or column-major (the test libtorch's `addmm` makes on CPU).
fn blas_reads(dims: &[i64], strides: &[i64]) -> bool {
    let [.., rows, columns] = *dims else {
        return false;
    };
    let [.., down, right] = *strides else {
        return false;
    };
    right == 1 && down >= columns.max(1) || down == 1 && right >= rows.max(1)
}

/// Strides with that of a row or column axis of size 1 chosen so that BLAS can read the matrix if any choice allows it.
fn settled(dims: &[i64], mut strides: Vec<i64>) -> Vec<i64> {
    let (row, column) = (dims.len() - 2, dims.len() - 1);
    if dims[column] == 1 {
        strides[column] = 1;
        if dims[row] == 1 {
            strides[row] = 1;
        }
    } else if dims[row] == 1 {
        strides[row] = if strides[column] == 1 {
            dims[column]
        } else {
            1
        };
    }
    strides
}

/// An operand as `dims`, by a view if BLAS can read that, else by a copy of it.
fn plain(x: &Sized, dims: Vec<i64>) -> Matrix {
    if let Some(strides) = view_strides(&x.dims, &x.strides, &dims) {
        let strides = settled(&dims, strides);
        if blas_reads(&dims, &strides) {
            return Matrix::seen(Copied::No, dims, strides, 0);
        }
    }
    let strides = contiguous_strides(&dims);
    Matrix::seen(Copied::Plain, dims, strides, x.bytes())
}

impl Matrix {
    fn seen(copy: Copied, dims: Vec<i64>, strides: Vec<i64>, copy_bytes: u64) -> Matrix {
        Matrix {
            operand: MatrixOperand {
                copy,
                dims,
                strides,
            },
            copy_bytes,
        }
    }
}

/// An operand broadcast to `batch` and seen as `[product of batch, rows, columns]`.
fn batched(x: &Sized, batch: &[i64]) -> Matrix {
    let tail = &x.dims[x.dims.len() - 2..];
    let wide: Vec<i64> = batch.iter().chain(tail).copied().collect();
    let entries = count(batch);
    let dims = vec![entries, tail[0], tail[1]];
    let contiguous = Sized::contiguous(x.dtype, x.dims.clone());
    for (copy, source, bytes) in [(Copied::No, x, 0), (Copied::Plain, &contiguous, x.bytes())] {
        let strides = expand_strides(&source.dims, &source.strides, &wide);
        if let Some(strides) = view_strides(&wide, &strides, &dims) {
            let strides = settled(&dims, strides);
            if blas_reads(&dims, &strides) {
                return Matrix::seen(copy, dims, strides, bytes);
            }
        }
    }
    let bytes = Sized::contiguous(x.dtype, wide.clone()).bytes();
    let strides = contiguous_strides(&dims);
    Matrix::seen(Copied::Expanded(wide), dims, strides, bytes)
}

/// How `MatMul` runs: one product if the right operand is a matrix or a vector, else one a batch entry.
///
/// Vectors are matrices of one row (left) or one column (right). Operands are what typing has checked.
pub fn matmul_plan(a: &Sized, b: &Sized) -> MatmulPlan {
    let as_matrix = |x: &Sized, at: usize| {
        if x.dims.len() > 1 {
            return x.clone();
        }
        let mut x = x.clone();
        x.dims.insert(at, 1);
        x.strides.insert(at, 1);
        x
    };
    let (a, b) = (as_matrix(a, 0), as_matrix(b, 1));
    let (ra, rb) = (a.dims.len(), b.dims.len());
    let (m, k, n) = (a.dims[ra - 2], a.dims[ra - 1], b.dims[rb - 1]);
    if rb == 2 {
        let rows = count(&a.dims[..ra - 1]);
        return MatmulPlan::of(
            plain(&a, vec![rows, k]),
            plain(&b, vec![k, n]),
            vec![rows, n],
            k,
        );
    }
    let rank = ra.max(rb) - 2;
    let size = |x: &Sized, i: usize| match (i + x.dims.len()).checked_sub(rank + 2) {
        Some(at) => x.dims[at],
        None => 1,
    };
    let batch: Vec<i64> = (0..rank)
        .map(|i| match size(&a, i) {
            1 => size(&b, i),
            d => d,
        })
        .collect();
    let (left, right) = (batched(&a, &batch), batched(&b, &batch));
    let count = left.operand.dims[0];
    MatmulPlan::of(left, right, vec![count, m, n], k)
}

/// How `Gemm` runs; the operands in the plan are already transposed as the attributes say.
pub fn gemm_plan(a: &Sized, b: &Sized, transpose_a: bool, transpose_b: bool) -> MatmulPlan {
    let side = |x: &Sized, flip: bool| {
        let mut matrix = plain(x, x.dims.clone());
        if flip {
            matrix.operand.dims.reverse();
            matrix.operand.strides.reverse();
        }
        matrix
    };
    let (a, b) = (side(a, transpose_a), side(b, transpose_b));
    let (m, k, n) = (a.operand.dims[0], a.operand.dims[1], b.operand.dims[1]);
    MatmulPlan::of(a, b, vec![m, n], k)
}

fn footprint(plan: Option<MatmulPlan>) -> Footprint {
    Footprint {
        outs: vec![Place::Fresh],
        temp_bytes: plan.map_or(0, |p| p.temp_bytes),
    }
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
    name: "MatMul",
    domain: Domain::Onnx { since: 13 },
    imports: &[
        Import::Onnx("MatMul", 1),
        Import::Aten("aten.matmul"),
        Import::Aten("aten.mm"),
        Import::Aten("aten.bmm"),
    ],
    attrs: &[],
    ins: &[Slot::req("A"), Slot::req("B")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: infer_matmul,
    fold: no_fold,
    grad: Grad::Rule(grad_matmul),
    cost: |cx| priced(cx, operands(cx.ins).map(|(a, b)| matmul_plan(a, b))),
    memory: |cx| footprint(operands(cx.ins).map(|(a, b)| matmul_plan(a, b))),
    body: Body::Standard,
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
/// A matrix right of a batch is a weight: its gradient is one product over the batch and the rows together, so that no
/// batch of weight gradients exists at any time.
fn grad_matmul(cx: &mut GradCx) -> Result<()> {
    let (a, b, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let (ra, rb) = (cx.b.rank(a), cx.b.rank(b));
    // Vectors as matrices; `dy` lacks the axes that they lack.
    let a2 = if ra == 1 { unsqueeze(cx.b, a, 0)? } else { a };
    let b2 = if rb == 1 { unsqueeze(cx.b, b, 1)? } else { b };
    let mut dy2 = dy;
    if rb == 1 {
        dy2 = unsqueeze(cx.b, dy2, -1)?;
    }
    if ra == 1 {
        dy2 = unsqueeze(cx.b, dy2, -2)?;
    }
    let (ra2, rb2) = (ra.max(2), rb.max(2));
    if cx.wants(0) {
        let bt = swap_last(cx.b, b2)?;
        let da = cx.b.emit(&MATMUL, &[dy2, bt], Attrs::new())?;
        let da = cx.b.sum_to(da, a2)?;
        let da = if ra == 1 { squeeze(cx.b, da, 0)? } else { da };
        give_shaped(cx, 0, da)?;
    }
    if cx.wants(1) {
        let db = if rb2 == 2 && ra2 > 2 {
            let last = Attrs::new().with("axis", ra2 as i64 - 1);
            let a_flat = cx.b.emit(&FLATTEN, &[a2], last.clone())?;
            let dy_flat = cx.b.emit(&FLATTEN, &[dy2], last)?;
            let at = swap_last(cx.b, a_flat)?;
            cx.b.emit(&MATMUL, &[at, dy_flat], Attrs::new())?
        } else {
            let at = swap_last(cx.b, a2)?;
            let db = cx.b.emit(&MATMUL, &[at, dy2], Attrs::new())?;
            cx.b.sum_to(db, b2)?
        };
        let db = if rb == 1 { squeeze(cx.b, db, 1)? } else { db };
        give_shaped(cx, 1, db)?;
    }
    Ok(())
}

fn unsqueeze(b: &mut Builder, v: ValueId, axis: i64) -> Result<ValueId> {
    let axes = b.ints(&[axis]);
    b.emit(&UNSQUEEZE, &[v, axes], Attrs::new())
}

fn squeeze(b: &mut Builder, v: ValueId, axis: i64) -> Result<ValueId> {
    let axes = b.ints(&[axis]);
    b.emit(&SQUEEZE, &[v, axes], Attrs::new())
}

/// Each matrix transposed.
fn swap_last(b: &mut Builder, v: ValueId) -> Result<ValueId> {
    let rank = b.rank(v);
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(rank - 1, rank - 2);
    transpose(b, v, perm)
}

/// `alpha·A'·B' + beta·C`, where `'` transposes if the attribute says so (ONNX Gemm-13).
pub static GEMM: OpDef = OpDef {
    name: "Gemm",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Gemm", 7)],
    attrs: &[
        AttrSpec {
            name: "alpha",
            kind: AttrKind::Float,
            default: AttrDefault::Float(1.0),
        },
        AttrSpec {
            name: "beta",
            kind: AttrKind::Float,
            default: AttrDefault::Float(1.0),
        },
        AttrSpec {
            name: "transA",
            kind: AttrKind::Int,
            default: AttrDefault::Int(0),
        },
        AttrSpec {
            name: "transB",
            kind: AttrKind::Int,
            default: AttrDefault::Int(0),
        },
    ],
    ins: &[Slot::req("A"), Slot::req("B"), Slot::opt("C")],
    outs: &[Slot::req("Y")],
    effect: Effect::Pure,
    infer: infer_gemm,
    fold: no_fold,
    grad: Grad::Rule(grad_gemm),
    cost: |cx| priced(cx, plan_of_gemm(cx.attrs, cx.ins)),
    memory: |cx| footprint(plan_of_gemm(cx.attrs, cx.ins)),
    body: Body::Standard,
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
