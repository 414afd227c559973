//! Steps that rules, passes and readers share: common nodes with their constant operands, as methods of [`Builder`].

use super::shape::{EXPAND, RESHAPE, SHAPE, SQUEEZE, TRANSPOSE, UNSQUEEZE};
use super::{concat, fill, index, slice};
use crate::error::Result;
use crate::ir::{Attrs, Builder, DType, Dim, OpDef, ValueId};
use std::ops::RangeBounds;

/// Every method fails only with what the row of its op refuses.
#[allow(clippy::missing_errors_doc, reason = "said once, above")]
impl Builder<'_> {
    /// Emits a node with one result and no attributes that differ from their defaults.
    pub fn op(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<ValueId> {
        self.emit(op, ins, Attrs::new())
    }

    /// Returns the element type of `v`.
    pub fn dtype(&self, v: ValueId) -> DType {
        self.ty(v).dtype
    }

    /// Returns the sizes of `v`.
    pub fn dims(&self, v: ValueId) -> &[Dim] {
        &self.ty(v).dims
    }

    /// Returns the scalar `value` in the element type of `like`.
    pub fn scalar_like(&mut self, like: ValueId, value: f64) -> ValueId {
        self.scalar(self.dtype(like), value)
    }

    /// Casts `v` to the element type of `like`.
    pub fn cast_like(&mut self, v: ValueId, like: ValueId) -> Result<ValueId> {
        self.cast(v, self.dtype(like))
    }

    /// Adds `v` to a sum, or begins the sum with it.
    pub fn added(&mut self, sum: Option<ValueId>, v: ValueId) -> Result<ValueId> {
        match sum {
            Some(sum) => self.add(sum, v),
            None => Ok(v),
        }
    }

    /// Multiplies `v` by a number.
    pub fn scaled(&mut self, v: ValueId, factor: f64) -> Result<ValueId> {
        let factor = self.scalar_like(v, factor);
        self.mul(v, factor)
    }

    /// Reshapes `v`; 0 copies a size and -1 infers one (ONNX Reshape, `allowzero` = 0).
    pub fn reshape(&mut self, v: ValueId, dims: &[i64]) -> Result<ValueId> {
        let dims = self.ints(dims);
        self.op(&RESHAPE, &[v, dims])
    }

    /// Reshapes `v` to an int64 vector of sizes, in which 0 means 0.
    pub fn reshape_to(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        self.emit(&RESHAPE, &[v, shape], Attrs::new().with("allowzero", 1))
    }

    /// Reshapes `v` to sizes that are int64 vectors, joined in order.
    pub fn reshape_to_all(&mut self, v: ValueId, sizes: &[ValueId]) -> Result<ValueId> {
        let shape = match sizes {
            [] => self.ints(&[]),
            sizes => self.concat(sizes, 0)?,
        };
        self.reshape_to(v, shape)
    }

    /// Permutes the axes of `v`.
    pub fn transpose(&mut self, v: ValueId, perm: &[i64]) -> Result<ValueId> {
        self.emit(&TRANSPOSE, &[v], Attrs::new().with("perm", perm.to_vec()))
    }

    /// Swaps an axis with the last one; returns `v` where `axis` is the last.
    pub fn swap_last(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        let rank = self.rank(v);
        if axis + 1 == rank {
            return Ok(v);
        }
        let mut perm: Vec<i64> = (0..rank as i64).collect();
        perm.swap(axis, rank - 1);
        self.transpose(v, &perm)
    }

    /// Inserts axes of size 1; returns `v` where there are none to insert.
    pub fn unsqueeze(&mut self, v: ValueId, axes: &[i64]) -> Result<ValueId> {
        if axes.is_empty() {
            return Ok(v);
        }
        let axes = self.ints(axes);
        self.op(&UNSQUEEZE, &[v, axes])
    }

    /// Removes axes of size 1.
    pub fn squeeze(&mut self, v: ValueId, axes: &[i64]) -> Result<ValueId> {
        let axes = self.ints(axes);
        self.op(&SQUEEZE, &[v, axes])
    }

    /// Broadcasts `v` to an int64 vector of sizes.
    pub fn expand(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        self.op(&EXPAND, &[v, shape])
    }

    /// Gathers the slices of `v` at `places` along an axis.
    pub fn gather(&mut self, v: ValueId, places: ValueId, axis: usize) -> Result<ValueId> {
        let attrs = Attrs::new().with("axis", axis as i64);
        self.emit(&index::GATHER, &[v, places], attrs)
    }

    /// Concatenates values along an axis.
    pub fn concat(&mut self, pieces: &[ValueId], axis: i64) -> Result<ValueId> {
        self.emit(&concat::CONCAT, pieces, Attrs::new().with("axis", axis))
    }

    /// Splits `v` along an axis into pieces of these sizes.
    pub fn split(&mut self, v: ValueId, sizes: &[i64], axis: i64) -> Result<Vec<ValueId>> {
        let ins = vec![Some(v), Some(self.ints(sizes))];
        let attrs = Attrs::new().with("axis", axis);
        self.emit_n(&concat::SPLIT, ins, attrs, sizes.len())
    }

    /// Slices one axis of `v`; `start` and `end` are int64 vectors of one element.
    pub fn slice(
        &mut self,
        v: ValueId,
        [start, end]: [ValueId; 2],
        axis: usize,
    ) -> Result<ValueId> {
        let axis = self.ints(&[axis as i64]);
        self.op(&slice::SLICE, &[v, start, end, axis])
    }

    /// Returns the size of one axis as an int64 scalar.
    pub fn axis_size(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(n) = self.dims(v)[axis].as_const() {
            return Ok(self.int(n));
        }
        let all = self.op(&SHAPE, &[v])?;
        let at = self.int(axis as i64);
        self.gather(all, at, 0)
    }

    /// Returns the size of one axis as an int64 vector of one element.
    pub fn axis_vector(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(n) = self.dims(v)[axis].as_const() {
            return Ok(self.ints(&[n]));
        }
        let axis = axis as i64;
        let attrs = Attrs::new().with("start", axis).with("end", axis + 1);
        self.emit(&SHAPE, &[v], attrs)
    }

    /// Returns [`Builder::axis_vector`] of each axis in a range.
    pub fn axis_vectors(
        &mut self,
        v: ValueId,
        axes: impl RangeBounds<usize>,
    ) -> Result<Vec<ValueId>> {
        (0..self.rank(v))
            .filter(|axis| axes.contains(axis))
            .map(|axis| self.axis_vector(v, axis))
            .collect()
    }

    /// Returns `0, 1, …` below an int64 scalar.
    pub fn counted(&mut self, count: ValueId) -> Result<ValueId> {
        let (zero, one) = (self.int(0), self.int(1));
        self.op(&fill::RANGE, &[zero, count, one])
    }

    /// Returns `0, 1, …` below the size of an axis: int64 [size].
    pub fn positions(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        let (zero, one) = (self.int(0), self.int(1));
        let size = self.axis_size(v, axis)?;
        self.op(&fill::RANGE, &[zero, size, one])
    }
}
