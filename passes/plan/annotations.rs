//! What policies know of the ops of a problem beside their costs: layers, sub-blocks and roles.

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

/// Layers, sub-blocks and roles, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpAnnotations {
    /// The number of layers.
    pub layers: usize,
    /// The layer of each op.
    pub layer_of: Vec<Option<usize>>,
    /// The role of each op.
    pub role_of: Vec<OpRole>,
    /// The kind of each sub-block: `norm`, `attention`, `mlp`, …
    pub sub_blocks: Vec<String>,
    /// The sub-block of each op, as an index into `sub_blocks`.
    pub sub_block_of: Vec<Option<usize>>,
    /// The inner sub-block of each op: `core-attn`, `mlp-act` or `moe-act`.
    pub core_of: Vec<Option<String>>,
    /// Whether a trained parameter flows into the op, directly or through others.
    pub trained: Vec<bool>,
    /// Whether the op makes the residual stream that a layer reads.
    pub opens_layer: Vec<bool>,
    /// Whether the op makes an operand of the product that class scores come from.
    pub feeds_scores: Vec<bool>,
}

impl OpAnnotations {
    /// Returns annotations that know nothing of any op, for a bare cost graph. Every op counts as trained.
    pub fn unknown(ops: usize) -> OpAnnotations {
        OpAnnotations {
            layers: 0,
            layer_of: vec![None; ops],
            role_of: vec![OpRole::Other; ops],
            sub_blocks: Vec::new(),
            sub_block_of: vec![None; ops],
            core_of: vec![None; ops],
            trained: vec![true; ops],
            opens_layer: vec![false; ops],
            feeds_scores: vec![false; ops],
        }
    }
}
