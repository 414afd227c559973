//! A reserved range of CPU memory in which libtorch's blocks lie at planned offsets.
//!
//! While places are offered, an allocation of this thread goes to the first free place for that many bytes. An allocation
//! without a place comes from malloc, so even a wrong plan never hands out memory twice. Needs [`crate::memory::install`]. The
//! memory is released when the arena is dropped and its last block is freed.

use crate::error::TorchError;
use crate::handle;
use crate::sys;
pub use crate::sys::Place;
use std::marker::PhantomData;

/// Bytes of a block's header, and the alignment of blocks.
pub const HEADER_BYTES: u64 = 64;

/// A reserved range of memory.
#[derive(Debug)]
pub struct Arena {
    handle: *mut sys::CkArena,
    bytes: u64,
}

/// Offers places to this thread while it lives.
pub struct Offer<'a>(PhantomData<(&'a Arena, *const ())>);

impl Arena {
    /// Reserves memory. The system provides each page at its first use.
    ///
    /// # Errors
    /// `OutOfMemory` if the range cannot be reserved.
    pub fn new(bytes: u64) -> Result<Arena, TorchError> {
        let length = i64::try_from(bytes.max(1))
            .map_err(|_| TorchError::refused(format!("an arena of {bytes} bytes")))?;
        // SAFETY: a place to write to.
        let handle = handle::made(|arena| unsafe { sys::ck_arena_new(length, arena) })?;
        Ok(Arena { handle, bytes })
    }

    /// Returns the reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many blocks found a place so far.
    pub fn placed(&self) -> u64 {
        // SAFETY: the arena lives.
        unsafe { sys::ck_arena_placed(self.handle) }.unsigned_abs()
    }

    /// Offers places to this thread, instead of earlier ones.
    ///
    /// # Panics
    /// A place outside the arena or not aligned to [`HEADER_BYTES`], which is a bug.
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
        // SAFETY: no offer is alive, because offers borrow the arena; live blocks keep the memory.
        unsafe { sys::ck_arena_free(self.handle) };
    }
}
