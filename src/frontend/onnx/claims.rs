//! What nodes say about themselves in metadata (`ckpt.of`, `ckpt.role`). The verifier checks every claim.
//!
//! A claim that does not hold is dropped with a warning, and its node is read as an ordinary one.

use crate::onnx::keys;
use ckpt_passes::analysis::gradients::training_outputs;
use ckpt_passes::ir::verify::check_copy;
use ckpt_passes::ir::{Graph, NodeId, Phase, Role};
use std::collections::BTreeMap;

/// A node that claims to recompute another one.
pub(super) struct Claim {
    node: NodeId,
    /// The name of the other node.
    original: String,
    segment: Option<u32>,
}

/// Returns the claims of the nodes from index `first` of the order on.
pub(super) fn claims(graph: &Graph, first: usize) -> Vec<Claim> {
    let claim = |id: &NodeId| {
        let meta = &graph.node(*id).meta;
        let original = meta.get(keys::OF)?.clone();
        let segment = meta.get(keys::SEGMENT).and_then(|s| s.parse().ok());
        Some(Claim {
            node: *id,
            original,
            segment,
        })
    };
    graph.order()[first..].iter().filter_map(claim).collect()
}

/// Accepts the claims that hold, nested ones included, and sets the phase of the graph. Returns warnings about the others.
pub(super) fn believe(graph: &mut Graph, claims: Vec<Claim>) -> Vec<String> {
    let nodes = graph.nodes().map(|(id, n)| (n.name.clone(), id));
    let by_name: BTreeMap<String, NodeId> = nodes.collect();
    let mut warnings = Vec::new();
    for claim in claims {
        // Nodes are read in the order of the schedule, so an original has the smaller id, and claims never form a cycle.
        let earlier = |id: &NodeId| *id < claim.node;
        let original = by_name.get(&claim.original).copied().filter(earlier);
        graph.set_recompute_of(claim.node, original, claim.segment);
        if original.is_none() || check_copy(graph, claim.node).is_err() {
            warnings.push(format!(
                "`{}` does not compute `{}` again, as it claims: read as an ordinary node",
                graph.node(claim.node).name,
                claim.original
            ));
            graph.set_recompute_of(claim.node, None, None);
            let meta = graph.meta_mut(claim.node);
            meta.remove(keys::OF);
            meta.remove(keys::SEGMENT);
        }
    }
    warnings.extend(believe_roles(graph));
    let backward = graph.nodes().any(|(_, n)| n.role == Role::Backward);
    let again = graph.nodes().any(|(_, n)| n.recompute_of.is_some());
    let typed = graph.values().all(|(_, v)| v.ty.is_some());
    graph.phase = match (typed, backward, again) {
        (true, true, true) => Phase::Rewritten,
        (true, true, false) => Phase::Training,
        (true, ..) => Phase::Typed,
        _ => Phase::Imported,
    };
    warnings
}

/// Drops the roles of nodes if no output is a gradient, because a backward pass ends in gradients. Returns a warning then.
fn believe_roles(graph: &mut Graph) -> Option<String> {
    let nodes: Vec<NodeId> = graph.order().to_vec();
    let claimed = |id: &NodeId| graph.node(*id).role == Role::Backward;
    if !training_outputs(graph).is_empty() || !nodes.iter().any(claimed) {
        return None;
    }
    for id in nodes {
        graph.set_role(id, Role::Forward);
    }
    Some(
        "nodes say that they are a backward, but no output is the gradient of an initializer: read as a forward graph"
            .into(),
    )
}

/// Returns the role that a node claims.
pub(super) fn role_of(props: &BTreeMap<String, String>) -> Role {
    match props.get(keys::ROLE).map(String::as_str) {
        Some("loss") => Role::Loss,
        Some("backward" | "update") => Role::Backward,
        _ => Role::Forward,
    }
}
