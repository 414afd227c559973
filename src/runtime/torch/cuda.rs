//! CUDA, loaded when it is asked for.
//!
//! [`open`] must come before anything else asks libtorch about CUDA (also through tch): libtorch remembers that there
//! was none. It chooses deterministic kernels and full precision for the whole process. Streams are libtorch's default
//! one, so that kernels run in the order of their calls.

use crate::error::{ErrorKind, TorchError, check};
use crate::sys;
use std::sync::OnceLock;

/// The allocator's figures at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that are in use, as large as the allocator made them.
    pub live_bytes: u64,
    /// The largest `live_bytes` since the last [`reset_peak`].
    pub peak_bytes: u64,
    /// What was asked for of the blocks in use.
    pub requested_live_bytes: u64,
    pub requested_peak_bytes: u64,
}

/// Loads libtorch's CUDA library; further calls do nothing. Returns how many devices there are.
///
/// # Errors
/// The loader's own words where the library, or one that it needs, cannot be loaded.
pub fn load() -> Result<usize, TorchError> {
    static LOADED: OnceLock<Result<usize, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let mut devices = 0;
        // SAFETY: a place to write to. Loading runs the library's own initialisers, as linking it would.
        match check(unsafe { sys::ck_cuda_load(&mut devices) }) {
            Ok(()) => Ok(usize::try_from(devices).unwrap_or(0)),
            Err(error) => Err(error.message),
        }
    });
    loaded.clone().map_err(TorchError::refused)
}

/// Makes a device current and ready: deterministic kernels, no reduced precision.
///
/// # Errors
/// Whatever the driver refuses.
pub fn open(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_prepare(device as i64) })
}

/// Whether a kernel that has no deterministic form is refused from now on; it is after [`open`].
pub fn refuse_nondeterministic(refuse: bool) {
    // SAFETY: sets a flag of libtorch's.
    unsafe { sys::ck_cuda_refuse_nondeterministic(refuse.into()) }
}

/// Whether an operator was refused because it has no deterministic form.
pub fn is_nondeterministic(error: &TorchError) -> bool {
    error.kind == ErrorKind::Refused
        && error
            .message
            .contains("does not have a deterministic implementation")
}

/// Waits until everything that was sent to the device is done.
///
/// # Errors
/// A kernel that failed since the last call.
pub fn synchronize(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_synchronize(device as i64) })
}

/// Reads the allocator's figures.
///
/// # Errors
/// A device that was not opened.
pub fn stats(device: usize) -> Result<Stats, TorchError> {
    let mut found = [0i64; 4];
    let [live, peak, requested_live, requested_peak] = &mut found;
    // SAFETY: four places to write to.
    check(unsafe {
        sys::ck_cuda_memory_stats(device as i64, live, peak, requested_live, requested_peak)
    })?;
    let [live, peak, requested_live, requested_peak] = found.map(i64::unsigned_abs);
    Ok(Stats {
        live_bytes: live,
        peak_bytes: peak,
        requested_live_bytes: requested_live,
        requested_peak_bytes: requested_peak,
    })
}

/// Starts new peaks at what is alive now.
///
/// # Errors
/// A device that was not opened.
pub fn reset_peak(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_memory_reset_peak(device as i64) })
}

/// Free and total bytes of a device.
///
/// # Errors
/// A device that was not opened.
pub fn memory_info(device: usize) -> Result<(u64, u64), TorchError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two places to write to.
    check(unsafe { sys::ck_cuda_memory_info(device as i64, &mut free, &mut total) })?;
    Ok((free.unsigned_abs(), total.unsigned_abs()))
}
