//! Rewrites before autodiff that let rows stay rows from the head to the loss.
//!
//! In and out: `Typed`. Tokens that a loss drops are dropped before the head's product, not after it: a slice of scores is
//! the product of a slice of the activations. If a model moves the classes before other axes (`[N, C, …]`), because its
//! loss op requires that, the pass keeps them last ([`sink`]). Both rewrites save work. Values change only by the rounding of a
//! product with fewer rows.
//!
//! A contrastive loss takes a softmax over each row and each column of a similarity matrix. The transpose is computed as a
//! product of its own, so that each has its own rows. That is one more product, where the matrix need not exist whole.

use super::sink::{resume_at, sink, take_over};
use crate::error::{Error, Result};
use crate::ir::op::{BatchAxes, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Dim, Graph, Node, NodeId, Same, ValueId};
use crate::ops::batch_axes::{FitCx, Rows, bare_product, class_scores, fit};
use crate::ops::matmul::GEMM;
use crate::ops::shape::TRANSPOSE;
use crate::ops::slice::SLICE;
use crate::ops::{Builder, EmitExt};
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::order_by_reads;
use rustc_hash::FxHashMap;

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
    let turned: Vec<(NodeId, Vec<NodeId>)> = order
        .iter()
        .filter_map(|id| Some((*id, product_before_turn(graph, *id)?)))
        .collect();
    if !slices.is_empty() || !turned.is_empty() {
        let mut b = Builder::resume(graph, contents);
        for (slice, chain) in slices {
            replaced.extend([slice_first(&mut b, slice, &chain)?]);
        }
        for (turn, chain) in turned {
            replaced.extend([turn_operands(&mut b, turn, &chain)?]);
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

/// Returns the nodes from a product of two matrices to the transpose of scores that a loss compares, without the
/// transpose, in order: the product, then ops on each element with one more operand of one element at most. `None` where the
/// node is no such transpose, or nothing but transposes reads the product.
fn product_before_turn(graph: &Graph, id: NodeId) -> Option<Vec<NodeId>> {
    let turn = graph.node(id);
    let readers = |v: ValueId| graph.value(v).uses().iter().map(|u| graph.node(u.node));
    if !is_turn(graph, turn)
        || !readers(turn.outs[0]).any(|n| class_scores(n) == Some(turn.outs[0]))
    {
        return None;
    }
    let mut v = turn.operand(0)?;
    let mut chain = Vec::new();
    let mut is_shared = false;
    loop {
        is_shared |= graph.is_output(v) || readers(v).count() > 1;
        let id = graph.def_node(v)?;
        let node = graph.node(id);
        chain.push(id);
        if bare_product(node).is_some() {
            break;
        }
        let wide = |w: &ValueId| !graph.ty(*w).elements().is_one();
        let mut wide = node.operands().filter(wide);
        let (from, None) = (wide.next()?, wide.next()) else {
            return None;
        };
        if node.op.axes != BatchAxes::Pointwise || node.outs.len() != 1 {
            return None;
        }
        v = from;
    }
    chain.reverse();
    is_shared.then_some(chain)
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

/// Replaces a transpose by the product of the transposed operands in turned order, and what follows it. Returns the old and
/// the new value.
fn turn_operands(b: &mut Builder, turn: NodeId, chain: &[NodeId]) -> Result<(ValueId, ValueId)> {
    let node = resume_at(b, turn);
    let product = b.graph.node(chain[0]).clone();
    let (Some(x), Some(y), Some(attrs)) = (product.ins[0], product.ins[1], bare_product(&product))
    else {
        return Err(Error::bug("tile", "a product lacks an operand"));
    };
    // (xy)ᵀ = yᵀxᵀ.
    let (a, trans_a) = transposed(b.graph, y, attrs.int("transB") == 0);
    let (c, trans_c) = transposed(b.graph, x, attrs.int("transA") == 0);
    let swapped = Attrs::new()
        .with("transA", i64::from(trans_a))
        .with("transB", i64::from(trans_c));
    let new = b.emit(&GEMM, &[a, c], swapped)?;
    let new = repeat(b, &chain[1..], Some(product.outs[0]), new)?;
    take_over(b, node.outs[0], new);
    Ok((node.outs[0], new))
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
