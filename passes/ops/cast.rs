//! `Cast`: change of element type (ONNX Cast-23).

use super::rules::one_flop;
use crate::ir::op::{Body, Domain, Effect, Grad, Import, OpDef, Slot, fresh};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Dim};

pub const ROWS: &[&OpDef] = &[&CAST];

pub static CAST: OpDef = OpDef {
    name: "Cast",
    domain: Domain::Onnx { since: 13 },
    imports: &[Import::Onnx("Cast", 9), Import::Aten("aten._to_copy")],
    attrs: &[AttrSpec {
        name: "to",
        kind: AttrKind::DType,
        default: AttrDefault::Required,
    }],
    ins: &[Slot::req("input")],
    outs: &[Slot::req("output")],
    effect: Effect::Pure,
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
    grad: Grad::Rule(|cx| {
        let dtype = cx.ty(cx.x(0)).dtype;
        let d = cx.b.cast(cx.dy0(), dtype)?;
        cx.give(0, d);
        Ok(())
    }),
    cost: one_flop,
    memory: fresh,
    body: Body::Standard,
};
