//! Lowerings that every format shares: ops that are no rows of the table, as the nodes of rows that they stand for.
//!
//! ONNX and PyTorch define many ops alike, so the recipes of ONNX's ops serve both: a reader of ONNX looks a node up with
//! [`recipe`], and any other reader calls [`standard`]. One file holds one family. [`Call`] is the node that a
//! recipe lowers.
//!
//! New nodes are named `<node>/<Op>`. A recipe reads every operand and attribute that was given, or the node is refused:
//! nothing is ignored silently. A result that is not computed stays undefined, and its readers learn the reason.

mod activation;
mod attention;
mod bits;
mod call;
mod conv;
mod dropout;
mod einsum;
mod elementwise;
pub mod fourier;
mod grid_sample;
mod grouped;
mod index;
mod known;
mod matmul;
mod norm;
mod packed;
mod pool;
mod quantise;
mod random;
mod range;
mod recurrent;
mod resize;
mod rotary;
mod sequence;
mod standard_attention;
mod statistics;
mod windows;

pub use call::{Attributes, Call, Lowered, Out, Packed, QuantisedValues};
pub use dropout::{Dropout, lost};
pub use known::number;
pub use statistics::by_channel;
pub use windows::copies;

use crate::onnx::versions::GREATEST_OPSET;
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Attrs, Graph, ValueId};
use ckpt_passes::ops::Builder;
use ckpt_passes::{Error, Result};

/// Emits the nodes of one foreign node.
pub type Recipe = fn(&mut Call) -> Lowered;

const ORT: &str = "com.microsoft";

/// (domain, op type, recipe).
const RECIPES: &[(&str, &str, Recipe)] = &[
    ("", "Attention", standard_attention::attention),
    ("", "AveragePool", pool::average),
    ("", "BatchNormalization", statistics::batch),
    ("", "Bernoulli", random::bernoulli),
    ("", "BitShift", bits::shift),
    ("", "CastLike", elementwise::cast_like),
    ("", "Cast", elementwise::cast),
    ("", "Celu", activation::celu),
    ("", "Col2Im", windows::folded),
    ("", "Compress", index::compress),
    ("", "Conv", conv::conv),
    ("", "ConvTranspose", conv::transpose),
    ("", "DFT", fourier::dft),
    ("", "DepthToSpace", statistics::depth_to_space),
    ("", "ConcatFromSequence", sequence::concat),
    ("", "ConvInteger", quantise::integer_product),
    ("", "DequantizeLinear", quantise::dequantise),
    ("", "Dropout", dropout::dropout),
    ("", "DynamicQuantizeLinear", quantise::dynamic),
    ("", "Einsum", einsum::einsum),
    ("", "EyeLike", elementwise::eye_like),
    ("", "GRU", recurrent::gru),
    ("", "GlobalAveragePool", pool::global_average),
    ("", "GlobalLpPool", pool::global_lp),
    ("", "GlobalMaxPool", pool::global_max),
    ("", "GridSample", grid_sample::grid_sample),
    ("", "GroupNormalization", statistics::group),
    ("", "Hardmax", elementwise::hardmax),
    ("", "InstanceNormalization", statistics::instance),
    ("", "LSTM", recurrent::lstm),
    ("", "LRN", statistics::local_response),
    ("", "LpNormalization", statistics::lp),
    ("", "LpPool", pool::lp),
    ("", "MaxPool", pool::max),
    ("", "MatMulInteger", quantise::integer_product),
    ("", "Mean", elementwise::mean),
    ("", "MeanVarianceNormalization", statistics::mean_variance),
    ("", "Mod", elementwise::modulo),
    ("", "OneHot", index::one_hot),
    ("", "Pad", index::pad),
    ("", "QLinearConv", quantise::integer_product),
    ("", "QLinearMatMul", quantise::integer_product),
    ("", "QuantizeLinear", quantise::quantise),
    ("", "RNN", recurrent::rnn),
    ("", "RandomNormal", random::normal),
    ("", "RandomNormalLike", random::normal),
    ("", "RandomUniform", random::uniform),
    ("", "RandomUniformLike", random::uniform),
    ("", "Range", range::range),
    ("", "ReduceLogSum", statistics::log_sum),
    ("", "Resize", resize::resize),
    ("", "ReverseSequence", index::reverse_sequence),
    ("", "RotaryEmbedding", rotary::standard),
    ("", "Scatter", index::scatter),
    ("", "Selu", activation::selu),
    ("", "Shrink", elementwise::shrink),
    ("", "SimplifiedLayerNormalization", norm::simplified),
    ("", "Softsign", elementwise::softsign),
    ("", "SpaceToDepth", statistics::space_to_depth),
    ("", "SplitToSequence", sequence::split),
    ("", "Swish", activation::swish),
    ("", "TensorScatter", index::tensor_scatter),
    ("", "ThresholdedRelu", elementwise::thresholded_relu),
    ("", "Upsample", resize::upsample),
    (ORT, "Attention", attention::packed),
    (ORT, "BiasGelu", activation::bias_gelu),
    (ORT, "DequantizeLinear", quantise::dequantise),
    (ORT, "DynamicQuantizeMatMul", quantise::integer_product),
    (ORT, "EmbedLayerNormalization", norm::embed),
    (ORT, "FastGelu", activation::fast_gelu),
    (ORT, "FusedMatMul", matmul::fused),
    (ORT, "Gelu", activation::gelu),
    (ORT, "GroupQueryAttention", grouped::grouped_query),
    (ORT, "MatMulIntegerToFloat", quantise::integer_product),
    (ORT, "MatMulNBits", packed::product),
    (ORT, "MultiHeadAttention", attention::multi_head),
    (ORT, "QAttention", quantise::integer_product),
    (ORT, "QGemm", quantise::integer_product),
    (ORT, "QLinearAdd", quantise::integer_product),
    (ORT, "QuantizeLinear", quantise::quantise),
    (ORT, "QuickGelu", activation::quick_gelu),
    (ORT, "RotaryEmbedding", rotary::ort),
    (ORT, "SimplifiedLayerNormalization", norm::simplified),
    (ORT, "SkipLayerNormalization", norm::skip),
    (
        ORT,
        "SkipSimplifiedLayerNormalization",
        norm::skip_simplified,
    ),
];

/// Returns the recipe of an op; the standard domain is the empty one.
pub fn recipe(domain: &str, op_type: &str) -> Option<Recipe> {
    let mut rows = RECIPES.iter();
    rows.find(|(d, o, _)| *d == domain && *o == op_type)
        .map(|(.., recipe)| *recipe)
}

/// Runs a recipe and checks that it read the whole node.
///
/// # Errors
/// What the recipe refuses; an operand or attribute that it did not read.
pub fn run(recipe: Recipe, call: &mut Call) -> Lowered {
    match recipe(call)? {
        Some(outs) => call.finish(outs),
        None => Ok(None),
    }
}

/// Emits a standard op of the table's opset that is no row, and returns its results. Readers use it for ops that their
/// format defines as ONNX does.
///
/// # Errors
/// What the recipe refuses.
pub fn standard(
    b: &mut Builder,
    op_type: &str,
    attrs: &Attrs,
    ins: &[Option<ValueId>],
    results: usize,
) -> Result<Vec<ValueId>> {
    let bug = || Error::bug("lower", format!("{op_type} has no recipe"));
    let recipe = recipe("", op_type).ok_or_else(bug)?;
    let nothing = || Contents::of(&Graph::new(""));
    let mut inner = Builder::resume(b.graph, std::mem::replace(&mut b.contents, nothing()));
    inner.loc = b.loc.clone();
    inner.role = b.role;
    inner.prefix.clone_from(&b.prefix);
    let attributes = attrs
        .iter()
        .map(|(name, value)| (name.to_string(), Some(value.clone())))
        .collect();
    let none = QuantisedValues::default();
    let wanted = vec![true; results];
    let mut call = Call::new(
        inner,
        op_type,
        GREATEST_OPSET,
        attributes,
        ins,
        wanted,
        &none,
    );
    let outs = run(recipe, &mut call);
    b.contents = call.b.contents;
    let values: Vec<ValueId> = outs?
        .ok_or_else(bug)?
        .into_iter()
        .take(results)
        .filter_map(|out| match out {
            Out::Value(v) => Some(v),
            Out::Absent(_) => None,
        })
        .collect();
    match values.len() == results {
        true => Ok(values),
        false => Err(bug()),
    }
}
