//! The largest element of each window of an image: `MaxPool` (ONNX MaxPool-12). Other pooling ops are convolutions or
//! reductions; readers write them so.

use super::names::*;
use super::rule::*;
use super::shape::reshape_like;
use ckpt_ir::error::Result;
use ckpt_ir::layout::count;
use ckpt_ir::op::{Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, Sized, fresh};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&MAX_POOL];

/// `Y` [N, C, windows…], and in `Indices` where each of its elements stands in the row-major operand (with the last two
/// or more spatial axes in reverse order if `storage_order`). Of equal elements the first is taken; padding never is.
/// `auto_pad` is rewritten by readers. The kernel takes one axis at a time, from the last to the first.
pub static MAX_POOL: OpDef = OpDef {
    attrs: &[
        AttrSpec::required("kernel_shape", AttrKind::Ints),
        AttrSpec::optional("strides", AttrKind::Ints),
        AttrSpec::optional("dilations", AttrKind::Ints),
        AttrSpec::optional("pads", AttrKind::Ints),
        AttrSpec::int("ceil_mode", 0),
        AttrSpec::int("storage_order", 0),
    ],
    ins: X,
    outs: slots!["Y"; "Indices"],
    later_types: BF16_SINCE_22,
    infer: infer_max_pool,
    grad: Grad::Rule(grad_max_pool),
    cost: |cx| cx.work(cx.outs[0].elements() * count(cx.attrs.ints("kernel_shape")) as u64),
    memory: max_pool_memory,
    ..mixed("MaxPool", onnx(1, 12))
};

/// The windows along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Elements of a window.
    pub kernel: i64,
    /// Distance of two windows.
    pub stride: i64,
    /// Distance of two elements of a window.
    pub dilation: i64,
    /// Padding before the axis.
    pub before: i64,
    /// Padding after the axis.
    pub after: i64,
    ceil: bool,
}

impl Windows {
    /// One entry a spatial axis.
    pub fn of(attrs: &Attrs) -> Vec<Windows> {
        let kernel = attrs.ints("kernel_shape");
        let n = kernel.len();
        let at = |name: &str, i: usize, default: i64| {
            let given = attrs.opt_ints(name).and_then(|v| v.get(i));
            given.copied().unwrap_or(default)
        };
        (0..n)
            .map(|i| Windows {
                kernel: kernel[i],
                stride: at("strides", i, 1),
                dilation: at("dilations", i, 1),
                before: at("pads", i, 0),
                after: at("pads", n + i, 0),
                ceil: attrs.int("ceil_mode") != 0,
            })
            .collect()
    }

    /// From the first to the last element of a window.
    pub fn extent(&self) -> i64 {
        (self.kernel - 1) * self.dilation + 1
    }

    /// How many there are along an axis of `size`. Rounded up, a window may hang over the padding behind, but none starts
    /// in it.
    fn places(&self, size: &Dim) -> Dim {
        let stride = Dim::from(self.stride);
        let room = size.add(&Dim::from(self.before + self.after - self.extent()));
        if !self.ceil {
            return room.div(&stride).add(&Dim::ONE);
        }
        let started = size.add(&Dim::from(self.before)).ceil_div(&stride);
        room.ceil_div(&stride).add(&Dim::ONE).smaller(&started)
    }

    /// Returns the number of windows along an axis of a known size.
    pub fn count(&self, size: i64) -> i64 {
        self.places(&Dim::from(size)).as_const().unwrap_or(0)
    }

    /// What is read of an axis of `size` with `places` windows: its own elements, padding, and what hangs over.
    pub fn reach(&self, size: i64, places: i64) -> i64 {
        let last = (places - 1) * self.stride + self.extent();
        last.max(size + self.before)
    }
}

/// What the last window needs beyond an axis of `size` with the padding `pads`, its number rounded up; none starts in the
/// padding behind.
pub fn ceil_overhang(size: i64, pads: (i64, i64), extent: i64, stride: i64) -> i64 {
    let whole = size + pads.0 + pads.1;
    let mut places = (whole - extent + stride - 1).div_euclid(stride) + 1;
    if (places - 1) * stride >= size + pads.0 {
        places -= 1;
    }
    ((places - 1) * stride + extent - whole).max(0)
}

fn infer_max_pool(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let x = cx.ty(0)?;
    let kernel = cx.attrs.ints("kernel_shape");
    let n = kernel.len();
    if n == 0 || x.rank() != n + 2 || kernel.iter().any(|k| *k < 1) {
        return Err(cx
            .fail(
                "shape",
                "`kernel_shape` is not one positive size a spatial axis",
            )
            .expected(format!("{} sizes", x.rank().saturating_sub(2)))
            .found(format!("{kernel:?}")));
    }
    for (name, length, least) in [("strides", n, 1), ("dilations", n, 1), ("pads", 2 * n, 0)] {
        let given = cx.attrs.opt_ints(name).unwrap_or_default();
        if !given.is_empty() && (given.len() != length || given.iter().any(|v| *v < least)) {
            return Err(cx
                .fail(
                    "attribute",
                    format!("`{name}` does not fit {n} spatial axes"),
                )
                .expected(format!("{length} numbers, none below {least}"))
                .found(format!("{given:?}")));
        }
    }
    let mut dims = x.dims[..2].to_vec();
    for (windows, size) in Windows::of(cx.attrs).iter().zip(&x.dims[2..]) {
        if windows.before.max(windows.after) >= windows.extent() {
            return Err(cx.fail("attribute", "a window lies in the padding as a whole"));
        }
        let places = windows.places(size);
        if places.bounds().1.is_some_and(|hi| hi < 1) {
            return Err(cx.fail("shape", "no window fits").found(x.to_string()));
        }
        dims.push(places);
    }
    let y = x.with_dims(dims);
    let indices = y.with_dtype(DType::I64);
    Ok(vec![y, indices])
}

/// Adds the cotangent of every window to its largest element.
fn grad_max_pool(cx: &mut GradCx) -> Result<()> {
    let Some(dy) = cx.dy(0) else { return Ok(()) };
    let (x, attrs) = (cx.x(0), cx.attrs());
    let known = cx.b.node(cx.node).outs.get(1).copied();
    let indices = match known.filter(|_| attrs.int("storage_order") == 0) {
        Some(indices) => indices,
        None => {
            let attrs = attrs.with("storage_order", 0);
            cx.b.emit_n(&MAX_POOL, vec![Some(x)], attrs, 2)?[1]
        }
    };
    let all = cx.b.ints(&[-1]);
    let size = match cx.ty(x).elements().as_const() {
        Some(n) => cx.b.ints(&[n]),
        None => {
            let size = cx.b.op(SIZE, &[x])?;
            cx.b.reshape(size, &[1])?
        }
    };
    let dtype = cx.ty(dy).dtype;
    let zero = cx.b.scalar(dtype, 0.0);
    let zeros = cx.b.expand(zero, size)?;
    let indices = cx.b.op(RESHAPE, &[indices, all])?;
    let dy = cx.b.op(RESHAPE, &[dy, all])?;
    let attrs = Attrs::new().with("reduction", "add");
    let dx = cx.b.emit(SCATTER_ELEMENTS, &[zeros, indices, dy], attrs)?;
    let dx = reshape_like(cx, dx, x)?;
    cx.give(0, dx);
    Ok(())
}

/// Axis by axis, as the kernel goes: what the axes behind left, a padded copy, values and taps; then the starts of the
/// windows; then, beside the taps, the places they stand for. In the end one place an image of a channel.
fn max_pool_memory(cx: &MemoryCx) -> Footprint {
    let Some(x) = cx.ins[0].as_ref().filter(|x| x.elements() > 0) else {
        return fresh(cx);
    };
    let (size, index) = (x.dtype.size_bytes(), DType::I64.size_bytes());
    let mut dims = x.dims.clone();
    let (mut peak, mut left, mut as_it_lies) = (0, 0, x.is_contiguous());
    for (i, windows) in Windows::of(cx.attrs).iter().enumerate().rev() {
        let axis = i + 2;
        let (length, places) = (dims[axis], cx.outs[0].dims[axis]);
        let mut padded = dims.clone();
        padded[axis] = windows.reach(length, places);
        let copy = match as_it_lies && windows.before == 0 && padded[axis] == length {
            true => 0,
            false => count(&padded) as u64 * size,
        };
        dims[axis] = places;
        let made = count(&dims) as u64;
        let found = if left > 0 { made * index } else { 0 };
        let more = copy.max(places as u64 * index).max(found);
        peak = peak.max(left + made * (size + index) + more);
        (left, as_it_lies) = (made * (size + index), true);
    }
    peak = peak.max(left + (x.dims[0] * x.dims[1]) as u64 * index);
    let results: u64 = cx.outs.iter().map(Sized::bytes).sum();
    fresh(cx).with_temp(peak - results.min(peak))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula counts what a walk over the starts of windows finds.
    #[test]
    fn places_are_those_that_a_walk_finds() {
        let mut checked = 0;
        for size in 1..9i64 {
            for (kernel, stride, dilation) in
                [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2), (3, 3, 2)]
            {
                for (before, after, ceil) in [
                    (0, 0, false),
                    (0, 0, true),
                    (1, 0, true),
                    (1, 1, true),
                    (1, 1, false),
                ] {
                    let windows = Windows {
                        kernel,
                        stride,
                        dilation,
                        before,
                        after,
                        ceil,
                    };
                    let whole = size + before + after;
                    // Neither is valid: no window fits, or one lies in the padding as a whole.
                    let padding = before.max(after);
                    if whole < windows.extent() || padding >= windows.extent() {
                        continue;
                    }
                    let starts = (0..whole).step_by(stride as usize);
                    let fits = |start: &i64| {
                        let complete = start + windows.extent() <= whole;
                        // Rounded up, one more than those that fit, unless it starts in the padding behind.
                        let extra =
                            start - stride + windows.extent() < whole && *start < size + before;
                        complete || (ceil && extra)
                    };
                    let expected = starts.filter(fits).count() as i64;
                    let found = windows.places(&Dim::from(size)).as_const();
                    assert_eq!(found, Some(expected), "{size} {windows:?}");
                    let overhang = ((expected - 1) * stride + windows.extent() - whole).max(0);
                    if ceil {
                        let found = ceil_overhang(size, (before, after), windows.extent(), stride);
                        assert_eq!(found, overhang, "{size} {windows:?}");
                    }
                    checked += 1;
                }
            }
        }
        assert!(checked > 100, "{checked}");
    }
}
