//! What policies know of the ops of a problem beside their costs: layers, sub-blocks and roles.

use super::index::ByOp;
use super::problem::Problem;
use std::collections::BTreeSet;

/// The role of an op, as far as policies care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpRole {
    /// A product of an activation with a weight.
    PlainProduct,
    /// A product with a weight and a bias in one op.
    BiasedProduct,
    /// The softmax of a decomposed attention.
    Probabilities,
    /// An attention in one op.
    FusedAttention,
    /// A convolution.
    Convolution,
    /// An op that picks elements by size (TopK).
    TopK,
    /// A max reduction.
    MaxReduction,
    /// Any other op.
    Other,
}

/// What one chunk of the sequence runs of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerChunk {
    /// The chunk, from 0.
    pub chunk: u32,
    /// 0 for what comes before the layers, then a number for each layer, then one for what follows them.
    pub layer: u32,
}

/// Layers, sub-blocks and roles, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpAnnotations {
    /// The number of layers.
    pub layers: usize,
    /// The layer of each op.
    pub layer_of: ByOp<Option<usize>>,
    /// The role of each op.
    pub role_of: ByOp<OpRole>,
    /// The kind of each sub-block: `norm`, `attention`, `mlp`, …
    pub sub_blocks: Vec<String>,
    /// The sub-block of each op, as an index into `sub_blocks`.
    pub sub_block_of: ByOp<Option<usize>>,
    /// The inner sub-block of each op: `core-attn`, `mlp-act` or `moe-act`.
    pub core_of: ByOp<Option<String>>,
    /// Whether a trained parameter flows into the op, directly or through others.
    pub trained: ByOp<bool>,
    /// Whether the op makes the residual stream that a layer reads.
    pub opens_layer: ByOp<bool>,
    /// Whether the op makes an operand of the product that class scores come from.
    pub feeds_scores: ByOp<bool>,
    /// The chunk and layer of each forward op, if the sequence goes through the model in chunks.
    pub layer_chunk_of: ByOp<Option<LayerChunk>>,
}

impl OpAnnotations {
    /// Returns what a cost graph says of its ops: their layers. Every op counts as trained.
    pub fn of_cost_graph(problem: &Problem) -> OpAnnotations {
        let known: BTreeSet<usize> = problem.ops.iter().filter_map(|op| op.layer).collect();
        let known: Vec<usize> = known.into_iter().collect();
        let place = |layer: usize| known.binary_search(&layer).ok();
        let layer_of = problem.ops.iter().map(|op| op.layer.and_then(place));
        OpAnnotations {
            layers: known.len(),
            layer_of: layer_of.collect(),
            ..OpAnnotations::unknown(problem.ops.len())
        }
    }

    /// Returns whether the sequence goes through the model in chunks.
    pub fn has_chunks(&self) -> bool {
        self.layer_chunk_of.iter().any(Option::is_some)
    }

    /// Returns annotations that know nothing of any op. Every op counts as trained.
    pub fn unknown(ops: usize) -> OpAnnotations {
        OpAnnotations {
            layers: 0,
            layer_of: ByOp::filled(None, ops),
            role_of: ByOp::filled(OpRole::Other, ops),
            sub_blocks: Vec::new(),
            sub_block_of: ByOp::filled(None, ops),
            core_of: ByOp::filled(None, ops),
            trained: ByOp::filled(true, ops),
            opens_layer: ByOp::filled(false, ops),
            feeds_scores: ByOp::filled(false, ops),
            layer_chunk_of: ByOp::filled(None, ops),
        }
    }
}
