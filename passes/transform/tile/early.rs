//! What is done before there is a backward, so that rows stay rows from the head to the loss.
//!
//! In and out: `Typed`. Tokens that a loss leaves out are left out before the head's product instead of after it: a slice
//! of scores is the product of a slice of the activations. And classes that were moved behind the batch for an op that wants
//! them there (`[N, C, …]`) stay last, with all other axes as one. Both save work; neither changes a value but for the
//! rounding of a product with fewer rows.

use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Builder, Dim, Graph, NodeId, Same, SecondaryMap, ValueId};
use crate::ops::batch_axes::{FitCx, Rows, class_scores, fit};
use crate::ops::shape::{RESHAPE, SHAPE, TRANSPOSE};
use crate::ops::slice::SLICE;
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::settle;
use rustc_hash::FxHashMap;

/// Returns what has taken the place of what.
///
/// # Errors
/// See [`infer`].
pub fn settle_rows(graph: &mut Graph) -> Result<FxHashMap<ValueId, ValueId>> {
    let mut instead = FxHashMap::default();
    let contents = infer(graph)?;
    let order = graph.order().to_vec();
    let slices: Vec<(NodeId, Vec<NodeId>)> = order
        .iter()
        .filter_map(|id| Some((*id, between_head_and(graph, &contents, *id)?)))
        .collect();
    let moved: Vec<(NodeId, ValueId)> = order
        .iter()
        .filter_map(|id| Some((*id, classes_moved(graph, *id)?)))
        .collect();
    if slices.is_empty() && moved.is_empty() {
        return Ok(instead);
    }
    let mut b = Builder::resume(graph, contents);
    for (slice, chain) in slices {
        instead.extend([slice_first(&mut b, slice, &chain)?]);
    }
    for (loss, scores) in moved {
        instead.extend([classes_last(&mut b, loss, scores)?]);
    }
    // New nodes go where they are first read.
    let mut done = SecondaryMap::new(graph.node_bound(), false);
    let mut sorted = Vec::with_capacity(graph.order().len());
    for id in order {
        settle(graph, id, &mut done, &mut sorted)?;
    }
    for id in graph.order() {
        settle(graph, *id, &mut done, &mut sorted)?;
    }
    graph.set_order(sorted);
    dce(graph);
    Ok(instead)
}

/// The nodes from a product that is wider than what it reads to the data of a slice along other axes than the last, in
/// that order; `None` where the node is no such slice, or something else reads what lies between.
fn between_head_and(graph: &Graph, contents: &Contents, id: NodeId) -> Option<Vec<NodeId>> {
    let node = graph.node(id);
    if node.op != &SLICE {
        return None;
    }
    let mut v = (*node.ins.first()?)?;
    let rank = graph.ty(v).rank();
    let axes: Vec<i64> = match node.ins.get(3).copied().flatten() {
        Some(axes) => contents
            .get(axes)?
            .iter()
            .map(Dim::as_const)
            .collect::<Option<_>>()?,
        None => (0..graph.ty((*node.ins.get(1)?)?).dims.first()?.as_const()?).collect(),
    };
    let last = rank as i64 - 1;
    if rank < 2 || axes.iter().any(|a| *a == -1 || *a == last) {
        return None;
    }
    let lead = &graph.ty(v).dims[..rank - 1];
    let rows = Dim::product(lead);
    let mut chain = Vec::new();
    loop {
        let id = graph.def_node(v)?;
        let maker = graph.node(id);
        if maker.outs.len() != 1 || graph.value(v).uses().len() != 1 || graph.is_output(v) {
            return None;
        }
        chain.push(id);
        let known = |w: ValueId| (w == v).then_some(Rows::Lead(rank - 1));
        let cx = FitCx {
            graph,
            contents,
            rows: &rows,
            known: &known,
        };
        let found = fit(&cx, id).ok()?;
        let with_rows = maker.ins.iter().zip(&found.ins);
        let with_rows: Vec<ValueId> = with_rows.filter_map(|(w, rows)| rows.and(*w)).collect();
        let [from] = with_rows[..] else {
            return None;
        };
        let dims = &graph.ty(from).dims;
        let alike =
            dims.len() == rank && dims.iter().zip(lead).all(|(a, b)| a.same(b) == Same::Yes);
        if !alike {
            return None;
        }
        if matches!(maker.op.class, OpClass::Product | OpClass::BiasedProduct) {
            let width = |w: ValueId| graph.ty(w).dims.last().and_then(Dim::as_const);
            chain.reverse();
            return (width(v)? > width(from)?).then_some(chain);
        }
        v = from;
    }
}

/// Lets the readers of a slice read the same of a sliced operand.
fn slice_first(b: &mut Builder, slice: NodeId, chain: &[NodeId]) -> Result<(ValueId, ValueId)> {
    let node = b.graph.node(slice).clone();
    let mut old = b.graph.node(chain[0]).ins[0];
    let mut ins = node.ins.clone();
    ins[0] = old;
    b.loc = node.loc.clone();
    b.role = node.role;
    b.prefix = format!("{}/early", node.name);
    let mut new = b.emit_n(&SLICE, ins, node.attrs.clone(), 1)?[0];
    for id in chain {
        let step = b.graph.node(*id).clone();
        b.loc = step.loc.clone();
        b.role = step.role;
        b.prefix = format!("{}/early", step.name);
        let ins = step.ins.iter();
        let ins = ins
            .map(|v| if *v == old { Some(new) } else { *v })
            .collect();
        old = Some(step.outs[0]);
        new = b.emit_n(step.op, ins, step.attrs.clone(), 1)?[0];
    }
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
}

/// What a loss over classes compares before its last axis was moved behind the first; `None` if it was not.
fn classes_moved(graph: &Graph, id: NodeId) -> Option<ValueId> {
    let node = graph.node(id);
    let scores = class_scores(node)?;
    let (labels, rank) = ((*node.ins.get(1)?)?, graph.ty(scores).rank());
    let rest = node.outs.iter().skip(1);
    let is_read = |v: &ValueId| !graph.value(*v).uses().is_empty() || graph.is_output(*v);
    if rank < 3 || graph.ty(labels).rank() + 1 != rank || rest.into_iter().any(is_read) {
        return None;
    }
    let maker = graph.node(graph.def_node(scores)?);
    if maker.op != &TRANSPOSE || graph.value(scores).uses().len() != 1 || graph.is_output(scores) {
        return None;
    }
    let perm = maker.attrs.opt_ints("perm")?;
    let last = rank as i64 - 1;
    let expected = [0, last].into_iter().chain(1..last);
    if !perm.iter().copied().eq(expected) {
        return None;
    }
    graph.ty(scores).dims[1].as_const().filter(|n| *n > 0)?;
    *maker.ins.first()?
}

/// The same loss of the scores as they were, rows as one axis.
fn classes_last(b: &mut Builder, loss: NodeId, scores: ValueId) -> Result<(ValueId, ValueId)> {
    let node = b.graph.node(loss).clone();
    b.loc = node.loc.clone();
    b.role = node.role;
    b.prefix = format!("{}/early", node.name);
    let classes = b
        .ty(scores)
        .dims
        .last()
        .and_then(Dim::as_const)
        .unwrap_or(-1);
    let (matrix, vector) = (b.ints(&[-1, classes]), b.ints(&[-1]));
    let labels = node.ins[1];
    let mut ins = node.ins.clone();
    ins[0] = Some(b.emit(&RESHAPE, &[scores, matrix], Attrs::new())?);
    if let Some(v) = labels {
        ins[1] = Some(b.emit(&RESHAPE, &[v, vector], Attrs::new())?);
    }
    let mut new = b.emit_n(node.op, ins, node.attrs.clone(), node.outs.len())?[0];
    if let (Some(labels), "none") = (labels, node.attrs.str("reduction")) {
        let shape = b.emit(&SHAPE, &[labels], Attrs::new())?;
        new = b.emit(&RESHAPE, &[new, shape], Attrs::new())?;
    }
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
}

/// Gives a value the readers and the name of another.
fn take_over(b: &mut Builder, old: ValueId, new: ValueId) {
    let name = b.graph.value(old).name.clone();
    b.graph.rename_value(old, &format!("{name}/late"));
    b.graph.rename_value(new, &name);
    b.graph.replace_uses(old, new);
}
