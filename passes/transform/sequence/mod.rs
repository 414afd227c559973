//! Runs a causal model chunk by chunk along its sequence: each chunk goes through all layers before the next one starts.
//!
//! In and out: `Typed`, with the loss. If no position reads a later one, the forward pass of a chunk needs the keys and
//! values of earlier chunks, and nothing else of them. Autodiff of the unrolled graph visits the chunks from the last to
//! the first, so gradients of keys and values are complete when their own chunk is reached. Beside keys, values and their
//! gradients, memory then depends on the length of a chunk, not of the sequence. This is exact; sums over positions are
//! rounded differently. What is kept, recomputed or offloaded stays the planner's decision.
//!
//! Keys and values up to a chunk are a chain of concatenations ([`prefixes`]), so that the gradient of a prefix is added up
//! once per chunk. After autodiff each prefix is made of the pieces directly, so the pieces are kept once and every prefix is
//! transient.
//!
//! Positions are followed from one input of tokens through the graph ([`placement`]). Ops say how they treat them
//! (`ops/batch_axes/positions.rs`).

mod emission;
mod placement;
pub mod prefixes;

use crate::analysis::ranges;
use crate::analysis::sizes::Binding;
use crate::error::{Error, Result};
use crate::ir::{Dim, Graph};
use crate::transform::dce::dce;
use crate::transform::infer::infer;
use crate::transform::loss::Seed;
use crate::transform::unsort::unsort;
pub use emission::Chunked;
use placement::{Placement, fail};

/// Most chunks: each one is a copy of the forward pass.
const MAX_CHUNKS: usize = 1024;

/// Parses the value of `--tile-sequence`: a number of chunks, or `off` for one.
///
/// # Errors
/// Another word, or a number below 1.
pub fn parse_chunks(text: &str) -> Result<usize> {
    match (text, text.parse::<usize>()) {
        ("off", _) => Ok(1),
        (_, Ok(n)) if (1..=MAX_CHUNKS).contains(&n) => Ok(n),
        _ => Err(
            Error::usage("tile", format!("a sequence cannot be cut into `{text}`"))
                .expected(format!("off or a number of chunks up to {MAX_CHUNKS}")),
        ),
    }
}

/// Unrolls the forward pass into `count` chunks along the sequence, and lets seeds refer to the new values.
///
/// # Errors
/// A node that reads later positions, or for which there is no rule; sequences that are too short.
pub fn chunk_sequence(
    graph: &mut Graph,
    seeds: &mut [Seed],
    count: usize,
    binding: &Binding,
) -> Result<Chunked> {
    unsort(graph)?;
    let contents = infer(graph)?;
    let placement = Placement::find(graph, &contents, seeds, binding)?;
    let cuts = cuts(graph, &placement.len, count)?;
    let chunked = emission::emit(graph, contents, &placement, &cuts, seeds)?;
    dce(graph);
    Ok(chunked)
}

/// Returns where chunks begin, and the length last. Each chunk has at least one position: a run with fewer positions is
/// outside the range that the graph records.
fn cuts(graph: &mut Graph, len: &Dim, count: usize) -> Result<Vec<Dim>> {
    let too_short = |at: String| {
        fail(format!(
            "the sequence has too few positions for {count} chunks"
        ))
        .expected(format!("{count} or more"))
        .found(at)
    };
    let n = count as i64;
    if let Some(len) = len.as_const() {
        let each = (len + n - 1) / n;
        let starts: Vec<Dim> = (0..len)
            .step_by(each.max(1) as usize)
            .map(Dim::from)
            .collect();
        return match len >= n {
            true => Ok([&starts[..], &[Dim::from(len)]].concat()),
            false => Err(too_short(len.to_string())),
        };
    }
    let Some(name) = len.as_symbol() else {
        return Err(fail("the length of the sequence is not one named size").found(len.to_string()));
    };
    if !ranges::narrow(graph, name, (n, i64::MAX))? {
        return Err(too_short(format!("the model's own range of {name}")));
    }
    let at = |i: i64| len.mul(&Dim::from(i)).div(&Dim::from(n));
    Ok((0..=n).map(at).collect())
}

#[cfg(test)]
mod tests;
