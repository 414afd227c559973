//! Repeats along a residual stream: which sequences of segments recur.
//!
//! Segments are compared at three levels. *Exact*: a hash up to isomorphism (ops, attributes, types, weight shapes,
//! wiring; never names or weight values). *Mixing*: segments that move information between positions are equal if they do
//! so by equally many attentions. Then sliding and full attention, or an attention that reads the keys of another layer,
//! are layers of one kind. *Coarse*: segments that multiply by weights and mix nothing are equal, too. Then a dense layer
//! and one with experts are of one kind. The level that covers most of the model wins, then the shortest period, then the
//! finest level. A coarser level than exact only counts where something mixes, because any stack of products would be
//! layers otherwise. The search is linear in segments for each period length.

use super::attention::{Attention, weight_of};
use super::residual_stream::{Flow, StreamPoint};
use crate::ir::op::Effect;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, NodeId, ValueId};
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use std::cmp::Reverse;
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// Most segments in one layer.
const MAX_PERIOD: usize = 64;

/// What a segment does, as far as layers of different make are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SegmentKind {
    /// Multiplies by no weight.
    Weightless,
    /// Multiplies by weights, each position by itself.
    Pointwise,
    /// Mixes positions: by that many attentions (a convolution counts as one).
    Mixing(usize),
    /// Mixes positions, and multiplies each by weights beside it.
    MixingAndPointwise(usize),
}

impl SegmentKind {
    fn mixes(self) -> bool {
        !matches!(self, SegmentKind::Weightless | SegmentKind::Pointwise)
    }
}

/// The segments of one residual stream, hashed.
pub struct Segments {
    /// Hashes of each segment: exact, mixing, coarse.
    hashes: [Vec<u64>; 3],
    kinds: Vec<SegmentKind>,
    /// Number of active nodes in each segment.
    weight: Vec<usize>,
    /// Whether the value that a segment reads from the stream has several active readers.
    branches: Vec<bool>,
}

/// Equal periods in a row: the first segment, segments in a period, number of periods.
type Repeat = (usize, usize, usize);

impl Segments {
    /// Hashes the segments of a stream, whose nodes are `members`.
    pub fn new(
        graph: &Graph,
        flow: &Flow,
        attentions: &[Attention],
        stream: &[StreamPoint],
        members: &[Vec<NodeId>],
    ) -> Segments {
        let attends: FxHashMap<NodeId, Attention> =
            attentions.iter().map(|a| (a.probabilities, *a)).collect();
        let mut segments = Segments {
            hashes: [Vec::new(), Vec::new(), Vec::new()],
            kinds: Vec::new(),
            weight: Vec::new(),
            branches: Vec::new(),
        };
        for (i, nodes) in members.iter().enumerate() {
            let from = i.checked_sub(1).map(|p| stream[p]);
            let is_counted = |n: &NodeId| flow.is_active(graph, *n) && !is_weight(graph, flow, *n);
            let active: Vec<NodeId> = nodes.iter().copied().filter(is_counted).collect();
            let inside = active.iter().filter_map(|n| attends.get(n).copied());
            let kind = segment_kind(graph, flow, &active, &inside.collect::<Vec<_>>());
            let exact = segment_hash(graph, flow, &active, from);
            let token = hash_of(kind);
            let [mixing, coarse] = match kind {
                SegmentKind::Weightless => [exact; 2],
                SegmentKind::Pointwise => [exact, token],
                _ => [token; 2],
            };
            for (level, hash) in [exact, mixing, coarse].into_iter().enumerate() {
                segments.hashes[level].push(hash);
            }
            segments.kinds.push(kind);
            let readers = from.map(|point| flow.readers_after(graph, point));
            let active_readers = readers.into_iter().flatten();
            let mut active_readers = active_readers.filter(|n| flow.is_active(graph, *n));
            segments.branches.push(active_readers.nth(1).is_some());
            segments.weight.push(active.len());
        }
        segments
    }

    /// Returns the repeats of alike periods in a range of segments, each as ranges of segments, in order.
    pub fn repeats(&self, range: Range<usize>) -> Vec<impl Iterator<Item = Range<usize>> + use<>> {
        let mut found = Vec::new();
        let mut todo = vec![range];
        while let Some(range) = todo.pop() {
            if let Some((first, period, count)) = self.best_repeat(range.clone()) {
                found.push((first, period, count));
                todo.push(first + period * count..range.end);
                todo.push(range.start..first);
            }
        }
        found.sort_unstable();
        let periods = |(start, period, count): Repeat| {
            (0..count).map(move |k| start + k * period..start + (k + 1) * period)
        };
        found.into_iter().map(periods).collect()
    }

    /// Returns a hash that equal sequences of segments share.
    pub fn hash(&self, range: Range<usize>) -> u64 {
        hash_of(&self.hashes[0][range])
    }

    /// Returns the repeat that covers most active nodes, of the shortest period, compared as finely as that allows.
    fn best_repeat(&self, range: Range<usize>) -> Option<Repeat> {
        let mut best: Option<((usize, Reverse<usize>), Repeat)> = None;
        for (level, hashes) in self.hashes.iter().enumerate() {
            for period in 1..=MAX_PERIOD.min(range.len() / 2) {
                let mut start = range.start;
                while start + period < range.end {
                    let same = |i: &usize| hashes[*i] == hashes[*i + period];
                    let matched = (start..range.end - period).take_while(same).count();
                    let count = (matched + period) / period;
                    if count >= 2 && self.may_be_layer(start..start + period, level > 0) {
                        let slack = (matched + period) % period;
                        let offset = (0..=slack)
                            .max_by_key(|o| self.fitness(start + o, period, *o))
                            .unwrap_or(0);
                        let first = start + offset;
                        let covered = self.weight[first..first + period * count].iter().sum();
                        let score = (covered, Reverse(period));
                        if best.is_none_or(|(most, _)| score > most) {
                            best = Some((score, (first, period, count)));
                        }
                    }
                    start += matched + 1;
                }
            }
        }
        best.map(|(_, repeat)| repeat)
    }

    fn may_be_layer(&self, period: Range<usize>, must_mix: bool) -> bool {
        let mut kinds = self.kinds[period].iter();
        kinds.any(|kind| kind.mixes() || *kind == SegmentKind::Pointwise && !must_mix)
    }

    /// Ranks a segment as the first of a layer: where the stream branches, mixing before the rest, early.
    fn fitness(&self, start: usize, period: usize, offset: usize) -> (bool, bool, Reverse<usize>) {
        let mut kinds = self.kinds[start..start + period].iter();
        let first = kinds.find(|kind| **kind != SegmentKind::Weightless);
        let mixes = first.is_some_and(|kind| kind.mixes());
        (self.branches[start], mixes, Reverse(offset))
    }
}

fn hash_of(x: impl Hash) -> u64 {
    let mut h = FxHasher::default();
    x.hash(&mut h);
    h.finish()
}

/// Returns true for nodes that only lay out, cast or look up a weight: a layer counts them as the weight.
fn is_weight(graph: &Graph, flow: &Flow, node: NodeId) -> bool {
    let outs = &graph.node(node).outs;
    outs.len() == 1 && weight_of(graph, flow, outs[0]).is_some()
}

/// Returns what the active nodes of a segment, which contain these attentions, do together.
fn segment_kind(
    graph: &Graph,
    flow: &Flow,
    active: &[NodeId],
    attentions: &[Attention],
) -> SegmentKind {
    let is_inside: FxHashSet<NodeId> = active.iter().copied().collect();
    let of_mixing = nodes_of(graph, flow, attentions, &|n| is_inside.contains(&n));
    let is_weighted = |n: &NodeId| {
        let operands = graph.node(*n).operands();
        let mut weights = operands.filter_map(|v| weight_of(graph, flow, v));
        weights.any(|w| graph.ty(w).rank() >= 2)
    };
    let mut nodes = active.iter();
    let convolves = nodes.any(|n| graph.node(*n).op.class == OpClass::Convolution);
    let mut nodes = active.iter();
    let beside = nodes.any(|n| !of_mixing.contains(n) && is_weighted(n));
    match (attentions.len(), beside) {
        (0, _) if convolves => SegmentKind::Mixing(1),
        (0, true) => SegmentKind::Pointwise,
        (0, false) => SegmentKind::Weightless,
        (n, false) => SegmentKind::Mixing(n),
        (n, true) => SegmentKind::MixingAndPointwise(n),
    }
}

/// Returns the nodes `inside` that only serve these attentions: all that their operands come from, and all from their
/// results to the next product with a weight.
pub fn nodes_of(
    graph: &Graph,
    flow: &Flow,
    attentions: &[Attention],
    inside: &dyn Fn(NodeId) -> bool,
) -> FxHashSet<NodeId> {
    let mut nodes = FxHashSet::default();
    let products = attentions.iter().flat_map(|a| [a.scores, a.output]);
    let mut up: Vec<NodeId> = products.collect();
    while let Some(n) = up.pop() {
        if nodes.insert(n) {
            let operands = graph.node(n).operands().filter(|v| flow.active[*v]);
            let makers = operands.filter_map(|v| graph.def_node(v));
            up.extend(makers.filter(|n| inside(*n)));
        }
    }
    let mut down: Vec<NodeId> = attentions.iter().map(|a| a.output).collect();
    let is_weighted_product = |n: NodeId| {
        let mut operands = graph.node(n).operands();
        matches!(
            graph.node(n).op.class,
            OpClass::Product | OpClass::BiasedProduct
        ) && operands.any(|v| weight_of(graph, flow, v).is_some())
    };
    while let Some(n) = down.pop() {
        for reader in flow.readers(graph, n).filter(|r| inside(*r)) {
            if flow.is_active(graph, reader) && nodes.insert(reader) && !is_weighted_product(reader)
            {
                down.push(reader);
            }
        }
    }
    nodes
}

/// Returns a hash of a segment's active nodes up to isomorphism; `from` is the point of the stream before it.
///
/// Every node's hash covers everything above it within the segment, so the sorted list of hashes is a strong invariant
/// (a Weisfeiler-Lehman hash run to its fixed point along an acyclic graph).
fn segment_hash(graph: &Graph, flow: &Flow, nodes: &[NodeId], from: Option<StreamPoint>) -> u64 {
    let mut of_node: FxHashMap<NodeId, u64> = FxHashMap::default();
    for id in nodes {
        let node = graph.node(*id);
        let mut h = FxHasher::default();
        node.op.name.hash(&mut h);
        for (name, value) in node.attrs.iter() {
            (name, format!("{value:?}")).hash(&mut h);
        }
        // A gradient rule may ask a node for further results (a norm for its mean). A layer that is differentiated still
        // equals one that is not.
        let is_read_forward = |v: ValueId| {
            let mut uses = graph.value(v).uses().iter();
            uses.any(|u| flow.position[u.node].is_some())
        };
        for (slot, out) in node.outs.iter().enumerate() {
            if slot == 0 || is_read_forward(*out) {
                (slot as u32, exact_type(graph, *out)).hash(&mut h);
            }
        }
        for value in &node.ins {
            let Some(value) = *value else {
                0u8.hash(&mut h);
                continue;
            };
            let rank = || (graph.ty(value).dtype, graph.ty(value).rank());
            match &graph.value(value).def {
                Def::Node { node: n, slot } if from == Some(StreamPoint::Node(*n)) => {
                    (1u8, slot).hash(&mut h)
                }
                Def::Input if from == Some(StreamPoint::Input(value)) => (1u8, 0usize).hash(&mut h),
                Def::Node { node: n, slot } => match of_node.get(n) {
                    Some(inner) => (2u8, inner, slot).hash(&mut h),
                    None if weight_of(graph, flow, value).is_some() => {
                        (5u8, exact_type(graph, value)).hash(&mut h)
                    }
                    None => (3u8, flow.active[value], rank()).hash(&mut h),
                },
                // The stream number of a random op differs in every layer.
                Def::Init(tensor)
                    if !tensor.dtype.is_real()
                        && tensor.elements() <= 64
                        && node.op.effect != Effect::Seeded =>
                {
                    let elements = 0..tensor.elements() as usize;
                    let ints: Vec<Option<i64>> = elements.map(|i| tensor.get_i64(i)).collect();
                    (4u8, ints).hash(&mut h);
                }
                Def::Init(_) => (5u8, exact_type(graph, value)).hash(&mut h),
                Def::Input => (6u8, rank()).hash(&mut h),
            }
        }
        of_node.insert(*id, h.finish());
    }
    let mut all: Vec<u64> = of_node.into_values().collect();
    all.sort_unstable();
    hash_of(all)
}

/// Returns element type and fixed sizes. A symbolic size is only "symbolic", because its name may carry a layer's number.
fn exact_type(graph: &Graph, value: ValueId) -> impl Hash {
    let ty = graph.ty(value);
    let sizes: Vec<Option<i64>> = ty.dims.iter().map(|d| d.as_const()).collect();
    (ty.dtype, sizes)
}
