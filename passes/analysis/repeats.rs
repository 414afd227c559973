//! Periodic runs along a spine: which stretches of segments repeat.
//!
//! Segments are compared at three levels. *Exact*: a hash up to isomorphism (ops, attributes, types, weight shapes,
//! wiring; never names or weight values). *Mixing*: segments that move information between positions are equal if they
//! do it with as many attentions, so that sliding and full attention, or an attention that reads the keys of another
//! layer, are layers of one kind. *Coarse*: so are segments that multiply by weights and mix nothing, so that a dense
//! layer and one with experts are. The level that covers most of the model wins, then the shortest period, then the
//! finest level; a coarser level than exact only counts where something mixes, or any stack of products would be
//! layers. The search is linear in segments for each period length.

use super::attention::{Attention, weight_of};
use super::residual_stream::{Flow, Stop};
use crate::ir::op::Effect;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, NodeId, ValueId};
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use std::cmp::Reverse;
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// More segments than this in one layer are not looked for.
const MAX_PERIOD: usize = 64;

/// What a segment does, as far as layers of different make are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Does {
    /// Multiplies by no weight.
    Little,
    /// Multiplies by weights, each position by itself.
    Points,
    /// Mixes positions: by that many attentions (a convolution counts as one).
    Mixes(usize),
    /// Mixes positions, and beside it multiplies each by weights.
    Both(usize),
}

/// One spine with its segments, hashed.
pub struct Stretch {
    /// Hashes of each segment: exact, mixing, coarse.
    hashes: [Vec<u64>; 3],
    does: Vec<Does>,
    /// Active nodes in each segment.
    weight: Vec<usize>,
    /// Whether the value that a segment reads from the spine has several active readers.
    branches: Vec<bool>,
}

/// Equal periods in a row.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: usize,
    period: usize,
    repeats: usize,
}

impl Stretch {
    pub fn new(
        graph: &Graph,
        flow: &Flow,
        attentions: &[Attention],
        spine: &[Stop],
        members: &[Vec<NodeId>],
    ) -> Stretch {
        let attends: FxHashMap<NodeId, Attention> =
            attentions.iter().map(|a| (a.probabilities, *a)).collect();
        let mut stretch = Stretch {
            hashes: [Vec::new(), Vec::new(), Vec::new()],
            does: Vec::new(),
            weight: Vec::new(),
            branches: Vec::new(),
        };
        for (i, nodes) in members.iter().enumerate() {
            let from = i.checked_sub(1).map(|p| spine[p]);
            let active: Vec<NodeId> = nodes
                .iter()
                .copied()
                .filter(|n| flow.is_active(graph, *n) && !is_weight(graph, flow, *n))
                .collect();
            let inside: Vec<Attention> = active
                .iter()
                .filter_map(|n| attends.get(n).copied())
                .collect();
            let does = does(graph, flow, &active, &inside);
            let exact = segment_hash(graph, flow, &active, from);
            let token = |does: Does| {
                let mut h = FxHasher::default();
                does.hash(&mut h);
                h.finish()
            };
            let [mixing, coarse] = match does {
                Does::Little => [exact; 2],
                Does::Points => [exact, token(does)],
                Does::Mixes(_) | Does::Both(_) => [token(does); 2],
            };
            for (level, hash) in [exact, mixing, coarse].into_iter().enumerate() {
                stretch.hashes[level].push(hash);
            }
            stretch.does.push(does);
            let branches = match from {
                Some(Stop::Node(n)) => branches(flow.readers(graph, n), graph, flow),
                Some(Stop::Input(v)) => branches(flow.readers_of(graph, v), graph, flow),
                None => false,
            };
            stretch.branches.push(branches);
            stretch.weight.push(active.len());
        }
        stretch
    }

    /// Runs of alike periods in a range of segments, as ranges of segments, in order.
    pub fn runs(&self, range: Range<usize>) -> Vec<impl Iterator<Item = Range<usize>> + use<>> {
        let mut found = Vec::new();
        let mut todo = vec![range];
        while let Some(range) = todo.pop() {
            if let Some(run) = self.best_run(range.clone()) {
                found.push((run.first, run.period, run.repeats));
                todo.push(run.first + run.period * run.repeats..range.end);
                todo.push(range.start..run.first);
            }
        }
        found.sort_unstable();
        let run = |(start, period, repeats): (usize, usize, usize)| {
            (0..repeats).map(move |k| start + k * period..start + (k + 1) * period)
        };
        found.into_iter().map(run).collect()
    }

    /// A hash of segments in a row that is equal for equal ones.
    pub fn hash(&self, range: Range<usize>) -> u64 {
        let mut h = FxHasher::default();
        self.hashes[0][range].hash(&mut h);
        h.finish()
    }

    /// The run that covers most active nodes, of the shortest period, compared as finely as that allows.
    fn best_run(&self, range: Range<usize>) -> Option<Run> {
        let mut best: Option<((usize, Reverse<usize>), Run)> = None;
        for (level, hashes) in self.hashes.iter().enumerate() {
            for period in 1..=MAX_PERIOD.min(range.len() / 2) {
                let mut start = range.start;
                while start + period < range.end {
                    let same = |i: &usize| hashes[*i] == hashes[*i + period];
                    let matched = (start..range.end - period).take_while(same).count();
                    let repeats = (matched + period) / period;
                    if repeats >= 2 && self.may_be_layer(start..start + period, level > 0) {
                        let slack = (matched + period) % period;
                        let offset = (0..=slack)
                            .max_by_key(|o| self.fitness(start + o, period, *o))
                            .unwrap_or(0);
                        let first = start + offset;
                        let covered = self.weight[first..first + period * repeats].iter().sum();
                        let score = (covered, Reverse(period));
                        if best.is_none_or(|(most, _)| score > most) {
                            let run = Run {
                                first,
                                period,
                                repeats,
                            };
                            best = Some((score, run));
                        }
                    }
                    start += matched + 1;
                }
            }
        }
        best.map(|(_, run)| run)
    }

    fn may_be_layer(&self, mut period: Range<usize>, mixes: bool) -> bool {
        period.any(|i| match self.does[i] {
            Does::Little => false,
            Does::Points => !mixes,
            Does::Mixes(_) | Does::Both(_) => true,
        })
    }

    /// How good a place for a block to begin: where the stream branches, what mixes before the rest, early.
    fn fitness(&self, start: usize, period: usize, offset: usize) -> (bool, bool, Reverse<usize>) {
        let mut does = self.does[start..start + period].iter();
        let first = does.find(|d| **d != Does::Little);
        let mixes = matches!(first, Some(Does::Mixes(_) | Does::Both(_)));
        (self.branches[start], mixes, Reverse(offset))
    }
}

fn branches(readers: impl Iterator<Item = NodeId>, graph: &Graph, flow: &Flow) -> bool {
    readers
        .filter(|n| flow.is_active(graph, *n))
        .nth(1)
        .is_some()
}

/// Whether a node only lays out, casts or looks up a weight: to a layer it is the weight.
fn is_weight(graph: &Graph, flow: &Flow, node: NodeId) -> bool {
    let outs = &graph.node(node).outs;
    outs.len() == 1 && weight_of(graph, flow, outs[0]).is_some()
}

/// What the active nodes of a segment, in which these attentions are, do together.
fn does(graph: &Graph, flow: &Flow, active: &[NodeId], attentions: &[Attention]) -> Does {
    let is_inside: FxHashSet<NodeId> = active.iter().copied().collect();
    let of_mixing = nodes_of(graph, flow, attentions, &|n| is_inside.contains(&n));
    let is_weighted = |n: &NodeId| {
        let operands = graph.node(*n).ins.iter().flatten();
        let mut weights = operands.filter_map(|v| weight_of(graph, flow, *v));
        weights.any(|w| graph.ty(w).rank() >= 2)
    };
    let convolves = active
        .iter()
        .any(|n| graph.node(*n).op.class == OpClass::Convolution);
    let beside = active
        .iter()
        .any(|n| !of_mixing.contains(n) && is_weighted(n));
    match (attentions.len(), beside) {
        (0, _) if convolves => Does::Mixes(1),
        (0, true) => Does::Points,
        (0, false) => Does::Little,
        (n, false) => Does::Mixes(n),
        (n, true) => Does::Both(n),
    }
}

/// The nodes among those `inside` that only serve these attentions: all that their operands come from, and what leads
/// from their results to the next product with a weight.
pub fn nodes_of(
    graph: &Graph,
    flow: &Flow,
    attentions: &[Attention],
    inside: &dyn Fn(NodeId) -> bool,
) -> FxHashSet<NodeId> {
    let mut nodes = FxHashSet::default();
    let mut up: Vec<NodeId> = attentions
        .iter()
        .flat_map(|a| [a.scores, a.output])
        .collect();
    while let Some(n) = up.pop() {
        if nodes.insert(n) {
            let operands = graph.node(n).ins.iter().flatten();
            let makers = operands
                .filter(|v| flow.active[**v])
                .filter_map(|v| graph.def_node(*v));
            up.extend(makers.filter(|n| inside(*n)));
        }
    }
    let mut down: Vec<NodeId> = attentions.iter().map(|a| a.output).collect();
    let multiplies = |n: NodeId| {
        let mut ins = graph.node(n).ins.iter().flatten();
        matches!(
            graph.node(n).op.class,
            OpClass::Product | OpClass::BiasedProduct
        ) && ins.any(|v| weight_of(graph, flow, *v).is_some())
    };
    while let Some(n) = down.pop() {
        for reader in flow.readers(graph, n).filter(|r| inside(*r)) {
            if flow.is_active(graph, reader) && nodes.insert(reader) && !multiplies(reader) {
                down.push(reader);
            }
        }
    }
    nodes
}

/// A hash of a segment's active nodes up to isomorphism; `from` is the place on the spine before it.
///
/// Every node's hash covers everything above it within the segment, so the sorted list of hashes is a strong invariant
/// (a Weisfeiler-Lehman hash run to its fixed point along an acyclic graph).
fn segment_hash(graph: &Graph, flow: &Flow, nodes: &[NodeId], from: Option<Stop>) -> u64 {
    let mut of_node: FxHashMap<NodeId, u64> = FxHashMap::default();
    let mut all = Vec::with_capacity(nodes.len());
    for id in nodes {
        let node = graph.node(*id);
        let mut h = FxHasher::default();
        node.op.name.hash(&mut h);
        for (name, value) in node.attrs.iter() {
            name.hash(&mut h);
            format!("{value:?}").hash(&mut h);
        }
        // A gradient rule may ask a node for further results (a norm for its mean): a layer that is differentiated is
        // still equal to one that is not.
        let in_forward = |v: &ValueId| {
            graph
                .value(*v)
                .uses()
                .iter()
                .any(|u| flow.position[u.node].is_some())
        };
        for (slot, out) in node.outs.iter().enumerate() {
            if slot == 0 || in_forward(out) {
                (slot as u32).hash(&mut h);
                hash_type(graph, *out, &mut h);
            }
        }
        for value in &node.ins {
            let Some(value) = value else {
                0u8.hash(&mut h);
                continue;
            };
            match &graph.value(*value).def {
                Def::Node { node: n, slot } if from == Some(Stop::Node(*n)) => {
                    (1u8, slot).hash(&mut h)
                }
                Def::Input if from == Some(Stop::Input(*value)) => (1u8, 0usize).hash(&mut h),
                Def::Node { node: n, slot } => match of_node.get(n) {
                    Some(inner) => (2u8, inner, slot).hash(&mut h),
                    None if weight_of(graph, flow, *value).is_some() => {
                        5u8.hash(&mut h);
                        hash_type(graph, *value, &mut h);
                    }
                    None => {
                        (3u8, flow.active[*value]).hash(&mut h);
                        hash_rank(graph, *value, &mut h);
                    }
                },
                // The stream of a random op is a number of its own in every layer.
                Def::Init(tensor)
                    if !tensor.dtype.is_float()
                        && tensor.elements() <= 64
                        && node.op.effect != Effect::Seeded =>
                {
                    let ints: Vec<Option<i64>> = (0..tensor.elements() as usize)
                        .map(|i| tensor.get_i64(i))
                        .collect();
                    (4u8, ints).hash(&mut h);
                }
                Def::Init(_) => {
                    5u8.hash(&mut h);
                    hash_type(graph, *value, &mut h);
                }
                Def::Input => {
                    6u8.hash(&mut h);
                    hash_rank(graph, *value, &mut h);
                }
            }
        }
        let hash = h.finish();
        of_node.insert(*id, hash);
        all.push(hash);
    }
    all.sort_unstable();
    let mut h = FxHasher::default();
    all.hash(&mut h);
    h.finish()
}

fn hash_rank(graph: &Graph, value: ValueId, h: &mut FxHasher) {
    let ty = graph.ty(value);
    (ty.dtype, ty.rank()).hash(h);
}

/// Element type and fixed sizes; a symbolic size is only "symbolic", since its name may carry a layer's number.
fn hash_type(graph: &Graph, value: ValueId, h: &mut FxHasher) {
    let ty = graph.ty(value);
    ty.dtype.hash(h);
    for dim in &ty.dims {
        dim.as_const().hash(h);
    }
}
