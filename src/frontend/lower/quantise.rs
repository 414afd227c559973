//! Quantised values: `QuantizeLinear`, `DequantizeLinear` (ONNX 25) and `DynamicQuantizeLinear`, by tensor, by axis and by
//! block.
//!
//! A pair of quantising and dequantising by the same scale and zero point simulates rounding in training. It becomes one
//! floating-point computation. Its rounding passes the gradient on where the result is within the range of the integer
//! type (straight-through; Bengio et al. 2013, arXiv 1308.3432), and its scale gets a gradient too (Esser et al. 2020,
//! arXiv 1902.08153). Quantised numbers elsewhere are integers and have no gradient. Products of integers are refused,
//! because their results cannot be trained.
//!
//! Floats of 8 bits stay what they are, so that a plan can keep them in place of what they stand for. Their gradient passes
//! straight through, also where a number is beyond the largest, and none flows into a scale.

use super::call::{Call, Layout, Lowered, Out, Quantised, from_start, one};
use super::packed;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Def, OpDef, Same, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::arith::{DIV, ROUND, ROUND_THROUGH};
use ckpt_passes::ops::cast::{SATURATE, TO};
use ckpt_passes::ops::extreme::{CLIP, MAX, MIN};
use ckpt_passes::ops::float8::{DEQUANTIZE_FLOAT8, QUANTIZE_FLOAT8};
use ckpt_passes::ops::reduce::{REDUCE_MAX, REDUCE_MIN};
use ckpt_passes::ops::rule::{Expr, Formulas, binary_op, cast, unary_op};

/// `QuantizeLinear`: round(x / scale) + zero point, clipped to the range of the integer type.
pub fn quantise(call: &mut Call) -> Lowered {
    let [x, scale] = call.operands(["x", "y_scale"])?;
    let zero_point = call.opt(2);
    let layout = layout(call)?;
    let saturate = call.attr_int(SATURATE, 1)?;
    let told = call.attr_dtype("output_dtype")?;
    let dtype = match (zero_point, told) {
        (Some(zero), Some(told)) if call.dtype(zero) != told => {
            return Err(call.fail("type", "`output_dtype` is not the type of the zero point"));
        }
        (Some(zero), _) => call.dtype(zero),
        (None, told) => told.unwrap_or(DType::U8),
    };
    if let Some(precision) = call.attr_dtype("precision")?
        && precision != call.dtype(scale)
    {
        return Err(call.unsupported(format!("`precision` {precision}")));
    }
    if dtype.is_float8() {
        no_zero_point(call, zero_point)?;
        let x = match call.dtype(x).is_float() {
            true => x,
            false => call.cast_like(x, scale)?,
        };
        let scale = spread(call, scale, x, layout)?;
        let attrs = Attrs::new().with(TO, dtype);
        let attrs = match saturate {
            0 => attrs.with(SATURATE, 0),
            _ => attrs,
        };
        return one(call.emit(&QUANTIZE_FLOAT8, &[x, scale], attrs)?);
    }
    let integers = integers_of(call, x, scale, zero_point, layout, dtype)?;
    call.quantised = Some(Quantised {
        real: x,
        scale,
        zero_point,
        layout,
    });
    one(integers)
}

/// Fails for a zero point of floats of 8 bits that is not 0 (ONNX: "zero point is usually not used in the case of float8").
fn no_zero_point(call: &mut Call, zero_point: Option<ValueId>) -> Result<()> {
    let is_zero = |v: ValueId| {
        let tensor = call.graph.value(v).tensor()?;
        let mut numbers = (0..tensor.elements() as usize).map(|i| tensor.get_f64(i));
        Some(numbers.all(|n| n == Some(0.0)))
    };
    match zero_point.filter(|v| is_zero(*v) != Some(true)) {
        Some(_) => Err(call.unsupported("a zero point of floats of 8 bits that is no constant 0")),
        None => Ok(()),
    }
}

fn layout(call: &mut Call) -> Result<Layout> {
    Ok(Layout {
        axis: call.attr_int("axis", 1)?,
        block: call.attr_int("block_size", 0)?,
    })
}

/// Returns the type in which sums with zero points are exact.
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
    let whole = call.op(&ROUND, &[steps])?;
    let whole = shifted(call, whole, x, zero_point, layout, dtype)?;
    call.cast(whole, dtype)
}

/// Returns x / scale.
fn steps_of(call: &mut Call, x: ValueId, scale: ValueId, layout: Layout) -> Result<ValueId> {
    let real = call.dtype(scale);
    if !real.is_float() {
        return Err(call.unsupported(format!("a scale of element type {real}")));
    }
    let scale = spread(call, scale, x, layout)?;
    let x = call.cast(x, real)?;
    call.op(&DIV, &[x, scale])
}

/// Adds the zero point to whole numbers and clips to the range of `dtype`.
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
    let mut sum = call.cast(whole, wide)?;
    if let Some(zero) = zero_point {
        let zero = spread(call, zero, x, layout)?;
        let zero = call.cast(zero, wide)?;
        sum = call.add(sum, zero)?;
    }
    let [least, greatest] = [least, greatest].map(|n| call.scalar(wide, n as f64));
    call.op(&CLIP, &[sum, least, greatest])
}

/// Makes a scale or zero point broadcast against `x`.
fn spread(call: &mut Call, v: ValueId, x: ValueId, layout: Layout) -> Result<ValueId> {
    let rank = call.rank(x);
    match (call.rank(v), from_start(layout.axis, rank)) {
        (0, _) => Ok(v),
        (1, _) if layout.block == 0 && call.dims(v)[0].is_one() => Ok(v),
        (1, Some(axis)) if layout.block == 0 => {
            let behind: Vec<i64> = (1..(rank - axis) as i64).collect();
            call.unsqueeze(v, &behind)
        }
        (r, Some(axis)) if r == rank && layout.block > 0 => {
            let places = call.positions(x, axis)?;
            let block = call.int(layout.block);
            let places = call.op(&DIV, &[places, block])?;
            call.gather(v, places, axis)
        }
        _ => Err(call
            .fail("shape", "a scale or zero point does not fit the operand")
            .expected("one, one an index of `axis`, or one a block of `axis`")
            .found(format!("{} for {}", call.ty(v), call.ty(x)))),
    }
}

/// `DequantizeLinear`: (x − zero point)·scale.
pub fn dequantise(call: &mut Call) -> Lowered {
    let [x, scale] = call.operands(["x", "x_scale"])?;
    let zero_point = call.opt(2);
    let layout = layout(call)?;
    let told = call.attr_dtype("output_dtype")?;
    let result = told.unwrap_or(call.dtype(scale));
    let is_float8 = call.dtype(x).is_float8();
    if is_float8 {
        no_zero_point(call, zero_point)?;
    }
    let zero_point = zero_point.filter(|_| !is_float8);
    if let Some(codes) = packed::stored(call, x, layout) {
        let y = codes.dequantised(call, scale, zero_point)?;
        return one(call.cast(y, result)?);
    }
    if is_float8 {
        let scale = spread(call, scale, x, layout)?;
        let attrs = Attrs::new().with(TO, result);
        return one(call.emit(&DEQUANTIZE_FLOAT8, &[x, scale], attrs)?);
    }
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
    let wide = exact(call.dtype(scale));
    let numbers = match pair {
        Some(pair) => {
            let steps = steps_of(call, pair.real, scale, layout)?;
            let whole = call.op(&ROUND_THROUGH, &[steps])?;
            shifted(call, whole, x, zero_point, layout, dtype)?
        }
        // Sums of 32-bit numbers are not exact in float32.
        None if least < -(1 << 24) || greatest > 1 << 24 => {
            let mut whole = x;
            if let Some(zero) = zero_point {
                let zero = spread(call, zero, x, layout)?;
                whole = call.sub(whole, zero)?;
            }
            let real = call.cast(whole, wide)?;
            return scaled(call, real, x, scale, layout, result);
        }
        None => call.cast(x, wide)?,
    };
    let mut away = numbers;
    if let Some(zero) = zero_point {
        let zero = spread(call, zero, x, layout)?;
        let zero = call.cast_like(zero, numbers)?;
        away = call.sub(numbers, zero)?;
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
) -> Lowered {
    let real = call.dtype(scale);
    let v = call.cast(v, real)?;
    let scale = spread(call, scale, x, layout)?;
    let y = call.mul(v, scale)?;
    one(call.cast(y, result)?)
}

/// Returns true if two values are one, or constants with the same contents.
fn same_contents(call: &Call, a: ValueId, b: ValueId) -> bool {
    let tensor = |v: ValueId| match &call.graph.value(v).def {
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

/// `DynamicQuantizeLinear`: to uint8, by a scale and a zero point that follow from the range of the operand.
pub fn dynamic(call: &mut Call) -> Lowered {
    let x = call.need(0, "x")?;
    if call.ty(x).elements().same(&0.into()) == Same::Yes {
        return Err(call.fail("shape", "nothing to quantise"));
    }
    let all = |op: &'static OpDef| {
        Expr::Node(op.into(), vec![x.into()], Attrs::new().with("keepdims", 0))
    };
    let high = call.bind(binary_op(&MAX, all(&REDUCE_MAX), 0.0))?;
    let low = call.bind(binary_op(&MIN, all(&REDUCE_MIN), 0.0))?;
    let scale = call.bind((high - low) / 255.0)?;
    let ends = vec![(0.0 - low) / scale, 0.0.into(), 255.0.into()];
    let steps = unary_op(&ROUND, Expr::Node((&CLIP).into(), ends, Attrs::new()));
    let (scale, zero_point) = (scale.0, call.eval(cast(steps, DType::U8))?);
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

/// Refuses `MatMulInteger`, `ConvInteger`, `QLinearMatMul`, `QLinearConv`, and ONNX Runtime's relatives of them.
pub fn integer_product(call: &mut Call) -> Lowered {
    Err(call
        .unsupported("a product of integers, which has no gradient,")
        .help("export the model before it is quantised, or with pairs of QuantizeLinear and DequantizeLinear"))
}
