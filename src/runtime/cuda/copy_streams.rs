//! Transfers on a CUDA device: one copy stream for offloads and one for fetches.
//!
//! The host only submits copies and waits; the device does the waiting. A `Release` makes all later work wait for the offload,
//! and the first reader of a fetched value makes it wait for the fetch. So the device reuses freed memory only after the
//! transfer, although the host runs ahead. A stored tensor is held until the fetch from it was waited for, so a mapping is
//! reused only after all earlier reads of it.
//!
//! Only locked host pages are copied while kernels run. Other transfers are done at once.
//!
//! Copies can be captured in a CUDA graph: a copy stream joins the capture when it waits for the captured stream, and leaves
//! it when the captured stream waits for the copy. The pages stay mapped and locked while the graph may be replayed.

use crate::runtime::convert::{self, tch_error, torch_error};
use crate::runtime::swap_store::SwapStore;
use crate::runtime::transfers::Transfers;
use ckpt_passes::Result;
use ckpt_torch::cuda::{self, CopyStream, Done};
use std::collections::BTreeMap;
use tch::{Device, Tensor};

/// The transfers of one program.
pub struct CopyStreams {
    device: usize,
    out: Option<CopyStream>,
    back: Option<CopyStream>,
    /// By slot: the end of the transfer, the tensor that is offloaded, and the stored one.
    offloads: BTreeMap<usize, (Done, Tensor, Tensor)>,
    /// By slot: the end of the transfer and the stored tensor.
    fetches: BTreeMap<usize, (Done, Tensor)>,
}

fn stream(stream: &mut Option<CopyStream>, device: usize) -> Result<&CopyStream> {
    match stream {
        Some(stream) => Ok(stream),
        None => Ok(stream.insert(CopyStream::new(device).map_err(torch_error)?)),
    }
}

impl CopyStreams {
    /// The streams of a device, created at their first transfer.
    pub fn new(device: usize) -> CopyStreams {
        CopyStreams {
            device,
            out: None,
            back: None,
            offloads: BTreeMap::new(),
            fetches: BTreeMap::new(),
        }
    }
}

impl Transfers for CopyStreams {
    fn begin_offload(
        &mut self,
        store: &SwapStore,
        tensor: &Tensor,
        to_disk: bool,
        slot: usize,
    ) -> Result<bool> {
        if to_disk || !store.pins || !tensor.is_contiguous() || tensor.numel() == 0 {
            return Ok(false);
        }
        let Some(there) = store.begin(tensor, false)?.locked()? else {
            return Ok(false);
        };
        let there = there.tensor()?;
        let done = stream(&mut self.out, self.device)?.copy(tensor, &there);
        let done = done.map_err(torch_error)?;
        self.offloads
            .insert(slot, (done, tensor.shallow_clone(), there));
        Ok(true)
    }

    fn finish_offload(&mut self, slot: usize) -> Result<Option<Tensor>> {
        let Some((done, _, there)) = self.offloads.remove(&slot) else {
            return Ok(None);
        };
        done.wait().map_err(torch_error)?;
        Ok(Some(there))
    }

    fn begin_fetch(
        &mut self,
        store: &SwapStore,
        from: &Tensor,
        slot: usize,
    ) -> Result<Option<Tensor>> {
        let is_float = convert::dtype(from.kind()).is_some_and(|d| d.is_real());
        // The host may need integers too.
        if !store.pins || !is_float {
            // The host reads the stored tensor now, so the offload must have finished.
            cuda::synchronize(self.device).map_err(torch_error)?;
            return Ok(None);
        }
        let options = (from.kind(), Device::Cuda(self.device));
        let here = Tensor::f_empty(from.size(), options).map_err(|e| tch_error(&e))?;
        let done = stream(&mut self.back, self.device)?.copy(from, &here);
        let done = done.map_err(torch_error)?;
        self.fetches.insert(slot, (done, from.shallow_clone()));
        Ok(Some(here))
    }

    fn finish_fetch(&mut self, slot: usize) -> Result<()> {
        match self.fetches.remove(&slot) {
            Some((done, _)) => done.wait().map_err(torch_error),
            None => Ok(()),
        }
    }

    fn uncaptured(&self, store: &SwapStore) -> Option<&'static str> {
        (!store.pins).then_some("the host's memory in which results wait is not locked")
    }

    fn join(&mut self) -> Result<()> {
        let fetches = std::mem::take(&mut self.fetches).into_values();
        let offloads = std::mem::take(&mut self.offloads).into_values();
        let all = fetches.map(|(done, _)| done);
        for done in all.chain(offloads.map(|(done, _, _)| done)) {
            done.wait().map_err(torch_error)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if self.fetches.is_empty() && self.offloads.is_empty() {
            return Ok(());
        }
        let done = cuda::synchronize(self.device).map_err(torch_error);
        self.fetches.clear();
        self.offloads.clear();
        done
    }
}
