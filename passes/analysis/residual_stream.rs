//! The residual stream of a forward graph: the values through which everything that enters a part of the model leaves it.
//!
//! A node post-dominates another if every path from there to the exit passes through it. The residual stream is the chain
//! of immediate post-dominators from the source that is farthest from the exit. Side values (masks, rotary tables, an
//! encoder's output read by every decoder layer) do not break it, because only what flows *from* a stream value matters.
//! Everything between two neighbours on the stream is one segment.
//!
//! Post-dominators of an acyclic graph need one sweep. Lowest common ancestors go by jump pointers, so the total is
//! O(E log V). Names are never looked at.

use super::params::{Selection, parameters};
use crate::error::Result;
use crate::ir::{Graph, NodeId, SecondaryMap, Use, ValueId};
use rustc_hash::FxHashSet;
use std::cmp::Reverse;

/// Most readers of a source that are examined for where some of them meet.
const MAX_NEAR: usize = 8;

/// A point of the residual stream: a floating-point graph input where it begins, a node everywhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPoint {
    /// A floating-point graph input.
    Input(ValueId),
    /// A node.
    Node(NodeId),
}

impl StreamPoint {
    /// Returns the node, unless the point is an input.
    pub fn node(self) -> Option<NodeId> {
        match self {
            StreamPoint::Node(id) => Some(id),
            StreamPoint::Input(_) => None,
        }
    }
}

/// The dataflow of the forward pass of a graph.
pub struct Flow {
    /// Forward nodes that are not copies, in order.
    pub nodes: Vec<NodeId>,
    /// Values that depend on a parameter or on a floating-point input, parameters included.
    pub active: SecondaryMap<ValueId, bool>,
    /// Parameters.
    pub is_parameter: SecondaryMap<ValueId, bool>,
    /// Position in `nodes`.
    pub position: SecondaryMap<NodeId, Option<u32>>,
    /// Edges that the residual stream ignores: keys and values of one layer that the attention of another reads.
    pub crossings: FxHashSet<Use>,
}

impl Flow {
    /// Builds the dataflow of a typed graph, without crossings.
    ///
    /// # Errors
    /// None today: no parameters are selected by patterns.
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
            flow.active[*input] = graph.ty(*input).dtype.is_real();
        }
        for id in graph.order() {
            let node = graph.node(*id);
            if !node.is_forward() {
                continue;
            }
            flow.position[*id] = Some(flow.nodes.len() as u32);
            flow.nodes.push(*id);
            let active = node.operands().any(|v| flow.active[v]);
            for out in &node.outs {
                flow.active[*out] = active && graph.ty(*out).dtype.is_real();
            }
        }
        Ok(flow)
    }

    /// Returns true if a node makes an active value.
    pub fn is_active(&self, graph: &Graph, id: NodeId) -> bool {
        graph.node(id).outs.iter().any(|v| self.active[*v])
    }

    /// Returns the forward nodes that read a result of `id`, with repetitions, but for reads across
    /// [`crossings`](Flow::crossings).
    pub fn readers<'a>(
        &'a self,
        graph: &'a Graph,
        id: NodeId,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let outs = graph.node(id).outs.iter();
        outs.flat_map(|v| self.readers_of(graph, *v))
    }

    /// Returns the readers of a value; see [`Flow::readers`].
    pub fn readers_of<'a>(
        &'a self,
        graph: &'a Graph,
        value: ValueId,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let uses = graph.value(value).uses().iter();
        uses.filter(|u| self.position[u.node].is_some() && !self.crossings.contains(u))
            .map(|u| u.node)
    }

    /// Returns the readers of a point of the residual stream; see [`Flow::readers`].
    pub fn readers_after<'a>(
        &'a self,
        graph: &'a Graph,
        point: StreamPoint,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let values = match point {
            StreamPoint::Node(id) => graph.node(id).outs.clone(),
            StreamPoint::Input(value) => vec![value],
        };
        let values = values.into_iter();
        values.flat_map(|v| self.readers_of(graph, v))
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
    members: Vec<NodeId>,
}

impl PostDominators {
    /// Builds the tree; `None` where nothing is active. The exit is the active node without active readers that the
    /// longest path leads to.
    pub fn new(graph: &Graph, flow: &Flow) -> Option<PostDominators> {
        let mut length: SecondaryMap<NodeId, u32> = SecondaryMap::new(graph.node_bound(), 0);
        let mut exit: Option<NodeId> = None;
        let active = || flow.nodes.iter().filter(|id| flow.is_active(graph, **id));
        for id in active() {
            let longest = graph.operand_nodes(*id).map(|n| length[n]).max();
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
        for id in active().rev().filter(|id| **id != exit) {
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

    /// Returns the nearest node that post-dominates both.
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

    /// Returns the nearest node that post-dominates all readers of a graph input, and the input's height; `None` where no
    /// member reads it.
    fn after_input(&self, graph: &Graph, flow: &Flow, input: ValueId) -> Option<(NodeId, u32)> {
        let readers = flow.readers_of(graph, input).filter(|n| self.depth[*n] > 0);
        let both = readers.map(|n| (n, self.height[n] + 1));
        both.reduce(|(a, x), (b, y)| (self.meet(a, b), x.max(y)))
    }

    /// Returns where residual streams may begin, farthest from the exit first: members, and floating-point graph inputs
    /// that they read.
    pub fn sources(&self, graph: &Graph, flow: &Flow) -> Vec<StreamPoint> {
        let members = self.members.iter().map(|id| {
            let at = flow.position[*id].unwrap_or(0);
            (self.height[*id], at + 1, StreamPoint::Node(*id))
        });
        let inputs = graph.inputs().iter().filter(|v| flow.active[**v]);
        let inputs = inputs.filter_map(|input| {
            let (_, height) = self.after_input(graph, flow, *input)?;
            Some((height, 0, StreamPoint::Input(*input)))
        });
        let mut sources: Vec<(u32, u32, StreamPoint)> = members.chain(inputs).collect();
        // Stable: of equally far sources, inputs come first, then nodes in graph order.
        sources.sort_by_key(|(height, at, _)| (Reverse(*height), *at));
        sources.into_iter().map(|(_, _, point)| point).collect()
    }

    /// Returns the point after a source: the node that post-dominates all its readers. With `near`, it is the node that
    /// post-dominates most of its first few readers, if that is nearer; the other readers feed values that later layers
    /// read.
    fn after(&self, graph: &Graph, flow: &Flow, source: StreamPoint, near: bool) -> Option<NodeId> {
        let all = match source {
            StreamPoint::Node(id) => self.parent[id],
            StreamPoint::Input(value) => self.after_input(graph, flow, value).map(|(n, _)| n),
        };
        if !near {
            return all;
        }
        let readers = flow.readers_after(graph, source);
        let mut readers: Vec<NodeId> = readers.filter(|n| self.depth[*n] > 0).collect();
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

    /// Returns the chain from `source` to the exit, or to the last node before one that `end` refuses; an empty chain
    /// where there is no way. For `near`, see [`after`](Self::after).
    pub fn chain(
        &self,
        graph: &Graph,
        flow: &Flow,
        (source, near): (StreamPoint, bool),
        end: &dyn Fn(NodeId) -> bool,
    ) -> Vec<StreamPoint> {
        let mut at = self.after(graph, flow, source, near);
        if near && at.is_none() {
            return Vec::new();
        }
        let mut chain = vec![source];
        while let Some(n) = at.filter(|n| !end(*n)) {
            chain.push(StreamPoint::Node(n));
            at = self.parent[n];
        }
        chain
    }
}

/// The segment of a residual stream that a forward node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Membership {
    /// No forward node reads it, directly or not.
    Unread,
    /// Only this segment reads it.
    In(u32),
    /// Several segments read it, or none of this stream does.
    Outside,
}

/// Returns the segment of every forward node. The node at index `i` of the stream closes segment `i`. Any other node
/// belongs to the segment of all its readers, a node without readers to the latest segment of its operands.
pub fn segments(
    graph: &Graph,
    flow: &Flow,
    stream: &[StreamPoint],
) -> SecondaryMap<NodeId, Membership> {
    let mut segment_of = SecondaryMap::new(graph.node_bound(), Membership::Unread);
    let points = stream.iter().enumerate();
    for (i, id) in points.filter_map(|(i, point)| Some((i, point.node()?))) {
        segment_of[id] = Membership::In(i as u32);
    }
    for id in flow.nodes.iter().rev() {
        if segment_of[*id] != Membership::Unread {
            continue;
        }
        // Readers that make activations decide, if there are any. Others only ask for sizes, which may serve all layers.
        let readers = || flow.readers(graph, *id);
        let any_active = readers().any(|r| flow.is_active(graph, r));
        let deciding = readers().filter(|r| !any_active || flow.is_active(graph, *r));
        let memberships = deciding.map(|r| segment_of[r]);
        segment_of[*id] = memberships.fold(Membership::Unread, |a, b| match (a, b) {
            (Membership::Unread, x) | (x, Membership::Unread) => x,
            (x, y) if x == y => x,
            _ => Membership::Outside,
        });
    }
    for id in &flow.nodes {
        if segment_of[*id] == Membership::Unread {
            let segments = graph
                .operand_nodes(*id)
                .filter_map(|n| match segment_of[n] {
                    Membership::In(i) => Some(i),
                    _ => None,
                });
            segment_of[*id] = segments.max().map_or(Membership::Outside, Membership::In);
        }
    }
    segment_of
}
