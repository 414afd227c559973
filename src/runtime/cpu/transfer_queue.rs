//! Transfers on the CPU: one queue for offloads and one for fetches, each a thread that copies tensors in turn.
//!
//! A queue copies only bytes: it runs no operator and allocates nothing from libtorch. If a queue is full, the run waits.

use crate::runtime::convert::torch_error;
use crate::runtime::swap_store::{Stored, SwapStore, new_tensor};
use crate::runtime::transfers::Transfers;
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use tch::Tensor;

/// Transfers that a queue holds before the run waits.
const CAPACITY: usize = 16;

/// The transfers of one program.
#[derive(Default)]
pub struct TransferQueues {
    out: TransferQueue,
    back: TransferQueue,
    offloads: BTreeMap<usize, Receiver<Result<Stored>>>,
    fetches: BTreeMap<usize, Receiver<Result<()>>>,
}

impl Transfers for TransferQueues {
    /// Offloads to a file, because the host's memory is the memory of the run.
    fn begin_offload(
        &mut self,
        store: &SwapStore,
        tensor: &Tensor,
        _to_disk: bool,
        slot: usize,
    ) -> Result<bool> {
        if !tensor.is_contiguous() || tensor.numel() == 0 {
            return Ok(false);
        }
        let stored = store.begin(tensor, true)?;
        let tensor = tensor.shallow_clone();
        let work = move || {
            let stored = stored.write(&tensor);
            // The waiting thread then holds the only reference.
            drop(tensor);
            stored
        };
        let result = self.out.begin(work)?;
        self.offloads.insert(slot, result);
        Ok(true)
    }

    fn finish_offload(&mut self, slot: usize) -> Result<Option<Tensor>> {
        let offload = self.offloads.remove(&slot);
        offload.map(|o| wait(&o)?.tensor()).transpose()
    }

    fn begin_fetch(&mut self, _: &SwapStore, from: &Tensor, slot: usize) -> Result<Option<Tensor>> {
        let here = new_tensor(from)?;
        let (from, mut to) = (from.shallow_clone(), here.shallow_clone());
        let work = move || bytes::copy(&from, &mut to).map_err(torch_error);
        let result = self.back.begin(work)?;
        self.fetches.insert(slot, result);
        Ok(Some(here))
    }

    fn finish_fetch(&mut self, slot: usize) -> Result<()> {
        self.fetches.remove(&slot).map_or(Ok(()), |f| wait(&f))
    }

    fn uncaptured(&self, _: &SwapStore) -> Option<&'static str> {
        None
    }

    fn join(&mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        let fetches = std::mem::take(&mut self.fetches).into_values();
        let offloads = std::mem::take(&mut self.offloads).into_values();
        let fetched = fetches.map(|f| wait(&f));
        let stored = offloads.map(|o| wait(&o).map(drop));
        // Waits for all of them, also after an error.
        fetched.chain(stored).fold(Ok(()), Result::and)
    }
}

fn wait<T>(result: &Receiver<Result<T>>) -> Result<T> {
    let ended = |_| {
        Err(Error::bug(
            "offload",
            "a transfer queue ended before its transfer",
        ))
    };
    result.recv().unwrap_or_else(ended)
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that starts with its first transfer.
#[derive(Default)]
struct TransferQueue {
    running: Option<(SyncSender<Job>, JoinHandle<()>)>,
}

impl TransferQueue {
    fn begin<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Receiver<Result<T>>> {
        let (done, result) = channel();
        let job: Job = Box::new(move || {
            let outcome = work();
            // Nobody waits if the run was abandoned.
            drop(done.send(outcome));
        });
        if self.running.is_none() {
            let (jobs, queue) = sync_channel::<Job>(CAPACITY);
            let thread = std::thread::Builder::new()
                .name("transfers".into())
                .spawn(move || queue.into_iter().for_each(|job| job()))
                .map_err(|e| {
                    Error::environment("offload", format!("no thread for transfers: {e}"))
                        .help("--async-transfers off needs none")
                })?;
            self.running = Some((jobs, thread));
        }
        let sent = self.running.as_ref().map(|(jobs, _)| jobs.send(job));
        match sent {
            Some(Ok(())) => Ok(result),
            _ => Err(Error::bug("offload", "a transfer queue has ended")),
        }
    }
}

impl Drop for TransferQueue {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.running.take() {
            drop(jobs);
            drop(thread.join());
        }
    }
}
