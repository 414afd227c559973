//! CUDA, loaded on demand.
//!
//! [`load`] must run before libtorch's first CUDA query, also through tch, because libtorch caches its result. [`open`]
//! enables deterministic kernels and full precision for the whole process. Kernels run on libtorch's default stream, in the
//! order of their calls. Only transfers overlap them, on a [`CopyStream`].

use crate::error::{ErrorKind, TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::c_void;
use std::sync::OnceLock;
use tch::Tensor;

/// The allocator's counters, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Live blocks, rounded up by the allocator.
    pub live_bytes: u64,
    /// The largest `live_bytes` since the last [`reset_peak`].
    pub peak_bytes: u64,
    /// Requested bytes of the live blocks, before rounding.
    pub requested_live_bytes: u64,
    /// The largest `requested_live_bytes` since the last [`reset_peak`].
    pub requested_peak_bytes: u64,
    /// The most bytes that the allocator held for blocks since the last [`reset_peak`]; `None` where it reserves none.
    pub reserved_peak_bytes: Option<u64>,
}

/// Loads libtorch's CUDA library once. Calls nothing else of libtorch.
///
/// # Errors
/// The loader's message if the library, or one that it needs, cannot be loaded.
pub fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        // SAFETY: no memory is passed. Loading runs the library's initialisers, as linking would.
        check(unsafe { sys::ck_cuda_load() }).map_err(|e| e.message)
    });
    loaded.clone().map_err(TorchError::refused)
}

/// Returns the number of devices, after [`load`].
///
/// # Errors
/// libtorch asked for CUDA before the library was loaded, and remembers that there is none.
pub fn count() -> Result<usize, TorchError> {
    let mut devices = 0;
    // SAFETY: a place to write to.
    check(unsafe { sys::ck_cuda_count(&mut devices) })?;
    Ok(usize::try_from(devices).unwrap_or(0))
}

/// Makes a device current and enables deterministic kernels in full precision.
///
/// # Errors
/// The driver's.
pub fn open(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_prepare(device as i64) })
}

/// Sets whether libtorch refuses kernels without a deterministic form; [`open`] turns it on.
pub fn refuse_nondeterministic(refuse: bool) {
    // SAFETY: sets a flag of libtorch's.
    unsafe { sys::ck_cuda_refuse_nondeterministic(refuse.into()) }
}

/// Returns whether an operator was refused because it has no deterministic form.
pub fn is_nondeterministic(error: &TorchError) -> bool {
    error.kind == ErrorKind::Refused
        && error
            .message
            .contains("does not have a deterministic implementation")
}

/// Waits until the device has finished all submitted work.
///
/// # Errors
/// A kernel that failed since the last call.
pub fn synchronize(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_synchronize(device as i64) })
}

/// Reads the allocator's counters.
///
/// # Errors
/// A device that was not opened.
pub fn stats(device: usize) -> Result<Stats, TorchError> {
    let mut found = [0i64; 5];
    let [live, peak, requested_live, requested_peak, reserved_peak] = &mut found;
    // SAFETY: five places to write to.
    check(unsafe {
        sys::ck_cuda_memory_stats(
            device as i64,
            live,
            peak,
            requested_live,
            requested_peak,
            reserved_peak,
        )
    })?;
    let [live, peak, requested_live, requested_peak, reserved_peak] = found.map(i64::unsigned_abs);
    Ok(Stats {
        live_bytes: live,
        peak_bytes: peak,
        requested_live_bytes: requested_live,
        requested_peak_bytes: requested_peak,
        reserved_peak_bytes: Some(reserved_peak),
    })
}

/// Resets peaks to the current values.
///
/// # Errors
/// A device that was not opened.
pub fn reset_peak(device: usize) -> Result<(), TorchError> {
    // SAFETY: no memory is passed.
    check(unsafe { sys::ck_cuda_memory_reset_peak(device as i64) })
}

/// Properties of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Major and minor as one number: 8.6 is 86.
    pub capability: i64,
    /// Multiprocessors.
    pub processors: i64,
}

/// Reads the properties of a device.
///
/// # Errors
/// No CUDA runtime is loaded, or it refuses.
pub fn properties(device: usize) -> Result<Properties, TorchError> {
    let (mut capability, mut processors) = (0, 0);
    // SAFETY: two places to write to.
    check(unsafe { sys::ck_cuda_properties(device as i64, &mut capability, &mut processors) })?;
    Ok(Properties {
        capability,
        processors,
    })
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

/// Locks pages of host memory, so that transfers from and to them overlap kernels.
///
/// # Errors
/// No CUDA runtime was loaded, or it refuses: a limit, or pages that are locked already.
pub fn pin(bytes: &mut [u8]) -> Result<(), TorchError> {
    // SAFETY: the pages are mapped and ours; locking changes none of them.
    check(unsafe { sys::ck_cuda_pin(bytes.as_mut_ptr().cast(), bytes.len() as i64) })
}

/// Unlocks what [`pin`] has locked, before it is unmapped.
///
/// # Errors
/// Bytes that are not locked.
pub fn unpin(bytes: &mut [u8]) -> Result<(), TorchError> {
    // SAFETY: as in `pin`.
    check(unsafe { sys::ck_cuda_unpin(bytes.as_mut_ptr().cast()) })
}

/// A stream of transfers, which overlap kernels.
pub struct CopyStream {
    stream: *mut c_void,
    device: usize,
}

impl CopyStream {
    /// Creates a stream.
    ///
    /// # Errors
    /// A device that was not opened.
    pub fn new(device: usize) -> Result<CopyStream, TorchError> {
        // SAFETY: a place to write to.
        let stream = handle::made(|made| unsafe { sys::ck_cuda_copy_stream(device as i64, made) })?;
        Ok(CopyStream { stream, device })
    }

    /// Begins to copy one row-major tensor over another of the same type and dims. One is on the device, the other in
    /// [locked](pin) pages. The copy starts after all work submitted before it. The caller changes neither tensor until
    /// [`Done::wait`].
    ///
    /// # Errors
    /// Tensors that do not fit each other.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<Done, TorchError> {
        // SAFETY: the stream is ours and the tensors are lent for the call. The caller keeps their bytes until the end.
        let done = handle::made(|done| unsafe {
            sys::ck_cuda_copy_stream_copy(self.stream, handle::lend(from), handle::lend(to), done)
        })?;
        Ok(Done {
            done,
            device: self.device,
        })
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // SAFETY: made by `new` and dropped once. Running copies continue, because libtorch owns the stream.
        unsafe { sys::ck_cuda_copy_stream_drop(self.stream) }
    }
}

/// The end of a transfer.
pub struct Done {
    done: *mut c_void,
    device: usize,
}

impl Done {
    /// Makes work submitted from now on wait for the transfer. The host does not wait.
    ///
    /// # Errors
    /// The device fails.
    pub fn wait(&self) -> Result<(), TorchError> {
        // SAFETY: made by `copy`.
        check(unsafe { sys::ck_cuda_await(self.done, self.device as i64) })
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        // SAFETY: made by `copy` and dropped once.
        unsafe { sys::ck_cuda_copy_done_drop(self.done) }
    }
}
