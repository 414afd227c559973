//! The sub-blocks of a layer: norm, attention, norm, MLP, from structure.
//!
//! Between two values of the residual stream lies one branch of a layer. Its nodes before the first product with a weight
//! are the norm in front, and a norm after the last product is one behind. The rest is an attention, an MLP, experts or a
//! convolution, whichever it contains. A branch with an attention and a separate MLP side by side (parallel residuals) is
//! both. A stretch of the stream without weights is a norm of its own (post-norm layers). The sum that closes a branch
//! belongs to it. Names and scopes only label what was found.

use super::attention::AttentionRole;
use super::layers::{Layers, scope};
use super::residual_stream::Flow;
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// One sub-block of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct SubBlock {
    /// The layer it is in.
    pub layer: usize,
    /// What it computes.
    pub kind: SubBlockKind,
    /// Module path that most of it comes from, where the file has scopes.
    pub path: Option<String>,
    /// Module class of that path.
    pub class: Option<String>,
    /// Its nodes, in order.
    pub nodes: Vec<NodeId>,
}

/// What a sub-block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubBlockKind {
    /// A norm.
    Norm,
    /// An attention with its products.
    Attention,
    /// An MLP, gated or not.
    Mlp,
    /// A router and its experts.
    Experts,
    /// A convolution.
    Convolution,
    /// Nothing of these.
    Other,
}

impl SubBlockKind {
    /// Returns the word for policies and reports.
    pub fn word(self) -> &'static str {
        match self {
            SubBlockKind::Norm => "norm",
            SubBlockKind::Attention => "attention",
            SubBlockKind::Mlp => "mlp",
            SubBlockKind::Experts => "experts",
            SubBlockKind::Convolution => "conv",
            SubBlockKind::Other => "other",
        }
    }
}

/// All sub-blocks of all layers, in order.
#[derive(Clone, Debug)]
pub struct SubBlocks {
    /// The sub-blocks, in model order.
    pub list: Vec<SubBlock>,
    /// The sub-block of each node.
    pub of: SecondaryMap<NodeId, Option<usize>>,
}

/// Nodes of a sub-block, with its kind.
type Nodes = (SubBlockKind, Vec<NodeId>);

impl SubBlocks {
    /// Splits the layers of a graph into sub-blocks.
    ///
    /// # Errors
    /// See [`Flow::new`].
    pub fn new(graph: &Graph, layers: &Layers) -> Result<SubBlocks> {
        let flow = Flow::new(graph)?;
        let mut found = SubBlocks {
            list: Vec::new(),
            of: SecondaryMap::new(graph.node_bound(), None),
        };
        let search = Search::new(graph, &flow, layers);
        for layer in &layers.list {
            let mut nodes = layer.nodes.clone();
            nodes.sort_by_key(|n| (layers.segment[*n], flow.position[*n]));
            let mut of_layer: Vec<Nodes> = Vec::new();
            let mut was_plain = false;
            for branch in nodes.chunk_by(|a, b| layers.segment[*a] == layers.segment[*b]) {
                let is_plain = !branch.iter().any(|n| search.is_anchor[*n]);
                if !is_plain {
                    of_layer.extend(search.split(branch));
                } else if let Some(last) = of_layer.last_mut().filter(|_| was_plain) {
                    // Steps along the stream without a weight belong together.
                    last.1.extend(branch);
                } else {
                    of_layer.push((SubBlockKind::Other, branch.to_vec()));
                }
                was_plain = is_plain;
            }
            for (mut kind, mut nodes) in of_layer {
                if kind == SubBlockKind::Other && search.normalises(&nodes) {
                    kind = SubBlockKind::Norm;
                }
                nodes.sort_by_key(|n| flow.position[*n]);
                for id in &nodes {
                    found.of[*id] = Some(found.list.len());
                }
                let (path, class) = scope(graph, &nodes).unzip();
                found.list.push(SubBlock {
                    layer: layer.index,
                    kind,
                    path,
                    class: class.flatten(),
                    nodes,
                });
            }
        }
        Ok(found)
    }
}

struct Search<'a> {
    graph: &'a Graph,
    flow: &'a Flow,
    layers: &'a Layers,
    /// Products with a weight, convolutions, and products of values of the layer (attentions, chosen experts).
    is_anchor: SecondaryMap<NodeId, bool>,
    /// Products with a weight and convolutions alone.
    is_weighted: SecondaryMap<NodeId, bool>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, flow: &'a Flow, layers: &'a Layers) -> Search<'a> {
        let mut is_weighted = SecondaryMap::new(graph.node_bound(), false);
        let mut is_anchor = SecondaryMap::new(graph.node_bound(), false);
        for id in &flow.nodes {
            let kind = graph.node(*id).op.class;
            is_weighted[*id] = match kind {
                OpClass::BiasedProduct | OpClass::Convolution => true,
                _ => layers.plain_matmul[*id],
            };
            let is_product = kind == OpClass::Product && flow.is_active(graph, *id);
            is_anchor[*id] = is_weighted[*id] || is_product || layers.role[*id].is_some();
        }
        Search {
            graph,
            flow,
            layers,
            is_anchor,
            is_weighted,
        }
    }

    fn has(&self, nodes: &[NodeId], what: OpClass) -> bool {
        nodes.iter().any(|n| self.graph.node(*n).op.class == what)
    }

    /// Returns true if nodes contain a norm: one op, or a sum or mean with a power or root.
    fn normalises(&self, nodes: &[NodeId]) -> bool {
        let mut active = nodes.to_vec();
        active.retain(|n| self.flow.is_active(self.graph, *n));
        let has = |what: OpClass| self.has(&active, what);
        has(OpClass::Norm) || has(OpClass::SumReduction) && has(OpClass::Power)
    }

    /// Splits a branch that multiplies by weights into sub-blocks.
    fn split(&self, branch: &[NodeId]) -> Vec<Nodes> {
        let [before, core, after] = self.divide(branch);
        let mut found = self.cores(&core);
        if self.normalises(&before) {
            found.insert(0, (SubBlockKind::Norm, before));
        } else if let Some(first) = found.first_mut() {
            first.1.extend(before);
        }
        if self.normalises(&after) {
            found.push((SubBlockKind::Norm, after));
        } else if let Some(last) = found.last_mut() {
            last.1.extend(after);
        }
        found
    }

    /// Divides the nodes of a branch: before every anchor, between anchors, behind the last.
    fn divide(&self, branch: &[NodeId]) -> [Vec<NodeId>; 3] {
        let index: FxHashMap<NodeId, usize> =
            branch.iter().enumerate().map(|(i, n)| (*n, i)).collect();
        let operands = |id: NodeId| {
            let nodes = self.graph.operand_nodes(id);
            nodes.filter_map(|n| index.get(&n).copied())
        };
        let mut below = vec![false; branch.len()];
        for (i, id) in branch.iter().enumerate() {
            below[i] = self.is_anchor[*id] || operands(*id).any(|j| below[j]);
        }
        let mut above = vec![false; branch.len()];
        for (i, id) in branch.iter().enumerate().rev() {
            if self.is_anchor[*id] || above[i] {
                above[i] = true;
                for j in operands(*id) {
                    above[j] = true;
                }
            }
        }
        let mut divided: [Vec<NodeId>; 3] = Default::default();
        for (i, id) in branch.iter().enumerate() {
            let side = match (below[i], above[i]) {
                // Masks and positions that a layer computes belong to the nodes that read them.
                (false, true) if self.flow.is_active(self.graph, *id) => 0,
                (true, false) => 2,
                _ => 1,
            };
            divided[side].push(*id);
        }
        divided
    }

    /// Returns the sub-blocks between the first and the last product: one, or an attention and the MLP beside it.
    fn cores(&self, core: &[NodeId]) -> Vec<Nodes> {
        let inside: BTreeSet<NodeId> = core.iter().copied().collect();
        let ends = |n: &NodeId| {
            let role = self.layers.role[*n];
            matches!(role, Some(AttentionRole::Output | AttentionRole::Fused))
        };
        let mut down: Vec<NodeId> = core.iter().copied().filter(ends).collect();
        if down.is_empty() {
            return vec![(self.kind(core), core.to_vec())];
        }
        // Nodes that feed an attention, and nodes that it feeds down to the next product with a weight.
        let mut up = Vec::new();
        let mut mine = BTreeSet::new();
        while let Some(id) = down.pop() {
            if mine.insert(id) {
                up.extend(self.graph.operand_nodes(id));
                let fed = self.flow.readers(self.graph, id);
                down.extend(fed.filter(|r| !self.is_weighted[id] && inside.contains(r)));
            }
        }
        while let Some(id) = up.pop() {
            if inside.contains(&id) && mine.insert(id) {
                up.extend(self.graph.operand_nodes(id));
            }
        }
        let (attention, rest): (Vec<NodeId>, Vec<NodeId>) =
            core.iter().partition(|n| mine.contains(n));
        if rest.iter().any(|n| self.is_weighted[*n]) {
            let kind = self.kind(&rest);
            return vec![(SubBlockKind::Attention, attention), (kind, rest)];
        }
        vec![(SubBlockKind::Attention, core.to_vec())]
    }

    fn kind(&self, nodes: &[NodeId]) -> SubBlockKind {
        if self.has(nodes, OpClass::Selection) {
            SubBlockKind::Experts
        } else if self.has(nodes, OpClass::Convolution) {
            SubBlockKind::Convolution
        } else if nodes.iter().any(|n| self.is_weighted[*n]) {
            SubBlockKind::Mlp
        } else {
            SubBlockKind::Other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Style, transformer};
    use crate::text;
    use crate::transform::infer::infer;

    fn words(graph: &Graph) -> Vec<Vec<&'static str>> {
        let layers = Layers::new(graph).unwrap();
        let found = SubBlocks::new(graph, &layers).unwrap();
        for id in graph.order().iter().copied() {
            // Every node of a layer is in exactly one sub-block of that layer.
            assert_eq!(found.of[id].map(|i| found.list[i].layer), layers.of[id]);
        }
        let of = |layer: usize| found.list.iter().filter(move |s| s.layer == layer);
        (0..layers.list.len())
            .map(|l| of(l).map(|s| s.kind.word()).collect())
            .collect()
    }

    /// Layers over `f32[b, s, 4]`, each with weights of its own; `layer` writes the nodes of one, from `%x{i}` to
    /// `%x{i + 1}`.
    fn stack(layer: &dyn Fn(usize) -> String) -> Graph {
        let mut source = "graph @g imported (%e: f32[b, s, 4]) -> (%y) {\n".to_string();
        source += "  init %two : i64[1] = [2]\n  init %last : i64[1] = [-1]\n";
        for i in 0..4 {
            for weight in ["wq", "wk", "wv", "wo", "wa", "wb"] {
                source += &format!("  init %{weight}{i} : f32[4, 4] = hash \"{weight}{i}\"\n");
            }
            source += &format!("  init %g{i} : f32[4] = hash \"g{i}\"\n");
        }
        source += "  %first = MatMul %e, %wq3\n  %x0 = Relu %first\n";
        source.extend((0..3).map(layer));
        source += "  %y = MatMul %x3, %wk3\n}\n";
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        graph
    }

    fn attention(i: usize, from: &str, to: &str) -> String {
        format!(
            "  %q{i} = MatMul {from}, %wq{i}\n  %k{i} = MatMul {from}, %wk{i}\n  %v{i} = MatMul {from}, %wv{i}
  %t{i} = Transpose %k{i} {{perm=[0, 2, 1]}}\n  %s{i} = MatMul %q{i}, %t{i}\n  %p{i} = Softmax %s{i}
  %c{i} = MatMul %p{i}, %v{i}\n  {to} = MatMul %c{i}, %wo{i}\n"
        )
    }

    fn mlp(i: usize, from: &str, to: &str) -> String {
        format!(
            "  %h{i} = MatMul {from}, %wa{i}\n  %r{i} = Relu %h{i}\n  {to} = MatMul %r{i}, %wb{i}\n"
        )
    }

    #[test]
    fn gated_layers_of_both_residual_styles() {
        let pre = words(&transformer(3, Style::PreNorm));
        assert_eq!(pre, vec![["norm", "attention", "norm", "mlp"]; 3]);
        let post = words(&transformer(3, Style::PostNorm));
        assert_eq!(post, vec![["attention", "norm", "mlp", "norm"]; 3]);
    }

    #[test]
    fn attention_and_a_gateless_mlp_side_by_side() {
        let layer = |i: usize| {
            let next = i + 1;
            format!(
                "  %n{i} = LayerNormalization %x{i}, %g{i}\n{}{}  %z{i} = Add %y{i}, %m{i}\n  %x{next} = Add %x{i}, %z{i}\n",
                attention(i, &format!("%n{i}"), &format!("%y{i}")),
                mlp(i, &format!("%n{i}"), &format!("%m{i}")),
            )
        };
        assert_eq!(words(&stack(&layer)), vec![["norm", "attention", "mlp"]; 3]);
    }

    #[test]
    fn layers_without_attention_and_norms_behind_a_branch() {
        let layer = |i: usize| {
            let (next, branch) = (i + 1, mlp(i, &format!("%n{i}"), &format!("%m{i}")));
            format!(
                "  %n{i} = RMSNormalization %x{i}, %g{i}\n{branch}  %w{i} = RMSNormalization %m{i}, %g{i}
  %x{next} = Add %x{i}, %w{i}\n"
            )
        };
        assert_eq!(words(&stack(&layer)), vec![["norm", "mlp", "norm"]; 3]);
    }

    #[test]
    fn what_chooses_is_experts() {
        let layer = |i: usize| {
            let (next, branch) = (i + 1, mlp(i, &format!("%d{i}"), &format!("%m{i}")));
            format!(
                "  %n{i} = RMSNormalization %x{i}, %g{i}\n  %e{i} = MatMul %n{i}, %wq{i}\n  %l{i} = Softmax %e{i}
  %best{i}, %at{i} = TopK %l{i}, %two\n  %sum{i} = ReduceSum %best{i}, %last {{keepdims=1}}
  %d{i} = Mul %n{i}, %sum{i}\n{branch}  %x{next} = Add %x{i}, %m{i}\n"
            )
        };
        assert_eq!(words(&stack(&layer)), vec![["norm", "experts"]; 3]);
    }
}
