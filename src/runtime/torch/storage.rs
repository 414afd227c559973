//! Which tensors share memory: a storage is what is allocated and freed, a tensor only a view of one.

use crate::error::{TorchError, check};
use crate::handle;
use crate::op::scalar_type;
use crate::sys;
use tch::{Kind, Tensor};

/// A new row-major tensor on the CPU, not filled.
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

/// The tensor's storage from where the tensor begins, seen with other dims and strides (in elements).
///
/// # Errors
/// `Refused` for as many strides as dims there are not, for a negative one, and for what would leave the storage.
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

/// Identifies a storage while it lives; once freed, its number may be given again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageId(i64);

/// The storage that `tensor` is a view of.
///
/// # Errors
/// `Refused` if the tensor is undefined or has no storage (a sparse one).
pub fn storage_id(tensor: &Tensor) -> Result<StorageId, TorchError> {
    read(tensor).map(|(id, _)| StorageId(id))
}

/// The bytes of the whole storage that `tensor` is a view of, however little of it the view shows.
///
/// # Errors
/// As [`storage_id`].
pub fn storage_bytes(tensor: &Tensor) -> Result<u64, TorchError> {
    read(tensor).map(|(_, bytes)| bytes.unsigned_abs())
}

fn read(tensor: &Tensor) -> Result<(i64, i64), TorchError> {
    let (mut id, mut bytes) = (0, 0);
    // SAFETY: the tensor is lent for the call, and there are two places to write to.
    check(unsafe { sys::ck_tensor_storage(handle::lend(tensor), &mut id, &mut bytes) })?;
    Ok((id, bytes))
}
