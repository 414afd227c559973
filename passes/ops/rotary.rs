//! Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864): rotates pairs of elements, one from each half of the
//! last axis, by angles whose cosines and sines are operands.
//!
//! As one row, a rotation is rounded once and keeps only the tables for its gradient. Products, slices and a
//! concatenation would make four tensors of the operand's size. The gradient is the rotation by the negative angles,
//! which is the same row.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BodyCx, Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, Sized, fresh};
use ckpt_ir::{AttrSpec, Attrs, DType, Emit, Tensor, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ROTARY];

/// With halves x = (a, b): (a·cos − b·sin, b·cos + a·sin); with `inverse` the adjoint of that in x. Tables broadcast to
/// x without enlarging it; their last axis is that of x, or half of it and then serves both halves.
pub static ROTARY: OpDef = OpDef {
    attrs: &[AttrSpec::int("inverse", 0)],
    ins: slots!["x", "cos", "sin"],
    outs: SMALL_Y,
    infer,
    grad: Grad::Rule(gradient),
    cost: |cx| cx.elementwise(3),
    memory,
    scalar: arithmetic,
    ..our_mixed("Rotary", body)
};

fn infer(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1, 2])?;
    let x = cx.ty(0)?;
    let width = x.dims.last().and_then(|d| d.as_const());
    let Some(width) = width.filter(|w| w % 2 == 0) else {
        return Err(cx.fail("shape", "the last axis of `x` is not an even number"));
    };
    for slot in [1, 2] {
        let table = cx.ty(slot)?;
        let last = table.dims.last().and_then(|d| d.as_const());
        if !last.is_some_and(|n| n == width || n == width / 2 || n == 1) {
            return Err(cx
                .fail("shape", "the last axis of a table does not fit that of `x`")
                .expected(format!("{width}, {} or 1", width / 2))
                .found(table.to_string()));
        }
        let outer = |dims: &[_]| {
            dims.split_last()
                .map_or(Vec::new(), |(_, rest)| rest.to_vec())
        };
        let rows = outer(&x.dims);
        let wide = broadcast_two(&rows, &outer(&table.dims));
        if !wide.is_some_and(|w| may_be_same(&w, &rows)) {
            return Err(cx
                .fail("shape", "a table does not broadcast to `x`")
                .expected(x.to_string())
                .found(table.to_string()));
        }
    }
    Ok(vec![x.clone()])
}

/// Whether a table serves both halves of a last axis of `width`.
pub fn serves_both(table: &[i64], width: i64) -> bool {
    table.last() != Some(&width)
}

/// 16-bit operands: both halves and the tables in float32, one half of the result after the other.
fn memory(cx: &MemoryCx) -> Footprint {
    let (Some(x), Some(cos), Some(sin)) = (&cx.ins[0], &cx.ins[1], &cx.ins[2]) else {
        return fresh(cx);
    };
    let wide = compute_type(x.dtype);
    let temp_bytes = match wide == x.dtype {
        true => 0,
        false => [x, cos, sin].map(Sized::elements).iter().sum::<u64>() * wide.size_bytes(),
    };
    fresh(cx).with_temp(temp_bytes)
}

fn halves(b: &mut dyn Emit, v: ValueId) -> Result<[Term; 2]> {
    let attrs = Attrs::new().with("axis", -1).with("num_outputs", 2);
    let parts = b.emit_n(SPLIT, vec![Some(v)], attrs, 2)?;
    Ok([Term(parts[0]), Term(parts[1])])
}

fn width(b: &dyn Emit, v: ValueId) -> Option<i64> {
    b.ty(v).dims.last()?.as_const()
}

fn body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (x, cos, sin) = (cx.x(0), cx.x(1), cx.x(2));
    let full = width(cx.b, x);
    let mut table = |v: ValueId| -> Result<[Term; 2]> {
        let v = cx.widened(v)?;
        match width(cx.b, v.0) == full {
            true => halves(cx.b, v.0),
            false => Ok([v, v]),
        }
    };
    let (cos, sin) = (table(cos)?, table(sin)?);
    let x = cx.widened(x)?;
    let [a, b] = halves(cx.b, x.0)?;
    let inverse = usize::from(is_inverse(cx.attrs));
    let (ac, bs) = (cx.bind(a * cos[0])?, cx.bind(b * sin[inverse])?);
    let (bc, a_s) = (cx.bind(b * cos[1])?, cx.bind(a * sin[1 - inverse])?);
    let (first, second) = match inverse {
        0 => (cx.eval(ac - bs)?, cx.eval(bc + a_s)?),
        _ => (cx.eval(ac + bs)?, cx.eval(bc - a_s)?),
    };
    let last = Attrs::new().with("axis", -1);
    let y = cx.b.emit(CONCAT, &[first, second], last)?;
    narrow(cx, y)
}

/// x·cos ∓ x'·sin for the first half, x·cos ± x'·sin for the second, with x' in the other half. The gradient takes the sine of
/// the other half.
fn arithmetic(cx: &scalar::ScalarCx) -> Option<Vec<scalar::Expr>> {
    let (own, partner) = (scalar::x(0), scalar::Expr::Partner(0));
    let turned = |name, op, sine: &scalar::Expr| {
        let start = own.clone() * scalar::x(1);
        let value = scalar::apply(op, [start.clone(), partner.clone() * sine.clone()]);
        scalar::call(name, [start, partner.clone(), sine.clone()], value)
    };
    let sine = match is_inverse(cx.attrs) {
        false => scalar::x(2),
        true => scalar::Expr::Partner(2),
    };
    let minus = turned("sub_product", scalar::Op::Sub, &sine);
    let plus = turned("add_product", scalar::Op::Add, &sine);
    let (first, second) = match is_inverse(cx.attrs) {
        false => (minus, plus),
        true => (plus, minus),
    };
    Some(vec![scalar::select(scalar::Expr::FirstHalf, first, second)])
}

/// Returns true for the rotation by the negative angles, which is the gradient.
pub fn is_inverse(attrs: &Attrs) -> bool {
    attrs.int("inverse") != 0
}

/// With T the turn by a quarter (cos 0, sin 1): dx is dy turned the other way, dcos = Σ dy·x, dsin = Σ dy·T(x), of the
/// adjoint Σ x·T(dy); summed over what a table was broadcast along.
fn gradient(cx: &mut GradCx) -> Result<()> {
    let (x, cos, sin, dy) = (cx.x(0), cx.x(1), cx.x(2), cx.dy0());
    let inverse = is_inverse(&cx.attrs());
    let turn = |back: bool| Attrs::new().with("inverse", i64::from(back));
    if cx.wants(0) {
        let dx = cx.b.emit(&ROTARY, &[dy, cos, sin], turn(!inverse))?;
        cx.give(0, dx);
    }
    if cx.wants(1) {
        let product = cx.eval(Term(dy) * x)?;
        let d = summed_to_table(cx.b, product, cos)?;
        cx.give(1, d);
    }
    if cx.wants(2) {
        let dtype = cx.ty(x).dtype;
        let mut number = |value: f64| {
            let mut tensor = Tensor::scalar(dtype, value);
            tensor.dims = vec![1];
            cx.b.constant(&format!("const.{dtype}.[{value}]"), tensor)
        };
        let (zero, one) = (number(0.0), number(1.0));
        let (turned, other) = if inverse { (dy, x) } else { (x, dy) };
        let quarter = cx.b.emit(&ROTARY, &[turned, zero, one], turn(false))?;
        let product = cx.eval(Term(other) * quarter)?;
        let d = summed_to_table(cx.b, product, sin)?;
        cx.give(2, d);
    }
    Ok(())
}

fn summed_to_table(b: &mut dyn Emit, product: ValueId, table: ValueId) -> Result<ValueId> {
    let (full, found) = (width(b, product), width(b, table));
    if found == full || found == Some(1) {
        return b.sum_to(product, table);
    }
    let [first, second] = halves(b, product)?;
    let both = b.eval(first + second)?;
    b.sum_to(both, table)
}
