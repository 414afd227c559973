//! Tiles of attention and of its gradient on the CPU, each in one call (`cpp/attention.cpp`). Where [`crate::product`]'s
//! products are ours.
//!
//! Computed in float32. An element's bits follow from its row, its column and the sizes alone, whatever the number of
//! threads.

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use tch::Tensor;

/// `r` queries of `h` heads, and the `n` keys that any of them may see.
pub struct Tile<'a> {
    /// [h, r, d], in float32 or a 16-bit type.
    pub q: &'a Tensor,
    /// [h, n, d] and [h, n, e], float32; a gradient reads values for `dq` and `dk` only.
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    /// [h, r, n], added to the scores; a boolean one hides what is false.
    pub bias: Option<&'a Tensor>,
    /// softcap·tanh(scale/softcap·q·k), or scale·q·k where `softcap` is 0.
    pub scale: f64,
    pub softcap: f64,
    /// Row `i` sees the keys from `first + i` and below `end + i`; `None`: all.
    pub first: Option<i64>,
    pub end: Option<i64>,
    /// Whether a query that sees no key gives NaN; else zeros.
    pub empty_is_nan: bool,
    /// Buffers of float32: [h, r, n]; [h, r, 1], for [`attend`] only; [h, r, e], or for a gradient [h, r, d]; as `q`, where
    /// that is of another type.
    pub scores: &'a Tensor,
    pub sums: Option<&'a Tensor>,
    pub result: Option<&'a Tensor>,
    pub q_copy: Option<&'a Tensor>,
}

/// What [`attend_back`] makes of a tile.
pub struct Gradients<'a> {
    /// [h, r, e].
    pub dy: &'a Tensor,
    /// Written.
    pub dq: Option<&'a Tensor>,
    /// Added to; float32.
    pub dk: Option<&'a Tensor>,
    pub dv: Option<&'a Tensor>,
    /// Buffers of float32: as `dy`, where that is of another type; [h, r, n], for `dq` and `dk`; the same, where scores are
    /// capped.
    pub dy_copy: Option<&'a Tensor>,
    pub slopes: Option<&'a Tensor>,
    pub capped: Option<&'a Tensor>,
}

impl Tile<'_> {
    fn lent(&self) -> sys::CkTile {
        sys::CkTile {
            q: handle::lend(self.q),
            k: handle::lend(self.k),
            v: handle::lend(self.v),
            bias: handle::lend_opt(self.bias),
            scores: handle::lend(self.scores),
            sums: handle::lend_opt(self.sums),
            result: handle::lend_opt(self.result),
            q_copy: handle::lend_opt(self.q_copy),
            scale: self.scale,
            softcap: self.softcap,
            first: self.first.unwrap_or(i64::MIN),
            end: self.end.unwrap_or(i64::MAX),
            empty_is_nan: i32::from(self.empty_is_nan),
        }
    }
}

/// The result `y` [h, r, e] of a tile, and where it is wanted the log-sum-exp [h, r, 1] of its scores, float32.
///
/// # Errors
/// `Refused` for types and sizes that do not fit, or buffers that are missing; `OutOfMemory` as it says.
pub fn attend(tile: &Tile, y: &Tensor, lse: Option<&Tensor>) -> Result<(), TorchError> {
    let tile = tile.lent();
    // SAFETY: tensors are lent for the call, which checks their types and sizes.
    check(unsafe { sys::ck_attend(&tile, handle::lend(y), handle::lend_opt(lse)) })
}

/// A tile's part in the gradients.
///
/// # Errors
/// See [`attend`].
pub fn attend_back(tile: &Tile, gradients: &Gradients) -> Result<(), TorchError> {
    let tile = tile.lent();
    let gradients = sys::CkTileGradients {
        dy: handle::lend(gradients.dy),
        dy_copy: handle::lend_opt(gradients.dy_copy),
        slopes: handle::lend_opt(gradients.slopes),
        capped: handle::lend_opt(gradients.capped),
        dq: handle::lend_opt(gradients.dq),
        dk: handle::lend_opt(gradients.dk),
        dv: handle::lend_opt(gradients.dv),
    };
    // SAFETY: see `attend`.
    check(unsafe { sys::ck_attend_back(&tile, &gradients) })
}
