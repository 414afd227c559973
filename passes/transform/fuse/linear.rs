//! Fuses a product with a matrix and a vector that is added to every row, in 16 bits.
//!
//! Two ops round the product, and then the sum. PyTorch's `linear` and `addmm` round once. In wider types the difference
//! does not matter, and the two ops stay.

use super::pattern::{Found, Pattern, with_lead};
use crate::analysis::matcher::{Matcher, other_operand};
use crate::error::Result;
use crate::ir::same_dims;
use crate::ir::{Attrs, NodeId, Same, ValueId};
use crate::ops::arith;
use crate::ops::matmul::{GEMM, MATMUL};
use crate::ops::rule::compute_type;
use crate::ops::shape::{FLATTEN, transposed};
use crate::ops::{Builder, EmitExt};

/// x·w + bias over x's last axis.
struct Linear {
    x: ValueId,
    w: ValueId,
    bias: ValueId,
}

impl Pattern for Linear {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        vec![&mut self.x, &mut self.w, &mut self.bias]
    }

    fn plural(&self) -> &'static str {
        "products with a bias"
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
        let rank = b.rank(self.x);
        // The weight is read as it is stored, so its gradient is made in that layout.
        let (w, is_transposed) = match transposed(b, self.w) {
            Some((w, perm)) if perm == [1, 0] => (w, 1),
            _ => (self.w, 0),
        };
        let attrs = Attrs::new().with("transB", is_transposed);
        if rank == 2 {
            return b.emit(&GEMM, &[self.x, w, self.bias], attrs);
        }
        let last = Attrs::new().with("axis", rank as i64 - 1);
        let rows = b.emit(&FLATTEN, &[self.x], last)?;
        let y = b.emit(&GEMM, &[rows, w, self.bias], attrs)?;
        with_lead(b, y, self.x, rank - 1, 1)
    }
}

/// Returns the linear layer whose product a node is.
pub(super) fn find(m: &mut Matcher, id: NodeId) -> Option<Found> {
    let graph = m.graph;
    let product = graph.node(id);
    let y = product.outs[0];
    let ty = graph.ty(y);
    if product.op != &MATMUL || compute_type(ty.dtype) == ty.dtype {
        return None;
    }
    let (x, w) = (product.ins[0]?, product.ins[1]?);
    let sum = m.sole_reader(y)?;
    let bias = other_operand(sum, y)?;
    let (columns, added) = (graph.ty(w), graph.ty(bias));
    let fits = added.rank() == 1 && added.dims[0].same(columns.dims.last()?) == Same::Yes;
    let is_linear = graph.ty(x).rank() >= 2 && columns.rank() == 2 && fits;
    let is_whole = same_dims(&graph.ty(sum.outs[0]).dims, &ty.dims);
    (sum.op == &arith::ADD && is_linear && is_whole)
        .then(|| Found::new(sum.outs[0], Linear { x, w, bias }))
}
