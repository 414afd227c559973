//! All attentions of a model as a table of figures, for reports and for policies.

use super::Attention;
use super::decomposed::Decomposed;
use super::mask::MaskOperand;
use crate::analysis::matcher::Matcher;
use crate::analysis::residual_stream::Flow;
use crate::error::Result;
use crate::ir::{DType, Dim, Graph, NodeId, SecondaryMap};
use crate::ops::attention;
use serde::{Serialize, Serializer};

/// One attention. A figure that cannot be told is `None`.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionSummary {
    /// Its number among the attentions, in order.
    pub index: usize,
    /// The layer it is in.
    #[serde(rename = "block")]
    pub layer: Option<usize>,
    /// Number of heads.
    #[serde(serialize_with = "size")]
    pub heads: Option<Dim>,
    /// Number of heads of keys and values.
    #[serde(serialize_with = "size")]
    pub kv_heads: Option<Dim>,
    /// Elements of a query of one head.
    #[serde(serialize_with = "size")]
    pub head_size: Option<Dim>,
    /// Most keys that a query sees, where a window is proven.
    pub window: Option<i64>,
    /// No query sees a key behind itself, whatever the data.
    pub causal: bool,
    /// A query sees only keys of its own segment, as documents of a packed sequence.
    pub segments: bool,
    /// What is masked beyond what is proven, by a tensor of queries × keys or one that broadcasts to it: `none`, `bool` or
    /// `additive`.
    pub mask: &'static str,
    /// The scores are `scale · q·kᵀ`.
    pub scale: Option<f64>,
    /// Scores are capped to `softcap · tanh(x / softcap)`; `None` for no cap.
    pub softcap: Option<f64>,
    /// It is one op; in reports `form`: `fused` or `decomposed`.
    #[serde(rename = "form", serialize_with = "form")]
    pub fused: bool,
    /// Why a decomposed attention cannot become one op.
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
    to.serialize_str(AttentionSummary::form(*fused))
}

impl AttentionSummary {
    /// Returns `fused` for one op, else `decomposed`.
    pub fn form(fused: bool) -> &'static str {
        if fused { "fused" } else { "decomposed" }
    }
}

/// Returns the figures of `attentions`, which lie in the layers `layer_of`, in order.
///
/// # Errors
/// See [`Flow::new`].
pub fn summaries(
    graph: &Graph,
    attentions: &[Attention],
    layer_of: &SecondaryMap<NodeId, Option<usize>>,
) -> Result<Vec<AttentionSummary>> {
    let flow = Flow::new(graph)?;
    let mut matcher = Matcher::new(graph, &flow);
    let list = attentions.iter().enumerate();
    Ok(list
        .map(|(index, attention)| AttentionSummary {
            index,
            layer: layer_of[attention.output],
            ..summary(&mut matcher, attention)
        })
        .collect())
}

/// Returns the figures of one attention, without its number and layer.
pub fn summary(matcher: &mut Matcher, attention: &Attention) -> AttentionSummary {
    let unknown = AttentionSummary {
        index: 0,
        layer: None,
        heads: None,
        kv_heads: None,
        head_size: None,
        window: None,
        causal: false,
        segments: false,
        mask: "none",
        scale: None,
        softcap: None,
        fused: attention.scores == attention.output,
        obstacle: None,
    };
    if unknown.fused {
        return fused(matcher.graph, attention.output, unknown);
    }
    match matcher.attention(attention.probabilities) {
        Some(found) => decomposed(unknown, found),
        None => AttentionSummary {
            obstacle: Some("it has a form that is not known".into()),
            ..unknown
        },
    }
}

/// Returns what the attributes and operands of one op say; nothing for ops of other tools.
fn fused(graph: &Graph, id: NodeId, unknown: AttentionSummary) -> AttentionSummary {
    let node = graph.node(id);
    let (Some(q), Some(k)) = (node.operand(0), node.operand(1)) else {
        return unknown;
    };
    if node.op != &attention::ATTENTION {
        return unknown;
    }
    let (q, k) = (&graph.ty(q).dims, &graph.ty(k).dims);
    // Operands without an axis of heads have one head.
    let heads = |dims: &[Dim]| {
        let axis = dims.len().checked_sub(3);
        axis.map_or(Dim::ONE, |i| dims[i].clone())
    };
    let (scale, cap) = (node.attrs.float("scale"), node.attrs.float("softcap"));
    let left = node.attrs.int("window_left");
    let right = node.attrs.int("window_right");
    let causal = node.attrs.int("causal") == 1 || right == 0;
    let right = if causal { 0 } else { right };
    AttentionSummary {
        heads: Some(heads(q)),
        kv_heads: Some(heads(k)),
        head_size: q.last().cloned(),
        window: (left >= 0 && right >= 0).then(|| left.saturating_add(right).saturating_add(1)),
        causal,
        segments: node.operand(attention::SEGMENTS).is_some(),
        mask: match node.operand(3).map(|b| graph.ty(b).dtype) {
            None => "none",
            Some(DType::Bool) => "bool",
            Some(_) => "additive",
        },
        scale: Some(f64::from(scale)),
        softcap: (cap != 0.0).then_some(f64::from(cap)),
        ..unknown
    }
}

fn decomposed(unknown: AttentionSummary, found: Decomposed) -> AttentionSummary {
    let [.., queries, keys] = found.dims.as_slice() else {
        return unknown;
    };
    let proven = &found.mask.proven;
    let is_bias = |o: &MaskOperand| matches!(o, MaskOperand::Bias(_));
    AttentionSummary {
        window: proven.width(),
        causal: proven.is_causal(queries, keys),
        heads: Some(found.heads),
        kv_heads: Some(found.kv_heads),
        head_size: Some(found.head_size),
        segments: found.mask.segments.is_some(),
        mask: match found.mask.operands.as_slice() {
            [] => "none",
            operands if operands.iter().any(is_bias) => "additive",
            _ => "bool",
        },
        // The digits of a float32, the type of the op's attribute.
        scale: Some(f64::from(found.scale as f32)),
        softcap: (found.softcap != 0.0).then(|| f64::from(found.softcap as f32)),
        obstacle: found.obstacle.0.map(String::from),
        ..unknown
    }
}
