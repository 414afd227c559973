//! `model.safetensors`: the weights under the framework's own names and in its layout.

use crate::emit::file::Batch;
use crate::runtime::session::Session;
use crate::tensors::framework::{StateEntry, state_dict, transposed_bytes};
use crate::tensors::safetensors::{Entry, stream};
use ckpt_passes::Result;
use ckpt_passes::ir::Graph;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Name of the file in the folder of a run.
pub const FILE: &str = "model.safetensors";

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
        stream(out, entries.collect(), &mut |entry, out| {
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
