//! The inner nodes of attentions and MLPs, between their products.
//!
//! The *core* of an attention leads from queries, keys and values to the context: the products, the softmax, all nodes
//! between, and the layout steps that carry the context to the next product. The *activation* of an MLP or of experts lies
//! between two products with weights. Both are large, and cheap to recompute from the operands and results of the products
//! around them.

use super::layers::Layers;
use super::residual_stream::Flow;
use super::sub_blocks::{SubBlockKind, SubBlocks};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap};
use rustc_hash::FxHashSet;

/// The kind of inner nodes that a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    /// Queries, keys and values to context.
    Attention,
    /// Between the products of an MLP.
    MlpActivation,
    /// Between the products of experts.
    ExpertActivation,
}

impl Core {
    /// Returns the word that policies have for it.
    pub fn word(self) -> &'static str {
        match self {
            Core::Attention => "core-attn",
            Core::MlpActivation => "mlp-act",
            Core::ExpertActivation => "moe-act",
        }
    }
}

/// Returns the core of each node that is in one.
///
/// # Errors
/// See [`Flow::new`].
pub fn cores(
    graph: &Graph,
    layers: &Layers,
    sub_blocks: &SubBlocks,
) -> Result<SecondaryMap<NodeId, Option<Core>>> {
    let flow = Flow::new(graph)?;
    let mut core = SecondaryMap::new(graph.node_bound(), None);
    for attention in &layers.attentions {
        for id in between(graph, &flow, attention.scores, attention.output) {
            core[id] = Some(Core::Attention);
        }
    }
    for sub_block in &sub_blocks.list {
        let what = match sub_block.kind {
            SubBlockKind::Mlp => Core::MlpActivation,
            SubBlockKind::Experts => Core::ExpertActivation,
            _ => continue,
        };
        for id in activation(graph, &flow, layers, &sub_block.nodes) {
            core[id] = core[id].or(Some(what));
        }
    }
    Ok(core)
}

/// Returns the nodes on paths from one node to a later one, both included, and the layout steps and casts that follow.
fn between(graph: &Graph, flow: &Flow, from: NodeId, to: NodeId) -> FxHashSet<NodeId> {
    let mut below: FxHashSet<NodeId> = FxHashSet::default();
    let mut stack = vec![from];
    while let Some(id) = stack.pop() {
        if below.insert(id) && id != to {
            let readers = flow.readers(graph, id);
            stack.extend(readers.filter(|r| flow.position[*r] <= flow.position[to]));
        }
    }
    let mut found: FxHashSet<NodeId> = FxHashSet::default();
    stack.push(to);
    while let Some(id) = stack.pop() {
        if below.contains(&id) && found.insert(id) && id != from {
            stack.extend(graph.operand_nodes(id));
        }
    }
    stack.push(to);
    while let Some(id) = stack.pop() {
        for reader in flow.readers(graph, id) {
            let op = graph.node(reader).op;
            if (op.is_layout() || op.class == OpClass::Cast) && found.insert(reader) {
                stack.push(reader);
            }
        }
    }
    found
}

/// Returns those nodes of a sub-block (in order) that lie between two products with weights.
fn activation(graph: &Graph, flow: &Flow, layers: &Layers, nodes: &[NodeId]) -> Vec<NodeId> {
    let is_product = |id: NodeId| {
        let kind = graph.node(id).op.class;
        layers.plain_matmul[id] || matches!(kind, OpClass::BiasedProduct)
    };
    let inside: FxHashSet<NodeId> = nodes.iter().copied().collect();
    let mut below: FxHashSet<NodeId> = FxHashSet::default();
    for id in nodes {
        let fed = |n: NodeId| inside.contains(&n) && (is_product(n) || below.contains(&n));
        if flow.is_active(graph, *id) && graph.operand_nodes(*id).any(fed) {
            below.insert(*id);
        }
    }
    let mut above: FxHashSet<NodeId> = FxHashSet::default();
    for id in nodes.iter().rev() {
        let feeds = |n: NodeId| inside.contains(&n) && (is_product(n) || above.contains(&n));
        if flow.readers(graph, *id).any(feeds) {
            above.insert(*id);
        }
    }
    let mut found = nodes.to_vec();
    found.retain(|n| below.contains(n) && above.contains(n) && !is_product(*n));
    found
}
