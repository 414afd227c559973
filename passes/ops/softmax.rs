//! `Softmax`, `LogSoftmax` and their gradients, which read the result (ONNX Softmax-13, LogSoftmax-13).

use super::names::*;
use super::reduce::sum_kept;
use super::rule::*;
use ckpt_ir::AttrSpec;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpClass, OpDef,
};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SOFTMAX, &SOFTMAX_GRAD, &LOG_SOFTMAX, &LOG_SOFTMAX_GRAD];

const LAST_AXIS: &[AttrSpec] = &[AttrSpec::int("axis", -1)];

fn check_axis(cx: &InferCx) -> Result<()> {
    cx.axis(cx.attrs.int("axis"), cx.ty(0)?.rank()).map(drop)
}

/// The axis of a body's first operand.
fn axis_of(cx: &BodyCx) -> usize {
    let (axis, rank) = (cx.attrs.int("axis"), cx.ty(cx.x(0)).rank());
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

fn memory(cx: &MemoryCx) -> Footprint {
    dense_operands(cx).in_place_operands(cx, &[0, 1])
}

/// A function along an axis whose gradient reads the result.
const fn along_axis(name: &'static str, aten: &'static [&'static str], grad: Grad) -> OpDef {
    OpDef {
        attrs: LAST_AXIS,
        axes: BatchAxes::AlongAxis,
        infer: |cx| {
            check_axis(cx)?;
            unary_float(cx)
        },
        memory,
        ..unary_of_input(name, onnx(13, 13), aten, grad)
    }
}

const fn along_axis_grad(name: &'static str, body: BodyFn) -> OpDef {
    OpDef {
        attrs: LAST_AXIS,
        ins: Y_DY,
        axes: BatchAxes::AlongAxis,
        infer: |cx| {
            check_axis(cx)?;
            two_alike(cx)
        },
        memory,
        ..unary_grad(name, body)
    }
}

/// `aten::_softmax`.
pub static SOFTMAX: OpDef = OpDef {
    class: OpClass::Softmax,
    ..along_axis(
        "Softmax",
        &["aten._softmax", "aten.softmax"],
        Grad::First(|cx| {
            let attrs = cx.attrs();
            cx.b.emit(&SOFTMAX_GRAD, &[cx.y(0), cx.dy0()], attrs)
        }),
    )
};

/// dx = y·(dy − Σ dy·y) along the axis; `aten::_softmax_backward_data`.
pub static SOFTMAX_GRAD: OpDef = OpDef {
    memory: |cx| {
        let mut taken = memory(cx);
        if cx.device == DeviceKind::Cuda {
            // dy·y.
            taken.temp_bytes += cx.outs[0].bytes();
        }
        taken
    },
    ..along_axis_grad("SoftmaxGrad", |cx| {
        let (axis, [y, dy]) = (axis_of(cx), wide(cx)?);
        let sum = sum_kept(cx.b, y * dy, &[axis])?;
        narrow(cx, y * (dy - sum))
    })
};

/// `aten::_log_softmax`.
pub static LOG_SOFTMAX: OpDef = along_axis(
    "LogSoftmax",
    &["aten._log_softmax", "aten.log_softmax"],
    Grad::First(|cx| {
        let attrs = cx.attrs();
        cx.b.emit(&LOG_SOFTMAX_GRAD, &[cx.y(0), cx.dy0()], attrs)
    }),
);

/// dx = dy − exp(y)·Σ dy along the axis; `aten::_log_softmax_backward_data`.
pub static LOG_SOFTMAX_GRAD: OpDef = along_axis_grad("LogSoftmaxGrad", |cx| {
    let (axis, [y, dy]) = (axis_of(cx), wide(cx)?);
    let sum = sum_kept(cx.b, dy, &[axis])?;
    narrow(cx, dy - unary_op(EXP, y) * sum)
});
