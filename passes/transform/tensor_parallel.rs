//! Shares the blocks of a model among ranks, each of which has its part of their weights: tensor parallelism from an unsharded
//! model (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053).
//!
//! In and out: `Typed`, before differentiation. [`layer_parts`] says what ranks can share. A rank's part of a weight is the input
//! `<parameter>.shard`, which an update overwrites if it is trained; the initializer stays as name and type, and as what the part
//! begins as. Nodes
//! of a block stay as they are and get smaller types. Their result is summed by an `AllReduce`, and what they read whole goes
//! through `Shared`. A rank looks up the tokens whose rows it has, and zeros for others, which are summed as well. Of a loss over classes, it has
//! the logarithm of its own sum of exponentials for each label, and the label's score if the class is its own. One `AllReduce` exchanges
//! both. Autodiff derives the rest: gradients of parts are local, and gradients of what was shared are summed
//! before they leave the block.

use super::loss::Seed;
use super::optimizer::SHARD;
use super::order::order_by_reads;
use crate::analysis::layer_parts::{LayerParts, layer_parts};
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::verify::verify;
use crate::ir::{Attrs, Def, Dim, Graph, NodeId, Ty, ValueId};
use crate::ops::collective::{
    ALL_REDUCE, IGNORE_INDEX, OWN_INDICES, OWN_PART, OWN_SLICE, Part, REPEATS, ROW_AXES, SHARED,
    SIZE, TENSOR_PARALLEL, of_group, slice_size,
};
use crate::ops::loss::{CLASS_LOSS, CLASS_TERMS, NO_LABEL, counting, label_weight};
use crate::ops::names::{EQUAL, REDUCE_LOG_SUM_EXP, REDUCE_SUM, WHERE};
use crate::ops::reduce::reduce_axes;
use crate::ops::rule::Term;
use crate::ops::{Builder, EmitExt};
use std::collections::{BTreeMap, BTreeSet};

/// The most reasons in a note.
const SHOWN: usize = 3;

/// What was shared.
#[derive(Clone, Debug, Default)]
pub struct SharedLayers {
    /// The number of blocks.
    pub blocks: usize,
    /// The weights of which each rank has a part, each with the input that holds it.
    pub parts: Vec<(ValueId, ValueId)>,
    /// Why products stay whole on every rank, each with its place.
    pub whole: Vec<String>,
    /// The results that ranks add up, which all of them have.
    pub sums: Vec<ValueId>,
    /// The nodes that compute parts of their results, or what is added up.
    pub nodes: BTreeSet<NodeId>,
}

impl SharedLayers {
    /// Returns what the user should know.
    pub fn note(&self, ranks: u32) -> String {
        let note = format!(
            "{} ranks share {} blocks, each with its part of {} weights",
            ranks,
            self.blocks,
            self.parts.len()
        );
        note + &reasons("; whole on every rank", &self.whole)
    }
}

/// Returns a clause that lists the first of some reasons; nothing where there is none.
pub fn reasons(what: &str, all: &[String]) -> String {
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    match all.is_empty() {
        true => String::new(),
        false => format!("{what}: {}{more}", all[..all.len().min(SHOWN)].join("; ")),
    }
}

/// Has `ranks` share what they can of a forward graph with these weights. In `trained`, those of them that are trained, the part
/// of a weight takes the place of the weight.
///
/// # Errors
/// No block that can be shared.
pub fn share_layers(
    graph: &mut Graph,
    seeds: &mut [Seed],
    weights: &[ValueId],
    trained: &mut [ValueId],
    ranks: u32,
) -> Result<SharedLayers> {
    let found = layer_parts(graph, weights, ranks)?;
    let reason = |(id, why): &(NodeId, String)| format!("{}, because {why}", graph.describe(*id));
    let mut done = SharedLayers {
        blocks: found.sums.len() + found.losses.len() + found.lookups.len(),
        whole: found.whole.iter().map(reason).collect(),
        nodes: found.nodes.union(&found.sums).copied().collect(),
        ..SharedLayers::default()
    };
    if done.blocks == 0 {
        let error = Error::usage("mesh", "there is no block that ranks could share")
            .expected(
                "an attention or an MLP whose heads or hidden units are a multiple of the ranks",
            )
            .help("leave tp out of --mesh");
        return Err(match done.whole.is_empty() {
            true => error,
            false => error.found(done.whole[..done.whole.len().min(SHOWN)].join("; ")),
        });
    }
    let of_first = |id: &NodeId| {
        let part = graph.node(*id).operand(0).and_then(|v| found.parts.get(&v));
        part.map(|part| (*id, part.clone()))
    };
    let lookups: Vec<(NodeId, Part)> = found.lookups.iter().filter_map(of_first).collect();
    let losses: Vec<(NodeId, Part)> = found.losses.iter().filter_map(of_first).collect();
    let old = graph.order().to_vec();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    share_what_is_whole(&mut b, &found, trained, ranks)?;
    for (v, part) in &found.own {
        take_own(&mut b, *v, part, &found, ranks)?;
    }
    for (id, listed) in &found.sizes {
        list_own_sizes(&mut b, *id, listed, ranks)?;
    }
    for (v, part) in &found.parts {
        let own_ty = part.ty(b.ty(*v), ranks.into());
        if matches!(b.graph.value(*v).def, Def::Node { .. }) {
            b.graph.set_type(*v, own_ty);
            continue;
        }
        let input = take_part(&mut b, *v, part, own_ty, ranks)?;
        done.parts.push((*v, input));
        for id in trained.iter_mut().filter(|id| **id == *v) {
            *id = input;
        }
    }
    for id in &found.sums {
        instead_of(&mut b, seeds, *id, |b, out| {
            let (sum, result) = sum_of(b, *id, out, ranks)?;
            done.sums.push(sum);
            Ok(result)
        })?;
    }
    for (id, part) in &lookups {
        instead_of(&mut b, seeds, *id, |b, out| {
            let sum = shared_lookup(b, *id, out, part, ranks)?;
            done.sums.push(sum);
            Ok(sum)
        })?;
    }
    for (id, part) in &losses {
        instead_of(&mut b, seeds, *id, |b, _| shared_loss(b, *id, part, ranks))?;
    }
    graph.remove_nodes(&|id| found.losses.contains(&id));
    let old: Vec<NodeId> = old
        .into_iter()
        .filter(|id| !found.losses.contains(id))
        .collect();
    order_by_reads(graph, &old)?;
    // Nodes on parts make the parts that were expected of them.
    verify(graph)?;
    Ok(done)
}

/// Has nodes of blocks read what they read whole by way of `Shared`, where it has a gradient.
fn share_what_is_whole(
    b: &mut Builder,
    found: &LayerParts,
    trained: &[ValueId],
    ranks: u32,
) -> Result<()> {
    let mut whole: BTreeMap<ValueId, Vec<(NodeId, usize)>> = BTreeMap::new();
    for id in found.nodes.iter().chain(&found.sums) {
        let is_sum = found.sums.contains(id);
        for (slot, v) in b.graph.node(*id).ins.iter().enumerate() {
            let is_own = |v: &ValueId| found.parts.contains_key(v) || found.own.contains_key(v);
            let Some(v) = v.filter(|v| !is_own(v)) else {
                continue;
            };
            let has_gradient = match b.graph.value(v).def {
                Def::Node { .. } => b.graph.ty(v).dtype.is_float(),
                Def::Init(_) => trained.contains(&v),
                Def::Input => false,
            };
            // A bias is added to the sum.
            if has_gradient && !(is_sum && slot == 2) {
                whole.entry(v).or_default().push((*id, slot));
            }
        }
    }
    for (v, readers) in whole {
        (b.prefix, b.loc) = (b.graph.value(v).name.clone(), Default::default());
        let shared = b.emit(&SHARED, &[v], of_group(TENSOR_PARALLEL, ranks))?;
        for (id, slot) in &readers {
            b.graph.set_operand(*id, *slot, Some(shared));
        }
    }
    Ok(())
}

/// Has nodes of blocks read a rank's part of a value that every rank has whole.
fn take_own(
    b: &mut Builder,
    v: ValueId,
    part: &Part,
    found: &LayerParts,
    ranks: u32,
) -> Result<()> {
    let readers = b.graph.value(v).uses().to_vec();
    (b.prefix, b.loc) = (b.graph.value(v).name.clone(), Default::default());
    let rows = of_group(TENSOR_PARALLEL, ranks)
        .with(ROW_AXES, part.axis as i64 + 1)
        .with(REPEATS, 1);
    let own = b.emit(&OWN_SLICE, &[v], rows)?;
    let ones: Vec<i64> = (0..part.axis as i64).collect();
    let own = b.unsqueeze(own, &ones)?;
    for u in readers {
        if found.nodes.contains(&u.node) {
            b.graph.set_operand(u.node, u.slot, Some(own));
        }
    }
    Ok(())
}

/// Has a node read the sizes of a rank's part; `listed` is the operand that lists sizes, and the places of those to share.
fn list_own_sizes(
    b: &mut Builder,
    id: NodeId,
    (slot, listed): &(usize, Vec<usize>),
    ranks: u32,
) -> Result<()> {
    let node = b.graph.node(id);
    let sizes = node.operand(*slot);
    let ints = sizes.and_then(|v| b.contents.get(v)).map(<[Dim]>::to_vec);
    let (Some(sizes), Some(ints)) = (sizes, ints) else {
        return Err(Error::bug("mesh", "sizes are not known").at(b.graph.describe(id)));
    };
    (b.prefix, b.loc) = (node.name.clone(), node.loc.clone());
    // 0 and -1 take the size of the part by themselves.
    let is_own = |at: usize| listed.contains(&at) && ints[at].as_const().is_none_or(|n| n > 1);
    let divisors = (0..ints.len()).map(|at| if is_own(at) { i64::from(ranks) } else { 1 });
    let divisors: Vec<i64> = divisors.collect();
    let known: Option<Vec<i64>> = ints.iter().map(Dim::as_const).collect();
    let own = match known {
        Some(known) => {
            let both = known.iter().zip(&divisors);
            let own = both.map(|(n, by)| slice_size(*n, *by));
            b.ints(&own.collect::<Vec<i64>>())
        }
        None => {
            // Rounded up.
            let less: Vec<i64> = divisors.iter().map(|by| by - 1).collect();
            let (divisors, less) = (b.ints(&divisors), b.ints(&less));
            let sizes = b.add(sizes, less)?;
            b.div(sizes, divisors)?
        }
    };
    b.graph.set_operand(id, *slot, Some(own));
    Ok(())
}

/// Has readers of a weight read a rank's part, which is a new input. Returns the input.
fn take_part(
    b: &mut Builder,
    weight: ValueId,
    part: &Part,
    own_ty: Ty,
    ranks: u32,
) -> Result<ValueId> {
    let name = b.graph.value(weight).name.clone();
    let shard = format!("{name}{SHARD}");
    if b.graph.has_value_name(&shard) {
        let what = format!("a part is called `{shard}`, but the model uses that name");
        return Err(Error::model("name", what));
    }
    let readers = b.graph.value(weight).uses().to_vec();
    let input = b.graph.add_input(&shard, Some(own_ty));
    if let Some(origin) = b.graph.origins.get(&weight).cloned() {
        b.graph.origins.insert(input, origin);
    }
    (b.prefix, b.loc) = (name.clone(), Default::default());
    let attrs = part.attrs(TENSOR_PARALLEL, ranks);
    let own = b.emit(&OWN_PART, &[input, weight], attrs)?;
    b.graph.rename_value(own, &format!("{name}.own"));
    for u in readers {
        b.graph.set_operand(u.node, u.slot, Some(own));
    }
    Ok(input)
}

/// Emits something instead of a node's first result, which `emit` may read. It takes over readers, outputs of the graph, seeds and name.
fn instead_of(
    b: &mut Builder,
    seeds: &mut [Seed],
    id: NodeId,
    emit: impl FnOnce(&mut Builder, ValueId) -> Result<ValueId>,
) -> Result<()> {
    let node = b.graph.node(id);
    let out = node.outs[0];
    (b.prefix, b.loc, b.role) = (node.name.clone(), node.loc.clone(), node.role);
    let name = b.graph.value(out).name.clone();
    let readers = b.graph.value(out).uses().to_vec();
    let new = emit(b, out)?;
    for u in readers {
        b.graph.set_operand(u.node, u.slot, Some(new));
    }
    let outputs = b.graph.outputs().iter();
    let outputs = outputs.map(|v| if *v == out { new } else { *v }).collect();
    b.graph.set_outputs(outputs);
    b.graph.rename_value(out, &format!("{name}/own"));
    b.graph.rename_value(new, &name);
    for seed in seeds.iter_mut().filter(|seed| seed.value == out) {
        seed.value = new;
    }
    Ok(())
}

/// Emits the sum of a product over all ranks, and adds the bias to it once. Returns the sum, and the sum with the bias.
fn sum_of(b: &mut Builder, id: NodeId, out: ValueId, ranks: u32) -> Result<(ValueId, ValueId)> {
    let bias = b.graph.node(id).operand(2);
    if bias.is_some() {
        b.graph.set_operand(id, 2, None);
    }
    let sum = b.emit(&ALL_REDUCE, &[out], of_group(TENSOR_PARALLEL, ranks))?;
    match bias {
        Some(bias) => Ok((sum, b.add(sum, bias)?)),
        None => Ok((sum, sum)),
    }
}

/// Makes a lookup read the rank's own rows, with zeros for rows of other ranks, and emits the sum over ranks.
fn shared_lookup(
    b: &mut Builder,
    id: NodeId,
    out: ValueId,
    part: &Part,
    ranks: u32,
) -> Result<ValueId> {
    let indices = b.graph.node(id).ins[1];
    let own = b.emit_n(&OWN_INDICES, vec![indices], in_parts(part, ranks), 2)?;
    b.graph.set_operand(id, 1, Some(own[0]));
    let (from, to) = (b.rank(own[1]) as i64, b.rank(out) as i64);
    let is_own = b.unsqueeze(own[1], &(from..to).collect::<Vec<i64>>())?;
    let zero = b.scalar_like(out, 0.0);
    let rows = b.op(WHERE, &[is_own, out, zero])?;
    b.emit(&ALL_REDUCE, &[rows], of_group(TENSOR_PARALLEL, ranks))
}

/// Returns the attributes of nodes that know of how many indices the rank has its part.
fn in_parts(part: &Part, ranks: u32) -> Attrs {
    of_group(TENSOR_PARALLEL, ranks).with(SIZE, part.size())
}

/// Emits a loss over classes from the scores of the rank's own classes, the first operand of the node.
fn shared_loss(b: &mut Builder, id: NodeId, part: &Part, ranks: u32) -> Result<ValueId> {
    let node = b.graph.node(id);
    let (attrs, is_each) = (node.attrs.clone(), node.op == &CLASS_LOSS);
    let missing = || Error::bug("mesh", "a loss has no scores or no labels");
    let operands = node.operand(0).zip(node.operand(1));
    let (scores, labels) = operands.ok_or_else(missing)?;
    let (weights, dtype) = (node.operand(2), b.ty(node.outs[0]).dtype);
    let ignored = attrs.opt_int(IGNORE_INDEX).unwrap_or(NO_LABEL);
    let attrs = attrs.with(IGNORE_INDEX, ignored);
    let of_labels = in_parts(part, ranks).with(IGNORE_INDEX, ignored);
    let own = b.emit_n(&OWN_INDICES, vec![Some(labels)], of_labels, 2)?;
    let ins = vec![Some(scores), Some(own[0])];
    let terms = b.emit_n(&CLASS_TERMS, ins, in_parts(part, ranks), 2)?;
    let zero = b.scalar_like(terms[1], 0.0);
    let own_score = b.op(WHERE, &[own[1], terms[1], zero])?;
    // A column for the sum of each rank, and one for the score.
    let last = b.rank(labels) as i64;
    let numbers = b.ints(&(0..i64::from(ranks)).collect::<Vec<i64>>());
    let group = || of_group(TENSOR_PARALLEL, ranks);
    let rank = b.emit(&OWN_SLICE, &[numbers], group())?;
    let is_rank = b.op(EQUAL, &[numbers, rank])?;
    let sums = b.unsqueeze(terms[0], &[last])?;
    let sums = b.op(WHERE, &[is_rank, sums, zero])?;
    let own_score = b.unsqueeze(own_score, &[last])?;
    let both = b.concat(&[sums, own_score], last)?;
    let both = b.emit(&ALL_REDUCE, &[both], group())?;
    let both = b.split(both, &[ranks.into(), 1], last)?;
    let sums = reduce_axes(
        b,
        REDUCE_LOG_SUM_EXP,
        Term(both[0]),
        &[last as usize],
        false,
    )?;
    let score = b.squeeze(both[1], &[last])?;
    let mut loss = b.sub(sums, score)?;
    let counts = counting(b, labels, &attrs)?;
    if let Some(weights) = weights {
        // A label that is ignored may be no class.
        let first = b.scalar_like(labels, 0.0);
        let label = b.op(WHERE, &[counts, labels, first])?;
        let each = b.gather(weights, label, 0)?;
        let each = b.cast_like(each, loss)?;
        loss = b.mul(loss, each)?;
    }
    loss = b.op(WHERE, &[counts, loss, zero])?;
    let reduction = if is_each {
        "none"
    } else {
        attrs.str("reduction")
    };
    if reduction != "none" {
        loss = b.emit(REDUCE_SUM, &[loss], Attrs::new().with("keepdims", 0))?;
    }
    if reduction == "mean" {
        let wide = b.dtype(loss);
        let total = label_weight(b, labels, weights, &attrs, wide)?;
        loss = b.div(loss, total)?;
    }
    b.cast(loss, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;
    use crate::transform::infer::infer;

    /// The backward pass starts from what is the same on all ranks, also where that is a lookup.
    #[test]
    fn seeds_follow_what_was_replaced() {
        let source = "graph @g imported (%t: i64[b]) -> (%x) {\n  init %w : f32[9, 4] = splat 0.5\n  %x = Gather %w, %t\n}\n";
        let mut graph = text::parse(source).unwrap();
        infer(&mut graph).unwrap();
        let weight = graph.find_value("w").unwrap();
        let value = graph.outputs()[0];
        let mut seeds = [Seed {
            value,
            cotangent: None,
        }];
        share_layers(&mut graph, &mut seeds, &[weight], &mut [weight], 2).unwrap();
        assert_eq!(graph.outputs(), [seeds[0].value]);
        let maker = graph.def_node(seeds[0].value).unwrap();
        assert_eq!(graph.node(maker).op, &ALL_REDUCE);
    }
}
