//! Steps of optimizers: what a parameter, or the state kept for it, becomes once its gradient is there.
//!
//! Formulas are those of `torch.optim.SGD` and `torch.optim.AdamW` (decoupled weight decay: Loshchilov and Hutter,
//! arXiv 1711.05101; bias correction: Kingma and Ba, arXiv 1412.6980), one row for each tensor that changes, worked out in
//! float32 for 16-bit types and rounded once. As functions they may run anywhere and in any order. Where nothing reads
//! the old tensor afterwards the new one is written over it, static or not ([`is_update`]): memory then needs no room for
//! it, and where something does, memory is what is paid, never a wrong value.
//!
//! Numbers in attributes are 32 bits wide; what is meant is the shortest decimal that reads as them ([`decimal`]).

use super::logic::GREATER;
use super::math::SQRT;
use super::power::POW;
use super::rules::*;
use crate::error::Result;
use crate::ir::op::{
    Body, BodyCx, Domain, Effect, Footprint, Grad, InferCx, MemoryCx, OpDef, Sized, Slot, fresh,
    no_fold,
};
use crate::ir::{AttrDefault, AttrKind, AttrSpec, DType, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&SGD, &MOMENTUM, &ADAM_MEAN, &ADAM_SQUARE, &ADAMW];

pub const WEIGHT_DECAY: &str = "weight_decay";
pub const MOMENTUM_FACTOR: &str = "momentum";
pub const DAMPENING: &str = "dampening";
pub const BETA: &str = "beta";
pub const BETA1: &str = "beta1";
pub const BETA2: &str = "beta2";
pub const EPS: &str = "eps";

/// Elements that are worked on at a time where they need room beside operands and result.
const STRETCH: i64 = 1 << 18;

const fn number(name: &'static str) -> AttrSpec {
    AttrSpec {
        name,
        kind: AttrKind::Float,
        default: AttrDefault::Float(0.0),
    }
}

/// p − lr·(g + weight_decay·p + momentum·buffer): the buffer is given for Nesterov's form only; without, `gradient` is
/// whatever direction the step takes. `lr` is a floating-point scalar.
pub static SGD: OpDef = OpDef {
    name: "Sgd",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[number(MOMENTUM_FACTOR), number(WEIGHT_DECAY)],
    ins: &[
        Slot::req("parameter"),
        Slot::req("gradient"),
        Slot::req("lr"),
        Slot::opt("buffer"),
    ],
    outs: &[Slot::req("updated")],
    effect: Effect::Pure,
    infer: |cx| infer(cx, &[1, 3], Some(2), None),
    fold: no_fold,
    grad: Grad::Missing(UNDIFFERENTIATED),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &[0, 1, 3], 0),
    body: Body::Function(|cx| {
        let (p, g) = (wide(cx, 0)?, wide(cx, 1)?);
        let lr = scalar_as(cx, 2, 0)?;
        let mut direction = plus_scaled(cx, g, WEIGHT_DECAY, p)?;
        if cx.ins.get(3).copied().flatten().is_some() {
            let buffer = wide(cx, 3)?;
            direction = plus_scaled(cx, direction, MOMENTUM_FACTOR, buffer)?;
        }
        let step = cx.b.mul(lr, direction)?;
        let updated = cx.b.sub(p, step)?;
        narrow(cx, updated)
    }),
};

/// momentum·buffer + (1 − dampening)·(g + weight_decay·p), from a buffer of zeros. In step 1, if `step` is given, nothing
/// is dampened. `parameter` is given where its weight decays.
pub static MOMENTUM: OpDef = OpDef {
    name: "Momentum",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[
        number(MOMENTUM_FACTOR),
        number(DAMPENING),
        number(WEIGHT_DECAY),
    ],
    ins: &[
        Slot::req("buffer"),
        Slot::req("gradient"),
        Slot::opt("parameter"),
        Slot::opt("step"),
    ],
    outs: &[Slot::req("updated")],
    effect: Effect::Pure,
    infer: |cx| infer(cx, &[1, 2], None, Some(3)),
    fold: no_fold,
    grad: Grad::Missing(UNDIFFERENTIATED),
    cost: |cx| cx.elementwise(5),
    memory: |cx| memory(cx, &[0, 1, 2], 0),
    body: Body::Function(|cx| {
        let mut direction = wide(cx, 1)?;
        if cx.ins.get(2).copied().flatten().is_some() {
            let p = wide(cx, 2)?;
            direction = plus_scaled(cx, direction, WEIGHT_DECAY, p)?;
        }
        let wide_type = cx.b.ty(direction).dtype;
        let undampened = 1.0 - decimal(cx.attrs.float(DAMPENING));
        let mut weight = cx.b.scalar(wide_type, undampened);
        if let Some(step) = cx.ins.get(3).copied().flatten() {
            let (one, full) = (cx.b.int(1), cx.b.scalar(wide_type, 1.0));
            let is_later = emit(cx.b, &GREATER, &[step, one])?;
            weight = choose(cx.b, is_later, weight, full)?;
        }
        let buffer = wide(cx, 0)?;
        let factor =
            cx.b.scalar(wide_type, decimal(cx.attrs.float(MOMENTUM_FACTOR)));
        let kept = cx.b.mul(factor, buffer)?;
        let new = cx.b.mul(weight, direction)?;
        let updated = cx.b.add(kept, new)?;
        narrow(cx, updated)
    }),
};

/// mean + (1 − beta)·(g − mean).
pub static ADAM_MEAN: OpDef = OpDef {
    name: "AdamMean",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[number(BETA)],
    ins: &[Slot::req("mean"), Slot::req("gradient")],
    outs: &[Slot::req("updated")],
    effect: Effect::Pure,
    infer: |cx| infer(cx, &[1], None, None),
    fold: no_fold,
    grad: Grad::Missing(UNDIFFERENTIATED),
    cost: |cx| cx.elementwise(3),
    memory: |cx| memory(cx, &[0, 1], 0),
    body: Body::Function(|cx| {
        let (mean, g) = (wide(cx, 0)?, wide(cx, 1)?);
        let weight = 1.0 - decimal(cx.attrs.float(BETA));
        let weight = scalar_like(cx, mean, weight);
        let apart = cx.b.sub(g, mean)?;
        let step = cx.b.mul(weight, apart)?;
        let updated = cx.b.add(mean, step)?;
        narrow(cx, updated)
    }),
};

/// beta·square + (1 − beta)·g².
pub static ADAM_SQUARE: OpDef = OpDef {
    name: "AdamSquare",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[number(BETA)],
    ins: &[Slot::req("square"), Slot::req("gradient")],
    outs: &[Slot::req("updated")],
    effect: Effect::Pure,
    infer: |cx| infer(cx, &[1], None, None),
    fold: no_fold,
    grad: Grad::Missing(UNDIFFERENTIATED),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &[0, 1], 0),
    body: Body::Function(|cx| {
        let (square, g) = (wide(cx, 0)?, wide(cx, 1)?);
        let beta = decimal(cx.attrs.float(BETA));
        let factor = scalar_like(cx, square, beta);
        let kept = cx.b.mul(factor, square)?;
        let weight = scalar_like(cx, square, 1.0 - beta);
        let scaled = cx.b.mul(weight, g)?;
        let new = cx.b.mul(scaled, g)?;
        let updated = cx.b.add(kept, new)?;
        narrow(cx, updated)
    }),
};

/// p·(1 − lr·weight_decay) − lr/(1 − beta1^step) · mean / (√square / √(1 − beta2^step) + eps), of the mean and square of
/// this step. `lr` is a floating-point scalar, `step` an int64 scalar that counts from 1.
pub static ADAMW: OpDef = OpDef {
    name: "AdamW",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[
        number(BETA1),
        number(BETA2),
        number(EPS),
        number(WEIGHT_DECAY),
    ],
    ins: &[
        Slot::req("parameter"),
        Slot::req("mean"),
        Slot::req("square"),
        Slot::req("lr"),
        Slot::req("step"),
    ],
    outs: &[Slot::req("updated")],
    effect: Effect::Pure,
    infer: |cx| infer(cx, &[1, 2], Some(3), Some(4)),
    fold: no_fold,
    grad: Grad::Missing(UNDIFFERENTIATED),
    cost: |cx| cx.elementwise(12),
    memory: |cx| memory(cx, &[0, 1, 2], 1),
    body: Body::Function(adamw),
};

const UNDIFFERENTIATED: &str = "a step of an optimizer is not differentiated";

/// What an attribute means: the shortest decimal that reads as its 32 bits. 0.999 is not 0.99900001287…
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// A scalar constant of the element type of `v`.
fn scalar_like(cx: &mut BodyCx, v: ValueId, x: f64) -> ValueId {
    let dtype = cx.b.ty(v).dtype;
    cx.b.scalar(dtype, x)
}

/// Operand `i` in the type that is computed in.
fn wide(cx: &mut BodyCx, i: usize) -> Result<ValueId> {
    widen(cx.b, cx.x(i))
}

/// Scalar operand `i` in the type that operand `like` is computed in.
fn scalar_as(cx: &mut BodyCx, i: usize, like: usize) -> Result<ValueId> {
    let dtype = compute_type(cx.ty(cx.x(like)).dtype);
    cx.b.cast(cx.x(i), dtype)
}

/// v + factor·w for the factor in an attribute; `v` where that is 0.
fn plus_scaled(cx: &mut BodyCx, v: ValueId, factor: &str, w: ValueId) -> Result<ValueId> {
    let factor = decimal(cx.attrs.float(factor));
    if factor == 0.0 {
        return Ok(v);
    }
    let factor = scalar_like(cx, v, factor);
    let scaled = cx.b.mul(factor, w)?;
    cx.b.add(v, scaled)
}

/// Scalars are worked out in float64: 1 − beta2^step is a small difference.
fn adamw(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (p, mean, square) = (wide(cx, 0)?, wide(cx, 1)?, wide(cx, 2)?);
    let wide_type = cx.b.ty(p).dtype;
    let (lr, step) = (cx.x(3), cx.x(4));
    let (lr, step) = (cx.b.cast(lr, DType::F64)?, cx.b.cast(step, DType::F64)?);
    let one = cx.b.scalar(DType::F64, 1.0);
    let attrs = cx.attrs;
    let mut correction = |name: &str| {
        let beta = cx.b.scalar(DType::F64, decimal(attrs.float(name)));
        let power = emit(cx.b, &POW, &[beta, step])?;
        cx.b.sub(one, power)
    };
    let (of_mean, of_square) = (correction(BETA1)?, correction(BETA2)?);
    let size = cx.b.div(lr, of_mean)?;
    let size = cx.b.cast(size, wide_type)?;
    let root = emit(cx.b, &SQRT, &[of_square])?;
    let root = cx.b.cast(root, wide_type)?;
    let mut updated = p;
    let decay = decimal(attrs.float(WEIGHT_DECAY));
    if decay != 0.0 {
        let decay = cx.b.scalar(DType::F64, decay);
        let lost = cx.b.mul(lr, decay)?;
        let kept = cx.b.sub(one, lost)?;
        let kept = cx.b.cast(kept, wide_type)?;
        updated = cx.b.mul(p, kept)?;
    }
    let spread = emit(cx.b, &SQRT, &[square])?;
    let spread = cx.b.div(spread, root)?;
    let eps = cx.b.scalar(wide_type, decimal(attrs.float(EPS)));
    let spread = cx.b.add(spread, eps)?;
    let direction = cx.b.div(mean, spread)?;
    let step = cx.b.mul(size, direction)?;
    let updated = cx.b.sub(updated, step)?;
    narrow(cx, updated)
}

/// The tensors at `alike` are of the first operand's type; `lr` is a floating-point scalar, `step` an int64 one.
fn infer(cx: &InferCx, alike: &[usize], lr: Option<usize>, step: Option<usize>) -> Result<Vec<Ty>> {
    let dtype = cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    let old = cx.ty(0)?;
    for slot in alike {
        let Some(other) = cx.opt_ty(*slot) else {
            continue;
        };
        if other.dtype != dtype || !may_be_same(&old.dims, &other.dims) {
            return Err(cx
                .fail(
                    "type",
                    format!("operand `{}` is of another type", cx.op.ins[*slot].name),
                )
                .expected(old.to_string())
                .found(other.to_string()));
        }
    }
    let scalars: [(_, fn(DType) -> bool, _); 2] = [
        (lr, DType::is_float, "a floating-point scalar"),
        (step, |dtype| dtype == DType::I64, "an int64 scalar"),
    ];
    for (slot, allowed, what) in scalars {
        let Some((slot, ty)) = slot.and_then(|slot| Some((slot, cx.opt_ty(slot)?))) else {
            continue;
        };
        if !allowed(ty.dtype) || ty.rank() != 0 {
            let name = cx.op.ins[slot].name;
            return Err(cx
                .fail("type", format!("operand `{name}` is no scalar of its type"))
                .expected(what)
                .found(ty.to_string()));
        }
    }
    Ok(vec![old.clone()])
}

/// How many elements are worked on at a time, of tensors of `dims`: any number where all lie row-major, else whole rows.
pub fn stretch(dims: &[i64], is_flat: bool) -> i64 {
    let elements: i64 = dims.iter().product();
    let row: i64 = match is_flat {
        true => 1,
        false => dims.iter().skip(1).product(),
    };
    (STRETCH / row.max(1))
        .max(1)
        .saturating_mul(row)
        .min(elements)
}

/// Written over the first of the tensors in `slots`. For 16-bit types a stretch of each of them exists widened, for wider
/// ones `buffers` stretches beside them.
fn memory(cx: &MemoryCx, slots: &[usize], buffers: u64) -> Footprint {
    let given = slots.iter().filter_map(|i| cx.ins.get(*i)?.as_ref());
    let tensors: Vec<&Sized> = given.collect();
    let Some(old) = tensors.first() else {
        return fresh(cx);
    };
    let is_flat = tensors.iter().all(|x| x.is_contiguous());
    let wide = compute_type(old.dtype);
    let count = match wide == old.dtype {
        true => buffers,
        false => tensors.len() as u64,
    };
    Footprint {
        temp_bytes: count * stretch(&old.dims, is_flat) as u64 * wide.size_bytes(),
        ..fresh(cx)
    }
    .in_place_operands(cx, &[0])
}
