//! Checks of device values that the host evaluates after a step.
//!
//! The host must not wait for the device during a captured step. So a kernel that checks indices defers the check: it records
//! their smallest and largest, and continues in a way that is safe for any index. A captured step writes these numbers to one
//! tensor, which the host reads after each replay. That tensor is allocated before the step, so it is not part of the step's memory.

use super::convert::tch_error;
use ckpt_passes::{Error, Result};
use std::cell::{Cell, RefCell};
use tch::{Device, Kind, Tensor};

/// Accepts or refuses a smallest and a largest number.
pub type Check = Box<dyn Fn(i64, i64) -> Result<()>>;

/// The deferred checks of one step.
#[derive(Default)]
pub struct DeferredChecks {
    /// The position in the order of the node that runs.
    pub at: Cell<usize>,
    pending: RefCell<Pending>,
    /// Two int64 numbers for each check.
    room: Option<Tensor>,
}

#[derive(Default)]
struct Pending {
    checks: Vec<(usize, Check)>,
    numbers: Vec<Tensor>,
}

/// The checks of a step that has run or was captured, with the numbers that they check.
pub struct CheckResults {
    checks: Vec<(usize, Check)>,
    /// Smallest and largest number of each check in turn; `None` without checks.
    pub numbers: Option<Tensor>,
}

impl DeferredChecks {
    /// Creates checks that write their numbers to a tensor made by [`DeferredChecks::room`]. When it is full, further checks
    /// allocate tensors.
    pub fn in_room(room: Option<&Tensor>) -> DeferredChecks {
        DeferredChecks {
            room: room.map(Tensor::shallow_clone),
            ..DeferredChecks::default()
        }
    }

    /// Allocates a tensor for the numbers of `checks` checks.
    ///
    /// # Errors
    /// The device has no memory for it.
    pub fn room(checks: usize, device: Device) -> Result<Tensor> {
        let made = Tensor::f_zeros([checks as i64, 2], (Kind::Int64, device));
        made.map_err(|e| tch_error(&e))
    }

    /// Returns places for the numbers of the next check.
    fn places(&self) -> Option<[Tensor; 2]> {
        let (room, next) = (
            self.room.as_ref()?,
            self.pending.borrow().checks.len() as i64,
        );
        let row = (next < room.size()[0]).then(|| room.select(0, next))?;
        Some([row.select(0, 0), row.select(0, 1)])
    }

    /// Defers a check of the smallest and the largest of some int64 numbers, at least one.
    ///
    /// # Errors
    /// The device fails.
    pub fn defer(&self, numbers: &Tensor, check: Check) -> Result<()> {
        let (low, high) = match self.places() {
            Some([low, high]) => (
                numbers.f_min_unary_out(&low),
                numbers.f_max_unary_out(&high),
            ),
            None => (numbers.f_min(), numbers.f_max()),
        };
        let mut pending = self.pending.borrow_mut();
        pending.numbers.push(low.map_err(|e| tch_error(&e))?);
        pending.numbers.push(high.map_err(|e| tch_error(&e))?);
        pending.checks.push((self.at.get(), check));
        Ok(())
    }

    /// Collects the numbers in one tensor, on the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn results(self) -> Result<CheckResults> {
        let Pending { checks, numbers } = self.pending.into_inner();
        let numbers = match &self.room {
            _ if numbers.is_empty() => None,
            Some(room) if checks.len() as i64 <= room.size()[0] => {
                Some(room.narrow(0, 0, checks.len() as i64).view(-1))
            }
            _ => Some(Tensor::f_stack(&numbers, 0).map_err(|e| tch_error(&e))?),
        };
        Ok(CheckResults { checks, numbers })
    }
}

impl CheckResults {
    /// Reads the numbers and applies the checks. `explained` completes the error of the node at a position of the order.
    ///
    /// # Errors
    /// The first check's; the device fails.
    pub fn verify(&self, explained: impl Fn(usize, Box<Error>) -> Box<Error>) -> Result<()> {
        let Some(numbers) = &self.numbers else {
            return Ok(());
        };
        let here = numbers.f_to_device(Device::Cpu);
        let here = here.map_err(|e| tch_error(&e))?.to_kind(Kind::Int64);
        let here = Vec::<i64>::try_from(here)
            .map_err(|e| Error::bug("run", format!("deferred checks: {e}")))?;
        for ((at, check), seen) in self.checks.iter().zip(here.chunks_exact(2)) {
            check(seen[0], seen[1]).map_err(|e| explained(*at, e))?;
        }
        Ok(())
    }
}
