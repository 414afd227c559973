//! Padding of the windows of convolutions and pools (ONNX `auto_pad`).

/// Splits padding in half, rounded down: (before, after), or the other way round unless `upper`.
pub(super) fn halves(total: i64, upper: bool) -> (i64, i64) {
    let less = total.div_euclid(2);
    let more = total - less;
    if upper { (less, more) } else { (more, less) }
}

/// Returns the padding that gives ⌈size/stride⌉ windows: ⌈i/s⌉·s − s + extent − i, at least 0. `None` where that depends on
/// a size that is not fixed.
pub(super) fn same_padding(size: Option<i64>, stride: i64, extent: i64) -> Option<i64> {
    if stride == 1 {
        return Some(extent - 1);
    }
    let size = size?;
    Some(((size + stride - 1) / stride * stride - stride + extent - size).max(0))
}

/// Returns the `pads` attribute: before each axis, then after each.
pub(super) fn pads_of(sides: &[(i64, i64)]) -> Vec<i64> {
    let before = sides.iter().map(|s| s.0);
    before.chain(sides.iter().map(|s| s.1)).collect()
}
