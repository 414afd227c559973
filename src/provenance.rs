//! The provenance of a written graph: metadata that says how it was made (`ckpt.loss`, `ckpt.policy`, …).
//!
//! `verify` reads it to differentiate the original in the same way and compare.

use crate::frontend::given::{Given, list_text, read_list};
use ckpt_passes::analysis::gradients::has_backward;
use ckpt_passes::analysis::params::Selection;
use ckpt_passes::analysis::planned_sizes;
use ckpt_passes::analysis::tied_weights::TieRequest;
use ckpt_passes::compile::{Compiled, Request};
use ckpt_passes::ir::Graph;
use ckpt_passes::transform::collectives::{Mesh, Shard};
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_passes::transform::rng_streams::RngStream;
use ckpt_passes::transform::sequence::parse_chunks;
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Keys of a written graph's metadata.
pub mod keys {
    /// Version of ckpt-opt that wrote the graph.
    pub const VERSION: &str = "ckpt.version";
    /// The loss, as `--loss` takes it.
    pub const LOSS: &str = "ckpt.loss";
    /// How often the model was differentiated, where that is more than once: all other keys are of the last time.
    pub const ORDER: &str = "ckpt.order";
    /// The policy of the plan.
    pub const POLICY: &str = "ckpt.policy";
    /// `exact`, or `rounded` where ops were fused or tiled.
    pub const NUMERICS: &str = "ckpt.numerics";
    /// `true` where ops were fused.
    pub const FUSE: &str = "ckpt.fuse";
    /// The number of chunks of the head and the loss, where they were tiled.
    pub const TILE: &str = "ckpt.tile";
    /// The number of chunks of tiled MLPs.
    pub const TILE_MLP: &str = "ckpt.tile_mlp";
    /// The number of chunks of the sequence that go through the model one after the other.
    pub const TILE_SEQUENCE: &str = "ckpt.tile_sequence";
    /// The optimizer, as `--optimizer` takes it.
    pub const OPTIMIZER: &str = "ckpt.optimizer";
    /// `true` where each update runs as soon as its gradient is complete.
    pub const FUSE_OPTIMIZER: &str = "ckpt.fuse_optimizer";
    /// A JSON list of patterns of parameters without weight decay.
    pub const NO_DECAY: &str = "ckpt.no_decay";
    /// `true` where parameters of rank 0 and 1 have no weight decay.
    pub const NO_DECAY_VECTORS: &str = "ckpt.no_decay_vectors";
    /// The largest norm of the gradient.
    pub const CLIP: &str = "ckpt.clip";
    /// The number of micro-batches in an update, where gradients are accumulated.
    pub const ACCUMULATE: &str = "ckpt.accumulate";
    /// `true` where the loss is scaled.
    pub const LOSS_SCALE: &str = "ckpt.loss_scale";
    /// `true` where 16-bit parameters have float32 master weights.
    pub const MASTER_WEIGHTS: &str = "ckpt.master_weights";
    /// The ranks that share the step, as `--mesh` takes them.
    pub const MESH: &str = "ckpt.mesh";
    /// `true` for sequence parallelism.
    pub const SEQUENCE_PARALLEL: &str = "ckpt.sequence_parallel";
    /// What each of them keeps a slice of, as `--shard` takes it.
    pub const SHARD: &str = "ckpt.shard";
    /// The bytes of gradients that are exchanged together, as `--bucket` takes them.
    pub const BUCKET: &str = "ckpt.bucket";
    /// `true` where bfloat16 parameters are rounded by chance.
    pub const STOCHASTIC_ROUNDING: &str = "ckpt.stochastic_rounding";
    /// The keys that say how parameters are updated.
    pub const UPDATES: [&str; 8] = [
        OPTIMIZER,
        FUSE_OPTIMIZER,
        NO_DECAY,
        NO_DECAY_VECTORS,
        CLIP,
        ACCUMULATE,
        LOSS_SCALE,
        MASTER_WEIGHTS,
    ];
    /// A JSON list of patterns of trainable parameters.
    pub const TRAINABLE: &str = "ckpt.trainable";
    /// A JSON list of patterns of frozen parameters.
    pub const FREEZE: &str = "ckpt.freeze";
    /// The adapters that were added, as `--lora` takes them.
    pub const LORA: &str = "ckpt.lora";
    /// A JSON list of `KEPT=COPY`: the initializers that were tied.
    pub const TIE: &str = "ckpt.tie";
    /// A JSON list of patterns of dropped outputs.
    pub const DROP_OUTPUT: &str = "ckpt.drop_output";
    /// A JSON list of `NAME=PATTERN,…`.
    pub const RNG_STREAM: &str = "ckpt.rng_stream";
    /// Where no gradient flows: a JSON list of patterns.
    pub const STOP_GRADIENT: &str = "ckpt.stop_gradient";
    pub use crate::frontend::given::{INPUT_KEY as INPUT, OUTPUT_NAMES_KEY as OUTPUT_NAMES};
    /// The sizes that the plan was made for.
    pub use ckpt_passes::analysis::planned_sizes::KEY as DIMS;
}

/// Writes into the metadata of a compiled graph how it was made. `earlier` is how often it was differentiated before.
pub fn record(graph: &mut Graph, request: &Request, compiled: &Compiled, earlier: u32) {
    if compiled.loss.is_some() {
        forget_earlier(graph, earlier);
    }
    let policy = match &compiled.planned {
        Some(planned) => &planned.outcome.plan.policy,
        None => "none",
    };
    let fused = !compiled.fused.is_empty();
    write_record(graph, request, policy, compiled.loss.as_ref(), fused);
    if let Some(planned) = &compiled.planned {
        planned_sizes::record(graph, planned.binding.iter());
    }
    let meta = &mut graph.meta;
    if compiled.loss.is_some() {
        let pairs = compiled
            .tied
            .iter()
            .map(|(kept, copy)| format!("{kept}={copy}"));
        let pairs: Vec<String> = pairs.collect();
        meta.remove(keys::TIE);
        if !pairs.is_empty() {
            meta.insert(keys::TIE.into(), list_text(&pairs));
        }
    }
    // One chunk: the loss was prepared for chunks, and not cut.
    let settled = (compiled.settled && request.tile.loss != Tile::Off).then_some(1);
    for (key, chunks) in [
        (keys::TILE, most_chunks(&compiled.tiled).or(settled)),
        (keys::TILE_MLP, most_chunks(&compiled.tiled_mlps)),
    ] {
        if let Some(chunks) = chunks {
            meta.insert(keys::NUMERICS.into(), "rounded".into());
            meta.insert(key.into(), chunks.to_string());
        }
    }
    if let Some(sequence) = &compiled.sequence {
        meta.insert(keys::NUMERICS.into(), "rounded".into());
        meta.insert(keys::TILE_SEQUENCE.into(), sequence.chunks.to_string());
    }
    if let Some(mesh) = &request.mesh {
        meta.insert(keys::MESH.into(), mesh.to_string());
        if mesh.shares_rows {
            meta.insert(keys::SEQUENCE_PARALLEL.into(), "true".into());
        }
        meta.insert(keys::SHARD.into(), mesh.shard.to_string());
        meta.insert(keys::BUCKET.into(), mesh.bucket_bytes.to_string());
    }
    if let Some(optimizer) = &request.updates.optimizer {
        record_updates(meta, optimizer, &request.updates);
    }
}

fn record_updates(
    meta: &mut BTreeMap<String, String>,
    optimizer: &Optimizer,
    options: &UpdateOptions,
) {
    let truth = |is_so: bool| is_so.then(|| "true".to_string());
    let list = |names: &[String]| (!names.is_empty()).then(|| list_text(names));
    let texts = [
        (keys::OPTIMIZER, Some(optimizer.to_string())),
        (keys::FUSE_OPTIMIZER, truth(options.fuse)),
        (keys::NO_DECAY, list(&options.no_decay)),
        (keys::NO_DECAY_VECTORS, truth(options.no_decay_vectors)),
        (keys::CLIP, options.clip.map(|most| most.to_string())),
        (keys::ACCUMULATE, options.accumulate.map(|n| n.to_string())),
        (keys::LOSS_SCALE, truth(options.loss_scale)),
        (keys::MASTER_WEIGHTS, truth(options.master_weights)),
        (
            keys::STOCHASTIC_ROUNDING,
            truth(options.stochastic_rounding),
        ),
    ];
    let given = texts
        .into_iter()
        .filter_map(|(key, text)| Some((key, text?)));
    meta.extend(given.map(|(key, text)| (key.to_string(), text)));
}

/// Returns the largest number of chunks among tiled regions.
pub fn most_chunks(tiled: &[(String, usize)]) -> Option<usize> {
    tiled.iter().map(|(_, chunks)| *chunks).max()
}

/// Returns how often a graph was differentiated, by its metadata.
///
/// # Errors
/// A record that is no such number.
pub fn derivative_order(graph: &Graph) -> Result<u32> {
    match graph.meta.get(keys::ORDER) {
        _ if !has_backward(graph) => Ok(0),
        None => Ok(1),
        Some(text) => text.parse().ok().filter(|n| *n > 1).ok_or_else(|| {
            let what = format!(
                "metadata `{}` is not how often a graph was differentiated",
                keys::ORDER
            );
            Error::model("record", what)
                .expected("a number above 1")
                .found(text)
        }),
    }
}

/// Drops the record of earlier derivatives from a graph that was just differentiated. `before` counts those derivatives.
fn forget_earlier(graph: &mut Graph, before: u32) {
    use keys::{ORDER, OUTPUT_NAMES, TILE, TILE_MLP, TILE_SEQUENCE, UPDATES};
    let meta = &mut graph.meta;
    let others = [ORDER, TILE, TILE_MLP, TILE_SEQUENCE];
    for key in UPDATES.into_iter().chain(others) {
        meta.remove(key);
    }
    if before > 0 {
        meta.remove(OUTPUT_NAMES);
        meta.insert(ORDER.into(), before.saturating_add(1).to_string());
    }
}

/// Writes the record. Without a new loss, a graph keeps its record of the loss and of what was trained.
fn write_record(
    graph: &mut Graph,
    request: &Request,
    policy: &str,
    loss: Option<&Loss>,
    fused: bool,
) {
    let meta = &mut graph.meta;
    meta.insert(keys::VERSION.into(), env!("CARGO_PKG_VERSION").into());
    meta.insert(keys::POLICY.into(), policy.into());
    meta.entry(keys::NUMERICS.into())
        .or_insert_with(|| "exact".into());
    if let Some(loss) = loss {
        let numerics = if fused { "rounded" } else { "exact" };
        meta.insert(keys::NUMERICS.into(), numerics.into());
        meta.remove(keys::FUSE);
        if fused {
            meta.insert(keys::FUSE.into(), "true".into());
        }
        meta.insert(keys::LOSS.into(), loss.to_string());
        meta.remove(keys::LORA);
        if let Some(lora) = &request.lora {
            meta.insert(keys::LORA.into(), lora.to_string());
        }
        let streams: Vec<String> = request
            .rng_streams
            .iter()
            .map(RngStream::to_string)
            .collect();
        let lists = [
            (keys::RNG_STREAM, &streams),
            (keys::STOP_GRADIENT, &request.stop_gradients),
            (keys::TRAINABLE, &request.selection.trainable),
            (keys::FREEZE, &request.selection.freeze),
            (keys::DROP_OUTPUT, &request.drop_outputs),
        ];
        for (key, list) in lists {
            meta.remove(key);
            if !list.is_empty() {
                meta.insert(key.into(), list_text(list));
            }
        }
    }
}

/// Returns the request that gives the same values from the forward graph, and how that graph was loaded. The policy is
/// not part of it, because plans never change a value.
///
/// # Errors
/// A graph without the record.
pub fn read_record(meta: &BTreeMap<String, String>) -> Result<(Request, Given)> {
    let Some(loss) = meta.get(keys::LOSS) else {
        return Err(Error::model(
            "record",
            "the training graph does not say which loss it was made with",
        )
        .expected(format!("metadata `{}`, as ckpt-opt writes it", keys::LOSS))
        .help("compare two training graphs instead, or two forward graphs"));
    };
    let list = |key| read_list(meta, key);
    let truth = |key: &str| match meta.get(key).map(String::as_str) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(Error::model(
            "record",
            format!("metadata `{key}` is not a truth value"),
        )
        .expected("true or false")
        .found(other)),
    };
    let lora = meta.get(keys::LORA).map(|t| Lora::parse(t));
    let optimizer = meta.get(keys::OPTIMIZER).map(|t| Optimizer::parse(t));
    let clip = meta.get(keys::CLIP).map(|t| UpdateOptions::parse_clip(t));
    let accumulate = meta.get(keys::ACCUMULATE);
    let accumulate = accumulate.map(|t| UpdateOptions::parse_accumulate(t));
    let chunks = |key: &str| match meta.get(key) {
        None => Ok(Tile::Off),
        Some(chunks) => Tile::parse(chunks),
    };
    let tile = Tiles {
        loss: chunks(keys::TILE)?,
        mlp: chunks(keys::TILE_MLP)?,
    };
    let mesh = meta.get(keys::MESH).map(|t| Mesh::parse(t)).transpose()?;
    let sequence_chunks = meta.get(keys::TILE_SEQUENCE).map(|t| parse_chunks(t));
    let shard = meta.get(keys::SHARD).map(|t| Shard::parse(t)).transpose()?;
    let bucket = meta.get(keys::BUCKET).and_then(|t| t.parse().ok());
    let shares_rows = truth(keys::SEQUENCE_PARALLEL)?;
    let request = Request {
        loss: Loss::parse(loss)?,
        plan: ckpt_passes::plan::Policy::NONE.into(),
        selection: Selection {
            trainable: list(keys::TRAINABLE)?,
            freeze: list(keys::FREEZE)?,
        },
        ties: TieRequest {
            leave: true,
            pairs: list(keys::TIE)?
                .iter()
                .map(|t| TieRequest::parse_pair(t))
                .collect::<Result<_>>()?,
        },
        lora: lora.transpose()?,
        drop_outputs: list(keys::DROP_OUTPUT)?,
        stop_gradients: list(keys::STOP_GRADIENT)?,
        rng_streams: list(keys::RNG_STREAM)?
            .iter()
            .map(|t| RngStream::parse(t))
            .collect::<Result<_>>()?,
        fuse: truth(keys::FUSE)?,
        tile,
        sequence_chunks: sequence_chunks.transpose()?.unwrap_or(1),
        updates: UpdateOptions {
            optimizer: optimizer.transpose()?,
            fuse: truth(keys::FUSE_OPTIMIZER)?,
            no_decay: list(keys::NO_DECAY)?,
            no_decay_vectors: truth(keys::NO_DECAY_VECTORS)?,
            clip: clip.transpose()?,
            accumulate: accumulate.transpose()?,
            loss_scale: truth(keys::LOSS_SCALE)?,
            master_weights: truth(keys::MASTER_WEIGHTS)?,
            stochastic_rounding: truth(keys::STOCHASTIC_ROUNDING)?,
        },
        mesh: mesh.map(|mesh| Mesh {
            shares_rows,
            shard: shard.unwrap_or_default(),
            bucket_bytes: bucket.unwrap_or_default(),
            ..mesh
        }),
        ..Request::default()
    };
    Ok((request, Given::recorded(meta)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_is_read_back() {
        let mut graph = Graph::new("g");
        let mut request = Request {
            drop_outputs: vec!["present.*".into()],
            ..Request::default()
        };
        request.rng_streams = vec![RngStream::parse("tp=*.attn,*.mlp").unwrap()];
        request.stop_gradients = vec!["ratio#1".into()];
        request.selection.freeze = vec!["emb\"ed*".into()];
        request.lora = Some(Lora::parse("r=4,dropout=0.1,targets=*q*,*v*").unwrap());
        assert_eq!(read_record(&graph.meta).err().unwrap().exit_code(), 2);
        write_record(&mut graph, &request, "full", Some(&Loss::CausalLm), true);
        let (read, given) = read_record(&graph.meta).unwrap();
        assert_eq!(
            (read.loss, read.drop_outputs),
            (Loss::CausalLm, request.drop_outputs.clone())
        );
        assert_eq!(read.rng_streams, request.rng_streams);
        assert_eq!(read.stop_gradients, request.stop_gradients);
        assert_eq!(read.lora, request.lora);
        assert_eq!(read.selection.freeze, request.selection.freeze);
        assert!(given.inputs.is_empty() && read.selection.trainable.is_empty());
        assert!(read.fuse);
        // Planning it again, now with its backward, keeps the record.
        write_record(&mut graph, &Request::default(), "none", None, false);
        assert_eq!(graph.meta[keys::NUMERICS], "rounded");
        assert_eq!(graph.meta[keys::LOSS], "causal-lm");
        assert!(graph.meta.contains_key(keys::FREEZE));
    }
}
