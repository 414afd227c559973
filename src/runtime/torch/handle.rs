//! Handles that cross the C interface: lent tensors, owned tensors, and calls that return a handle.

use crate::error::{TorchError, check};
use crate::sys;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// Returns the `at::Tensor*` of a tch tensor, lent.
pub fn lend(tensor: &tch::Tensor) -> *const c_void {
    tensor.as_ptr().cast()
}

/// As [`lend`]; null for no tensor.
pub fn lend_opt(tensor: Option<&tch::Tensor>) -> *const c_void {
    tensor.map_or(ptr::null(), lend)
}

/// Takes ownership of an `at::Tensor*` that the C++ side returned.
///
/// # Safety
/// `handle` is such a pointer, not null, and nobody else owns it.
pub unsafe fn own(handle: *const c_void) -> tch::Tensor {
    unsafe { tch::Tensor::from_ptr(handle.cast_mut().cast()) }
}

/// Runs a call that writes a handle to its argument.
pub fn made<T>(call: impl FnOnce(*mut *mut T) -> i32) -> Result<*mut T, TorchError> {
    let mut handle = ptr::null_mut();
    check(call(&mut handle))?;
    Ok(handle)
}

/// Runs a call that writes a new tensor to its argument.
pub fn new_tensor(call: impl FnOnce(*mut *mut c_void) -> i32) -> Result<tch::Tensor, TorchError> {
    // SAFETY: the tensor of such a call has no other owner.
    made(call).map(|tensor| unsafe { own(tensor) })
}

/// Copies a text and frees the original.
///
/// # Safety
/// `text` is a NUL-terminated string from the C++ side, not freed yet.
pub unsafe fn take_string(text: *mut c_char) -> String {
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        sys::ck_free(text.cast());
        copy
    }
}
