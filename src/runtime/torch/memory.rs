//! Exact counters of CPU memory: the requested bytes of every block from libtorch's allocator.
//!
//! The counters are process-wide and cover all threads and the temporaries of kernels. They do not cover memory that a library
//! (oneDNN, MKL) allocates itself or inside a [`Scratch`], tensors made before [`install`], and bytes lent by
//! [`crate::bytes::from_bytes`]. They exclude rounding and headers, because a plan cannot predict these.

use crate::sys;
use std::marker::PhantomData;
use std::sync::Once;

/// Installs the counting allocator. Must be called before any tensor is made; further calls do nothing.
pub fn install() {
    static INSTALL: Once = Once::new();
    // SAFETY: the allocator is never freed. Blocks of the previous allocator carry their own deleter.
    INSTALL.call_once(|| unsafe { sys::ck_memory_install() });
}

/// Values of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of live blocks.
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

/// Returns the live bytes.
pub fn live_bytes() -> u64 {
    stats().live_bytes
}

/// Returns the largest number of live bytes since the start or the last [`reset_peak`].
pub fn peak_bytes() -> u64 {
    stats().peak_bytes
}

/// While it lives, blocks that a library allocates in this thread come from the thread's workspace, up to four at a time.
/// oneDNN packs operands of 16-bit products there, and their size depends on the processor and the number of threads. Workspaces are
/// kept between calls and not counted as live bytes ([`workspace_bytes`]).
#[must_use]
pub struct Scratch(PhantomData<*const ()>);

impl Scratch {
    /// Begins a scope. The calls inside it must not make tensors.
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

/// Returns the bytes of all workspaces.
pub fn workspace_bytes() -> u64 {
    // SAFETY: reads an atomic.
    unsafe { sys::ck_memory_workspace_bytes() }.unsigned_abs()
}

/// Resets the peak to the live bytes.
pub fn reset_peak() {
    // SAFETY: touches atomics only.
    unsafe { sys::ck_memory_reset_peak() }
}
