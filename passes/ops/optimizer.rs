//! Optimizer steps: the update of a parameter, or of optimizer state, by its gradient.
//!
//! Formulas are those of `torch.optim.SGD` and `torch.optim.AdamW` (decoupled weight decay: Loshchilov and Hutter,
//! arXiv 1711.05101; bias correction: Kingma and Ba, arXiv 1412.6980), with one row for each tensor that changes.
//! 16-bit types are computed in float32 and rounded once. Rows are functions of the old tensor, so they may run in any
//! order. If nothing reads the old tensor afterwards, the result overwrites it and takes no memory ([`OpDef::is_update`]).
//!
//! Attributes are 32-bit numbers. They mean the shortest decimal that rounds to them ([`decimal`]).

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpClass, OpDef, Sized, Slot,
    fresh,
};
use ckpt_ir::{AttrSpec, DType, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SGD, &MOMENTUM, &ADAM_MEAN, &ADAM_SQUARE, &ADAMW];

/// Attribute: the factor of the parameter in its gradient or decay.
pub const WEIGHT_DECAY: &str = "weight_decay";
/// Attribute: the factor of the old momentum.
pub const MOMENTUM_FACTOR: &str = "momentum";
/// Attribute: how much of the gradient the momentum leaves out.
pub const DAMPENING: &str = "dampening";
/// Attribute: the decay of a running mean.
pub const BETA: &str = "beta";
/// Attribute: the decay of the mean of gradients.
pub const BETA1: &str = "beta1";
/// Attribute: the decay of the mean of squared gradients.
pub const BETA2: &str = "beta2";
/// Attribute: what is added to the denominator.
pub const EPS: &str = "eps";

/// Elements that are processed at a time on a CPU if that takes memory beside operands and result.
const BLOCK_ELEMENTS: i64 = 1 << 18;

/// A number, 0 where it is not given.
const fn number(name: &'static str) -> AttrSpec {
    AttrSpec::float(name, 0.0)
}

const UPDATED: &[Slot] = slots!["updated"];

const fn update(name: &'static str, body: BodyFn) -> OpDef {
    OpDef {
        outs: UPDATED,
        grad: Grad::Missing("a step of an optimizer is not differentiated"),
        ..ours(name, OpClass::Update, BatchAxes::Mixed, body)
    }
}

/// p − lr·(g + weight_decay·p + momentum·buffer): the buffer is given for Nesterov's form only; without, `gradient` is
/// whatever direction the step takes. `lr` is a floating-point scalar.
pub static SGD: OpDef = OpDef {
    attrs: &[number(MOMENTUM_FACTOR), number(WEIGHT_DECAY)],
    ins: slots!["parameter", "gradient", "lr"; "buffer"],
    infer: |cx| infer(cx, &[1, 3], Some(2), None),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &[0, 1, 3], 0),
    ..update("Sgd", |cx| {
        let [p, g] = wide(cx)?;
        let lr = scalar_as(cx, 2, 0)?;
        let mut direction = plus_scaled(cx, g, WEIGHT_DECAY, p)?;
        if let Some(buffer) = cx.opt_x(3) {
            let buffer = cx.widened(buffer)?;
            direction = plus_scaled(cx, direction, MOMENTUM_FACTOR, buffer)?;
        }
        narrow(cx, p - lr * direction)
    })
};

/// momentum·buffer + (1 − dampening)·(g + weight_decay·p), from a buffer of zeros. In step 1, if `step` is given, nothing
/// is dampened. `parameter` is given where its weight decays.
pub static MOMENTUM: OpDef = OpDef {
    attrs: &[
        number(MOMENTUM_FACTOR),
        number(DAMPENING),
        number(WEIGHT_DECAY),
    ],
    ins: slots!["buffer", "gradient"; "parameter", "step"],
    infer: |cx| infer(cx, &[1, 2], None, Some(3)),
    cost: |cx| cx.elementwise(5),
    memory: |cx| memory(cx, &[0, 1, 2], 0),
    ..update("Momentum", |cx| {
        let mut direction = cx.widened(cx.x(1))?;
        if let Some(p) = cx.opt_x(2) {
            let p = cx.widened(p)?;
            direction = plus_scaled(cx, direction, WEIGHT_DECAY, p)?;
        }
        let undampened = 1.0 - decimal(cx.attrs.float(DAMPENING));
        let mut weight = cx.number(direction, undampened);
        if let Some(step) = cx.opt_x(3) {
            let (one, full) = (cx.b.int(1), cx.number(direction, 1.0));
            let is_later = binary_op(GREATER, step, one);
            weight = cx.bind(select(is_later, weight, full))?;
        }
        let buffer = cx.widened(cx.x(0))?;
        let factor = cx.number(direction, decimal(cx.attrs.float(MOMENTUM_FACTOR)));
        narrow(cx, factor * buffer + weight * direction)
    })
};

/// mean + (1 − beta)·(g − mean).
pub static ADAM_MEAN: OpDef = OpDef {
    attrs: &[number(BETA)],
    ins: slots!["mean", "gradient"],
    infer: |cx| infer(cx, &[1], None, None),
    cost: |cx| cx.elementwise(3),
    memory: |cx| memory(cx, &[0, 1], 0),
    ..update("AdamMean", |cx| {
        let [mean, g] = wide(cx)?;
        let weight = cx.number(mean, 1.0 - decimal(cx.attrs.float(BETA)));
        narrow(cx, mean + weight * (g - mean))
    })
};

/// beta·square + (1 − beta)·g².
pub static ADAM_SQUARE: OpDef = OpDef {
    attrs: &[number(BETA)],
    ins: slots!["square", "gradient"],
    infer: |cx| infer(cx, &[1], None, None),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &[0, 1], 0),
    ..update("AdamSquare", |cx| {
        let [square, g] = wide(cx)?;
        let beta = decimal(cx.attrs.float(BETA));
        let factor = cx.number(square, beta);
        let kept = cx.bind(factor * square)?;
        let weight = cx.number(square, 1.0 - beta);
        narrow(cx, kept + weight * g * g)
    })
};

/// p·(1 − lr·weight_decay) − lr/(1 − beta1^step) · mean / (√square / √(1 − beta2^step) + eps), of the mean and square of
/// this step. `lr` is a floating-point scalar, `step` an int64 scalar that counts from 1.
pub static ADAMW: OpDef = OpDef {
    attrs: &[
        number(BETA1),
        number(BETA2),
        number(EPS),
        number(WEIGHT_DECAY),
    ],
    ins: slots!["parameter", "mean", "square", "lr", "step"],
    infer: |cx| infer(cx, &[1, 2], Some(3), Some(4)),
    cost: |cx| cx.elementwise(12),
    memory: |cx| memory(cx, &[0, 1, 2], 1),
    ..update("AdamW", adamw)
};

/// Returns the shortest decimal that rounds to a 32-bit number, for example 0.999 and not 0.99900001287…
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Scalar operand `i` in the type that operand `like` is computed in.
fn scalar_as(cx: &mut BodyCx, i: usize, like: usize) -> Result<Term> {
    let dtype = compute_type(cx.ty(cx.x(like)).dtype);
    cx.bind(cast(cx.x(i), dtype))
}

/// v + factor·w for the factor in an attribute; `v` where that is 0.
fn plus_scaled(cx: &mut BodyCx, v: Term, factor: &str, w: Term) -> Result<Term> {
    let factor = decimal(cx.attrs.float(factor));
    if factor == 0.0 {
        return Ok(v);
    }
    let factor = cx.number(v, factor);
    let scaled = cx.bind(factor * w)?;
    cx.bind(v + scaled)
}

/// Scalars are computed in float64: 1 − beta2^step is a small difference.
fn adamw(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let [p, mean, square] = wide(cx)?;
    let wide_type = cx.b.ty(p.0).dtype;
    let lr = cx.bind(cast(cx.x(3), DType::F64))?;
    let step = cx.bind(cast(cx.x(4), DType::F64))?;
    let one = cx.number(lr, 1.0);
    let attrs = cx.attrs;
    let mut correction = |name: &str| {
        let beta = cx.number(lr, decimal(attrs.float(name)));
        cx.bind(one - binary_op(POW, beta, step))
    };
    let (of_mean, of_square) = (correction(BETA1)?, correction(BETA2)?);
    let size = cx.bind(cast(lr / of_mean, wide_type))?;
    let root = cx.bind(cast(unary_op(SQRT, of_square), wide_type))?;
    let mut updated = p;
    let decay = decimal(attrs.float(WEIGHT_DECAY));
    if decay != 0.0 {
        let decay = cx.number(lr, decay);
        updated = cx.bind(p * cast(one - lr * decay, wide_type))?;
    }
    let spread = cx.bind(unary_op(SQRT, square) / root)?;
    let eps = cx.number(p, decimal(attrs.float(EPS)));
    narrow(cx, updated - size * (mean / (spread + eps)))
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

/// Returns the number of elements that are processed at a time: any number if all tensors are row-major, else whole
/// rows.
pub fn block_elements(device: DeviceKind, dims: &[i64], is_flat: bool) -> i64 {
    let elements: i64 = dims.iter().product();
    let width: i64 = match is_flat {
        true => 1,
        false => dims.iter().skip(1).product(),
    };
    device
        .rows_at_once(BLOCK_ELEMENTS, elements / width.max(1), width)
        .saturating_mul(width)
        .min(elements)
}

/// Written over the first of the tensors in `slots`. For 16-bit types a block of each of them exists widened, for wider
/// ones `buffers` blocks beside them.
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
    fresh(cx)
        .with_temp(count * block_elements(cx.device, &old.dims, is_flat) as u64 * wide.size_bytes())
        .in_place_operands(cx, &[0])
}
