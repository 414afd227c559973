//! Attention in the dataflow: a softmax between two products of activations.
//!
//! `MatMul(q, k) → scale, mask, cast, clamp … → Softmax → cast, guard, dropout … → MatMul(p, v)`, or one fused op. The
//! search passes elementwise and layout steps between them. It never looks at names.

pub mod decomposed;
pub mod mask;
mod mask_saturation;
mod sinks;
pub mod summary;

use super::residual_stream::Flow;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::concat::CONCAT;
use sinks::is_column;

/// One attention. All three nodes of a fused attention are the op itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// The product that makes the scores.
    pub scores: NodeId,
    /// The softmax.
    pub probabilities: NodeId,
    /// The product with the values.
    pub output: NodeId,
}

/// The role of a node in an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionRole {
    /// The product of queries and keys.
    Scores,
    /// The softmax.
    Probabilities,
    /// The product with the values.
    Output,
    /// An attention of one op.
    Fused,
}

/// Longest walk between a softmax and its products.
const MAX_STEPS: usize = 16;

/// Returns all attentions of the forward pass in order, and the role of each node in them.
pub fn attentions(
    graph: &Graph,
    flow: &Flow,
) -> (Vec<Attention>, SecondaryMap<NodeId, Option<AttentionRole>>) {
    let mut roles = SecondaryMap::new(graph.node_bound(), None);
    let mut list = Vec::new();
    for id in flow.nodes.iter().copied() {
        let kind = graph.node(id).op.class;
        let (scores, output) = if kind == OpClass::Attention {
            roles[id] = Some(AttentionRole::Fused);
            (id, id)
        } else if kind == OpClass::Softmax
            && let Some(scores) = product_before(graph, flow, id)
            && let Some(output) = product_after(graph, flow, id)
        {
            roles[scores] = Some(AttentionRole::Scores);
            roles[id] = Some(AttentionRole::Probabilities);
            roles[output] = Some(AttentionRole::Output);
            (scores, output)
        } else {
            continue;
        };
        list.push(Attention {
            scores,
            probabilities: id,
            output,
        });
    }
    (list, roles)
}

/// Returns true for ops that keep the index of each element, or only move elements.
fn passes_through(graph: &Graph, id: NodeId) -> bool {
    let op = graph.node(id).op;
    op.is_layout() || matches!(op.class, OpClass::Elementwise | OpClass::Cast)
}

fn product_before(graph: &Graph, flow: &Flow, softmax: NodeId) -> Option<NodeId> {
    let mut at = softmax;
    for _ in 0..MAX_STEPS {
        // An operand that is itself a product is the scores. Otherwise the first activation is: a mask comes second.
        let mut operands = graph.operand_nodes(at);
        let product = operands.find(|n| is_product(graph, flow, *n));
        if product.is_some() {
            return product;
        }
        let mut operands = graph.node(at).operands();
        let is_activation = |v: ValueId| flow.active[v] && !flow.is_parameter[v];
        let is_sink = |at: NodeId, v| graph.node(at).op == &CONCAT && is_column(graph, v);
        let leads = |v: ValueId| is_activation(v) && !is_sink(at, v);
        at = operands.find_map(|v| graph.def_node(v).filter(|_| leads(v)))?;
        let joins_sink = graph.node(at).operands().any(|v| is_sink(at, v));
        if flow.position[at].is_none() || !(joins_sink || passes_through(graph, at)) {
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

/// Returns true for products of two activations.
fn is_product(graph: &Graph, flow: &Flow, id: NodeId) -> bool {
    let node = graph.node(id);
    let is_activation = |v: ValueId| flow.active[v] && weight_of(graph, flow, v).is_none();
    node.op.class == OpClass::Product
        && flow.position[id].is_some()
        && node.ins.len() >= 2
        && node.operands().all(is_activation)
}

/// Returns the parameter that a value is, or shows through layout ops, casts and lookups (the weights of chosen experts).
pub fn weight_of(graph: &Graph, flow: &Flow, mut value: ValueId) -> Option<ValueId> {
    for _ in 0..MAX_STEPS {
        if flow.is_parameter[value] {
            return Some(value);
        }
        let node = graph.node(graph.def_node(value)?);
        // A lookup in a stack of matrices yields matrices, one in a table of vectors (an embedding) activations.
        let looks_up = node.op.ins.first().is_some_and(|slot| slot.weight)
            && node.ins[0].is_some_and(|v| graph.ty(v).rank() > 2);
        if !node.op.is_layout() && node.op.class != OpClass::Cast && !looks_up {
            return None;
        }
        value = node.operand(0)?;
    }
    None
}
