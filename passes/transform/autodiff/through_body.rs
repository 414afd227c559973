//! The gradient of a node without a rule: the nodes of its body, emitted again on its operands and differentiated.
//!
//! The node itself stays as it is, so that forward values keep their bits, and of what it reads and makes only its
//! operands stay alive for this. The nodes of the body are backward nodes like any others, named after the node: planned,
//! priced and written as they are, and gone again where no gradient reads them. An operand that the body only compares or
//! takes the shape of gets nothing. Bodies are in standard ops, all of which have rules: there is no body in a body.

use super::Reverse;
use crate::error::{Error, Result};
use crate::ir::op::{Body, BodyCx};
use crate::ir::{Graph, Id, NodeId, SecondaryMap, ValueId};

impl Reverse<'_, '_> {
    /// Differentiates `id` through its body; `dys` are the cotangents of its results.
    pub(super) fn through_body(&mut self, id: NodeId, dys: Vec<Option<ValueId>>) -> Result<()> {
        let node = self.b.graph.node(id);
        let (op, attrs, ins) = (node.op, node.attrs.clone(), node.ins.clone());
        let outs = node.outs.iter().map(|v| self.b.ty(*v).clone()).collect();
        let Body::Function(build) = op.body else {
            return Err(Error::bug("autodiff", format!("{} has no body", op.name)));
        };
        let before = self.b.graph.order().len();
        let results = build(&mut BodyCx {
            b: &mut *self.b,
            attrs: &attrs,
            ins,
            outs,
        })?;
        let body = self.b.graph.order()[before..].to_vec();
        self.reach(&body);
        for (result, dy) in results.into_iter().zip(dys) {
            if let Some(dy) = dy
                && self.needs[result]
            {
                self.give(id, result, dy)?;
            }
        }
        for inner in body.iter().rev() {
            self.backward_of(*inner)?;
        }
        self.bodies.extend(body);
        *self.through_bodies.entry(op.name).or_default() += 1;
        Ok(())
    }
}

/// Removes nodes of bodies that no gradient reads, and the constants among the values from `first` on that only they read.
pub(super) fn prune(graph: &mut Graph, bodies: &[NodeId], first: usize) {
    let mut gone = SecondaryMap::new(graph.node_bound(), false);
    for id in bodies.iter().rev() {
        let unread = |v: &ValueId| {
            let readers = graph.value(*v).uses();
            !graph.is_output(*v) && readers.iter().all(|r| gone[r.node])
        };
        gone[*id] = graph.node(*id).outs.iter().all(unread);
    }
    if graph.remove_nodes(&|id| gone[id]) == 0 {
        return;
    }
    let inits = graph.inits();
    let unread =
        inits.filter(|(id, v)| id.index() >= first && v.uses().is_empty() && !graph.is_output(*id));
    let unread: Vec<ValueId> = unread.map(|(id, _)| id).collect();
    for id in unread {
        graph.remove_source(id);
    }
}
