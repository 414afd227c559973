//! Attention in the dataflow: a softmax between two products of activations.
//!
//! `MatMul(q, k) → scale, mask, cast, clamp … → Softmax → cast, guard, dropout … → MatMul(p, v)`, or one fused op.
//! Elementwise and layout steps between are walked through; names are never looked at.

pub mod form;
pub mod mask;
mod mask_saturation;
mod operands;
pub mod rows;

use super::residual_stream::Flow;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};

/// One attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// The product that makes the scores; of a fused op, the op itself.
    pub scores: NodeId,
    /// The softmax; of a fused op, the op itself.
    pub probabilities: NodeId,
    /// The product with the values; of a fused op, the op itself.
    pub output: NodeId,
}

/// What a node is in an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Scores,
    Probabilities,
    Output,
    Fused,
}

/// Longest walk between a softmax and its products.
const MAX_STEPS: usize = 16;

/// All attentions of the forward part, in order, and the part that each node plays.
pub fn attentions(
    graph: &Graph,
    flow: &Flow,
) -> (Vec<Attention>, SecondaryMap<NodeId, Option<Part>>) {
    let mut parts = SecondaryMap::new(graph.node_bound(), None);
    let mut list = Vec::new();
    for id in &flow.nodes {
        let what = graph.node(*id).op.class;
        if what == OpClass::Attention {
            parts[*id] = Some(Part::Fused);
            list.push(Attention {
                scores: *id,
                probabilities: *id,
                output: *id,
            });
        } else if what == OpClass::Softmax
            && let Some(scores) = product_before(graph, flow, *id)
            && let Some(output) = product_after(graph, flow, *id)
        {
            parts[scores] = Some(Part::Scores);
            parts[*id] = Some(Part::Probabilities);
            parts[output] = Some(Part::Output);
            list.push(Attention {
                scores,
                probabilities: *id,
                output,
            });
        }
    }
    (list, parts)
}

/// Ops that keep an element's place, or only move elements.
fn passes_through(graph: &Graph, id: NodeId) -> bool {
    let op = graph.node(id).op;
    op.is_layout() || matches!(op.class, OpClass::Elementwise | OpClass::Cast)
}

fn first_active_operand(graph: &Graph, flow: &Flow, id: NodeId) -> Option<ValueId> {
    let operands = graph.node(id).ins.iter().flatten().copied();
    operands
        .into_iter()
        .find(|v| flow.active[*v] && !flow.is_parameter[*v] && graph.def_node(*v).is_some())
}

fn product_before(graph: &Graph, flow: &Flow, softmax: NodeId) -> Option<NodeId> {
    let mut at = softmax;
    for _ in 0..MAX_STEPS {
        // A mask that is itself an activation comes second; the scores are what a product made, so prefer that.
        let operands = graph
            .node(at)
            .ins
            .iter()
            .flatten()
            .filter_map(|v| graph.def_node(*v));
        let product = operands.into_iter().find(|n| is_product(graph, flow, *n));
        if product.is_some() {
            return product;
        }
        at = graph.def_node(first_active_operand(graph, flow, at)?)?;
        if flow.position[at].is_none() || !passes_through(graph, at) {
            return None;
        }
    }
    None
}

fn product_after(graph: &Graph, flow: &Flow, softmax: NodeId) -> Option<NodeId> {
    let mut at = softmax;
    for _ in 0..MAX_STEPS {
        let mut next = None;
        for reader in flow.readers(graph, at) {
            if is_product(graph, flow, reader) {
                return Some(reader);
            }
            if passes_through(graph, reader) && flow.is_active(graph, reader) {
                next.get_or_insert(reader);
            }
        }
        at = next?;
    }
    None
}

/// Whether a node multiplies two activations.
fn is_product(graph: &Graph, flow: &Flow, id: NodeId) -> bool {
    let node = graph.node(id);
    node.op.class == OpClass::Product
        && flow.position[id].is_some()
        && node.ins.len() >= 2
        && node
            .ins
            .iter()
            .flatten()
            .all(|v| flow.active[*v] && weight_of(graph, flow, *v).is_none())
}

/// The parameter that a value is, or shows through layout ops, casts and lookups (the weights of chosen experts).
pub fn weight_of(graph: &Graph, flow: &Flow, mut value: ValueId) -> Option<ValueId> {
    for _ in 0..MAX_STEPS {
        if flow.is_parameter[value] {
            return Some(value);
        }
        let node = graph.node(graph.def_node(value)?);
        // A lookup in a stack of matrices yields matrices; in a table of vectors (an embedding), activations.
        let looks_up = node.op.ins.first().is_some_and(|slot| slot.weight)
            && node.ins[0].is_some_and(|v| graph.ty(v).rank() > 2);
        if !node.op.is_layout() && node.op.class != OpClass::Cast && !looks_up {
            return None;
        }
        value = node.ins.first().copied().flatten()?;
    }
    None
}
