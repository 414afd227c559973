//! Saves the state of training: in the background from a copy, where the host has room for one.

use super::checkpoint::{Checkpoints, Content, Manifest, Source};
use super::slices::has_slices;
use crate::place::Place;
use crate::provenance::keys;
use crate::runtime::device;
use crate::runtime::ranks::Ranks;
use crate::runtime::session::Session;
use crate::tensors::safetensors::Entry;
use ckpt_passes::ir::{Def, Graph};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Of the host's free memory, the share that a copy may take.
const MAX_SHARE: u64 = 2;

/// Saves checkpoints one after the other.
pub(super) struct Saver {
    checkpoints: Checkpoints,
    /// This rank of several that train.
    ranks: Option<Arc<Ranks>>,
    /// The newest checkpoint that is whole.
    last: Option<PathBuf>,
    writing: Option<JoinHandle<Result<PathBuf>>>,
}

impl Saver {
    pub fn new(checkpoints: Checkpoints, ranks: Option<Arc<Ranks>>) -> Result<Saver> {
        Ok(Saver {
            ranks,
            last: checkpoints.newest()?,
            checkpoints,
            writing: None,
        })
    }

    /// Returns the newest checkpoint that is whole.
    pub fn last(&self) -> Option<&Path> {
        self.last.as_deref()
    }

    /// Waits for the checkpoint that is being written.
    ///
    /// # Errors
    /// It could not be written.
    pub fn wait(&mut self) -> Result<()> {
        if let Some(thread) = self.writing.take() {
            let done = thread.join();
            let done =
                done.map_err(|_| Error::bug("checkpoint", "the thread that writes panicked"))?;
            self.last = Some(done?);
        }
        Ok(())
    }

    /// Saves the state of a session: parameters and optimizer states. Returns once the next step may change it. Of several ranks
    /// the first writes what all have, and each its slices of states, if it keeps some.
    ///
    /// # Errors
    /// This checkpoint or the one before it cannot be written.
    pub fn save(&mut self, graph: &Graph, session: &Session, manifest: Manifest) -> Result<()> {
        self.wait()?;
        let slices = self.ranks.clone().filter(|_| has_slices(graph));
        let leads = self.ranks.as_ref().is_none_or(|ranks| ranks.rank == 0);
        if !leads && slices.is_none() {
            return Ok(());
        }
        let lora = graph.meta.get_key_value(keys::LORA);
        let mut content = Content {
            meta: lora
                .map(|(key, text)| (key.clone(), text.clone()))
                .into_iter()
                .collect(),
            parameters: Vec::new(),
            states: Vec::new(),
        };
        let mut bytes = 0;
        for (name, dtype, dims) in session.state()? {
            bytes += dims.iter().product::<u64>() * dtype.size_bytes();
            let id = graph.find_value(&name);
            let is_weight = id.is_some_and(|id| matches!(graph.value(id).def, Def::Init(_)));
            let entries = match is_weight {
                true if !leads => continue,
                true => &mut content.parameters,
                false => &mut content.states,
            };
            entries.push(Entry { name, dtype, dims });
        }
        let room = device::of(Place::Cpu).memory()?;
        let room = room.map_or(0, |m| m.total_bytes.saturating_sub(m.used_bytes));
        if bytes > room / MAX_SHARE {
            let written = written(
                &self.checkpoints,
                manifest,
                content,
                &mut |entry, out| {
                    let written = session.look(&entry.name, |bytes| out.write_all(bytes));
                    written.map_err(io::Error::other)?
                },
                slices.as_deref(),
            );
            self.last = Some(written?);
            return Ok(());
        }
        let mut copies: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for entry in content.parameters.iter().chain(&content.states) {
            let copy = session.look(&entry.name, <[u8]>::to_vec)?;
            copies.insert(entry.name.clone(), copy);
        }
        let checkpoints = self.checkpoints.clone();
        let write = move || {
            let mut source = |entry: &Entry, out: &mut dyn io::Write| {
                let copy = copies.get(&entry.name);
                out.write_all(copy.map_or(&[][..], Vec::as_slice))
            };
            written(
                &checkpoints,
                manifest,
                content,
                &mut source,
                slices.as_deref(),
            )
        };
        let thread = std::thread::Builder::new().name("checkpoint".into());
        self.writing =
            Some(thread.spawn(write).map_err(|e| {
                Error::environment("thread", format!("cannot start a thread: {e}"))
            })?);
        Ok(())
    }
}

/// Writes what this rank has of a checkpoint.
fn written(
    checkpoints: &Checkpoints,
    manifest: Manifest,
    content: Content,
    source: Source,
    ranks: Option<&Ranks>,
) -> Result<PathBuf> {
    match ranks {
        Some(ranks) if ranks.rank > 0 => {
            checkpoints.write_slices(manifest.step, content.states, source, ranks)
        }
        ranks => checkpoints.write(manifest, content, source, ranks),
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // Whoever has not waited returns another error.
        let _ = self.wait();
    }
}
