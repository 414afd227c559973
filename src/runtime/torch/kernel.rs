//! Kernels from generated CUDA source, compiled by NVRTC. Compiling needs no device.

use crate::error::{TorchError, check};
use crate::{cuda, handle, sys};
use std::ffi::{CString, c_char, c_void};
use tch::Tensor;

/// Compiles the kernel `fused` of a source for a compute capability (80, 90, …). Returns the binary.
///
/// # Errors
/// NVRTC cannot be loaded, or refuses the source; then with its log.
pub fn compile(source: &str, capability: i64) -> Result<Vec<u8>, TorchError> {
    let source = CString::new(source).map_err(|e| TorchError::refused(e.to_string()))?;
    let mut binary: Vec<u8> = Vec::new();
    // SAFETY: the source is lent for the call; `take` is called within it, with the vector.
    check(unsafe {
        sys::ck_kernel_compile(source.as_ptr(), capability, take, (&raw mut binary).cast())
    })?;
    Ok(binary)
}

extern "C" fn take(to: *mut c_void, data: *const c_char, size: i64) {
    let size = usize::try_from(size).unwrap_or(0);
    // SAFETY: called by `compile` with its vector and `size` bytes.
    let (to, data) = unsafe {
        (
            &mut *to.cast::<Vec<u8>>(),
            std::slice::from_raw_parts(data.cast::<u8>(), size),
        )
    };
    to.extend_from_slice(data);
}

/// A kernel that is loaded on a device.
pub struct Kernel {
    kernel: *mut c_void,
    device: usize,
}

// SAFETY: a kernel is never changed, and the driver takes launches from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Compiles a source for the current device and loads it.
    ///
    /// # Errors
    /// As [`compile`]; the driver's.
    pub fn new(source: &str, device: usize) -> Result<Kernel, TorchError> {
        let binary = compile(source, cuda::properties(device)?.capability)?;
        // SAFETY: the binary is lent for the call; a place to write to.
        let kernel =
            handle::made(|kernel| unsafe { sys::ck_kernel_load(binary.as_ptr().cast(), kernel) })?;
        Ok(Kernel { kernel, device })
    }

    /// Submits the kernel to the current stream, with the data of `tensors` and the numbers of `space` as parameters, in
    /// (blocks, threads of a block). The host does not wait.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(
        &self,
        tensors: &[&Tensor],
        space: &[i64],
        (blocks, threads): (i64, i64),
    ) -> Result<(), TorchError> {
        let lent: Vec<*const c_void> = tensors.iter().map(|t| handle::lend(t)).collect();
        // SAFETY: tensors and numbers are lent for the call, which copies the parameters.
        check(unsafe {
            sys::ck_kernel_launch(
                self.kernel,
                self.device as i64,
                lent.as_ptr(),
                lent.len() as i64,
                space.as_ptr().cast(),
                blocks,
                threads,
            )
        })
    }
}
