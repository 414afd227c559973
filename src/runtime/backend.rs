//! The interface to the CPU and to CUDA devices.
//!
//! [`cpu`](super::cpu) and [`cuda`](super::cuda) implement it, and [`device`](super::device) finds the backend of a place.
//! Executor and kernels ask only this interface about the device.

use super::recorder::Recorder;
use super::transfers::Transfers;
use ckpt_passes::Result;
use ckpt_passes::analysis::sdpa::SdpaBackends;
pub use ckpt_torch::cuda::Stats;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// The memory of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All bytes of the place, in use or not; on the host at most the limit of its control group.
    pub total_bytes: u64,
    /// The bytes in use, by any process.
    pub used_bytes: u64,
}

/// A place that runs kernels.
pub trait Backend: Sync {
    /// Makes the place ready.
    ///
    /// # Errors
    /// Of kind environment: no CUDA library, no such device, a cuBLAS setting that is not deterministic.
    fn open(&self) -> Result<()>;

    /// The place as tch names it.
    fn device(&self) -> Device;

    /// The name of the hardware.
    fn name(&self) -> String;

    /// Reads the allocator's counters.
    ///
    /// # Errors
    /// The device fails.
    fn bytes(&self) -> Result<Stats>;

    /// Resets peaks to the live bytes.
    ///
    /// # Errors
    /// The device fails.
    fn reset_peak(&self) -> Result<()>;

    /// Returns the memory of the place; `None` where the system does not report it.
    ///
    /// # Errors
    /// The device fails.
    fn memory(&self) -> Result<Option<Memory>>;

    /// Waits until the place has finished all submitted work.
    ///
    /// # Errors
    /// A kernel that failed meanwhile.
    fn synchronize(&self) -> Result<()>;

    /// Returns the bytes of library workspaces outside libtorch's allocator; `None` if they come from it.
    fn workspace_bytes(&self) -> Option<u64>;

    /// Makes a row-major tensor, not filled.
    ///
    /// # Errors
    /// Not enough memory.
    fn empty(&self, dims: &[i64], kind: Kind) -> Result<Tensor>;

    /// Edits the bytes of a row-major tensor on the host.
    ///
    /// # Errors
    /// A bool tensor; not enough memory.
    fn edit_bytes(&self, x: &mut Tensor, edit: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// Returns PyTorch's fused attention kernels for the place.
    fn sdpa_backends(&self) -> SdpaBackends;

    /// Returns the recorder of steps.
    ///
    /// # Errors
    /// Why there is none.
    fn recorder(&self) -> std::result::Result<Rc<dyn Recorder>, String>;

    /// Makes the transfers of a program.
    fn transfers(&self) -> Box<dyn Transfers>;

    /// Returns whether tensors lie in the host's memory, so that kernels read numbers without waiting.
    fn is_host(&self) -> bool;

    /// Returns whether products of 16-bit matrices are added to float32 sums without widened copies.
    fn adds_narrow_products(&self) -> bool {
        !self.is_host()
    }

    /// Returns whether our own kernels for float32 products and attention run here.
    fn has_own_products(&self) -> bool {
        false
    }

    /// Returns whether libtorch sorts indices to write in their order. Its `index_add_` and `scatter_` then also copy what is
    /// written, and make the host wait for the device.
    fn sorts_indices(&self) -> bool {
        !self.is_host()
    }
}
