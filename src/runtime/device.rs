//! Finds the backend of a place.

use super::backend::Backend;
use super::convert::tch_error;
use super::cpu::Cpu;
use super::cuda::Cuda;
use crate::place::Place;
use ckpt_passes::{Error, Result};
use std::sync::LazyLock;
use tch::{Device, Tensor};

pub use super::cpu::resident_bytes;

/// libtorch numbers devices in a signed byte.
pub const MOST_DEVICES: usize = 128;

static CUDA: LazyLock<Vec<Cuda>> = LazyLock::new(|| (0..MOST_DEVICES).map(Cuda).collect());

/// Returns the backend of a place.
///
/// # Panics
/// A CUDA device whose number libtorch cannot express; [`Place::parse`] refuses it.
pub fn of(place: Place) -> &'static dyn Backend {
    match place {
        Place::Cpu => &Cpu,
        Place::Cuda(n) => &CUDA[n],
    }
}

/// Returns the backend where a tensor lies.
pub fn at(device: Device) -> &'static dyn Backend {
    match device {
        Device::Cuda(n) => &CUDA[n],
        _ => &Cpu,
    }
}

/// Returns the tensor at a place: itself if it lies there, else a copy.
///
/// # Errors
/// Not enough memory there.
pub fn moved(tensor: Tensor, to: Place) -> Result<Tensor> {
    let device = of(to).device();
    if tensor.device() == device {
        return Ok(tensor);
    }
    tensor.f_to_device(device).map_err(|e| tch_error(&e))
}

/// Refuses a run that needs more memory than a place has. The system might grant the memory and kill the process at its use.
///
/// # Errors
/// `environment[memory]`; the device fails.
pub fn expect_room(place: Place, bytes: u64) -> Result<()> {
    let Some(memory) = of(place).memory()? else {
        return Ok(());
    };
    if bytes <= memory.total_bytes {
        return Ok(());
    }
    Err(Error::environment(
        "memory",
        format!("a run takes {bytes} bytes beside weights and inputs"),
    )
    .found(format!("{place} has {} bytes", memory.total_bytes))
    .help("plan for a smaller --budget, or choose smaller sizes"))
}
