//! Constructors of rows, one per family. A row writes down its exceptions: `OpDef { cost: one_flop, ..unary(...) }`.

use super::*;
use ckpt_ir::arithmetic::no_scalar;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Body, BodyCx, DataSizes, Domain, Effect, Grad, Indices, InferCx, OpClass, OpDef,
    Slot, elementwise, free, fresh, moves, no_fold,
};
use ckpt_ir::{DType, Ty, ValueId};

/// A row whose reasons are all still to be written; [`is_stated`] finds what was forgotten.
const BLANK: OpDef = OpDef {
    name: "",
    domain: Domain::Ckpt,
    aten: &[],
    attrs: &[],
    ins: &[],
    outs: &[],
    effect: Effect::Pure,
    class: OpClass::Other,
    axes: BatchAxes::Mixed,
    indices: Indices::None,
    data_sizes: DataSizes::Unbounded,
    later_types: &[],
    infer: same_type,
    fold: no_fold,
    grad: Grad::Missing(UNSTATED),
    cost: moves,
    memory: fresh,
    body: Body::Standard,
    scalar: no_scalar,
};

const UNSTATED: &str = "the row states no gradient";

/// Returns whether a row states what its constructor cannot know: operands, results, a gradient, and a body for an op of
/// ours.
pub fn is_stated(op: &OpDef) -> bool {
    let grad = !matches!(op.grad, Grad::Missing(UNSTATED));
    let body = op.domain != Domain::Ckpt || !matches!(op.body, Body::Standard);
    grad && body && !op.ins.is_empty() && !op.outs.is_empty()
}

/// The builder of a body.
pub type BodyFn = fn(&mut BodyCx) -> Result<Vec<ValueId>>;

/// A typing rule.
pub type InferFn = fn(&InferCx) -> Result<Vec<Ty>>;

/// ONNX's domain: read from opset `first` on, written as opset `since`.
pub const fn onnx(first: i64, since: i64) -> Domain {
    Domain::Onnx { first, since }
}

/// bfloat16 since opset 22: most ops that opset 21 still limits to older types.
pub const BF16_SINCE_22: &[(DType, i64)] = &[(DType::BF16, 22)];

/// Floats of 8 bits since some opset.
macro_rules! float8_since {
    ($($name:ident = $opset:literal;)+) => {$(
        #[doc = concat!("Floats of 8 bits since opset ", $opset, ".")]
        pub const $name: &[(DType, i64)] = &[
            (DType::F8E4M3FN, $opset),
            (DType::F8E5M2, $opset),
            (DType::F8E4M3FNUZ, $opset),
            (DType::F8E5M2FNUZ, $opset),
        ];
    )+};
}
float8_since! {
    FLOAT8_SINCE_19 = 19;
    FLOAT8_SINCE_21 = 21;
}

/// Slots that must be given, then slots that may be left out: `slots!["x", "w"; "bias"]`.
macro_rules! slots {
    ($($given:literal),* $(; $($optional:literal),+)?) => {
        &[
            $(ckpt_ir::op::Slot::req($given),)*
            $($(ckpt_ir::op::Slot::opt($optional),)+)?
        ]
    };
}
pub(crate) use slots;

/// Slots of one name each that must be given.
macro_rules! slot_lists {
    ($($name:ident = $($slot:literal),+;)+) => {$(
        #[doc = concat!("Slots that must be given: ", $("`", $slot, "` "),+, ".")]
        pub const $name: &[Slot] = &[$(Slot::req($slot)),+];
    )+};
}
slot_lists! {
    X = "X";
    Y = "Y";
    INPUT = "input";
    OUTPUT = "output";
    SMALL_X = "x";
    SMALL_Y = "y";
    A_B = "A", "B";
    C = "C";
    X_DY = "x", "dy";
    Y_DY = "y", "dy";
    DX = "dx";
}

/// A standard op with exact results; reads and writes everything once, and all results are new.
pub const fn standard(
    name: &'static str,
    domain: Domain,
    class: OpClass,
    axes: BatchAxes,
) -> OpDef {
    OpDef {
        name,
        domain,
        class,
        axes,
        ..BLANK
    }
}

/// An op of ours; like [`standard`] otherwise.
pub const fn ours(name: &'static str, class: OpClass, axes: BatchAxes, body: BodyFn) -> OpDef {
    OpDef {
        name,
        class,
        axes,
        body: Body::Function(body),
        ..BLANK
    }
}

/// A standard op that passes know no role of, and that mixes rows or has no rule for them.
pub const fn mixed(name: &'static str, domain: Domain) -> OpDef {
    standard(name, domain, OpClass::Other, BatchAxes::Mixed)
}

/// An op of ours like [`mixed`].
pub const fn our_mixed(name: &'static str, body: BodyFn) -> OpDef {
    ours(name, OpClass::Other, BatchAxes::Mixed, body)
}

/// A function of each element, `X` to `Y`, floating point, of about ten FLOPs an element.
pub const fn unary(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        aten,
        ins: X,
        outs: Y,
        infer: unary_float,
        grad,
        cost: ten_flops,
        memory: elementwise,
        ..standard(name, domain, OpClass::Other, BatchAxes::Pointwise)
    }
}

/// The same with slots called `input` and `output`.
pub const fn unary_of_input(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        ins: INPUT,
        outs: OUTPUT,
        ..unary(name, domain, aten, grad)
    }
}

/// Arithmetic on two operands, broadcast: `A` and `B` to `C`, one FLOP an element.
pub const fn binary(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        aten,
        ins: A_B,
        outs: C,
        infer: binary_number,
        grad,
        cost: one_flop,
        memory: elementwise,
        ..standard(name, domain, OpClass::Elementwise, BatchAxes::Pointwise)
    }
}

/// A function of two operands, broadcast, that is piecewise constant: a comparison, a truth value, bits.
pub const fn piecewise_constant(
    name: &'static str,
    domain: Domain,
    aten: &'static [&'static str],
    why_zero: &'static str,
    infer: InferFn,
) -> OpDef {
    OpDef {
        infer,
        class: OpClass::Other,
        memory: fresh,
        ..binary(name, domain, aten, Grad::Zero(why_zero))
    }
}

/// The gradient of a function of each element: `dx` from two operands of one type, by default the function's operand
/// `x` and `dy`.
pub const fn unary_grad(name: &'static str, body: BodyFn) -> OpDef {
    OpDef {
        ins: X_DY,
        outs: DX,
        infer: two_alike,
        grad: Grad::Body,
        cost: ten_flops,
        memory: elementwise,
        ..ours(name, OpClass::Other, BatchAxes::Pointwise, body)
    }
}

/// A view op with the elements of its first operand in the same order. It computes and moves nothing.
pub const fn layout(name: &'static str, domain: Domain, axes: BatchAxes, infer: InferFn) -> OpDef {
    OpDef {
        infer,
        fold: fold_same,
        cost: free,
        ..standard(name, domain, OpClass::Layout, axes)
    }
}
