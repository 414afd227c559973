//! What layers share, as reports show it: keys and values that one layer makes and others read, and weights.

use ckpt_passes::analysis::Layers;
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::ir::Graph;
use serde::Serialize;
use std::fmt::Write;

/// Parameters that several layers read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightSharing {
    /// Indices of the layers.
    pub blocks: Vec<usize>,
    /// Names of initializers.
    pub parameters: Vec<String>,
}

/// Returns the shared weights of all layers, by name.
pub fn shared_weights(graph: &Graph, layers: &Layers) -> Vec<WeightSharing> {
    let shared = layers.shared_weights.iter().map(|s| WeightSharing {
        blocks: s.layers.clone(),
        parameters: s
            .parameters
            .iter()
            .map(|v| graph.value(*v).name.clone())
            .collect(),
    });
    shared.collect()
}

/// Returns one line for each shared key or value; empty where nothing is shared.
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
            s.reach.name()
        );
    }
    out
}

/// Returns `layer 3` or `layers 3, 4`.
pub fn layers(list: &[usize]) -> String {
    let numbers: Vec<String> = list.iter().map(|b| b.to_string()).collect();
    let word = if list.len() == 1 { "layer" } else { "layers" };
    format!("{word} {}", numbers.join(", "))
}
