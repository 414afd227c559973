//! The numbers by which random nodes draw in a captured step.
//!
//! A captured step must not wait for the device, and a replay takes the numbers of the capture. So the host computes the keys
//! before each run and copies them to one tensor, which stays at its address. Kernels read the key there. The ratio of a
//! dropout is a weight and is read once.

use super::convert::tch_error;
use super::device;
use ckpt_passes::Result;
use ckpt_passes::ops::random::Key;
use std::collections::{BTreeMap, BTreeSet};
use tch::{Device, Kind, Tensor};

/// The keys and ratios of a program's random nodes, by the slots of their operands.
#[derive(Debug)]
pub struct FixedDraws {
    /// By slots of seed and stream, in the order of `words`.
    keys: BTreeMap<(usize, usize), [Tensor; 2]>,
    ratios: BTreeMap<usize, f64>,
    /// int32 [keys, 2]: the words of all keys.
    words: Tensor,
}

impl FixedDraws {
    /// Makes room for keys on a device, not filled. `keys` lists the slots of seed and stream.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(
        keys: impl Iterator<Item = (usize, usize)>,
        ratios: BTreeMap<usize, f64>,
        device: Device,
    ) -> Result<FixedDraws> {
        let slots: BTreeSet<(usize, usize)> = keys.collect();
        let words = device::at(device).empty(&[slots.len() as i64, 2], Kind::Int)?;
        let word = |key: usize, at: i64| {
            let row = words.f_select(0, key as i64);
            let word = row.and_then(|row| row.f_select(0, at));
            word.map_err(|e| tch_error(&e))
        };
        let keys = slots.into_iter().enumerate();
        let keys = keys.map(|(at, slots)| Ok((slots, [word(at, 0)?, word(at, 1)?])));
        Ok(FixedDraws {
            keys: keys.collect::<Result<_>>()?,
            ratios,
            words,
        })
    }

    /// Computes all keys and copies them to the device. `number` returns the number in a slot.
    ///
    /// # Errors
    /// A slot without a number; the device fails.
    pub fn fill(&self, number: impl Fn(usize) -> Result<i64>) -> Result<()> {
        let mut words = Vec::with_capacity(2 * self.keys.len());
        for (seed, stream) in self.keys.keys() {
            let key = Key::new(number(*seed)?, number(*stream)?);
            words.extend(key.words().map(|word| word as i32));
        }
        let here = Tensor::from_slice(&words).view([-1, 2]);
        let copied = self.words.shallow_clone().f_copy_(&here);
        copied.map_err(|e| tch_error(&e))
    }

    /// Returns the words of a key, int32 scalars on the device.
    pub fn key(&self, seed: usize, stream: usize) -> Option<&[Tensor; 2]> {
        self.keys.get(&(seed, stream))
    }

    /// Returns the ratio in a slot.
    pub fn ratio(&self, slot: usize) -> Option<f64> {
        self.ratios.get(&slot).copied()
    }

    /// Returns the tensor that stays on the device.
    pub fn words(&self) -> &Tensor {
        &self.words
    }
}
