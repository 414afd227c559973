//! Keeps a slice of each updated parameter on a rank, and gathers the whole before it is read. Where ranks have parts of
//! parameters, slices are those of the rank's part, and the part is gathered.
//!
//! In and out: `Training`, after updates that take slices ([`Shard::Grads`](super::collectives::Shard)). A rank's slice is the
//! input `<parameter>.shard`, which an update overwrites. The parameter stays in the graph: it names the weight, gives the type,
//! and is what a slice begins as. Its contents are read nowhere, so it takes no memory. `AllGather` is a node as any other
//! that may be recomputed: the planner keeps a whole parameter for the backward pass or gathers it again, as time and memory
//! say. Parameters that are not updated stay whole.

use super::optimizer::{SHARD, UPDATED};
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Graph, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::collective::{
    ALL_GATHER, DIMS, GATHER_SLICES, OWN_PART, OWN_SLICE, OwnPart, own_parts,
};
use crate::ops::optimizer::REPLACE;
use crate::ops::{Builder, EmitExt};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Shards the parameters whose slices are updated. Returns whether there is one.
///
/// # Errors
/// None but bugs: the nodes have the types of those that they replace.
pub fn shard_parameters(graph: &mut Graph) -> Result<bool> {
    let old = graph.order().to_vec();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    let bound = b.graph.node_bound();
    let (mut gone, mut instead) = (
        SecondaryMap::new(bound, false),
        SecondaryMap::new(bound, None),
    );
    // By parameter that is read: the node that gathers it.
    let mut gathers = SecondaryMap::new(b.graph.value_bound(), None);
    let parts = own_parts(b.graph).into_iter();
    let parts: BTreeMap<ValueId, OwnPart> = parts.map(|part| (part.input, part)).collect();
    for id in &old {
        let node = b.graph.node(*id);
        let (Some(updates), Some(slice)) = (node.operand(0), node.operand(1)) else {
            continue;
        };
        let part = parts.get(&updates);
        let is_held = b.graph.value(updates).tensor().is_some() || part.is_some();
        if node.op != &GATHER_SLICES || !is_held {
            continue;
        }
        let parameter = part.map_or(updates, |part| part.parameter);
        let (name, updated) = (b.graph.value(parameter).name.clone(), node.outs[0]);
        let (mut attrs, loc) = (node.attrs.clone(), node.loc.clone());
        let mut ty = b.ty(slice).clone();
        ty.dtype = b.ty(parameter).dtype;
        let readers: Vec<_> = b.graph.value(updates).uses().to_vec();
        let shard = match part {
            None => b.graph.add_input(&format!("{name}{SHARD}"), Some(ty)),
            Some(part) => {
                let dims = part.ty(b.graph).static_dims();
                let dims = dims.ok_or_else(|| Error::bug("gather", "a part has no size"))?;
                attrs = attrs.with(DIMS, dims);
                b.graph.set_type(updates, ty);
                updates
            }
        };
        (b.prefix, b.role, b.loc) = (name.clone(), Role::Forward, loc);
        let whole = b.emit(&ALL_GATHER, &[parameter, shard], attrs)?;
        b.graph.rename_value(whole, &format!("{name}.whole"));
        gathers[parameter] = b.graph.def_node(whole);
        for reader in readers {
            let (op, outs) = (
                b.graph.node(reader.node).op,
                b.graph.node(reader.node).outs.clone(),
            );
            if op == &OWN_SLICE {
                b.graph.replace_uses(outs[0], shard);
                gone[reader.node] = true;
            } else if op != &ALL_GATHER && reader.node != *id {
                b.graph.set_operand(reader.node, reader.slot, Some(whole));
            }
        }
        // The update of the slice, or the rounding of the slice's master.
        let maker = b.graph.def_node(slice).map(|n| b.graph.node(n));
        let is_own = maker.is_some_and(|n| n.op.is_update() && n.operand(0) == Some(shard));
        let mut result = slice;
        if !is_own {
            b.role = Role::Backward;
            result = b.emit(&REPLACE, &[shard, slice], Attrs::new())?;
            instead[*id] = b.graph.def_node(result);
        }
        let outputs = b.graph.outputs().iter();
        let outputs = outputs.map(|v| if *v == updated { result } else { *v });
        let outputs = outputs.collect();
        b.graph.set_outputs(outputs);
        b.graph
            .rename_value(result, &format!("{name}{SHARD}{UPDATED}"));
        gone[*id] = true;
    }
    if old.len() == graph.order().len() {
        return Ok(false);
    }
    let mut order: Vec<NodeId> = Vec::with_capacity(graph.order().len());
    for id in &old {
        let read = graph
            .node(*id)
            .operands()
            .filter_map(|v| parameter_of(graph, v));
        for parameter in read.collect::<Vec<ValueId>>() {
            order.extend(gathers[parameter].take());
        }
        order.extend(instead[*id].or((!gone[*id]).then_some(*id)));
    }
    // Nothing reads these.
    let values: Vec<ValueId> = graph.values().map(|(id, _)| id).collect();
    order.extend(values.into_iter().filter_map(|v| gathers[v].take()));
    graph.remove_nodes(&|id| gone[id]);
    graph.set_order(order);
    Ok(true)
}

/// Returns the graph as it would be with parameters as weights, for what looks at the model: whole where each rank keeps a slice,
/// and of the type of a part where it has a part. No node reads an `AllGather` or an `OwnPart` in it.
pub fn with_own_parameters(graph: &Graph) -> Cow<'_, Graph> {
    let mut own = with_whole_parameters(graph);
    for (id, node) in graph.nodes().filter(|(_, node)| node.op == &OWN_PART) {
        if let Some(parameter) = node.operand(1) {
            let own = own.to_mut();
            own.replace_uses(node.outs[0], parameter);
            own.set_type(parameter, graph.ty(node.outs[0]).clone());
            // It is no part of the model.
            own.set_role(id, Role::Backward);
        }
    }
    own
}

/// Returns the graph as it would be with whole parameters, or parts of them, where each rank keeps a slice. Nothing reads an
/// `AllGather` in it.
pub fn with_whole_parameters(graph: &Graph) -> Cow<'_, Graph> {
    let mut whole = Cow::Borrowed(graph);
    for (id, node) in graph.nodes().filter(|(_, node)| node.op == &ALL_GATHER) {
        if let (Some(parameter), Some(shard)) = (node.operand(0), node.operand(1)) {
            let whole = whole.to_mut();
            let is_part = node.attrs.opt_ints(DIMS).is_some();
            if is_part {
                whole.set_type(shard, graph.ty(node.outs[0]).clone());
            }
            whole.replace_uses(node.outs[0], if is_part { shard } else { parameter });
            // It is no part of the model.
            whole.set_role(id, Role::Backward);
        }
    }
    whole
}

/// Returns the parameter of which a value is the whole.
fn parameter_of(graph: &Graph, whole: ValueId) -> Option<ValueId> {
    let node = graph.node(graph.def_node(whole)?);
    (node.op == &ALL_GATHER).then(|| node.operand(0)).flatten()
}
