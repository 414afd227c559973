//! Parameters and optimizer states that a run overwrites: private copies of them.
//!
//! A run never writes the tensors that a caller gives, nor the weights of the model's file. Before its first step it
//! makes copies that nobody else holds, and overwrites these. The next run starts from the given values again. Where
//! training continues from step to step ([`TrainState::go_on`]), a run starts from the copies that the last one left.
//!
//! A replayed step reads and writes the addresses of its capture. For it, inputs and copies stay at fixed addresses
//! ([`TrainState::stay`]), and given values are copied there.

use super::convert;
use super::device;
use super::kernels::{copy_into, empty};
use crate::place::Place;
use ckpt_passes::ir::{Def, Graph, Id, Tensor as Constant};
use ckpt_passes::ops::collective::own_parts;
use ckpt_passes::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use tch::Tensor;

/// A weight as it was given.
pub(super) enum Weight {
    Tensor(Tensor),
    Constant(Constant),
}

impl Weight {
    pub(super) fn tensor(&self) -> Result<Tensor> {
        match self {
            Weight::Tensor(tensor) => Ok(tensor.shallow_clone()),
            Weight::Constant(constant) => convert::tensor("a weight", constant),
        }
    }
}

/// The state of training, by slot.
#[derive(Default)]
pub(super) struct TrainState {
    /// The overwritten values, each with the result that overwrites it.
    updates: BTreeMap<usize, usize>,
    /// Inputs that each step reads as the first was given them: parts of frozen parameters.
    stays: BTreeSet<usize>,
    /// The overwritten weights, as they were given: bytes that are mapped stay mapped.
    weights: BTreeMap<usize, Weight>,
    goes_on: bool,
    /// The copies that the last run left, if the next run continues from them.
    kept: BTreeMap<usize, Tensor>,
    /// The tensors at fixed addresses, if inputs and copies stay there.
    places: Option<BTreeMap<usize, Tensor>>,
}

impl TrainState {
    /// Finds the weights and inputs that a graph overwrites: the first operands of updates.
    pub(super) fn new(graph: &Graph) -> TrainState {
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        let updates = nodes.filter(|node| node.op.is_update()).filter_map(|node| {
            let old = node.ins.first().copied().flatten()?;
            let is_static = !matches!(graph.value(old).def, Def::Node { .. });
            is_static.then(|| (Id::index(old), Id::index(node.outs[0])))
        });
        let updates: BTreeMap<usize, usize> = updates.collect();
        let parts = own_parts(graph).into_iter();
        let parts = parts.map(|part| Id::index(part.input));
        TrainState {
            stays: parts.filter(|slot| !updates.contains_key(slot)).collect(),
            updates,
            ..TrainState::default()
        }
    }

    /// Returns the slots of the results of updates.
    pub(super) fn results(&self) -> impl Iterator<Item = usize> {
        self.updates.values().copied()
    }

    pub(super) fn is_written(&self, slot: usize) -> bool {
        self.updates.contains_key(&slot)
    }

    /// Returns the copies that the last run left, by slot.
    pub(super) fn kept(&self) -> &BTreeMap<usize, Tensor> {
        &self.kept
    }

    /// Returns an overwritten weight as it was given.
    pub(super) fn given(&self, slot: usize) -> Option<&Weight> {
        self.weights.get(&slot)
    }

    /// Keeps what a run that failed left in `tensors`. No value has changed if no update had run.
    pub(super) fn recover(&mut self, tensors: &[Option<Tensor>]) {
        let left = self.updates.iter().filter(|_| self.goes_on);
        let left = left.filter_map(|(old, new)| {
            let tensor = tensors[*old].as_ref().or(tensors[*new].as_ref())?;
            Some((*old, tensor.shallow_clone()))
        });
        let stay = self.stays.iter().filter(|_| self.goes_on);
        let stay = stay.filter_map(|slot| Some((*slot, tensors[*slot].as_ref()?.shallow_clone())));
        self.kept.extend(left.chain(stay));
    }

    /// Stores a weight that is overwritten; returns any other.
    pub(super) fn take_weight(&mut self, slot: usize, weight: Weight) -> Option<Weight> {
        if !self.is_written(slot) {
            return Some(weight);
        }
        self.kept.remove(&slot);
        self.weights.insert(slot, weight);
        None
    }

    /// Returns an input at the place of the run; as a copy if it is overwritten.
    pub(super) fn input(&mut self, slot: usize, given: &Tensor, place: Place) -> Result<Tensor> {
        match self.is_written(slot) {
            true => self.own(slot, || Ok(given.shallow_clone()), place),
            false if self.places.is_some() => self.placed(slot, given, place),
            false => device::moved(given.shallow_clone(), place),
        }
    }

    /// Sets whether inputs and copies stay at the same addresses from run to run.
    pub(super) fn stay(&mut self, wanted: bool) {
        match wanted {
            true => drop(self.places.get_or_insert_default()),
            false => self.places = None,
        }
    }

    /// Returns the tensors at fixed addresses.
    pub(super) fn places(&self) -> impl Iterator<Item = &Tensor> {
        self.places.iter().flat_map(BTreeMap::values)
    }

    /// Returns a copy of `given`, at the fixed address of its slot if there is one.
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
            None => empty(&given.size(), given.kind(), device::of(place).device())?,
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

    /// Sets whether runs start from the state that the last one left. The next run starts from the given values.
    pub(super) fn go_on(&mut self, wanted: bool) {
        self.goes_on = wanted;
        self.kept.clear();
    }

    /// Returns the copy to overwrite, for a run that is given `source`.
    fn own(
        &mut self,
        slot: usize,
        source: impl FnOnce() -> Result<Tensor>,
        place: Place,
    ) -> Result<Tensor> {
        if let Some(kept) = self.kept.remove(&slot) {
            self.hold(slot, &kept);
            return Ok(kept);
        }
        self.placed(slot, &source()?, place)
    }

    /// Sets the copies of overwritten weights.
    pub(super) fn own_weights(
        &mut self,
        tensors: &mut [Option<Tensor>],
        place: Place,
    ) -> Result<()> {
        let weights = std::mem::take(&mut self.weights);
        let mut own = weights.iter().map(|(slot, weight)| {
            tensors[*slot] = Some(self.own(*slot, || weight.tensor(), place)?);
            Ok(())
        });
        let done = own.try_for_each(|done| done);
        self.weights = weights;
        done
    }

    /// Keeps the state that a run left in `tensors`, if the next run continues from it.
    pub(super) fn keep(&mut self, tensors: &[Option<Tensor>]) -> Result<()> {
        if !self.goes_on {
            return Ok(());
        }
        for (old, new) in &self.updates {
            if let (Some(own), Some(result)) = (&tensors[*old], &tensors[*new]) {
                // The result is a new tensor if a later node read the old one.
                if own.data_ptr() != result.data_ptr() {
                    copy_into(own, result)?;
                }
                self.kept.insert(*old, own.shallow_clone());
            }
        }
        for slot in &self.stays {
            if let Some(own) = &tensors[*slot] {
                self.kept.insert(*slot, own.shallow_clone());
            }
        }
        Ok(())
    }
}
