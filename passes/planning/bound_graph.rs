//! A graph at known sizes: its planning input, and the way back to the graph.

use super::overrides::PolicyOverrides;
use super::problem::GraphProblem;
use super::resolve;
use super::shared_values::keep_slices;
use crate::analysis::attention;
use crate::analysis::cores::cores;
use crate::analysis::gradients;
use crate::analysis::sdpa::choice::memory_on;
use crate::analysis::sub_blocks::SubBlocks;
use crate::analysis::{Binding, Device, Layers, Sizes};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::batch_axes::compared_scores;
use crate::ops::collective::{ALL_GATHER, OWN_PART};
use crate::plan::annotations::{OpAnnotations, OpRole};
use crate::plan::index::{ByOp, ByValue, ValueIdx};
use crate::plan::input::PlanInput;
use crate::plan::times::Times;
use crate::transform::gather::with_own_parameters;
use crate::transform::sequence::Chunked;

/// A graph at known sizes, with what planning it takes and what applies its plan.
pub struct BoundGraph {
    /// The problem that the planner solves, with its annotations and constraints.
    pub input: PlanInput,
    /// Shapes and bytes of all values of the graph at the binding.
    pub sizes: Sizes,
    /// The layers of the graph, and the role of each node in them.
    pub layers: Layers,
    /// Sub-blocks of `layers`, and the sub-block of each node.
    pub sub_blocks: SubBlocks,
    /// The node of each op of the problem.
    pub nodes: ByOp<NodeId>,
    /// The graph's value of each value of the problem.
    pub values: ByValue<ValueId>,
    index_of: SecondaryMap<ValueId, Option<ValueIdx>>,
    /// The device whose cost model and memory the input uses.
    pub device: Device,
    /// Warnings: ops that the measured times do not know, overrides that do not reach nodes inside fused ops.
    pub warnings: Vec<String>,
}

/// What a graph is planned for.
#[derive(Clone, Copy)]
pub struct PlanningOptions<'a> {
    /// The device whose cost model, usable memory and block size count.
    pub device: &'a Device,
    /// Measured times of nodes, instead of the cost model's.
    pub times: Option<&'a Times>,
    /// The user's choices of layers and ops; they become the constraints of the input.
    pub overrides: &'a PolicyOverrides,
    /// How the sequence was cut; `None` where it is whole.
    pub sequence: Option<&'a Chunked>,
    /// Whether results are moved to the ranks that share the layers.
    pub keeps_slices: bool,
}

impl BoundGraph {
    /// Builds the planning input of a graph at the sizes of `binding`.
    ///
    /// # Errors
    /// A size without a number; a graph that has copies; times of other sizes; overrides that match nothing.
    pub fn new(graph: &Graph, binding: &Binding, options: PlanningOptions) -> Result<BoundGraph> {
        let PlanningOptions {
            device,
            times,
            overrides,
            sequence,
            keeps_slices: keeps,
        } = options;
        let sizes = Sizes::new(graph, binding)?;
        let (memory, _) = memory_on(graph, &sizes, device)?;
        let whole = with_own_parameters(graph);
        let mut layers = Layers::new(&whole)?;
        if sequence.is_some() {
            // Every chunk repeats the layers, so what is found covers some chunks only.
            layers.clear();
        }
        place_gathers(graph, &mut layers);
        let GraphProblem {
            mut problem,
            nodes,
            values,
            index_of,
        } = GraphProblem::new(graph, &sizes, &memory, device)?;
        if keeps {
            keep_slices(&mut problem, (graph, &sizes, &values), device)?;
        }
        let mut warnings = Vec::new();
        if let Some(times) = times {
            times.check_dims(binding.iter())?;
            warnings.extend(times.price(&mut problem)?);
        }
        let sub_blocks = SubBlocks::new(&whole, &layers)?;
        let mut annotations = annotations(&whole, &layers, &sub_blocks, &nodes)?;
        if let Some(sequence) = sequence {
            let places = sequence.layer_chunks(graph);
            annotations.layer_chunk_of = nodes.iter().map(|n| places[*n]).collect();
        }
        let mut bound = BoundGraph {
            input: PlanInput {
                overrides: overrides.to_string(),
                usable_bytes: device.usable_bytes(),
                ..PlanInput::new(problem, annotations)
            },
            sizes,
            layers,
            sub_blocks,
            nodes,
            values,
            index_of,
            device: device.clone(),
            warnings,
        };
        let subject = resolve::Subject {
            graph,
            nodes: &bound.nodes,
            layers: &bound.layers,
            problem: &bound.input.problem,
            annotations: &bound.input.annotations,
        };
        let constraints = resolve::resolve(overrides, &subject)?;
        let missed = resolve::missed(overrides, &subject, &constraints);
        bound.input.constraints = constraints;
        bound.warnings.extend(missed);
        Ok(bound)
    }

    /// Returns the problem's index of a graph value; `None` for a value that is newer than the problem.
    pub fn index(&self, value: ValueId) -> Option<ValueIdx> {
        self.index_of[value]
    }
}

/// Assigns each node that gathers a parameter to the layer that reads the parameter first.
fn place_gathers(graph: &Graph, layers: &mut Layers) {
    let mut later: SecondaryMap<ValueId, Option<usize>> =
        SecondaryMap::new(graph.value_bound(), None);
    for id in graph.order().iter().rev() {
        let node = graph.node(*id);
        if node.op == &ALL_GATHER {
            layers.of[*id] = later[node.outs[0]];
        }
        if let (true, Some(own)) = (node.op == &OWN_PART, node.operand(0)) {
            later[own] = later[node.outs[0]];
            continue;
        }
        for value in node.operands() {
            later[value] = layers.of[*id];
        }
    }
}

/// Returns layers, sub-blocks and roles of nodes.
fn annotations(
    graph: &Graph,
    layers: &Layers,
    sub_blocks: &SubBlocks,
    nodes: &ByOp<NodeId>,
) -> Result<OpAnnotations> {
    let cores = cores(graph, layers, sub_blocks)?;
    let trained = trained(graph);
    let streams = layers.list.iter().filter_map(|b| b.inputs.first());
    let opens_layer = makers(graph, streams.copied());
    let scores = graph.order().iter();
    let scores = scores.filter_map(|n| compared_scores(graph.node(*n)));
    let heads = scores.filter_map(|scores| head(graph, scores));
    let operands = heads.flat_map(|n| graph.node(n).ins.iter().flatten().copied());
    let feeds_scores = makers(graph, operands);
    let words = sub_blocks.list.iter().map(|s| s.kind.word().to_string());
    let core = |n: &NodeId| cores[*n].map(|core| core.word().to_string());
    Ok(OpAnnotations {
        layers: layers.list.len(),
        layer_of: nodes.iter().map(|n| layers.of[*n]).collect(),
        role_of: nodes.iter().map(|n| role(graph, layers, *n)).collect(),
        sub_blocks: words.collect(),
        sub_block_of: nodes.iter().map(|n| sub_blocks.of[*n]).collect(),
        core_of: nodes.iter().map(core).collect(),
        trained: nodes.iter().map(|n| trained[*n]).collect(),
        opens_layer: nodes.iter().map(|n| opens_layer[*n]).collect(),
        feeds_scores: nodes.iter().map(|n| feeds_scores[*n]).collect(),
        layer_chunk_of: nodes.iter().map(|_| None).collect(),
    })
}

/// Returns the product that class scores come from. Looks back through ops that reshape, cast, scale or cap them.
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

/// Returns the nodes that produce the storages of some values. Looks through view ops.
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

/// Returns the nodes that a trained parameter flows into. A parameter is trained if its gradient leaves the graph or
/// updates it; where no gradient has the name of a parameter, all count as trained.
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

fn role(graph: &Graph, layers: &Layers, node: NodeId) -> OpRole {
    match (layers.role[node], graph.node(node).op.class) {
        (Some(attention::AttentionRole::Probabilities), _) => OpRole::Probabilities,
        (_, OpClass::Attention) => OpRole::FusedAttention,
        _ if layers.plain_matmul[node] => OpRole::PlainProduct,
        (_, OpClass::BiasedProduct) => OpRole::BiasedProduct,
        (_, OpClass::Convolution) => OpRole::Convolution,
        (_, OpClass::Selection) => OpRole::TopK,
        (_, OpClass::MaxReduction) => OpRole::MaxReduction,
        _ => OpRole::Other,
    }
}
