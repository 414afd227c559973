//! Steps that rules, passes and frontends share: common nodes with their constant operands.

use super::compute_type;
use crate::names::*;
use ckpt_ir::error::Result;
use ckpt_ir::{Attrs, DType, Dim, Emit, OpRef, Tensor, ValueId, same_dims};
use std::ops::{Range, RangeBounds};

/// Common nodes, emitted into any graph that rules can emit into.
///
/// Every method fails only with what the row of its op refuses.
#[allow(clippy::missing_errors_doc, reason = "said once, above")]
pub trait EmitExt: Emit {
    /// Emits a node with one result.
    fn emit(&mut self, op: impl Into<OpRef>, ins: &[ValueId], attrs: Attrs) -> Result<ValueId> {
        let ins = ins.iter().map(|v| Some(*v)).collect();
        Ok(self.emit_n(op, ins, attrs, 1)?[0])
    }

    /// Emits a node with `n_outs` results. Operands may be missing.
    fn emit_n(
        &mut self,
        op: impl Into<OpRef>,
        ins: Vec<Option<ValueId>>,
        attrs: Attrs,
        n_outs: usize,
    ) -> Result<Vec<ValueId>> {
        self.emit_node(op.into(), ins, attrs, n_outs)
    }

    /// Returns the rank of `v`.
    fn rank(&self, v: ValueId) -> usize {
        self.ty(v).rank()
    }

    /// Returns a shared scalar constant.
    fn scalar(&mut self, dtype: DType, value: f64) -> ValueId {
        self.constant(
            &format!("const.{dtype}.{value}"),
            Tensor::scalar(dtype, value),
        )
    }

    /// Returns a shared int64 vector.
    fn ints(&mut self, values: &[i64]) -> ValueId {
        let text: Vec<String> = values.iter().map(|v| v.to_string()).collect();
        self.constant(
            &format!("const.i64.[{}]", text.join("_")),
            Tensor::ints(values),
        )
    }

    /// Returns a shared int64 scalar.
    fn int(&mut self, value: i64) -> ValueId {
        self.constant(&format!("const.i64.{value}"), Tensor::int(value))
    }

    /// Sums `v` down to the shape of `like`, which undoes a broadcast; returns `v` where the shapes are provably equal.
    fn sum_to(&mut self, v: ValueId, like: ValueId) -> Result<ValueId> {
        let (from, to) = (self.ty(v).dims.clone(), self.ty(like).dims.clone());
        if same_dims(&from, &to) {
            return Ok(v);
        }
        let shape = self.shape(like)?;
        self.op(SUM_TO_SHAPE, &[v, shape])
    }

    /// Casts `v` to an element type; returns `v` where it has that type.
    fn cast(&mut self, v: ValueId, dtype: DType) -> Result<ValueId> {
        if self.ty(v).dtype == dtype {
            return Ok(v);
        }
        let attrs = Attrs::new().with("to", dtype);
        let attrs = match dtype.is_float8() {
            true => attrs.with("saturate", 0),
            false => attrs,
        };
        self.emit(CAST, &[v], attrs)
    }

    /// Returns a tensor of the shape and element type of `like`, filled with one value.
    fn filled_like(&mut self, like: ValueId, value: f64) -> Result<ValueId> {
        let dtype = self.ty(like).dtype;
        let shape = self.shape(like)?;
        let scalar = self.scalar(dtype, value);
        self.op(EXPAND, &[scalar, shape])
    }

    /// Adds two values.
    fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.op(ADD, &[a, b])
    }

    /// Subtracts `b` from `a`.
    fn sub(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.op(SUB, &[a, b])
    }

    /// Multiplies two values.
    fn mul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.op(MUL, &[a, b])
    }

    /// Divides `a` by `b`.
    fn div(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.op(DIV, &[a, b])
    }

    /// Negates a value.
    fn neg(&mut self, a: ValueId) -> Result<ValueId> {
        self.op(NEG, &[a])
    }

    /// Emits a node with one result and no attributes that differ from their defaults.
    fn op(&mut self, op: impl Into<OpRef>, ins: &[ValueId]) -> Result<ValueId> {
        self.emit(op, ins, Attrs::new())
    }

    /// Returns the element type of `v`.
    fn dtype(&self, v: ValueId) -> DType {
        self.ty(v).dtype
    }

    /// Returns the sizes of `v`.
    fn dims(&self, v: ValueId) -> &[Dim] {
        &self.ty(v).dims
    }

    /// Returns the scalar `value` in the element type of `like`.
    fn scalar_like(&mut self, like: ValueId, value: f64) -> ValueId {
        self.scalar(self.dtype(like), value)
    }

    /// Casts `v` to the type that kernels compute in: float32 for the 16-bit types.
    fn widen(&mut self, v: ValueId) -> Result<ValueId> {
        self.cast(v, compute_type(self.dtype(v)))
    }

    /// Returns the number that an initializer of one element holds; `None` for any other value.
    fn known_scalar(&self, v: ValueId) -> Option<f64> {
        let tensor = self.tensor(v)?;
        (tensor.elements() == 1).then(|| tensor.get_f64(0))?
    }

    /// Casts `v` to the element type of `like`.
    fn cast_like(&mut self, v: ValueId, like: ValueId) -> Result<ValueId> {
        self.cast(v, self.dtype(like))
    }

    /// Adds `v` to a sum, or begins the sum with it.
    fn added(&mut self, sum: Option<ValueId>, v: ValueId) -> Result<ValueId> {
        match sum {
            Some(sum) => self.add(sum, v),
            None => Ok(v),
        }
    }

    /// Multiplies `v` by a number.
    fn scaled(&mut self, v: ValueId, factor: f64) -> Result<ValueId> {
        let factor = self.scalar_like(v, factor);
        self.mul(v, factor)
    }

    /// Reshapes `v`; 0 copies a size and -1 infers one (ONNX Reshape, `allowzero` = 0).
    fn reshape(&mut self, v: ValueId, dims: &[i64]) -> Result<ValueId> {
        let dims = self.ints(dims);
        self.op(RESHAPE, &[v, dims])
    }

    /// Reshapes `v` to an int64 vector of sizes, in which 0 means 0.
    fn reshape_to(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        self.emit(RESHAPE, &[v, shape], Attrs::new().with("allowzero", 1))
    }

    /// Reshapes `v` to sizes that are int64 vectors, joined in order.
    fn reshape_to_all(&mut self, v: ValueId, sizes: &[ValueId]) -> Result<ValueId> {
        let shape = match sizes {
            [] => self.ints(&[]),
            sizes => self.concat(sizes, 0)?,
        };
        self.reshape_to(v, shape)
    }

    /// Permutes the axes of `v`.
    fn transpose(&mut self, v: ValueId, perm: &[i64]) -> Result<ValueId> {
        self.emit(TRANSPOSE, &[v], Attrs::new().with("perm", perm.to_vec()))
    }

    /// Swaps an axis with the last one; returns `v` where `axis` is the last.
    fn swap_last(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        let rank = self.rank(v);
        if axis + 1 == rank {
            return Ok(v);
        }
        let mut perm: Vec<i64> = (0..rank as i64).collect();
        perm.swap(axis, rank - 1);
        self.transpose(v, &perm)
    }

    /// Inserts axes of size 1; returns `v` where there are none to insert.
    fn unsqueeze(&mut self, v: ValueId, axes: &[i64]) -> Result<ValueId> {
        if axes.is_empty() {
            return Ok(v);
        }
        let axes = self.ints(axes);
        self.op(UNSQUEEZE, &[v, axes])
    }

    /// Removes axes of size 1.
    fn squeeze(&mut self, v: ValueId, axes: &[i64]) -> Result<ValueId> {
        let axes = self.ints(axes);
        self.op(SQUEEZE, &[v, axes])
    }

    /// Broadcasts `v` to an int64 vector of sizes.
    fn expand(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        self.op(EXPAND, &[v, shape])
    }

    /// Gathers the slices of `v` at `places` along an axis.
    fn gather(&mut self, v: ValueId, places: ValueId, axis: usize) -> Result<ValueId> {
        let attrs = Attrs::new().with("axis", axis as i64);
        self.emit(GATHER, &[v, places], attrs)
    }

    /// Concatenates values along an axis.
    fn concat(&mut self, pieces: &[ValueId], axis: i64) -> Result<ValueId> {
        self.emit(CONCAT, pieces, Attrs::new().with("axis", axis))
    }

    /// Splits `v` along an axis into pieces of these sizes.
    fn split(&mut self, v: ValueId, sizes: &[i64], axis: i64) -> Result<Vec<ValueId>> {
        let ins = vec![Some(v), Some(self.ints(sizes))];
        let attrs = Attrs::new().with("axis", axis);
        self.emit_n(SPLIT, ins, attrs, sizes.len())
    }

    /// Slices one axis of `v`; `start` and `end` are int64 vectors of one element.
    fn slice(&mut self, v: ValueId, [start, end]: [ValueId; 2], axis: usize) -> Result<ValueId> {
        let axis = self.ints(&[axis as i64]);
        self.op(SLICE, &[v, start, end, axis])
    }

    /// Returns the size of one axis as an int64 scalar.
    fn axis_size(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(n) = self.dims(v)[axis].as_const() {
            return Ok(self.int(n));
        }
        let all = self.op(SHAPE, &[v])?;
        let at = self.int(axis as i64);
        self.gather(all, at, 0)
    }

    /// Returns the size of one axis as an int64 vector of one element.
    fn axis_vector(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        self.sizes(v, axis..axis + 1)
    }

    /// Returns [`EmitExt::axis_vector`] of each axis in a range.
    fn axis_vectors(&mut self, v: ValueId, axes: impl RangeBounds<usize>) -> Result<Vec<ValueId>> {
        (0..self.rank(v))
            .filter(|axis| axes.contains(axis))
            .map(|axis| self.axis_vector(v, axis))
            .collect()
    }

    /// Returns the sizes of some axes as an int64 vector.
    fn sizes(&mut self, v: ValueId, axes: Range<usize>) -> Result<ValueId> {
        let dims = &self.dims(v)[axes.clone()];
        if let Some(known) = dims.iter().map(Dim::as_const).collect::<Option<Vec<i64>>>() {
            return Ok(self.ints(&known));
        }
        let (start, end) = (axes.start as i64, axes.end as i64);
        let attrs = Attrs::new().with("start", start).with("end", end);
        self.emit(SHAPE, &[v], attrs)
    }

    /// Returns `0, 1, …` below an int64 scalar.
    fn counted(&mut self, count: ValueId) -> Result<ValueId> {
        let (zero, one) = (self.int(0), self.int(1));
        self.op(RANGE, &[zero, count, one])
    }

    /// Returns `0, 1, …` below the size of an axis: int64 `[size]`.
    fn positions(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        let (zero, one) = (self.int(0), self.int(1));
        let size = self.axis_size(v, axis)?;
        self.op(RANGE, &[zero, size, one])
    }
}

impl<T: Emit + ?Sized> EmitExt for T {}
