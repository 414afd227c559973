//! Keys and values that several attentions read.
//!
//! The keys and the values of each attention are followed back through everything elementwise, layout, rotation and norm
//! to their sources: products, graph inputs or tables. Attentions whose keys have the same sources share them. An exporter
//! may repeat heads, scale or transpose once or for each reader, and a model may rotate shared keys again; the answer is
//! the same. Keys are recognised by their role alone: they are the operand of the score product whose axis the softmax
//! runs over. Values are what the probabilities are multiplied with.
//!
//! Sharing breaks the chain of layers, because the keys and values of a layer leave it beside its output. The edges on
//! which shared tensors reach later attentions are collected here, so that the search for layers can ignore them.

use super::attention::Attention;
use super::attention::summary::{AttentionSummary, summary};
use super::matcher::Matcher;
use super::residual_stream::Flow;
use super::symbolic_elements::axis_of;
use crate::ir::op::OpClass;
use crate::ir::{Graph, NodeId, SecondaryMap, Use, ValueId};
use rustc_hash::FxHashSet;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Longest walk from an attention to a product, in nodes. Beyond it, the operand itself counts as the source.
const MAX_WALK: usize = 128;

/// Which of the two operands a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KvOperand {
    /// The keys.
    Keys,
    /// The values.
    Values,
}

/// One tensor that several attentions read, each perhaps in another layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Whether it is read as keys or as values.
    pub operand: KvOperand,
    /// Its sources: results of products, graph inputs; sorted.
    pub sources: Vec<ValueId>,
    /// Indices of the attentions that read it, in order; at least two.
    pub attentions: Vec<usize>,
    /// Edges from nodes that the first attention needs to nodes that only a later one needs.
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
    /// A sliding window.
    Sliding,
    /// All, or all before the query.
    Full,
    /// Some attentions are sliding, others full.
    Mixed,
    /// A mask that comes with the data decides.
    Unknown,
}

impl Reach {
    /// Returns the word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Reach::Sliding => "sliding",
            Reach::Full => "full",
            Reach::Mixed => "mixed",
            Reach::Unknown => "unknown",
        }
    }

    fn of(attention: &AttentionSummary) -> Reach {
        match (attention.window, attention.mask, &attention.obstacle) {
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

/// Parameters that several layers read: one set of weights, applied several times. No activation is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSharing {
    /// The initializers.
    pub parameters: Vec<ValueId>,
    /// The layers, in order.
    pub layers: Vec<usize>,
}

/// Returns the keys and values that pass between layers. What is shared within one layer is not listed.
pub fn between_layers(
    graph: &Graph,
    flow: &Flow,
    shared: &[Shared],
    attentions: &[Attention],
    layer_of: &SecondaryMap<NodeId, Option<usize>>,
) -> Vec<KvSharing> {
    let mut matcher = Matcher::new(graph, flow);
    let mut found: BTreeMap<(Option<usize>, Vec<usize>), KvSharing> = BTreeMap::new();
    for one in shared {
        let makers = one.sources.iter().filter_map(|v| graph.def_node(*v));
        let producer = makers.filter_map(|n| layer_of[n]).max();
        let readers = one.attentions.iter().map(|i| attentions[*i].probabilities);
        let readers = readers.filter_map(|n| layer_of[n]);
        let consumers: BTreeSet<usize> = readers.filter(|l| Some(*l) != producer).collect();
        if consumers.is_empty() || (producer.is_none() && consumers.len() == 1) {
            continue;
        }
        let consumers: Vec<usize> = consumers.into_iter().collect();
        let reaches = one.attentions.iter();
        let reaches = reaches.map(|i| Reach::of(&summary(&mut matcher, &attentions[*i])));
        let reach = reaches.reduce(Reach::and).unwrap_or(Reach::Unknown);
        let new = KvSharing {
            producer,
            consumers: consumers.clone(),
            reach,
            shared: match one.operand {
                KvOperand::Keys => "keys",
                KvOperand::Values => "values",
            },
        };
        let sharing = found.entry((producer, consumers)).or_insert(new.clone());
        sharing.reach = sharing.reach.and(reach);
        if sharing.shared != new.shared {
            sharing.shared = "keys+values";
        }
    }
    found.into_values().collect()
}

/// Returns parameters that more than one layer reads, grouped by the layers. They must be half of what a layer of the
/// group reads, by bytes: small equal parameters that an exporter merged, or a layer that begins early, are no shared
/// layer.
pub fn shared_weights(
    graph: &Graph,
    flow: &Flow,
    layer_of: &SecondaryMap<NodeId, Option<usize>>,
) -> Vec<WeightSharing> {
    let mut groups: BTreeMap<Vec<usize>, (u64, Vec<ValueId>)> = BTreeMap::new();
    let mut read_bytes: BTreeMap<usize, u64> = BTreeMap::new();
    for (id, value) in graph.inits().filter(|(v, _)| flow.is_parameter[*v]) {
        let bytes = value.tensor().map_or(0, |t| t.size_bytes());
        let layers = readers(graph, flow, layer_of, id);
        for layer in &layers {
            *read_bytes.entry(*layer).or_insert(0) += bytes;
        }
        if layers.len() > 1 {
            let group = groups.entry(layers).or_default();
            group.0 += bytes;
            group.1.push(id);
        }
    }
    let groups = groups.into_iter();
    groups
        .filter(|(layers, (bytes, _))| layers.iter().any(|l| 2 * bytes >= read_bytes[l]))
        .map(|(layers, (_, parameters))| WeightSharing { parameters, layers })
        .collect()
}

/// Returns the layers that read a parameter, also through a cast or transpose that layers share.
fn readers(
    graph: &Graph,
    flow: &Flow,
    layer_of: &SecondaryMap<NodeId, Option<usize>>,
    parameter: ValueId,
) -> Vec<usize> {
    let mut layers = BTreeSet::new();
    let mut seen: FxHashSet<ValueId> = FxHashSet::default();
    let mut stack = vec![parameter];
    while let Some(value) = stack.pop() {
        for reader in flow.readers_of(graph, value) {
            let op = graph.node(reader).op;
            if let Some(layer) = layer_of[reader] {
                layers.insert(layer);
            } else if op.is_layout() || op.class == OpClass::Cast {
                let outs = graph.node(reader).outs.iter().copied();
                stack.extend(outs.filter(|v| seen.insert(*v)));
            }
        }
    }
    layers.into_iter().collect()
}

/// One attention that reads a shared tensor.
struct Reader {
    attention: usize,
    operand: Use,
    /// Nodes between the sources and the operand.
    between: FxHashSet<NodeId>,
}

/// Returns everything that two or more attentions read as keys or as values, in the order of its first reader.
pub fn shared(graph: &Graph, flow: &Flow, attentions: &[Attention]) -> Vec<Shared> {
    let mut groups: BTreeMap<(KvOperand, Vec<ValueId>), Vec<Reader>> = BTreeMap::new();
    for (attention, nodes) in attentions.iter().enumerate() {
        let Some([keys, values]) = key_value(graph, nodes) else {
            continue;
        };
        for (which, operand) in [(KvOperand::Keys, keys), (KvOperand::Values, values)] {
            let (sources, between) = walk(graph, flow, operand);
            let group = groups.entry((which, sources)).or_default();
            group.push(Reader {
                attention,
                operand,
                between,
            });
        }
    }
    let mut list: Vec<Shared> = Vec::new();
    for ((operand, sources), readers) in groups.into_iter().filter(|(_, r)| r.len() > 1) {
        let makers = sources.iter().filter_map(|v| graph.def_node(*v));
        let own: FxHashSet<NodeId> = readers[0].between.iter().copied().chain(makers).collect();
        let is_own = |v: ValueId| {
            sources.contains(&v) || graph.def_node(v).is_some_and(|n| own.contains(&n))
        };
        let mut crossings = Vec::new();
        for reader in &readers[1..] {
            let mut private: Vec<NodeId> = reader.between.difference(&own).copied().collect();
            private.sort_unstable();
            let slots =
                |n: NodeId| (0..graph.node(n).ins.len()).map(move |s| Use { node: n, slot: s });
            let uses = private.into_iter().flat_map(slots).chain([reader.operand]);
            crossings.extend(uses.filter(|u| graph.node(u.node).ins[u.slot].is_some_and(&is_own)));
        }
        list.push(Shared {
            operand,
            attentions: readers.iter().map(|r| r.attention).collect(),
            crossings,
            sources,
        });
    }
    list.sort_by_key(|s| (s.attentions[0], s.operand));
    list
}

/// Returns the operand slots of an attention's keys and values; `None` if the softmax runs over neither axis of the
/// scores.
fn key_value(graph: &Graph, attention: &Attention) -> Option<[Use; 2]> {
    let at = |node: NodeId, slot: usize| Use { node, slot };
    if attention.scores == attention.output {
        return Some([at(attention.output, 1), at(attention.output, 2)]);
    }
    let softmax = graph.node(attention.probabilities);
    let rank = graph.ty(softmax.outs[0]).rank();
    let axis = axis_of(softmax.attrs.opt_int("axis").unwrap_or(-1), rank)?;
    // The product with the values has the probabilities on the other side.
    let slot = match rank - axis {
        1 => 1,
        2 => 0,
        _ => return None,
    };
    Some([at(attention.scores, slot), at(attention.output, slot)])
}

/// Returns the products, inputs and tables that an operand is made of, sorted, and the nodes between.
fn walk(graph: &Graph, flow: &Flow, operand: Use) -> (Vec<ValueId>, FxHashSet<NodeId>) {
    let Some(start) = graph.node(operand.node).ins[operand.slot] else {
        return Default::default();
    };
    let mut sources = BTreeSet::new();
    let mut between = FxHashSet::default();
    let mut stack = vec![start];
    while let Some(value) = stack.pop() {
        let maker = graph.def_node(value);
        match maker.filter(|n| !is_source(graph, flow, *n)) {
            Some(_) if between.len() == MAX_WALK => return (vec![start], FxHashSet::default()),
            Some(n) if between.insert(n) => stack.extend(activations(graph, flow, n)),
            Some(_) => {}
            None => {
                sources.insert(value);
            }
        }
    }
    (sources.into_iter().collect(), between)
}

/// Returns operands that are activations: neither parameters nor masks, positions and the like.
fn activations<'g>(
    graph: &'g Graph,
    flow: &'g Flow,
    node: NodeId,
) -> impl Iterator<Item = ValueId> + 'g {
    let operands = graph.node(node).operands();
    operands.filter(|v| flow.active[*v] && !flow.is_parameter[*v])
}

fn is_source(graph: &Graph, flow: &Flow, node: NodeId) -> bool {
    let multiplies = matches!(
        graph.node(node).op.class,
        OpClass::Product | OpClass::BiasedProduct | OpClass::Convolution | OpClass::Attention
    );
    multiplies || flow.position[node].is_none() || activations(graph, flow, node).next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::layers::Layers;
    use crate::testing::{Style, Takes, sharing, transformer};

    fn takes(keys_values: Option<usize>, weights: Option<usize>) -> Takes {
        Takes {
            keys_values,
            weights,
        }
    }

    #[test]
    fn who_reads_whose_keys_whatever_the_exporter_repeats() {
        let maps: [&[Option<usize>]; 5] = [
            // Two types in turn, the last two layers reuse.
            &[None, None, Some(0), Some(1)],
            // Five of one and one of another, four reuse.
            &[&[None; 6][..], &[Some(5); 3], &[Some(4)]].concat(),
            // Every second layer reads the one before it.
            &[None, Some(0), None, Some(2), None, Some(4)],
            // All later layers read one.
            &[None, None, Some(1), Some(1), Some(1)],
            &[None, None, None],
        ];
        for sources in maps {
            for per_reader in [false, true] {
                let model: Vec<Takes> = sources.iter().map(|s| takes(*s, None)).collect();
                let g = sharing(&model, per_reader);
                let layers = Layers::new(&g).unwrap();
                assert_eq!(layers.list.len(), sources.len());
                let mut expected: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
                for (layer, source) in sources.iter().enumerate().filter(|(_, s)| s.is_some()) {
                    expected.entry(*source).or_default().push(layer);
                }
                let found = &layers.kv_sharing;
                assert!(found.iter().all(|s| s.shared == "keys+values"), "{found:?}");
                let found = found.iter().map(|s| (s.producer, s.consumers.clone()));
                assert_eq!(found.collect::<BTreeMap<_, _>>(), expected);
                assert!(layers.shared_weights.is_empty());
                // Keys belong to the layer that makes them, and layers of one make are one repeat.
                let makes = |i: usize| sources[i].is_none();
                for (a, b) in layers.list.iter().zip(&layers.list[1..]) {
                    assert_eq!(a.repeat == b.repeat, makes(a.index) == makes(b.index));
                    assert_eq!(b.inputs[0], g.node(a.last).outs[0]);
                }
            }
        }
    }

    #[test]
    fn shared_weights_are_no_shared_keys() {
        let weights = [None, None, Some(0), None, Some(0)];
        let g = sharing(&weights.map(|of| takes(None, of)), true);
        let layers = Layers::new(&g).unwrap();
        assert_eq!(layers.list.len(), 5);
        assert!(layers.kv_sharing.is_empty());
        let [one] = &layers.shared_weights[..] else {
            panic!("{:?}", layers.shared_weights);
        };
        assert_eq!((&one.layers[..], one.parameters.len()), (&[0, 2, 4][..], 9));
        let plain = Layers::new(&transformer(3, Style::PreNorm)).unwrap();
        assert!(plain.kv_sharing.is_empty() && plain.shared_weights.is_empty());
    }
}
