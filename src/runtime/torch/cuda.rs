//! CUDA, loaded when it is asked for.
//!
//! [`open`] must come before anything else asks libtorch about CUDA (also through tch): libtorch remembers that there
//! was none. It chooses deterministic kernels and full precision for the whole process. Streams are libtorch's default
//! one, so that kernels run in the order of their calls; only transfers run beside it, on a [`CopyStream`].

use crate::error::{ErrorKind, TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::c_void;
use std::sync::OnceLock;
use tch::Tensor;

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

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Major and minor as one number: 8.6 is 86.
    pub capability: i64,
    /// Multiprocessors.
    pub processors: i64,
}

/// # Errors
/// No CUDA runtime was loaded, or it does not say.
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

/// Locks pages of the host in its memory, so that transfers from and to them run beside whatever else the device does.
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

/// Transfers one after the other, beside what else the device does.
pub struct CopyStream {
    lane: *mut c_void,
    device: usize,
}

impl CopyStream {
    /// # Errors
    /// A device that was not opened.
    pub fn new(device: usize) -> Result<CopyStream, TorchError> {
        // SAFETY: a place to write to.
        let lane = handle::made(|lane| unsafe { sys::ck_cuda_lane(device as i64, lane) })?;
        Ok(CopyStream { lane, device })
    }

    /// Begins to copy one tensor over another of its type and dims, both row-major, one of them on the device and one in
    /// pages that are [locked](pin). It begins after all that was sent to the device before. The caller keeps both tensors
    /// as they are until [`Done::wait`].
    ///
    /// # Errors
    /// Tensors that do not fit each other.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<Done, TorchError> {
        // SAFETY: the lane is ours, and the tensors are lent for the call; the copy holds on to what it needs of them as
        // the caller promises.
        let done = handle::made(|done| unsafe {
            sys::ck_cuda_lane_copy(self.lane, handle::lend(from), handle::lend(to), done)
        })?;
        Ok(Done {
            done,
            device: self.device,
        })
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // SAFETY: made by `new` and dropped once. What is under way goes on: the stream is libtorch's.
        unsafe { sys::ck_cuda_lane_drop(self.lane) }
    }
}

/// The end of a transfer.
pub struct Done {
    done: *mut c_void,
    device: usize,
}

impl Done {
    /// Lets all that is sent to the device from now on wait for it. The host does not wait.
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
        unsafe { sys::ck_cuda_done_drop(self.done) }
    }
}
