//! Foreign ops that are no rows of the table, as the standard nodes they stand for.
//!
//! One file per family; [`RECIPES`] maps (domain, op type) to the function that emits the nodes. They are named
//! `<node>/<Op>` and keep the node's origin and metadata. A recipe reads every operand and attribute that was given or
//! refuses the node: what nobody looked at is an error, never ignored. A result that we do not compute is not defined,
//! and whoever reads it is told why.

mod activation;
mod attention;
mod bits;
mod call;
mod conv;
mod dropout;
mod einsum;
mod elementwise;
mod fourier;
mod grouped;
mod index;
mod matmul;
mod norm;
mod pool;
mod quantise;
mod random;
mod range;
mod resize;
mod rotary;
mod standard_attention;
mod statistics;

pub(super) use call::{Call, Out};
pub(super) use dropout::{Dropout, lost};
pub(super) use quantise::Quantised;

use super::import::{Importer, role_of, to_map};
use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, NodeProto};
use super::{names, upgrade};
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Attrs, Builder, Graph, ValueId};
use ckpt_passes::ops::shape::IDENTITY;
use ckpt_passes::{Error, Result};
use std::sync::Arc;

/// Emits the nodes of one foreign node and returns its results, in slot order; `None`: not ours to decompose.
type Recipe = fn(&mut Call) -> Result<Option<Vec<Out>>>;

/// What [`standard`] takes attributes and operands to mean.
const OPSET: i64 = 23;

const ORT: &str = "com.microsoft";

/// (domain, op type, recipe).
const RECIPES: &[(&str, &str, Recipe)] = &[
    ("", "Attention", standard_attention::attention),
    ("", "AveragePool", pool::average),
    ("", "BatchNormalization", statistics::batch),
    ("", "Bernoulli", random::bernoulli),
    ("", "BitShift", bits::shift),
    ("", "CastLike", elementwise::cast_like),
    ("", "Celu", activation::celu),
    ("", "Compress", index::compress),
    ("", "Conv", conv::conv),
    ("", "ConvTranspose", conv::transpose),
    ("", "DFT", fourier::dft),
    ("", "DepthToSpace", statistics::depth_to_space),
    ("", "ConvInteger", quantise::integer_product),
    ("", "DequantizeLinear", quantise::dequantise),
    ("", "Dropout", dropout::dropout),
    ("", "DynamicQuantizeLinear", quantise::dynamic),
    ("", "Einsum", einsum::einsum),
    ("", "EyeLike", elementwise::eye_like),
    ("", "GlobalAveragePool", pool::global_average),
    ("", "GlobalLpPool", pool::global_lp),
    ("", "GlobalMaxPool", pool::global_max),
    ("", "GroupNormalization", statistics::group),
    ("", "Hardmax", elementwise::hardmax),
    ("", "InstanceNormalization", statistics::instance),
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
    ("", "Swish", elementwise::swish),
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

fn recipe(domain: &str, op_type: &str) -> Option<Recipe> {
    RECIPES
        .iter()
        .find(|(d, o, _)| *d == domain && *o == op_type)
        .map(|(.., recipe)| *recipe)
}

impl Importer<'_, '_> {
    /// Reads a foreign node by its recipe. `false`: there is none, or an operand has no type to work with.
    pub(super) fn decompose(
        &mut self,
        node: &NodeProto,
        domain: &str,
        index: usize,
        ins: &[Option<ValueId>],
    ) -> Result<bool> {
        let Some(recipe) = recipe(domain, node.op_type()) else {
            return Ok(false);
        };
        if domain.is_empty() {
            upgrade::refuse_newer(node.op_type(), self.imports[""])?;
        }
        if ins
            .iter()
            .flatten()
            .any(|v| self.graph.value(*v).ty.is_none())
        {
            self.warnings.push(format!(
                "{} \"{}\" is not taken apart: a type of its operands is not known",
                node.op_type(),
                node.name()
            ));
            return Ok(false);
        }
        let first = self.graph.order().len();
        let props = to_map(&node.metadata_props);
        let contents = std::mem::replace(&mut self.contents, Contents::of(&Graph::new("")));
        let mut b = Builder::resume(&mut self.graph, contents);
        b.loc = Arc::new(names::loc(node, &props));
        b.role = role_of(&props);
        b.prefix = if node.name().is_empty() {
            format!("{}_{index}", node.op_type())
        } else {
            node.name().to_string()
        };
        let mut call = Call::new(b, node, ins, self.imports[""], &self.quantised);
        let outs = recipe(&mut call).and_then(|outs| match outs {
            Some(outs) => call.finish(outs),
            None => Ok(None),
        });
        let (dropout, quantised) = (call.dropout, call.quantised);
        self.contents = call.b.contents;
        let Some(outs) = outs? else {
            return Ok(false);
        };
        if let Some(active) = dropout {
            self.dropouts.push(Dropout {
                node: node.name().to_string(),
                active,
            });
        }
        if let (Some(quantised), Some(Out::Value(integers))) = (quantised, outs.first()) {
            self.quantised.insert(*integers, quantised);
        }
        if outs.len() < node.output.len() {
            return Err(Error::model(
                "arity",
                format!("{}: more results than the op has", node.op_type()),
            )
            .expected(format!("at most {}", outs.len()))
            .found(node.output.len().to_string()));
        }
        for (name, out) in node.output.iter().zip(outs) {
            match out {
                _ if name.is_empty() => {}
                Out::Value(id) => {
                    self.claim_name(name)?;
                    self.graph.rename_value(id, name);
                    self.scope.insert(name.clone(), id);
                }
                Out::Absent(why) => {
                    let why = format!("{} of \"{}\": {why}", node.op_type(), node.name());
                    self.absent.insert(name.clone(), why);
                }
            }
        }
        for id in self.graph.order()[first..].to_vec() {
            self.graph.meta_mut(id).clone_from(&props);
        }
        Ok(true)
    }
}

/// An attribute of a standard op that another format's op is defined by.
pub(in crate::frontend) enum Setting<'a> {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
    Text(&'a str),
}

/// Emits a standard op that is no row, as its recipe writes it, and returns its results: for formats whose ops are
/// defined as those of the standard are.
///
/// # Errors
/// What the recipe refuses.
pub(in crate::frontend) fn standard(
    b: &mut Builder,
    op_type: &str,
    settings: &[(&str, Setting)],
    ins: &[Option<ValueId>],
    results: usize,
) -> Result<Vec<ValueId>> {
    let attribute = settings.iter().map(|(name, setting)| {
        let mut attribute = AttributeProto {
            name: Some(name.to_string()),
            ..AttributeProto::default()
        };
        match setting {
            Setting::Int(n) => {
                attribute.set_type(AttributeType::Int);
                attribute.i = Some(*n);
            }
            Setting::Ints(list) => {
                attribute.set_type(AttributeType::Ints);
                attribute.ints.clone_from(list);
            }
            Setting::Float(x) => {
                attribute.set_type(AttributeType::Float);
                attribute.f = Some(*x);
            }
            Setting::Text(text) => {
                attribute.set_type(AttributeType::String);
                attribute.s = Some(text.as_bytes().to_vec());
            }
        }
        attribute
    });
    let node = NodeProto {
        op_type: Some(op_type.into()),
        attribute: attribute.collect(),
        output: (0..results).map(|i| format!("{i}")).collect(),
        ..NodeProto::default()
    };
    let bug = || Error::bug("decompose", format!("{op_type} has no recipe"));
    let recipe = recipe("", op_type).ok_or_else(bug)?;
    let contents = std::mem::replace(&mut b.contents, Contents::of(&Graph::new("")));
    let mut inner = Builder::resume(&mut *b.graph, contents);
    inner.loc = b.loc.clone();
    inner.role = b.role;
    inner.prefix.clone_from(&b.prefix);
    let none = std::collections::BTreeMap::new();
    let mut call = Call::new(inner, &node, ins, OPSET, &none);
    let outs = recipe(&mut call).and_then(|outs| match outs {
        Some(outs) => call.finish(outs),
        None => Err(bug()),
    });
    let contents = std::mem::replace(&mut call.b.contents, Contents::of(&Graph::new("")));
    drop(call);
    b.contents = contents;
    let values: Option<Vec<ValueId>> = outs?
        .ok_or_else(bug)?
        .into_iter()
        .take(results)
        .map(|out| match out {
            Out::Value(v) => Some(v),
            Out::Absent(_) => None,
        })
        .collect();
    values.filter(|v| v.len() == results).ok_or_else(bug)
}

/// Every result that the file names has a node of its own to carry the name.
fn own_results(call: &mut Call, outs: Vec<Out>, first_new: usize) -> Result<Vec<Out>> {
    let mut named: Vec<ValueId> = Vec::new();
    let mut own = Vec::with_capacity(outs.len());
    for (slot, out) in outs.into_iter().enumerate() {
        own.push(match out {
            Out::Value(v) if call.wants(slot) => {
                let emitted = call
                    .b
                    .graph
                    .def_node(v)
                    .is_some_and(|n| call.b.graph.order()[first_new..].contains(&n));
                let v = if emitted && !named.contains(&v) {
                    v
                } else {
                    call.b.emit(&IDENTITY, &[v], Attrs::new())?
                };
                named.push(v);
                Out::Value(v)
            }
            other => other,
        });
    }
    Ok(own)
}
