//! Fuses rotary positions in both spellings: `x·cos + (−x₂, x₁)·sin`, and each half on its own with tables of half the
//! width. Tables that training could change are left alone: fusing would not improve their gradient.

use super::pattern::{Found, Pattern};
use crate::analysis::matcher::Matcher;
use crate::error::Result;
use crate::ir::{Attrs, Node, NodeId, ValueId};
use crate::ops::{Builder, EmitExt, arith, concat, rotary, slice};

/// A rotation of `x` by tables of cosines and sines.
struct Rotation {
    x: ValueId,
    cos: ValueId,
    sin: ValueId,
}

impl Pattern for Rotation {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        vec![&mut self.x, &mut self.cos, &mut self.sin]
    }

    fn plural(&self) -> &'static str {
        "rotary positions"
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
        b.emit(&rotary::ROTARY, &[self.x, self.cos, self.sin], Attrs::new())
    }
}

/// Returns the rotation whose last op a node is.
pub(super) fn find(m: &mut Matcher, id: NodeId) -> Option<Found> {
    let output = *m.graph.node(id).outs.first()?;
    let found = whole(m, id).or_else(|| by_halves(m, id))?;
    fits(m, output, &found).then(|| Found::new(output, found))
}

/// Returns the rotation `x·cos + (−x₂, x₁)·sin` that a node adds up.
fn whole(m: &mut Matcher, id: NodeId) -> Option<Rotation> {
    let node = m.graph.node(id);
    if node.op != &arith::ADD {
        return None;
    }
    let (left, right) = (product(m, node.ins[0]?)?, product(m, node.ins[1]?)?);
    for (own, other) in [(left, right), (right, left)] {
        for (quarter, sin) in [other, (other.1, other.0)] {
            let Some(x) = quarter_turn(m, quarter) else {
                continue;
            };
            for (factor, cos) in [own, (own.1, own.0)] {
                if factor == x {
                    return Some(Rotation { x, cos, sin });
                }
            }
        }
    }
    None
}

/// Returns the rotation whose halves a node joins: (a·cos − b·sin, b·cos + a·sin).
fn by_halves(m: &mut Matcher, id: NodeId) -> Option<Rotation> {
    let (first, second) = joined(m, m.graph.node(id))?;
    let (_, minus) = m.producer(first)?;
    let (_, plus) = m.producer(second)?;
    if minus.op != &arith::SUB || plus.op != &arith::ADD {
        return None;
    }
    if !m.is_inner(first) || !m.is_inner(second) {
        return None;
    }
    let (ac, bs) = (product(m, minus.ins[0]?)?, product(m, minus.ins[1]?)?);
    let [p, q] = [product(m, plus.ins[0]?)?, product(m, plus.ins[1]?)?];
    for (a, cos) in [ac, (ac.1, ac.0)] {
        let Some((x, 0)) = half(m, a) else { continue };
        for (b, sin) in [bs, (bs.1, bs.0)] {
            if half(m, b) != Some((x, 1)) {
                continue;
            }
            let mut is_product = |(p, q): (ValueId, ValueId), which, table| {
                (q == table && half(m, p) == Some((x, which)))
                    || (p == table && half(m, q) == Some((x, which)))
            };
            // A table of the whole width would be another function of the second half.
            if (is_product(p, 1, cos) && is_product(q, 0, sin))
                || (is_product(q, 1, cos) && is_product(p, 0, sin))
            {
                return Some(Rotation { x, cos, sin });
            }
        }
    }
    None
}

/// Returns the factors of a product that has one reader.
fn product(m: &Matcher, v: ValueId) -> Option<(ValueId, ValueId)> {
    let (_, node) = m.producer(v)?;
    if node.op != &arith::MUL || !m.is_inner(v) {
        return None;
    }
    Some((node.ins[0]?, node.ins[1]?))
}

/// Returns `x` where a value with one reader is (−x₂, x₁).
fn quarter_turn(m: &mut Matcher, v: ValueId) -> Option<ValueId> {
    let (_, node) = m.producer(v)?;
    if !m.is_inner(v) {
        return None;
    }
    let (first, second) = joined(m, node)?;
    let (_, negated) = m.producer(first)?;
    if negated.op != &arith::NEG || !m.is_inner(first) {
        return None;
    }
    let (x, from) = half(m, negated.ins[0]?)?;
    (from == 1 && half(m, second) == Some((x, 0))).then_some(x)
}

fn is_last(axis: i64, rank: usize) -> bool {
    axis == -1 || axis + 1 == rank as i64
}

/// Returns the two operands that a node joins along their last axis.
fn joined(m: &Matcher, node: &Node) -> Option<(ValueId, ValueId)> {
    let [Some(first), Some(second)] = node.ins[..] else {
        return None;
    };
    let joins =
        node.op == &concat::CONCAT && is_last(node.attrs.int("axis"), m.graph.ty(first).rank());
    joins.then_some((first, second))
}

/// Returns the value of whose last axis `v` is the first (0) or the second (1) half.
fn half(m: &mut Matcher, v: ValueId) -> Option<(ValueId, usize)> {
    let (_, node) = m.producer(v)?;
    let x = node.operand(0)?;
    let rank = m.graph.ty(x).rank();
    let width = m.graph.ty(x).dims.last()?.as_const()?;
    if width % 2 != 0 || m.graph.ty(v).dims.last()?.as_const()? != width / 2 {
        return None;
    }
    if node.op == &concat::SPLIT {
        let which = node.outs.iter().position(|out| *out == v)?;
        let halves = is_last(node.attrs.int("axis"), rank) && node.outs.len() == 2;
        return halves.then_some((x, which));
    }
    if node.op != &slice::SLICE {
        return None;
    }
    let mut known = |slot: usize, default: &[i64]| match node.operand(slot) {
        Some(v) => m.elements.constants(v),
        None => Some(default.to_vec()),
    };
    let (starts, axes, steps) = (known(1, &[])?, known(3, &[0])?, known(4, &[1])?);
    let (&[start], &[axis], &[1]) = (&starts[..], &axes[..], &steps[..]) else {
        return None;
    };
    // The result is half as wide, so its start determines its end.
    match start {
        _ if !is_last(axis, rank) => None,
        s if s == 0 || s == -width => Some((x, 0)),
        s if s == width / 2 || s == -(width / 2) => Some((x, 1)),
        _ => None,
    }
}

/// Returns true if the op accepts the operands and nobody trains its tables.
fn fits(m: &Matcher, output: ValueId, found: &Rotation) -> bool {
    let graph = m.graph;
    let (ty, output_ty) = (graph.ty(found.x), graph.ty(output));
    let last = |v: ValueId| graph.ty(v).dims.last().and_then(|d| d.as_const());
    let is_sum = graph
        .def_node(output)
        .is_some_and(|id| graph.node(id).op == &arith::ADD);
    let width = last(found.x).map(|w| if is_sum { w } else { w / 2 });
    let fits = |table: ValueId| {
        let n = last(table);
        (n == width || n == Some(1)) && !m.flow.active[table] && graph.ty(table).rank() <= ty.rank()
    };
    ty.dtype.is_float()
        && output_ty.dims == ty.dims
        && output_ty.dtype == ty.dtype
        && fits(found.cos)
        && fits(found.sin)
}
