//! A graph to its files: the model, and a sidecar for the weights of a large one.
//!
//! Weights go inside the model file up to [`INSIDE_LIMIT_BYTES`] and into one sidecar beyond. They may stay in the
//! input's own files (`--link-weights`) only where the output shares the input's folder, because external paths never
//! leave the model's folder. A weight whose file is absent refers to the same absent file again.

use super::file::{Batch, refuse_overwrite};
use super::onnx::{Weights, package};
use crate::onnx::proto::MAX_MODEL_BYTES;
use ckpt_passes::ir::{Data, Graph};
use ckpt_passes::{Error, Result};
use prost::Message;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Above this many bytes of weights, they go into a sidecar.
pub const INSIDE_LIMIT_BYTES: u64 = 1 << 30;

/// How to write a graph.
#[derive(Clone, Copy, Debug)]
pub struct Saving<'a> {
    /// The file the graph was read from, which must not be replaced while its weights are mapped.
    pub input: Option<&'a Path>,
    /// Leave weights in the input's external files.
    pub link_weights: bool,
    /// Usually [`INSIDE_LIMIT_BYTES`].
    pub inside_limit_bytes: u64,
}

fn folder(path: &Path) -> PathBuf {
    let parent = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    std::fs::canonicalize(parent).unwrap_or_else(|_| parent.to_path_buf())
}

/// Writes `graph` to `output`, with a sidecar `<output>.data` if it needs one; returns what was written.
///
/// # Errors
/// Kind `Usage` where the output would replace an input, or where weights are to be linked across folders; kind
/// `Environment` where the disk refuses. Nothing is left behind then.
pub fn save(graph: &Graph, output: &Path, how: &Saving) -> Result<Vec<PathBuf>> {
    let mut inside_bytes: u64 = 0;
    let mut locations: BTreeSet<&str> = BTreeSet::new();
    let mut absent: BTreeSet<&str> = BTreeSet::new();
    for (_, value) in graph.inits() {
        match value.tensor().map(|t| &t.data) {
            Some(Data::Absent(place)) => {
                absent.insert(&place.location);
            }
            Some(Data::Here { bytes, origin }) => {
                inside_bytes = inside_bytes.saturating_add(bytes.len() as u64);
                locations.extend(origin.as_ref().map(|o| o.location.as_ref()));
            }
            None => {}
        }
    }
    let Some(name) = output.file_name().and_then(|n| n.to_str()) else {
        return Err(
            Error::usage("output", "the output needs a file name").at(output.display().to_string())
        );
    };
    let sidecar_name = format!("{name}.data");
    let sidecar_path = output.with_file_name(&sidecar_name);
    let weights = if how.link_weights {
        let shared = how
            .input
            .is_some_and(|input| folder(input) == folder(output));
        if !shared {
            return Err(Error::usage(
                "output",
                "weights can only be linked where the output shares the input's folder",
            )
            .at(output.display().to_string())
            .help("write beside the input, or leave out --link-weights"));
        }
        Weights::Linked
    } else if inside_bytes > how.inside_limit_bytes {
        Weights::Sidecar(sidecar_name.clone())
    } else {
        Weights::Inside
    };
    let has_sidecar = matches!(weights, Weights::Sidecar(_));
    if has_sidecar && absent.contains(sidecar_name.as_str()) {
        return Err(Error::usage(
            "output",
            "the sidecar would take the name of an absent weights file",
        )
        .at(sidecar_path.display().to_string())
        .help("choose another name with -o"));
    }
    if let Some(input) = how.input {
        let mut inputs = vec![input.to_path_buf()];
        inputs.extend(locations.iter().map(|l| folder(input).join(l)));
        refuse_overwrite(output, &inputs)?;
        if has_sidecar {
            refuse_overwrite(&sidecar_path, &inputs)?;
        }
    }
    let made = package(graph, &weights)?;
    let size_bytes = made.model.encoded_len() as u64;
    if size_bytes > MAX_MODEL_BYTES {
        return Err(Error::model(
            "format",
            "the model would exceed the 2 GiB that an ONNX file can hold",
        )
        .found(format!("{size_bytes} bytes without its weights' sidecar")));
    }
    let mut batch = Batch::new();
    let mut written = Vec::new();
    if has_sidecar {
        batch.add(&sidecar_path, |out| {
            let mut at: u64 = 0;
            for (offset, bytes) in &made.sidecar {
                for _ in at..*offset {
                    out.write_all(&[0])?;
                }
                out.write_all(bytes)?;
                at = offset + bytes.len() as u64;
            }
            Ok(())
        })?;
        written.push(sidecar_path);
    }
    let encoded = made.model.encode_to_vec();
    batch.add(output, |out| out.write_all(&encoded))?;
    written.push(output.to_path_buf());
    batch.publish()?;
    Ok(written)
}
