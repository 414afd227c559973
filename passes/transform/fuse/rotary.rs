//! Rotary positions out of their parts, in both spellings: `x·cos + (−x₂, x₁)·sin`, and the two halves each on its own
//! with tables of half the width. Tables that training could change are left alone: the gradient of the parts is as good.

use super::{Found, Pattern};
use crate::analysis::matcher::Reading;
use crate::error::Result;
use crate::ir::{Attrs, Builder, Node, NodeId, ValueId};
use crate::ops::{arith, concat, rotary, slice};

pub struct Turn {
    x: ValueId,
    cos: ValueId,
    sin: ValueId,
}

impl Pattern for Turn {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        vec![&mut self.x, &mut self.cos, &mut self.sin]
    }

    fn word(&self) -> &'static str {
        "rotary positions"
    }

    fn build(self, b: &mut Builder) -> Result<ValueId> {
        b.emit(&rotary::ROTARY, &[self.x, self.cos, self.sin], Attrs::new())
    }
}

/// All turns, in order.
pub fn find(reading: &mut Reading) -> Vec<Found<Turn>> {
    let nodes = &reading.flow.nodes;
    nodes
        .iter()
        .filter_map(|id| {
            let found = whole(reading, *id).or_else(|| by_halves(reading, *id))?;
            fits(reading, &found).then_some(found)
        })
        .collect()
}

/// The turn that a sum is the last part of.
fn whole(r: &mut Reading, id: NodeId) -> Option<Found<Turn>> {
    let graph = r.graph;
    let node = graph.node(id);
    if node.op != &arith::ADD {
        return None;
    }
    let (left, right) = (node.ins[0]?, node.ins[1]?);
    for (straight, across) in [(left, right), (right, left)] {
        let (Some(own), Some(other)) = (product(r, straight), product(r, across)) else {
            return None;
        };
        for (quarter, sin) in [other, (other.1, other.0)] {
            let Some(x) = quarter_turn(r, quarter) else {
                continue;
            };
            let cos = match own {
                (a, b) if a == x => b,
                (a, b) if b == x => a,
                _ => continue,
            };
            return Some(Found {
                output: node.outs[0],
                what: Turn { x, cos, sin },
            });
        }
    }
    None
}

/// The turn whose halves a node joins: (a·cos − b·sin, b·cos + a·sin).
fn by_halves(r: &mut Reading, id: NodeId) -> Option<Found<Turn>> {
    let graph = r.graph;
    let node = graph.node(id);
    let (first, second) = joined(r, node)?;
    let (_, minus) = r.made_by(first)?;
    let (_, plus) = r.made_by(second)?;
    if minus.op != &arith::SUB || plus.op != &arith::ADD {
        return None;
    }
    if !r.is_inner(first) || !r.is_inner(second) {
        return None;
    }
    let (ac, bs) = (product(r, minus.ins[0]?)?, product(r, minus.ins[1]?)?);
    let sums = [product(r, plus.ins[0]?)?, product(r, plus.ins[1]?)?];
    for (a, cos) in [ac, (ac.1, ac.0)] {
        let Some((x, 0)) = half(r, a) else { continue };
        for (b, sin) in [bs, (bs.1, bs.0)] {
            if half(r, b) != Some((x, 1)) {
                continue;
            }
            let is_product = |r: &mut Reading, (p, q): (ValueId, ValueId), which, table| {
                (q == table && half(r, p) == Some((x, which)))
                    || (p == table && half(r, q) == Some((x, which)))
            };
            let [p, q] = sums;
            let found = (is_product(r, p, 1, cos) && is_product(r, q, 0, sin))
                || (is_product(r, q, 1, cos) && is_product(r, p, 0, sin));
            // A table of the whole width would be another function of the second half.
            if found {
                return Some(Found {
                    output: node.outs[0],
                    what: Turn { x, cos, sin },
                });
            }
        }
    }
    None
}

/// The factors of a product that nobody else reads.
fn product(r: &Reading, v: ValueId) -> Option<(ValueId, ValueId)> {
    let (_, node) = r.made_by(v)?;
    if node.op != &arith::MUL || !r.is_inner(v) {
        return None;
    }
    Some((node.ins[0]?, node.ins[1]?))
}

/// `x` where a value that nobody else reads is (−x₂, x₁).
fn quarter_turn(r: &mut Reading, v: ValueId) -> Option<ValueId> {
    let (_, node) = r.made_by(v)?;
    if !r.is_inner(v) {
        return None;
    }
    let (first, second) = joined(r, node)?;
    let (_, negated) = r.made_by(first)?;
    if negated.op != &arith::NEG || !r.is_inner(first) {
        return None;
    }
    let (x, from) = half(r, negated.ins[0]?)?;
    (from == 1 && half(r, second) == Some((x, 0))).then_some(x)
}

/// The two operands that a node joins along their last axis.
fn joined(r: &Reading, node: &Node) -> Option<(ValueId, ValueId)> {
    let [Some(first), Some(second)] = node.ins.as_slice() else {
        return None;
    };
    let is_last = |axis: i64, rank: usize| axis == -1 || axis + 1 == rank as i64;
    (node.op == &concat::CONCAT && is_last(node.attrs.int("axis"), r.graph.ty(*first).rank()))
        .then_some((*first, *second))
}

/// The value of whose last axis another is the first (0) or the second (1) half.
fn half(r: &mut Reading, v: ValueId) -> Option<(ValueId, usize)> {
    let (_, node) = r.made_by(v)?;
    let x = node.ins.first().copied().flatten()?;
    let rank = r.graph.ty(x).rank();
    let width = r.graph.ty(x).dims.last()?.as_const()?;
    if width % 2 != 0 || r.graph.ty(v).dims.last()?.as_const()? != width / 2 {
        return None;
    }
    if node.op == &concat::SPLIT {
        let axis = node.attrs.int("axis");
        let is_last = axis == -1 || axis + 1 == rank as i64;
        let which = node.outs.iter().position(|out| *out == v)?;
        return (is_last && node.outs.len() == 2).then_some((x, which));
    }
    if node.op != &slice::SLICE {
        return None;
    }
    let mut known = |slot: usize| r.elements.constants(node.ins.get(slot).copied().flatten()?);
    let starts = known(1)?;
    let axes = match node.ins.get(3) {
        Some(Some(_)) => known(3)?,
        _ => vec![0],
    };
    let steps = match node.ins.get(4) {
        Some(Some(_)) => known(4)?,
        _ => vec![1],
    };
    let (&[start], &[axis], &[1]) = (&starts[..], &axes[..], &steps[..]) else {
        return None;
    };
    if axis != -1 && axis + 1 != rank as i64 {
        return None;
    }
    // The result is half as wide, so that where it begins says where it ends.
    match start {
        0 => Some((x, 0)),
        s if s == width / 2 || s == -(width / 2) => Some((x, 1)),
        s if s == -width => Some((x, 0)),
        _ => None,
    }
}

/// Whether the row takes what was found, and nobody trains its tables.
fn fits(r: &Reading, found: &Found<Turn>) -> bool {
    let Turn { x, cos, sin } = found.what;
    let (graph, flow) = (r.graph, r.flow);
    let ty = graph.ty(x);
    let width = ty.dims.last().and_then(|d| d.as_const());
    let last = |v: ValueId| graph.ty(v).dims.last().and_then(|d| d.as_const());
    let output = graph.ty(found.output);
    let is_sum = graph
        .def_node(found.output)
        .is_some_and(|id| graph.node(id).op == &arith::ADD);
    let wanted = |n: Option<i64>| match is_sum {
        true => n == width || n == Some(1),
        false => n == width.map(|w| w / 2) || n == Some(1),
    };
    ty.dtype.is_float()
        && output.dims == ty.dims
        && output.dtype == ty.dtype
        && [cos, sin].iter().all(|table| {
            wanted(last(*table)) && !flow.active[*table] && graph.ty(*table).rank() <= ty.rank()
        })
}
