//! What the host looks at only once a step is done, because a step that is captured cannot wait for it.
//!
//! A kernel that would ask the device for numbers, to refuse some, lists their least and largest here instead and goes on
//! with what is safe for any. A captured step writes them to one place, which is read after each replay.

use super::convert::tch_error;
use ckpt_passes::{Error, Result};
use std::cell::{Cell, RefCell};
use tch::{Device, Kind, Tensor};

/// Refuses a least and a largest number.
pub type Check = Box<dyn Fn(i64, i64) -> Result<()>>;

/// The questions of one step.
#[derive(Default)]
pub struct Later {
    /// The place in the order of the node that runs.
    pub at: Cell<usize>,
    asked: RefCell<Asked>,
}

#[derive(Default)]
struct Asked {
    checks: Vec<(usize, Check)>,
    numbers: Vec<Tensor>,
}

/// The questions of a step that has run or was captured, and where their answers are.
pub struct Answers {
    checks: Vec<(usize, Check)>,
    /// The least and the largest of each in turn; none where nothing was asked.
    pub numbers: Option<Tensor>,
}

impl Later {
    /// Asks for the least and the largest of int64 numbers, of which there are some.
    ///
    /// # Errors
    /// The device fails.
    pub fn ask(&self, numbers: &Tensor, check: Check) -> Result<()> {
        let (low, high) = (numbers.f_min(), numbers.f_max());
        let mut asked = self.asked.borrow_mut();
        asked.numbers.push(low.map_err(|e| tch_error(&e))?);
        asked.numbers.push(high.map_err(|e| tch_error(&e))?);
        asked.checks.push((self.at.get(), check));
        Ok(())
    }

    /// Brings the answers together, still on the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn answers(self) -> Result<Answers> {
        let Asked { checks, numbers } = self.asked.into_inner();
        let numbers = match numbers.is_empty() {
            true => None,
            false => Some(Tensor::f_stack(&numbers, 0).map_err(|e| tch_error(&e))?),
        };
        Ok(Answers { checks, numbers })
    }
}

impl Answers {
    /// Reads the answers and refuses what is to be refused; `place` says where the node at a place of the order is.
    ///
    /// # Errors
    /// The first check's; the device fails.
    pub fn judge(&self, place: impl Fn(usize) -> String) -> Result<()> {
        let Some(numbers) = &self.numbers else {
            return Ok(());
        };
        let here = numbers.f_to_device(Device::Cpu);
        let here = here.map_err(|e| tch_error(&e))?.to_kind(Kind::Int64);
        let here = Vec::<i64>::try_from(here)
            .map_err(|e| Error::bug("run", format!("what was asked of the device: {e}")))?;
        for ((at, check), seen) in self.checks.iter().zip(here.chunks_exact(2)) {
            check(seen[0], seen[1]).map_err(|e| e.at(place(*at)))?;
        }
        Ok(())
    }
}
