//! One reserved stretch of CPU memory in which libtorch's blocks go where a plan has them.
//!
//! While places are offered, what this thread allocates goes to the first of them that is for so many bytes and free.
//! What finds none comes from malloc as ever: the allocator never hands out memory twice, whatever the plan says. Needs
//! [`crate::memory::install`]. The memory is given back when the arena is dropped and its last block has died.

use crate::error::TorchError;
use crate::handle;
use crate::sys;
pub use crate::sys::Place;
use std::marker::PhantomData;

/// Bytes that a block takes beside its contents, and what blocks begin at multiples of.
pub const HEADER_BYTES: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct Arena {
    handle: *mut sys::CkArena,
    bytes: u64,
}

/// Places are on offer to this thread while it lives.
pub struct Offer<'a>(PhantomData<(&'a Arena, *const ())>);

impl Arena {
    /// Reserves memory; the system gives it page by page, as it is first used.
    ///
    /// # Errors
    /// `OutOfMemory` where so much cannot be reserved.
    pub fn new(bytes: u64) -> Result<Arena, TorchError> {
        let length = i64::try_from(bytes.max(1))
            .map_err(|_| TorchError::refused(format!("an arena of {bytes} bytes")))?;
        // SAFETY: a place to write to.
        let handle = handle::made(|arena| unsafe { sys::ck_arena_new(length, arena) })?;
        Ok(Arena { handle, bytes })
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Blocks that found a place so far.
    pub fn placed(&self) -> u64 {
        // SAFETY: the arena lives.
        unsafe { sys::ck_arena_placed(self.handle) }.unsigned_abs()
    }

    /// Offers places to this thread, in place of those offered before.
    ///
    /// # Panics
    /// A place that is not within the arena or does not begin at a multiple of [`HEADER_BYTES`]: our bug.
    pub fn offer<'a>(&'a self, places: &'a [Place]) -> Offer<'a> {
        let aligned = |p: &Place| p.from.unsigned_abs().is_multiple_of(HEADER_BYTES);
        let within = |p: &Place| 0 <= p.from && p.from <= p.to && p.to as u64 <= self.bytes;
        assert!(
            places.iter().all(|p| aligned(p) && within(p)),
            "places outside the arena"
        );
        // SAFETY: arena and places are lent for as long as the offer lives, and its end withdraws it.
        unsafe { sys::ck_arena_offer(self.handle, places.as_ptr(), places.len() as i64) };
        Offer(PhantomData)
    }
}

impl Drop for Offer<'_> {
    fn drop(&mut self) {
        // SAFETY: touches this thread's offer only.
        unsafe { sys::ck_arena_withdraw() };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: nothing can be offered any more; blocks that live keep the memory.
        unsafe { sys::ck_arena_free(self.handle) };
    }
}
