//! `Dropout` (ONNX Dropout-7 to -22), and the warnings about dropouts that an export lost.
//!
//! A dropout in training mode becomes our seeded op; one that is off (`training_mode` absent or false) becomes its
//! operand. Exporters lose dropouts silently. PyTorch's legacy exporter writes those inside
//! `scaled_dot_product_attention` without `training_mode`, the newer one omits them, and its merging of equal nodes gives
//! two modules one mask. Warnings name the nodes where the graph still shows that.

use super::call::{Call, Lowered, Out, UNREAD};
use ckpt_passes::ir::op::OpClass;
use ckpt_passes::ir::{DType, Graph, NodeId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::logic::{GREATER_OR_EQUAL, WHERE};
use ckpt_passes::ops::random::{DROPOUT, UNIFORM};
use ckpt_passes::ops::shape::IDENTITY;
use std::collections::BTreeSet;

/// The default ratio: the share of elements that are dropped.
const RATIO: f32 = 0.5;

/// One dropout of the file, as it was read.
pub struct Dropout {
    /// The node's name in the file.
    pub node: String,
    /// False if its training mode is absent or known to be off: the node then becomes an identity.
    pub active: bool,
}

/// Returns the operand with elements dropped, or itself, and the mask of the elements that stay.
pub fn dropout(call: &mut Call) -> Lowered {
    let x = call.need(0, "data")?;
    let ratio = call.attr_float("ratio", RATIO)?; // It is an attribute before opset 12.
    let given = call.opt(1);
    call.ignore_attr("seed"); // Each step brings its own seed.
    // Until opset 11 there is no training mode, and the node drops nothing.
    let mode = if call.opset >= 12 { call.opt(2) } else { None };
    let known = match mode {
        Some(mode) => call.contents.get(mode).and_then(|c| c.first()?.as_const()),
        None => Some(0),
    };
    call.dropout = Some(known != Some(0));
    if known == Some(0) {
        let y = call.op(&IDENTITY, &[x])?;
        let mask = if call.opset < 12 {
            Out::Absent("what the mask holds is only said since opset 12")
        } else if call.wants(1) {
            let (shape, on) = (call.shape(x)?, call.scalar(DType::Bool, 1.0));
            Out::Value(call.expand(on, shape)?)
        } else {
            Out::Absent(UNREAD)
        };
        return Ok(Some(vec![Out::Value(y), mask]));
    }
    let mut ratio = given.unwrap_or_else(|| call.scalar(DType::F32, f64::from(ratio)));
    if let (None, Some(mode)) = (known, mode) {
        // The mode is known only when the graph runs; a ratio of 0 drops nothing.
        let off = call.scalar_like(ratio, 0.0);
        ratio = call.op(&WHERE, &[mode, ratio, off])?;
    }
    let (seed, stream) = (call.seed()?, call.stream());
    let y = call.op(&DROPOUT, &[x, ratio, seed, stream])?;
    let mask = if call.wants(1) {
        let shape = call.shape(x)?;
        let draw = call.op(&UNIFORM, &[shape, seed, stream])?;
        let ratio = call.cast(ratio, DType::F32)?;
        Out::Value(call.op(&GREATER_OR_EQUAL, &[draw, ratio])?)
    } else {
        Out::Absent(UNREAD)
    };
    Ok(Some(vec![Out::Value(y), mask]))
}

/// Returns warnings about dropouts that the export of a model in training mode lost; none if all dropouts are off.
pub fn lost(graph: &Graph, dropouts: &[Dropout]) -> Vec<String> {
    let active = dropouts.iter().filter(|d| d.active).count();
    let mut warnings = Vec::new();
    if active == 0 {
        return warnings;
    }
    let inert: BTreeSet<&str> = dropouts
        .iter()
        .filter(|d| !d.active)
        .map(|d| d.node.as_str())
        .collect();
    if !inert.is_empty() {
        warnings.push(format!(
            "{} of {} dropouts drop nothing, for they have no training mode: {}; if the model was exported for \
             training, set their third operand to true (PyTorch's legacy exporter forgets it inside attention)",
            inert.len(),
            dropouts.len(),
            list(inert.iter().copied())
        ));
    }
    let nodes: Vec<NodeId> = graph.order().to_vec();
    let merged: Vec<&str> = nodes
        .iter()
        .filter(|id| graph.node(**id).op == &DROPOUT && serves_two_modules(graph, **id))
        .map(|id| graph.node(*id).loc.node.as_str())
        .collect();
    if !merged.is_empty() {
        warnings.push(format!(
            "one dropout serves several modules: {}; where the modules have a dropout each, the exporter merged them, \
             and their masks are no longer independent",
            list(merged.into_iter())
        ));
    }
    let bare: Vec<&str> = nodes
        .iter()
        .filter(|id| graph.node(**id).op.class == OpClass::Softmax && is_bare(graph, **id, &inert))
        .map(|id| graph.node(*id).loc.node.as_str())
        .collect();
    if !bare.is_empty() {
        warnings.push(format!(
            "no dropout between softmax and product in attention: {}; right only if the model has none there \
             (PyTorch's exporter leaves out the dropout of scaled_dot_product_attention)",
            list(bare.into_iter())
        ));
    }
    warnings
}

/// Lists a few names, and says how many more there are.
fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let all: Vec<String> = names.map(|n| format!("`{n}`")).collect();
    match all.len().checked_sub(SHOWN) {
        Some(more) if more > 0 => format!("{} and {more} more", all[..SHOWN].join(", ")),
        _ => all.join(", "),
    }
}

/// Returns true if the dropout has readers both inside and outside the module that holds it. The dropout of one module has
/// only one kind of reader.
fn serves_two_modules(graph: &Graph, id: NodeId) -> bool {
    let scopes = &graph.node(id).loc.scopes;
    let Some((holder, _)) = scopes.len().checked_sub(2).map(|i| &scopes[i]) else {
        return false;
    };
    let uses = graph.value(graph.node(id).outs[0]).uses();
    let inside = |user: NodeId| {
        let scopes = &graph.node(user).loc.scopes;
        scopes.iter().any(|(path, _)| path == holder)
    };
    let known = uses
        .iter()
        .map(|u| u.node)
        .filter(|n| !graph.node(*n).loc.scopes.is_empty());
    let (within, outside): (Vec<NodeId>, Vec<NodeId>) = known.partition(|n| inside(*n));
    !holder.is_empty() && !within.is_empty() && !outside.is_empty()
}

/// Returns true if the result of a softmax reaches a product without a dropout on the way. An inert dropout counts as one,
/// because another warning names it.
fn is_bare(graph: &Graph, softmax: NodeId, inert: &BTreeSet<&str>) -> bool {
    let mut seen = BTreeSet::from([softmax]);
    let mut open = vec![softmax];
    let mut product = false;
    while let Some(id) = open.pop() {
        for user in graph
            .node(id)
            .outs
            .iter()
            .flat_map(|v| graph.value(*v).uses())
        {
            let node = graph.node(user.node);
            match node.op.class {
                _ if node.op == &DROPOUT || inert.contains(node.loc.node.as_str()) => return false,
                OpClass::Product => product = true,
                // Casts, layouts, and the choice between the row and zeros where every key is masked.
                OpClass::Cast | OpClass::Elementwise if seen.insert(user.node) => {
                    open.push(user.node)
                }
                _ if node.op.is_layout() && seen.insert(user.node) => open.push(user.node),
                _ => {}
            }
        }
    }
    product
}
