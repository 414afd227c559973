//! Comparisons, truth values and choices between elements.

use super::pointwise::{both, need};
use super::signature::{Call, Op};
use super::{Value, reduce};
use ckpt_passes::Result;
use ckpt_passes::ir::op::OpDef;
use ckpt_passes::ir::{DType, ValueId};
use ckpt_passes::ops::{arith, bits, logic};

pub const OPS: &[Op] = &[
    ("__and__(self: ts, other: ts)", |c| {
        bitwise(c, &logic::AND, &bits::BITWISE_AND)
    }),
    ("__or__(self: ts, other: ts)", |c| {
        bitwise(c, &logic::OR, &bits::BITWISE_OR)
    }),
    ("__xor__(self: ts, other: ts)", |c| {
        bitwise(c, &logic::XOR, &bits::BITWISE_XOR)
    }),
    ("_is_all_true(self: t)", |c| reduce::quantified(c, true)),
    ("_is_any_true(self: t)", |c| reduce::quantified(c, false)),
    ("bitwise_and(self: ts, other: ts)", |c| {
        bitwise(c, &logic::AND, &bits::BITWISE_AND)
    }),
    ("bitwise_not(self: t)", bitwise_not),
    ("bitwise_or(self: ts, other: ts)", |c| {
        bitwise(c, &logic::OR, &bits::BITWISE_OR)
    }),
    ("bitwise_xor(self: ts, other: ts)", |c| {
        bitwise(c, &logic::XOR, &bits::BITWISE_XOR)
    }),
    ("eq(self: ts, other: ts)", |c| compared(c, &logic::EQUAL)),
    ("ge(self: ts, other: ts)", |c| {
        compared(c, &logic::GREATER_OR_EQUAL)
    }),
    ("greater(self: ts, other: ts)", |c| {
        compared(c, &logic::GREATER)
    }),
    ("greater_equal(self: ts, other: ts)", |c| {
        compared(c, &logic::GREATER_OR_EQUAL)
    }),
    ("gt(self: ts, other: ts)", |c| compared(c, &logic::GREATER)),
    ("isfinite(self: t)", isfinite),
    ("isinf(self: t)", |c| special(c, &logic::IS_INF)),
    ("isnan(self: t)", |c| special(c, &logic::IS_NAN)),
    ("le(self: ts, other: ts)", |c| {
        compared(c, &logic::LESS_OR_EQUAL)
    }),
    ("less(self: ts, other: ts)", |c| compared(c, &logic::LESS)),
    ("less_equal(self: ts, other: ts)", |c| {
        compared(c, &logic::LESS_OR_EQUAL)
    }),
    ("logical_and(self: t, other: t)", |c| {
        logical(c, &logic::AND)
    }),
    ("logical_not(self: t)", logical_not),
    ("logical_or(self: t, other: t)", |c| logical(c, &logic::OR)),
    ("logical_xor(self: t, other: t)", |c| {
        logical(c, &logic::XOR)
    }),
    ("lt(self: ts, other: ts)", |c| compared(c, &logic::LESS)),
    ("masked_fill(self: t, mask: t, value: ts)", masked_fill),
    ("ne(self: ts, other: ts)", not_equal),
    ("not_equal(self: ts, other: ts)", not_equal),
    ("where(condition: t, self: ts, other: ts)", choice),
];

/// Both operands in their common type; truth values as numbers where an order is asked of them.
fn operands(c: &mut Call, op: &'static OpDef) -> Result<[ValueId; 2]> {
    let [a, b] = both(c, "self", "other")?;
    if op != &logic::EQUAL && c.low.b.ty(a).dtype == DType::Bool {
        return Ok([c.low.b.cast(a, DType::I32)?, c.low.b.cast(b, DType::I32)?]);
    }
    Ok([a, b])
}

fn compared(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let operands = operands(c, op)?;
    let y = c.low.emit(op, &operands)?;
    c.made(y)
}

fn not_equal(c: &mut Call) -> Result<Value> {
    let operands = operands(c, &logic::EQUAL)?;
    let y = c.low.emit(&logic::EQUAL, &operands)?;
    let y = c.low.emit(&logic::NOT, &[y])?;
    c.made(y)
}

/// Whether each element is not 0.
pub(super) fn truth(c: &mut Call, x: ValueId) -> Result<ValueId> {
    let dtype = c.low.b.ty(x).dtype;
    if dtype == DType::Bool {
        return Ok(x);
    }
    let zero = c
        .low
        .scalar_of(&Value::Int(ckpt_passes::ir::Dim::ZERO), dtype)?;
    let y = c.low.emit(&logic::EQUAL, &[x, zero])?;
    c.low.emit(&logic::NOT, &[y])
}

fn logical(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let (a, b) = (c.value("self")?, c.value("other")?);
    let (a, b) = (truth(c, a)?, truth(c, b)?);
    let y = c.low.emit(op, &[a, b])?;
    c.made(y)
}

fn logical_not(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let x = truth(c, x)?;
    let y = c.low.emit(&logic::NOT, &[x])?;
    c.made(y)
}

fn bitwise(c: &mut Call, of_truth: &'static OpDef, of_bits: &'static OpDef) -> Result<Value> {
    let [a, b] = both(c, "self", "other")?;
    let op = match c.low.b.ty(a).dtype {
        DType::Bool => of_truth,
        _ => of_bits,
    };
    let y = c.low.emit(op, &[a, b])?;
    c.made(y)
}

fn bitwise_not(c: &mut Call) -> Result<Value> {
    let x = c.value("self")?;
    let op = match c.low.b.ty(x).dtype {
        DType::Bool => &logic::NOT,
        _ => &bits::BITWISE_NOT,
    };
    let y = c.low.emit(op, &[x])?;
    c.made(y)
}

/// Integers are finite numbers.
fn special(c: &mut Call, op: &'static OpDef) -> Result<Value> {
    let x = c.value("self")?;
    let y = match c.low.b.ty(x).dtype.is_float() {
        true => c.low.emit(op, &[x])?,
        false => {
            let dims = c.low.b.ty(x).dims.clone();
            let no = c.low.b.scalar(DType::Bool, 0.0);
            c.low.broadcast_to(no, &dims)?
        }
    };
    c.made(y)
}

fn isfinite(c: &mut Call) -> Result<Value> {
    let x = super::pointwise::float_self(c)?;
    // Only of a finite number the difference to itself is 0.
    let zero = c.low.emit(&arith::SUB, &[x, x])?;
    let y = c.low.emit(&logic::IS_NAN, &[zero])?;
    let y = c.low.emit(&logic::NOT, &[y])?;
    c.made(y)
}

fn masked_fill(c: &mut Call) -> Result<Value> {
    let (x, mask) = (c.value("self")?, c.value("mask")?);
    let value = need(c, "value")?;
    let value = c.low.operand(&value, c.low.b.ty(x).dtype)?;
    let y = c.low.emit(&logic::WHERE, &[mask, value, x])?;
    c.made(y)
}

fn choice(c: &mut Call) -> Result<Value> {
    let condition = c.value("condition")?;
    let condition = truth(c, condition)?;
    let [a, b] = both(c, "self", "other")?;
    let y = c.low.emit(&logic::WHERE, &[condition, a, b])?;
    c.made(y)
}
