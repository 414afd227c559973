//! Whether PyTorch's fused attention kernels can read an operand in place.

use crate::ir::layout::view_strides;
use crate::ir::op::contiguous_strides;

/// Sizes of heads and rows are multiples of this many 16-bit elements, 16 bytes.
pub const ALIGNMENT_ELEMENTS: i64 = 8;

/// Batch, heads, rows, columns.
pub type Axes = [i64; 4];

/// Returns the strides in which the library reads an operand in place, with its leading axes as one; `None` if it must be
/// copied. Columns must be contiguous, other strides positive multiples of 16 bytes, and the batch outermost. An axis of size 1
/// gets its row-major stride.
pub fn strides_in_place(dims: &[i64], strides: &[i64]) -> Option<Axes> {
    let axes = axes(dims)?;
    let mut seen: Axes = view_strides(dims, strides, &axes)?.try_into().ok()?;
    let plain = contiguous_strides(&axes);
    for axis in 0..4 {
        if axes[axis] == 1 {
            seen[axis] = plain[axis];
        }
    }
    let is_apart = |stride: &i64| *stride > 0 && stride % ALIGNMENT_ELEMENTS == 0;
    let in_place = seen[3] == 1
        && seen[..3].iter().all(is_apart)
        && (axes[0] == 1 || seen[0] >= seen[1].max(seen[2]));
    in_place.then_some(seen)
}

/// Returns dims with the leading axes as one, and an axis of size 1 for missing heads.
pub fn axes(dims: &[i64]) -> Option<Axes> {
    match dims {
        [rows, columns] => Some([1, 1, *rows, *columns]),
        [lead @ .., heads, rows, columns] => Some([lead.iter().product(), *heads, *rows, *columns]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_in_place() {
        let of = strides_in_place;
        assert_eq!(of(&[5, 8], &[8, 1]), Some([40, 40, 8, 1]));
        assert_eq!(of(&[2, 5, 8], &[40, 8, 1]), Some([80, 40, 8, 1]));
        // Heads inside, as a projection leaves them, and a part of three.
        assert_eq!(of(&[3, 2, 5, 8], &[80, 8, 16, 1]), Some([80, 8, 16, 1]));
        assert_eq!(of(&[3, 2, 5, 8], &[240, 8, 48, 1]), Some([240, 8, 48, 1]));
        assert_eq!(
            of(&[3, 4, 2, 5, 8], &[320, 80, 40, 8, 1]),
            Some([80, 40, 8, 1])
        );
        // Axes of size 1 may have any stride.
        assert_eq!(of(&[1, 1, 5, 8], &[3, 7, 8, 1]), Some([40, 40, 8, 1]));
        for (dims, strides) in [
            (&[3, 2, 5, 8][..], &[80, 40, 1, 5][..]),
            (&[3, 2, 5, 8], &[0, 40, 8, 1]),
            (&[3, 2, 5, 8], &[80, 0, 8, 1]),
            (&[3, 2, 5, 8], &[108, 54, 9, 1]),
            (&[3, 2, 5, 8], &[8, 120, 24, 1]),
            (&[3, 4, 2, 5, 8], &[80, 240, 40, 8, 1]),
        ] {
            assert_eq!(of(dims, strides), None, "{dims:?} {strides:?}");
        }
    }
}
