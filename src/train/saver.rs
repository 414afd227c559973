//! Saves the state of training: a thread writes it from a copy, while the next steps run.
//!
//! The copy is made in pieces ([`pieces`]), and may take a share of the host's free memory. Where that is less than the
//! state, the first pieces are on disk before the last ones are copied, and the next step waits for these.

use super::checkpoint::{Checkpoints, Content, Manifest, Source};
use super::pieces;
use super::slices::has_own_file;
use crate::place::Place;
use crate::provenance::keys;
use crate::runtime::device;
use crate::runtime::ranks::Ranks;
use crate::runtime::session::Session;
use crate::tensors::safetensors::{self, Entry};
use ckpt_passes::ir::{Def, Graph};
use ckpt_passes::{Error, Result};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Of the host's free memory, the share that the copy may take, as a divisor.
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

    /// Saves the state of a session: parameters and optimizer states. Returns once it is copied, so that the next step may
    /// change it. Of several ranks
    /// the first writes what all have, and each its slices of states, if it keeps some.
    ///
    /// # Errors
    /// This checkpoint or the one before it cannot be written.
    pub fn save(&mut self, graph: &Graph, session: &Session, manifest: Manifest) -> Result<()> {
        self.wait()?;
        let slices = self.ranks.clone().filter(|_| has_own_file(graph));
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
        for (name, dtype, dims) in session.state()? {
            let id = graph.find_value(&name);
            let is_weight = id.is_some_and(|id| matches!(graph.value(id).def, Def::Init(_)));
            let entries = match is_weight {
                true if !leads => continue,
                true => &mut content.parameters,
                false => &mut content.states,
            };
            entries.push(Entry { name, dtype, dims });
        }
        // The thread takes contents in the order of the files.
        safetensors::sort(&mut content.parameters);
        safetensors::sort(&mut content.states);
        let all = content.parameters.iter().chain(&content.states);
        let all: Vec<Entry> = all.cloned().collect();
        let room = device::of(Place::Cpu).memory()?;
        let room = room.map_or(0, |m| m.total_bytes.saturating_sub(m.used_bytes));
        let sizes: Vec<usize> = all.iter().map(Entry::bytes).collect();
        let (pieces, wanted, fits) = pieces::queue(&sizes, room / MAX_SHARE);
        let checkpoints = self.checkpoints.clone();
        let write = move || {
            let mut source =
                |entry: &Entry, out: &mut dyn io::Write| wanted.write(entry.bytes(), out);
            let ranks = slices.as_deref();
            written(&checkpoints, manifest, content, &mut source, ranks)
        };
        let start = || -> Result<_> {
            let thread = std::thread::Builder::new().name("checkpoint".into());
            let failed = |e| Error::environment("thread", format!("cannot start a thread: {e}"));
            thread.spawn(write).map_err(failed)
        };
        // Where all fits, the step that follows waits least if nothing is written beside the copy.
        let later = match fits {
            true => Some(start),
            false => {
                self.writing = Some(start()?);
                None
            }
        };
        for entry in &all {
            match session.look(&entry.name, |bytes| pieces.send(bytes)) {
                Ok(true) => {}
                // The thread has ended: it says why.
                Ok(false) => return self.wait(),
                Err(e) => {
                    drop(pieces);
                    // The thread misses contents and leaves nothing; the first error is reported.
                    let _ = self.wait();
                    return Err(e);
                }
            }
        }
        if let Some(start) = later {
            self.writing = Some(start()?);
        }
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
