//! Windows of convolutions and pools: their padding (ONNX `auto_pad`), and images that are made of them (ONNX `Col2Im`-18).

use super::call::{Call, Lowered, one};
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::conv::CONV_TRANSPOSE;
use ckpt_passes::ops::{Builder, EmitExt};

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

/// The largest number of elements of [`copies`].
const MAX_ELEMENTS: i64 = 1 << 26;

/// Returns the weights of a grouped convolution with one channel for each element of a window, a copy of that element:
/// [channels·elements, 1, window…]. Returns nothing if they are too many.
pub fn copies(b: &mut Builder, dtype: DType, channels: i64, kernel: &[i64]) -> Option<ValueId> {
    let product = |n: i64, k: &i64| n.checked_mul(*k);
    let count = kernel.iter().try_fold(1i64, product)?;
    let elements = [channels, count, count].iter().try_fold(1i64, product)?;
    let (zero, one) = (Tensor::scalar(dtype, 0.0), Tensor::scalar(dtype, 1.0));
    let (zero, one) = (zero.bytes()?, one.bytes()?);
    if elements > MAX_ELEMENTS {
        return None;
    }
    let mut bytes = Vec::with_capacity(elements as usize * zero.len());
    for i in 0..elements {
        // Row r of [channels·count, 1, kernel…] looks at element r mod count.
        let looks = i % count == (i / count) % count;
        bytes.extend_from_slice(if looks { one } else { zero });
    }
    let mut dims = vec![(channels * count) as u64, 1];
    dims.extend(kernel.iter().map(|k| *k as u64));
    Some(b.constant("windows", Tensor::new(dtype, dims, bytes)))
}

/// `Col2Im`: the sum of windows [batch, channels·elements, windows] at their places in an image, as the transposed
/// convolution with weights that copy each element.
pub fn folded(call: &mut Call) -> Lowered {
    let [x, image, kernel] = call.operands(["input", "image_shape", "block_shape"])?;
    call.want_rank(x, &[3], "input")?;
    let (Some(image), Some(kernel)) = (call.known_ints(image), call.known_ints(kernel)) else {
        return Err(call
            .unsupported("a size of the image that is not fixed")
            .help("export with fixed sizes of the image"));
    };
    let n = image.len();
    let strides = call.attr_each("strides", n, 1)?;
    let dilations = call.attr_each("dilations", n, 1)?;
    let pads = call.attr_each("pads", n, 0)?;
    let rows = call.size(x, 1, "the number of channels")?;
    let count = kernel.iter().try_fold(1i64, |n, k| n.checked_mul(*k));
    let channels = count.filter(|n| *n > 0 && rows % n == 0).map(|n| rows / n);
    let (true, Some(channels)) = (kernel.len() == n, channels) else {
        return Err(call
            .fail("shape", "the windows do not divide the channels")
            .found(format!("{kernel:?} of {rows}")));
    };
    let mut windows = vec![0, rows];
    let mut beyond = Vec::with_capacity(n);
    for i in 0..n {
        let extent = dilations[i].saturating_mul(kernel[i] - 1).saturating_add(1);
        let padded = image[i].saturating_add(pads[i]).saturating_add(pads[i + n]);
        let room = padded.saturating_sub(extent);
        if room < 0 {
            return Err(call
                .fail("shape", "the windows do not fit the image")
                .found(format!("{kernel:?} in {image:?}")));
        }
        windows.push(room / strides[i] + 1);
        beyond.push(room % strides[i]);
    }
    // Size 0 copies that of the operand's axis.
    let x = call.reshape(x, &windows)?;
    let dtype = call.dtype(x);
    let Some(weights) = copies(&mut call.b, dtype, channels, &kernel) else {
        return Err(call.unsupported("this number of windows"));
    };
    let attrs = Attrs::new()
        .with("group", channels)
        .with("strides", strides)
        .with("dilations", dilations)
        .with("pads", pads)
        .with("output_padding", beyond);
    one(call.emit(&CONV_TRANSPOSE, &[x, weights], attrs)?)
}
