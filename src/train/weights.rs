//! `model.safetensors`: the weights under the framework's own names and in its layout. Adapters that were added for the training
//! are merged into it, and written as PEFT saves them.

use crate::emit::file::Batch;
use crate::export::{Export, Target};
use crate::frontend::given::Given;
use crate::runtime::session::Session;
use crate::tensors::Tensors;
use crate::tensors::framework::{StateEntry, state_dict, transposed_bytes};
use crate::tensors::safetensors::{Entry, stream};
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::updated;
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::transform::lora::Lora;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Name of the file in the folder of a run.
pub const FILE: &str = "model.safetensors";
/// Name of the folder of the adapters.
pub const ADAPTER: &str = "adapter";

/// Writes all parameters as a session's last step left them. The file appears whole or not at all. Returns what the user
/// should know.
///
/// # Errors
/// A disk that refuses; a weight whose file is absent.
pub fn write(path: &Path, graph: &Graph, session: &Session) -> Result<Vec<String>> {
    let dict = state_dict(graph)?;
    let by_name: BTreeMap<&str, &StateEntry> = dict
        .entries
        .iter()
        .map(|entry| (entry.name.as_str(), entry))
        .collect();
    let entries = dict.entries.iter().map(|entry| Entry {
        name: entry.name.clone(),
        dtype: entry.dtype,
        dims: entry.dims.clone(),
    });
    let mut batch = Batch::new();
    batch.add(path, |out| {
        // `transformers` asks which framework wrote a file.
        let meta = [("format".to_string(), "pt".to_string())].into();
        stream(out, meta, entries.collect(), &mut |entry, out| {
            let Some(source) = by_name.get(entry.name.as_str()) else {
                return Ok(());
            };
            let written = session.look(&source.initializer, |bytes| match source.transposed {
                true => out.write_all(&transposed_bytes(&entry.dims, entry.dtype, bytes)),
                false => out.write_all(bytes),
            });
            written.map_err(io::Error::other)?
        })
    })?;
    batch.publish()?;
    Ok(dict.notes)
}

/// Writes the weights of a model that got adapters: merged into [`FILE`], and the adapters alone into [`ADAPTER`], unless other
/// weights were trained too. Returns what the user should know.
///
/// # Errors
/// A model that cannot be read again; a disk that refuses.
pub fn write_adapted(
    folder: &Path,
    (source, given): (&Path, &Given),
    (graph, session): (&Graph, &Session),
    lora: &str,
) -> Result<Vec<String>> {
    let mut trained = Tensors::new();
    for (id, _) in updated(graph) {
        let value = graph.value(id);
        let bytes = session.look(&value.name, <[u8]>::to_vec)?;
        let dims = value.ty().static_dims().unwrap_or_default();
        let dims: Vec<u64> = dims.into_iter().map(|d| d as u64).collect();
        trained.insert(
            value.name.clone(),
            Tensor::new(value.ty().dtype, dims, bytes),
        );
    }
    let lora = Lora::parse(lora)?;
    let export = Export::new(source, given, &trained, Some(&lora))?;
    export.write(Target::Safetensors, &folder.join(FILE))?;
    let mut notes = Vec::new();
    match export.counts() {
        (0, _) => {
            let adapter = folder.join(ADAPTER);
            export.write(Target::Peft, &adapter)?;
        }
        _ => notes.push("other weights than adapters were trained, so no adapter folder is written: it could not hold them".into()),
    }
    Ok(notes)
}
