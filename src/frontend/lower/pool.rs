//! Pooling over windows and over everything (ONNX `AveragePool`-22, `LpPool`-22, `MaxPool`-22, `Global…Pool`).
//!
//! A sum over windows is a convolution of every channel with ones, so its gradient exists already. `MaxPool` is a row,
//! which also returns the indices that its gradient needs.

use super::call::{Call, Lowered, Out, one};
use super::windows::{halves, pads_of, same_padding};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, OpDef, Tensor, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::ABS;
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::conv::CONV;
use ckpt_passes::ops::math::SQRT;
use ckpt_passes::ops::pool::{MAX_POOL, ceil_overhang};
use ckpt_passes::ops::power::POW;
use ckpt_passes::ops::reduce::{
    REDUCE_L1, REDUCE_L2, REDUCE_MAX, REDUCE_MEAN, REDUCE_SUM, reduce_axes,
};

/// The windows of a pooling op, one entry a spatial axis.
struct Windows {
    x: ValueId,
    kernel: Vec<i64>,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// Padding before and after each axis, from `pads` or `auto_pad`.
    pads: Vec<(i64, i64)>,
    /// Elements that the last window needs beyond the padding, where sizes are rounded up.
    overhang: Vec<i64>,
    ceil: bool,
}

impl Windows {
    fn read(call: &mut Call) -> Result<Windows> {
        let x = call.need(0, "X")?;
        let n = call.spatial_axes(x)?.len();
        let kernel = call.attr_each("kernel_shape", n, 1)?;
        let strides = call.attr_each("strides", n, 1)?;
        let dilations = call.attr_each("dilations", n, 1)?;
        let given = call.attr_each("pads", n, 0)?;
        let auto = call.attr_text("auto_pad", "NOTSET")?;
        let ceil = call.attr_flag("ceil_mode")?;
        let (mut pads, mut overhang) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for axis in 0..n {
            let extent = (kernel[axis] - 1) * dilations[axis] + 1;
            let stride = strides[axis];
            let known = call.dims(x)[axis + 2].as_const();
            let unknown = |call: &Call| {
                call.unsupported("padding that depends on sizes which are not fixed")
                    .help("export with fixed sizes of the image")
            };
            let sides = match auto.as_str() {
                "NOTSET" => (given[axis], given[axis + n]),
                "VALID" => (0, 0),
                "SAME_UPPER" | "SAME_LOWER" => {
                    let total = same_padding(known, stride, extent);
                    halves(total.ok_or_else(|| unknown(call))?, auto == "SAME_UPPER")
                }
                other => {
                    return Err(call
                        .fail("attribute", format!("`auto_pad` = {other}"))
                        .expected("NOTSET, VALID, SAME_UPPER or SAME_LOWER"));
                }
            };
            pads.push(sides);
            overhang.push(match ceil && stride > 1 {
                true => {
                    let size = known.ok_or_else(|| unknown(call))?;
                    ceil_overhang(size, sides, extent, stride)
                }
                false => 0,
            });
        }
        Ok(Windows {
            x,
            kernel,
            strides,
            dilations,
            pads,
            overhang,
            ceil,
        })
    }

    /// Returns the attributes that a convolution has too.
    fn attrs(&self, pads: impl Fn(usize) -> (i64, i64)) -> Attrs {
        let sides: Vec<(i64, i64)> = (0..self.kernel.len()).map(pads).collect();
        Attrs::new()
            .with("strides", self.strides.clone())
            .with("dilations", self.dilations.clone())
            .with("pads", pads_of(&sides))
    }

    /// Returns a window whose elements are all `each`.
    fn weights(&self, call: &mut Call, dtype: DType, each: f64) -> ValueId {
        let count = self.kernel.iter().product::<i64>() as usize;
        let number = Tensor::scalar(dtype, each);
        let bytes = number.bytes().map(|b| b.repeat(count)).unwrap_or_default();
        let mut dims = vec![1, 1];
        dims.extend(self.kernel.iter().map(|k| *k as u64));
        call.constant("window", Tensor::new(dtype, dims, bytes))
    }

    /// Sums every window of `v`, which has the shape of the operand, and multiplies by `factor`; padding counts as 0.
    fn sums(&self, call: &mut Call, v: ValueId, factor: f64) -> Result<ValueId> {
        let (batch, channels) = (call.axis_vector(v, 0)?, call.axis_vector(v, 1)?);
        let mut alone = vec![call.mul(batch, channels)?, call.ints(&[1])];
        alone.extend(call.axis_vectors(v, 2..)?);
        let alone = call.reshape_to_all(v, &alone)?;
        let sums = self.convolved(call, alone, factor, |i| {
            (self.pads[i].0, self.pads[i].1 + self.overhang[i])
        })?;
        let mut sizes = vec![batch, channels];
        sizes.extend(call.axis_vectors(sums, 2..)?);
        call.reshape_to_all(sums, &sizes)
    }

    fn convolved(
        &self,
        call: &mut Call,
        v: ValueId,
        factor: f64,
        pads: impl Fn(usize) -> (i64, i64),
    ) -> Result<ValueId> {
        let weights = self.weights(call, call.dtype(v), factor);
        call.emit(&CONV, &[v, weights], self.attrs(pads))
    }

    /// Counts the elements of each window: [1, 1, windows…]. Padding that the file gives counts if `padding`.
    fn counts(&self, call: &mut Call, padding: bool) -> Result<ValueId> {
        let unit = call.scalar_like(self.x, 1.0);
        let mut sizes = vec![call.ints(&[1]), call.ints(&[1])];
        sizes.extend(call.axis_vectors(self.x, 2..)?);
        let sizes = call.concat(&sizes, 0)?;
        let mut ones = call.expand(unit, sizes)?;
        if padding {
            let sides = pads_of(&[&[(0, 0), (0, 0)], self.pads.as_slice()].concat());
            let sides = call.ints(&sides);
            ones = call.op(&PAD, &[ones, sides, unit])?;
        }
        self.convolved(call, ones, 1.0, |i| {
            let (before, after) = if padding { (0, 0) } else { self.pads[i] };
            (before, after + self.overhang[i])
        })
    }
}

/// `AveragePool`: the mean of each window, with or without its padding.
pub fn average(call: &mut Call) -> Lowered {
    let padding = call.attr_int("count_include_pad", 0)? != 0;
    let w = Windows::read(call)?;
    let whole = w.overhang.iter().all(|o| *o == 0);
    if whole && (padding || w.pads.iter().all(|p| *p == (0, 0))) {
        let count: i64 = w.kernel.iter().product();
        return one(w.sums(call, w.x, 1.0 / count as f64)?);
    }
    let sums = w.sums(call, w.x, 1.0)?;
    let counts = w.counts(call, padding)?;
    one(call.div(sums, counts)?)
}

/// `LpPool`: (Σ |x|^p)^(1/p) of each window.
pub fn lp(call: &mut Call) -> Lowered {
    let p = order(call)?;
    let w = Windows::read(call)?;
    let powers = power(call, w.x, p)?;
    let sums = w.sums(call, powers, 1.0)?;
    one(root(call, sums, p)?)
}

/// Reads `p`, an integer since opset 2.
fn order(call: &mut Call) -> Result<i64> {
    match call.attr_int("p", 2)? {
        p if p > 0 => Ok(p),
        p => Err(call.fail("attribute", format!("`p` = {p} is not positive"))),
    }
}

/// |x|^p.
fn power(call: &mut Call, x: ValueId, p: i64) -> Result<ValueId> {
    if p == 2 {
        return call.mul(x, x);
    }
    let size = call.op(&ABS, &[x])?;
    if p == 1 {
        return Ok(size);
    }
    let p = call.scalar_like(x, p as f64);
    call.op(&POW, &[size, p])
}

/// y^(1/p).
fn root(call: &mut Call, y: ValueId, p: i64) -> Result<ValueId> {
    match p {
        1 => Ok(y),
        2 => call.op(&SQRT, &[y]),
        _ => {
            let p = call.scalar_like(y, 1.0 / p as f64);
            call.op(&POW, &[y, p])
        }
    }
}

/// `MaxPool`: the largest element of each window, and its index in the whole operand.
pub fn max(call: &mut Call) -> Lowered {
    let order = call.attr_int("storage_order", 0)?;
    let w = Windows::read(call)?;
    let attrs = w
        .attrs(|i| w.pads[i])
        .with("kernel_shape", w.kernel.clone())
        .with("ceil_mode", i64::from(w.ceil))
        .with("storage_order", order);
    let both = call.emit_n(&MAX_POOL, vec![Some(w.x)], attrs, 2)?;
    Ok(Some(both.into_iter().map(Out::Value).collect()))
}

/// Reduces all spatial axes of `v` to size 1.
fn over_all(call: &mut Call, op: &'static OpDef, v: ValueId) -> Result<ValueId> {
    let axes: Vec<usize> = call.spatial_axes(v)?.collect();
    reduce_axes(&mut call.b, op, v, &axes, true)
}

/// `GlobalAveragePool`.
pub fn global_average(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    one(over_all(call, &REDUCE_MEAN, x)?)
}

/// `GlobalMaxPool`.
pub fn global_max(call: &mut Call) -> Lowered {
    let x = call.need(0, "X")?;
    one(over_all(call, &REDUCE_MAX, x)?)
}

/// `GlobalLpPool`.
pub fn global_lp(call: &mut Call) -> Lowered {
    let p = order(call)?;
    let x = call.need(0, "X")?;
    one(match p {
        1 => over_all(call, &REDUCE_L1, x)?,
        2 => over_all(call, &REDUCE_L2, x)?,
        _ => {
            let powers = power(call, x, p)?;
            let sum = over_all(call, &REDUCE_SUM, powers)?;
            root(call, sum, p)?
        }
    })
}
