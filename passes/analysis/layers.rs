//! The layers of a model, found in its dataflow.
//!
//! The segments between neighbours on the [residual stream](super::residual_stream) are hashed up to isomorphism (ops,
//! attributes, types, weight shapes, wiring; not names, not weight values). The longest repeats of equal segments are the
//! layers: one period is a layer. So a layer begins and ends at a value of the residual stream, and all layers of a repeat
//! are equal. Where a repeat has more than a whole number of periods, layers begin at a value that several nodes read (a
//! residual stream branches where a layer begins), attention first. A second stream (the other half of an encoder-decoder)
//! is searched for among the nodes that the first leaves over. Names and scopes only label what was found.

use super::attention::{Attention, AttentionRole, attentions, weight_of};
use super::repeats::{Segments, nodes_of};
use super::residual_stream::{Flow, Membership, PostDominators, segments};
use super::sharing::{KvSharing, WeightSharing, between_layers, shared, shared_weights};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, NodeId, SecondaryMap, ValueId};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// Most separate residual streams that are searched for.
const MAX_STREAMS: usize = 8;
/// Fewest labelled nodes that read parameters and can place a layer in a module.
const MIN_LABELS: usize = 3;
/// A further chain with fewer new nodes is a side branch, not a residual stream. The first chain leads from the source
/// that is farthest from the exit, and is a stream however short it is.
const MIN_STREAM: usize = 6;

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its number, in model order.
    pub index: usize,
    /// Number of its repeat, in order. Layers of one repeat are equal up to isomorphism.
    pub repeat: usize,
    /// Module class, or else module path pattern, from the file's scopes.
    pub class: Option<String>,
    /// Module path of this layer, from the file's scopes.
    pub path: Option<String>,
    /// Its sub-blocks: `attention+mlp`, `attention+experts`, `conv`, …
    pub kind: String,
    /// Its nodes, in order.
    pub nodes: Vec<NodeId>,
    /// Its first node.
    pub first: NodeId,
    /// The node of the residual stream that closes it.
    pub last: NodeId,
    /// Results of other nodes and graph inputs that it reads: the residual stream first, then masks and the like.
    pub inputs: Vec<ValueId>,
}

/// All layers, and the role of each node in them.
#[derive(Clone, Debug)]
pub struct Layers {
    /// The layers, in order.
    pub list: Vec<Layer>,
    /// The layer of each node.
    pub of: SecondaryMap<NodeId, Option<usize>>,
    /// For a node in a layer, the number of its segment along the stream. The segments of a layer are consecutive.
    pub segment: SecondaryMap<NodeId, u32>,
    /// All attentions of the forward pass, in order.
    pub attentions: Vec<Attention>,
    /// The role of each node in an attention.
    pub role: SecondaryMap<NodeId, Option<AttentionRole>>,
    /// Products of an activation with a weight, with nothing else fused into them.
    pub plain_matmul: SecondaryMap<NodeId, bool>,
    /// Keys and values that pass between layers.
    pub kv_sharing: Vec<KvSharing>,
    /// Parameters that several layers read.
    pub shared_weights: Vec<WeightSharing>,
}

/// A layer before it has a number: its nodes, the node of the residual stream that closes it, and its hash.
type Candidate = (Vec<NodeId>, NodeId, u64);

impl Layers {
    /// Forgets the layers, and what passes between them. What is known of attentions and products stays.
    pub fn clear(&mut self) {
        self.list.clear();
        self.of = SecondaryMap::new(0, None);
        self.kv_sharing.clear();
        self.shared_weights.clear();
    }

    /// Finds the layers in the forward pass of a typed graph.
    ///
    /// # Errors
    /// See [`Flow::new`].
    pub fn new(graph: &Graph) -> Result<Layers> {
        let mut flow = Flow::new(graph)?;
        let (attentions, role) = attentions(graph, &flow);
        let shared = shared(graph, &flow, &attentions);
        let crossings = shared.iter().flat_map(|s| s.crossings.iter().copied());
        flow.crossings = crossings.collect();
        let mut layers = Layers {
            list: Vec::new(),
            of: SecondaryMap::new(graph.node_bound(), None),
            segment: SecondaryMap::new(graph.node_bound(), 0),
            attentions,
            role,
            plain_matmul: SecondaryMap::new(graph.node_bound(), false),
            kv_sharing: Vec::new(),
            shared_weights: Vec::new(),
        };
        for id in &flow.nodes {
            let node = graph.node(*id);
            let is_plain = match node.op.class {
                OpClass::Product => true,
                OpClass::BiasedProduct => node.operand(2).is_none(),
                _ => false,
            };
            let mut operands = node.operands();
            layers.plain_matmul[*id] =
                is_plain && operands.any(|v| weight_of(graph, &flow, v).is_some());
        }
        if let Some(tree) = PostDominators::new(graph, &flow) {
            layers.search(graph, &flow, &tree);
        }
        layers.describe(graph, &flow);
        layers.kv_sharing = between_layers(graph, &flow, &shared, &layers.attentions, &layers.of);
        layers.shared_weights = shared_weights(graph, &flow, &layers.of);
        Ok(layers)
    }

    fn search(&mut self, graph: &Graph, flow: &Flow, tree: &PostDominators) {
        let mut in_layer: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        let mut tried: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        let mut found: Vec<Vec<Candidate>> = Vec::new();
        let mut streams = 0;
        let sources = tree.sources(graph, flow);
        for (source, near) in sources.into_iter().flat_map(|s| [(s, false), (s, true)]) {
            if streams == MAX_STREAMS {
                break;
            }
            let is_used = |n: NodeId| in_layer[n] || !near && tried[n];
            if source.node().is_some_and(is_used) {
                continue;
            }
            // A node that was tried leads to the exit on a way that was tried.
            let is_known = |n: NodeId| in_layer[n] || tried[n];
            let new = tree.chain(graph, flow, (source, near), &is_known);
            if streams > 0 && new.iter().filter_map(|s| s.node()).count() < MIN_STREAM {
                continue;
            }
            let stream = tree.chain(graph, flow, (source, near), &|n| in_layer[n]);
            for id in stream.iter().filter_map(|s| s.node()) {
                tried[id] = true;
            }
            streams += 1;
            let segment_of = segments(graph, flow, &stream);
            let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); stream.len()];
            for id in &flow.nodes {
                if let Membership::In(i) = segment_of[*id] {
                    members[i as usize].push(*id);
                }
            }
            let hashed = Segments::new(graph, flow, &self.attentions, &stream, &members);
            for repeat in hashed.repeats(0..stream.len()) {
                let candidates = repeat.filter_map(|period| {
                    let last = stream[period.end - 1].node()?;
                    Some((members[period.clone()].concat(), last, hashed.hash(period)))
                });
                found.push(candidates.collect());
            }
            for id in found.iter().flatten().flat_map(|(nodes, ..)| nodes) {
                if let (false, Membership::In(i)) = (in_layer[*id], segment_of[*id]) {
                    self.segment[*id] = i;
                }
                in_layer[*id] = true;
            }
        }
        found.sort_by_key(|repeat| flow.position[repeat[0].1]);
        let mut repeats: FxHashMap<(usize, u64), usize> = FxHashMap::default();
        for (i, candidates) in found.into_iter().enumerate() {
            for (mut nodes, last, hash) in candidates {
                let next = repeats.len();
                let repeat = *repeats.entry((i, hash)).or_insert(next);
                nodes.sort_by_key(|id| flow.position[*id]);
                let index = self.list.len();
                for id in &nodes {
                    self.of[*id] = Some(index);
                }
                self.list.push(Layer {
                    index,
                    repeat,
                    class: None,
                    path: None,
                    kind: String::new(),
                    first: nodes[0],
                    nodes,
                    last,
                    inputs: Vec::new(),
                });
            }
        }
    }

    /// Fills in kinds, module paths and inputs.
    fn describe(&mut self, graph: &Graph, flow: &Flow) {
        let kind = |layer| self.kind(graph, flow, layer);
        let kinds: Vec<String> = self.list.iter().map(kind).collect();
        let paths: Vec<Option<(String, Option<String>)>> =
            self.list.iter().map(|l| scope(graph, &l.nodes)).collect();
        let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
        for (path, _) in paths.iter().flatten() {
            *owners.entry(path).or_insert(0) += 1;
        }
        for ((layer, kind), path) in self.list.iter_mut().zip(kinds).zip(&paths) {
            layer.kind = kind;
            // A scope that two layers share belongs to neither.
            if let Some((path, class)) = path.as_ref().filter(|(p, _)| owners[p.as_str()] == 1) {
                layer.path = Some(path.clone());
                layer.class = class.clone();
            }
            let mut seen: FxHashSet<ValueId> = FxHashSet::default();
            let is_inside = |v: ValueId| {
                let maker = graph.def_node(v);
                maker.is_some_and(|n| self.of[n] == Some(layer.index))
            };
            let mut is_input = |v: &ValueId| {
                let is_init = matches!(graph.value(*v).def, Def::Init(_));
                !is_init && !is_inside(*v) && seen.insert(*v)
            };
            let read = layer.nodes.iter().flat_map(|id| graph.node(*id).operands());
            let mut inputs: Vec<ValueId> = read.filter(|v| is_input(v)).collect();
            inputs.sort_by_key(|v| (!flow.active[*v], graph.value(*v).def == Def::Input));
            layer.inputs = inputs;
        }
    }

    /// Returns the sub-blocks of a layer, joined by `+`. Products that feed an attention or read its result belong to it.
    fn kind(&self, graph: &Graph, flow: &Flow, layer: &Layer) -> String {
        let inside = |n: NodeId| self.of[n] == Some(layer.index);
        let kind_of = |n: &NodeId| graph.node(*n).op.class;
        let attentions = self.attentions.iter().copied();
        let attentions: Vec<Attention> = attentions.filter(|a| inside(a.probabilities)).collect();
        let of_attention = nodes_of(graph, flow, &attentions, &inside);
        let has = |what: OpClass| layer.nodes.iter().any(|n| kind_of(n) == what);
        let is_mlp = layer.nodes.iter().any(|n| {
            let is_weighted = self.plain_matmul[*n] || kind_of(n) == OpClass::BiasedProduct;
            is_weighted && !of_attention.contains(n)
        });
        let experts = has(OpClass::Selection);
        let words: Vec<&str> = [
            (!attentions.is_empty(), "attention"),
            (has(OpClass::Convolution), "conv"),
            (experts, "experts"),
            (!experts && is_mlp, "mlp"),
        ]
        .into_iter()
        .filter_map(|(applies, word)| applies.then_some(word))
        .collect();
        match words.is_empty() {
            true => "other".into(),
            false => words.join("+"),
        }
    }
}

/// Returns path and class of the deepest module that holds four fifths of the labelled nodes among these. Only nodes that
/// read weights count, if enough of them are labelled: the number of other nodes depends on the exporter.
pub fn scope(graph: &Graph, nodes: &[NodeId]) -> Option<(String, Option<String>)> {
    let scopes = |id: &NodeId| &graph.node(*id).loc.scopes;
    let reads_weight = |id: &NodeId| {
        let operands = graph.node(*id).operands();
        let mut tensors = operands.filter_map(|v| graph.value(v).tensor());
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
        let named = scopes(id).iter().enumerate();
        for (depth, (path, class)) in named.filter(|(_, (path, _))| !path.is_empty()) {
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
    use crate::testing::{Style, transformer};
    use crate::text;
    use crate::transform::infer::infer;

    fn names<'g>(g: &'g Graph, values: &[ValueId]) -> Vec<&'g str> {
        values.iter().map(|v| g.value(*v).name.as_str()).collect()
    }

    #[test]
    fn layers_of_both_residual_styles() {
        for style in [Style::PreNorm, Style::PostNorm] {
            for n in [2, 3, 7] {
                let g = transformer(n, style);
                let layers = Layers::new(&g).unwrap();
                assert_eq!(layers.list.len(), n);
                assert_eq!(layers.attentions.len(), n);
                for pair in layers.list.windows(2) {
                    assert_eq!(pair[0].nodes.len(), pair[1].nodes.len());
                    // A layer first reads the value that closes the layer before it, then the mask that all share.
                    let closing = g.node(pair[0].last).outs[0];
                    let expected = [&g.value(closing).name, "Neg"];
                    assert_eq!(names(&g, &pair[1].inputs), expected);
                }
                for layer in &layers.list {
                    assert_eq!((layer.kind.as_str(), layer.repeat), ("attention+mlp", 0));
                    let nodes = || layer.nodes.iter();
                    assert_eq!(nodes().filter(|n| layers.plain_matmul[**n]).count(), 7);
                    assert!(nodes().all(|n| layers.of[*n] == Some(layer.index)));
                    // Attention comes first, and the residual reads the stream that it reads.
                    let first = |op: &str| nodes().position(|n| g.node(*n).op.name == op).unwrap();
                    assert!(first("Softmax") < first("Sigmoid"));
                    assert!(g.value(layer.inputs[0]).uses().len() > 1);
                }
            }
        }
    }

    /// Parses `f32[b, 4] -> %y` from its nodes and the shapes of its weights `%w0`, `%w1`, ….
    fn model(weights: &[[u64; 2]], nodes: &str) -> Graph {
        let mut source = "graph @mlp imported (%x0: f32[b, 4]) -> (%y) {\n".to_string();
        for (i, [rows, columns]) in weights.iter().enumerate() {
            source += &format!("  init %w{i} : f32[{rows}, {columns}] = hash \"w{i}\"\n");
        }
        let mut g = text::parse(&format!("{source}{nodes}}}\n")).unwrap();
        infer(&mut g).unwrap();
        g
    }

    #[test]
    fn a_short_stack_after_a_bare_product() {
        // The residual stream has one node for the product and one for each layer.
        for n in [2, 3, 4] {
            let mut nodes = "  %x1 = MatMul %x0, %w0\n".to_string();
            for i in 1..=n {
                let (a, b) = (2 * i - 1, 2 * i);
                nodes += &format!("  %a{i} = Relu %x{i}\n  %b{i} = MatMul %a{i}, %w{a}\n");
                nodes += &format!("  %c{i} = Relu %b{i}\n  %d{i} = MatMul %c{i}, %w{b}\n");
                let out = if i == n {
                    "y".into()
                } else {
                    format!("x{}", i + 1)
                };
                nodes += &format!("  %{out} = Add %x{i}, %d{i}\n");
            }
            let layers = Layers::new(&model(&vec![[4, 4]; 2 * n + 1], &nodes)).unwrap();
            let sizes: Vec<usize> = layers.list.iter().map(|l| l.nodes.len()).collect();
            assert_eq!(sizes, vec![5; n]);
        }
    }

    #[test]
    fn one_layer_is_no_repeat_and_other_weights_are_another_repeat() {
        let one = transformer(1, Style::PreNorm);
        assert_eq!(Layers::new(&one).unwrap().list.len(), 0);
        // Three square layers, then two wider ones.
        let weights = [[4, 4], [4, 4], [4, 4], [4, 6], [6, 6], [6, 6]];
        let layer = |i: usize| {
            let out = if i == 5 {
                "y".into()
            } else {
                format!("x{}", i + 1)
            };
            format!("  %p{i} = MatMul %x{i}, %w{i}\n  %{out} = Relu %p{i}\n")
        };
        let nodes: String = (0..weights.len()).map(layer).collect();
        let layers = Layers::new(&model(&weights, &nodes)).unwrap().list;
        let shape = layers
            .iter()
            .map(|l| (l.repeat, l.nodes.len(), l.kind.as_str()));
        let expected = [0, 0, 0, 1, 1].map(|repeat| (repeat, 2, "mlp"));
        assert_eq!(shape.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_graph_without_anything_to_find() {
        let g = text::parse("graph @g typed (%x: i64[b]) -> (%x) {\n}\n").unwrap();
        assert_eq!(Layers::new(&g).unwrap().list.len(), 0);
    }
}
