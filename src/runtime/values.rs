//! What is alive in a run, by slot: weights always, the rest during a run.

use super::convert;
use super::device;
use super::draws::Draws;
use super::lanes::Lanes;
use super::outside::Outside;
use super::statics::Statics;
use crate::place::Place;
use ckpt_passes::Result;
use ckpt_passes::ir::Graph;
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
        self.tensors[slot] = Some(device::moved(tensor, self.place)?);
        Ok(())
    }
}
