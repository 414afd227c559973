//! Exact accounting of CPU memory: every block libtorch asks of its allocator, in requested bytes.
//!
//! The counters are process-wide and cover all threads, kernels' temporaries included. They do not cover scratch that
//! a library (oneDNN, MKL) takes past libtorch's allocator or inside a [`Scratch`], nor tensors made before [`install`], nor bytes lent by
//! [`crate::bytes::from_bytes`]. Rounding and headers are not counted: the numbers are those a plan can predict.

use crate::sys;
use std::marker::PhantomData;
use std::sync::Once;

/// Makes libtorch allocate CPU memory through the counting allocator from now on. Call it before any tensor is made;
/// further calls do nothing.
pub fn install() {
    static INSTALL: Once = Once::new();
    // SAFETY: libtorch keeps the allocator for the process's life, and it is never freed. Blocks of the allocator
    // that was there before carry their own deleter.
    INSTALL.call_once(|| unsafe { sys::ck_memory_install() });
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of the blocks alive now.
    pub live_bytes: u64,
    /// The largest `live_bytes` since the start or the last [`reset_peak`].
    pub peak_bytes: u64,
    /// Blocks allocated since the start; those of zero bytes do not count.
    pub allocations: u64,
}

/// Reads the counters. All are zero until [`install`].
pub fn stats() -> Stats {
    let (mut live_bytes, mut peak_bytes, mut allocations) = (0, 0, 0);
    // SAFETY: three places to write to.
    unsafe { sys::ck_memory_stats(&mut live_bytes, &mut peak_bytes, &mut allocations) };
    // The counters only hold sums of sizes of live blocks, and so are never negative.
    Stats {
        live_bytes: live_bytes.unsigned_abs(),
        peak_bytes: peak_bytes.unsigned_abs(),
        allocations: allocations.unsigned_abs(),
    }
}

/// Bytes alive now.
pub fn live_bytes() -> u64 {
    stats().live_bytes
}

/// The largest number of bytes alive at once since the start or the last [`reset_peak`].
pub fn peak_bytes() -> u64 {
    stats().peak_bytes
}

/// What libraries take in the calls of this thread, one block at a time, comes from the thread's workspace while this
/// lives: oneDNN's packed operands of 16-bit products, whose bytes depend on the processor and the number of threads.
/// A workspace stays from call to call, beside the counted bytes; [`workspace_bytes`] tells its size.
#[must_use]
pub struct Scratch(PhantomData<*const ()>);

impl Scratch {
    /// Only around a call that makes no tensors: its result must be given.
    pub fn begin() -> Scratch {
        // SAFETY: counts scopes of the calling thread; `Scratch` does not leave it.
        unsafe { sys::ck_memory_scratch(1) };
        Scratch(PhantomData)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: ends the scope that `begin` began on this thread.
        unsafe { sys::ck_memory_scratch(0) };
    }
}

/// Bytes of the workspaces of all threads.
pub fn workspace_bytes() -> u64 {
    // SAFETY: reads an atomic.
    unsafe { sys::ck_memory_workspace_bytes() }.unsigned_abs()
}

/// Starts a new peak at what is alive now.
pub fn reset_peak() {
    // SAFETY: touches atomics only.
    unsafe { sys::ck_memory_reset_peak() }
}

/// Blocks of `threshold_bytes` and more are mapped and unmapped one by one, so that resident memory follows live bytes
/// closely; `None`, the start, leaves all to malloc. It costs time (fresh pages: 12 times at 1 MiB), hence is for
/// measuring resident memory, not for measuring time.
pub fn set_mmap_threshold(threshold_bytes: Option<u64>) {
    let bytes = threshold_bytes.map_or(i64::MAX, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    // SAFETY: touches an atomic only; each block remembers where it came from.
    unsafe { sys::ck_memory_set_mmap_threshold(bytes) }
}
