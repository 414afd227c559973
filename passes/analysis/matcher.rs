//! A forward graph as pattern searches see it: who makes a value, who reads it, which number it is.

use super::residual_stream::Flow;
use super::symbolic_elements::Elements;
use crate::ir::{Graph, Node, NodeId, SecondaryMap, Use, ValueId};
use crate::ops::arith;

/// One forward graph, without copies, losses and backward nodes.
pub struct Matcher<'g> {
    /// The graph that is searched.
    pub graph: &'g Graph,
    /// Its forward nodes and activations.
    pub flow: &'g Flow,
    /// What the elements of its values are.
    pub elements: Elements<'g>,
    is_output: SecondaryMap<ValueId, bool>,
}

impl<'g> Matcher<'g> {
    /// Builds a matcher without answers yet.
    pub fn new(graph: &'g Graph, flow: &'g Flow) -> Matcher<'g> {
        let mut is_output = SecondaryMap::new(graph.value_bound(), false);
        for v in graph.outputs() {
            is_output[*v] = true;
        }
        Matcher {
            graph,
            flow,
            elements: Elements::new(graph, flow),
            is_output,
        }
    }

    /// Returns true for graph outputs.
    pub fn is_output(&self, v: ValueId) -> bool {
        self.is_output[v]
    }

    /// Returns the operand slots of forward nodes that read a value.
    pub fn uses(&self, v: ValueId) -> Vec<Use> {
        let uses = self.graph.value(v).uses().iter();
        uses.filter(|u| self.flow.position[u.node].is_some())
            .copied()
            .collect()
    }

    /// Returns the only use of a value; `None` where it has several, or is a graph output.
    pub fn sole_use(&self, v: ValueId) -> Option<Use> {
        let uses = self.graph.value(v).uses().iter();
        let mut uses = uses.filter(|u| self.flow.position[u.node].is_some());
        let first = uses.next().filter(|_| !self.is_output[v])?;
        uses.next().is_none().then_some(*first)
    }

    /// Returns the only node that reads a value; see [`Matcher::sole_use`].
    pub fn sole_reader(&self, v: ValueId) -> Option<&'g Node> {
        Some(self.graph.node(self.sole_use(v)?.node))
    }

    /// Returns true if a value is read once and is no graph output.
    pub fn is_inner(&self, v: ValueId) -> bool {
        self.sole_use(v).is_some()
    }

    /// Returns the forward node that makes a value.
    pub fn producer(&self, v: ValueId) -> Option<(NodeId, &'g Node)> {
        let id = self.graph.def_node(v)?;
        self.flow.position[id]?;
        Some((id, self.graph.node(id)))
    }

    /// Returns the other operand of a product or quotient with one number, and that number as a factor. The other operand
    /// has the shape of the result.
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

/// Returns the operand of a binary node beside `v`; `None` where both are `v`.
pub fn other_operand(node: &Node, v: ValueId) -> Option<ValueId> {
    match node.ins.as_slice() {
        [Some(a), Some(b)] if *a == v && *b != v => Some(*b),
        [Some(a), Some(b)] if *b == v && *a != v => Some(*a),
        _ => None,
    }
}
