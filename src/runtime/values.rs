//! The tensors that are alive, by slot: weights always, all others during a run.

use super::capture::StepMode;
use super::convert;
use super::device;
use super::draws::Draws;
use super::fixed_draws::FixedDraws;
use super::kernels::{copy_into, empty};
use super::pending_exchanges;
use super::swap_store::SwapStore;
use super::train_state::{TrainState, Weight};
use super::transfers::Transfers;
use crate::place::Place;
use ckpt_passes::ir::Graph;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::rc::Rc;
use tch::{Device, Tensor};

/// The host keeps no copies of integer values with more elements than this.
const MAX_HOST_ELEMENTS: usize = 4096;

fn is_small(tensor: &Tensor) -> bool {
    let is_integral = convert::dtype(tensor.kind()).is_some_and(|d| !d.is_real());
    is_integral && tensor.numel() <= MAX_HOST_ELEMENTS
}

/// The tensors of a program.
pub(super) struct Values {
    pub place: Place,
    /// The kind of device whose blocks kernels use.
    pub blocks_of: DeviceKind,
    pub tensors: Vec<Option<Tensor>>,
    /// Copies of small integer values that the host knows, for a run on a device.
    pub host: Vec<Option<Tensor>>,
    pub draws: Draws,
    pub store: SwapStore,
    /// Transfers that are under way.
    pub transfers: Box<dyn Transfers>,
    /// Whether transfers run beside the nodes after them.
    pub overlap_transfers: bool,
    /// Weights and inputs that a run overwrites.
    pub train_state: TrainState,
    /// What the host sends to the device, for a step that is captured.
    pub uploads: Option<Uploads>,
    /// For the numbers of deferred checks.
    pub check_room: Option<Tensor>,
    /// What random nodes draw by in a step that is captured.
    pub fixed_draws: Option<Rc<FixedDraws>>,
}

impl Values {
    pub fn new(graph: &Graph, place: Place) -> Values {
        let nothing = || (0..graph.value_bound()).map(|_| None).collect();
        Values {
            place,
            blocks_of: place.kind(),
            tensors: nothing(),
            host: nothing(),
            draws: Draws::default(),
            store: SwapStore::default(),
            transfers: device::of(place).transfers(),
            overlap_transfers: true,
            train_state: TrainState::new(graph),
            uploads: None,
            check_room: None,
            fixed_draws: None,
        }
    }

    /// Prepares for a run what stays from run to run.
    pub fn prepare(&mut self, mode: StepMode) {
        self.store.maps = mode != StepMode::Capture;
        if !matches!(mode, StepMode::Capture | StepMode::Replay) {
            self.fixed_draws = None;
        }
        match (mode, &mut self.uploads) {
            (StepMode::Plain, _) => {
                self.train_state.stay(false);
                self.uploads = None;
            }
            (StepMode::WarmUp, _) => {
                self.train_state.stay(false);
                self.train_state.stay(true);
                self.uploads = Some(Uploads::default());
            }
            (StepMode::Capture, Some(uploads)) => uploads.is_whole = true,
            (StepMode::Capture | StepMode::Replay, _) => {}
        }
    }

    /// Returns the tensors that stay on the device for the sake of a capture, beside parameters and inputs.
    pub fn staying(&self) -> impl Iterator<Item = &Tensor> {
        let keys = self.fixed_draws.iter().map(|fixed| fixed.words());
        let uploads = self.uploads.iter().flat_map(Uploads::tensors);
        uploads.chain(keys).chain(&self.check_room)
    }

    /// Waits until a value is there that a transfer or a gather brings.
    ///
    /// # Errors
    /// Those of the transfer or gather.
    pub fn arrive(&mut self, slot: usize) -> Result<()> {
        self.transfers.finish_fetch(slot)?;
        let tensor = self.tensors[slot].as_ref();
        tensor.map_or(Ok(()), pending_exchanges::arrive)
    }

    /// Frees the tensors of some slots.
    pub fn clear<'a>(&mut self, slots: impl IntoIterator<Item = &'a usize>) {
        for slot in slots {
            self.tensors[*slot] = None;
            self.host[*slot] = None;
        }
    }

    /// Sets a weight. A weight that runs overwrite is copied before each run.
    pub fn set_weight(&mut self, slot: usize, weight: Weight) -> Result<()> {
        let rest = self.train_state.take_weight(slot, weight);
        rest.map_or(Ok(()), |weight| self.set(slot, weight.tensor()?))
    }

    /// Sets a value, on the device where the program runs. The host keeps a copy of small integer values that it
    /// computed.
    pub fn set(&mut self, slot: usize, tensor: Tensor) -> Result<()> {
        if device::of(self.place).is_host() {
            self.tensors[slot] = Some(tensor);
            return Ok(());
        }
        if tensor.device() == Device::Cpu && is_small(&tensor) {
            self.host[slot] = Some(tensor.shallow_clone());
        }
        let there = match &mut self.uploads {
            Some(uploads) if tensor.device() == Device::Cpu => {
                uploads.there(slot, &tensor, self.place)?
            }
            _ => device::moved(tensor, self.place)?,
        };
        self.tensors[slot] = Some(there);
        Ok(())
    }
}

/// The values that the host computes and the device reads. They depend on sizes and weights alone. So they stay on the
/// device from the warm-up run on, and a captured step copies them there without a transfer.
#[derive(Default)]
pub(super) struct Uploads {
    /// By slot: the value on the host and on the device.
    known: BTreeMap<usize, (Tensor, Tensor)>,
    /// Whether all values are known.
    pub is_whole: bool,
}

impl Uploads {
    fn there(&mut self, slot: usize, here: &Tensor, place: Place) -> Result<Tensor> {
        if !self.is_whole {
            let there = device::moved(here.shallow_clone(), place)?;
            self.known.insert(slot, (here.copy(), there));
        }
        let known = self.known.get(&slot);
        let Some((_, there)) = known.filter(|(was, _)| was.kind() == here.kind() && was == here)
        else {
            return Err(Error::bug(
                "run",
                "what the host computes for the device differs from run to run",
            ));
        };
        let own = empty(&there.size(), there.kind(), there.device())?;
        copy_into(&own, there)?;
        Ok(own)
    }

    /// Returns the tensors on the device.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.known.values().map(|(_, there)| there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uploaded_value_is_copied_and_must_not_change() {
        let mut uploads = Uploads::default();
        let of = |x: i64| Tensor::from_slice(&[x, 2, 3]);
        let first = uploads.there(5, &of(1), Place::Cpu).unwrap();
        uploads.is_whole = true;
        let second = uploads.there(5, &of(1), Place::Cpu).unwrap();
        assert!(first == of(1) && second == of(1));
        assert_ne!(first.data_ptr(), second.data_ptr());
        assert!(uploads.there(5, &of(2), Place::Cpu).is_err());
        assert!(uploads.there(6, &of(1), Place::Cpu).is_err());
        assert_eq!(uploads.tensors().count(), 1);
    }
}
