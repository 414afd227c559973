//! The layers of a model, found in its dataflow.
//!
//! The segments between neighbours of the [`spine`](super::residual_stream) are hashed up to isomorphism (ops, attributes, types,
//! weight shapes, wiring; not names, not weight values). The longest periodic runs of equal segments are the layers:
//! one period is a block, so a block begins and ends at a value of the residual stream and all blocks of a run are
//! equal. Where a run has more than a whole number of periods, blocks begin at a value that several nodes read (a
//! residual stream branches where a layer begins), attention first. A second spine (the other half of an
//! encoder-decoder) is looked for in what the first leaves over. Names and scopes only label what was found.

use super::attention::{Attention, Part, attentions, weight_of};
use super::repeats::{Stretch, nodes_of};
use super::residual_stream::{Flow, Place, PostDominators, segments};
use super::sharing::{KvSharing, WeightSharing, between_layers, shared, shared_weights};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, NodeId, SecondaryMap, ValueId};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Range;

/// More separate spines than this are not looked for.
const MAX_SPINES: usize = 8;
/// Fewer labelled nodes than this that read parameters do not tell where a layer belongs.
const MIN_LABELS: usize = 3;
/// A further chain with fewer new nodes than this is a side branch, not a spine. The first leads from the source that is
/// farthest from the exit, and is the spine however short it is.
const MIN_SPINE: usize = 6;

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    pub index: usize,
    /// Layers of one run are equal up to isomorphism; runs are numbered in order.
    pub run: usize,
    /// Module class, or else module path pattern, from the file's scopes.
    pub class: Option<String>,
    /// Module path of this block, from the file's scopes.
    pub path: Option<String>,
    /// What it is made of: `attention+mlp`, `attention+experts`, `conv`, …
    pub kind: String,
    /// In order.
    pub nodes: Vec<NodeId>,
    pub first: NodeId,
    /// The spine node that closes it.
    pub last: NodeId,
    /// What it reads of other nodes' results and of graph inputs: the residual stream first, then masks and the like.
    pub inputs: Vec<ValueId>,
}

/// All layers, and what the nodes are in them.
#[derive(Clone, Debug)]
pub struct Layers {
    pub list: Vec<Block>,
    /// The block of each node.
    pub of: SecondaryMap<NodeId, Option<usize>>,
    /// For a node in a block, the number of its segment along the spine; the segments of a block are consecutive.
    pub segment: SecondaryMap<NodeId, u32>,
    pub attentions: Vec<Attention>,
    /// What each node is in an attention.
    pub part: SecondaryMap<NodeId, Option<Part>>,
    /// Products of an activation with a weight and without anything else fused: the "plain" matmuls.
    pub plain_matmul: SecondaryMap<NodeId, bool>,
    /// Keys and values that pass between layers.
    pub kv_sharing: Vec<KvSharing>,
    /// Parameters that several layers read.
    pub shared_weights: Vec<WeightSharing>,
}

impl Layers {
    /// Looks at the forward part of a typed graph.
    ///
    /// # Errors
    /// See [`Flow::new`].
    pub fn new(graph: &Graph) -> Result<Layers> {
        let mut flow = Flow::new(graph)?;
        let (attentions, part) = attentions(graph, &flow);
        let shared = shared(graph, &flow, &attentions);
        flow.crossings = shared
            .iter()
            .flat_map(|s| s.crossings.iter().copied())
            .collect();
        let mut blocks = Layers {
            list: Vec::new(),
            of: SecondaryMap::new(graph.node_bound(), None),
            segment: SecondaryMap::new(graph.node_bound(), 0),
            attentions,
            part,
            plain_matmul: SecondaryMap::new(graph.node_bound(), false),
            kv_sharing: Vec::new(),
            shared_weights: Vec::new(),
        };
        for id in &flow.nodes {
            let node = graph.node(*id);
            let weighs =
                |v: &Option<ValueId>| v.is_some_and(|v| weight_of(graph, &flow, v).is_some());
            let plain = match node.op.class {
                OpClass::Product => true,
                OpClass::BiasedProduct => node.ins.get(2).copied().flatten().is_none(),
                _ => false,
            };
            blocks.plain_matmul[*id] = plain && node.ins.iter().any(weighs);
        }
        if let Some(tree) = PostDominators::new(graph, &flow) {
            blocks.search(graph, &flow, &tree);
        }
        blocks.describe(graph, &flow);
        blocks.kv_sharing = between_layers(graph, &flow, &shared, &blocks.attentions, &blocks.of);
        blocks.shared_weights = shared_weights(graph, &flow, &blocks.of);
        Ok(blocks)
    }

    fn search(&mut self, graph: &Graph, flow: &Flow, tree: &PostDominators) {
        let mut in_block: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        let mut tried: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        // Runs of blocks; a block is its nodes, the spine node that closes it, and its hash.
        let mut found: Vec<Vec<(Vec<NodeId>, NodeId, u64)>> = Vec::new();
        let mut spines = 0;
        let sources = tree.sources(graph, flow);
        for (source, near) in sources.into_iter().flat_map(|s| [(s, false), (s, true)]) {
            if spines == MAX_SPINES {
                break;
            }
            let is_known = |n: NodeId| in_block[n] || tried[n];
            if source
                .node()
                .is_some_and(|n| in_block[n] || !near && tried[n])
            {
                continue;
            }
            // What was tried once leads to the exit on a way that was tried.
            let new = tree.chain(graph, flow, (source, near), &is_known);
            if spines > 0 && new.iter().filter_map(|s| s.node()).count() < MIN_SPINE {
                continue;
            }
            let spine = tree.chain(graph, flow, (source, near), &|n| in_block[n]);
            for id in spine.iter().filter_map(|s| s.node()) {
                tried[id] = true;
            }
            spines += 1;
            let place = segments(graph, flow, &spine);
            let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); spine.len()];
            for id in &flow.nodes {
                if let Place::In(i) = place[*id] {
                    members[i as usize].push(*id);
                }
            }
            let stretch = Stretch::new(graph, flow, &self.attentions, &spine, &members);
            for run in stretch.runs(0..spine.len()) {
                let block = |period: Range<usize>| {
                    let nodes: Vec<NodeId> = period
                        .clone()
                        .flat_map(|s| members[s].iter().copied())
                        .collect();
                    let last = spine[period.end - 1].node()?;
                    Some((nodes, last, stretch.hash(period)))
                };
                found.push(run.filter_map(block).collect());
            }
            for (nodes, ..) in found.iter().flatten() {
                for id in nodes {
                    if let (false, Place::In(i)) = (in_block[*id], place[*id]) {
                        self.segment[*id] = i;
                    }
                    in_block[*id] = true;
                }
            }
        }
        found.sort_by_key(|run| flow.position[run[0].1]);
        let mut runs: FxHashMap<(usize, u64), usize> = FxHashMap::default();
        for (stretch, blocks) in found.into_iter().enumerate() {
            for (mut nodes, last, hash) in blocks {
                let next = runs.len();
                let run = *runs.entry((stretch, hash)).or_insert(next);
                nodes.sort_by_key(|id| flow.position[*id]);
                let index = self.list.len();
                for id in &nodes {
                    self.of[*id] = Some(index);
                }
                let first = nodes[0];
                let (class, path, kind) = (None, None, String::new());
                self.list.push(Block {
                    index,
                    run,
                    class,
                    path,
                    kind,
                    nodes,
                    first,
                    last,
                    inputs: Vec::new(),
                });
            }
        }
    }

    fn describe(&mut self, graph: &Graph, flow: &Flow) {
        let kinds: Vec<String> = self
            .list
            .iter()
            .map(|b| self.kind(graph, flow, b))
            .collect();
        let paths: Vec<Option<(String, Option<String>)>> =
            self.list.iter().map(|b| scope(graph, &b.nodes)).collect();
        let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
        for (path, _) in paths.iter().flatten() {
            *owners.entry(path).or_insert(0) += 1;
        }
        for (i, block) in self.list.iter_mut().enumerate() {
            block.kind = kinds[i].clone();
            // A scope that two blocks share is not a layer's.
            if let Some((path, class)) = paths[i].as_ref().filter(|(p, _)| owners[p.as_str()] == 1)
            {
                block.path = Some(path.clone());
                block.class = class.clone();
            }
            let mut inputs = Vec::new();
            let mut seen: FxHashMap<ValueId, ()> = FxHashMap::default();
            for value in block
                .nodes
                .iter()
                .flat_map(|id| graph.node(*id).ins.iter().flatten())
            {
                let inside = graph
                    .def_node(*value)
                    .is_some_and(|n| self.of[n] == Some(i));
                if !inside
                    && !matches!(graph.value(*value).def, Def::Init(_))
                    && seen.insert(*value, ()).is_none()
                {
                    inputs.push(*value);
                }
            }
            inputs.sort_by_key(|v| (!flow.active[*v], graph.value(*v).def == Def::Input));
            block.inputs = inputs;
        }
    }

    /// What a block is made of; products that feed an attention or take its result are the attention's.
    fn kind(&self, graph: &Graph, flow: &Flow, block: &Block) -> String {
        let inside = |n: NodeId| self.of[n] == Some(block.index);
        let is_weighted =
            |n: NodeId| self.plain_matmul[n] || graph.node(n).op.class == OpClass::BiasedProduct;
        let attentions: Vec<Attention> = self
            .attentions
            .iter()
            .copied()
            .filter(|a| inside(a.probabilities))
            .collect();
        let of_attention = nodes_of(graph, flow, &attentions, &inside);
        let has = |what: OpClass| block.nodes.iter().any(|n| graph.node(*n).op.class == what);
        let mlp = block
            .nodes
            .iter()
            .any(|n| is_weighted(*n) && !of_attention.contains(n));
        let mut parts = Vec::new();
        if !attentions.is_empty() {
            parts.push("attention");
        }
        if has(OpClass::Convolution) {
            parts.push("conv");
        }
        if has(OpClass::Selection) {
            parts.push("experts");
        } else if mlp {
            parts.push("mlp");
        }
        if parts.is_empty() {
            "other".into()
        } else {
            parts.join("+")
        }
    }
}

/// The deepest module that four fifths of the labelled ones of these nodes are in: its path and class. Of nodes that
/// read weights, if enough of them are labelled: how many others a module has depends on the exporter.
pub fn scope(graph: &Graph, nodes: &[NodeId]) -> Option<(String, Option<String>)> {
    let scopes = |id: &NodeId| &graph.node(*id).loc.scopes;
    let reads_weight = |id: &NodeId| {
        let ins = graph.node(*id).ins.iter().flatten();
        let mut tensors = ins.filter_map(|v| graph.value(*v).tensor());
        tensors.any(|t| t.dtype.is_float() && t.elements() > 1)
    };
    let is_labelled = |id: &NodeId| !scopes(id).is_empty();
    let labelled: Vec<NodeId> = nodes.iter().copied().filter(is_labelled).collect();
    let mut counted: Vec<NodeId> = labelled.iter().copied().filter(reads_weight).collect();
    if counted.len() < MIN_LABELS {
        counted = labelled;
    }
    let mut count: BTreeMap<&str, (usize, usize, Option<&String>)> = BTreeMap::new();
    for id in &counted {
        for (depth, (path, class)) in scopes(id)
            .iter()
            .enumerate()
            .filter(|(_, (path, _))| !path.is_empty())
        {
            let entry = count.entry(path).or_insert((0, depth, None));
            entry.0 += 1;
            entry.1 = entry.1.max(depth);
            entry.2 = entry.2.or(class.as_ref());
        }
    }
    let wide = count
        .into_iter()
        .filter(|(_, (n, _, _))| 5 * n >= 4 * counted.len());
    let (path, (_, _, class)) = wide.max_by_key(|(_, (_, depth, _))| *depth)?;
    Some((path.to_string(), class.cloned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Attrs, Builder, DType, Dim, Ty};
    use crate::testing::{Style, transformer};

    fn layers(g: &Graph) -> Vec<Block> {
        Layers::new(g).unwrap().list
    }

    #[test]
    fn layers_of_both_residual_styles() {
        for style in [Style::PreNorm, Style::PostNorm] {
            for n in [2, 3, 7] {
                let g = transformer(n, style);
                let blocks = Layers::new(&g).unwrap();
                assert_eq!(blocks.list.len(), n);
                assert_eq!(blocks.attentions.len(), n);
                for pair in blocks.list.windows(2) {
                    assert_eq!(pair[0].nodes.len(), pair[1].nodes.len());
                    // A layer reads the value that closes the one before it first, then the mask all share.
                    assert_eq!(
                        graph_names(&g, &pair[1].inputs),
                        [closing(&g, &pair[0]), "Neg"]
                    );
                }
                for block in &blocks.list {
                    assert_eq!((block.kind.as_str(), block.run), ("attention+mlp", 0));
                    let plain = block
                        .nodes
                        .iter()
                        .filter(|n| blocks.plain_matmul[**n])
                        .count();
                    assert_eq!(plain, 7);
                    assert!(
                        block
                            .nodes
                            .iter()
                            .all(|n| blocks.of[*n] == Some(block.index))
                    );
                    // Attention comes first, the stream that it reads is read again by the residual.
                    let softmax = block
                        .nodes
                        .iter()
                        .position(|n| g.node(*n).op.name == "Softmax")
                        .unwrap();
                    let sigmoid = block
                        .nodes
                        .iter()
                        .position(|n| g.node(*n).op.name == "Sigmoid")
                        .unwrap();
                    assert!(softmax < sigmoid);
                    assert!(g.value(block.inputs[0]).uses().len() > 1);
                }
            }
        }
    }

    #[test]
    fn a_short_stack_after_a_bare_product() {
        // The spine has one node for the product and one for each layer.
        for n in [2, 3, 4] {
            let mut g = Graph::new("mlp");
            let mut v = g.add_input("x", Some(Ty::new(DType::F32, [Dim::symbol("b"), 4.into()])));
            let product = |g: &mut Graph, v: ValueId| {
                let data = crate::ir::Data::Absent(crate::ir::External {
                    location: "w.bin".into(),
                    offset: 0,
                    length: 64,
                });
                let (dtype, dims) = (DType::F32, vec![4, 4]);
                let w = g.add_init("w", crate::ir::Tensor { dtype, dims, data });
                let mut b = Builder::new(g);
                b.emit(&crate::ops::matmul::MATMUL, &[v, w], Attrs::new())
                    .unwrap()
            };
            v = product(&mut g, v);
            for _ in 0..n {
                let mut inner = v;
                for _ in 0..2 {
                    inner = Builder::new(&mut g)
                        .emit(&crate::ops::activation::RELU, &[inner], Attrs::new())
                        .unwrap();
                    inner = product(&mut g, inner);
                }
                v = Builder::new(&mut g).add(v, inner).unwrap();
            }
            g.set_outputs(vec![v]);
            let blocks = layers(&g);
            let sizes: Vec<usize> = blocks.iter().map(|b| b.nodes.len()).collect();
            assert_eq!(sizes, vec![5; n]);
        }
    }

    fn graph_names<'g>(g: &'g Graph, values: &[ValueId]) -> Vec<&'g str> {
        values.iter().map(|v| g.value(*v).name.as_str()).collect()
    }

    fn closing<'g>(g: &'g Graph, block: &Block) -> &'g str {
        &g.value(g.node(block.last).outs[0]).name
    }

    #[test]
    fn one_layer_is_no_run_and_other_weights_are_another_run() {
        assert_eq!(layers(&transformer(1, Style::PreNorm)).len(), 0);
        // Three square layers, then two wider ones.
        let mut g = Graph::new("mlp");
        let mut v = g.add_input("x", Some(Ty::new(DType::F32, [Dim::symbol("b"), 4.into()])));
        let weight = |g: &mut Graph, dims: [u64; 2]| {
            let data = crate::ir::External {
                location: "w.bin".into(),
                offset: 0,
                length: 4 * dims[0] * dims[1],
            };
            let data = crate::ir::Data::Absent(data);
            g.add_init(
                "w",
                crate::ir::Tensor {
                    dtype: DType::F32,
                    dims: dims.to_vec(),
                    data,
                },
            )
        };
        for dims in [[4, 4], [4, 4], [4, 4], [4, 6], [6, 6], [6, 6]] {
            let w = weight(&mut g, dims);
            let mut b = Builder::new(&mut g);
            v = b
                .emit(&crate::ops::matmul::MATMUL, &[v, w], Attrs::new())
                .unwrap();
            v = b
                .emit(&crate::ops::activation::RELU, &[v], Attrs::new())
                .unwrap();
        }
        g.set_outputs(vec![v]);
        let blocks = layers(&g);
        let shape: Vec<(usize, usize, &str)> = blocks
            .iter()
            .map(|b| (b.run, b.nodes.len(), b.kind.as_str()))
            .collect();
        assert_eq!(
            shape,
            [
                (0, 2, "mlp"),
                (0, 2, "mlp"),
                (0, 2, "mlp"),
                (1, 2, "mlp"),
                (1, 2, "mlp")
            ]
        );
    }

    #[test]
    fn a_graph_without_anything_to_find() {
        let mut g = Graph::new("empty");
        let x = g.add_input("x", Some(Ty::new(DType::I64, [Dim::symbol("b")])));
        g.set_outputs(vec![x]);
        assert_eq!(layers(&g).len(), 0);
    }
}
