//! What is alive in a run, by slot: weights always, the rest during a run.

use super::convert;
use super::device;
use super::draws::Draws;
use super::graphs::Turn;
use super::kernels::{copy_into, empty};
use super::lanes::Lanes;
use super::outside::Outside;
use super::statics::Statics;
use crate::place::Place;
use ckpt_passes::ir::Graph;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use tch::{Device, Tensor};

/// Integer values of more elements than this are not kept on the CPU beside a device.
const MAX_HOST_ELEMENTS: usize = 4096;

fn is_small(tensor: &Tensor) -> bool {
    let is_integral = convert::dtype(tensor.kind()).is_some_and(|d| !d.is_float());
    is_integral && tensor.numel() <= MAX_HOST_ELEMENTS
}

/// See the module.
pub(super) struct Values {
    pub place: Place,
    pub tensors: Vec<Option<Tensor>>,
    /// Copies on the CPU of what is small, integral and known there; only where the run is elsewhere.
    pub host: Vec<Option<Tensor>>,
    pub draws: Draws,
    pub outside: Outside,
    /// Transfers under way beside the run.
    pub lanes: Lanes,
    /// Weights and inputs that a run writes over.
    pub statics: Statics,
    /// What a run brings to the device, for one that is captured.
    pub brought: Option<Brought>,
}

impl Values {
    pub fn new(graph: &Graph, place: Place) -> Values {
        let nothing = || (0..graph.value_bound()).map(|_| None).collect();
        Values {
            place,
            tensors: nothing(),
            host: nothing(),
            draws: Draws::default(),
            outside: Outside::default(),
            lanes: Lanes::default(),
            statics: Statics::new(graph),
            brought: None,
        }
    }

    /// Makes what stays from run to run ready for one.
    pub fn prepare(&mut self, turn: Turn) {
        match (turn, &mut self.brought) {
            (Turn::Plain, _) => {
                self.statics.stay(false);
                self.brought = None;
            }
            (Turn::WarmUp, _) => {
                self.statics.stay(false);
                self.statics.stay(true);
                self.brought = Some(Brought::default());
            }
            (Turn::Capture, Some(brought)) => brought.is_whole = true,
            (Turn::Capture | Turn::Replay, _) => {}
        }
    }

    /// Puts a weight where it belongs; one that a run writes over is copied before each.
    pub fn set_weight(&mut self, slot: usize, tensor: Tensor) -> Result<()> {
        let rest = self.statics.take_weight(slot, tensor);
        rest.map_or(Ok(()), |tensor| self.set(slot, tensor))
    }

    /// Puts a tensor where it belongs, with a copy on the CPU if it came from there and is small and integral.
    pub fn set(&mut self, slot: usize, tensor: Tensor) -> Result<()> {
        if self.place == Place::Cpu {
            self.tensors[slot] = Some(tensor);
            return Ok(());
        }
        if tensor.device() == Device::Cpu && is_small(&tensor) {
            self.host[slot] = Some(tensor.shallow_clone());
        }
        let there = match &mut self.brought {
            Some(brought) if tensor.device() == Device::Cpu => {
                brought.there(slot, &tensor, self.place)?
            }
            _ => device::moved(tensor, self.place)?,
        };
        self.tensors[slot] = Some(there);
        Ok(())
    }
}

/// What the host computes and the device reads: it depends on sizes and weights alone, so that it stays on the device from
/// the run before a capture on, which copies it there and waits for no transfer.
#[derive(Default)]
pub(super) struct Brought {
    /// By slot: as it was here, and there.
    known: BTreeMap<usize, (Tensor, Tensor)>,
    /// Whether all of it is known.
    pub is_whole: bool,
}

impl Brought {
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

    /// What lies on the device.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.known.values().map(|(_, there)| there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_brought_is_copied_and_must_not_change() {
        let mut brought = Brought::default();
        let of = |x: i64| Tensor::from_slice(&[x, 2, 3]);
        let first = brought.there(5, &of(1), Place::Cpu).unwrap();
        brought.is_whole = true;
        let second = brought.there(5, &of(1), Place::Cpu).unwrap();
        assert!(first == of(1) && second == of(1));
        assert_ne!(first.data_ptr(), second.data_ptr());
        assert!(brought.there(5, &of(2), Place::Cpu).is_err());
        assert!(brought.there(6, &of(1), Place::Cpu).is_err());
        assert_eq!(brought.tensors().count(), 1);
    }
}
