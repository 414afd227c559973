//! Makes each prefix of keys and values of the pieces themselves, instead of the prefix before it.
//!
//! Through the chain of concatenations a gradient reaches all pieces with one sum per chunk. But to compute one prefix
//! again, a chain needs the one before. In and out: `Training`; no value changes.

use crate::error::Result;
use crate::ir::{Graph, NodeId, ValueId};
use crate::ops::{Builder, EmitExt};
use crate::transform::infer::infer;
use rustc_hash::FxHashMap;

/// Replaces concatenations of a prefix and a piece by concatenations of pieces. `chain` lists them in order.
///
/// # Errors
/// See [`infer`].
pub fn flatten(graph: &mut Graph, chain: &[NodeId]) -> Result<()> {
    let contents = infer(graph)?;
    let mut pieces: FxHashMap<ValueId, Vec<ValueId>> = FxHashMap::default();
    let mut replaced: FxHashMap<NodeId, NodeId> = FxHashMap::default();
    let old = graph.order().to_vec();
    let mut b = Builder::resume(graph, contents);
    for id in chain {
        if !b.graph.contains_node(*id) {
            continue;
        }
        let node = b.graph.node(*id).clone();
        let mut all = Vec::new();
        for v in node.operands() {
            match pieces.get(&v) {
                Some(known) => all.extend(known),
                None => all.push(v),
            }
        }
        let out = node.outs[0];
        let new = match all.len() > node.ins.len() {
            true => {
                b.loc = node.loc.clone();
                b.role = node.role;
                let name = b.graph.value(out).name.clone();
                b.prefix = name.clone();
                let new = b.emit(node.op, &all, node.attrs)?;
                b.graph.replace_uses(out, new);
                b.graph.rename_value(out, &format!("{name}/chain"));
                b.graph.rename_value(new, &name);
                replaced.extend(b.graph.def_node(new).map(|new| (*id, new)));
                new
            }
            false => out,
        };
        pieces.insert(new, all);
    }
    let order = old.iter().map(|id| replaced.get(id).unwrap_or(id)).copied();
    let order: Vec<NodeId> = order.collect();
    let gone: Vec<NodeId> = replaced.into_keys().collect();
    graph.set_order([&order[..], &gone[..]].concat());
    graph.remove_nodes(&|id| gone.contains(&id));
    Ok(())
}
