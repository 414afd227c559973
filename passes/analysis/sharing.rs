//! Keys and values that several attentions read.
//!
//! The keys and the values of each attention are walked back through everything elementwise, layout, rotation and norm
//! to where they come from: the products (or graph inputs, or tables) that made them. Attentions whose keys come from
//! the same place share them. So an exporter may repeat heads, scale or transpose once or for each reader, and a model
//! may rotate shared keys again: the answer is the same. Keys are told from other operands by their role alone: of the
//! score product, the operand whose axis the softmax runs over; values are what the probabilities are multiplied with.
//!
//! Sharing breaks the chain of layers: what leaves a layer is its output *and* its keys and values. The edges on which
//! shared tensors reach later attentions are known here, so that the search for layers can look past them.

use super::attention::Attention;
use super::attention::rows::{Row, row};
use super::matcher::Reading;
use super::residual_stream::Flow;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, Use, ValueId};
use rustc_hash::FxHashSet;
use serde::Serialize;
use std::collections::BTreeMap;

/// Longer ways from a product to an attention are not walked: then the operand itself counts as the source.
const MAX_WALK: usize = 128;

/// The operands of one attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValue {
    pub keys: Use,
    pub values: Use,
}

/// Which of the two a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operand {
    Keys,
    Values,
}

/// One tensor that several attentions read, in some form of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    pub operand: Operand,
    /// Where it comes from: results of products, graph inputs; sorted.
    pub sources: Vec<ValueId>,
    /// Indices of the attentions that read it, in order; at least two.
    pub attentions: Vec<usize>,
    /// Where it passes from what the first attention needs to what only a later one does.
    pub crossings: Vec<Use>,
}

/// A layer whose keys, values or both other layers read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvSharing {
    /// Index of the layer that makes them; `None` if they are made outside the layers.
    pub producer: Option<usize>,
    /// Indices of the other layers whose attention reads them, in order.
    pub consumers: Vec<usize>,
    /// Which keys those attentions see.
    #[serde(rename = "kind")]
    pub reach: Reach,
    /// `keys+values`, `keys` or `values`.
    pub shared: &'static str,
}

/// Which keys the attentions of a group of layers see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reach {
    /// A window that slides.
    Sliding,
    /// All, or all before the query.
    Full,
    /// Some of them the one, some the other.
    Mixed,
    /// A mask that comes with the data decides.
    Unknown,
}

impl Reach {
    pub fn name(self) -> &'static str {
        match self {
            Reach::Sliding => "sliding",
            Reach::Full => "full",
            Reach::Mixed => "mixed",
            Reach::Unknown => "unknown",
        }
    }

    fn of(row: &Row) -> Reach {
        match (row.window, row.mask, &row.obstacle) {
            (Some(_), ..) => Reach::Sliding,
            (None, "none", None) => Reach::Full,
            _ => Reach::Unknown,
        }
    }

    fn and(self, other: Reach) -> Reach {
        match (self, other) {
            (a, b) if a == b => a,
            (Reach::Unknown, _) | (_, Reach::Unknown) => Reach::Unknown,
            _ => Reach::Mixed,
        }
    }
}

/// Parameters that several layers read: one set of weights, applied again. Nothing computed is shared by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSharing {
    pub parameters: Vec<ValueId>,
    /// In order.
    pub blocks: Vec<usize>,
}

/// Keys and values that pass between layers: what is shared within one layer is that layer's own affair.
pub fn between_layers(
    graph: &Graph,
    flow: &Flow,
    shared: &[Shared],
    attentions: &[Attention],
    block_of: &SecondaryMap<NodeId, Option<usize>>,
) -> Vec<KvSharing> {
    let mut reading = Reading::new(graph, flow);
    let mut found: BTreeMap<(Option<usize>, Vec<usize>), (bool, bool, Option<Reach>)> =
        BTreeMap::new();
    for one in shared {
        let makers = one.sources.iter().filter_map(|v| graph.def_node(*v));
        let producer = makers.filter_map(|n| block_of[n]).max();
        let readers = one.attentions.iter().map(|i| attentions[*i].probabilities);
        let mut consumers: Vec<usize> = readers.filter_map(|n| block_of[n]).collect();
        consumers.sort_unstable();
        consumers.dedup();
        consumers.retain(|b| Some(*b) != producer);
        if !consumers.is_empty() && (producer.is_some() || consumers.len() > 1) {
            let what = found.entry((producer, consumers)).or_default();
            match one.operand {
                Operand::Keys => what.0 = true,
                Operand::Values => what.1 = true,
            }
            for i in &one.attentions {
                let reach = Reach::of(&row(graph, &mut reading, &attentions[*i]));
                what.2 = Some(what.2.map_or(reach, |r| r.and(reach)));
            }
        }
    }
    let sharing =
        |((producer, consumers), (keys, values, reach)): (_, (bool, bool, Option<Reach>))| {
            KvSharing {
                producer,
                consumers,
                reach: reach.unwrap_or(Reach::Unknown),
                shared: match (keys, values) {
                    (true, true) => "keys+values",
                    (true, false) => "keys",
                    _ => "values",
                },
            }
        };
    found.into_iter().map(sharing).collect()
}

/// Parameters that more than one layer reads, grouped by the layers; they must be half of what a layer of the group
/// reads, by size: equal small ones that an exporter merged, or a layer that begins early, are no shared layer.
pub fn shared_weights(
    graph: &Graph,
    flow: &Flow,
    block_of: &SecondaryMap<NodeId, Option<usize>>,
) -> Vec<WeightSharing> {
    let mut groups: BTreeMap<Vec<usize>, (u64, Vec<ValueId>)> = BTreeMap::new();
    let mut read_bytes: BTreeMap<usize, u64> = BTreeMap::new();
    for (id, value) in graph.inits().filter(|(v, _)| flow.is_parameter[*v]) {
        let bytes = value.tensor().map_or(0, |t| t.size_bytes());
        let blocks = readers(graph, flow, block_of, id);
        for block in &blocks {
            *read_bytes.entry(*block).or_insert(0) += bytes;
        }
        if blocks.len() > 1 {
            let group = groups.entry(blocks).or_default();
            group.0 += bytes;
            group.1.push(id);
        }
    }
    let is_most = |blocks: &[usize], bytes: u64| {
        let mut of_each = blocks.iter().map(|b| read_bytes[b]);
        of_each.any(|all| 2 * bytes >= all)
    };
    let shared = groups.into_iter();
    shared
        .filter(|(blocks, (bytes, _))| is_most(blocks, *bytes))
        .map(|(blocks, (_, parameters))| WeightSharing { parameters, blocks })
        .collect()
}

/// The layers that read a parameter. A cast or transpose that layers share is outside them; who reads it counts.
fn readers(
    graph: &Graph,
    flow: &Flow,
    block_of: &SecondaryMap<NodeId, Option<usize>>,
    parameter: ValueId,
) -> Vec<usize> {
    let mut blocks = Vec::new();
    let mut seen: FxHashSet<ValueId> = FxHashSet::default();
    let mut stack = vec![parameter];
    while let Some(value) = stack.pop() {
        for reader in flow.readers_of(graph, value) {
            let op = graph.node(reader).op;
            match block_of[reader] {
                Some(block) => blocks.push(block),
                None if op.is_layout() || op.class == OpClass::Cast => {
                    let outs = graph.node(reader).outs.iter().copied();
                    stack.extend(outs.filter(|v| seen.insert(*v)));
                }
                None => {}
            }
        }
    }
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

/// Where an operand comes from, and everything between.
struct Walk {
    sources: Vec<ValueId>,
    between: FxHashSet<NodeId>,
}

/// Everything that two or more attentions read as keys or as values, in the order of its first reader.
pub fn shared(graph: &Graph, flow: &Flow, attentions: &[Attention]) -> Vec<Shared> {
    let mut groups: BTreeMap<(Operand, Vec<ValueId>), Vec<(usize, Use, FxHashSet<NodeId>)>> =
        BTreeMap::new();
    for (i, attention) in attentions.iter().enumerate() {
        let Some(of) = key_value(graph, attention) else {
            continue;
        };
        for (which, operand) in [(Operand::Keys, of.keys), (Operand::Values, of.values)] {
            let walk = walk(graph, flow, operand);
            let group = groups.entry((which, walk.sources)).or_default();
            group.push((i, operand, walk.between));
        }
    }
    let mut list: Vec<Shared> = Vec::new();
    for ((operand, sources), readers) in groups {
        if readers.len() < 2 {
            continue;
        }
        let mut own = readers[0].2.clone();
        own.extend(sources.iter().filter_map(|v| graph.def_node(*v)));
        let is_own = |v: &ValueId| {
            sources.contains(v) || graph.def_node(*v).is_some_and(|n| own.contains(&n))
        };
        let mut crossings = Vec::new();
        for (_, slot, between) in &readers[1..] {
            let mut private: Vec<NodeId> = between.difference(&own).copied().collect();
            private.sort_unstable();
            let slots =
                |n: NodeId| (0..graph.node(n).ins.len()).map(move |slot| Use { node: n, slot });
            for at in private.into_iter().flat_map(slots).chain([*slot]) {
                if graph.node(at.node).ins[at.slot]
                    .as_ref()
                    .is_some_and(is_own)
                {
                    crossings.push(at);
                }
            }
        }
        list.push(Shared {
            operand,
            sources,
            attentions: readers.into_iter().map(|(i, ..)| i).collect(),
            crossings,
        });
    }
    list.sort_by_key(|s| (s.attentions[0], s.operand));
    list
}

/// The operand slots of an attention's keys and values; `None` if the softmax runs over neither axis of the scores.
pub fn key_value(graph: &Graph, attention: &Attention) -> Option<KeyValue> {
    let at = |node: NodeId, slot: usize| Use { node, slot };
    if attention.scores == attention.output {
        return Some(KeyValue {
            keys: at(attention.output, 1),
            values: at(attention.output, 2),
        });
    }
    let softmax = graph.node(attention.probabilities);
    let rank = graph.ty(softmax.outs[0]).rank() as i64;
    let axis = softmax.attrs.opt_int("axis").unwrap_or(-1);
    let axis = if axis < 0 { axis + rank } else { axis };
    let (keys, values) = match rank - axis {
        1 => (1, 1),
        2 => (0, 0),
        _ => return None,
    };
    // The product with the values has the probabilities on the other side.
    Some(KeyValue {
        keys: at(attention.scores, keys),
        values: at(attention.output, values),
    })
}

/// Walks back from an operand to the products, inputs and tables that it is made of.
fn walk(graph: &Graph, flow: &Flow, operand: Use) -> Walk {
    let Some(start) = graph.node(operand.node).ins[operand.slot] else {
        return Walk {
            sources: Vec::new(),
            between: FxHashSet::default(),
        };
    };
    let mut sources = Vec::new();
    let mut between = FxHashSet::default();
    let mut stack = vec![start];
    while let Some(value) = stack.pop() {
        let made = graph
            .def_node(value)
            .filter(|n| !is_source(graph, flow, *n));
        match made {
            Some(n) if between.len() < MAX_WALK => {
                if between.insert(n) {
                    stack.extend(carried(graph, flow, n));
                }
            }
            Some(_) => {
                return Walk {
                    sources: vec![start],
                    between: FxHashSet::default(),
                };
            }
            None => sources.push(value),
        }
    }
    sources.sort_unstable();
    sources.dedup();
    Walk { sources, between }
}

/// Operands that are activations: neither parameters nor masks, positions and the like.
fn carried<'g>(
    graph: &'g Graph,
    flow: &'g Flow,
    node: NodeId,
) -> impl Iterator<Item = ValueId> + 'g {
    let ins = graph.node(node).ins.iter().flatten().copied();
    ins.filter(|v| flow.active[*v] && !flow.is_parameter[*v])
}

fn is_source(graph: &Graph, flow: &Flow, node: NodeId) -> bool {
    let multiplies = matches!(
        graph.node(node).op.class,
        OpClass::Product | OpClass::BiasedProduct | OpClass::Convolution | OpClass::Attention
    );
    multiplies || flow.position[node].is_none() || carried(graph, flow, node).next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Layers;
    use crate::testing::{Takes, sharing, transformer};

    fn of(source: Option<usize>) -> Takes {
        Takes {
            keys_values: source,
            weights: None,
        }
    }

    /// Producer and consumers of everything that is shared, keys and values both.
    fn map(graph: &Graph) -> Vec<(Option<usize>, Vec<usize>)> {
        let found = Layers::new(graph).unwrap().kv_sharing;
        assert!(found.iter().all(|s| s.shared == "keys+values"), "{found:?}");
        found
            .into_iter()
            .map(|s| (s.producer, s.consumers))
            .collect()
    }

    #[test]
    fn who_reads_whose_keys_whatever_the_exporter_repeats() {
        let maps: [&[Option<usize>]; 5] = [
            // Two types in turn, the last two layers reuse.
            &[None, None, Some(0), Some(1)],
            // Five of one and one of another, four reuse.
            &[
                None,
                None,
                None,
                None,
                None,
                None,
                Some(5),
                Some(5),
                Some(5),
                Some(4),
            ],
            // Every second layer reads the one before it.
            &[None, Some(0), None, Some(2), None, Some(4)],
            // All later layers read one.
            &[None, None, Some(1), Some(1), Some(1)],
            &[None, None, None],
        ];
        for sources in maps {
            for per_reader in [false, true] {
                let layers: Vec<Takes> = sources.iter().map(|s| of(*s)).collect();
                let g = sharing(&layers, per_reader);
                let blocks = Layers::new(&g).unwrap();
                assert_eq!(blocks.list.len(), sources.len());
                let mut expected: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
                for (layer, source) in sources.iter().enumerate().filter(|(_, s)| s.is_some()) {
                    expected.entry(*source).or_default().push(layer);
                }
                assert_eq!(map(&g), expected.into_iter().collect::<Vec<_>>());
                assert!(blocks.shared_weights.is_empty());
                // Keys belong to the layer that makes them, and layers of one make are one run.
                let makes = |i: usize| sources[i].is_none();
                for (a, b) in blocks.list.iter().zip(&blocks.list[1..]) {
                    assert_eq!(a.run == b.run, makes(a.index) == makes(b.index));
                    assert_eq!(b.inputs[0], graph_output(&g, a));
                }
            }
        }
    }

    fn graph_output(g: &Graph, block: &crate::analysis::Block) -> ValueId {
        g.node(block.last).outs[0]
    }

    #[test]
    fn shared_weights_are_no_shared_keys() {
        let again = |of| Takes {
            keys_values: None,
            weights: Some(of),
        };
        let g = sharing(&[of(None), of(None), again(0), of(None), again(0)], true);
        let blocks = Layers::new(&g).unwrap();
        assert_eq!(blocks.list.len(), 5);
        assert!(blocks.kv_sharing.is_empty());
        let [one] = &blocks.shared_weights[..] else {
            panic!("{:?}", blocks.shared_weights);
        };
        assert_eq!(
            (one.blocks.as_slice(), one.parameters.len()),
            (&[0, 2, 4][..], 9)
        );
        let plain = Layers::new(&transformer(3, crate::testing::Style::PreNorm)).unwrap();
        assert!(plain.kv_sharing.is_empty() && plain.shared_weights.is_empty());
    }
}
