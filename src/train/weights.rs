//! `model.safetensors`: the weights under the framework's own names and in its layout. Adapters that were added for the training
//! are merged into it, and written as PEFT saves them.

use crate::export::{Export, Target, checkpoint};
use crate::frontend::given::Given;
use crate::runtime::session::Session;
use crate::tensors::framework::{StateEntry, state_dict};
use ckpt_passes::Result;
use ckpt_passes::analysis::params::is_running_statistic;
use ckpt_passes::ir::{Graph, Tensor};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Name of the file in the folder of a run.
pub const FILE: &str = "model.safetensors";
/// Name of the folder of the adapters.
pub const ADAPTER: &str = "adapter";
/// The most names in a note.
const SHOWN: usize = 3;

/// The buffers that the framework saves of a model. Training leaves them as they are, and its graph may lack them.
#[derive(Default)]
pub struct Buffers(BTreeMap<String, (StateEntry, Tensor)>);

impl Buffers {
    /// Returns the buffers of a typed model.
    ///
    /// # Errors
    /// See [`state_dict`].
    pub fn of(graph: &Graph) -> Result<Buffers> {
        let own = state_dict(graph)?.buffers.into_iter();
        let own = own.filter_map(|entry| {
            let tensor = graph.value(entry.initializer).tensor()?.clone();
            Some((entry.name.clone(), (entry, tensor)))
        });
        Ok(Buffers(own.collect()))
    }

    /// Returns a warning if the framework's own training would change buffers.
    pub fn warning(&self) -> Option<String> {
        let names = self.0.keys().filter(|name| is_running_statistic(name));
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        let more = names.len().saturating_sub(SHOWN);
        let shown = names[..names.len() - more].join(", ");
        let more = match more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!names.is_empty()).then(|| {
            format!(
                "running statistics stay as they are in the model ({shown}{more}); PyTorch's training mode would update them"
            )
        })
    }
}

/// Writes all parameters as a session's last step left them, and the buffers of the model. The file appears whole or not at
/// all. Returns what the user should know.
///
/// # Errors
/// A disk that refuses; a weight whose file is absent.
pub fn write(
    path: &Path,
    (graph, session): (&Graph, &Session),
    buffers: &Buffers,
) -> Result<Vec<String>> {
    let mut dict = state_dict(graph)?;
    dict.buffers = buffers.0.values().map(|(entry, _)| entry.clone()).collect();
    dict.write(path, &mut |entry, write| match buffers.0.get(&entry.name) {
        Some((_, tensor)) => write(tensor.bytes().map_or(&[], |bytes| bytes)),
        None => {
            let name = &graph.value(entry.initializer).name;
            session.look(name, write).map_err(io::Error::other)?
        }
    })?;
    Ok(dict.notes)
}

/// Writes the weights of a model that got adapters, as a checkpoint has them: merged into [`FILE`], and the adapters alone into
/// [`ADAPTER`], unless other weights were trained too. Returns what the user should know.
///
/// # Errors
/// A model or checkpoint that cannot be read again; a disk that refuses.
pub fn write_adapted(
    folder: &Path,
    (source, given): (&Path, &Given),
    saved: &Path,
) -> Result<Vec<String>> {
    let saved = checkpoint::read(saved)?;
    let export = Export::new(source, given, &saved.tensors, saved.lora.as_ref())?;
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
