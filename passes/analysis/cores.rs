//! The inner parts of attentions and MLPs: what lies between their products.
//!
//! The *core* of an attention is what takes queries, keys and values to the context: the products, the softmax and all
//! between, and the layout steps that carry the context to the next product. The *activation* of an MLP or of experts
//! is what lies between two products with weights. Both are large and cheap to rebuild from what the products around
//! them read and make.

use super::layers::Layers;
use super::residual_stream::Flow;
use super::submodules::{Part, Submodules};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap};
use rustc_hash::FxHashSet;

/// Which inner part a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Core {
    Attention,
    MlpActivation,
    ExpertActivation,
}

/// The inner part of each node, if it is in one.
///
/// # Errors
/// See [`Flow::new`].
pub fn cores(
    graph: &Graph,
    blocks: &Layers,
    submodules: &Submodules,
) -> Result<SecondaryMap<NodeId, Option<Core>>> {
    let flow = Flow::new(graph)?;
    let mut core = SecondaryMap::new(graph.node_bound(), None);
    for attention in &blocks.attentions {
        for id in between(graph, &flow, attention.scores, attention.output) {
            core[id] = Some(Core::Attention);
        }
    }
    for part in &submodules.list {
        let what = match part.kind {
            Part::Mlp => Core::MlpActivation,
            Part::Experts => Core::ExpertActivation,
            _ => continue,
        };
        for id in activation(graph, &flow, blocks, &part.nodes) {
            core[id] = core[id].or(Some(what));
        }
    }
    Ok(core)
}

fn operands<'g>(graph: &'g Graph, id: NodeId) -> impl Iterator<Item = NodeId> + 'g {
    let ins = graph.node(id).ins.iter().flatten();
    ins.filter_map(|v| graph.def_node(*v))
}

/// The nodes on ways from one node to a later one, both included, and the layout steps and casts that follow.
fn between(graph: &Graph, flow: &Flow, from: NodeId, to: NodeId) -> FxHashSet<NodeId> {
    let mut below: FxHashSet<NodeId> = FxHashSet::default();
    let mut stack = vec![from];
    while let Some(id) = stack.pop() {
        if below.insert(id) && id != to {
            let readers = flow.readers(graph, id);
            let until = flow.position[to];
            stack.extend(readers.filter(|r| flow.position[*r] <= until));
        }
    }
    let mut found: FxHashSet<NodeId> = FxHashSet::default();
    stack.push(to);
    while let Some(id) = stack.pop() {
        if below.contains(&id) && found.insert(id) && id != from {
            stack.extend(operands(graph, id));
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

/// Of the nodes of one part (in order), those between two products with weights.
fn activation(graph: &Graph, flow: &Flow, blocks: &Layers, nodes: &[NodeId]) -> Vec<NodeId> {
    let multiplies = |id: NodeId| {
        blocks.plain_matmul[id] || matches!(graph.node(id).op.class, OpClass::BiasedProduct)
    };
    let inside: FxHashSet<NodeId> = nodes.iter().copied().collect();
    let mut below: FxHashSet<NodeId> = FxHashSet::default();
    for id in nodes {
        let fed = |n: NodeId| inside.contains(&n) && (multiplies(n) || below.contains(&n));
        if flow.is_active(graph, *id) && operands(graph, *id).any(fed) {
            below.insert(*id);
        }
    }
    let mut above: FxHashSet<NodeId> = FxHashSet::default();
    for id in nodes.iter().rev() {
        let feeds = |n: NodeId| inside.contains(&n) && (multiplies(n) || above.contains(&n));
        if flow.readers(graph, *id).any(feeds) {
            above.insert(*id);
        }
    }
    let mut found = nodes.to_vec();
    found.retain(|n| below.contains(n) && above.contains(n) && !multiplies(*n));
    found
}
