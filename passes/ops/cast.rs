//! `Cast`: change of element type (ONNX Cast-23). The gradient of a cast from a float of 8 bits is rounded to that type, as
//! PyTorch does.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, DeviceKind, Grad, Indices, MemoryCx, OpClass, OpDef, fresh};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Emit, ValueId};
/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CAST];

/// Attribute: the element type of the result.
pub const TO: &str = "to";
/// Attribute: 0 if a number that is too large becomes infinity or NaN; otherwise it becomes the largest number of the type.
pub const SATURATE: &str = "saturate";

/// ONNX `Cast`.
pub static CAST: OpDef = OpDef {
    aten: &["aten._to_copy", "aten.to"],
    attrs: &[
        // Absent but where `to` is a float of 8 bits and numbers beyond its largest become infinity or NaN.
        AttrSpec::optional(SATURATE, AttrKind::Int),
        AttrSpec::required(TO, AttrKind::DType),
    ],
    ins: INPUT,
    outs: OUTPUT,
    indices: Indices::PassedOn,
    infer: |cx| Ok(vec![cx.ty(0)?.with_dtype(cx.attrs.dtype(TO))]),
    fold: |cx, types| {
        let ints = cx.ints(0)?;
        match types.first()?.dtype {
            DType::I64 => Some(vec![ints.to_vec()]),
            DType::Bool => {
                let known: Option<Vec<Dim>> = ints
                    .iter()
                    .map(|d| d.as_const().map(|n| Dim::from((n != 0) as i64)))
                    .collect();
                Some(vec![known?])
            }
            // A narrower integer holds what fits; a symbolic size may not.
            d if d.is_int() => {
                let fits = |n: i64| u8::try_from(n).is_ok_and(|n| n < 128);
                ints.iter()
                    .all(|x| x.as_const().is_some_and(fits))
                    .then(|| vec![ints.to_vec()])
            }
            _ => None,
        }
    },
    grad: Grad::First(|cx| {
        let (dtype, dy) = (cx.ty(cx.x(0)).dtype, cx.dy0());
        if !dtype.is_float8() {
            return cx.b.cast(dy, dtype);
        }
        // PyTorch holds the gradient in the operand's type. Here it is a number of that type in a wider one, which
        // adds up where the operand has several readers.
        let real = cx.ty(dy).dtype;
        let narrow = rounded(cx.b, dy, dtype, false)?;
        cx.b.cast(narrow, real)
    }),
    cost: one_flop,
    later_types: FLOAT8_SINCE_19,
    memory: |cx| {
        let temp_bytes = match cx.attrs.dtype(TO).is_float8() && saturates(cx.attrs) {
            true => buffer_bytes(cx, wide_type(cx.operand(0).map(|x| x.dtype).into_iter())),
            false => 0,
        };
        fresh(cx).with_temp(temp_bytes)
    },
    scalar: |_| Some(vec![scalar::x(0)]),
    ..standard("Cast", onnx(9, 13), OpClass::Cast, BatchAxes::Pointwise)
};

/// Returns whether numbers beyond the largest of a type of 8 bits become the largest.
pub fn saturates(attrs: &Attrs) -> bool {
    attrs.opt_int(SATURATE) != Some(0)
}

/// Emits a cast to a type of 8 bits.
///
/// # Errors
/// What typing refuses.
pub fn rounded(b: &mut dyn Emit, x: ValueId, to: DType, saturate: bool) -> Result<ValueId> {
    let attrs = Attrs::new().with(TO, to);
    let attrs = match saturate {
        true => attrs,
        false => attrs.with(SATURATE, 0),
    };
    b.emit(&CAST, &[x], attrs)
}

/// Returns the type that holds the numbers of both types, computed in float32 at least where they differ.
pub fn widest(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        (DType::F64, _) | (_, DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// Returns the type in which operands of these types are scaled.
pub fn wide_type(types: impl Iterator<Item = DType>) -> DType {
    let types = types.map(|dtype| match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    });
    types.fold(DType::F32, widest)
}

/// The axis of a tensor that a kernel goes along, and how many of its places it converts at a time; `None` for one element.
pub fn piece(device: DeviceKind, dims: &[i64]) -> Option<(usize, i64)> {
    let axis = dims.iter().position(|d| *d != 1)?;
    let width = dims[axis + 1..].iter().product();
    Some((axis, device.rows_at_once(1 << 16, dims[axis], width)))
}

/// Returns the elements of a piece.
pub fn piece_elements(device: DeviceKind, dims: &[i64]) -> i64 {
    match piece(device, dims) {
        None => 1,
        Some((axis, places)) => places.min(dims[axis]) * dims[axis + 1..].iter().product::<i64>(),
    }
}

/// The bytes of the buffer in which a kernel rounds, or makes, a piece of its result.
pub fn buffer_bytes(cx: &MemoryCx, wide: DType) -> u64 {
    cx.outs.first().map_or(0, |out| {
        piece_elements(cx.device, &out.dims) as u64 * wide.size_bytes()
    })
}
