//! How matrix products reach BLAS: which operand is copied, and the strides that BLAS is given.
//!
//! BLAS takes a matrix with contiguous rows or columns. Any other matrix is copied first. Memory rule and kernel use
//! the same plan: the rule counts these copies, and the kernel makes them and passes the planned strides to BLAS.

use ckpt_ir::layout::{count, expand_strides, view_strides};
use ckpt_ir::op::{Sized, contiguous_strides};

/// One matrix operand as BLAS sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixOperand {
    /// How the operand is copied before the product.
    pub copy: Copied,
    /// `[rows, columns]`, or `[batch, rows, columns]`; the operand (or its copy) seen through `strides`.
    pub dims: Vec<i64>,
    /// Its strides, in elements.
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
    /// The left matrices.
    pub a: MatrixOperand,
    /// The right matrices.
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

    /// Two a multiplication and addition.
    pub fn flops(&self) -> u64 {
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

/// How `GroupedMatMul` runs: rows of the left matrix by one of the right ones, `[groups, in, out]` as multiplied.
pub fn grouped_plan(x: &Sized, b: &Sized, transpose_b: bool) -> MatmulPlan {
    let left = plain(x, x.dims.clone());
    let mut right = batched(b, &b.dims[..1]);
    if transpose_b {
        right.operand.dims.swap(1, 2);
        right.operand.strides.swap(1, 2);
    }
    let (rows, k, n) = (x.dims[0], x.dims[1], right.operand.dims[2]);
    MatmulPlan::of(left, right, vec![rows, n], k)
}

/// How `GroupedWeightGrad` runs: rows of the left matrix, transposed, by the same rows of the right one.
pub fn grouped_weight_plan(a: &Sized, b: &Sized, groups: i64) -> MatmulPlan {
    let (left, right) = (plain(a, a.dims.clone()), plain(b, b.dims.clone()));
    MatmulPlan::of(left, right, vec![groups, a.dims[1], b.dims[1]], a.dims[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_ir::DType;

    /// Xorshift.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % n as u64) as usize
        }
    }

    /// A tensor whose elements are their own offsets: axes in any order, with gaps, some repeated.
    fn any_layout(r: &mut Random, dims: Vec<i64>) -> Sized {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        for i in (1..order.len()).rev() {
            if r.below(3) == 0 {
                order.swap(i, r.below(i + 1));
            }
        }
        let mut strides = vec![0; dims.len()];
        let mut step = 1 + (r.below(6) == 0) as i64;
        for axis in order.into_iter().rev() {
            strides[axis] = if r.below(8) == 0 { 0 } else { step };
            step *= dims[axis].max(1) + (r.below(6) == 0) as i64;
        }
        let mut x = Sized::contiguous(DType::F32, dims);
        x.strides = strides;
        x
    }

    /// Offsets of all elements in row-major order, the tensor broadcast to `dims`.
    fn read(x: &Sized, dims: &[i64]) -> Vec<i64> {
        let strides = expand_strides(&x.dims, &x.strides, dims);
        walk(dims, &strides)
    }

    fn walk(dims: &[i64], strides: &[i64]) -> Vec<i64> {
        let mut all = vec![0];
        for (dim, stride) in dims.iter().zip(strides) {
            all = all
                .iter()
                .flat_map(|base| (0..*dim).map(move |i| base + i * stride))
                .collect();
        }
        all
    }

    /// What BLAS reads through the plan, as offsets into the operand.
    fn seen(x: &Sized, m: &MatrixOperand) -> Vec<i64> {
        let source = match &m.copy {
            Copied::No => return walk(&m.dims, &m.strides),
            Copied::Plain => read(x, &x.dims),
            Copied::Expanded(dims) => read(x, dims),
        };
        walk(&m.dims, &m.strides)
            .into_iter()
            .map(|at| source[at as usize])
            .collect()
    }

    fn check(x: &Sized, m: &MatrixOperand, wide: &[i64], plan: &MatmulPlan) -> u64 {
        if plan.is_empty() {
            assert_eq!(m.copy, Copied::No);
            return 0;
        }
        assert!(blas_reads(&m.dims, &m.strides), "{x:?} {m:?}");
        assert_eq!(seen(x, m), read(x, wide), "{x:?} {m:?}");
        match &m.copy {
            Copied::No => 0,
            Copied::Plain => x.bytes(),
            Copied::Expanded(dims) => 4 * count(dims) as u64,
        }
    }

    #[test]
    fn plans_read_what_the_product_means() {
        let mut r = Random(7);
        let (mut copies, mut views) = (0, 0);
        for _ in 0..20_000 {
            let mut size = |least: usize| (least + r.below(4)) as i64;
            let (m, k, n) = (size(0), size(0), size(0));
            let batch: Vec<i64> = (0..r.below(3)).map(|_| 1 + r.below(3) as i64).collect();
            let mut side = |matrix: [i64; 2]| {
                let skip = r.below(batch.len() + 1);
                let mut dims: Vec<i64> = batch[skip..]
                    .iter()
                    .map(|d| if r.below(4) == 0 { 1 } else { *d })
                    .collect();
                dims.extend(matrix);
                any_layout(&mut r, dims)
            };
            let (a, b) = (side([m, k]), side([k, n]));
            let plan = matmul_plan(&a, &b);
            let batch: Vec<i64> = (0..a.dims.len().max(b.dims.len()) - 2)
                .map(|i| {
                    let at = |x: &Sized| match (i + x.dims.len())
                        .checked_sub(a.dims.len().max(b.dims.len()))
                    {
                        Some(k) => x.dims[k],
                        None => 1,
                    };
                    at(&a).max(at(&b))
                })
                .collect();
            let wide = |x: &Sized| {
                let tail = &x.dims[x.dims.len() - 2..];
                batch.iter().chain(tail).copied().collect::<Vec<i64>>()
            };
            let right = match b.dims.len() {
                2 => b.dims.clone(),
                _ => wide(&b),
            };
            let temp = check(&a, &plan.a, &wide(&a), &plan) + check(&b, &plan.b, &right, &plan);
            assert_eq!(temp, plan.temp_bytes);
            match temp {
                0 => views += 1,
                _ => copies += 1,
            }
        }
        assert!(copies > 1000 && views > 1000, "{copies} {views}");
    }

    /// The layouts of attention and linear layers need no copies, in either direction.
    #[test]
    fn usual_layouts_are_read_in_place() {
        let heads = |strides: [i64; 4]| Sized {
            strides: strides.to_vec(),
            ..Sized::contiguous(DType::F32, vec![2, 4, 8, 16])
        };
        let q = heads([512, 16, 64, 1]);
        let scores = Sized::contiguous(DType::F32, vec![2, 4, 8, 8]);
        // (batch, head) cannot be one axis of a [batch, seq, head, size] layout: a copy, as in libtorch.
        assert_eq!(matmul_plan(&scores, &q).temp_bytes, q.bytes());
        let own = Sized::contiguous(DType::F32, vec![2, 4, 16, 8]);
        assert_eq!(
            matmul_plan(
                &scores,
                &Sized {
                    dims: vec![2, 4, 8, 16],
                    strides: vec![512, 128, 1, 8],
                    ..own.clone()
                }
            )
            .temp_bytes,
            0
        );
        let x = Sized::contiguous(DType::F32, vec![2, 8, 64]);
        let weight = Sized::contiguous(DType::F32, vec![64, 32]);
        let plan = matmul_plan(&x, &weight);
        assert_eq!((plan.out.clone(), plan.temp_bytes), (vec![16, 32], 0));
        assert_eq!(plan.flops(), 2 * 16 * 64 * 32);
    }

    #[test]
    fn gemm_reads_either_way() {
        let mut r = Random(3);
        for _ in 0..5_000 {
            let (m, k, n) = (
                1 + r.below(4) as i64,
                1 + r.below(4) as i64,
                1 + r.below(4) as i64,
            );
            let (flip_a, flip_b) = (r.below(2) == 1, r.below(2) == 1);
            let a = any_layout(&mut r, if flip_a { vec![k, m] } else { vec![m, k] });
            let b = any_layout(&mut r, if flip_b { vec![n, k] } else { vec![k, n] });
            let plan = gemm_plan(&a, &b, flip_a, flip_b);
            assert_eq!(plan.out, [m, n]);
            for (x, flip, seen_as) in [(&a, flip_a, &plan.a), (&b, flip_b, &plan.b)] {
                let mut back = seen_as.clone();
                if flip {
                    back.dims.reverse();
                    back.strides.reverse();
                }
                assert!(blas_reads(&seen_as.dims, &seen_as.strides));
                assert_eq!(seen(x, &back), read(x, &x.dims));
            }
        }
    }
}
