//! Strides of views and the geometry of slices: pure functions on numbers that the memory model and the kernels share.
//!
//! This module alone decides whether a change of shape is a view or a copy, by libtorch's rules. Strides are in
//! elements. The stride of an axis of size 1 has no meaning: it may differ from libtorch's, and nothing here depends on
//! it.

use super::op::contiguous_strides;

/// Elements of a tensor of these sizes; saturates.
pub fn count(dims: &[i64]) -> i64 {
    dims.iter().fold(1, |n, d| n.saturating_mul(*d))
}

/// Returns the strides with which a tensor of `dims` and `strides` is a view of shape `new_dims`, or `None` if that
/// needs a copy (`at::detail::computeStride`). Both shapes have the same number of elements.
pub fn view_strides(dims: &[i64], strides: &[i64], new_dims: &[i64]) -> Option<Vec<i64>> {
    if dims.contains(&0) {
        let unchanged = dims == new_dims;
        return Some(if unchanged {
            strides.to_vec()
        } else {
            contiguous_strides(new_dims)
        });
    }
    let (Some(mut chunk_stride), Some(mut left)) = (strides.last().copied(), Some(new_dims.len()))
    else {
        return Some(vec![1; new_dims.len()]);
    };
    let mut new_strides = vec![0; new_dims.len()];
    // Runs of old axes that lie like one axis ("chunks") are matched, innermost first, with runs of new axes.
    let (mut old_count, mut new_count) = (1i64, 1i64);
    for axis in (0..dims.len()).rev() {
        old_count = old_count.saturating_mul(dims[axis]);
        let chunk_ends = axis == 0
            || (dims[axis - 1] != 1 && strides[axis - 1] != old_count.saturating_mul(chunk_stride));
        if !chunk_ends {
            continue;
        }
        while left > 0 && (new_count < old_count || new_dims[left - 1] == 1) {
            left -= 1;
            new_strides[left] = new_count.saturating_mul(chunk_stride);
            new_count = new_count.saturating_mul(new_dims[left]);
        }
        if new_count != old_count {
            return None;
        }
        if axis > 0 {
            chunk_stride = strides[axis - 1];
            (old_count, new_count) = (1, 1);
        }
    }
    (left == 0).then_some(new_strides)
}

/// Strides after a permutation of axes: axis `i` of the result is axis `perm[i]` of the operand.
pub fn transpose_strides(strides: &[i64], perm: &[usize]) -> Vec<i64> {
    perm.iter().map(|p| strides[*p]).collect()
}

/// Strides of a tensor broadcast to `new_dims`: 0 on every axis that is repeated.
pub fn expand_strides(dims: &[i64], strides: &[i64], new_dims: &[i64]) -> Vec<i64> {
    let lead = new_dims.len() - dims.len();
    let own = |i: usize| match i.checked_sub(lead) {
        Some(k) if dims[k] == new_dims[i] => strides[k],
        _ => 0,
    };
    (0..new_dims.len()).map(own).collect()
}

/// Returns the strides after axes of size 1 are inserted. `axes` are axes of the result.
pub fn unsqueeze_strides(dims: &[i64], strides: &[i64], axes: &[usize]) -> Vec<i64> {
    let rank = dims.len() + axes.len();
    let mut old = 0;
    (0..rank)
        .map(|i| {
            if axes.contains(&i) {
                return if old < dims.len() {
                    dims[old].saturating_mul(strides[old])
                } else {
                    1
                };
            }
            old += 1;
            strides[old - 1]
        })
        .collect()
}

/// Strides with the axes `axes` (of size 1) left out.
pub fn squeeze_strides(strides: &[i64], axes: &[usize]) -> Vec<i64> {
    (0..strides.len())
        .filter(|i| !axes.contains(i))
        .map(|i| strides[i])
        .collect()
}

/// Strides of a slice that takes every `steps[i]`-th element of axis `axes[i]`; a negative step gives a negative stride.
pub fn slice_strides(strides: &[i64], axes: &[usize], steps: &[i64]) -> Vec<i64> {
    let mut result = strides.to_vec();
    for (axis, step) in axes.iter().zip(steps) {
        result[*axis] = result[*axis].saturating_mul(*step);
    }
    result
}

/// The first index and the number of indices that a slice of an axis of size `dim` takes (ONNX Slice-13).
///
/// Negative bounds count from the end, bounds out of range are clamped; `step` is not 0.
pub fn slice_span(dim: i64, start: i64, end: i64, step: i64) -> (i64, i64) {
    let from_end = |at: i64| if at < 0 { at.saturating_add(dim) } else { at };
    let (start, end) = (from_end(start), from_end(end));
    let (first, distance) = if step > 0 {
        let first = start.clamp(0, dim);
        (first, end.min(dim).saturating_sub(first))
    } else {
        let first = start.max(0).min(dim - 1);
        (first, first.saturating_sub(end.max(-1)))
    };
    if distance <= 0 {
        return (first.max(0), 0);
    }
    let step = step.unsigned_abs();
    (first, (distance as u64).div_ceil(step) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of all elements in row-major order.
    fn offsets(dims: &[i64], strides: &[i64]) -> Vec<i64> {
        let mut all = vec![0];
        for (dim, stride) in dims.iter().zip(strides) {
            all = all
                .iter()
                .flat_map(|base| (0..*dim).map(move |i| base + i * stride))
                .collect();
        }
        all
    }

    /// Whether some strides show these offsets as `dims`; found from the first element along each axis.
    fn some_view(offsets: &[i64], dims: &[i64]) -> bool {
        let steps = contiguous_strides(dims);
        let strides: Vec<i64> = (0..dims.len())
            .map(|i| match dims[i] {
                1 => 0,
                _ => offsets[steps[i] as usize] - offsets[0],
            })
            .collect();
        let shown = self::offsets(dims, &strides);
        shown.iter().zip(offsets).all(|(a, b)| *a == b - offsets[0])
    }

    fn shapes_of(total: i64, rank: usize) -> Vec<Vec<i64>> {
        if rank == 0 {
            return if total == 1 { vec![vec![]] } else { vec![] };
        }
        let mut all = Vec::new();
        for first in 1..=total {
            if total % first == 0 {
                for mut rest in shapes_of(total / first, rank - 1) {
                    rest.insert(0, first);
                    all.push(rest);
                }
            }
        }
        all
    }

    /// libtorch's answer is the exact one for strides above zero: a view wherever strides exist that make it one.
    #[test]
    fn a_view_wherever_one_exists() {
        let stride_choices = [1i64, 2, 3, 4, 6, 8, 12, 24];
        let (mut views, mut copies) = (0, 0);
        for old in shapes_of(12, 3) {
            for code in 0..512usize {
                let strides: Vec<i64> = (0..3)
                    .map(|i| stride_choices[code >> (3 * i) & 7])
                    .collect();
                let order = offsets(&old, &strides);
                for new in (0..4).flat_map(|rank| shapes_of(12, rank)) {
                    match view_strides(&old, &strides, &new) {
                        Some(s) => {
                            assert_eq!(offsets(&new, &s), order, "{old:?} {strides:?} -> {new:?}");
                            views += 1;
                        }
                        None => {
                            assert!(!some_view(&order, &new), "{old:?} {strides:?} -> {new:?}");
                            copies += 1;
                        }
                    }
                }
            }
        }
        assert!(
            views > 1000 && copies > 1000,
            "{views} views, {copies} copies"
        );
    }

    /// `(dims, strides, new_dims, torch.Tensor.view's strides)`, from PyTorch 2.11; `None` where `view` refuses.
    type ViewCase<'a> = (&'a [i64], &'a [i64], &'a [i64], Option<&'a [i64]>);
    const TORCH: &[ViewCase] = &[
        (&[2, 3, 4], &[12, 4, 1], &[6, 4], Some(&[4, 1])),
        (&[2, 3, 4], &[4, 8, 1], &[6, 4], None),
        (&[2, 3, 4], &[4, 8, 1], &[2, 3, 2, 2], Some(&[4, 8, 2, 1])),
        (&[2, 1, 2, 5], &[0, 9, 0, 1], &[4, 5], Some(&[0, 1])),
        (&[2, 2, 2, 5], &[10, 5, 0, 1], &[2, 4, 5], None),
        (&[3, 1], &[1, 7], &[3], Some(&[1])),
        (&[0, 3], &[5, 2], &[0, 3], Some(&[5, 2])),
        (&[0, 3], &[5, 2], &[3, 0, 2], Some(&[2, 2, 1])),
        (&[], &[], &[1, 1], Some(&[1, 1])),
        (&[1], &[3], &[], Some(&[])),
        (&[4], &[0], &[2, 2], Some(&[0, 0])),
        (&[4, 4], &[8, 2], &[16], Some(&[2])),
    ];

    #[test]
    fn agrees_with_torch() {
        for (dims, strides, new, expected) in TORCH {
            assert_eq!(
                view_strides(dims, strides, new).as_deref(),
                *expected,
                "{dims:?} {strides:?} -> {new:?}"
            );
        }
    }

    #[test]
    fn axes_of_size_one_come_and_go() {
        let (dims, strides) = ([3, 4], [4, 1]);
        assert_eq!(
            unsqueeze_strides(&dims, &strides, &[0, 2, 4]),
            [12, 4, 4, 1, 1]
        );
        assert_eq!(squeeze_strides(&[12, 4, 4, 1, 1], &[0, 2, 4]), [4, 1]);
        assert_eq!(expand_strides(&[3, 1], &[1, 1], &[2, 3, 5]), [0, 1, 0]);
        assert_eq!(expand_strides(&[], &[], &[0]), [0]);
        assert_eq!(transpose_strides(&[6, 2, 1], &[2, 0, 1]), [1, 6, 2]);
    }

    /// Against the definition: walk from the clamped start while short of the end.
    #[test]
    fn spans_of_slices() {
        let bounds = [i64::MIN, -7, -5, -4, -2, -1, 0, 1, 2, 4, 5, 7, i64::MAX];
        for dim in 0..6i64 {
            for start in bounds {
                for end in bounds {
                    for step in [-3, -1, 1, 2, 5] {
                        let norm = |x: i64| if x < 0 { x.saturating_add(dim) } else { x };
                        let mut at = if step > 0 {
                            norm(start).clamp(0, dim)
                        } else {
                            norm(start).max(0).min(dim - 1)
                        };
                        let mut taken = Vec::new();
                        while (0..dim).contains(&at)
                            && if step > 0 {
                                at < norm(end)
                            } else {
                                at > norm(end)
                            }
                        {
                            taken.push(at);
                            at += step;
                        }
                        let (first, len) = slice_span(dim, start, end, step);
                        assert_eq!(len, taken.len() as i64, "{dim} {start} {end} {step}");
                        if len > 0 {
                            assert_eq!(first, taken[0]);
                        }
                    }
                }
            }
        }
    }
}
