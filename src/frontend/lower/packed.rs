//! Weights whose codes are initializers: `DequantizeLinear` of one, and ONNX Runtime's `MatMulNBits`, as nodes of
//! [`DEQUANTIZE`], which leaves the codes as they lie in the file.

use super::call::{Call, Layout, Lowered, Packed, from_start, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Def, Dim, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::quantised::{AXIS, BITS, BLOCK, DEQUANTIZE, SHAPE, SIGNED};

/// Codes in an initializer, and how scales stand for them.
pub(super) struct Stored {
    codes: ValueId,
    packed: Option<Packed>,
    shape: Vec<i64>,
    layout: Layout,
}

/// Returns the codes of 4 or 8 bits that an initializer holds, floats of 8 bits too; `None` for other values.
pub(super) fn stored(call: &Call, codes: ValueId, layout: Layout) -> Option<Stored> {
    let is_initializer = matches!(call.graph.value(codes).def, Def::Init(_));
    let packed = call.packed(codes);
    let is_byte = |dtype: DType| matches!(dtype, DType::I8 | DType::U8) || dtype.is_float8();
    let is_narrow = packed.is_some() || is_byte(call.dtype(codes));
    let shape = match &packed {
        Some(packed) => packed.shape.clone(),
        None => call.ty(codes).static_dims()?,
    };
    (is_initializer && is_narrow && !shape.is_empty()).then_some(Stored {
        codes,
        packed,
        shape,
        layout,
    })
}

impl Stored {
    /// Returns (codes − zero point)·scale, in the type of the scale.
    pub(super) fn dequantised(
        &self,
        call: &mut Call,
        scale: ValueId,
        zero_point: Option<ValueId>,
    ) -> Result<ValueId> {
        let real = call.dtype(scale);
        if !real.is_float() {
            return Err(call.unsupported(format!("a scale of element type {real}")));
        }
        let zero_point = zero_point
            .map(|zero| self.numbers(call, zero, real))
            .transpose()?;
        let scale = self.aligned(call, scale)?;
        let zero_point = zero_point
            .map(|zero| self.aligned(call, zero))
            .transpose()?;
        let bits = if self.packed.is_some() { 4 } else { 8 };
        let signed = self.packed.as_ref().is_some_and(|p| p.signed);
        let block = self.layout.block.max(1);
        // One scale an index of the axis is a block of one element. What is not an axis belongs to a scale for the whole tensor.
        let axis = from_start(self.layout.axis, self.shape.len()).unwrap_or(0);
        let attrs = codes_as(&self.shape, bits)
            .with(AXIS, axis as i64)
            .with(BLOCK, block)
            .with(SIGNED, i64::from(signed));
        dequantize(call, self.codes, scale, zero_point, attrs)
    }

    /// Returns zero points as numbers of the type of the scale.
    fn numbers(&self, call: &mut Call, zero: ValueId, real: DType) -> Result<ValueId> {
        let found = call.packed(zero);
        if found.as_ref().map(|p| p.signed) != self.packed.as_ref().map(|p| p.signed)
            || call.dtype(zero) != call.dtype(self.codes)
        {
            return Err(call
                .fail(
                    "type",
                    "the zero point has another element type than the codes",
                )
                .found(format!("{} and {}", call.ty(zero), call.ty(self.codes))));
        }
        let Some(packed) = found else {
            return call.cast(zero, real);
        };
        let shape = if packed.shape.is_empty() {
            vec![1]
        } else {
            packed.shape
        };
        let attrs = codes_as(&shape, 4).with(SIGNED, i64::from(packed.signed));
        let one = call.scalar(real, 1.0);
        dequantize(call, zero, one, None, attrs)
    }

    /// Gives scales or zero points the axes of the codes.
    fn aligned(&self, call: &mut Call, v: ValueId) -> Result<ValueId> {
        let rank = self.shape.len();
        let axis = from_start(self.layout.axis, rank);
        let (found, block) = (call.rank(v), self.layout.block);
        let is_one = call.dims(v).iter().all(Dim::is_one);
        match (found, axis) {
            (0, _) => Ok(v),
            (1, _) if is_one && block == 0 => {
                call.unsqueeze(v, &(1..rank as i64).collect::<Vec<_>>())
            }
            (1, Some(axis)) if block == 0 => {
                let others = (0..rank).filter(|i| *i != axis).map(|i| i as i64);
                call.unsqueeze(v, &others.collect::<Vec<_>>())
            }
            (found, Some(_)) if found == rank && block > 0 => Ok(v),
            _ => Err(call
                .fail("shape", "a scale or zero point does not fit the operand")
                .expected("one, one an index of `axis`, or one a block of `axis`")
                .found(format!("{} for {:?}", call.ty(v), self.shape))),
        }
    }
}

fn codes_as(shape: &[i64], bits: i64) -> Attrs {
    Attrs::new().with(SHAPE, shape.to_vec()).with(BITS, bits)
}

fn dequantize(
    call: &mut Call,
    codes: ValueId,
    scale: ValueId,
    zero_point: Option<ValueId>,
    attrs: Attrs,
) -> Result<ValueId> {
    let mut ins = vec![Some(codes), Some(scale)];
    ins.extend(zero_point.map(Some));
    Ok(call.emit_n(&DEQUANTIZE, ins, attrs, 1)?[0])
}

/// `MatMulNBits` (com.microsoft 1): A·Wᵀ + bias. W [N, K] lies in rows of whole blocks along K.
pub(super) fn product(call: &mut Call) -> Lowered {
    let [a, b, scales] = call.operands(["A", "B", "scales"])?;
    let (zeros, bias) = (call.opt(3), call.opt(5));
    call.refuse(4, "g_idx")?;
    call.ignore_attr("accuracy_level");
    let [k, n, block] = [
        call.attr_positive("K")?,
        call.attr_positive("N")?,
        call.attr_positive("block_size")?,
    ];
    let bits = call.attr_int("bits", 4)?;
    if bits != 4 && bits != 8 {
        return Err(call.unsupported(format!("`bits` = {bits}")));
    }
    call.refuse_attr("weight_prepacked")?;
    let real = call.dtype(scales);
    let blocks = k.checked_add(block - 1).map_or(i64::MAX, |k| k / block);
    let scales = call.reshape(scales, &[n, blocks, 1])?;
    let zero = match zeros {
        None => call.scalar(real, if bits == 4 { 8.0 } else { 128.0 }),
        Some(v) if call.dtype(v) == real => call.reshape(v, &[n, blocks, 1])?,
        Some(v) if bits == 8 && call.dtype(v) == DType::U8 => {
            let v = call.cast(v, real)?;
            call.reshape(v, &[n, blocks, 1])?
        }
        Some(v) if call.dtype(v) == DType::U8 => {
            // Each row begins with a byte of its own.
            let row = blocks + blocks % 2;
            let one = call.scalar(real, 1.0);
            let v = dequantize(call, v, one, None, codes_as(&[n, row, 1], 4))?;
            first(call, v, blocks)?
        }
        Some(v) => {
            let found = call.ty(v).to_string();
            return Err(call
                .fail("type", "zero points of the wrong element type")
                .found(found));
        }
    };
    let attrs = codes_as(&[n, blocks, block], bits);
    let w = dequantize(call, b, scales, Some(zero), attrs)?;
    let w = call.reshape(w, &[n, -1])?;
    let w = if k % block == 0 {
        w
    } else {
        first(call, w, k)?
    };
    let w = call.transpose(w, &[1, 0])?;
    let y = call.op(&MATMUL, &[a, w])?;
    one(match bias {
        Some(bias) => call.add(y, bias)?,
        None => y,
    })
}

/// Returns the first `count` elements along axis 1.
fn first(call: &mut Call, v: ValueId, count: i64) -> Result<ValueId> {
    let ends = [0, count].map(|n| call.ints(&[n]));
    call.slice(v, ends, 1)
}
