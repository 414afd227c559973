//! A product with a matrix and a vector added to every row of it, as one op, in 16 bits.
//!
//! As two ops the product is rounded before the vector is added and the sum once more; PyTorch's `linear` and `addmm` round
//! once. In wider types that is no matter, and the two stay.

use super::{Found, Pattern, with_lead};
use crate::analysis::matcher::Reading;
use crate::error::Result;
use crate::ir::build::same_dims;
use crate::ir::{Attrs, Builder, NodeId, Same, ValueId};
use crate::ops::arith;
use crate::ops::matmul::{GEMM, MATMUL};
use crate::ops::rule::compute_type;
use crate::ops::shape::{FLATTEN, transposed};

/// x·w + bias, of x's last axis.
pub struct Linear {
    x: ValueId,
    w: ValueId,
    bias: ValueId,
}

impl Pattern for Linear {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        vec![&mut self.x, &mut self.w, &mut self.bias]
    }

    fn word(&self) -> &'static str {
        "products with a bias"
    }

    fn build(self, b: &mut Builder) -> Result<ValueId> {
        let rank = b.rank(self.x);
        // A weight as it is stored: so its gradient is made in that layout.
        let (w, turned) = match transposed(b.graph, self.w) {
            Some((w, perm)) if perm == [1, 0] => (w, 1),
            _ => (self.w, 0),
        };
        let rows = match rank {
            2 => self.x,
            _ => b.emit(
                &FLATTEN,
                &[self.x],
                Attrs::new().with("axis", rank as i64 - 1),
            )?,
        };
        let attrs = Attrs::new().with("transB", turned);
        let y = b.emit(&GEMM, &[rows, w, self.bias], attrs)?;
        match rank {
            2 => Ok(y),
            _ => with_lead(b, y, self.x, rank - 1, 1),
        }
    }
}

/// All of them, in order.
pub fn find(reading: &Reading) -> Vec<Found<Linear>> {
    let nodes = &reading.flow.nodes;
    nodes.iter().filter_map(|id| linear(reading, *id)).collect()
}

fn linear(r: &Reading, id: NodeId) -> Option<Found<Linear>> {
    let graph = r.graph;
    let product = graph.node(id);
    let y = product.outs[0];
    let ty = graph.ty(y);
    if product.op != &MATMUL || compute_type(ty.dtype) == ty.dtype {
        return None;
    }
    let (x, w) = (product.ins[0]?, product.ins[1]?);
    let sum = graph.node(r.sole_use(y)?.node);
    let bias = sum.ins.iter().copied().flatten().find(|v| *v != y)?;
    let (columns, added) = (graph.ty(w), graph.ty(bias));
    let fits = added.rank() == 1 && added.dims[0].same(columns.dims.last()?) == Same::Yes;
    let is_linear = graph.ty(x).rank() >= 2 && columns.rank() == 2 && fits;
    let is_whole = same_dims(&graph.ty(sum.outs[0]).dims, &ty.dims);
    (sum.op == &arith::ADD && is_linear && is_whole).then_some(Found {
        output: sum.outs[0],
        what: Linear { x, w, bias },
    })
}
