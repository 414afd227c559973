//! Replaces several ops that compute attention, a norm, an activation, rotary positions, unpacked codes or, in 16 bits, a
//! product with a bias by one op.
//!
//! In and out: `Typed`, forward only. Fusing saves memory or time: a fused attention never makes its scores, a fused norm
//! or activation keeps one operand for its gradient where its ops keep several. Values change by rounding only. Patterns
//! are found in the dataflow, never by names. A value that a pattern would remove must have no other reader. Every search
//! is linear in the graph.
//!
//! A second run finds nothing.

mod activation;
mod attention;
mod linear;
mod norm;
mod pattern;
mod rotary;
mod unpacked;

use crate::analysis::matcher::Matcher;
use crate::analysis::residual_stream::Flow;
use crate::error::Result;
use crate::ir::{FusedNode, Graph, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::Builder;
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::order::append_after_operands;
use crate::transform::simplify::simplify;
use pattern::Found;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The number of each kind of op that was put in, by its name in the plural.
pub type Fused = BTreeMap<&'static str, usize>;

/// The searches: each returns the pattern that ends at, or is centred on, a node.
const SEARCHES: [fn(&mut Matcher, NodeId) -> Option<Found>; 6] = [
    unpacked::find,
    norm::find,
    activation::find,
    rotary::find,
    attention::find,
    linear::find,
];

/// Fuses every pattern that is found. Returns what it put in.
///
/// # Errors
/// See [`infer`].
pub fn fuse(graph: &mut Graph) -> Result<Fused> {
    let flow = Flow::new(graph)?;
    let mut matcher = Matcher::new(graph, &flow);
    let mut all: Vec<Found> = Vec::new();
    for search in SEARCHES {
        let nodes = flow.nodes.iter();
        all.extend(nodes.filter_map(|id| search(&mut matcher, *id)));
    }
    let mut fused = Fused::new();
    if all.is_empty() {
        return Ok(fused);
    }
    // Constants of the patterns. A trained tensor stays, whatever becomes of its readers.
    let constants: Vec<ValueId> = graph
        .inits()
        .filter(|(id, v)| !v.uses().is_empty() && !flow.active[*id])
        .map(|(id, _)| id)
        .collect();
    let mut splice = Splice::new(graph)?;
    for found in all {
        splice.replace(&mut fused, found)?;
    }
    let heads = splice.finish()?;
    let parts = parts(graph, &heads);
    dce(graph);
    keep_parts(graph, parts);
    // New nodes may read shapes of values that are no longer made, and sizes may have changed their spelling.
    simplify(graph)?;
    for id in constants {
        let is_unread = |g: &Graph| g.value(id).uses().is_empty() && !g.is_output(id);
        if graph.contains_value(id) && is_unread(graph) {
            graph.remove_source(id);
        }
    }
    Ok(fused)
}

/// Puts new nodes in the places of old ones.
struct Splice<'g> {
    b: Builder<'g>,
    /// New nodes, by the node in whose place they stand.
    placed: SecondaryMap<NodeId, Vec<NodeId>>,
    /// The new value that replaced an old one.
    replaced: FxHashMap<ValueId, ValueId>,
    first_new: usize,
    /// The node that a pattern ended in, and the one that stands for all of it.
    heads: Vec<(NodeId, NodeId)>,
}

impl<'g> Splice<'g> {
    fn new(graph: &'g mut Graph) -> Result<Splice<'g>> {
        let contents = infer(graph)?;
        let first_new = graph.order().len();
        let placed = SecondaryMap::new(graph.node_bound(), Vec::new());
        Ok(Splice {
            b: Builder::resume(graph, contents),
            placed,
            replaced: FxHashMap::default(),
            first_new,
            heads: Vec::new(),
        })
    }

    /// Builds another computation of a value and redirects all readers to it. It takes over the value's name, place and
    /// origin.
    fn replace(&mut self, fused: &mut Fused, mut found: Found) -> Result<()> {
        let old = found.output;
        for operand in found.pattern.operands() {
            if let Some(new) = self.replaced.get(operand) {
                *operand = *new;
            }
        }
        let Some(anchor) = self.b.graph.def_node(old) else {
            return Ok(());
        };
        let node = self.b.graph.node(anchor);
        self.b.loc = node.loc.clone();
        self.b.role = Role::Forward;
        self.b.prefix = node.name.clone();
        let before = self.b.graph.order().len();
        *fused.entry(found.pattern.plural()).or_insert(0) += 1;
        let new = found.pattern.build(&mut self.b)?;
        let made = self.b.graph.order()[before..].to_vec();
        let is_op = |id: &&NodeId| !self.b.graph.node(**id).op.is_layout();
        let head = made.iter().rev().find(is_op).or(made.last());
        self.heads.extend(head.map(|head| (anchor, *head)));
        self.placed[anchor].extend(made);
        let name = self.b.graph.value(old).name.clone();
        self.b.graph.rename_value(old, &format!("{name}/parts"));
        self.b.graph.rename_value(new, &name);
        self.b.graph.replace_uses(old, new);
        self.replaced.insert(old, new);
        Ok(())
    }

    /// Moves new nodes to their places, operands first. Returns the nodes that patterns ended in, with those that stand for
    /// the patterns.
    fn finish(self) -> Result<Vec<(NodeId, NodeId)>> {
        let graph = self.b.graph;
        let old = graph.order()[..self.first_new].to_vec();
        let mut order = Vec::with_capacity(graph.order().len());
        let mut done: SecondaryMap<NodeId, bool> = SecondaryMap::new(graph.node_bound(), false);
        for id in old {
            for next in self.placed[id].iter().chain([&id]) {
                append_after_operands(graph, *next, &mut done, &mut order)?;
            }
        }
        graph.set_order(order);
        Ok(self.heads)
    }
}

/// Returns the nodes that a pattern may have been made of, each with the node that stands for the pattern. Those that
/// [`dce`] leaves have other readers, and are no parts.
fn parts(graph: &Graph, heads: &[(NodeId, NodeId)]) -> Vec<(NodeId, NodeId, FusedNode)> {
    let mut head_of: SecondaryMap<NodeId, Option<NodeId>> =
        SecondaryMap::new(graph.node_bound(), None);
    for (anchor, head) in heads {
        head_of[*anchor] = Some(*head);
    }
    let mut parts = Vec::new();
    for id in graph.order().iter().rev() {
        let node = graph.node(*id);
        let mut readers = node.outs.iter().flat_map(|v| graph.value(*v).uses());
        let head = head_of[*id].or_else(|| readers.find_map(|reader| head_of[reader.node]));
        head_of[*id] = head;
        if let Some(head) = head {
            let part = FusedNode {
                name: node.name.clone(),
                loc: node.loc.clone(),
                op: node.op,
            };
            parts.push((*id, head, part));
        }
    }
    parts
}

/// Notes at each fused node what it was made of.
fn keep_parts(graph: &mut Graph, parts: Vec<(NodeId, NodeId, FusedNode)>) {
    let head_of: FxHashMap<NodeId, NodeId> =
        parts.iter().map(|(id, head, _)| (*id, *head)).collect();
    let mut by_head: BTreeMap<NodeId, Vec<FusedNode>> = BTreeMap::new();
    for (id, mut head, part) in parts.into_iter().rev() {
        if graph.contains_node(id) {
            continue;
        }
        // A fused op may be a part of a larger one.
        while let Some(outer) = head_of.get(&head).filter(|_| !graph.contains_node(head)) {
            head = *outer;
        }
        if graph.contains_node(head) {
            by_head.entry(head).or_default().push(part);
        }
    }
    for (head, parts) in by_head {
        graph.set_fused_from(head, parts);
    }
}
