//! Fuses `RMSNormalization` and `LayerNormalization`.
//!
//! Both searches start at the mean of a square: of the operand, or of the operand minus its mean. They then
//! match `1 / sqrt(mean + epsilon)` in any equivalent form, the product with the operand, an optional cast back, the scale and,
//! for a layer norm, an optional bias. A norm without a scale stays as it is: the op requires one, and a row of ones
//! would look like a parameter.

use super::pattern::{Found, Pattern};
use crate::analysis::matcher::{Matcher, other_operand};
use crate::error::Result;
use crate::ir::{Attrs, DType, Node, NodeId, OpDef, Same, ValueId};
use crate::ops::{Builder, EmitExt, arith, cast, math, norm, power, reduce};

/// A norm over the last `axes` axes.
struct Norm {
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

    fn plural(&self) -> &'static str {
        if self.centred {
            "layer norms"
        } else {
            "RMS norms"
        }
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
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

/// Returns the norm whose mean of squares a node is.
pub(super) fn find(m: &mut Matcher, mean_id: NodeId) -> Option<Found> {
    let graph = m.graph;
    let mean = graph.node(mean_id);
    let axes = last_axes(m, mean)?;
    let (square_id, base) = squared(m, mean.ins[0]?)?;
    if !m.is_inner(mean.ins[0]?) {
        return None;
    }
    let (epsilon, inverse, divides) = inverse_root(m, mean.outs[0])?;
    let epsilon = epsilon as f32;
    if !(epsilon.is_finite() && epsilon >= 0.0) {
        return None;
    }
    // The product of the operand and the inverse, or the quotient of the operand and the root.
    let use_ = m.sole_use(inverse)?;
    let node = graph.node(use_.node);
    let times = if divides { &arith::DIV } else { &arith::MUL };
    if node.op != times || (divides && use_.slot != 1) {
        return None;
    }
    let y = node.ins[1 - use_.slot]?;
    let normal = node.outs[0];
    let (x, centred) = operand(m, base, y, axes, &[square_id, use_.node])?;
    if graph.ty(normal).dims != graph.ty(x).dims {
        return None;
    }
    let (scaled, scale) = row_after(m, normal, x, axes, &arith::MUL)?;
    let dtype = graph.ty(scaled).dtype;
    let mut found = Norm {
        x: unwidened(m, x, dtype),
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
        if let Some((sum, bias)) = row_after(m, scaled, x, axes, &arith::ADD) {
            (output, found.bias) = (sum, Some(bias));
        }
    }
    // The op takes statistics of float64 in float32, its decomposition in float64.
    let is_f64 = dtype == DType::F64 || graph.ty(found.x).dtype == DType::F64;
    (!is_f64).then(|| Found::new(output, found))
}

/// Returns the number of last axes that a mean goes over, where it keeps them.
fn last_axes(m: &mut Matcher, node: &Node) -> Option<usize> {
    if node.op != &reduce::REDUCE_MEAN || node.attrs.int("keepdims") != 1 {
        return None;
    }
    let rank = m.graph.ty(node.ins[0]?).rank() as i64;
    let listed = m.elements.constants(node.operand(1)?)?;
    let axes = listed.into_iter().map(|a| a.rem_euclid(rank.max(1)));
    let mut axes: Vec<i64> = axes.collect();
    axes.sort_unstable();
    let count = axes.len() as i64;
    let is_last = count > 0 && axes.iter().copied().eq(rank - count..rank);
    is_last.then_some(count as usize)
}

/// Returns the node that squares, and its operand, where a value is a square.
fn squared(m: &mut Matcher, v: ValueId) -> Option<(NodeId, ValueId)> {
    let (id, node) = m.producer(v)?;
    let (x, other) = (node.ins[0]?, node.operand(1)?);
    let fits = (node.op == &power::POW && m.elements.number(other) == Some(2.0))
        || (node.op == &arith::MUL && other == x);
    fits.then_some((id, x))
}

/// Returns epsilon, one over the root of a mean plus epsilon, and false; or the root itself, and true.
fn inverse_root(m: &mut Matcher, mean: ValueId) -> Option<(f64, ValueId, bool)> {
    let graph = m.graph;
    let sum = m.sole_reader(mean)?;
    if sum.op != &arith::ADD || graph.ty(sum.outs[0]).dims != graph.ty(mean).dims {
        return None;
    }
    let epsilon = m.elements.number(other_operand(sum, mean)?)?;
    let use_ = m.sole_use(sum.outs[0])?;
    let node = graph.node(use_.node);
    let root = node.outs[0];
    if node.op == &power::POW && use_.slot == 0 && m.elements.number(node.ins[1]?) == Some(-0.5) {
        return Some((epsilon, root, false));
    }
    if node.op != &math::SQRT {
        return None;
    }
    let use_ = m.sole_use(root)?;
    let after = graph.node(use_.node);
    let is_reciprocal = after.op == &math::RECIPROCAL
        || (after.op == &arith::DIV
            && use_.slot == 1
            && graph.ty(after.outs[0]).dims == graph.ty(root).dims
            && m.elements.number(after.ins[0]?) == Some(1.0));
    Some(match is_reciprocal {
        true => (epsilon, after.outs[0], false),
        false => (epsilon, root, true),
    })
}

/// Returns the operand of the norm, and whether its mean is subtracted: `base` was squared and `other` is scaled, by the
/// nodes `inside`.
fn operand(
    m: &mut Matcher,
    base: ValueId,
    other: ValueId,
    axes: usize,
    inside: &[NodeId],
) -> Option<(ValueId, bool)> {
    if let Some(x) = centred(m, base, axes)
        && centred(m, other, axes) == Some(x)
    {
        // Only the norm may read the differences; some exporters write them twice.
        let only =
            |v: ValueId| !m.is_output(v) && m.uses(v).iter().all(|u| inside.contains(&u.node));
        return (only(base) && only(other)).then_some((x, true));
    }
    (base == other).then_some((base, false))
}

/// Returns the operand of `x − mean(x)`.
fn centred(m: &mut Matcher, v: ValueId, axes: usize) -> Option<ValueId> {
    let (_, node) = m.producer(v)?;
    if node.op != &arith::SUB {
        return None;
    }
    let (x, mean) = (node.ins[0]?, node.ins[1]?);
    let (_, mean) = m.producer(mean)?;
    (mean.ins[0] == Some(x) && last_axes(m, mean) == Some(axes)).then_some(x)
}

/// Returns the product or sum of a value, perhaps cast, with a row of the normalised size, and that row.
fn row_after(
    m: &mut Matcher,
    mut v: ValueId,
    x: ValueId,
    axes: usize,
    op: &'static OpDef,
) -> Option<(ValueId, ValueId)> {
    let graph = m.graph;
    let mut use_ = m.sole_use(v)?;
    let mut node = graph.node(use_.node);
    if node.op == &cast::CAST && graph.ty(node.outs[0]).dtype.is_float() && op == &arith::MUL {
        v = node.outs[0];
        use_ = m.sole_use(v)?;
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

/// Returns the operand of the cast that widened `x`, where the norm can read it: it has type `dtype`, or the result does
/// not change type.
fn unwidened(m: &Matcher, x: ValueId, dtype: DType) -> ValueId {
    let cast = m.producer(x).filter(|(_, node)| node.op == &cast::CAST);
    let Some(from) = cast.and_then(|(_, node)| node.ins[0]) else {
        return x;
    };
    let (narrow, wide) = (m.graph.ty(from).dtype, m.graph.ty(x).dtype);
    let widens =
        narrow == wide || (wide == DType::F32 && narrow.is_float() && narrow.size_bytes() == 2);
    match widens && (narrow == dtype || dtype == wide) {
        true => from,
        false => x,
    }
}
