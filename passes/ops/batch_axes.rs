//! How ops treat rows, which chunking cuts.
//!
//! Rows are tokens or other elements of a batch: indices of some axes of a tensor, all of which the op treats alike. If
//! the rows of some operands or results of a node are known, [`fit`] returns those of the others. [`cut`] emits the
//! node for some of the rows, with the row axes merged into one. Chunking stops at an op without a rule here. An axis may
//! hold several elements for each row, as the pixels of an image where the rows are the images of a batch ([`each`]).
//!
//! A sum over rows equals the sum over its chunks up to rounding. All other results are exact.

mod cut;
mod parted;
pub mod positions;

use ckpt_ir::op::{BatchAxes, OpDef};
use ckpt_ir::{Attrs, Dim, Graph, Node, NodeId, Same, ValueId, same_dims};
pub use cut::{CutCx, cut, own_axes};
pub use parted::{PartCx, Parted, Summed, parted, summed};

use super::concat::{CONCAT, SPLIT};
use super::conv::{CONV, CONV_INPUT_GRAD, CONV_TRANSPOSE, CONV_WEIGHT_GRAD};
use super::grouped;
use super::index::{GATHER, GATHER_GRAD};
use super::loss::*;
use super::matmul::{GEMM, MATMUL};
use super::norm::{self, LAYER_NORM_GRAD, RMS_NORM_GRAD};
use super::reduce::*;
use super::rule::compute_type;
use super::scan::CUM_SUM;
use super::select::{ARG_MAX, ARG_MIN};
use super::shape::*;
use super::slice::SLICE_GRAD;
use super::softmax::*;
use super::sum_to::SUM_TO_SHAPE;
use ckpt_ir::typing::Contents;

/// How rows lie in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The first axes, that many of them, together: one element or several for each row.
    Lead(usize),
    /// The last axis of a matrix, in the same way.
    Last,
    /// Several rows share an element. The first axes, that many of them, are aligned with the last of those that hold the rows in a
    /// result; each has the same size or size 1.
    Shared(usize),
    /// Nowhere: the value is a sum over rows.
    Sum,
}

/// How rows lie in the operands and results of a node; `None` where a value is the same for every row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// How rows lie in each operand.
    pub ins: Vec<Option<Rows>>,
    /// How rows lie in each result.
    pub outs: Vec<Rows>,
}

/// What [`fit`] looks at.
pub struct FitCx<'a> {
    /// The graph of the node.
    pub graph: &'a Graph,
    /// Known contents of small integer values.
    pub contents: &'a Contents,
    /// How many rows there are.
    pub rows: &'a Dim,
    /// What is known so far.
    pub known: &'a dyn Fn(ValueId) -> Option<Rows>,
}

/// Why a node cannot be cut along rows; a clause for people.
pub type Reason = &'static str;

/// How many leading axes of a value together are the rows.
pub fn lead(dims: &[Dim], rows: &Dim) -> Option<usize> {
    let is_all = |k: &usize| Dim::product(&dims[..*k]).same(rows) == Same::Yes;
    (1..=dims.len()).find(is_all)
}

/// How many leading axes of a value together hold the rows, with one element or several for each.
fn lead_of_several(dims: &[Dim], rows: &Dim) -> Option<usize> {
    (1..=dims.len()).find(|k| each(&dims[..*k], rows).is_some())
}

/// The number of elements for each row along axes that together hold the rows.
pub fn each(dims: &[Dim], rows: &Dim) -> Option<Dim> {
    let all = Dim::product(dims);
    // Also where there are no rows.
    match all.same(rows) {
        Same::Yes => Some(Dim::ONE),
        _ => all.exact_div(rows),
    }
}

/// Whether an operand, aligned at its last axes with a result of `rank` axes, is broadcast along the first `k` of them.
fn spans(dims: &[Dim], rank: usize, k: usize) -> bool {
    let trailing = rank - k;
    let over = dims.len().saturating_sub(trailing);
    dims[..over].iter().all(Dim::is_one)
}

/// The scores of an op that compares classes, if it does: `[rows, classes]`, or its last axis is the classes.
pub fn class_scores(node: &Node) -> Option<ValueId> {
    let compares = node.op.axes == BatchAxes::ClassLoss || node.op == &LOG_SOFTMAX;
    compares.then_some(node.ins[0])?
}

/// The same, also of the loss of some of the rows.
pub fn compared_scores(node: &Node) -> Option<ValueId> {
    match node.op == &CLASS_LOSS || node.op == &CLASS_TERMS {
        true => node.ins[0],
        false => class_scores(node),
    }
}

/// Whether the op is a loss over classes that divides by the weight of all labels, which no part of the rows knows.
pub fn is_mean_loss(node: &Node) -> bool {
    is_class_loss(node.op) && node.attrs.str("reduction") == "mean"
}

fn is_class_loss(op: &OpDef) -> bool {
    matches!(op.axes, BatchAxes::ClassLoss | BatchAxes::ClassLossGrad)
}

/// Of a loss over classes: the attributes with which `ClassLoss` gives the loss of every label by itself.
pub fn each_loss(node: &Node) -> Option<Attrs> {
    let normalized = node.op == &NEGATIVE_LOG_LIKELIHOOD_LOSS;
    if !normalized && node.op != &SOFTMAX_CROSS_ENTROPY_LOSS {
        return None;
    }
    let attrs = Attrs::new().with("normalized", i64::from(normalized));
    Some(match node.attrs.opt_int("ignore_index") {
        Some(index) => attrs.with("ignore_index", index),
        None => attrs,
    })
}

/// Whether the op adds up elements of its first operand.
pub fn is_plain_sum(op: &OpDef) -> bool {
    op == &SUM_TO_SHAPE || op == &REDUCE_SUM
}

/// Whether the op is the gradient of such a loss: its cotangent comes first.
pub fn is_class_loss_grad(op: &OpDef) -> bool {
    op.axes == BatchAxes::ClassLossGrad
}

/// How a product of two matrices turns its operands, as attributes of `Gemm`; `None` for any other op, a product with
/// factors or one that is added to something.
pub fn bare_product(node: &Node) -> Option<Attrs> {
    let turned = |a: i64, b: i64| Attrs::new().with("transA", a).with("transB", b);
    if node.op == &MATMUL {
        return Some(turned(0, 0));
    }
    let is_bare = node.op == &GEMM
        && node.attrs.float("alpha") == 1.0
        && node.ins.get(2).copied().flatten().is_none();
    is_bare.then(|| turned(node.attrs.int("transA"), node.attrs.int("transB")))
}

/// How rows lie in all operands and results of a node, some of which are known.
///
/// # Errors
/// Why the node cannot be cut.
pub fn fit(cx: &FitCx, id: NodeId) -> std::result::Result<Fit, Reason> {
    let node = cx.graph.node(id);
    let known = |v: &Option<ValueId>| v.and_then(|v| (cx.known)(v));
    if node.ins.iter().any(|v| known(v) == Some(Rows::Sum)) {
        return Err("it needs a sum over all rows");
    }
    let mut values = node.ins.iter().flatten().chain(&node.outs);
    if values.any(|v| cx.graph.ty(*v).dtype.is_float8()) {
        // ONNX has no op that takes some rows of such a value.
        return Err("its values are floats of 8 bits");
    }
    match node.op.axes {
        BatchAxes::Pointwise => pointwise(cx, node),
        BatchAxes::Regrouped => relabelled(cx, node),
        BatchAxes::Permuted => transposed(cx, node),
        BatchAxes::Broadcast => expanded(cx, node),
        BatchAxes::Product => product(cx, node),
        BatchAxes::BiasedProduct => gemm(cx, node),
        BatchAxes::SummedToShape => summed_to(cx, node),
        BatchAxes::Reduced => reduced(cx, node),
        BatchAxes::Sliced => sliced(cx, node),
        BatchAxes::AlongAxis => along_axis(cx, node),
        BatchAxes::ClassLoss | BatchAxes::ClassLossGrad => class_loss(cx, node),
        BatchAxes::OneHot => one_hot(cx, node),
        BatchAxes::EachClassLoss => each_class_loss(cx, node),
        BatchAxes::Mixed => mixed(cx, node),
    }
}

/// Ops whose field `axes` gives no rule.
fn mixed(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let is = |ops: &[&'static OpDef]| ops.contains(&node.op);
    if is(ALONG) {
        return along_axis(cx, node);
    }
    if is(&[&GATHER, &GATHER_GRAD]) {
        return gathered(cx, node);
    }
    if is(&[&SLICE_GRAD, &CUM_SUM]) {
        return along_known_axes(cx, node);
    }
    if is(grouped::ROWS) {
        return grouped_product(cx, node);
    }
    if is(norm::ROWS) {
        return normalized(cx, node);
    }
    // Which operands are images.
    let images: &[usize] = match () {
        () if is(&[&CONV, &CONV_TRANSPOSE, &CONV_INPUT_GRAD]) => &[0],
        () if is(&[&CONV_WEIGHT_GRAD]) => &[0, 1],
        () => return Err("there is no rule for how it treats rows"),
    };
    let mut values = images.iter().filter_map(|i| node.ins[*i]);
    if !values.all(|v| lead_of_several(&cx.graph.ty(v).dims, cx.rows) == Some(1)) {
        return Err("it mixes the pixels of an image");
    }
    let mut ins = vec![None; node.ins.len()];
    for image in images {
        ins[*image] = Some(Rows::Lead(1));
    }
    let outs = vec![match images.len() {
        1 => Rows::Lead(1),
        _ => Rows::Sum,
    }];
    if is(&[&CONV_INPUT_GRAD]) {
        row_is_known(cx, node, 2, 1)?;
    }
    Ok(Fit { ins, outs })
}

/// Products of rows by groups, which have a group for each row; the gradient of their matrices is a sum over rows.
fn grouped_product(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let is_sum = node.op == &grouped::GROUPED_WEIGHT_GRAD;
    let x = cx.graph.ty(node.operand(0).ok_or("an operand is missing")?);
    let is_lead = |v: ValueId| (cx.known)(v).is_none_or(|rows| rows == Rows::Lead(1));
    let mut rowed = [0, 2].into_iter().filter_map(|slot| node.operand(slot));
    if each(&x.dims[..1], cx.rows).is_none() || !rowed.all(is_lead) {
        return Err("rows are mixed by a product");
    }
    if is_sum && compute_type(x.dtype) != x.dtype {
        return Err("each chunk would round its part of a parameter's gradient");
    }
    let rows = Some(Rows::Lead(1));
    Ok(Fit {
        ins: vec![rows, if is_sum { rows } else { None }, rows],
        outs: vec![if is_sum { Rows::Sum } else { Rows::Lead(1) }],
    })
}

/// Ops of the class `Mixed` that work along the axis that the attribute `axis` names.
const ALONG: &[&OpDef] = &[&ARG_MAX, &ARG_MIN, &CONCAT, &SPLIT];

/// A norm within each row, or its gradient: scale and bias are the same for all rows.
fn normalized(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let x = cx.graph.ty(node.operand(0).ok_or("an operand is missing")?);
    let k = known_lead(cx, node, x.rank()).ok_or("rows are mixed by a norm")?;
    let is_grad = node.op == &LAYER_NORM_GRAD || node.op == &RMS_NORM_GRAD;
    let is_parameter = |slot: usize| match is_grad {
        true => slot == 2,
        false => slot > 0,
    };
    let is_whole =
        |slot: usize, v: ValueId| is_parameter(slot) && spans(&cx.graph.ty(v).dims, x.rank(), k);
    let mut ins = Vec::with_capacity(node.ins.len());
    for (slot, v) in node.ins.iter().enumerate() {
        ins.push(match v {
            Some(v) if is_whole(slot, *v) => None,
            Some(_) if is_parameter(slot) => return Err("rows are mixed by a norm"),
            Some(_) => Some(Rows::Lead(k)),
            None => None,
        });
    }
    let rows_of = |wanted: &i64| match *wanted {
        0 => Rows::Lead(k),
        _ => Rows::Sum,
    };
    let outs: Vec<Rows> = match is_grad {
        true => node.attrs.ints("wants").iter().map(rows_of).collect(),
        false => vec![Rows::Lead(k); node.outs.len()],
    };
    if axis_of(node, x.rank()) < k {
        return Err("rows are mixed by a norm");
    }
    let sums = outs
        .iter()
        .zip(&node.outs)
        .filter(|(rows, _)| **rows == Rows::Sum);
    for ty in sums.map(|(_, v)| cx.graph.ty(*v)) {
        if ty.static_dims().is_none() || compute_type(ty.dtype) != ty.dtype {
            return Err("each chunk would round its part of a parameter's gradient");
        }
    }
    Ok(Fit { ins, outs })
}

/// Fails unless a row of the result, behind `k` axes, has constant sizes or the operand `slot` lists them.
fn row_is_known(cx: &FitCx, node: &Node, slot: usize, k: usize) -> std::result::Result<(), Reason> {
    let out = &cx.graph.ty(node.outs[0]).dims;
    let listed = node.operand(slot).map(|v| &cx.graph.ty(v).dims[0]);
    let lists_all = listed.and_then(Dim::as_const) == Some(out.len() as i64);
    match lists_all || out[k..].iter().all(|d| d.as_const().is_some()) {
        true => Ok(()),
        false => Err("the shape of a row is not a constant"),
    }
}

/// The gradient of a slice, and a running sum: only the first operand has rows.
fn along_known_axes(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let rank = cx.graph.ty(node.outs[0]).rank();
    let k = known_lead(cx, node, rank).ok_or("rows are mixed")?;
    let axes = match node.op == &SLICE_GRAD {
        true => node
            .attrs
            .ints("axes")
            .iter()
            .map(|a| *a as usize)
            .collect(),
        false => listed_axes(node, 1, rank, cx.contents).ok_or("its axis is not a constant")?,
    };
    if axes.iter().any(|a| *a < k) {
        return Err("it works along rows");
    }
    if node.op == &SLICE_GRAD {
        row_is_known(cx, node, 1, k)?;
    }
    let mut ins = vec![None; node.ins.len()];
    ins[0] = Some(Rows::Lead(k));
    let outs = vec![Rows::Lead(k)];
    Ok(Fit { ins, outs })
}

/// A lookup, or its gradient.
fn gathered(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    match looked_up_by_rows(cx, node) {
        Some(fit) => Ok(fit),
        None => gathered_behind_rows(cx, node),
    }
}

/// A lookup in which each row reads entries of a table, or the gradient of the table, which is a sum over rows. The indices have
/// rows, the table has none. Returns `None` for any other lookup.
fn looked_up_by_rows(cx: &FitCx, node: &Node) -> Option<Fit> {
    let indices = node.operand(1)?;
    let is_grad = node.op == &GATHER_GRAD;
    let (table, taken) = match is_grad {
        true => (node.outs[0], node.operand(2)?),
        false => (node.operand(0)?, node.outs[0]),
    };
    let rows = [indices, taken].into_iter().find_map(cx.known)?;
    let is_table = matches!((cx.known)(table), None | Some(Rows::Sum));
    let table = cx.graph.ty(table);
    let is_lead = rows == Rows::Lead(cx.graph.ty(indices).rank());
    if !is_lead || !is_table || axis_of(node, table.rank()) != 0 || node.operand(3).is_some() {
        return None;
    }
    Some(match is_grad {
        true => Fit {
            ins: vec![None, Some(rows), Some(rows)],
            outs: vec![Rows::Sum],
        },
        false => Fit {
            ins: vec![None, Some(rows)],
            outs: vec![rows],
        },
    })
}

/// A lookup along an axis behind the rows, and its gradient: data, then `sum` of the gradient, have rows; indices have none.
fn gathered_behind_rows(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let data: &[usize] = match node.op == &GATHER {
        true => &[0],
        false => &[2, 3],
    };
    let out = &cx.graph.ty(node.outs[0]).dims;
    let mut known = data.iter().filter_map(|i| node.operand(*i));
    let known = known
        .find_map(|v| (cx.known)(v))
        .or((cx.known)(node.outs[0]));
    let Some(Rows::Lead(k)) = known else {
        return Err("it looks up rows");
    };
    let rank = match node.op == &GATHER {
        true => cx
            .graph
            .ty(node.operand(0).ok_or("an operand is missing")?)
            .rank(),
        false => out.len(),
    };
    if axis_of(node, rank) < k {
        return Err("it works along rows");
    }
    let mut ins = vec![None; node.ins.len()];
    for slot in data.iter().filter(|i| node.operand(**i).is_some()) {
        ins[*slot] = Some(Rows::Lead(k));
    }
    if node.op == &GATHER_GRAD {
        row_is_known(cx, node, 0, k)?;
    }
    let outs = vec![Rows::Lead(k)];
    Ok(Fit { ins, outs })
}

/// The leading axes that are rows in some operand or result of the same rank as `v`.
fn known_lead(cx: &FitCx, node: &Node, rank: usize) -> Option<usize> {
    let values = node
        .outs
        .iter()
        .copied()
        .chain(node.ins.iter().copied().flatten());
    values
        .filter(|v| cx.graph.ty(*v).rank() == rank)
        .find_map(|v| match (cx.known)(v) {
            Some(Rows::Lead(k)) => Some(k),
            _ => None,
        })
}

fn pointwise(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let out = &cx.graph.ty(node.outs[0]).dims;
    let Some(k) = known_lead(cx, node, out.len()) else {
        return columnwise(cx, node);
    };
    let rows = |v: &ValueId| broadcast(&cx.graph.ty(*v).dims, out, k);
    let ins = node.ins.iter().map(|v| v.as_ref().map_or(Ok(None), rows));
    Ok(Fit {
        ins: ins.collect::<std::result::Result<_, Reason>>()?,
        outs: vec![Rows::Lead(k); node.outs.len()],
    })
}

/// How rows lie in an operand that is broadcast to a result, whose first `k` axes hold the rows.
fn broadcast(dims: &[Dim], out: &[Dim], k: usize) -> std::result::Result<Option<Rows>, Reason> {
    if dims.len() == out.len() && same_dims(&dims[..k], &out[..k]) {
        return Ok(Some(Rows::Lead(k)));
    }
    if spans(dims, out.len(), k) {
        return Ok(None);
    }
    if dims.len() > out.len() {
        return Err("an operand has more axes than the result");
    }
    let own = dims.len() - (out.len() - k);
    let mut aligned = dims[..own].iter().zip(&out[k - own..k]);
    match aligned.all(|(a, b)| a.is_one() || a.same(b) == Same::Yes) {
        true => Ok(Some(Rows::Shared(own))),
        false => Err("an operand may be broadcast along some of the rows"),
    }
}

/// Pointwise on matrices whose columns are the rows.
fn columnwise(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let out = &cx.graph.ty(node.outs[0]).dims;
    if out.len() != 2 {
        return Err("rows are moved among other axes");
    }
    let column = |v: &ValueId| column_of(&cx.graph.ty(*v).dims, out);
    let ins = node.ins.iter().map(|v| v.as_ref().map_or(Ok(None), column));
    Ok(Fit {
        ins: ins.collect::<std::result::Result<_, Reason>>()?,
        outs: vec![Rows::Last; node.outs.len()],
    })
}

/// How rows lie in an operand that is broadcast to a matrix whose columns are the rows.
fn column_of(dims: &[Dim], out: &[Dim]) -> std::result::Result<Option<Rows>, Reason> {
    match dims {
        [.., last] if last.same(&out[1]) == Same::Yes => Ok(Some(match dims.len() {
            1 => Rows::Lead(1),
            _ => Rows::Last,
        })),
        [.., last] if !last.is_one() => Err("an operand of a transposed value is broadcast"),
        _ => Ok(None),
    }
}

/// Whether two shapes differ in axes of size 1 alone.
fn sizes_match(a: &[Dim], b: &[Dim]) -> bool {
    let wide = |dims: &[Dim]| -> Vec<Dim> {
        let wide = dims.iter().filter(|dim| !dim.is_one());
        wide.cloned().collect()
    };
    same_dims(&wide(a), &wide(b))
}

fn relabelled(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let (x, y) = (node.ins[0].ok_or("an operand is missing")?, node.outs[0]);
    let is_known = (cx.known)(x).or((cx.known)(y)).is_some();
    // Elements keep their order.
    let at = |v: ValueId| match ((cx.known)(v), &cx.graph.ty(v).dims) {
        (Some(Rows::Lead(k)), _) => Some(k),
        (Some(_), _) => None,
        (None, dims) if is_known => lead_of_several(dims, cx.rows),
        (None, dims) => lead(dims, cx.rows),
    };
    let (Some(i), Some(j)) = (at(x), at(y)) else {
        return Err("it takes rows apart");
    };
    let row = &cx.graph.ty(y).dims[j..];
    let is_unknown = |d: &&Dim| d.as_const().is_none();
    let keeps_sizes = sizes_match(&cx.graph.ty(x).dims[i..], row);
    if row.iter().any(|d| d.as_const() == Some(0)) {
        return Err("a row has no elements");
    }
    let listed = node.operand(1).filter(|_| node.op == &RESHAPE);
    let listed = listed.and_then(|v| cx.contents.get(v));
    let is_listed = listed.is_some_and(|sizes| {
        sizes.len() == j + row.len()
            && sizes[j..]
                .iter()
                .all(|d| d.as_const().is_none_or(|n| n > 0))
    });
    if row.iter().filter(is_unknown).count() > 1 && !keeps_sizes && !is_listed {
        return Err("the shape of a row is not a constant");
    }
    let mut ins = vec![None; node.ins.len()];
    ins[0] = Some(Rows::Lead(i));
    Ok(Fit {
        ins,
        outs: vec![Rows::Lead(j)],
    })
}

fn product(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let (Some(a), Some(b)) = (node.ins[0], node.ins[1]) else {
        return Err("an operand is missing");
    };
    let (rank_a, rank_b) = (cx.graph.ty(a).rank(), cx.graph.ty(b).rank());
    let (rows_a, rows_b) = ((cx.known)(a), (cx.known)(b));
    let matrices = rank_a == 2 && rank_b == 2;
    let inner = matrices && each(&cx.graph.ty(b).dims[..1], cx.rows).is_some();
    if inner && (rows_a == Some(Rows::Last) || rows_b == Some(Rows::Lead(1))) {
        return Ok(Fit {
            ins: vec![Some(Rows::Last), Some(Rows::Lead(1))],
            outs: vec![Rows::Sum],
        });
    }
    if rank_b > 2 || rows_b.is_some() {
        return batched_product(cx, node);
    }
    let k = match (rows_a, (cx.known)(node.outs[0])) {
        (Some(Rows::Lead(k)), _) | (None, Some(Rows::Lead(k))) => k,
        _ => return Err("rows are mixed by a product"),
    };
    if rank_b != 2 || k >= rank_a {
        return Err("rows are mixed by a product");
    }
    Ok(Fit {
        ins: vec![Some(Rows::Lead(k)), None],
        outs: vec![Rows::Lead(k)],
    })
}

/// A product for each row, of matrices that either operand has one or several of.
fn batched_product(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let rank = cx.graph.ty(node.outs[0]).rank();
    match known_lead(cx, node, rank) {
        Some(k) if k + 2 <= rank => pointwise(cx, node),
        _ => Err("rows are mixed by a product"),
    }
}

fn gemm(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let (Some(a), Some(b)) = (node.ins[0], node.ins[1]) else {
        return Err("an operand is missing");
    };
    let turned = |name: &str| node.attrs.int(name) != 0;
    let (rows_a, rows_b) = ((cx.known)(a), (cx.known)(b));
    // Where rows are if the product sums over them.
    let inner_a = if turned("transA") {
        Rows::Lead(1)
    } else {
        Rows::Last
    };
    let inner_b = if turned("transB") {
        Rows::Last
    } else {
        Rows::Lead(1)
    };
    let c = node.ins.get(2).copied().flatten();
    let out = (cx.known)(node.outs[0]);
    if rows_a == Some(inner_a) || rows_b == Some(inner_b) {
        if c.is_some() {
            return Err("a sum over rows is added to in the same op");
        }
        return Ok(Fit {
            ins: node
                .ins
                .iter()
                .zip([Some(inner_a), Some(inner_b), None])
                .map(|(_, r)| r)
                .collect(),
            outs: vec![Rows::Sum],
        });
    }
    let along = rows_a == Some(Rows::Lead(1)) || (rows_a.is_none() && out == Some(Rows::Lead(1)));
    if turned("transA") || !along || rows_b.is_some() {
        return Err("rows are mixed by a product");
    }
    let mut ins = vec![Some(Rows::Lead(1)), None];
    if node.ins.len() > 2 {
        ins.push(match c.map(|c| &cx.graph.ty(c).dims) {
            Some(dims) if dims.len() == 2 && each(&dims[..1], cx.rows).is_some() => {
                Some(Rows::Lead(1))
            }
            Some(dims) if !spans(dims, 2, 1) => return Err("the bias may be one a row"),
            _ => None,
        });
    }
    Ok(Fit {
        ins,
        outs: vec![Rows::Lead(1)],
    })
}

fn transposed(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let x = node.ins[0].ok_or("an operand is missing")?;
    let perm = permutation(&node.attrs, cx.graph.ty(x).rank());
    let (before, after) = ((cx.known)(x), (cx.known)(node.outs[0]));
    let turns = perm == [1, 0];
    let (before, after) = match (before, after) {
        (Some(Rows::Lead(k)), _) | (None, Some(Rows::Lead(k)))
            if perm[..k].iter().copied().eq(0..k) =>
        {
            (Rows::Lead(k), Rows::Lead(k))
        }
        (Some(Rows::Lead(1)), _) | (None, Some(Rows::Last)) if turns => (Rows::Lead(1), Rows::Last),
        (Some(Rows::Last), _) | (None, Some(Rows::Lead(1))) if turns => (Rows::Last, Rows::Lead(1)),
        _ => return Err("rows are moved among other axes"),
    };
    Ok(Fit {
        ins: vec![Some(before)],
        outs: vec![after],
    })
}

fn permutation(attrs: &Attrs, rank: usize) -> Vec<usize> {
    match attrs.opt_ints("perm") {
        Some(perm) => perm.iter().map(|p| *p as usize).collect(),
        None => (0..rank).rev().collect(),
    }
}

/// The leading axes of the first operand that are rows; they must be known.
fn first_lead(cx: &FitCx, node: &Node) -> std::result::Result<usize, Reason> {
    match node.ins[0].and_then(|v| (cx.known)(v)) {
        Some(Rows::Lead(k)) => Ok(k),
        _ => Err("rows are mixed by a sum"),
    }
}

/// The sizes of a value that several rows share, [`Rows::Shared`] with `own` axes, along the `k` axes that hold the rows: 1 for those
/// that it lacks.
pub fn shared_sizes(dims: &[Dim], own: usize, k: usize) -> Vec<Dim> {
    let missing = std::iter::repeat_n(Dim::ONE, k - own);
    missing.chain(dims[..own].iter().cloned()).collect()
}

/// [`shared_sizes`] of the result of a sum of `x`, whose first `k` axes hold the rows; `None` unless it adds up some of these axes
/// and leaves others.
fn shared_axes(x: &[Dim], sum: &[Dim], k: usize) -> Option<Vec<Dim>> {
    let rows = broadcast(sum, x, k).ok()??;
    let Rows::Shared(own) = rows else {
        return None;
    };
    Some(shared_sizes(sum, own, k))
}

/// The same for the result of a node. `axes` are the axes that it reduces, if it is a reduction.
pub fn summed_by_rows(
    graph: &Graph,
    node: &Node,
    axes: Option<&[usize]>,
    k: usize,
) -> Option<Vec<Dim>> {
    let x = &graph.ty(node.operand(0)?).dims;
    if node.op == &SUM_TO_SHAPE {
        return shared_axes(x, &graph.ty(node.outs[0]).dims, k);
    }
    let axes = axes.filter(|_| node.op == &REDUCE_SUM)?;
    let is_gone = |axis: &usize| axes.contains(axis);
    let some = (0..k).any(|axis| is_gone(&axis)) && !(0..k).all(|axis| is_gone(&axis));
    let own = |axis: usize| {
        if is_gone(&axis) {
            Dim::ONE
        } else {
            x[axis].clone()
        }
    };
    some.then(|| (0..k).map(own).collect())
}

/// Returns how rows lie in the result of a reduction of a matrix whose columns are the rows. `gone` is the axis that it adds up or
/// compares; `None` for both.
fn reduced_columns(
    cx: &FitCx,
    node: &Node,
    gone: Option<usize>,
) -> std::result::Result<Fit, Reason> {
    let out = cx.graph.ty(node.outs[0]);
    let rows = match (gone, out.rank()) {
        (Some(0), 1) => Rows::Lead(1),
        (Some(0), 2) if out.dims[0].is_one() => Rows::Last,
        (Some(0), _) => return Err("some classes may be summed"),
        _ if is_plain_sum(node.op) && out.static_dims().is_some() => Rows::Sum,
        _ => return Err("rows are reduced"),
    };
    let mut ins = vec![None; node.ins.len()];
    ins[0] = Some(Rows::Last);
    let outs = vec![rows];
    Ok(Fit { ins, outs })
}

fn has_columns(cx: &FitCx, node: &Node) -> bool {
    let x = node.operand(0);
    x.is_some_and(|x| (cx.known)(x) == Some(Rows::Last) && cx.graph.ty(x).rank() == 2)
}

fn summed_to(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    if has_columns(cx, node) {
        let x = &cx
            .graph
            .ty(node.ins[0].ok_or("an operand is missing")?)
            .dims;
        let keeps = cx.graph.ty(node.outs[0]).dims.last().map(|d| d.same(&x[1]));
        return reduced_columns(cx, node, (keeps == Some(Same::Yes)).then_some(0));
    }
    let k = first_lead(cx, node)?;
    let (x, y) = (
        cx.graph.ty(node.ins[0].ok_or("an operand is missing")?),
        cx.graph.ty(node.outs[0]),
    );
    let spans = spans(&y.dims, x.rank(), k);
    let row = &y.dims[y.rank() - y.rank().min(x.rank() - k)..];
    if spans && (y.static_dims().is_some() || same_dims(row, &x.dims[k..])) {
        return Ok(Fit {
            ins: vec![Some(Rows::Lead(k)), None],
            outs: vec![Rows::Sum],
        });
    }
    if shared_axes(&x.dims, &y.dims, k).is_some() {
        return Ok(Fit {
            ins: vec![Some(Rows::Lead(k)), None],
            outs: vec![Rows::Sum],
        });
    }
    let trailing = y.dims.len() == x.rank() && same_dims(&x.dims[..k], &y.dims[..k]);
    if trailing && row_is_known(cx, node, 1, k).is_ok() {
        return Ok(Fit {
            ins: vec![Some(Rows::Lead(k)), None],
            outs: vec![Rows::Lead(k)],
        });
    }
    Err("some rows are summed")
}

/// The axes that an operand lists, in its order; none if it is not given.
fn listed_axes(node: &Node, slot: usize, rank: usize, contents: &Contents) -> Option<Vec<usize>> {
    let Some(v) = node.operand(slot) else {
        return Some(Vec::new());
    };
    let axes = contents.get(v)?.iter().map(Dim::as_const);
    axes.map(|a| a.map(|a| (if a < 0 { a + rank as i64 } else { a }) as usize))
        .collect()
}

/// The axes of a slice, in their order; none where they are not listed, which then begin with the first.
fn sliced_axes(node: &Node, rank: usize, contents: &Contents) -> Option<Vec<usize>> {
    listed_axes(node, 3, rank, contents).filter(|axes| !axes.is_empty())
}

fn sliced(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let k = first_lead(cx, node)?;
    let rank = cx.graph.ty(node.outs[0]).rank();
    let axes = sliced_axes(node, rank, cx.contents).ok_or("the sliced axes are not constants")?;
    if axes.iter().any(|a| *a < k) {
        return Err("it takes some of the rows");
    }
    let mut ins = vec![None; node.ins.len()];
    ins[0] = Some(Rows::Lead(k));
    let outs = vec![Rows::Lead(k)];
    Ok(Fit { ins, outs })
}

/// The axes of a reduction, ascending.
fn reduced_axes(node: &Node, rank: usize, contents: &Contents) -> Option<Vec<usize>> {
    let given = listed_axes(node, 1, rank, contents)?;
    if given.is_empty() {
        let none = node.attrs.int("noop_with_empty_axes") != 0;
        return Some(if none {
            Vec::new()
        } else {
            (0..rank).collect()
        });
    }
    let mut axes = given;
    axes.sort_unstable();
    Some(axes)
}

fn reduced(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let x = cx.graph.ty(node.ins[0].ok_or("an operand is missing")?);
    let axes =
        reduced_axes(node, x.rank(), cx.contents).ok_or("the reduced axes are not constants")?;
    if has_columns(cx, node) {
        return match axes[..] {
            [] => Err("nothing is reduced"),
            [axis] => reduced_columns(cx, node, Some(axis)),
            _ => reduced_columns(cx, node, None),
        };
    }
    // What leaves rows apart in its result reads them at the same axes.
    let of_result = || match ((cx.known)(node.ins[0]?), (cx.known)(node.outs[0])) {
        (None, Some(Rows::Lead(k))) => axes.iter().all(|a| *a >= k).then_some(k),
        _ => None,
    };
    let k = first_lead(cx, node).or_else(|why| of_result().ok_or(why))?;
    let rows = axes.iter().filter(|a| **a < k).count();
    let out = match rows {
        0 => Rows::Lead(k),
        _ if node.op == &REDUCE_SUM => Rows::Sum,
        _ => return Err("rows are reduced"),
    };
    let mut ins = vec![None; node.ins.len()];
    ins[0] = Some(Rows::Lead(k));
    Ok(Fit {
        ins,
        outs: vec![out],
    })
}

/// Returns the attribute `axis` of a node whose types were checked, from 0.
pub fn axis_of(node: &Node, rank: usize) -> usize {
    from_start(node.attrs.int("axis"), rank)
}

/// Returns an axis that may be counted from the end, from 0.
fn from_start(axis: i64, rank: usize) -> usize {
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

/// An op that works along one axis of its first operand, which is none of the rows': all operands of as many axes have rows.
fn along_axis(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let data = cx.graph.ty(node.ins[0].ok_or("an operand is missing")?);
    let rank = data.rank();
    let k = known_lead(cx, node, rank)
        .or_else(|| known_lead(cx, node, cx.graph.ty(node.outs[0]).rank()))
        .ok_or("rows are mixed")?;
    if axis_of(node, rank) < k {
        return Err("it works along rows");
    }
    let lead = &data.dims[..k];
    let mut ins = Vec::with_capacity(node.ins.len());
    for v in &node.ins {
        let dims = v.map(|v| &cx.graph.ty(v).dims);
        ins.push(match dims {
            Some(dims) if dims.len() == rank && same_dims(&dims[..k], lead) => Some(Rows::Lead(k)),
            Some(dims) if dims.len() >= rank => return Err("an operand has other rows"),
            _ => None,
        });
    }
    Ok(Fit {
        ins,
        outs: vec![Rows::Lead(k); node.outs.len()],
    })
}

fn class_loss(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let grad = usize::from(is_class_loss_grad(node.op));
    let scores = node.ins[grad].ok_or("an operand is missing")?;
    if lead_of_several(&cx.graph.ty(scores).dims, cx.rows) != Some(1) {
        return Err("its rows are others");
    }
    let one = Some(Rows::Lead(1));
    let each = node.attrs.str("reduction") == "none";
    let mut ins = vec![None; node.ins.len()];
    ins[grad] = one;
    ins[grad + 1] = one;
    if grad == 1 && each {
        ins[0] = one;
    }
    let mut outs = vec![Rows::Lead(1); node.outs.len()];
    if grad == 0 && !each {
        outs[0] = Rows::Sum;
    }
    Ok(Fit { ins, outs })
}

fn each_class_loss(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let of_rows = |v: ValueId| lead(&cx.graph.ty(v).dims, cx.rows) == Some(1);
    let ins = node.ins.iter().enumerate().map(|(slot, v)| match v {
        Some(_) if is_class_weight(node.op, slot) => Ok(None),
        Some(v) if of_rows(*v) => Ok(Some(Rows::Lead(1))),
        Some(_) => Err("its rows are others"),
        None => Ok(None),
    });
    Ok(Fit {
        ins: ins.collect::<std::result::Result<_, Reason>>()?,
        outs: vec![Rows::Lead(1); node.outs.len()],
    })
}

fn expanded(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let out = &cx.graph.ty(node.outs[0]).dims;
    let x = node.ins[0].ok_or("an operand is missing")?;
    if out.len() == 2
        && [x, node.outs[0]]
            .iter()
            .any(|v| (cx.known)(*v) == Some(Rows::Last))
    {
        if out[0].as_const().is_none() {
            return Err("the shape of a row is not a constant");
        }
        return Ok(Fit {
            ins: vec![column_of(&cx.graph.ty(x).dims, out)?, None],
            outs: vec![Rows::Last],
        });
    }
    let k = match ((cx.known)(node.outs[0]), (cx.known)(x)) {
        (Some(Rows::Lead(k)), _) => k,
        (_, Some(_)) => lead_of_several(out, cx.rows).ok_or("it takes rows apart")?,
        _ => lead(out, cx.rows).ok_or("it takes rows apart")?,
    };
    row_is_known(cx, node, 1, k)?;
    let data = broadcast(&cx.graph.ty(x).dims, out, k)?;
    Ok(Fit {
        ins: vec![data, None],
        outs: vec![Rows::Lead(k)],
    })
}

fn one_hot(cx: &FitCx, node: &Node) -> std::result::Result<Fit, Reason> {
    let x = node.ins[0].ok_or("an operand is missing")?;
    let rank = cx.graph.ty(x).rank();
    let k = lead(&cx.graph.ty(x).dims, cx.rows).ok_or("its rows are others")?;
    if axis_of(node, rank + 1) < k {
        return Err("classes lie before the rows");
    }
    Ok(Fit {
        ins: vec![Some(Rows::Lead(k)), None, None],
        outs: vec![Rows::Lead(k)],
    })
}
