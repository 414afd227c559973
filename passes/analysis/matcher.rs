//! A forward graph as searches for patterns read it: who makes a value, who reads it, which number it is.

use super::residual_stream::Flow;
use super::symbolic_elements::Elements;
use crate::ir::{Graph, Node, NodeId, SecondaryMap, Use, ValueId};
use crate::ops::arith;

/// One forward graph; copies, losses and backward nodes are as if they were not there.
pub struct Reading<'g> {
    pub graph: &'g Graph,
    pub flow: &'g Flow,
    pub elements: Elements<'g>,
    is_output: SecondaryMap<ValueId, bool>,
}

impl<'g> Reading<'g> {
    pub fn new(graph: &'g Graph, flow: &'g Flow) -> Reading<'g> {
        let mut is_output = SecondaryMap::new(graph.value_bound(), false);
        for v in graph.outputs() {
            is_output[*v] = true;
        }
        Reading {
            graph,
            flow,
            elements: Elements::new(graph, flow),
            is_output,
        }
    }

    pub fn is_output(&self, v: ValueId) -> bool {
        self.is_output[v]
    }

    /// Reads by forward nodes.
    pub fn uses(&self, v: ValueId) -> Vec<Use> {
        let uses = self.graph.value(v).uses().iter();
        uses.filter(|u| self.flow.position[u.node].is_some())
            .copied()
            .collect()
    }

    /// The one read of a value that nobody else reads; `None` where others do, or the outside.
    pub fn sole_use(&self, v: ValueId) -> Option<Use> {
        let uses = self.graph.value(v).uses().iter();
        let mut uses = uses.filter(|u| self.flow.position[u.node].is_some());
        let first = uses.next().filter(|_| !self.is_output[v])?;
        uses.next().is_none().then_some(*first)
    }

    /// Whether a value is read once, and not by the outside.
    pub fn is_inner(&self, v: ValueId) -> bool {
        self.sole_use(v).is_some()
    }

    /// The forward node that makes a value.
    pub fn made_by(&self, v: ValueId) -> Option<(NodeId, &'g Node)> {
        let id = self.graph.def_node(v)?;
        self.flow.position[id]?;
        Some((id, self.graph.node(id)))
    }

    /// The other operand of a product or quotient with one number, that number, and whether the shape stays.
    pub fn scaled(&mut self, node: &Node) -> Option<(ValueId, f64)> {
        let (is_mul, is_div) = (node.op == &arith::MUL, node.op == &arith::DIV);
        if !is_mul && !is_div {
            return None;
        }
        let (a, b) = (node.ins[0]?, node.ins[1]?);
        let out = &self.graph.ty(node.outs[0]).dims;
        let keeps = |v: ValueId| self.graph.ty(v).dims == *out;
        let one = |v: ValueId| self.graph.ty(v).elements().is_one();
        if keeps(a) && one(b) {
            let x = self.elements.number(b)?;
            return Some((a, if is_mul { x } else { 1.0 / x }));
        }
        if is_mul && keeps(b) && one(a) {
            return Some((b, self.elements.number(a)?));
        }
        None
    }
}
