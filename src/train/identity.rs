//! Hashes by which a resumed run notices that the model, its plan or the tokenizer is another one.

use super::checkpoint::hex;
use crate::frontend::file::map;
use ckpt_passes::ir::Graph;
use ckpt_passes::transform::remat::strip_plan;
use ckpt_passes::{Result, text};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Bytes at the beginning and at the end of a large weight that are hashed.
const SAMPLE_BYTES: usize = 1 << 16;

/// Returns a hash of a graph's nodes, without the contents of weights.
pub fn plan(graph: &Graph) -> String {
    hex(Sha256::new_with_prefix(text::print(&bare(graph))))
}

/// Returns a hash of a training graph without its plan, and of its weights. Of a large weight it takes both ends.
pub fn model(graph: &Graph) -> String {
    let mut unplanned = bare(graph);
    strip_plan(&mut unplanned);
    let mut hash = Sha256::new_with_prefix(text::print(&unplanned));
    for (_, value) in graph.inits() {
        hash.update(value.name.as_bytes());
        let bytes = value.tensor().and_then(|tensor| tensor.bytes());
        let bytes = bytes.map_or(&[][..], AsRef::as_ref);
        let ends = SAMPLE_BYTES.min(bytes.len());
        hash.update(&bytes[..ends]);
        hash.update(&bytes[bytes.len() - ends..]);
    }
    hex(hash)
}

/// Returns a hash of a file.
///
/// # Errors
/// A file that cannot be read.
pub fn file(path: &Path) -> Result<String> {
    Ok(hex(Sha256::new_with_prefix(map(path)?)))
}

/// Returns the graph without the record of how it was made, which has no say in its numbers.
fn bare(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    graph.meta.clear();
    graph
}
