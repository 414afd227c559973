//! Storages: the memory blocks of tensors, which views share.

use crate::error::{TorchError, check};
use crate::handle;
use crate::op::scalar_type;
use crate::sys;
use tch::{Kind, Tensor};

/// Makes a row-major tensor on the CPU, not filled.
///
/// # Errors
/// `Refused` for a negative dim; `OutOfMemory` as it says.
pub fn empty(dims: &[i64], kind: Kind) -> Result<Tensor, TorchError> {
    let rank = dims.len() as i64;
    // SAFETY: the dims are lent for the call.
    handle::new_tensor(|tensor| unsafe {
        sys::ck_tensor_empty(dims.as_ptr(), rank, scalar_type(kind), tensor)
    })
}

/// Makes a view with other dims and strides (in elements) that begins where the tensor begins.
///
/// # Errors
/// `Refused` if dims and strides differ in number, a stride is negative, or the view leaves the storage.
pub fn view(tensor: &Tensor, dims: &[i64], strides: &[i64]) -> Result<Tensor, TorchError> {
    if dims.len() != strides.len() {
        return Err(TorchError::refused(format!(
            "a view has {} dims and {} strides",
            dims.len(),
            strides.len()
        )));
    }
    // SAFETY: the tensor, the dims and as many strides are lent for the call.
    handle::new_tensor(|view| unsafe {
        sys::ck_tensor_view(
            handle::lend(tensor),
            dims.as_ptr(),
            strides.as_ptr(),
            dims.len() as i64,
            view,
        )
    })
}

/// Identifies a live storage. The number may be reused once the storage is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(i64);

/// Returns the storage of a tensor.
///
/// # Errors
/// `Refused` if the tensor is undefined or has no storage (a sparse one).
pub fn storage_id(tensor: &Tensor) -> Result<StorageId, TorchError> {
    let mut id = 0;
    // SAFETY: the tensor is lent for the call, and there is a place to write to.
    check(unsafe { sys::ck_tensor_storage(handle::lend(tensor), &mut id) })?;
    Ok(StorageId(id))
}
