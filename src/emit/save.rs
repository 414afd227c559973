//! Writes a graph to its files: the model, and a sidecar for many weights.
//!
//! Up to [`INSIDE_LIMIT_BYTES`] of weights go into the model file, more go into one sidecar. With `--link-weights` they stay
//! in the files of the input. This requires that the output is in the input's folder, because external paths never leave the
//! model's folder. A weight whose file is missing refers to the same file again.

use super::file::{Batch, folder, refuse_overwrite};
use super::onnx::{Package, Weights, package, repackage};
use crate::onnx::proto::{MAX_MODEL_BYTES, ModelProto};
use ckpt_passes::ir::{Data, Graph, Tensor};
use ckpt_passes::{Error, Result};
use prost::Message;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// More bytes of weights than these go into a sidecar.
pub const INSIDE_LIMIT_BYTES: u64 = 1 << 30;

/// How to write weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct WeightOptions {
    /// Leave weights in the external files of the input.
    pub link: bool,
    /// List trained weights among the graph inputs, so that a caller can replace them. ONNX Runtime then warns of each one
    /// and folds none into other constants.
    pub as_inputs: bool,
}

/// How to write a graph.
#[derive(Clone, Copy, Debug)]
pub struct Saving<'a> {
    /// The file that the graph was read from. It must not be replaced while its weights are mapped.
    pub input: Option<&'a Path>,
    /// Where weights lie and how they are declared.
    pub weights: WeightOptions,
    /// Usually [`INSIDE_LIMIT_BYTES`].
    pub inside_limit_bytes: u64,
}

/// Returns the folder of a file without links.
fn real_folder(path: &Path) -> PathBuf {
    std::fs::canonicalize(folder(path)).unwrap_or_else(|_| folder(path).to_path_buf())
}

/// Writes `graph` to `output`, with a sidecar `<output>.data` if it needs one. Returns the written files.
///
/// # Errors
/// Kind `Usage` if the output would replace an input, or if weights would be linked across folders; kind `Environment` if
/// a file cannot be written. No file is left behind then.
pub fn save(graph: &Graph, output: &Path, how: &Saving) -> Result<Vec<PathBuf>> {
    let tensors = graph.inits().filter_map(|(_, value)| value.tensor());
    let (weights, sidecar) = place(tensors, output, how)?;
    let mut made = package(graph, &weights)?;
    if how.weights.as_inputs {
        made.declare_trained(graph);
    }
    write(&made, output, sidecar)
}

/// Writes a model that was read, with `tensors` as its initializers, in their order. Everything else stays as it is. Returns
/// the written files.
///
/// # Errors
/// See [`save`].
pub fn save_model(
    model: ModelProto,
    tensors: &[Tensor],
    output: &Path,
    how: &Saving,
) -> Result<Vec<PathBuf>> {
    let (weights, sidecar) = place(tensors.iter(), output, how)?;
    write(&repackage(model, tensors, &weights), output, sidecar)
}

/// Returns where weights go, and the path of the sidecar if there is one.
fn place<'t>(
    tensors: impl Iterator<Item = &'t Tensor>,
    output: &Path,
    how: &Saving,
) -> Result<(Weights, Option<PathBuf>)> {
    let mut inside_bytes: u64 = 0;
    let mut locations: BTreeSet<&str> = BTreeSet::new();
    let mut absent: BTreeSet<&str> = BTreeSet::new();
    for tensor in tensors {
        match &tensor.data {
            Data::Absent(place) => {
                absent.insert(&place.location);
            }
            Data::Here { bytes, origin } => {
                inside_bytes = inside_bytes.saturating_add(bytes.len() as u64);
                locations.extend(origin.as_ref().map(|o| o.location.as_ref()));
            }
        }
    }
    let Some(name) = output.file_name().and_then(|n| n.to_str()) else {
        return Err(
            Error::usage("output", "the output needs a file name").at(output.display().to_string())
        );
    };
    let sidecar_name = format!("{name}.data");
    let sidecar_path = output.with_file_name(&sidecar_name);
    let weights = if how.weights.link {
        let shared = how
            .input
            .is_some_and(|input| real_folder(input) == real_folder(output));
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
        inputs.extend(locations.iter().map(|l| real_folder(input).join(l)));
        refuse_overwrite(output, &inputs)?;
        if has_sidecar {
            refuse_overwrite(&sidecar_path, &inputs)?;
        }
    }
    Ok((weights, has_sidecar.then_some(sidecar_path)))
}

/// Returns the content of an ONNX file.
///
/// # Errors
/// A model that exceeds what such a file can hold.
pub fn encoded(model: &ModelProto) -> Result<Vec<u8>> {
    let size_bytes = model.encoded_len() as u64;
    if size_bytes > MAX_MODEL_BYTES {
        return Err(Error::model(
            "format",
            "the model would exceed the 2 GiB that an ONNX file can hold",
        )
        .found(format!("{size_bytes} bytes without its weights' sidecar")));
    }
    Ok(model.encode_to_vec())
}

fn write(made: &Package, output: &Path, sidecar: Option<PathBuf>) -> Result<Vec<PathBuf>> {
    let encoded = encoded(&made.model)?;
    let mut batch = Batch::new();
    let mut written = Vec::new();
    if let Some(sidecar) = sidecar {
        batch.add(&sidecar, |out| {
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
        written.push(sidecar);
    }
    batch.add(output, |out| out.write_all(&encoded))?;
    written.push(output.to_path_buf());
    batch.publish()?;
    Ok(written)
}
