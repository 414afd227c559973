//! A graph at known sizes, ready to be planned: the problem, what its ops are, and the way back to the graph.

use super::problem::{Correspondence, Problem};
use super::sub_blocks::word;
use crate::analysis::attention;
use crate::analysis::cores::cores;
use crate::analysis::gradients;
use crate::analysis::sub_blocks::SubBlocks;
use crate::analysis::{Binding, Device, Layers, MemoryProfile, Sizes};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::batch_axes::compared_scores;
use serde::{Deserialize, Serialize};

/// What an op is, as far as policies care.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// A product of an activation with a weight.
    PlainProduct,
    /// The same with a bias added in one op.
    BiasedProduct,
    /// The softmax of a decomposed attention.
    Probabilities,
    FusedAttention,
    Convolution,
    /// Picks elements by size (TopK).
    Choice,
    MaxReduction,
    Other,
}

/// Layers and parts, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OpAnnotations {
    /// How many layers there are.
    pub blocks: usize,
    pub block_of: Vec<Option<usize>>,
    pub part_of: Vec<Part>,
    /// What parts of layers are called: `norm`, `attention`, `mlp`, …
    pub submodules: Vec<String>,
    pub submodule_of: Vec<Option<usize>>,
    /// What inner part an op belongs to: `core-attn`, `mlp-act`, `moe-act`.
    pub core_of: Vec<Option<String>>,
    /// Whether a trained parameter flows into the op, directly or through others.
    pub trained: Vec<bool>,
    /// Whether the op makes the residual stream that a layer reads.
    pub opens_layer: Vec<bool>,
    /// Whether the op makes what scores of classes are computed from.
    pub feeds_scores: Vec<bool>,
}

impl OpAnnotations {
    /// Nothing known of any op: a bare cost graph.
    pub fn unknown(ops: usize) -> OpAnnotations {
        OpAnnotations {
            blocks: 0,
            block_of: vec![None; ops],
            part_of: vec![Part::Other; ops],
            submodules: Vec::new(),
            submodule_of: vec![None; ops],
            core_of: vec![None; ops],
            trained: vec![true; ops],
            opens_layer: vec![false; ops],
            feeds_scores: vec![false; ops],
        }
    }
}

/// Everything a policy or solver needs to plan a graph, and what applies its plan.
pub struct PlanInput {
    pub sizes: Sizes,
    pub memory: MemoryProfile,
    pub blocks: Layers,
    pub submodules: SubBlocks,
    pub problem: Problem,
    pub map: Correspondence,
    pub structure: OpAnnotations,
    pub device: Device,
}

impl PlanInput {
    /// # Errors
    /// A size without a number; a graph that has copies.
    pub fn new(graph: &Graph, binding: &Binding, device: &Device) -> Result<PlanInput> {
        let sizes = Sizes::new(graph, binding)?;
        let memory = MemoryProfile::rounded(graph, &sizes, device.granularity_bytes)?;
        let blocks = Layers::new(graph)?;
        let (problem, map) = Problem::of_graph(graph, &sizes, &memory, device)?;
        let submodules = SubBlocks::new(graph, &blocks)?;
        let cores = cores(graph, &blocks, &submodules)?;
        let core = |n: &NodeId| cores[*n].map(|c| word(c).to_string());
        let trained = trained(graph);
        let streams = blocks.list.iter().filter_map(|b| b.inputs.first());
        let opens_layer = makers(graph, streams.copied());
        let scores = graph
            .order()
            .iter()
            .map(|n| compared_scores(graph.node(*n)));
        let heads = scores.flatten().filter_map(|scores| head(graph, scores));
        let operands = heads.flat_map(|n| graph.node(n).ins.iter().flatten().copied());
        let feeds_scores = makers(graph, operands);
        let words = submodules.list.iter().map(|s| s.kind.word().to_string());
        let structure = OpAnnotations {
            blocks: blocks.list.len(),
            submodules: words.collect(),
            submodule_of: map.nodes.iter().map(|n| submodules.of[*n]).collect(),
            core_of: map.nodes.iter().map(core).collect(),
            trained: map.nodes.iter().map(|n| trained[*n]).collect(),
            opens_layer: map.nodes.iter().map(|n| opens_layer[*n]).collect(),
            feeds_scores: map.nodes.iter().map(|n| feeds_scores[*n]).collect(),
            block_of: map.nodes.iter().map(|n| blocks.of[*n]).collect(),
            part_of: map.nodes.iter().map(|n| part(graph, &blocks, *n)).collect(),
        };
        Ok(PlanInput {
            sizes,
            memory,
            blocks,
            submodules,
            problem,
            map,
            structure,
            device: device.clone(),
        })
    }
}

/// The product that scores of classes come from, looking back through what only reshapes, casts, scales or caps them.
fn head(graph: &Graph, mut scores: ValueId) -> Option<NodeId> {
    loop {
        let id = graph.def_node(scores)?;
        let node = graph.node(id);
        match node.op.class {
            OpClass::Product | OpClass::BiasedProduct => return Some(id),
            OpClass::Cast | OpClass::Elementwise => {}
            _ if node.op.is_layout() => {}
            _ => return None,
        }
        let computed = |v: &&ValueId| graph.def_node(**v).is_some();
        scores = *node.ins.iter().flatten().find(computed)?;
    }
}

/// The nodes that make the storages of some values, looking through changes of layout.
fn makers(graph: &Graph, values: impl Iterator<Item = ValueId>) -> SecondaryMap<NodeId, bool> {
    let mut makers = SecondaryMap::new(graph.node_bound(), false);
    for mut value in values {
        while let Some(node) = graph.def_node(value) {
            match graph.node(node).ins.first() {
                Some(Some(operand)) if graph.node(node).op.is_layout() => value = *operand,
                _ => {
                    makers[node] = true;
                    break;
                }
            }
        }
    }
    makers
}

/// The nodes that a trained parameter flows into. A parameter is trained if its gradient leaves the graph or
/// updates it; where no gradient has the name of one, all of them are taken for trained.
fn trained(graph: &Graph) -> SecondaryMap<NodeId, bool> {
    let sources = gradients::trained(graph);
    let mut flows = SecondaryMap::new(graph.value_bound(), false);
    for (id, _) in graph.inits() {
        flows[id] = sources.is_empty();
    }
    for id in sources.keys() {
        flows[*id] = true;
    }
    let mut trained = SecondaryMap::new(graph.node_bound(), false);
    for id in graph.order() {
        let node = graph.node(*id);
        trained[*id] = node.ins.iter().flatten().any(|v| flows[*v]);
        for out in &node.outs {
            flows[*out] = trained[*id];
        }
    }
    trained
}

fn part(graph: &Graph, blocks: &Layers, node: NodeId) -> Part {
    match (blocks.role[node], graph.node(node).op.class) {
        (Some(attention::AttentionRole::Probabilities), _) => Part::Probabilities,
        (_, OpClass::Attention) => Part::FusedAttention,
        _ if blocks.plain_matmul[node] => Part::PlainProduct,
        (_, OpClass::BiasedProduct) => Part::BiasedProduct,
        (_, OpClass::Convolution) => Part::Convolution,
        (_, OpClass::Selection) => Part::Choice,
        (_, OpClass::MaxReduction) => Part::MaxReduction,
        _ => Part::Other,
    }
}
