//! The spine of a forward graph: the values through which everything that enters a stretch of the model leaves it.
//!
//! A node post-dominates another if every path from there to the exit passes through it. The chain of immediate
//! post-dominators from the source that is farthest from the exit is the spine; in a residual network it is the residual stream.
//! SecondaryMap values (masks, rotary tables, an encoder's output read by every decoder layer) do not break it, because only
//! what flows *from* a spine value matters. Everything between two neighbours on the spine is one segment.
//!
//! Post-dominators of an acyclic graph need one sweep; lowest common ancestors go by jump pointers, so the whole is
//! O(E log V). Names are never looked at.

use super::params::{Selection, parameters};
use crate::error::Result;
use crate::ir::{Graph, NodeId, Role, SecondaryMap, Use, ValueId};
use rustc_hash::FxHashSet;

/// Readers of a source that are looked at for where some of them meet.
const MAX_NEAR: usize = 8;

/// A place on the spine: a floating-point graph input where it begins, a node everywhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Input(ValueId),
    Node(NodeId),
}

impl Stop {
    pub fn node(self) -> Option<NodeId> {
        match self {
            Stop::Node(id) => Some(id),
            Stop::Input(_) => None,
        }
    }
}

/// What flows where in the forward part of a graph.
pub struct Flow {
    /// Forward nodes that are not copies, in order.
    pub nodes: Vec<NodeId>,
    /// Values that depend on a parameter or on a floating-point input, parameters included.
    pub active: SecondaryMap<ValueId, bool>,
    /// Parameters.
    pub is_parameter: SecondaryMap<ValueId, bool>,
    /// Position in `nodes`.
    pub position: SecondaryMap<NodeId, Option<u32>>,
    /// Edges that the spine is blind to: where keys and values of one layer reach the attention of another.
    pub crossings: FxHashSet<Use>,
}

impl Flow {
    /// # Errors
    /// None today; the parameters are taken as they are.
    pub fn new(graph: &Graph) -> Result<Flow> {
        let mut flow = Flow {
            nodes: Vec::new(),
            active: SecondaryMap::new(graph.value_bound(), false),
            is_parameter: SecondaryMap::new(graph.value_bound(), false),
            position: SecondaryMap::new(graph.node_bound(), None),
            crossings: FxHashSet::default(),
        };
        for parameter in parameters(graph, &Selection::default())? {
            flow.is_parameter[parameter.value] = true;
            flow.active[parameter.value] = true;
        }
        for input in graph.inputs() {
            flow.active[*input] = graph.ty(*input).dtype.is_float();
        }
        for id in graph.order() {
            let node = graph.node(*id);
            if node.role != Role::Forward || node.recompute_of.is_some() {
                continue;
            }
            flow.position[*id] = Some(flow.nodes.len() as u32);
            flow.nodes.push(*id);
            let active = node.ins.iter().flatten().any(|v| flow.active[*v]);
            for out in &node.outs {
                flow.active[*out] = active && graph.ty(*out).dtype.is_float();
            }
        }
        Ok(flow)
    }

    /// Whether a node makes an active value.
    pub fn is_active(&self, graph: &Graph, id: NodeId) -> bool {
        graph.node(id).outs.iter().any(|v| self.active[*v])
    }

    /// Forward nodes that read a result of `id`, with repetitions; not across [`crossings`](Flow::crossings).
    pub fn readers<'a>(
        &'a self,
        graph: &'a Graph,
        id: NodeId,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let outs = graph.node(id).outs.iter();
        outs.flat_map(|v| self.readers_of(graph, *v))
    }

    /// The same of a value.
    pub fn readers_of<'a>(
        &'a self,
        graph: &'a Graph,
        value: ValueId,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let uses = graph.value(value).uses().iter();
        uses.filter(|u| self.position[u.node].is_some() && !self.crossings.contains(u))
            .map(|u| u.node)
    }
}

/// The tree of immediate post-dominators of the active nodes that the exit depends on.
pub struct PostDominators {
    parent: SecondaryMap<NodeId, Option<NodeId>>,
    jump: SecondaryMap<NodeId, Option<NodeId>>,
    /// Steps to the exit in the tree, plus 1; 0 for nodes that are not in the tree.
    depth: SecondaryMap<NodeId, u32>,
    /// Edges on the longest path to the exit in the graph.
    height: SecondaryMap<NodeId, u32>,
    /// Nodes of the tree, in order.
    pub members: Vec<NodeId>,
}

impl PostDominators {
    /// The exit is the active node that nothing in the forward part reads and that the longest path leads to.
    pub fn new(graph: &Graph, flow: &Flow) -> Option<PostDominators> {
        let mut length: SecondaryMap<NodeId, u32> = SecondaryMap::new(graph.node_bound(), 0);
        let mut exit: Option<NodeId> = None;
        for id in &flow.nodes {
            if !flow.is_active(graph, *id) {
                continue;
            }
            let operands = graph.node(*id).ins.iter().flatten();
            let longest = operands
                .filter_map(|v| graph.def_node(*v))
                .map(|n| length[n])
                .max();
            length[*id] = longest.unwrap_or(0) + 1;
            let is_last = !flow.readers(graph, *id).any(|r| flow.is_active(graph, r));
            if is_last && exit.is_none_or(|e| length[*id] > length[e]) {
                exit = Some(*id);
            }
        }
        let exit = exit?;
        let bound = graph.node_bound();
        let mut tree = PostDominators {
            parent: SecondaryMap::new(bound, None),
            jump: SecondaryMap::new(bound, None),
            depth: SecondaryMap::new(bound, 0),
            height: SecondaryMap::new(bound, 0),
            members: vec![exit],
        };
        tree.depth[exit] = 1;
        tree.jump[exit] = Some(exit);
        for id in flow.nodes.iter().rev() {
            if *id == exit || !flow.is_active(graph, *id) {
                continue;
            }
            let mut meet: Option<NodeId> = None;
            for reader in flow.readers(graph, *id) {
                if tree.depth[reader] > 0 {
                    meet = Some(meet.map_or(reader, |m| tree.meet(m, reader)));
                    tree.height[*id] = tree.height[*id].max(tree.height[reader] + 1);
                }
            }
            let Some(parent) = meet else { continue };
            tree.members.push(*id);
            tree.parent[*id] = Some(parent);
            tree.depth[*id] = tree.depth[parent] + 1;
            // Skew-binary jumps: two equal jumps in a row become one.
            let (j, jj) = (tree.jumps(parent), tree.jumps(tree.jumps(parent)));
            let even = tree.depth[parent] - tree.depth[j] == tree.depth[j] - tree.depth[jj];
            tree.jump[*id] = Some(if even { jj } else { parent });
        }
        tree.members.reverse();
        Some(tree)
    }

    fn jumps(&self, id: NodeId) -> NodeId {
        self.jump[id].unwrap_or(id)
    }

    /// The nearest node that post-dominates both.
    fn meet(&self, mut a: NodeId, mut b: NodeId) -> NodeId {
        if self.depth[a] < self.depth[b] {
            std::mem::swap(&mut a, &mut b);
        }
        while self.depth[a] > self.depth[b] {
            let j = self.jumps(a);
            a = if self.depth[j] >= self.depth[b] {
                j
            } else {
                self.parent[a].unwrap_or(j)
            };
        }
        while a != b {
            let (ja, jb) = (self.jumps(a), self.jumps(b));
            (a, b) = if ja != jb {
                (ja, jb)
            } else {
                (self.parent[a].unwrap_or(ja), self.parent[b].unwrap_or(jb))
            };
        }
        a
    }

    /// The nearest node that post-dominates all readers of a graph input, and the input's height; `None` where no
    /// member reads it.
    fn after_input(&self, graph: &Graph, flow: &Flow, input: ValueId) -> Option<(NodeId, u32)> {
        let readers = flow.readers_of(graph, input).filter(|n| self.depth[*n] > 0);
        let both = readers.map(|n| (n, self.height[n] + 1));
        both.reduce(|(a, x), (b, y)| (self.meet(a, b), x.max(y)))
    }

    /// Where spines may begin, farthest from the exit first: members, and floating-point graph inputs they read.
    pub fn sources(&self, graph: &Graph, flow: &Flow) -> Vec<Stop> {
        let mut sources: Vec<(u32, u32, Stop)> = Vec::new();
        for id in &self.members {
            let at = flow.position[*id].unwrap_or(0);
            sources.push((self.height[*id], at + 1, Stop::Node(*id)));
        }
        for input in graph.inputs().iter().filter(|v| flow.active[**v]) {
            if let Some((_, height)) = self.after_input(graph, flow, *input) {
                sources.push((height, 0, Stop::Input(*input)));
            }
        }
        // Stable: equally far nodes in the order of the graph, inputs before them in their own.
        sources.sort_by_key(|(height, at, _)| (std::cmp::Reverse(*height), *at));
        sources.into_iter().map(|(_, _, stop)| stop).collect()
    }

    /// The place after a source: what post-dominates all its readers. With `near`, what post-dominates most of its
    /// first few readers, if that is nearer: the others feed what later layers read.
    fn after(&self, graph: &Graph, flow: &Flow, source: Stop, near: bool) -> Option<NodeId> {
        let all = match source {
            Stop::Node(id) => self.parent[id],
            Stop::Input(value) => self.after_input(graph, flow, value).map(|(n, _)| n),
        };
        if !near {
            return all;
        }
        let mut readers: Vec<NodeId> = match source {
            Stop::Node(id) => flow.readers(graph, id).collect(),
            Stop::Input(value) => flow.readers_of(graph, value).collect(),
        };
        readers.retain(|n| self.depth[*n] > 0);
        readers.sort_unstable_by_key(|n| flow.position[*n]);
        readers.dedup();
        readers.truncate(MAX_NEAR);
        let meets = readers.iter().enumerate().flat_map(|(i, a)| {
            let later = readers[i + 1..].iter();
            later.map(|b| self.meet(*a, *b))
        });
        let mut near = meets.max_by_key(|n| (self.depth[*n], *n))?;
        let is_nearer = |n: NodeId| all.is_none_or(|a| self.depth[n] > self.depth[a]);
        for reader in &readers {
            let both = self.meet(near, *reader);
            if is_nearer(both) {
                near = both;
            }
        }
        is_nearer(near).then_some(near)
    }

    /// From `source` to the exit, or to the last node before one that `end` refuses; empty where there is no way.
    /// For `near`, see [`after`](Self::after).
    pub fn chain(
        &self,
        graph: &Graph,
        flow: &Flow,
        (source, near): (Stop, bool),
        end: &dyn Fn(NodeId) -> bool,
    ) -> Vec<Stop> {
        let mut at = self.after(graph, flow, source, near);
        if near && at.is_none() {
            return Vec::new();
        }
        let mut chain = vec![source];
        while let Some(n) = at.filter(|n| !end(*n)) {
            chain.push(Stop::Node(n));
            at = self.parent[n];
        }
        chain
    }
}

/// Which segment of a spine a forward node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No forward node reads it, directly or not.
    Unread,
    /// Only this segment reads it.
    In(u32),
    /// Several segments read it, or none of this spine does.
    Outside,
}

/// The readers that decide where a node belongs: those that make activations, if any. Others only ask for its sizes,
/// and sizes of one layer may serve all.
fn counted<'a>(graph: &'a Graph, flow: &'a Flow, id: NodeId) -> impl Iterator<Item = NodeId> + 'a {
    let any = flow.readers(graph, id).any(|r| flow.is_active(graph, r));
    flow.readers(graph, id)
        .filter(move |r| !any || flow.is_active(graph, *r))
}

/// The segment of every forward node: the node at place `i` of the spine closes segment `i`; any other node belongs where all its readers
/// do. What nobody reads goes where its operands are.
pub fn segments(graph: &Graph, flow: &Flow, spine: &[Stop]) -> SecondaryMap<NodeId, Place> {
    let mut on_spine: SecondaryMap<NodeId, Option<u32>> =
        SecondaryMap::new(graph.node_bound(), None);
    for (i, stop) in spine.iter().enumerate() {
        if let Stop::Node(id) = stop {
            on_spine[*id] = Some(i as u32);
        }
    }
    let mut place: SecondaryMap<NodeId, Place> =
        SecondaryMap::new(graph.node_bound(), Place::Unread);
    for id in flow.nodes.iter().rev() {
        place[*id] = match on_spine[*id] {
            Some(i) => Place::In(i),
            None => counted(graph, flow, *id)
                .map(|r| place[r])
                .fold(Place::Unread, |a, b| match (a, b) {
                    (Place::Unread, x) | (x, Place::Unread) => x,
                    (x, y) if x == y => x,
                    _ => Place::Outside,
                }),
        };
    }
    for id in &flow.nodes {
        if place[*id] == Place::Unread {
            let operands = graph
                .node(*id)
                .ins
                .iter()
                .flatten()
                .filter_map(|v| graph.def_node(*v));
            let latest = operands
                .filter_map(|n| {
                    if let Place::In(i) = place[n] {
                        Some(i)
                    } else {
                        None
                    }
                })
                .max();
            place[*id] = latest.map_or(Place::Outside, Place::In);
        }
    }
    place
}
