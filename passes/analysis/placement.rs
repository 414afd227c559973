//! Whether processes can share a batch: each runs the forward pass on its own examples, and nothing but the loss, a mean,
//! mixes them.
//!
//! Examples lie along the one axis whose size mentions the batch size. A value is the same on all ranks if it depends on no
//! example. A node that reads examples must keep them apart ([`examples_apart`]), or be the loss. How many examples there are, and their
//! numbers, differ from rank to rank: they may shape tensors and pick of each example by its number, but not become data.

use crate::analysis::sizes::{DimKind, dim_kinds};
use crate::error::{Error, Result};
use crate::ir::dim::Atom;
use crate::ir::op::{BatchAxes, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Def, Dim, Graph, Id, NodeId, SecondaryMap, ValueId};
use crate::ops::batch_axes::{ApartCx, Reason, examples_apart, is_mean_loss};
use crate::ops::concat::{CONCAT, PAD};
use crate::ops::fill::{CONSTANT_OF_SHAPE, RANGE};
use crate::ops::index::GATHER_ND;
use crate::ops::reduce::REDUCE_MEAN;
use crate::ops::shape::{SHAPE, SIZE};
use std::collections::BTreeSet;

/// The mean that a loss is, over all that all ranks have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mean {
    /// Over labels that are not `ignored`.
    Labels {
        /// The labels.
        labels: ValueId,
        /// The label that does not count.
        ignored: Option<i64>,
    },
    /// Over the elements of a value.
    Elements(ValueId),
}

fn fail(what: impl Into<String>) -> Box<Error> {
    Error::usage("mesh", what)
}

/// Checks that every node of a forward graph keeps examples apart, except the mean that `loss` is. Returns that mean.
///
/// # Errors
/// No batch axis of a named size; a loss that is no mean; a node that mixes examples or has no rule.
pub fn mean_of_examples(graph: &Graph, loss: ValueId) -> Result<Mean> {
    let batch = batch_size_name(graph)?;
    let contents = Contents::known(graph)?;
    let mut axis: SecondaryMap<ValueId, Option<usize>> =
        SecondaryMap::new(graph.value_bound(), None);
    for (id, value) in graph.values() {
        let Some(ty) = &value.ty else { continue };
        let axes: Vec<usize> = (0..ty.rank())
            .filter(|i| mentions(&ty.dims[*i], &batch))
            .collect();
        axis[id] = match axes[..] {
            [] => None,
            [one] if ty.dims[one].exact_div(&Dim::symbol(&batch)).is_some() => Some(one),
            _ => {
                let at = match value.def {
                    Def::Node { node, .. } => graph.describe(node),
                    _ => format!("`{}`", value.name),
                };
                return Err(fail(
                    "a value cannot be placed: its examples have no axis of their own",
                )
                .at(at)
                .found(ty.to_string()));
            }
        };
    }
    let (at, mean) = mean_loss(graph, loss)?;
    let has_examples = |id: NodeId| graph.node(id).operands().any(|v| axis[v].is_some());
    let cx = ApartCx {
        graph,
        contents: &contents,
        axis: &|v| axis[v],
    };
    let mut own = OwnNumbers::default();
    for id in graph.order().iter().copied() {
        let node = graph.node(id);
        let refused = |why: &str| {
            fail(format!("the node cannot be placed on several ranks: {why}"))
                .at(graph.describe(id))
                .help("leave --mesh out, or change the model")
        };
        if own.follow(&cx, id, &batch).map_err(refused)? {
            continue;
        }
        let is_size = node.op == &SHAPE || node.op == &SIZE;
        if !is_size && has_examples(id) && id != at {
            examples_apart(&cx, id).map_err(refused)?;
        }
    }
    if !has_examples(at) {
        return Err(fail("the loss does not depend on the batch").at(graph.describe(at)));
    }
    Ok(mean)
}

/// Integers that only this rank has: how many examples are here, and their numbers.
#[derive(Default)]
struct OwnNumbers {
    /// Values that such a number has a say in.
    any: BTreeSet<usize>,
    /// Values whose elements are the numbers of the examples along their axis.
    numbers: BTreeSet<usize>,
    /// Values of tuples along the last axis, the first of each the number of the example.
    tuples: BTreeSet<usize>,
}

impl OwnNumbers {
    /// Notes what a node makes of such numbers. Returns true if the node needs no other check: it makes numbers of examples, or
    /// picks of each example by its number.
    ///
    /// # Errors
    /// Data would depend on them.
    fn follow(
        &mut self,
        cx: &ApartCx,
        id: NodeId,
        batch: &str,
    ) -> std::result::Result<bool, Reason> {
        let (graph, node) = (cx.graph, cx.graph.node(id));
        let is_in = |set: &BTreeSet<usize>, slot: usize| {
            node.operand(slot).is_some_and(|v| set.contains(&v.index()))
        };
        let outs = node.outs.iter().map(|v| v.index());
        // The same on all ranks, for it does not mention the size of a batch.
        let is_known = node.outs.iter().all(|v| {
            let ints = cx.contents.get(*v);
            ints.is_some_and(|ints| !ints.iter().any(|d| mentions(d, batch)))
        });
        if node.op == &SHAPE || node.op == &SIZE {
            let has_examples = node.operands().any(|v| (cx.axis)(v).is_some());
            if has_examples && !is_known {
                self.any.extend(outs);
            }
            return Ok(true);
        }
        if is_known || !node.operands().any(|v| self.any.contains(&v.index())) {
            return Ok(false);
        }
        let is_int = |v: &ValueId| graph.ty(*v).dtype.is_int();
        let axis = node.outs.first().and_then(|v| (cx.axis)(*v));
        let is_number = |slot: usize, n: i64| {
            let ints = node.operand(slot).and_then(|v| cx.contents.get(v));
            ints.is_some_and(|ints| ints.iter().all(|d| d.as_const() == Some(n)))
        };
        if node.op == &RANGE && axis.is_some() && is_number(0, 0) && is_number(2, 1) {
            self.any.extend(outs.clone());
            self.numbers.extend(outs);
            return Ok(true);
        }
        if node.op == &GATHER_ND && is_in(&self.any, 1) {
            let data = node.operand(0).and_then(cx.axis);
            let by_number = is_in(&self.tuples, 1) && node.attrs.int("batch_dims") == 0;
            let stays = node.operand(1).and_then(cx.axis) == axis;
            return match by_number && stays && data == Some(0) {
                true => Ok(true),
                false => Err("it picks examples by numbers that differ from rank to rank"),
            };
        }
        // What shapes a tensor is not its data.
        let data = node.op.is_layout() || node.op == &CONSTANT_OF_SHAPE || node.op == &PAD;
        let is_shaped = data && !is_in(&self.any, 0) || node.op == &CONSTANT_OF_SHAPE;
        if is_shaped {
            return Ok(false);
        }
        if !node.outs.iter().all(is_int) {
            return Err("it makes data of the number of examples that are here");
        }
        self.any.extend(outs.clone());
        let keeps = node.op.is_layout() || node.op.class == OpClass::Cast;
        if keeps && is_in(&self.numbers, 0) {
            self.numbers.extend(outs.clone());
        }
        let last = |v: ValueId| graph.ty(v).dims.last().is_some_and(Dim::is_one);
        let rank = node.outs.first().map_or(0, |v| graph.ty(*v).rank()) as i64;
        let is_tuple = node.op == &CONCAT && [-1, rank - 1].contains(&node.attrs.int("axis"));
        if is_tuple && is_in(&self.numbers, 0) && node.operand(0).is_some_and(last) {
            self.tuples.extend(outs);
        }
        Ok(false)
    }
}

fn mentions(dim: &Dim, name: &str) -> bool {
    let mut found = false;
    dim.for_each_leaf(&mut |atom| found |= matches!(atom, Atom::Sym(n) if **n == *name));
    found
}

/// Returns the name of the size of the batch axis of all inputs that have one.
fn batch_size_name(graph: &Graph) -> Result<String> {
    let kinds = dim_kinds(graph).into_iter();
    let names: Vec<String> = kinds
        .filter(|(_, kind)| *kind == DimKind::Batch)
        .map(|(name, _)| name)
        .collect();
    match &names[..] {
        [one] => Ok(one.clone()),
        _ => Err(fail("the ranks cannot tell the batch axis")
            .expected("one named size of the batch kind among the inputs")
            .found(match names.is_empty() {
                true => "none".into(),
                false => names.join(", "),
            })
            .help("export the model with a dynamic batch size, or name it with --input")),
    }
}

/// Returns the node that takes the mean, behind casts and views, and the mean.
fn mean_loss(graph: &Graph, loss: ValueId) -> Result<(NodeId, Mean)> {
    let mut at = loss;
    loop {
        let no_mean = |found: String| {
            fail("the loss is no mean over the batch, so ranks cannot share it")
                .expected("a cross-entropy, a likelihood or a mean of all elements")
                .found(found)
        };
        let Some(id) = graph.def_node(at) else {
            return Err(no_mean(format!("`{}`", graph.value(at).name)));
        };
        let node = graph.node(id);
        let Some(x) = node.operand(0) else {
            return Err(no_mean(graph.describe(id)));
        };
        if is_mean_loss(node) && node.op.axes == BatchAxes::ClassLoss {
            if node.operand(2).is_some() {
                return Err(no_mean(format!("class weights in {}", graph.describe(id))));
            }
            let labels = node.operand(1).ok_or_else(|| no_mean(graph.describe(id)))?;
            let ignored = node.attrs.opt_int("ignore_index");
            return Ok((id, Mean::Labels { labels, ignored }));
        }
        if node.op == &REDUCE_MEAN && graph.ty(node.outs[0]).elements().is_one() {
            return Ok((id, Mean::Elements(x)));
        }
        let is_same = node.op.is_layout() || node.op.class == OpClass::Cast;
        if !is_same || !graph.ty(x).elements().is_one() {
            return Err(no_mean(graph.describe(id)));
        }
        at = x;
    }
}
