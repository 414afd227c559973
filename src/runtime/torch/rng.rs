//! Random generators on the CPU: the default one, its state, and separate ones for operators that take one.

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::c_void;
use tch::Tensor;

/// Seeds the default CPU generator, and only that one (tch's `manual_seed` seeds every device).
pub fn seed(seed: u64) -> Result<(), TorchError> {
    // SAFETY: plain values.
    check(unsafe { sys::ck_rng_seed(seed) })
}

/// The state of the default CPU generator: a uint8 vector for [`set_state`].
pub fn state() -> Result<Tensor, TorchError> {
    // SAFETY: a place to write to.
    handle::new_tensor(|tensor| unsafe { sys::ck_rng_state(tensor) })
}

/// Puts the default CPU generator back into a [`state`].
///
/// # Errors
/// `Refused` if `state` is no such state.
pub fn set_state(state: &Tensor) -> Result<(), TorchError> {
    // SAFETY: the tensor is lent for the call.
    check(unsafe { sys::ck_rng_set_state(handle::lend(state)) })
}

/// A generator of one's own, for [`crate::Arg::Generator`].
#[derive(Debug)]
pub struct Generator(*mut c_void);

// SAFETY: libtorch locks the generator's mutex around every use.
unsafe impl Send for Generator {}
unsafe impl Sync for Generator {}

impl Generator {
    /// A CPU generator with the given seed.
    pub fn new(seed: u64) -> Result<Self, TorchError> {
        // SAFETY: a place to write to.
        handle::made(|generator| unsafe { sys::ck_generator_new(seed, generator) }).map(Generator)
    }

    /// Starts the generator anew.
    pub fn seed(&self, seed: u64) -> Result<(), TorchError> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::ck_generator_seed(self.0, seed) })
    }

    /// Another generator in the same state.
    pub fn try_clone(&self) -> Result<Self, TorchError> {
        // SAFETY: the handle is alive; a place to write to.
        handle::made(|clone| unsafe { sys::ck_generator_clone(self.0, clone) }).map(Generator)
    }

    pub(crate) fn handle(&self) -> *const c_void {
        self.0
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and freed here only; libtorch counts its own references to what is behind it.
        unsafe { sys::ck_generator_free(self.0) }
    }
}
