//! Transfers beside a run on a CUDA device: a stream out and a stream in, which the host only fills.
//!
//! Who waits is the device: a `Release` lets whatever is sent to it afterwards wait until what leaves is outside, and so does the
//! first reader of what comes in. Memory of the device that is free by then is therefore not used before, though the host
//! is ahead. What waits outside is held until what comes from it is waited for: a mapping that is free again has been read by
//! everything that a later transfer into it waits for.
//!
//! Only pages that are locked in the host's memory are copied beside a run; what has others is moved at once.

use super::convert::{self, torch_error};
use super::outside::Outside;
use ckpt_passes::Result;
use ckpt_torch::cuda::{self, Done, Lane};
use std::collections::BTreeMap;
use tch::{Device, Tensor};

#[derive(Default)]
pub struct SideStreams {
    out: Option<Lane>,
    back: Option<Lane>,
    /// By the slot of what they make: the end, what leaves, and what is outside then.
    leaving: BTreeMap<usize, (Done, Tensor, Tensor)>,
    /// The end, and what it comes from.
    coming: BTreeMap<usize, (Done, Tensor)>,
    device: usize,
}

fn lane(lane: &mut Option<Lane>, device: usize) -> Result<&Lane> {
    match lane {
        Some(lane) => Ok(lane),
        None => Ok(lane.insert(Lane::new(device).map_err(torch_error)?)),
    }
}

impl SideStreams {
    /// Begins to move a tensor out; `false` where that must be done at once.
    ///
    /// # Errors
    /// The device fails; no memory.
    pub fn leave(&mut self, outside: &Outside, tensor: &Tensor, slot: usize) -> Result<bool> {
        let Device::Cuda(device) = tensor.device() else {
            return Ok(false);
        };
        if !outside.pins || !tensor.is_contiguous() || tensor.numel() == 0 {
            return Ok(false);
        }
        let Some(there) = outside.begin(tensor, false)?.locked()? else {
            return Ok(false);
        };
        let there = there.tensor()?;
        self.device = device;
        let done = lane(&mut self.out, device)?.copy(tensor, &there);
        let done = done.map_err(torch_error)?;
        self.leaving
            .insert(slot, (done, tensor.shallow_clone(), there));
        Ok(true)
    }

    /// What left; `None` if it was moved at once.
    ///
    /// # Errors
    /// The device fails.
    pub fn left(&mut self, slot: usize) -> Result<Option<Tensor>> {
        match self.leaving.remove(&slot) {
            Some((done, _, there)) => {
                done.wait().map_err(torch_error)?;
                Ok(Some(there))
            }
            None => Ok(None),
        }
    }

    /// Begins to move a tensor in: what it will be; `None` where that must be done at once.
    ///
    /// # Errors
    /// The device fails; no memory.
    pub fn come(
        &mut self,
        outside: &Outside,
        from: &Tensor,
        (device, slot): (usize, usize),
    ) -> Result<Option<Tensor>> {
        let is_float = convert::dtype(from.kind()).is_some_and(|d| d.is_float());
        // Integers may be wanted on the host as well.
        if !outside.pins || !is_float || from.device() != Device::Cpu || from.numel() == 0 {
            // The host reads it now: it must be there.
            cuda::synchronize(device).map_err(torch_error)?;
            return Ok(None);
        }
        let options = (from.kind(), Device::Cuda(device));
        let here = Tensor::f_empty(from.size(), options).map_err(|e| convert::tch_error(&e))?;
        self.device = device;
        let done = lane(&mut self.back, device)?.copy(from, &here);
        let done = done.map_err(torch_error)?;
        self.coming.insert(slot, (done, from.shallow_clone()));
        Ok(Some(here))
    }

    /// Waits for what comes in to a slot, if anything does.
    ///
    /// # Errors
    /// The device fails.
    pub fn arrive(&mut self, slot: usize) -> Result<()> {
        match self.coming.remove(&slot) {
            Some((done, _)) => done.wait().map_err(torch_error),
            None => Ok(()),
        }
    }

    /// Waits for all that nobody has waited for, on the host.
    ///
    /// # Errors
    /// The device fails.
    pub fn finish(&mut self) -> Result<()> {
        if self.coming.is_empty() && self.leaving.is_empty() {
            return Ok(());
        }
        let done = cuda::synchronize(self.device).map_err(torch_error);
        self.coming.clear();
        self.leaving.clear();
        done
    }
}
