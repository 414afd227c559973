//! Products of float32 matrices of our own, where the library's are slow (`cpp/gemm.cpp` says where and why).
//!
//! An element's bits follow from its row, its column and the inner size alone: no layout, alignment or number of threads
//! changes them. Threads keep blocks that operands are packed into; [`crate::memory::workspace_bytes`] counts them.

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use tch::Tensor;

/// Whether this processor has them.
pub fn is_ours() -> bool {
    // SAFETY: asks the processor.
    unsafe { sys::ck_gemm_is_ours() != 0 }
}

/// `out` = alpha a b + beta c, of matrices with any strides, or of batches of them; the rows of `out` are contiguous. `c` has its dims, and may be
/// `out` itself; without it, or with a `beta` of 0, what `out` held is not read.
///
/// # Errors
/// `Refused` for what are no float32 matrices on the CPU, sizes that do not fit or an inner size of 0; `OutOfMemory` as it
/// says. Only where [`is_ours`].
pub fn write(
    a: &Tensor,
    b: &Tensor,
    c: Option<&Tensor>,
    alpha: f64,
    beta: f64,
    out: &Tensor,
) -> Result<(), TorchError> {
    // SAFETY: tensors are lent for the call, which checks that they are matrices of the right sizes.
    check(unsafe {
        sys::ck_gemm(
            handle::lend(a),
            handle::lend(b),
            handle::lend_opt(c),
            alpha,
            beta,
            handle::lend(out),
        )
    })
}
