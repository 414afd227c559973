//! The least and the largest number that an integer tensor can hold, whatever its data is.
//!
//! It answers for positions that are counted along a mask: `CumSum(mask)·mask + 1`. What is compared or boolean is 0 or 1, and
//! so is an integer input, for an input that is no index is a mask. The numbers are expressions of sizes.

use super::symbolic_elements::{Elements, axis_of};
use crate::ir::op::{OpClass, OpDef};
use crate::ir::{DType, Def, Dim, Graph, Node, ValueId};
use crate::ops::{arith, concat, extreme, logic, scan};

/// Longest chain of nodes that is followed.
const MAX_DEPTH: usize = 64;
/// Most nodes that one question visits.
const MAX_VISITS: usize = 2_000;

/// A least and a largest number, both included.
type Span = (Dim, Dim);

/// Answers about one graph.
pub struct Spans<'a, 'g> {
    graph: &'g Graph,
    elements: &'a mut Elements<'g>,
    depth: usize,
    visits: usize,
}

impl<'a, 'g> Spans<'a, 'g> {
    /// Builds an empty store of answers.
    pub fn new(graph: &'g Graph, elements: &'a mut Elements<'g>) -> Spans<'a, 'g> {
        Spans {
            graph,
            elements,
            depth: 0,
            visits: 0,
        }
    }

    /// Returns the largest number that a value can hold; `None` where it is not known.
    pub fn largest(&mut self, value: ValueId) -> Option<Dim> {
        self.of(value).map(|(_, largest)| largest)
    }

    fn of(&mut self, value: ValueId) -> Option<Span> {
        let ty = self.graph.ty(value);
        if ty.dtype == DType::Bool {
            return Some((Dim::ZERO, Dim::ONE));
        }
        if !ty.dtype.is_int() || self.depth > MAX_DEPTH || self.visits > MAX_VISITS {
            return None;
        }
        let known = self.elements.ask(value, &ty.dims).int();
        if let Some(known) = known {
            let ends = (
                self.elements.smallest(&known),
                self.elements.largest(&known),
            );
            return Some(ends).filter(|(a, b)| a.is_over_names() && b.is_over_names());
        }
        match &self.graph.value(value).def {
            Def::Input => Some((Dim::ZERO, Dim::ONE)),
            Def::Init(_) => None,
            Def::Node { node, .. } => {
                self.depth += 1;
                self.visits += 1;
                let found = self.computed(self.graph.node(*node));
                self.depth -= 1;
                found
            }
        }
    }

    fn computed(&mut self, node: &'g Node) -> Option<Span> {
        let op = node.op;
        if op == &concat::CONCAT {
            return self.hull(node.operands());
        }
        if op == &logic::WHERE {
            return self.hull(node.operands().skip(1));
        }
        let x = node.operand(0)?;
        if op.is_layout() || op.class == OpClass::Cast || op == &concat::TILE {
            return self.of(x);
        }
        if op == &scan::CUM_SUM {
            let axis = self.elements.number(node.operand(1)?)? as i64;
            let dims = &self.graph.ty(x).dims;
            let size = dims[axis_of(axis, dims.len())?].clone();
            let (least, most) = self.of(x)?;
            return is_natural(&least).then(|| (Dim::ZERO, most.mul(&size)));
        }
        if op == &arith::NEG {
            let (least, most) = self.of(x)?;
            return Some((Dim::ZERO.sub(&most), Dim::ZERO.sub(&least)));
        }
        let two = [
            &arith::ADD,
            &arith::SUB,
            &arith::MUL,
            &extreme::MIN,
            &extreme::MAX,
        ];
        if !two.contains(&op) {
            return None;
        }
        combined(op, self.of(x)?, self.of(node.operand(1)?)?)
    }

    /// Returns the span of all values together.
    fn hull(&mut self, values: impl Iterator<Item = ValueId>) -> Option<Span> {
        let mut spans = values.map(|v| self.of(v));
        let first = spans.next()??;
        spans.try_fold(first, |(least, most), span| {
            let (a, b) = span?;
            Some((least.smaller(&a), most.larger(&b)))
        })
    }
}

/// Returns true if a number is proven to be at least 0.
fn is_natural(d: &Dim) -> bool {
    d.bounds().0.is_some_and(|least| least >= 0)
}

fn combined(op: &OpDef, (a, b): Span, (c, d): Span) -> Option<Span> {
    if op == &arith::ADD {
        return Some((a.add(&c), b.add(&d)));
    }
    if op == &arith::SUB {
        return Some((a.sub(&d), b.sub(&c)));
    }
    if op == &extreme::MIN {
        return Some((a.smaller(&c), b.smaller(&d)));
    }
    if op == &extreme::MAX {
        return Some((a.larger(&c), b.larger(&d)));
    }
    if is_natural(&a) && is_natural(&c) {
        return Some((a.mul(&c), b.mul(&d)));
    }
    // A factor of 0 or 1 hides a number or leaves it.
    let is_mask = |least: &Dim, most: &Dim| is_natural(least) && most.is_one();
    let hidden = |least: &Dim, most: &Dim| (least.smaller(&Dim::ZERO), most.larger(&Dim::ZERO));
    match (is_mask(&a, &b), is_mask(&c, &d)) {
        (true, _) => Some(hidden(&c, &d)),
        (_, true) => Some(hidden(&a, &b)),
        _ => None,
    }
}
