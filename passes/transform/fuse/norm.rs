//! `RMSNormalization` and `LayerNormalization` out of their parts.
//!
//! Both are found from the mean of a square: of the operand, or of the operand less its mean. What follows is one over the
//! root of that mean plus epsilon, in any spelling; a product with the operand, perhaps a cast back, a scale of exactly
//! one row, and for a layer norm perhaps a bias. A norm without a scale stays as it is: the op has none, and a row of ones
//! put in would look like a parameter.

use super::{Found, Pattern};
use crate::analysis::matcher::Reading;
use crate::error::Result;
use crate::ir::{Attrs, Builder, DType, Node, NodeId, Same, ValueId};
use crate::ops::{arith, cast, math, norm, power, reduce};

/// A norm over the last `axes` axes.
pub struct Norm {
    x: ValueId,
    scale: ValueId,
    bias: Option<ValueId>,
    axes: usize,
    epsilon: f32,
    centred: bool,
}

impl Pattern for Norm {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        let mut all = vec![&mut self.x, &mut self.scale];
        all.extend(self.bias.as_mut());
        all
    }

    fn word(&self) -> &'static str {
        if self.centred {
            "layer norms"
        } else {
            "RMS norms"
        }
    }

    fn build(self, b: &mut Builder) -> Result<ValueId> {
        let attrs = Attrs::new()
            .with("axis", -(self.axes as i64))
            .with("epsilon", self.epsilon);
        let op = if self.centred {
            &norm::LAYER_NORM
        } else {
            &norm::RMS_NORM
        };
        let mut ins = vec![self.x, self.scale];
        ins.extend(self.bias);
        b.emit(op, &ins, attrs)
    }
}

/// All norms, in order.
pub fn find(reading: &mut Reading) -> Vec<Found<Norm>> {
    let nodes = &reading.flow.nodes;
    nodes
        .iter()
        .filter_map(|id| norm_at(reading, *id))
        .collect()
}

/// The norm whose mean of squares a node is.
fn norm_at(r: &mut Reading, mean_id: NodeId) -> Option<Found<Norm>> {
    let graph = r.graph;
    let mean = graph.node(mean_id);
    let axes = last_axes(r, mean)?;
    let (square_id, base) = squared(r, mean.ins[0]?)?;
    if !r.is_inner(mean.ins[0]?) {
        return None;
    }
    let (epsilon, inverse) = inverse_root(r, mean.outs[0])?;
    let epsilon = epsilon as f32;
    if !(epsilon.is_finite() && epsilon >= 0.0) {
        return None;
    }
    // The operand times the factor.
    let use_ = r.sole_use(inverse.value)?;
    let node = graph.node(use_.node);
    let times = if inverse.divides {
        &arith::DIV
    } else {
        &arith::MUL
    };
    if node.op != times || (inverse.divides && use_.slot != 1) {
        return None;
    }
    let y = node.ins[1 - use_.slot]?;
    let normal = node.outs[0];
    let (x, centred) = operand(r, base, y, axes, &[square_id, use_.node])?;
    if graph.ty(normal).dims != graph.ty(x).dims {
        return None;
    }
    let (scaled, scale) = row_after(r, normal, x, axes, &arith::MUL)?;
    let dtype = graph.ty(scaled).dtype;
    let mut found = Norm {
        x: unwidened(r, x, dtype),
        scale,
        bias: None,
        axes,
        epsilon,
        centred,
    };
    let mut output = scaled;
    if centred {
        if graph.ty(found.x).dtype != dtype {
            return None;
        }
        if let Some((sum, bias)) = row_after(r, scaled, x, axes, &arith::ADD) {
            (output, found.bias) = (sum, Some(bias));
        }
    }
    // Statistics of float64 are taken in float32 by the op, in float64 by its parts.
    (dtype != DType::F64 && graph.ty(found.x).dtype != DType::F64).then_some(Found {
        output,
        what: found,
    })
}

/// How many last axes a mean goes over that keeps them.
fn last_axes(r: &mut Reading, node: &Node) -> Option<usize> {
    if node.op != &reduce::REDUCE_MEAN || node.attrs.int("keepdims") != 1 {
        return None;
    }
    let rank = r.graph.ty(node.ins[0]?).rank() as i64;
    let listed = r.elements.constants(node.ins.get(1).copied().flatten()?)?;
    let mut axes: Vec<i64> = listed
        .into_iter()
        .map(|a| a.rem_euclid(rank.max(1)))
        .collect();
    axes.sort_unstable();
    let count = axes.len() as i64;
    let last = count > 0 && axes.iter().copied().eq(rank - count..rank);
    last.then_some(count as usize)
}

/// What a value is the square of, and the node that squares it.
fn squared(r: &mut Reading, v: ValueId) -> Option<(NodeId, ValueId)> {
    let (id, node) = r.made_by(v)?;
    let x = node.ins[0]?;
    let other = node.ins.get(1).copied().flatten()?;
    let fits = (node.op == &power::POW && r.elements.number(other) == Some(2.0))
        || (node.op == &arith::MUL && other == x);
    fits.then_some((id, x))
}

/// One over the root of a mean plus epsilon.
struct Inverse {
    value: ValueId,
    /// The value is the root itself, and what it meets is divided by it.
    divides: bool,
}

fn inverse_root(r: &mut Reading, mean: ValueId) -> Option<(f64, Inverse)> {
    let graph = r.graph;
    let sum = graph.node(r.sole_use(mean)?.node);
    if sum.op != &arith::ADD || graph.ty(sum.outs[0]).dims != graph.ty(mean).dims {
        return None;
    }
    let other = if sum.ins[0] == Some(mean) {
        sum.ins[1]?
    } else {
        sum.ins[0]?
    };
    let epsilon = r.elements.number(other)?;
    let use_ = r.sole_use(sum.outs[0])?;
    let root = graph.node(use_.node);
    let value = root.outs[0];
    let direct = Inverse {
        value,
        divides: false,
    };
    if root.op == &power::POW && use_.slot == 0 && r.elements.number(root.ins[1]?) == Some(-0.5) {
        return Some((epsilon, direct));
    }
    if root.op != &math::SQRT {
        return None;
    }
    let use_ = r.sole_use(value)?;
    let after = graph.node(use_.node);
    let reciprocal = after.op == &math::RECIPROCAL
        || (after.op == &arith::DIV
            && use_.slot == 1
            && graph.ty(after.outs[0]).dims == graph.ty(value).dims
            && r.elements.number(after.ins[0]?) == Some(1.0));
    if reciprocal {
        let value = after.outs[0];
        return Some((
            epsilon,
            Inverse {
                value,
                divides: false,
            },
        ));
    }
    Some((
        epsilon,
        Inverse {
            value,
            divides: true,
        },
    ))
}

/// What is normalised, and whether its mean is taken off: `base` was squared and `other` is scaled, by `inside` nodes.
fn operand(
    r: &mut Reading,
    base: ValueId,
    other: ValueId,
    axes: usize,
    inside: &[NodeId],
) -> Option<(ValueId, bool)> {
    if let Some(x) = centred(r, base, axes)
        && centred(r, other, axes) == Some(x)
    {
        // Differences that only the norm reads; some exporters write them twice.
        let only =
            |v: ValueId| !r.is_output(v) && r.uses(v).iter().all(|u| inside.contains(&u.node));
        return (only(base) && only(other)).then_some((x, true));
    }
    (base == other).then_some((base, false))
}

/// The operand of `x − mean(x)`.
fn centred(r: &mut Reading, v: ValueId, axes: usize) -> Option<ValueId> {
    let (_, node) = r.made_by(v)?;
    if node.op != &arith::SUB {
        return None;
    }
    let (x, mean) = (node.ins[0]?, node.ins[1]?);
    let (_, mean) = r.made_by(mean)?;
    (mean.ins[0] == Some(x) && last_axes(r, mean) == Some(axes)).then_some(x)
}

/// The product or sum of a value, perhaps cast, with a row of the normalised size, and that row.
fn row_after(
    r: &mut Reading,
    v: ValueId,
    x: ValueId,
    axes: usize,
    op: &'static crate::ir::OpDef,
) -> Option<(ValueId, ValueId)> {
    let graph = r.graph;
    let mut v = v;
    let mut use_ = r.sole_use(v)?;
    let mut node = graph.node(use_.node);
    if node.op == &cast::CAST && graph.ty(node.outs[0]).dtype.is_float() && op == &arith::MUL {
        v = node.outs[0];
        use_ = r.sole_use(v)?;
        node = graph.node(use_.node);
    }
    if node.op != op {
        return None;
    }
    let row = node.ins[1 - use_.slot]?;
    let (dims, x) = (&graph.ty(row).dims, &graph.ty(x).dims);
    let tail = &x[x.len() - axes..];
    let fits = dims.len() == axes && dims.iter().zip(tail).all(|(a, b)| a.same(b) == Same::Yes);
    (fits && row != v).then_some((node.outs[0], row))
}

/// A value before it was made wider, where that is of the wanted type, or of any that is narrower.
fn unwidened(r: &Reading, x: ValueId, dtype: DType) -> ValueId {
    let Some((_, node)) = r.made_by(x) else {
        return x;
    };
    let Some(from) = node.ins[0].filter(|_| node.op == &cast::CAST) else {
        return x;
    };
    let (narrow, wide) = (r.graph.ty(from).dtype, r.graph.ty(x).dtype);
    let same =
        narrow == wide || (wide == DType::F32 && narrow.is_float() && narrow.size_bytes() == 2);
    if same && (narrow == dtype || dtype == wide) {
        return from;
    }
    x
}
