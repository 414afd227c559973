//! Rewrites before autodiff that let rows stay rows from the head to the loss.
//!
//! In and out: `Typed`. Tokens that a loss drops are dropped before the head's product, not after it: a slice of scores is
//! the product of a slice of the activations. If a model moves the classes before other axes (`[N, C, …]`), because its
//! loss op requires that, the pass keeps them last ([`sink`]). Both rewrites save work. Values change only by the rounding of a
//! product with fewer rows.
//!
//! A contrastive loss takes a softmax over each row and each column of a similarity matrix. The transpose is computed as a
//! product of its own, so that each has its own rows. That is one more product, where the matrix need not exist whole. It makes
//! no difference whether the model transposes the matrix or reduces its columns.

use super::heads::{elementwise_operands, heads};
use super::sink::{resume_at, sink, take_over};
use crate::error::{Error, Result};
use crate::ir::op::{OpClass, OpDef};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Dim, Graph, Node, NodeId, Same, ValueId};
use crate::ops::arith::SUB;
use crate::ops::batch_axes::{FitCx, Rows, axis_of, bare_product, class_scores, fit, own_axes};
use crate::ops::index::GATHER;
use crate::ops::matmul::GEMM;
use crate::ops::names::{EXP, SQRT};
use crate::ops::reduce::{
    REDUCE_L2, REDUCE_LOG_SUM_EXP, REDUCE_MAX, REDUCE_MEAN, REDUCE_MIN, REDUCE_PROD, REDUCE_SUM,
    REDUCE_SUM_SQUARE,
};
use crate::ops::rule::compute_type;
use crate::ops::shape::TRANSPOSE;
use crate::ops::slice::SLICE;
use crate::ops::softmax::{LOG_SOFTMAX, SOFTMAX};
use crate::ops::{Builder, EmitExt};
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::order_by_reads;
use crate::transform::sizes::Sizes;
use rustc_hash::{FxHashMap, FxHashSet};

/// Applies the rewrites. Returns the new value for each value that was replaced.
///
/// # Errors
/// See [`infer`].
pub fn settle_rows(graph: &mut Graph) -> Result<FxHashMap<ValueId, ValueId>> {
    let mut replaced = FxHashMap::default();
    let mut contents = infer(graph)?;
    let mut order = graph.order().to_vec();
    let slices: Vec<(NodeId, Vec<NodeId>)> = order
        .iter()
        .filter_map(|id| Some((*id, chain_before(graph, &contents, *id)?)))
        .collect();
    let turns = order.iter().filter(|id| turns_product(graph, **id));
    let turns: Vec<NodeId> = turns.copied().collect();
    let heads = heads(graph);
    let columns = order
        .iter()
        .filter_map(|id| Some((*id, along_columns(graph, &contents, &heads, *id)?)));
    let columns: Vec<(NodeId, &OpDef)> = columns.collect();
    let mut below: FxHashSet<ValueId> = heads.into_iter().collect();
    for id in &order {
        let node = graph.node(*id);
        if node.operands().any(|v| below.contains(&v)) {
            below.extend(&node.outs);
        }
    }
    let means = order
        .iter()
        .filter_map(|id| Some((*id, mean_of_rows(graph, &contents, &below, *id)?)));
    let means: Vec<(NodeId, Vec<i64>)> = means.collect();
    let is_empty = slices.is_empty() && turns.is_empty() && columns.is_empty() && means.is_empty();
    if !is_empty {
        let mut b = Builder::resume(graph, contents);
        for (slice, chain) in slices {
            replaced.extend([slice_first(&mut b, slice, &chain)?]);
        }
        let mut done = FxHashMap::default();
        for (id, op) in columns {
            replaced.extend([columns_as_rows(&mut b, id, op, &mut done)?]);
        }
        for id in turns {
            let node = b.graph.node(id);
            let (old, from) = (node.outs[0], node.ins[0]);
            let from = from.ok_or_else(|| Error::bug("tile", "a transpose lacks its operand"))?;
            let new = turned(&mut b, from, &mut done)?;
            take_over(&mut b, old, new);
            replaced.insert(old, new);
        }
        for (id, axes) in means {
            replaced.extend([sum_of_rows(&mut b, id, &axes)?]);
        }
        settle_order(graph, &order)?;
        contents = infer(graph)?;
        order = graph.order().to_vec();
    }
    let sunk = sink(graph, contents)?;
    if graph.order().len() > order.len() {
        settle_order(graph, &order)?;
    }
    for new in replaced.values_mut() {
        *new = sunk.get(new).copied().unwrap_or(*new);
    }
    replaced.extend(sunk);
    Ok(replaced)
}

/// Puts new nodes where they are first read, and removes those that nothing reads.
fn settle_order(graph: &mut Graph, order: &[NodeId]) -> Result<()> {
    order_by_reads(graph, order)?;
    dce(graph);
    Ok(())
}

/// Returns the nodes from a product that is wider than its operand to the data of a slice along other axes than the last,
/// in order; `None` where the node is no such slice, or another node reads a value between.
fn chain_before(graph: &Graph, contents: &Contents, id: NodeId) -> Option<Vec<NodeId>> {
    let node = graph.node(id);
    if node.op != &SLICE {
        return None;
    }
    let mut v = node.operand(0)?;
    let rank = graph.ty(v).rank();
    let axes: Vec<i64> = match node.operand(3) {
        Some(axes) => {
            let axes = contents.get(axes)?.iter().map(Dim::as_const);
            axes.collect::<Option<_>>()?
        }
        None => (0..graph.ty(node.operand(1)?).dims.first()?.as_const()?).collect(),
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

/// Returns true for the transpose of a product of two matrices, perhaps after ops on each element, that a loss compares and
/// that something else reads, too.
fn turns_product(graph: &Graph, id: NodeId) -> bool {
    let turn = graph.node(id);
    let readers = |v: ValueId| graph.value(v).uses().iter().map(|u| graph.node(u.node));
    let is_compared = |v: ValueId| readers(v).any(|n| class_scores(n) == Some(v));
    let mut v = match turn.operand(0) {
        Some(v) if is_turn(graph, turn) && is_compared(turn.outs[0]) => v,
        _ => return false,
    };
    let mut is_shared = false;
    loop {
        is_shared |= graph.is_output(v) || readers(v).count() > 1;
        let Some(node) = graph.def_node(v).map(|id| graph.node(id)) else {
            return false;
        };
        if bare_product(node).is_some() {
            return is_shared;
        }
        match elementwise_operands(graph, node)[..] {
            [from] => v = from,
            _ => return false,
        }
    }
}

/// Returns what a node that works along the columns of a similarity matrix does to them, if it is one: a reduction.
fn along_columns(
    graph: &Graph,
    contents: &Contents,
    heads: &[ValueId],
    id: NodeId,
) -> Option<&'static OpDef> {
    let node = graph.node(id);
    let x = node.operand(0).filter(|v| graph.ty(*v).rank() == 2)?;
    let op = match node.op {
        op if op == &LOG_SOFTMAX || op == &SOFTMAX => {
            (axis_of(node, 2) == 0).then_some(&REDUCE_LOG_SUM_EXP)?
        }
        op if [&REDUCE_LOG_SUM_EXP, &REDUCE_MAX, &REDUCE_MIN].contains(&op) => {
            (own_axes(graph, contents, node)? == [0]).then_some(op)?
        }
        _ => return None,
    };
    let mut open = vec![x];
    while let Some(v) = open.pop() {
        let maker = graph.def_node(v).map(|id| graph.node(id));
        let Some(node) = maker else { continue };
        if bare_product(node).is_some() && heads.contains(&v) {
            return Some(op);
        }
        open.extend(elementwise_operands(graph, node));
    }
    None
}

/// Returns the axes of a node that takes the mean of rows of something that follows from scores.
fn mean_of_rows(
    graph: &Graph,
    contents: &Contents,
    below: &FxHashSet<ValueId>,
    id: NodeId,
) -> Option<Vec<i64>> {
    let node = graph.node(id);
    let x = node.operand(0).filter(|v| below.contains(v))?;
    let last = graph.ty(x).rank().checked_sub(1)?;
    let axes = mean_axes(graph, contents, node)?;
    axes.iter().copied().eq(0..last as i64).then_some(axes)
}

/// Returns the axes of a mean that a sum and a division compute as exactly.
fn mean_axes(graph: &Graph, contents: &Contents, node: &Node) -> Option<Vec<i64>> {
    let dtype = graph.ty(node.operand(0)?).dtype;
    let axes = own_axes(graph, contents, node)?;
    let is_mean = node.op == &REDUCE_MEAN && dtype == compute_type(dtype) && !axes.is_empty();
    is_mean.then(|| axes.iter().map(|axis| *axis as i64).collect())
}

/// Rewrites a reduction of wide rows, where that helps to cut them: a mean or a norm becomes a sum, and the largest or smallest
/// element is that of each row first. Returns whether it did, and what is known of contents then.
///
/// # Errors
/// What typing refuses.
pub fn ease_reduction(
    graph: &mut Graph,
    contents: Contents,
    id: NodeId,
) -> Result<(bool, Contents)> {
    let order = graph.order().to_vec();
    let mut b = Builder::resume(graph, contents);
    let is_eased = eased(&mut b, id)?;
    let contents = b.contents;
    if is_eased {
        order_by_reads(graph, &order)?;
        let is_dead = |v: &ValueId| graph.value(*v).uses().is_empty() && !graph.is_output(*v);
        if graph.node(id).outs.iter().all(is_dead) {
            graph.remove_nodes(&|node| node == id);
        }
    }
    Ok((is_eased, contents))
}

/// Emits what [`ease_reduction`] does.
fn eased(b: &mut Builder, id: NodeId) -> Result<bool> {
    let (graph, contents) = (&b.graph, &b.contents);
    let node = graph.node(id);
    let Some(x) = node.operand(0) else {
        return Ok(false);
    };
    if let Some(axes) = mean_axes(graph, contents, node) {
        sum_of_rows(b, id, &axes)?;
        return Ok(true);
    }
    let dtype = graph.ty(x).dtype;
    let is_squared = node.op == &REDUCE_L2 || node.op == &REDUCE_SUM_SQUARE;
    if is_squared && dtype == compute_type(dtype) {
        let node = resume_at(b, id);
        let square = b.mul(x, x)?;
        let mut ins = node.ins.clone();
        ins[0] = Some(square);
        let mut new = b.emit_n(&REDUCE_SUM, ins, node.attrs.clone(), 1)?[0];
        if node.op == &REDUCE_L2 {
            new = b.emit(SQRT, &[new], Attrs::new())?;
        }
        take_over(b, node.outs[0], new);
        return Ok(true);
    }
    let is_extreme = node.op == &REDUCE_MAX || node.op == &REDUCE_MIN;
    let (Some(axes), Some((last, row))) = (
        own_axes(graph, contents, node).filter(|axes| is_extreme && axes.len() > 1),
        graph.ty(x).dims.iter().enumerate().next_back(),
    ) else {
        return Ok(false);
    };
    if row.is_one() || !axes.contains(&last) {
        return Ok(false);
    }
    let op = node.op;
    resume_at(b, id);
    let last = b.ints(&[last as i64]);
    let of_row = b.emit(op, &[x, last], Attrs::new())?;
    b.graph.set_operand(id, 0, Some(of_row));
    Ok(true)
}

/// Replaces the mean of rows by their sum and a division: chunks add up. Returns the old and the new value.
fn sum_of_rows(b: &mut Builder, id: NodeId, axes: &[i64]) -> Result<(ValueId, ValueId)> {
    let node = resume_at(b, id);
    let x = node.ins[0].ok_or_else(|| Error::bug("tile", "a mean lacks its operand"))?;
    let dims = &b.ty(x).dims;
    let rows = Dim::product(
        &axes
            .iter()
            .map(|a| dims[*a as usize].clone())
            .collect::<Vec<_>>(),
    );
    let axes = b.ints(axes);
    let sum = b.emit_n(
        &REDUCE_SUM,
        vec![Some(x), Some(axes)],
        node.attrs.clone(),
        1,
    )?[0];
    let count = match Sizes::of_inputs(b.graph).build(b, true, &[rows])? {
        Some(count) => count,
        None => {
            let sizes = b.shape(x)?;
            let sizes = b.emit(&GATHER, &[sizes, axes], Attrs::new())?;
            let none_kept = Attrs::new().with("keepdims", 0);
            b.emit(&REDUCE_PROD, &[sizes], none_kept)?
        }
    };
    let count = b.cast(count, b.dtype(x))?;
    let new = b.div(sum, count)?;
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
}

/// Replaces a node that works along the columns of a matrix by one that reduces the rows of the transpose, and what follows
/// of that for each element. Returns the old and the new value.
fn columns_as_rows(
    b: &mut Builder,
    id: NodeId,
    op: &'static OpDef,
    turns: &mut FxHashMap<ValueId, ValueId>,
) -> Result<(ValueId, ValueId)> {
    let node = resume_at(b, id);
    let x = node.ins[0].ok_or_else(|| Error::bug("tile", "a reduction lacks its operand"))?;
    let dtype = b.dtype(x);
    let each = turned(b, x, turns)?;
    resume_at(b, id);
    let is_softmax = node.op != op;
    let each = match is_softmax {
        true => b.cast(each, compute_type(dtype))?,
        false => each,
    };
    let one = b.ints(&[1]);
    let none_kept = Attrs::new().with("keepdims", 0);
    let of_columns = b.emit(op, &[each, one], none_kept)?;
    let new = if is_softmax {
        let wide = b.cast(x, compute_type(dtype))?;
        let log = b.emit(&SUB, &[wide, of_columns], Attrs::new())?;
        let y = match node.op == &SOFTMAX {
            true => b.emit(EXP, &[log], Attrs::new())?,
            false => log,
        };
        b.cast(y, dtype)?
    } else if node.attrs.int("keepdims") != 0 {
        b.unsqueeze(of_columns, &[0])?
    } else {
        of_columns
    };
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
}

/// Returns a matrix and whether to turn it, without a `Transpose` before it.
fn transposed(graph: &Graph, v: ValueId, turn: bool) -> (ValueId, bool) {
    let maker = graph.def_node(v).map(|id| graph.node(id));
    match maker
        .filter(|node| is_turn(graph, node))
        .and_then(|node| node.operand(0))
    {
        Some(from) => (from, !turn),
        None => (v, turn),
    }
}

/// Returns true for the transpose of a matrix.
fn is_turn(graph: &Graph, node: &Node) -> bool {
    let rank = node.operand(0).map_or(0, |v| graph.ty(v).rank());
    let perm = node.attrs.opt_ints("perm");
    node.op == &TRANSPOSE && rank == 2 && perm.is_none_or(|perm| perm == [1, 0])
}

/// Emits the transpose of a matrix: (xy)ᵀ = yᵀxᵀ, and ops on each element are those of transposed operands.
fn turned(b: &mut Builder, v: ValueId, turns: &mut FxHashMap<ValueId, ValueId>) -> Result<ValueId> {
    if let Some(known) = turns.get(&v) {
        return Ok(*known);
    }
    let maker = b.graph.def_node(v);
    let node = maker.map(|id| resume_at(b, id));
    let is_wide = b.ty(v).dims.iter().all(|d| !d.is_one());
    let new = match node.filter(|_| is_wide) {
        Some(node) if is_turn(b.graph, &node) => node.ins[0].unwrap_or(v),
        Some(node) if bare_product(&node).is_some() => {
            let attrs = bare_product(&node).unwrap_or_default();
            let (Some(x), Some(y)) = (node.ins[0], node.ins[1]) else {
                return Err(Error::bug("tile", "a product lacks an operand"));
            };
            let (a, trans_a) = transposed(b.graph, y, attrs.int("transB") == 0);
            let (c, trans_c) = transposed(b.graph, x, attrs.int("transA") == 0);
            let swapped = Attrs::new()
                .with("transA", i64::from(trans_a))
                .with("transB", i64::from(trans_c));
            b.emit(&GEMM, &[a, c], swapped)?
        }
        Some(node) if !elementwise_operands(b.graph, &node).is_empty() => {
            let mut ins = node.ins.clone();
            for v in ins.iter_mut().flatten() {
                *v = match b.rank(*v) {
                    2 => turned(b, *v, turns)?,
                    1 if !b.ty(*v).elements().is_one() => b.unsqueeze(*v, &[1])?,
                    _ => *v,
                };
            }
            if let Some(id) = maker {
                resume_at(b, id);
            }
            b.emit_n(node.op, ins, node.attrs.clone(), 1)?[0]
        }
        _ => b.transpose(v, &[1, 0])?,
    };
    turns.insert(v, new);
    Ok(new)
}

/// Emits a chain of nodes once more, the first with `new` in place of the operand `old`. Returns the result of the last.
fn repeat(
    b: &mut Builder,
    chain: &[NodeId],
    mut old: Option<ValueId>,
    mut new: ValueId,
) -> Result<ValueId> {
    for id in chain {
        let step = resume_at(b, *id);
        let replace = |v: &Option<ValueId>| if *v == old { Some(new) } else { *v };
        let ins = step.ins.iter().map(replace).collect();
        old = Some(step.outs[0]);
        new = b.emit_n(step.op, ins, step.attrs.clone(), 1)?[0];
    }
    Ok(new)
}

/// Replaces a slice by the same computation of a sliced operand. Returns the old and the new value.
fn slice_first(b: &mut Builder, slice: NodeId, chain: &[NodeId]) -> Result<(ValueId, ValueId)> {
    let old = b.graph.node(chain[0]).ins[0];
    let node = resume_at(b, slice);
    let mut ins = node.ins.clone();
    ins[0] = old;
    let new = b.emit_n(&SLICE, ins, node.attrs.clone(), 1)?[0];
    let new = repeat(b, chain, old, new)?;
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
}
