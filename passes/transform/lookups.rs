//! Replaces lookups in integers and booleans that pick all elements in their order by layout ops.
//!
//! In and out: `Typed`. Exporters write a padding mask as `mask[batch, key]`, with index tensors that count up from 0. PyTorch's
//! older exporter even flattens the mask and looks it up at `batch · keys + key`. If the indices are proven to be those of the
//! result ([`Elements`]), a view of the mask replaces the lookup. Other passes understand views.
//! Lookups in floating-point tensors stay: by them other passes recognise trained tables.

use super::dce::dce;
use super::order::order_by_reads;
use crate::analysis::residual_stream::Flow;
use crate::analysis::symbolic_elements::{Elements, index_variable};
use crate::error::Result;
use crate::ir::typing::Contents;
use crate::ir::{Def, Dim, Graph, NodeId, Same, ValueId};
use crate::ops::index::{GATHER, GATHER_ELEMENTS, GATHER_ND};
use crate::ops::shape::{SHAPE, SIZE};
use crate::ops::{Builder, EmitExt};
use std::collections::BTreeMap;

/// A lookup, the value that it is a view of, and for each axis of that value the matching axis of the result; `None` for an axis of
/// size 1 without one.
struct View {
    lookup: NodeId,
    of: ValueId,
    axes: Vec<Option<usize>>,
}

/// Replaces the lookups of a forward graph. Returns whether there were any.
///
/// # Errors
/// Only internal errors: new nodes have the types of those that they replace.
pub fn straighten(graph: &mut Graph) -> Result<bool> {
    let is_lookup = |id: &&NodeId| {
        let node = graph.node(**id);
        let is_read = |v: &ValueId| {
            let mut readers = graph.value(*v).uses().iter().map(|u| graph.node(u.node).op);
            !graph.is_output(*v) && readers.any(|op| op != &SHAPE && op != &SIZE)
        };
        let is_float = |v: &ValueId| graph.ty(*v).dtype.is_float();
        !node.outs.iter().any(is_float)
            && [&GATHER, &GATHER_ND, &GATHER_ELEMENTS].contains(&node.op)
            && node.recompute_of.is_none()
            && node.outs.iter().all(is_read)
    };
    let lookups: Vec<NodeId> = graph.order().iter().filter(is_lookup).copied().collect();
    if lookups.is_empty() {
        return Ok(false);
    }
    let flow = Flow::new(graph)?;
    let mut elements = Elements::new(graph, &flow);
    let found = lookups
        .iter()
        .filter_map(|id| view(graph, &mut elements, *id));
    let found: Vec<View> = found.collect();
    if found.is_empty() {
        return Ok(false);
    }
    let old = graph.order().to_vec();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    let mut instead: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for mut found in found {
        found.of = *instead.get(&found.of).unwrap_or(&found.of);
        let node = b.graph.node(found.lookup);
        (b.loc, b.role, b.prefix) = (node.loc.clone(), node.role, node.name.clone());
        let result = node.outs[0];
        let readers = b.graph.value(result).uses().to_vec();
        let new = emit(&mut b, &found, result)?;
        instead.insert(result, new);
        for reader in readers {
            b.graph.set_operand(reader.node, reader.slot, Some(new));
        }
    }
    order_by_reads(graph, &old)?;
    dce(graph);
    Ok(true)
}

/// Returns the view that a lookup is, if it is one.
fn view(graph: &Graph, elements: &mut Elements, lookup: NodeId) -> Option<View> {
    let dims = &graph.ty(graph.node(lookup).outs[0]).dims;
    elements.enter(dims);
    let index = |axis: usize| match dims[axis].is_one() {
        true => Dim::ZERO,
        false => index_variable(axis),
    };
    let at: Vec<Dim> = (0..dims.len()).map(index).collect();
    let (mut of, mut to) = elements.source(lookup, 0, &at)?;
    loop {
        let shown = &graph.ty(of).dims;
        let axis = |(i, size): (&Dim, &Dim)| {
            if *i == Dim::ZERO {
                return size.is_one().then_some(None);
            }
            let axis = at.iter().position(|own| own == i)?;
            (dims[axis].same(size) == Same::Yes).then_some(Some(axis))
        };
        let axes: Option<Vec<Option<usize>>> = to.iter().zip(shown).map(axis).collect();
        if let Some(axes) = axes {
            let mut seen = std::collections::BTreeSet::new();
            let is_once = axes.iter().flatten().all(|axis| seen.insert(*axis));
            return is_once.then_some(View { lookup, of, axes });
        }
        // The operand may be a view itself.
        let Def::Node { node, slot } = graph.value(of).def else {
            return None;
        };
        if !graph.node(node).op.is_layout() {
            return None;
        }
        (of, to) = elements.source(node, slot, &to)?;
    }
}

/// Emits the view of a lookup with this result.
fn emit(b: &mut Builder, view: &View, result: ValueId) -> Result<ValueId> {
    let ty = b.ty(result).clone();
    let list = |axes: &mut dyn Iterator<Item = usize>| axes.map(|axis| axis as i64).collect();
    let mut new = view.of;
    let kept: Vec<usize> = view.axes.iter().flatten().copied().collect();
    if kept.is_sorted() && b.ty(new).dims == ty.dims {
        return Ok(new);
    }
    let gone: Vec<i64> = list(&mut (0..view.axes.len()).filter(|i| view.axes[*i].is_none()));
    if !gone.is_empty() {
        new = b.squeeze(new, &gone)?;
    }
    let mut turn: Vec<usize> = (0..kept.len()).collect();
    turn.sort_by_key(|i| kept[*i]);
    if !turn.is_sorted() {
        new = b.transpose(new, &list(&mut turn.into_iter()))?;
    }
    let added: Vec<i64> = list(&mut (0..ty.rank()).filter(|axis| !kept.contains(axis)));
    new = b.unsqueeze(new, &added)?;
    if b.ty(new).dims != ty.dims {
        let shape = b.shape(result)?;
        new = b.expand(new, shape)?;
    }
    Ok(new)
}
