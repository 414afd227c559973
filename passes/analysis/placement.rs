//! Whether processes can share a batch: each runs the forward pass on its own examples, and nothing but the loss, a mean,
//! mixes them.
//!
//! Examples lie along the one axis whose size mentions the batch size. A value is the same on all ranks if it depends on no
//! example. A node that reads examples must keep them apart ([`examples_apart`]), or be the loss. Ranks may have
//! different numbers of examples, so this number may set the shape of a tensor, but not its elements. Where the model itself sums over
//! ranks, an element of the sum counts as this rank's.

use crate::analysis::sizes::{DimKind, dim_kinds};
use crate::error::{Error, Result};
use crate::ir::dim::Atom;
use crate::ir::op::{BatchAxes, Effect, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Def, Dim, Graph, Node, NodeId, SecondaryMap, ValueId};
use crate::ops::batch_axes::positions::{Place, PositionsCx, examples_apart};
use crate::ops::batch_axes::{Reason, is_mean_loss};
use crate::ops::collective::{ALL_REDUCE, SHARED};
use crate::ops::concat::PAD;
use crate::ops::fill::CONSTANT_OF_SHAPE;
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
    let (at, mean) = mean_loss(graph, loss)?;
    let mut places = places_by_size(graph, &batch)?;
    let count = Dim::symbol(&batch);
    let mut counts = BTreeSet::new();
    for id in graph.order().iter().copied() {
        let node = graph.node(id);
        let refused = |why: &str| {
            fail(format!("the node cannot be placed on several ranks: {why}"))
                .at(graph.describe(id))
                .help("leave --mesh out, or change the model")
        };
        let cx = PositionsCx {
            graph,
            contents: &contents,
            place: &|v| places[v].clone(),
            has_causal_bias: &|_| false,
        };
        follow_counts(&cx, id, &batch, &mut counts).map_err(refused)?;
        let has_examples = node.operands().any(|v| places[v].is_some());
        let draws = node.op.effect == Effect::Seeded && places[node.outs[0]].is_some();
        if is_size(node) || id == at || !(has_examples || draws) {
            continue;
        }
        if node.op == &ALL_REDUCE || node.op == &SHARED {
            places[node.outs[0]] = node.operand(0).and_then(|x| places[x].clone());
            continue;
        }
        let found = examples_apart(&cx, id, &count).map_err(refused)?;
        for (v, place) in node.outs.iter().zip(found) {
            places[*v] = Some(place);
        }
    }
    let operands: Vec<ValueId> = graph.node(at).operands().collect();
    if !operands.iter().any(|v| places[*v].is_some()) {
        return Err(fail("the loss does not depend on the batch").at(graph.describe(at)));
    }
    if let (Mean::Labels { labels, .. }, Some(scores)) = (&mean, operands.first()) {
        // Labels have no axis of classes, which is the second of the scores.
        let of_labels = places[*scores].clone().filter(|place| place.axis != 1);
        let of_labels = of_labels.map(|place| Place {
            axis: place.axis - usize::from(place.axis > 1),
            ..place
        });
        if of_labels.is_none() || of_labels != places[*labels] {
            return Err(
                fail("the loss compares scores with labels of other examples")
                    .at(graph.describe(at)),
            );
        }
    }
    Ok(mean)
}

/// Returns where the examples lie in each value: along the one axis whose size mentions the batch size. If an input has an axis of a
/// multiple of the batch size, each example is assumed to be a stretch of it.
///
/// # Errors
/// A value in which several axes mention the batch size, or none is a multiple of it.
fn places_by_size(graph: &Graph, batch: &str) -> Result<SecondaryMap<ValueId, Option<Place>>> {
    let mut places = SecondaryMap::new(graph.value_bound(), None);
    let len = Dim::symbol(batch);
    for (id, value) in graph.values() {
        let Some(ty) = &value.ty else { continue };
        let axes: Vec<usize> = (0..ty.rank())
            .filter(|i| mentions(&ty.dims[*i], batch))
            .collect();
        let inner = axes.first().and_then(|axis| ty.dims[*axis].exact_div(&len));
        places[id] = match (&axes[..], inner) {
            ([], _) => None,
            ([axis], Some(inner)) => Some(Place {
                axis: *axis,
                outer: Dim::ONE,
                len: len.clone(),
                inner,
            }),
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
    Ok(places)
}

/// Follows integers that depend on this rank's number of examples.
///
/// # Errors
/// Data would depend on them.
fn follow_counts(
    cx: &PositionsCx,
    id: NodeId,
    batch: &str,
    counts: &mut BTreeSet<ValueId>,
) -> std::result::Result<(), Reason> {
    let (graph, node) = (cx.graph, cx.graph.node(id));
    // The same on all ranks, for it does not mention the size of a batch.
    let is_known = node.outs.iter().all(|v| {
        let ints = cx.contents.get(*v);
        ints.is_some_and(|ints| !ints.iter().any(|d| mentions(d, batch)))
    });
    let is_count = match is_size(node) {
        true => node.operands().any(|v| (cx.place)(v).is_some()),
        false => node.operands().any(|v| counts.contains(&v)),
    };
    // What shapes a tensor of examples is not its data.
    let is_count_at = |slot: usize| node.operand(slot).is_some_and(|v| counts.contains(&v));
    let is_data = match node.op {
        op if op == &PAD => is_count_at(0) || is_count_at(2),
        op if op == &CONSTANT_OF_SHAPE => false,
        op => !op.is_layout() || is_count_at(0),
    };
    let shapes = !is_data && node.outs.iter().all(|v| (cx.place)(*v).is_some());
    if is_known || !is_count || shapes {
        return Ok(());
    }
    if !node.outs.iter().all(|v| graph.ty(*v).dtype.is_int()) {
        return Err("it makes data of the number of examples that are here");
    }
    counts.extend(&node.outs);
    Ok(())
}

fn is_size(node: &Node) -> bool {
    node.op == &SHAPE || node.op == &SIZE
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
