//! Tiles of attention and of its gradient on the CPU, each in one call (`cpp/attention.cpp`). Available only where
//! [`crate::product`] has our own products.
//!
//! Tiles are computed in float32. The bits of an element depend only on its row, its column and the sizes, not on the number of
//! threads.

use crate::error::{TorchError, check};
use crate::sys;
pub use crate::sys::{Gradients, Lent, Tile};

/// Computes a tile of the result `y` [h, r, e] and of its log-sum-exp, float32 [h, r, 1].
///
/// # Errors
/// `Refused` for tensors that do not fit each other and where products are not ours; `OutOfMemory` as it says.
pub fn attend(tile: &Tile, y: Lent, lse: Option<Lent>) -> Result<(), TorchError> {
    // SAFETY: all tensors are lent for the call.
    check(unsafe { sys::ck_attend(tile, y, lse) })
}

/// Adds a tile's contribution to the gradients.
///
/// # Errors
/// As [`attend`].
pub fn attend_back(tile: &Tile, gradients: &Gradients) -> Result<(), TorchError> {
    // SAFETY: all tensors are lent for the call.
    check(unsafe { sys::ck_attend_back(tile, gradients) })
}
