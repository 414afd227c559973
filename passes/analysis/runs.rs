//! Periodic runs along a spine: which stretches of segments repeat.
//!
//! Segments are compared by a hash up to isomorphism: ops, attributes, types, weight shapes and wiring, never names or
//! weight values. The search is linear in segments for each period length.

use super::spine::{Flow, Stop};
use crate::ir::{Def, Graph, NodeId, ValueId};
use crate::ops::kind::{Kind, kind};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// More segments than this in one layer are not looked for.
const MAX_PERIOD: usize = 64;

/// One spine with its segments, hashed.
pub struct Stretch {
    hashes: Vec<u64>,
    /// Active nodes in each segment.
    weight: Vec<usize>,
    /// Whether a segment multiplies by a weight of two or more axes.
    weighted: Vec<bool>,
    /// Whether the value that a segment reads from the spine has several active readers.
    branches: Vec<bool>,
    /// Whether it has a softmax or fused attention.
    attends: Vec<bool>,
}

impl Stretch {
    pub fn new(graph: &Graph, flow: &Flow, spine: &[Stop], members: &[Vec<NodeId>]) -> Stretch {
        let mut stretch = Stretch {
            hashes: Vec::new(),
            weight: Vec::new(),
            weighted: Vec::new(),
            branches: Vec::new(),
            attends: Vec::new(),
        };
        for (i, nodes) in members.iter().enumerate() {
            let from = i.checked_sub(1).map(|p| spine[p]);
            let active: Vec<NodeId> = nodes
                .iter()
                .copied()
                .filter(|n| flow.is_active(graph, *n))
                .collect();
            stretch
                .hashes
                .push(segment_hash(graph, flow, &active, from));
            let reads_weight = |n: &NodeId| {
                let operands = graph.node(*n).ins.iter().flatten();
                operands
                    .into_iter()
                    .any(|v| flow.is_parameter[*v] && graph.ty(*v).rank() >= 2)
            };
            stretch.weighted.push(active.iter().any(reads_weight));
            let attends =
                |n: &NodeId| matches!(kind(graph.node(*n).op), Kind::Softmax | Kind::Attention);
            stretch.attends.push(active.iter().any(attends));
            let outs = match from {
                Some(Stop::Node(n)) => graph.node(n).outs.clone(),
                Some(Stop::Input(v)) => vec![v],
                None => Vec::new(),
            };
            let readers = outs
                .iter()
                .flat_map(|v| graph.value(*v).uses())
                .map(|u| u.node);
            let is_active = |n: &NodeId| flow.position[*n].is_some() && flow.is_active(graph, *n);
            stretch.branches.push(readers.filter(is_active).count() > 1);
            stretch.weight.push(active.len());
        }
        stretch
    }

    /// Runs of equal periods in a range of segments, as ranges of segments, in order.
    pub fn runs(&self, range: Range<usize>) -> Vec<impl Iterator<Item = Range<usize>> + use<>> {
        let mut found = Vec::new();
        let mut todo = vec![range];
        while let Some(range) = todo.pop() {
            if let Some((start, period, repeats)) = self.best_run(range.clone()) {
                found.push((start, period, repeats));
                todo.push(start + period * repeats..range.end);
                todo.push(range.start..start);
            }
        }
        found.sort_unstable();
        let run = |(start, period, repeats): (usize, usize, usize)| {
            (0..repeats).map(move |k| start + k * period..start + (k + 1) * period)
        };
        found.into_iter().map(run).collect()
    }

    /// The run that covers most active nodes, of the shortest period: (first segment, period, repeats).
    fn best_run(&self, range: Range<usize>) -> Option<(usize, usize, usize)> {
        let mut best: Option<(usize, (usize, usize, usize))> = None;
        for period in 1..=MAX_PERIOD.min(range.len() / 2) {
            let mut start = range.start;
            while start + period < range.end {
                let same = |i: &usize| self.hashes[*i] == self.hashes[*i + period];
                let matched = (start..range.end - period).take_while(same).count();
                let repeats = (matched + period) / period;
                if repeats >= 2 && self.weighted[start..start + period].contains(&true) {
                    let slack = (matched + period) % period;
                    let offset = (0..=slack)
                        .max_by_key(|o| self.fitness(start + o, period, *o))
                        .unwrap_or(0);
                    let first = start + offset;
                    let covered: usize = self.weight[first..first + period * repeats].iter().sum();
                    if best.is_none_or(|(most, _)| covered > most) {
                        best = Some((covered, (first, period, repeats)));
                    }
                }
                start += matched + 1;
            }
        }
        best.map(|(_, run)| run)
    }

    /// How good a place for a block to begin: where the stream branches, attention before the rest, early.
    fn fitness(
        &self,
        start: usize,
        period: usize,
        offset: usize,
    ) -> (bool, bool, std::cmp::Reverse<usize>) {
        let first_weighted = (start..start + period).find(|i| self.weighted[*i]);
        let attends = first_weighted.is_some_and(|i| self.attends[i]);
        (self.branches[start], attends, std::cmp::Reverse(offset))
    }
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
                    None => {
                        (3u8, flow.active[*value]).hash(&mut h);
                        hash_rank(graph, *value, &mut h);
                    }
                },
                Def::Init(tensor) if !tensor.dtype.is_float() && tensor.elements() <= 64 => {
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
