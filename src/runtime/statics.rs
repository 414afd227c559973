//! Parameters and states that a run writes over: its own copies of them.
//!
//! The tensors that a caller gives, and the weights of the model's file, are never written. A run writes over copies that it
//! makes before its first step and that nobody else holds; the next run starts from the same values again. Where training
//! goes on from step to step ([`Statics::go_on`]), the copies stay and a run starts from what the last one left.
//!
//! A step that is replayed reads and writes where it did when it was captured: for it, inputs and copies lie where they lay
//! ([`Statics::stay`]), and what is given is copied there.

use super::device;
use super::kernels::{copy_into, empty};
use crate::place::Place;
use ckpt_passes::ir::{Def, Graph, Id};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use tch::Tensor;

/// See the module. Values are named by slot.
#[derive(Default)]
pub(super) struct Statics {
    /// What is written over, and the result that is.
    pairs: BTreeMap<usize, usize>,
    /// The weights among them, as they are given.
    weights: BTreeMap<usize, Tensor>,
    goes_on: bool,
    /// Where the last run left them, if the next goes on from there.
    kept: BTreeMap<usize, Tensor>,
    /// Where inputs and copies lie, if they stay there.
    places: Option<BTreeMap<usize, Tensor>>,
}

impl Statics {
    /// Which weights and inputs of a graph are written over: the first operands of updates.
    pub(super) fn new(graph: &Graph) -> Statics {
        let updates = graph.order().iter().map(|id| graph.node(*id));
        let updates = updates.filter(|node| node.op.is_update());
        let pairs = updates.filter_map(|node| {
            let old = node.ins.first().copied().flatten()?;
            let is_static = !matches!(graph.value(old).def, Def::Node { .. });
            is_static.then(|| (Id::index(old), Id::index(node.outs[0])))
        });
        Statics {
            pairs: pairs.collect(),
            ..Statics::default()
        }
    }

    /// What updates make of it.
    pub(super) fn results(&self) -> impl Iterator<Item = usize> {
        self.pairs.values().copied()
    }

    pub(super) fn is_written(&self, slot: usize) -> bool {
        self.pairs.contains_key(&slot)
    }

    /// Takes a weight that is written over; gives any other back.
    pub(super) fn take_weight(&mut self, slot: usize, tensor: Tensor) -> Option<Tensor> {
        if !self.is_written(slot) {
            return Some(tensor);
        }
        self.kept.remove(&slot);
        self.weights.insert(slot, tensor);
        None
    }

    /// An input where the run is; one that is written over as a copy.
    pub(super) fn input(&mut self, slot: usize, given: &Tensor, place: Place) -> Result<Tensor> {
        match self.is_written(slot) {
            true => self.own(slot, given, place),
            false if self.places.is_some() => self.placed(slot, given, place),
            false => device::moved(given.shallow_clone(), place),
        }
    }

    /// Whether inputs and copies lie in the same places from run to run from now on.
    pub(super) fn stay(&mut self, wanted: bool) {
        match wanted {
            true => drop(self.places.get_or_insert_default()),
            false => self.places = None,
        }
    }

    /// What lies in such places.
    pub(super) fn places(&self) -> impl Iterator<Item = &Tensor> {
        self.places.iter().flat_map(BTreeMap::values)
    }

    /// A copy of `given`, in its slot's place if that stays.
    fn placed(&mut self, slot: usize, given: &Tensor, place: Place) -> Result<Tensor> {
        let known = self.places.as_ref().and_then(|places| places.get(&slot));
        let tensor = match known {
            Some(there) if there.size() == given.size() && there.kind() == given.kind() => {
                there.shallow_clone()
            }
            Some(there) => {
                return Err(Error::bug("run", "an input does not fit where it stays")
                    .expected(format!("{:?}{:?}", there.kind(), there.size()))
                    .found(format!("{:?}{:?}", given.kind(), given.size())));
            }
            None => empty(&given.size(), given.kind(), device::torch(place))?,
        };
        copy_into(&tensor, given)?;
        self.hold(slot, &tensor);
        Ok(tensor)
    }

    fn hold(&mut self, slot: usize, tensor: &Tensor) {
        if let Some(places) = &mut self.places {
            places.insert(slot, tensor.shallow_clone());
        }
    }

    /// Whether a run starts from what the last one left; the next one does not.
    pub(super) fn go_on(&mut self, wanted: bool) {
        self.goes_on = wanted;
        self.kept.clear();
    }

    /// A tensor to write over, for a run that is given `source`.
    fn own(&mut self, slot: usize, source: &Tensor, place: Place) -> Result<Tensor> {
        if let Some(kept) = self.kept.remove(&slot) {
            self.hold(slot, &kept);
            return Ok(kept);
        }
        self.placed(slot, source, place)
    }

    /// Puts the weights to write over where they belong.
    pub(super) fn own_weights(
        &mut self,
        tensors: &mut [Option<Tensor>],
        place: Place,
    ) -> Result<()> {
        let weights = std::mem::take(&mut self.weights);
        let mut own = weights.iter().map(|(slot, weight)| {
            tensors[*slot] = Some(self.own(*slot, weight, place)?);
            Ok(())
        });
        let done = own.try_for_each(|done| done);
        self.weights = weights;
        done
    }

    /// Keeps what a run has left in `tensors`, if the next one goes on from there.
    pub(super) fn keep(&mut self, tensors: &[Option<Tensor>]) -> Result<()> {
        if !self.goes_on {
            return Ok(());
        }
        for (old, new) in &self.pairs {
            if let (Some(own), Some(result)) = (&tensors[*old], &tensors[*new]) {
                // Where something read the old tensor later, the result is another one.
                if own.data_ptr() != result.data_ptr() {
                    copy_into(own, result)?;
                }
                self.kept.insert(*old, own.shallow_clone());
            }
        }
        Ok(())
    }
}
