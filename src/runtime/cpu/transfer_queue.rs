//! Transfers on the CPU: one queue for offloads and one for fetches, each a thread that copies tensors in turn.
//!
//! A queue copies only bytes: it runs no operator and allocates nothing from libtorch.

use crate::runtime::convert::torch_error;
use crate::runtime::swap_store::{Stored, SwapStore, new_tensor};
use crate::runtime::transfers::Transfers;
use crate::runtime::work_queue::WorkQueue;
use ckpt_passes::Result;
use ckpt_torch::bytes;
use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use tch::Tensor;

/// The transfers of one program.
#[derive(Default)]
pub struct TransferQueues {
    out: WorkQueue,
    back: WorkQueue,
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
        offload.map(|o| WorkQueue::wait(&o)?.tensor()).transpose()
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
        self.fetches
            .remove(&slot)
            .map_or(Ok(()), |f| WorkQueue::wait(&f))
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
        let fetched = fetches.map(|f| WorkQueue::wait(&f));
        let stored = offloads.map(|o| WorkQueue::wait(&o).map(drop));
        // Waits for all of them, also after an error.
        fetched.chain(stored).fold(Ok(()), Result::and)
    }
}
