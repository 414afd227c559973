//! Checks that the results of nodes are finite, and finds the node that made the first ones that are not.
//!
//! Checks run on the host, right after the node and before any later one. They take no memory from libtorch's allocator.

use super::convert::{tch_error, torch_error};
use super::pending_exchanges;
use super::step::Step;
use super::values::Values;
use ckpt_passes::ir::{Graph, Id};
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use tch::Tensor;

/// What a run checks after each node.
#[derive(Default)]
pub(super) enum Check {
    #[default]
    Nothing,
    /// The values in these slots must be finite.
    Finite(BTreeSet<usize>),
    /// A node must not make NaN of numbers, nor infinities of finite numbers. Holds what is known by slot. Infinities that
    /// are given, such as those of a mask, may be passed on.
    Blame(RefCell<BTreeMap<usize, Numbers>>),
}

/// The worst number of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Numbers {
    Finite,
    Infinite,
    Nan,
}

impl Numbers {
    fn of(tensor: &Tensor) -> Result<Numbers> {
        if bytes::is_finite(tensor).map_err(torch_error)? {
            return Ok(Numbers::Finite);
        }
        let any = tensor.f_isnan().and_then(|each| each.f_any());
        let any = any.and_then(bool::try_from).map_err(|e| tch_error(&e))?;
        Ok(match any {
            true => Numbers::Nan,
            false => Numbers::Infinite,
        })
    }
}

impl Check {
    /// Checks the results of a node that has just run.
    pub(super) fn after(&self, step: &Step, values: &Values, graph: &Graph) -> Result<()> {
        let of = |slot: usize| match &values.tensors[slot] {
            Some(tensor) => {
                pending_exchanges::arrive(tensor)?;
                Numbers::of(tensor)
            }
            None => Ok(Numbers::Finite),
        };
        match self {
            Check::Nothing => {}
            Check::Finite(wanted) => {
                for slot in step.outs.iter().filter(|slot| wanted.contains(slot)) {
                    refuse(graph, *slot, of(*slot)?)?;
                }
            }
            Check::Blame(known) => {
                let mut known = known.borrow_mut();
                let mut worst = Numbers::Finite;
                for slot in step.ins.iter().flatten() {
                    let numbers = match known.get(slot) {
                        Some(numbers) => *numbers,
                        None => of(*slot)?,
                    };
                    known.insert(*slot, numbers);
                    worst = worst.max(numbers);
                }
                for slot in &step.outs {
                    let numbers = of(*slot)?;
                    if numbers > worst {
                        refuse(graph, *slot, numbers)?;
                    }
                    known.insert(*slot, numbers);
                }
            }
        }
        Ok(())
    }
}

fn refuse(graph: &Graph, slot: usize, numbers: Numbers) -> Result<()> {
    let what = match numbers {
        Numbers::Finite => return Ok(()),
        Numbers::Infinite => "an infinity",
        Numbers::Nan => "NaN",
    };
    let name = &graph.value(Id::new(slot)).name;
    Err(Error::verification(
        "finite",
        format!("`{name}` holds {what}"),
    ))
}
