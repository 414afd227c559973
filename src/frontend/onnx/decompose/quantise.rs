//! Quantised values: `QuantizeLinear`, `DequantizeLinear` (ONNX 25) and `DynamicQuantizeLinear`, by tensor, by axis and by
//! block.
//!
//! A pair of quantising and dequantising by the same scale and zero point is where training simulates rounding: it is
//! read as one floating-point computation whose rounding passes the gradient on where the result is within the range of
//! the integer type (straight-through; Bengio et al. 2013, arXiv 1308.3432), and whose scale gets one too (Esser et al.
//! 2020, arXiv 1902.08153). Quantised numbers elsewhere are integers and have no gradient. Products of integers are
//! refused: what they make cannot be trained.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Def, Same, ValueId};
use ckpt_passes::ops::arith::{DIV, ROUND, ROUND_THROUGH};
use ckpt_passes::ops::extreme::{CLIP, MAX, MIN};
use ckpt_passes::ops::index::GATHER;
use ckpt_passes::ops::reduce::{REDUCE_MAX, REDUCE_MIN};

/// Quantised numbers, and what they were made of.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Quantised {
    real: ValueId,
    scale: ValueId,
    zero_point: Option<ValueId>,
    layout: Layout,
}

/// Along which axis, and for how many of its elements, one scale stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    axis: i64,
    block: i64,
}

/// `QuantizeLinear`: round(x / scale) + zero point, cut off at the ends of the integer type.
pub fn quantise(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, scale) = (call.need(0, "x")?, call.need(1, "y_scale")?);
    let zero_point = call.opt(2);
    let layout = layout(call)?;
    let told = call.dtype_attribute("output_dtype")?;
    let dtype = match (zero_point, told) {
        (Some(zero), Some(told)) if call.dtype(zero) != told => {
            return Err(call.fail("type", "`output_dtype` is not the type of the zero point"));
        }
        (Some(zero), _) => call.dtype(zero),
        (None, told) => told.unwrap_or(DType::U8),
    };
    if let Some(precision) = call.dtype_attribute("precision")?
        && precision != call.dtype(scale)
    {
        return Err(call.unsupported(format!("`precision` {precision}")));
    }
    let integers = integers_of(call, x, scale, zero_point, layout, dtype)?;
    call.quantised = Some(Quantised {
        real: x,
        scale,
        zero_point,
        layout,
    });
    Ok(Some(vec![Out::Value(integers)]))
}

fn layout(call: &mut Call) -> Result<Layout> {
    // Only says something about 8-bit floats, which we do not have.
    call.ignore("saturate");
    Ok(Layout {
        axis: call.int("axis", 1)?,
        block: call.int("block_size", 0)?,
    })
}

/// The type that sums with zero points are exact in.
fn exact(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

fn integers_of(
    call: &mut Call,
    x: ValueId,
    scale: ValueId,
    zero_point: Option<ValueId>,
    layout: Layout,
    dtype: DType,
) -> Result<ValueId> {
    let steps = steps_of(call, x, scale, layout)?;
    let whole = call.b.emit(&ROUND, &[steps], Attrs::new())?;
    let whole = shifted(call, whole, x, zero_point, layout, dtype)?;
    call.b.cast(whole, dtype)
}

/// x / scale.
fn steps_of(call: &mut Call, x: ValueId, scale: ValueId, layout: Layout) -> Result<ValueId> {
    let real = call.dtype(scale);
    if !real.is_float() {
        return Err(call.unsupported(format!("a scale of element type {real}")));
    }
    let scale = spread(call, scale, x, layout)?;
    let x = call.b.cast(x, real)?;
    call.b.emit(&DIV, &[x, scale], Attrs::new())
}

/// Whole numbers plus the zero point, within the range of `dtype`.
fn shifted(
    call: &mut Call,
    whole: ValueId,
    x: ValueId,
    zero_point: Option<ValueId>,
    layout: Layout,
    dtype: DType,
) -> Result<ValueId> {
    let Some((least, greatest)) = dtype.int_range() else {
        return Err(call.unsupported(format!("quantisation to {dtype}")));
    };
    let wide = exact(call.dtype(whole));
    let mut sum = call.b.cast(whole, wide)?;
    if let Some(zero) = zero_point {
        let zero = spread(call, zero, x, layout)?;
        let zero = call.b.cast(zero, wide)?;
        sum = call.b.add(sum, zero)?;
    }
    let [least, greatest] = [least, greatest].map(|n| call.b.scalar(wide, n as f64));
    call.b.emit(&CLIP, &[sum, least, greatest], Attrs::new())
}

/// A scale or zero point as it broadcasts against `x`.
fn spread(call: &mut Call, v: ValueId, x: ValueId, layout: Layout) -> Result<ValueId> {
    let rank = call.b.rank(x);
    let axis = if layout.axis < 0 {
        layout.axis + rank as i64
    } else {
        layout.axis
    };
    match call.b.rank(v) {
        0 => Ok(v),
        1 if layout.block == 0 && call.dims(v)[0].is_one() => Ok(v),
        1 if layout.block == 0 && (0..rank as i64).contains(&axis) => {
            let behind: Vec<i64> = (1..rank as i64 - axis).collect();
            if behind.is_empty() {
                return Ok(v);
            }
            call.unsqueeze(v, &behind)
        }
        r if r == rank && layout.block > 0 && (0..rank as i64).contains(&axis) => {
            let places = call.positions(x, axis as usize)?;
            let block = call.b.int(layout.block);
            let places = call.b.emit(&DIV, &[places, block], Attrs::new())?;
            let attrs = Attrs::new().with("axis", axis);
            call.b.emit(&GATHER, &[v, places], attrs)
        }
        _ => Err(call
            .fail("shape", "a scale or zero point does not fit the operand")
            .expected("one, one an index of `axis`, or one a block of `axis`")
            .found(format!("{} for {}", call.b.ty(v), call.b.ty(x)))),
    }
}

/// `DequantizeLinear`: (x − zero point)·scale.
pub fn dequantise(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, scale) = (call.need(0, "x")?, call.need(1, "x_scale")?);
    let zero_point = call.opt(2);
    let layout = layout(call)?;
    let told = call.dtype_attribute("output_dtype")?;
    let result = told.unwrap_or(call.dtype(scale));
    let pair = call.quantised_as(x).filter(|q| {
        let zeros = match (q.zero_point, zero_point) {
            (None, None) => true,
            (Some(a), Some(b)) => same_contents(call, a, b),
            _ => false,
        };
        zeros && q.layout == layout && same_contents(call, q.scale, scale)
    });
    let dtype = call.dtype(x);
    let Some((least, greatest)) = dtype.int_range() else {
        return Err(call.unsupported(format!("numbers quantised to {dtype}")));
    };
    let numbers = match pair {
        Some(pair) => {
            let steps = steps_of(call, pair.real, scale, layout)?;
            let whole = call.b.emit(&ROUND_THROUGH, &[steps], Attrs::new())?;
            shifted(call, whole, x, zero_point, layout, dtype)?
        }
        // Sums of 32-bit numbers are not exact in float32.
        None if least < -(1 << 24) || greatest > 1 << 24 => {
            let mut whole = x;
            if let Some(zero) = zero_point {
                let zero = spread(call, zero, x, layout)?;
                whole = call.b.sub(whole, zero)?;
            }
            let real = call.b.cast(whole, exact(call.dtype(scale)))?;
            return scaled(call, real, x, scale, layout, result);
        }
        None => call.b.cast(x, exact(call.dtype(scale)))?,
    };
    let mut away = numbers;
    if let Some(zero) = zero_point {
        let zero = spread(call, zero, x, layout)?;
        let zero = call.b.cast(zero, call.dtype(numbers))?;
        away = call.b.sub(numbers, zero)?;
    }
    scaled(call, away, x, scale, layout, result)
}

fn scaled(
    call: &mut Call,
    v: ValueId,
    x: ValueId,
    scale: ValueId,
    layout: Layout,
    result: DType,
) -> Result<Option<Vec<Out>>> {
    let real = call.dtype(scale);
    let v = call.b.cast(v, real)?;
    let scale = spread(call, scale, x, layout)?;
    let y = call.b.mul(v, scale)?;
    Ok(Some(vec![Out::Value(call.b.cast(y, result)?)]))
}

/// Whether two values are one, or constants of the same contents.
fn same_contents(call: &Call, a: ValueId, b: ValueId) -> bool {
    let tensor = |v: ValueId| match &call.b.graph.value(v).def {
        Def::Init(tensor) => Some(tensor),
        _ => None,
    };
    a == b
        || match (tensor(a), tensor(b)) {
            (Some(x), Some(y)) => {
                x.dtype == y.dtype
                    && x.dims == y.dims
                    && x.bytes().is_some()
                    && x.bytes() == y.bytes()
            }
            _ => false,
        }
}

/// `DynamicQuantizeLinear`: to uint8 by a scale and a zero point that the operand's own range decides.
pub fn dynamic(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let x = call.need(0, "x")?;
    if call.b.ty(x).elements().same(&0.into()) == Same::Yes {
        return Err(call.fail("shape", "nothing to quantise"));
    }
    let real = call.dtype(x);
    let (zero, top) = (call.b.scalar(real, 0.0), call.b.scalar(real, 255.0));
    let all = || Attrs::new().with("keepdims", 0);
    let high = call.b.emit(&REDUCE_MAX, &[x], all())?;
    let high = call.b.emit(&MAX, &[high, zero], Attrs::new())?;
    let low = call.b.emit(&REDUCE_MIN, &[x], all())?;
    let low = call.b.emit(&MIN, &[low, zero], Attrs::new())?;
    let range = call.b.sub(high, low)?;
    let scale = call.b.div(range, top)?;
    let below = call.b.sub(zero, low)?;
    let steps = call.b.div(below, scale)?;
    let steps = call.b.emit(&CLIP, &[steps, zero, top], Attrs::new())?;
    let steps = call.b.emit(&ROUND, &[steps], Attrs::new())?;
    let zero_point = call.b.cast(steps, DType::U8)?;
    let layout = Layout { axis: 1, block: 0 };
    let integers = integers_of(call, x, scale, Some(zero_point), layout, DType::U8)?;
    call.quantised = Some(Quantised {
        real: x,
        scale,
        zero_point: Some(zero_point),
        layout,
    });
    Ok(Some(vec![
        Out::Value(integers),
        Out::Value(scale),
        Out::Value(zero_point),
    ]))
}

/// `MatMulInteger`, `ConvInteger`, `QLinearMatMul`, `QLinearConv`, and ONNX Runtime's relatives of them.
pub fn integer_product(call: &mut Call) -> Result<Option<Vec<Out>>> {
    Err(call
        .unsupported("a product of integers, which has no gradient,")
        .help("export the model before it is quantised, or with pairs of QuantizeLinear and DequantizeLinear"))
}
