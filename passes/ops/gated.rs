//! Gates: `silu(x) = x·sigmoid(x)` (Elfwing, Uchibe and Doya 2017, arXiv 1702.03118) and `SwiGLU(gate, up) =
//! silu(gate)·up` (Shazeer 2020, arXiv 2002.05202), each with its gradient.
//!
//! For the gradient, these rows keep only their operands. `Sigmoid` and `Mul` would also keep the sigmoid and the
//! result of the gate. Bodies compute the silu of 16-bit operands in float32 and round it, as the kernels do.

use super::names::*;
use super::rule::*;
use ckpt_ir::ValueId;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, BodyCx, Grad, GradCx, OpClass, OpDef, elementwise, fresh};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SILU, &SILU_GRAD, &SWIGLU, &SWIGLU_GRAD];

const fn gate(name: &'static str, body: BodyFn) -> OpDef {
    OpDef {
        outs: SMALL_Y,
        cost: ten_flops,
        memory: elementwise,
        ..ours(name, OpClass::Other, BatchAxes::Pointwise, body)
    }
}

/// `x·sigmoid(x)`.
pub static SILU: OpDef = OpDef {
    aten: &["aten.silu"],
    ins: SMALL_X,
    infer: unary_float,
    scalar: |_| Some(vec![silu_of(scalar::x(0))]),
    grad: Grad::First(|cx| cx.eval(binary_op(&SILU_GRAD, cx.operand(0), cx.cotangent()))),
    ..gate("Silu", |cx| {
        let (y, _, _) = silu(cx, 0)?;
        narrow(cx, y)
    })
};

/// dy·s·(1 + x·(1 − s)) with s = sigmoid(x); `aten::silu_backward`.
pub static SILU_GRAD: OpDef = OpDef {
    scalar: |_| Some(vec![silu_grad_of(scalar::x(0), scalar::x(1))]),
    ..unary_grad("SiluGrad", |cx| {
        let dy = cx.widened(cx.x(1))?;
        let dx = slope(cx, dy)?;
        narrow(cx, dx)
    })
};

/// x / (1 + e^(−x)).
fn silu_of(x: scalar::Expr) -> scalar::Expr {
    let below = scalar::number(1.0) + scalar::library("exp", -x.clone());
    scalar::call("silu", [x.clone()], x / below)
}

/// dy·s·(1 + x·(1 − s)) with s = sigmoid(x).
fn silu_grad_of(x: scalar::Expr, dy: scalar::Expr) -> scalar::Expr {
    let one = || scalar::number(1.0);
    let s = one() / (one() + scalar::library("exp", -x.clone()));
    let slope = one() + x.clone() * (one() - s.clone());
    scalar::call("silu_grad", [x, dy.clone()], dy * s * slope)
}

/// silu(gate)·up; the silu is rounded to the operands' type first.
pub static SWIGLU: OpDef = OpDef {
    aten: &["aten.silu"],
    ins: slots!["gate", "up"],
    infer: two_alike,
    grad: Grad::Rule(grad_swiglu),
    scalar: |_| Some(vec![silu_of(scalar::x(0)).round() * scalar::x(1)]),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..gate("SwiGlu", |cx| {
        let (y, _, _) = silu(cx, 0)?;
        let y = Term(narrow(cx, y)?[0]);
        Ok(vec![cx.eval(y * Term(cx.x(1)))?])
    })
};

/// Where only one operand needs a gradient, its share alone.
fn grad_swiglu(cx: &mut GradCx) -> Result<()> {
    let (gate, up, dy) = (cx.operand(0), cx.operand(1), cx.cotangent());
    if cx.wants(0) && cx.wants(1) {
        let ins = vec![Some(gate.0), Some(up.0), Some(dy.0)];
        let gradients = cx.b.emit_n(&SWIGLU_GRAD, ins, Default::default(), 2)?;
        cx.give(0, gradients[0]);
        cx.give(1, gradients[1]);
    } else if cx.wants(0) {
        cx.give_expr(0, binary_op(&SILU_GRAD, gate, dy * up))?;
    } else if cx.wants(1) {
        cx.give_expr(1, dy * unary_op(&SILU, gate))?;
    }
    Ok(())
}

/// The gradients of [`SWIGLU`], each computed in its own result: dgate = silu'(gate)·(dy·up), dup = silu(gate)·dy.
pub static SWIGLU_GRAD: OpDef = OpDef {
    ins: slots!["gate", "up", "dy"],
    outs: slots!["dgate", "dup"],
    infer: |cx| {
        two_alike(cx)?;
        cx.same_dtype(&[0, 2])?;
        let (gate, dy) = (cx.ty(0)?, cx.ty(2)?);
        if !may_be_same(&gate.dims, &dy.dims) {
            return Err(cx
                .fail("shape", "`dy` and `gate` have different shapes")
                .expected(gate.to_string())
                .found(dy.to_string()));
        }
        Ok(vec![gate.clone(), gate.clone()])
    },
    cost: |cx| cx.elementwise(20),
    memory: |cx| fresh(cx).in_place_operands(cx, &[1]),
    scalar: |_| {
        let [gate, up, dy] = [0, 1, 2].map(scalar::x);
        let through = (dy.clone() * up).round();
        Some(vec![
            silu_grad_of(gate.clone(), through),
            silu_of(gate).round() * dy,
        ])
    },
    ..unary_grad("SwiGluGrad", |cx| {
        let (gate, up, dy) = (cx.x(0), Term(cx.x(1)), Term(cx.x(2)));
        let dtype = cx.ty(gate).dtype;
        let through = cx.eval(dy * up)?;
        let through = cx.widened(through)?;
        let dgate = slope(cx, through)?;
        let dgate = cx.b.cast(dgate, dtype)?;
        let (y, _, _) = silu(cx, 0)?;
        Ok(vec![dgate, cx.eval(cast(y, dtype) * dy)?])
    })
};

/// silu(x), x and sigmoid(x) of operand `i`, in the type computed in.
fn silu(cx: &mut BodyCx, i: usize) -> Result<(Term, Term, Term)> {
    let x = cx.widened(cx.x(i))?;
    let s = cx.bind(unary_op(SIGMOID, x))?;
    Ok((cx.bind(x * s)?, x, s))
}

/// `dy` times the slope of the silu at the first operand.
fn slope(cx: &mut BodyCx, dy: Term) -> Result<ValueId> {
    let (_, x, s) = silu(cx, 0)?;
    let one = cx.number(x, 1.0);
    cx.eval(dy * (s * (one + x * (one - s))))
}
