//! Weights that stay quantised in memory: [`DEQUANTIZE`] makes a matrix of them where it is read.
//!
//! Codes of four bits lie two in a byte, row-major over the result, the first in the low half (as ONNX stores INT4 and UINT4) or
//! in the high one (as bitsandbytes does). The op is the only one that reads such bytes, so a weight of `n` elements takes `n / 2` bytes until a node needs
//! it, and again once that node has run.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BodyCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpDef, fresh};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&DEQUANTIZE];

/// Attribute: the axis along which scales stand for blocks.
pub const AXIS: &str = "axis";
/// Attribute: bits of a code, 4 or 8.
pub const BITS: &str = "bits";
/// Attribute: elements of the axis that share a scale.
pub const BLOCK: &str = "block";
/// Attribute: the first of two codes of four bits is in the high half of their byte.
pub const HIGH_FIRST: &str = "high_first";
/// Attribute: the sizes of the result.
pub const SHAPE: &str = "shape";
/// Attribute: codes of four bits are in two's complement.
pub const SIGNED: &str = "signed";

/// Codes in an initializer of bytes, or floats of 8 bits, as numbers: `(code − zero_point)·scale`, or `table[code]·scale`.
///
/// `scale` has the type of the result. It and `zero_point` are scalars, or have the axes of the result: along `axis` one element
/// for each `block`, along any other axis one for each element, or one for all.
pub static DEQUANTIZE: OpDef = OpDef {
    attrs: &[
        AttrSpec::int(AXIS, 0),
        AttrSpec::int(BITS, 8),
        AttrSpec::int(BLOCK, 1),
        AttrSpec::int(HIGH_FIRST, 0),
        AttrSpec::required(SHAPE, AttrKind::Ints),
        AttrSpec::int(SIGNED, 0),
    ],
    ins: slots!["codes", "scale"; "zero_point", "table"],
    outs: Y,
    infer,
    grad: Grad::Body,
    cost: |cx| cx.elementwise(3),
    memory,
    ..our_mixed("Dequantize", body)
};

fn infer(cx: &InferCx) -> Result<Vec<Ty>> {
    let (bits, block) = (cx.attrs.int(BITS), cx.attrs.int(BLOCK));
    let shape = cx.attrs.ints(SHAPE);
    let axis = cx.axis(cx.attrs.int(AXIS), shape.len())?;
    let elements = shape.iter().try_fold(1i64, |n, d| {
        n.checked_mul(*d).filter(|n| *n >= 0 && *d >= 0)
    });
    let (Some(elements), true, true) = (elements, bits == 4 || bits == 8, block > 0) else {
        return Err(cx
            .fail("attribute", "the attributes describe no codes")
            .expected("sizes of at least 0, 4 or 8 bits, and a block of at least 1")
            .found(format!("{shape:?}, {bits} bits, blocks of {block}")));
    };
    let codes = cx.ty(0)?;
    let is_wide = bits == 8 && (codes.dtype == DType::I8 || codes.dtype.is_float8());
    if codes.dtype != DType::U8 && !is_wide {
        return Err(cx
            .fail("type", "codes of the wrong element type")
            .expected(if bits == 8 {
                "u8, i8 or a float of 8 bits"
            } else {
                "u8"
            })
            .found(codes.to_string()));
    }
    let signed = cx.attrs.int(SIGNED) != 0;
    if signed && bits == 8 {
        return Err(cx.fail(
            "attribute",
            "the element type says whether 8 bits have a sign",
        ));
    }
    let bytes = if bits == 4 {
        elements.div_euclid(2) + elements % 2
    } else {
        elements
    };
    if codes.elements().same(&Dim::from(bytes)) == Same::No {
        return Err(cx
            .fail("shape", "the codes do not fill the result")
            .expected(format!("{bytes} bytes for {shape:?}"))
            .found(codes.to_string()));
    }
    let dtype = cx.want_dtype(1, DType::is_float, "a floating-point type")?;
    check_spread(cx, 1, (shape, axis, block))?;
    if cx.opt_ty(2).is_some() {
        cx.same_dtype(&[1, 2])?;
        check_spread(cx, 2, (shape, axis, block))?;
    }
    if let Some(table) = cx.opt_ty(3) {
        cx.same_dtype(&[1, 3])?;
        let wanted = Ty::new(dtype, [Dim::from(1 << bits)]);
        let is_plain = codes.dtype == DType::U8 && !signed && cx.opt_ty(2).is_none();
        if !is_plain || !may_be_same(&table.dims, &wanted.dims) {
            return Err(cx
                .fail("type", "the table does not fit the codes")
                .expected(format!("{wanted}, codes without a sign, and no zero point"))
                .found(table.to_string()));
        }
    }
    let dims: Vec<Dim> = shape.iter().map(|d| Dim::from(*d)).collect();
    Ok(vec![Ty::new(dtype, dims)])
}

/// Checks that a scale or zero point stands for each element of the result.
fn check_spread(
    cx: &InferCx,
    slot: usize,
    (shape, axis, block): (&[i64], usize, i64),
) -> Result<()> {
    let ty = cx.ty(slot)?;
    let blocks = |i: usize| {
        if i == axis {
            (shape[i] + block - 1) / block
        } else {
            shape[i]
        }
    };
    let fits = |(i, d): (usize, &Dim)| d.is_one() || d.same(&Dim::from(blocks(i))) != Same::No;
    if ty.rank() == 0 || (ty.rank() == shape.len() && ty.dims.iter().enumerate().all(fits)) {
        return Ok(());
    }
    let wanted: Vec<i64> = (0..shape.len()).map(blocks).collect();
    let name = cx.op.ins[slot].name;
    Err(cx
        .fail("shape", format!("`{name}` does not fit the result"))
        .expected(format!(
            "sizes {wanted:?}, each of which may be 1, or a scalar"
        ))
        .found(ty.to_string()))
}

/// What a kernel unpacks at a time: (first row, rows) of the first axis. All rows of one piece are in one block of that axis.
pub fn pieces(device: DeviceKind, attrs: &Attrs) -> impl Iterator<Item = (i64, i64)> {
    let shape = attrs.ints(SHAPE);
    let (rows, width) = (shape[0], shape[1..].iter().product::<i64>());
    let is_blocked = attrs.int(BLOCK) > 1 && axis(attrs) == 0;
    let block = if is_blocked {
        attrs.int(BLOCK)
    } else {
        rows.max(1)
    };
    let most = device.rows_at_once(1 << 16, block.min(rows), width);
    let starts = (0..rows).step_by(block as usize);
    starts.flat_map(move |start| {
        let end = rows.min(start + block);
        let firsts = (start..end).step_by(most as usize);
        firsts.map(move |first| (first, most.min(end - first)))
    })
}

/// Returns the axis of blocks, from 0.
pub fn axis(attrs: &Attrs) -> usize {
    let (axis, rank) = (attrs.int(AXIS), attrs.ints(SHAPE).len() as i64);
    (if axis < 0 { axis + rank } else { axis }) as usize
}

/// Elements of a piece, with which a kernel takes its temporaries: unpacked codes, one more in front where a piece begins within
/// a byte, and places in a table.
pub fn most_elements(device: DeviceKind, attrs: &Attrs) -> i64 {
    let width = attrs.ints(SHAPE)[1..].iter().product::<i64>();
    pieces(device, attrs)
        .map(|(_, rows)| rows * width)
        .max()
        .unwrap_or(0)
}

fn memory(cx: &MemoryCx) -> Footprint {
    let most = most_elements(cx.device, cx.attrs) as u64;
    let unpacked = match cx.attrs.int(BITS) {
        4 if most > 0 => 2 * (most / 2 + 1),
        _ => 0,
    };
    let places = if cx.operand(3).is_some() { 8 * most } else { 0 };
    fresh(cx).with_temp(unpacked + places + strided_bytes(cx, &[0]))
}

fn body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let shape = cx.attrs.ints(SHAPE).to_vec();
    let signed = cx.attrs.int(SIGNED) != 0;
    let dtype = cx.b.dtype(cx.x(1));
    let mut codes = cx.x(0);
    if cx.attrs.int(BITS) == 4 {
        codes = unpacked(cx, codes, shape.iter().product())?;
    }
    if signed {
        let sign = cx.b.scalar(DType::U8, 8.0);
        codes = cx.b.op(BITWISE_XOR, &[codes, sign])?;
    }
    let sizes = cx.b.ints(&shape);
    let codes = cx.b.reshape_to(codes, sizes)?;
    let mut y = match cx.opt_x(3) {
        Some(table) => {
            let places = cx.b.cast(codes, DType::I64)?;
            cx.b.gather(table, places, 0)?
        }
        None => cx.b.cast(codes, dtype)?,
    };
    if signed {
        let sign = cx.b.scalar(dtype, 8.0);
        y = cx.b.sub(y, sign)?;
    }
    if let Some(zero) = cx.opt_x(2) {
        let zero = spread(cx, zero, y)?;
        y = cx.b.sub(y, zero)?;
    }
    let scale = spread(cx, cx.x(1), y)?;
    Ok(vec![cx.b.mul(y, scale)?])
}

/// Returns `count` codes of four bits, each in a byte of its own.
fn unpacked(cx: &mut BodyCx, codes: ValueId, count: i64) -> Result<ValueId> {
    let flat = cx.b.reshape(codes, &[-1, 1])?;
    let [mask, four] = [15.0, 4.0].map(|n| cx.b.scalar(DType::U8, n));
    let low = cx.b.op(BITWISE_AND, &[flat, mask])?;
    let right = Attrs::new().with("direction", "RIGHT");
    let high = cx.b.emit(BIT_SHIFT, &[flat, four], right)?;
    let pairs = match cx.attrs.int(HIGH_FIRST) {
        0 => [low, high],
        _ => [high, low],
    };
    let pairs = cx.b.concat(&pairs, 1)?;
    let flat = cx.b.reshape(pairs, &[-1])?;
    if count % 2 == 0 {
        return Ok(flat);
    }
    let ends = [0, count].map(|n| cx.b.ints(&[n]));
    cx.b.slice(flat, ends, 0)
}

/// A scale or zero point with one element for each place of the axis of blocks, or as it is where it broadcasts already.
fn spread(cx: &mut BodyCx, v: ValueId, like: ValueId) -> Result<ValueId> {
    let (axis, block) = (axis(cx.attrs), cx.attrs.int(BLOCK));
    if block == 1 || cx.b.rank(v) == 0 || cx.b.dims(v)[axis].is_one() {
        return Ok(v);
    }
    let places = cx.b.positions(like, axis)?;
    let block = cx.b.int(block);
    let places = cx.b.div(places, block)?;
    cx.b.gather(v, places, axis)
}
