//! `Cast`: change of element type (ONNX Cast-23).

use super::rule::*;
use ckpt_ir::op::{BatchAxes, Grad, Indices, OpClass, OpDef};
use ckpt_ir::{AttrKind, AttrSpec, DType, Dim};
/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CAST];

/// ONNX `Cast`.
pub static CAST: OpDef = OpDef {
    aten: &["aten._to_copy", "aten.to"],
    attrs: &[AttrSpec::required("to", AttrKind::DType)],
    ins: INPUT,
    outs: OUTPUT,
    indices: Indices::PassedOn,
    infer: |cx| Ok(vec![cx.ty(0)?.with_dtype(cx.attrs.dtype("to"))]),
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
        let dtype = cx.ty(cx.x(0)).dtype;
        cx.b.cast(cx.dy0(), dtype)
    }),
    cost: one_flop,
    scalar: |_| Some(vec![scalar::x(0)]),
    ..standard("Cast", onnx(9, 13), OpClass::Cast, BatchAxes::Pointwise)
};
