//! All attentions of a model as a table of properties.

use super::Attention;
use super::form::Form;
use super::mask::Part;
use crate::analysis::layers::Layers;
use crate::analysis::matcher::Reading;
use crate::analysis::residual_stream::Flow;
use crate::error::Result;
use crate::ir::{DType, Dim, Graph, NodeId};
use crate::ops::attention;
use serde::{Serialize, Serializer};

/// One attention; unknown properties are `None`.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub index: usize,
    /// The layer it is in.
    pub block: Option<usize>,
    #[serde(serialize_with = "size")]
    pub heads: Option<Dim>,
    #[serde(serialize_with = "size")]
    pub kv_heads: Option<Dim>,
    #[serde(serialize_with = "size")]
    pub head_size: Option<Dim>,
    /// The most keys that a query sees, its own included, where a sliding window is proven.
    pub window: Option<i64>,
    /// True if it is proven that no query sees a later key.
    pub causal: bool,
    /// The mask beyond that: `none`, `bool` or `additive`.
    pub mask: &'static str,
    /// The scores are `scale · q·kᵀ`.
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    /// True for one op; in reports `form`: `fused` or `decomposed`.
    #[serde(rename = "form", serialize_with = "form")]
    pub fused: bool,
    /// Why a decomposed attention cannot become one op; `None` where it can.
    pub obstacle: Option<String>,
}

/// Serializes a size as a number, or as an expression over names.
fn size<S: Serializer>(size: &Option<Dim>, to: S) -> std::result::Result<S::Ok, S::Error> {
    match size.as_ref().map(|d| (d.as_const(), d)) {
        None => to.serialize_none(),
        Some((Some(n), _)) => to.serialize_i64(n),
        Some((None, named)) => to.collect_str(named),
    }
}

fn form<S: Serializer>(fused: &bool, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(Row::form(*fused))
}

impl Row {
    /// Returns `fused` for one op, else `decomposed`.
    pub fn form(fused: bool) -> &'static str {
        if fused { "fused" } else { "decomposed" }
    }
}

/// The attentions of the forward part, in order.
///
/// # Errors
/// See [`Flow::new`].
pub fn rows(graph: &Graph, blocks: &Layers) -> Result<Vec<Row>> {
    let flow = Flow::new(graph)?;
    let mut reading = Reading::new(graph, &flow);
    let list = blocks.attentions.iter().enumerate();
    Ok(list
        .map(|(index, attention)| Row {
            index,
            block: blocks.of[attention.output],
            ..row(graph, &mut reading, attention)
        })
        .collect())
}

/// One of them, by itself: without its number and layer.
pub fn row(graph: &Graph, reading: &mut Reading, attention: &Attention) -> Row {
    let unknown = Row {
        index: 0,
        block: None,
        heads: None,
        kv_heads: None,
        head_size: None,
        window: None,
        causal: false,
        mask: "none",
        scale: None,
        softcap: None,
        fused: attention.scores == attention.output,
        obstacle: None,
    };
    if unknown.fused {
        return fused(graph, attention.output, unknown);
    }
    match reading.attention(attention.probabilities) {
        Some(form) => decomposed(unknown, form),
        None => Row {
            obstacle: Some("it has a form that is not known".into()),
            ..unknown
        },
    }
}

/// What the attributes and operands of one op say; all is unknown of a foreign one.
fn fused(graph: &Graph, id: NodeId, unknown: Row) -> Row {
    let node = graph.node(id);
    let (Some(Some(q)), Some(Some(k))) = (node.ins.first(), node.ins.get(1)) else {
        return unknown;
    };
    if node.op != &attention::ATTENTION {
        return unknown;
    }
    let (q, k) = (&graph.ty(*q).dims, &graph.ty(*k).dims);
    let bias = node.ins.get(3).copied().flatten();
    // Without an axis of heads there is one.
    let heads = |dims: &[Dim]| {
        dims.len()
            .checked_sub(3)
            .map_or(Dim::ONE, |i| dims[i].clone())
    };
    let (scale, cap) = (node.attrs.float("scale"), node.attrs.float("softcap"));
    let causal = node.attrs.int("causal") == 1 || node.attrs.int("window_right") == 0;
    let (left, right) = (
        node.attrs.int("window_left"),
        node.attrs.int("window_right"),
    );
    let right = if causal { 0 } else { right };
    Row {
        heads: Some(heads(q)),
        kv_heads: Some(heads(k)),
        head_size: q.last().cloned(),
        window: (left >= 0 && right >= 0).then(|| left.saturating_add(right).saturating_add(1)),
        causal,
        mask: match bias.map(|b| graph.ty(b).dtype) {
            None => "none",
            Some(DType::Bool) => "bool",
            Some(_) => "additive",
        },
        scale: Some(f64::from(scale)),
        softcap: (cap != 0.0).then_some(f64::from(cap)),
        ..unknown
    }
}

fn decomposed(unknown: Row, form: Form) -> Row {
    let [.., queries, keys] = form.dims.as_slice() else {
        return unknown;
    };
    let proven = &form.mask.proven;
    let is_bias = |p: &Part| !matches!(p, Part::Keep { .. });
    Row {
        heads: Some(form.heads),
        kv_heads: Some(form.kv_heads),
        head_size: Some(form.head_size),
        window: proven.width(),
        causal: proven.is_causal(queries, keys),
        mask: match form.mask.parts.as_slice() {
            [] => "none",
            parts if parts.iter().any(is_bias) => "additive",
            _ => "bool",
        },
        // As many digits as the file's own float32 has.
        scale: Some(f64::from(form.scale as f32)),
        softcap: (form.softcap != 0.0).then(|| f64::from(form.softcap as f32)),
        obstacle: form.obstacle,
        ..unknown
    }
}
