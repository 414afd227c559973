//! CPU random generators for operators that take one.

use crate::error::TorchError;
use crate::handle;
use crate::sys;
use std::ffi::c_void;

/// A random generator, for [`crate::Arg::Generator`].
#[derive(Debug)]
pub struct Generator(*mut c_void);

// SAFETY: libtorch locks the generator's mutex around every use.
unsafe impl Send for Generator {}
unsafe impl Sync for Generator {}

impl Generator {
    /// Creates a CPU generator with the given seed.
    pub fn new(seed: u64) -> Result<Self, TorchError> {
        // SAFETY: a place to write to.
        handle::made(|generator| unsafe { sys::ck_generator_new(seed, generator) }).map(Generator)
    }

    /// Returns another generator in the same state.
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
        // SAFETY: the handle is ours and freed only here; libtorch counts its own references to the generator.
        unsafe { sys::ck_generator_free(self.0) }
    }
}
