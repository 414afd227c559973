//! Which tensors share memory: a storage is what is allocated and freed, a tensor only a view of one.

use crate::error::{TorchError, check};
use crate::sys;
use tch::Tensor;

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
    check(unsafe { sys::ck_tensor_storage(sys::lend(tensor), &mut id, &mut bytes) })?;
    Ok((id, bytes))
}
