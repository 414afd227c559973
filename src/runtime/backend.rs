//! What the CPU and a CUDA device do differently, as one interface.
//!
//! [`cpu`](super::cpu) and [`cuda`](super::cuda) implement it. Executor and kernels are shared and ask it; nothing else
//! asks which device runs. [`device`](super::device) finds the backend of a place.

use super::recorder::Recorder;
use super::sdpa_backends::SdpaBackends;
use super::transfers::Transfers;
use ckpt_passes::Result;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// Bytes at a place, as its allocator counts them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bytes {
    pub live: u64,
    /// The most that were alive since the last [`Backend::reset_peak`].
    pub peak: u64,
    /// The largest sum of requested bytes, before blocks were rounded, and the sum now.
    pub requested_peak: u64,
    pub requested_live: u64,
}

/// The memory of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
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
    fn bytes(&self) -> Result<Bytes>;

    /// Starts new peaks at what is alive now.
    ///
    /// # Errors
    /// The device fails.
    fn reset_peak(&self) -> Result<()>;

    /// How much memory there is; `None` where the system does not say.
    ///
    /// # Errors
    /// The device fails.
    fn memory(&self) -> Result<Option<Memory>>;

    /// Waits until everything that was sent to the place is done.
    ///
    /// # Errors
    /// A kernel that failed meanwhile.
    fn synchronize(&self) -> Result<()>;

    /// Bytes of library workspaces outside the framework's allocator; `None` where they come out of it.
    fn workspace_bytes(&self) -> Option<u64>;

    /// A new row-major tensor, not filled.
    ///
    /// # Errors
    /// Not enough memory.
    fn empty(&self, dims: &[i64], kind: Kind) -> Result<Tensor>;

    /// Edits the bytes of a row-major tensor of the place, on the host.
    ///
    /// # Errors
    /// A bool tensor; not enough memory.
    fn edit_bytes(&self, x: &mut Tensor, edit: &mut dyn FnMut(&mut [u8])) -> Result<()>;

    /// PyTorch's fused attention kernels that the place has.
    fn sdpa_backends(&self) -> SdpaBackends;

    /// The recorder of steps.
    ///
    /// # Errors
    /// Why there is none.
    fn recorder(&self) -> std::result::Result<Rc<dyn Recorder>, String>;

    /// The transfers of one program.
    fn transfers(&self) -> Box<dyn Transfers>;

    /// Whether tensors lie in the host's memory, so that kernels read numbers without waiting.
    fn is_host(&self) -> bool;

    /// Whether products of 16-bit matrices are added to float32 sums without widened copies.
    fn adds_narrow_products(&self) -> bool;

    /// Whether our own kernels for float32 products and attention run here.
    fn has_own_products(&self) -> bool;

    /// Whether libtorch's `index_add_` makes the host wait for the device.
    fn index_add_waits(&self) -> bool;
}
