//! `Dropout` (ONNX Dropout-7 to -22), and the warnings about dropouts that an export lost.
//!
//! A dropout in training mode is our seeded op; one that is off (`training_mode` absent or false) is the operand
//! itself. Exporters lose dropouts without a word: PyTorch's legacy one writes those inside
//! `scaled_dot_product_attention` without `training_mode`, its newer one leaves them out, and its merging of equal nodes
//! gives two modules one mask. What the graph still shows of that is said, by name.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpClass;
use ckpt_passes::ir::{Attrs, DType, Graph, NodeId};
use ckpt_passes::ops::logic::{GREATER_OR_EQUAL, WHERE};
use ckpt_passes::ops::random::{DROPOUT, UNIFORM};
use ckpt_passes::ops::shape::IDENTITY;
use std::collections::BTreeSet;

/// Share of the elements that a dropout without a ratio drops.
const RATIO: f32 = 0.5;

/// One dropout of the file, as it was read.
pub struct Dropout {
    /// The node's name in the file.
    pub node: String,
    pub active: bool,
}

/// The operand with elements dropped, or itself; the mask, if asked for, tells which elements stay.
pub fn dropout(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "data")?;
    let ratio = call.float("ratio", RATIO)?; // An attribute before opset 12.
    let given = call.opt(1);
    call.ignore("seed"); // Ours comes with every step.
    // Until opset 11 there is no training mode: the node drops nothing.
    let mode = if call.opset >= 12 { call.opt(2) } else { None };
    let known = match mode {
        Some(mode) => call
            .b
            .contents
            .get(mode)
            .and_then(|c| c.first()?.as_const()),
        None => Some(0),
    };
    call.dropout = Some(known != Some(0));
    if known == Some(0) {
        let y = call.b.emit(&IDENTITY, &[x], Attrs::new())?;
        let mask = if call.opset < 12 {
            Out::Absent("what the mask holds is only said since opset 12")
        } else if call.wants(1) {
            let (shape, on) = (call.b.shape(x)?, call.b.scalar(DType::Bool, 1.0));
            Out::Value(call.expand(on, shape)?)
        } else {
            Out::Absent("nobody asked for the mask")
        };
        return Ok(Some(vec![Out::Value(y), mask]));
    }
    let mut ratio = given.unwrap_or_else(|| call.b.scalar(DType::F32, f64::from(ratio)));
    if let (None, Some(mode)) = (known, mode) {
        // Where the mode is only known when the graph runs: a ratio of 0 drops nothing.
        let off = call.b.scalar(call.dtype(ratio), 0.0);
        ratio = call.b.emit(&WHERE, &[mode, ratio, off], Attrs::new())?;
    }
    let (seed, stream) = (call.seed()?, call.stream());
    let y = call
        .b
        .emit(&DROPOUT, &[x, ratio, seed, stream], Attrs::new())?;
    let mask = if call.wants(1) {
        let shape = call.b.shape(x)?;
        let draw = call
            .b
            .emit(&UNIFORM, &[shape, seed, stream], Attrs::new())?;
        let ratio = call.b.cast(ratio, DType::F32)?;
        Out::Value(
            call.b
                .emit(&GREATER_OR_EQUAL, &[draw, ratio], Attrs::new())?,
        )
    } else {
        Out::Absent("nobody asked for the mask")
    };
    Ok(Some(vec![Out::Value(y), mask]))
}

/// What the export of a model in training mode lost; nothing for a model whose dropouts are all off.
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

/// A few names, and how many more.
fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let all: Vec<String> = names.map(|n| format!("`{n}`")).collect();
    match all.len().checked_sub(SHOWN) {
        Some(more) if more > 0 => format!("{} and {more} more", all[..SHOWN].join(", ")),
        _ => all.join(", "),
    }
}

/// Whether some reader lies in the module that holds the dropout, and another outside of it: a module's own dropout is
/// read by one or the other.
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

/// Whether what a softmax gives reaches a product without a dropout on the way, an inert one (named elsewhere) included.
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
