//! The parts of a layer: norm, attention, norm, MLP, from structure.
//!
//! Between two values of the residual stream lies one branch of a layer. What happens there before any weight is
//! multiplied is the norm in front of it, and a norm after the last product is one behind it; the rest is an attention, an
//! MLP, experts or a convolution, whichever it contains. A branch that holds an attention and a separate MLP side by
//! side (parallel residuals) is both. A stretch of the stream without weights is a norm of its own (post-norm layers).
//! The sum that closes a branch belongs to it. Names and scopes only label what was found.

use super::attention::Part as Role;
use super::layers::{Layers, scope};
use super::residual_stream::Flow;
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// One part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Submodule {
    pub block: usize,
    pub kind: Part,
    /// Module path and class that most of it comes from, where the file has scopes.
    pub path: Option<String>,
    pub class: Option<String>,
    /// In order.
    pub nodes: Vec<NodeId>,
}

/// What a part of a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Norm,
    Attention,
    Mlp,
    Experts,
    Convolution,
    Other,
}

impl Part {
    pub fn word(self) -> &'static str {
        match self {
            Part::Norm => "norm",
            Part::Attention => "attention",
            Part::Mlp => "mlp",
            Part::Experts => "experts",
            Part::Convolution => "conv",
            Part::Other => "other",
        }
    }
}

/// All parts of all layers, in order.
#[derive(Clone, Debug)]
pub struct Submodules {
    pub list: Vec<Submodule>,
    pub of: SecondaryMap<NodeId, Option<usize>>,
}

/// Where in its branch a node lies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Before,
    Core,
    After,
}

impl Submodules {
    /// # Errors
    /// See [`Flow::new`].
    pub fn new(graph: &Graph, blocks: &Layers) -> Result<Submodules> {
        let flow = Flow::new(graph)?;
        let mut found = Submodules {
            list: Vec::new(),
            of: SecondaryMap::new(graph.node_bound(), None),
        };
        let search = Search::new(graph, &flow, blocks);
        for block in &blocks.list {
            let mut branches: Vec<Vec<NodeId>> = Vec::new();
            let mut nodes = block.nodes.clone();
            nodes.sort_by_key(|n| (blocks.segment[*n], flow.position[*n]));
            for branch in nodes.chunk_by(|a, b| blocks.segment[*a] == blocks.segment[*b]) {
                branches.push(branch.to_vec());
            }
            let mut parts: Vec<(Part, Vec<NodeId>)> = Vec::new();
            let mut plain = false;
            for branch in branches {
                let anchored = branch.iter().any(|n| search.is_anchor[*n]);
                let new = if anchored {
                    search.split(&branch)
                } else {
                    vec![(Part::Other, branch)]
                };
                for (part, nodes) in new {
                    match parts.last_mut() {
                        // Steps along the stream without a weight belong together.
                        Some(last) if plain && !anchored => last.1.extend(nodes),
                        _ => parts.push((part, nodes)),
                    }
                }
                plain = !anchored;
            }
            for (mut part, mut nodes) in parts {
                if part == Part::Other && search.normalises(&nodes) {
                    part = Part::Norm;
                }
                nodes.sort_by_key(|n| flow.position[*n]);
                for id in &nodes {
                    found.of[*id] = Some(found.list.len());
                }
                let (path, class) = scope(graph, &nodes).unzip();
                found.list.push(Submodule {
                    block: block.index,
                    kind: part,
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
    blocks: &'a Layers,
    /// Products with a weight, convolutions, and products of what the layer works out (attentions, chosen experts).
    is_anchor: SecondaryMap<NodeId, bool>,
    /// Products with a weight and convolutions alone.
    is_weighted: SecondaryMap<NodeId, bool>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, flow: &'a Flow, blocks: &'a Layers) -> Search<'a> {
        let mut is_weighted = SecondaryMap::new(graph.node_bound(), false);
        let mut is_anchor = SecondaryMap::new(graph.node_bound(), false);
        for id in &flow.nodes {
            is_weighted[*id] = match graph.node(*id).op.class {
                OpClass::BiasedProduct | OpClass::Convolution => true,
                _ => blocks.plain_matmul[*id],
            };
            let product =
                graph.node(*id).op.class == OpClass::Product && flow.is_active(graph, *id);
            is_anchor[*id] = is_weighted[*id] || product || blocks.part[*id].is_some();
        }
        Search {
            graph,
            flow,
            blocks,
            is_anchor,
            is_weighted,
        }
    }

    /// Whether there is a norm among some nodes: one op, or a sum or mean with a power or root.
    fn normalises(&self, nodes: &[NodeId]) -> bool {
        let has = |what: OpClass| {
            let mut nodes = nodes
                .iter()
                .filter(|n| self.flow.is_active(self.graph, **n));
            nodes.any(|n| self.graph.node(*n).op.class == what)
        };
        has(OpClass::Norm) || has(OpClass::SumReduction) && has(OpClass::Power)
    }

    fn operands(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let ins = self.graph.node(id).ins.iter().flatten();
        ins.filter_map(|v: &ValueId| self.graph.def_node(*v))
    }

    /// The parts of one branch that multiplies by weights.
    fn split(&self, branch: &[NodeId]) -> Vec<(Part, Vec<NodeId>)> {
        let place = self.places(branch);
        let before = pick(branch, &place, Where::Before);
        let core = pick(branch, &place, Where::Core);
        let after = pick(branch, &place, Where::After);
        let mut parts = Vec::new();
        let mut cores = self.cores(&core);
        if self.normalises(&before) {
            parts.push((Part::Norm, before));
        } else if let Some(first) = cores.first_mut() {
            first.1.extend(before);
        }
        if self.normalises(&after) {
            parts.extend(cores);
            parts.push((Part::Norm, after));
        } else {
            if let Some(last) = cores.last_mut() {
                last.1.extend(after);
            }
            parts.extend(cores);
        }
        parts
    }

    /// For each node of a branch: before every anchor, behind the last, or between.
    fn places(&self, branch: &[NodeId]) -> Vec<Where> {
        let index: FxHashMap<NodeId, usize> =
            branch.iter().enumerate().map(|(i, n)| (*n, i)).collect();
        let mut below = vec![false; branch.len()];
        for (i, id) in branch.iter().enumerate() {
            let fed = |n: NodeId| index.get(&n).is_some_and(|j| below[*j]);
            below[i] = self.is_anchor[*id] || self.operands(*id).any(fed);
        }
        let mut above = vec![false; branch.len()];
        for (i, id) in branch.iter().enumerate().rev() {
            if self.is_anchor[*id] || above[i] {
                above[i] = true;
                for n in self.operands(*id) {
                    if let Some(j) = index.get(&n) {
                        above[*j] = true;
                    }
                }
            }
        }
        let side = |i: usize| match (below[i], above[i]) {
            // Masks and positions that are worked out inside a layer are part of what reads them.
            (false, true) if self.flow.is_active(self.graph, branch[i]) => Where::Before,
            (true, false) => Where::After,
            _ => Where::Core,
        };
        (0..branch.len()).map(side).collect()
    }

    /// What lies between the first and the last product: one part, or an attention and what stands beside it.
    fn cores(&self, core: &[NodeId]) -> Vec<(Part, Vec<NodeId>)> {
        let inside: BTreeSet<NodeId> = core.iter().copied().collect();
        let ends = |n: &NodeId| matches!(self.blocks.part[*n], Some(Role::Output | Role::Fused));
        let mut down: Vec<NodeId> = core.iter().copied().filter(ends).collect();
        if down.is_empty() {
            return vec![(self.name(core), core.to_vec())];
        }
        // What feeds an attention, and what it feeds down to the next product with a weight.
        let mut up = Vec::new();
        let mut mine = BTreeSet::new();
        while let Some(id) = down.pop() {
            if mine.insert(id) {
                up.extend(self.operands(id));
                let fed = self.flow.readers(self.graph, id);
                down.extend(fed.filter(|r| !self.is_weighted[id] && inside.contains(r)));
            }
        }
        while let Some(id) = up.pop() {
            if inside.contains(&id) && mine.insert(id) {
                up.extend(self.operands(id));
            }
        }
        let (attention, rest): (Vec<NodeId>, Vec<NodeId>) =
            core.iter().partition(|n| mine.contains(n));
        if rest.iter().any(|n| self.is_weighted[*n]) {
            let part = self.name(&rest);
            return vec![(Part::Attention, attention), (part, rest)];
        }
        vec![(Part::Attention, core.to_vec())]
    }

    fn name(&self, nodes: &[NodeId]) -> Part {
        let has = |what: OpClass| nodes.iter().any(|n| self.graph.node(*n).op.class == what);
        if has(OpClass::Selection) {
            Part::Experts
        } else if has(OpClass::Convolution) {
            Part::Convolution
        } else if nodes.iter().any(|n| self.is_weighted[*n]) {
            Part::Mlp
        } else {
            Part::Other
        }
    }
}

fn pick(branch: &[NodeId], place: &[Where], wanted: Where) -> Vec<NodeId> {
    let pairs = branch.iter().zip(place).filter(|(_, p)| **p == wanted);
    pairs.map(|(n, _)| *n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Style, transformer};
    use crate::text;
    use crate::transform::infer::infer;

    fn words(graph: &Graph) -> Vec<Vec<&'static str>> {
        let blocks = Layers::new(graph).unwrap();
        let parts = Submodules::new(graph, &blocks).unwrap();
        for id in graph.order().iter().copied() {
            let part = parts.of[id];
            // Every node of a layer is in exactly one part, which lies in that layer.
            assert_eq!(part.map(|p| parts.list[p].block), blocks.of[id]);
        }
        let of = |block: usize| parts.list.iter().filter(move |p| p.block == block);
        (0..blocks.list.len())
            .map(|b| of(b).map(|p| p.kind.word()).collect())
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
