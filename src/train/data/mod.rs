//! Batches for a training graph from text, tokens or tensors in files.
//!
//! [`open`] matches data to the inputs of a graph, and [`Batches`] hands out batches in an order that a seed decides.
//!
//! - Tokens (`.bin`, `.npy`) and tensors are mapped, never loaded.
//!
//! Examples are numbered. The order of an epoch is a permutation that is computed, so any position can be resumed at
//! once.

mod batches;
mod files;
mod fingerprint;
mod inputs;
mod order;
mod request;
mod spill;
mod token_files;
mod tokens;

pub use batches::Batches;
pub use request::{Batch, DataRequest, Packing, Position, TokenType};

use batches::Source;
use ckpt_passes::ir::Graph;
use ckpt_passes::{Error, Result};
use files::Format;
use fingerprint::Fingerprint;
use inputs::DataInputs;
use std::sync::Arc;
use tokens::{Corpus, TokenSource};

/// Opens data for a typed graph.
///
/// # Errors
/// Data that is absent, damaged, or does not fit the inputs of the graph. The error names file and line or row.
pub fn open(request: &DataRequest, graph: &Graph) -> Result<Batches> {
    if request.batch == 0 {
        return Err(Error::usage("data", "a batch has no examples").expected("1 or more"));
    }
    let wanted = DataInputs::of(graph, request.batch, request.sequence)?;
    let mut print = Fingerprint::default();
    let mut corpus = Corpus::default();
    for shard in files::shards(&request.paths)? {
        let stream = match shard.format {
            Format::RawTokens => token_files::raw(&shard.path, request.token_type)?,
            Format::Npy => token_files::numpy(&shard.path)?,
            _ => return Err(Error::usage("data", "this format is not read yet").at(shard.name())),
        };
        let name = shard.path.file_name().unwrap_or_default();
        print.put("file", name.as_encoded_bytes());
        print.put_sample("tokens", stream.tokens.bytes().map_or(&[], AsRef::as_ref));
        corpus.streams.push(stream);
    }
    let source = TokenSource::new(corpus, request, &wanted)?;
    print.put("sequence", &source.sequence().to_le_bytes());
    print.put(
        "packing",
        format!("{:?} {:?}", request.packing, request.token_type).as_bytes(),
    );
    let source: Arc<dyn Source> = Arc::new(source);
    check_batches(request, &wanted, source.examples())?;
    let order = request.shuffle.then_some(request.seed);
    print.put("order", format!("{order:?}").as_bytes());
    Ok(Batches::new(source, request, print.finish(), Vec::new()))
}

/// Checks that the examples make batches that the graph takes.
fn check_batches(request: &DataRequest, wanted: &DataInputs, examples: u64) -> Result<()> {
    if let Some(fixed) = wanted.fixed_batch() {
        if fixed != request.batch {
            return Err(Error::usage("data", "the graph has another batch size")
                .expected(format!("{fixed} examples"))
                .found(format!("{} examples", request.batch)));
        }
        if !request.drop_last && examples % fixed != 0 {
            return Err(
                Error::usage("data", "the last batch is shorter than the graph allows")
                    .expected(format!("{fixed} examples"))
                    .found(format!("{} examples", examples % fixed))
                    .help("leave it out with --drop-last"),
            );
        }
    }
    if request.drop_last && examples < request.batch {
        return Err(
            Error::usage("data", "there are fewer examples than a batch has")
                .expected(format!("{} examples", request.batch))
                .found(format!("{examples} examples")),
        );
    }
    Ok(())
}
