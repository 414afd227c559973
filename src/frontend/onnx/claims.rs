//! What nodes say about themselves in metadata (`ckpt.of`, `ckpt.role`): metadata proposes, the verifier decides.
//!
//! A claim that does not hold is dropped with a warning, and the node is an ordinary one.

use super::import::Importer;
use crate::onnx::keys;
use ckpt_passes::analysis::gradients::training_outputs;
use ckpt_passes::ir::verify::check_copy;
use ckpt_passes::ir::{Graph, NodeId, Phase, Role};
use std::collections::BTreeMap;

/// A node that says it computes another one again: node, name of the original, segment.
pub(super) struct Claim {
    node: NodeId,
    original: String,
    segment: Option<u32>,
}

/// The claims of the nodes from place `first` of the order on.
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

impl Importer<'_, '_> {
    /// Accepts the claims that hold, nested ones included: an original always comes before its copies.
    pub(super) fn believe(&mut self, claims: Vec<Claim>) {
        let by_name: BTreeMap<String, NodeId> = self
            .graph
            .nodes()
            .map(|(id, n)| (n.name.clone(), id))
            .collect();
        for claim in claims {
            // Nodes are read in the order they run in: an original has the smaller id, so claims never form a cycle.
            let earlier = |id: &NodeId| *id < claim.node;
            let original = by_name.get(&claim.original).copied().filter(earlier);
            self.graph
                .set_recompute_of(claim.node, original, claim.segment);
            if original.is_none() || check_copy(&self.graph, claim.node).is_err() {
                let name = self.graph.node(claim.node).name.clone();
                self.warnings.push(format!(
                    "`{name}` does not compute `{}` again, as it claims: read as an ordinary node",
                    claim.original
                ));
                self.graph.set_recompute_of(claim.node, None, None);
                let meta = self.graph.meta_mut(claim.node);
                meta.remove(keys::OF);
                meta.remove(keys::SEGMENT);
            }
        }
        self.believe_roles();
        let backward = self.graph.nodes().any(|(_, n)| n.role == Role::Backward);
        let again = self.graph.nodes().any(|(_, n)| n.recompute_of.is_some());
        let typed = self.graph.values().all(|(_, v)| v.ty.is_some());
        self.graph.phase = match (typed, backward, again) {
            (true, true, true) => Phase::Rewritten,
            (true, true, false) => Phase::Training,
            (true, ..) => Phase::Typed,
            _ => Phase::Imported,
        };
    }

    /// A backward ends in gradients: without one, the roles say nothing, and the model would be taken for trained.
    fn believe_roles(&mut self) {
        let nodes: Vec<NodeId> = self.graph.order().to_vec();
        let claimed = |id: &NodeId| self.graph.node(*id).role == Role::Backward;
        if training_outputs(&self.graph).is_empty() && nodes.iter().any(claimed) {
            self.warnings.push(
                "nodes say that they are a backward, but no output is the gradient of an initializer: read as a forward graph"
                    .into(),
            );
            for id in nodes {
                self.graph.set_role(id, Role::Forward);
            }
        }
    }
}
