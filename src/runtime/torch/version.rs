//! Which libtorch runs: its C++ interface changes between releases, so that only the one we were compiled against may.

use crate::error::TorchError;
use crate::handle;
use crate::sys;
use std::ffi::CStr;

/// The release whose headers this was compiled with, as `2.11.0`.
pub fn built_with() -> String {
    // SAFETY: a NUL-terminated string that is never freed.
    let text = unsafe { CStr::from_ptr(sys::ck_version_built_with()) };
    text.to_string_lossy().into_owned()
}

/// The release that was loaded, in its own words; empty if it does not say.
///
/// # Errors
/// `OutOfMemory` as it says.
pub fn loaded() -> Result<String, TorchError> {
    // SAFETY: a place to write to; what is left there is a NUL-terminated string of ours.
    let text = handle::made(|text| unsafe { sys::ck_version_loaded(text) })?;
    Ok(unsafe { handle::take_string(text) })
}
