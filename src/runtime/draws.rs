//! libtorch's generators for the random ops of one run (`--rng native` and `--rng eager`).
//!
//! The recomputation of a node and its gradient draw from the node's stream again, so they need the generator in the same
//! state. `native` seeds a new generator each time. `eager` passes one generator from node to node, in the order of the
//! graph, and keeps the state in which each stream began. Random ops first run in the order of the model, so that a plan
//! changes no bit.

use super::convert::torch_error;
use super::fixed_draws::FixedDraws;
use crate::rng::Rng;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::random::Key;
use ckpt_passes::{Error, Result};
use ckpt_torch::rng::Generator;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;

/// The generators of one run.
#[derive(Default)]
pub struct Draws {
    rng: Rng,
    /// `counter`: keys and ratios for a step that must not wait for the device.
    pub fixed: Option<Rc<FixedDraws>>,
    /// `eager`: the generator of each seed of the graph, in its current state.
    generators: RefCell<BTreeMap<i64, Generator>>,
    /// By seed and stream.
    streams: RefCell<BTreeMap<(i64, i64), Beginning>>,
}

struct Beginning {
    /// The op that drew first.
    op: &'static OpDef,
    /// `eager`: the generator before that draw.
    generator: Option<Generator>,
}

impl Draws {
    /// Returns generators from which nothing has been drawn.
    pub fn new(rng: Rng) -> Draws {
        Draws {
            rng,
            ..Draws::default()
        }
    }

    /// Calls `draw` with the generator of a seed and stream, which is always in the same state.
    ///
    /// # Errors
    /// Two kinds of ops draw from one stream, such as a dropout and its mask: libtorch has no draws common to them.
    pub fn with<T>(
        &self,
        op: &'static OpDef,
        seed: i64,
        stream: i64,
        draw: impl FnOnce(&Generator) -> Result<T>,
    ) -> Result<T> {
        let mut streams = self.streams.borrow_mut();
        if let Some(begun) = streams.get(&(seed, stream)) {
            if begun.op != op {
                return Err(self.not_common(begun.op, op));
            }
            if let Some(generator) = &begun.generator {
                return draw(&generator.try_clone().map_err(torch_error)?);
            }
        }
        if self.rng != Rng::Eager {
            let generator = None;
            streams.insert((seed, stream), Beginning { op, generator });
            let number = Key::new(seed, stream).number();
            return draw(&Generator::new(number).map_err(torch_error)?);
        }
        let mut generators = self.generators.borrow_mut();
        let current = match generators.entry(seed) {
            Entry::Occupied(known) => known.into_mut(),
            // As `torch.manual_seed` takes it.
            Entry::Vacant(new) => new.insert(Generator::new(seed as u64).map_err(torch_error)?),
        };
        let generator = Some(current.try_clone().map_err(torch_error)?);
        streams.insert((seed, stream), Beginning { op, generator });
        draw(current)
    }

    fn not_common(&self, first: &OpDef, second: &OpDef) -> Box<Error> {
        let (first, second) = (first.name, second.name);
        Error::usage(
            "rng",
            format!(
                "{first} and {second} draw from one stream: --rng {} has no draws common to them",
                self.rng
            ),
        )
        .help("run with --rng counter")
    }

    /// Returns the source of random numbers.
    pub fn rng(&self) -> Rng {
        self.rng
    }
}
