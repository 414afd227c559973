//! What layers share, as both reports show it: keys and values that pass from one to others, and weights applied again.

use ckpt_passes::analysis::Layers;
use ckpt_passes::ir::Graph;
use serde::Serialize;
use std::fmt::Write;

/// A layer whose keys, values or both other layers read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KvSharing {
    /// Index of the layer that makes them; null if they are made outside the layers.
    pub producer: Option<usize>,
    /// Indices of the other layers whose attention reads them.
    pub consumers: Vec<usize>,
    /// `sliding` or `full`: which keys those attentions see; `mixed` where they differ, `unknown` where the data decides.
    pub kind: &'static str,
    /// `keys+values`, `keys` or `values`.
    pub shared: &'static str,
}

/// Parameters that several layers read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightSharing {
    pub blocks: Vec<usize>,
    /// Names of initializers.
    pub parameters: Vec<String>,
}

pub fn kv_sharing(blocks: &Layers) -> Vec<KvSharing> {
    let one = |s: &ckpt_passes::analysis::sharing::KvSharing| KvSharing {
        producer: s.producer,
        consumers: s.consumers.clone(),
        kind: s.reach.name(),
        shared: match (s.keys, s.values) {
            (true, true) => "keys+values",
            (true, false) => "keys",
            _ => "values",
        },
    };
    blocks.kv_sharing.iter().map(one).collect()
}

pub fn shared_weights(graph: &Graph, blocks: &Layers) -> Vec<WeightSharing> {
    let one = |s: &ckpt_passes::analysis::sharing::WeightSharing| WeightSharing {
        blocks: s.blocks.clone(),
        parameters: s
            .parameters
            .iter()
            .map(|v| graph.value(*v).name.clone())
            .collect(),
    };
    blocks.shared_weights.iter().map(one).collect()
}

/// Lines for people; empty where nothing is shared.
pub fn human(kv: &[KvSharing]) -> String {
    let mut out = String::new();
    for s in kv {
        let producer = s.producer.map_or("made outside the layers".into(), |p| {
            format!("of layer {p}")
        });
        let _ = writeln!(
            out,
            "  {} {producer} are read by {} ({} attention)",
            s.shared.replace('+', " and "),
            layers(&s.consumers),
            s.kind
        );
    }
    out
}

/// `layer 3`, `layers 3, 4`.
pub fn layers(list: &[usize]) -> String {
    let numbers: Vec<String> = list.iter().map(|b| b.to_string()).collect();
    let word = if list.len() == 1 { "layer" } else { "layers" };
    format!("{word} {}", numbers.join(", "))
}
