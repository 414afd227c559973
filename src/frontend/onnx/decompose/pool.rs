//! Pooling over windows and over everything (ONNX `AveragePool`-22, `LpPool`-22, `MaxPool`-22, `Global…Pool`).
//!
//! Sums over windows are convolutions of every channel by itself with ones, and so their gradients are there already.
//! The largest of a window is a row of its own; it is read with its indices, which its gradient needs.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Tensor, ValueId};
use ckpt_passes::ops::arith::ABS;
use ckpt_passes::ops::concat::PAD;
use ckpt_passes::ops::conv::CONV;
use ckpt_passes::ops::math::SQRT;
use ckpt_passes::ops::pool::{MAX_POOL, ceil_overhang};
use ckpt_passes::ops::power::POW;
use ckpt_passes::ops::reduce::{
    REDUCE_L1, REDUCE_L2, REDUCE_MAX, REDUCE_MEAN, REDUCE_SUM, reduce_axes,
};

fn one(v: ValueId) -> Result<Option<Vec<Out>>> {
    Ok(Some(vec![Out::Value(v)]))
}

/// Axes from 2 on: those that images and signals are laid out along.
pub(super) fn spatial(call: &Call, x: ValueId) -> Result<Vec<usize>> {
    let rank = call.b.rank(x);
    if rank < 3 {
        return Err(call
            .fail("shape", "the operand has no axes after batch and channels")
            .found(call.b.ty(x).to_string()));
    }
    Ok((2..rank).collect())
}

/// The windows of a pooling op, one entry a spatial axis.
struct Windows {
    x: ValueId,
    kernel: Vec<i64>,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// Before and after, as the file gives them or `auto_pad` asks for.
    pads: Vec<(i64, i64)>,
    /// What the last window needs beyond the padding, where sizes are rounded up.
    overhang: Vec<i64>,
    ceil: bool,
}

impl Windows {
    fn read(call: &mut Call) -> Result<Windows> {
        let x = call.need(0, "X")?;
        let n = spatial(call, x)?.len();
        let each = |call: &mut Call, name: &str, length: usize, least: i64| {
            let values = call.ints(name)?.unwrap_or_else(|| vec![least; length]);
            if values.len() != length || values.iter().any(|v| *v < least) {
                return Err(call
                    .fail(
                        "attribute",
                        format!("`{name}` does not fit {n} spatial axes"),
                    )
                    .found(format!("{values:?}")));
            }
            Ok(values)
        };
        let kernel = each(call, "kernel_shape", n, 1)?;
        let strides = each(call, "strides", n, 1)?;
        let dilations = each(call, "dilations", n, 1)?;
        let given = each(call, "pads", 2 * n, 0)?;
        let auto = call.string("auto_pad", "NOTSET")?;
        let ceil = call.int("ceil_mode", 0)? != 0;
        let (mut pads, mut overhang) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for axis in 0..n {
            let extent = (kernel[axis] - 1) * dilations[axis] + 1;
            let stride = strides[axis];
            let known = call.dims(x)[axis + 2].as_const();
            let size = |call: &Call| {
                known.ok_or_else(|| {
                    call.unsupported("padding that depends on sizes which are not fixed")
                        .help("export with fixed sizes of the image")
                })
            };
            let sides = match auto.as_str() {
                "NOTSET" => (given[axis], given[axis + n]),
                "VALID" => (0, 0),
                "SAME_UPPER" | "SAME_LOWER" => {
                    let total = match stride {
                        1 => extent - 1,
                        _ => {
                            let size = size(call)?;
                            ((size + stride - 1) / stride * stride - stride + extent - size).max(0)
                        }
                    };
                    let (less, more) = (total / 2, total - total / 2);
                    if auto == "SAME_UPPER" {
                        (less, more)
                    } else {
                        (more, less)
                    }
                }
                other => {
                    return Err(call
                        .fail("attribute", format!("`auto_pad` = {other}"))
                        .expected("NOTSET, VALID, SAME_UPPER or SAME_LOWER"));
                }
            };
            let beyond = if ceil && stride > 1 {
                ceil_overhang(size(call)?, sides, extent, stride)
            } else {
                0
            };
            pads.push(sides);
            overhang.push(beyond);
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

    /// Attributes that a convolution has too.
    fn attrs(&self, pads: impl Fn(usize) -> (i64, i64)) -> Attrs {
        let sides: Vec<(i64, i64)> = (0..self.kernel.len()).map(pads).collect();
        let before = sides.iter().map(|s| s.0);
        let pads: Vec<i64> = before.chain(sides.iter().map(|s| s.1)).collect();
        Attrs::new()
            .with("strides", self.strides.clone())
            .with("dilations", self.dilations.clone())
            .with("pads", pads)
    }

    /// `each` for every element of a window, in the type of `x`.
    fn weights(&self, call: &mut Call, dtype: DType, each: f64) -> ValueId {
        let count = self.kernel.iter().product::<i64>() as usize;
        let number = Tensor::scalar(dtype, each);
        let bytes = number.bytes().map(|b| b.repeat(count)).unwrap_or_default();
        let mut dims = vec![1, 1];
        dims.extend(self.kernel.iter().map(|k| *k as u64));
        call.b.constant("window", Tensor::new(dtype, dims, bytes))
    }

    /// The sum over every window of `v`, which has the shape of the operand, times `factor`; padding counts as 0.
    fn sums(&self, call: &mut Call, v: ValueId, factor: f64) -> Result<ValueId> {
        let (batch, channels) = (call.axis_vector(v, 0)?, call.axis_vector(v, 1)?);
        let mut alone = vec![call.b.mul(batch, channels)?, call.b.ints(&[1])];
        for axis in 2..call.b.rank(v) {
            alone.push(call.axis_vector(v, axis)?);
        }
        let alone = call.concat(&alone, 0)?;
        let alone = call.reshape_to(v, alone)?;
        let sums = self.convolved(call, alone, factor, |i| {
            (self.pads[i].0, self.pads[i].1 + self.overhang[i])
        })?;
        let mut sizes = vec![batch, channels];
        for axis in 2..call.b.rank(sums) {
            sizes.push(call.axis_vector(sums, axis)?);
        }
        let sizes = call.concat(&sizes, 0)?;
        call.reshape_to(sums, sizes)
    }

    fn convolved(
        &self,
        call: &mut Call,
        v: ValueId,
        factor: f64,
        pads: impl Fn(usize) -> (i64, i64),
    ) -> Result<ValueId> {
        let weights = self.weights(call, call.dtype(v), factor);
        call.b.emit(&CONV, &[v, weights], self.attrs(pads))
    }

    /// How many elements each window has, [1, 1, windows…]; padding that the file gives counts if `padding`.
    fn counts(&self, call: &mut Call, padding: bool) -> Result<ValueId> {
        let dtype = call.dtype(self.x);
        let unit = call.b.scalar(dtype, 1.0);
        let mut sizes = vec![call.b.ints(&[1]), call.b.ints(&[1])];
        for axis in 2..call.b.rank(self.x) {
            sizes.push(call.axis_vector(self.x, axis)?);
        }
        let sizes = call.concat(&sizes, 0)?;
        let mut ones = call.expand(unit, sizes)?;
        if padding {
            let (mut sides, mut after) = (vec![0, 0], vec![0, 0]);
            sides.extend(self.pads.iter().map(|s| s.0));
            after.extend(self.pads.iter().map(|s| s.1));
            sides.append(&mut after);
            let sides = call.b.ints(&sides);
            ones = call.b.emit(&PAD, &[ones, sides, unit], Attrs::new())?;
        }
        self.convolved(call, ones, 1.0, |i| {
            let (before, after) = if padding { (0, 0) } else { self.pads[i] };
            (before, after + self.overhang[i])
        })
    }
}

/// `AveragePool`: the mean of each window, with or without its padding.
pub fn average(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let padding = call.int("count_include_pad", 0)? != 0;
    let w = Windows::read(call)?;
    let whole = w.overhang.iter().all(|o| *o == 0);
    if whole && (padding || w.pads.iter().all(|p| *p == (0, 0))) {
        let count: i64 = w.kernel.iter().product();
        return one(w.sums(call, w.x, 1.0 / count as f64)?);
    }
    let sums = w.sums(call, w.x, 1.0)?;
    let counts = w.counts(call, padding)?;
    one(call.b.div(sums, counts)?)
}

/// `LpPool`: (Σ |x|^p)^(1/p) of each window.
pub fn lp(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let p = order(call)?;
    let w = Windows::read(call)?;
    let powers = power(call, w.x, p)?;
    let sums = w.sums(call, powers, 1.0)?;
    one(root(call, sums, p)?)
}

/// An integer since opset 2; until then a number.
fn order(call: &mut Call) -> Result<i64> {
    match call.int("p", 2)? {
        p if p > 0 => Ok(p),
        p => Err(call.fail("attribute", format!("`p` = {p} is not positive"))),
    }
}

/// |x|^p.
fn power(call: &mut Call, x: ValueId, p: i64) -> Result<ValueId> {
    if p == 2 {
        return call.b.mul(x, x);
    }
    let size = call.b.emit(&ABS, &[x], Attrs::new())?;
    if p == 1 {
        return Ok(size);
    }
    let p = call.b.scalar(call.dtype(x), p as f64);
    call.b.emit(&POW, &[size, p], Attrs::new())
}

/// y^(1/p).
fn root(call: &mut Call, y: ValueId, p: i64) -> Result<ValueId> {
    match p {
        1 => Ok(y),
        2 => call.b.emit(&SQRT, &[y], Attrs::new()),
        _ => {
            let p = call.b.scalar(call.dtype(y), 1.0 / p as f64);
            call.b.emit(&POW, &[y, p], Attrs::new())
        }
    }
}

/// `MaxPool`: the largest of each window, and where in the whole operand it stands.
pub fn max(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let order = call.int("storage_order", 0)?;
    let w = Windows::read(call)?;
    let attrs = w
        .attrs(|i| w.pads[i])
        .with("kernel_shape", w.kernel.clone())
        .with("ceil_mode", i64::from(w.ceil))
        .with("storage_order", order);
    let both = call.b.emit_n(&MAX_POOL, vec![Some(w.x)], attrs, 2)?;
    Ok(Some(both.into_iter().map(Out::Value).collect()))
}

/// `GlobalAveragePool`.
pub fn global_average(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let axes = spatial(call, x)?;
    one(reduce_axes(&mut call.b, &REDUCE_MEAN, x, &axes, true)?)
}

/// `GlobalMaxPool`.
pub fn global_max(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "X")?;
    let axes = spatial(call, x)?;
    one(reduce_axes(&mut call.b, &REDUCE_MAX, x, &axes, true)?)
}

/// `GlobalLpPool`.
pub fn global_lp(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let p = order(call)?;
    let x = call.need(0, "X")?;
    let axes = spatial(call, x)?;
    let whole = |call: &mut Call, op, v| reduce_axes(&mut call.b, op, v, &axes, true);
    let y = match p {
        1 => whole(call, &REDUCE_L1, x)?,
        2 => whole(call, &REDUCE_L2, x)?,
        _ => {
            let powers = power(call, x, p)?;
            let sum = whole(call, &REDUCE_SUM, powers)?;
            root(call, sum, p)?
        }
    };
    one(y)
}
