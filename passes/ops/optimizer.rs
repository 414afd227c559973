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
    contiguous_strides, fresh,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &SGD,
    &MOMENTUM,
    &ADAM_MEAN,
    &ADAM_SQUARE,
    &ADAMW,
    &LION,
    &ADD_GRADIENT,
    &REPLACE,
    &L2_NORM,
];

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

/// Operand: the factor of the gradient.
pub const GRAD_SCALE: &str = "grad_scale";
/// Operand: whether the update applies.
pub const APPLY: &str = "apply";
/// Operand: whether a sum starts anew.
pub const RESTART: &str = "restart";

/// Elements that are processed at a time on a CPU if that takes memory beside operands and result.
const BLOCK_ELEMENTS: i64 = 1 << 18;

/// A number, 0 where it is not given.
pub(super) const fn number(name: &'static str) -> AttrSpec {
    AttrSpec::float(name, 0.0)
}

const UPDATED: &[Slot] = slots!["updated"];

pub(super) const fn update(name: &'static str, body: BodyFn) -> OpDef {
    OpDef {
        outs: UPDATED,
        grad: Grad::Missing("a step of an optimizer is not differentiated"),
        ..ours(name, OpClass::Update, BatchAxes::Mixed, body)
    }
}

/// Where the operands of an update stand, and what its kernel takes beside them.
#[derive(Clone, Copy, Debug)]
pub struct UpdateSlots {
    /// Tensors of the first operand's type, which is the first of them; those that are not required may be missing.
    pub alike: &'static [usize],
    /// The gradient or a direction made from it: of the same sizes, and of any type that is computed in the same one.
    pub gradient: Option<usize>,
    /// A floating-point scalar that the gradient is multiplied by before all else, 1 where it is not given.
    pub grad_scale: Option<usize>,
    /// A truth value: where it is given and false, the result is the first operand.
    pub apply: Option<usize>,
    /// Blocks that the formula needs where it may not write over the blocks of its operands.
    pub buffers: u64,
    /// The scalar operand, if any, from which the kernel computes factors. On a CUDA device it uses [`FACTOR_NUMBERS`] for that.
    pub scalar: Option<usize>,
}

/// How many float64 numbers a kernel allocates on a CUDA device to compute factors there, so that the host need not wait.
pub const FACTOR_NUMBERS: i64 = 16;

impl UpdateSlots {
    /// Returns how many blocks of the compute type a kernel takes. Which operands those widen, see [`UpdateSlots::widens`].
    fn blocks(&self, cx: &MemoryCx) -> u64 {
        let dtype = |slot: usize| cx.operand(slot).map(|x| x.dtype);
        let wide = dtype(0).map(compute_type);
        let is_narrow = dtype(0) != wide;
        let alike = self.alike.iter().filter(|i| cx.operand(**i).is_some());
        let is_given = |slot: Option<usize>| slot.is_some_and(|i| cx.operand(i).is_some());
        let gradient = self.gradient.and_then(dtype);
        let copies_gradient = gradient.is_some() && (gradient != wide || is_given(self.grad_scale));
        let own = match is_narrow {
            true => alike.count() as u64,
            false => self.buffers,
        };
        own + u64::from(copies_gradient)
            + u64::from(is_given(self.apply) && cx.device == DeviceKind::Cuda)
    }

    /// Returns the bytes that a kernel allocates to compute factors.
    pub fn factor_bytes(&self, cx: &MemoryCx) -> u64 {
        let given = [self.grad_scale, self.scalar].into_iter().flatten();
        let given = given.filter(|slot| cx.operand(*slot).is_some()).count() as u64;
        match cx.device {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => given * FACTOR_NUMBERS as u64 * 8,
        }
    }
}

/// Slots of [`SGD`].
pub const SGD_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0, 3],
    gradient: Some(1),
    grad_scale: Some(4),
    apply: Some(5),
    buffers: 0,
    scalar: Some(2),
};

/// p − lr·(g + weight_decay·p + momentum·buffer): the buffer is given for Nesterov's form only; without, `gradient` is
/// whatever direction the step takes. `lr` is a floating-point scalar.
pub static SGD: OpDef = OpDef {
    attrs: &[number(MOMENTUM_FACTOR), number(WEIGHT_DECAY)],
    ins: slots!["parameter", "gradient", "lr"; "buffer", "grad_scale", "apply"],
    infer: |cx| infer(cx, &SGD_SLOTS),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &SGD_SLOTS),
    ..update("Sgd", |cx| {
        let [p] = wide(cx)?;
        let g = gradient(cx, &SGD_SLOTS)?;
        let lr = scalar_as(cx, 2, 0)?;
        let mut direction = plus_scaled(cx, g, WEIGHT_DECAY, p)?;
        if let Some(buffer) = cx.opt_x(3) {
            let buffer = cx.widened(buffer)?;
            direction = plus_scaled(cx, direction, MOMENTUM_FACTOR, buffer)?;
        }
        updated(cx, &SGD_SLOTS, p - lr * direction)
    })
};

/// Slots of [`MOMENTUM`].
pub const MOMENTUM_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0, 2],
    gradient: Some(1),
    grad_scale: Some(4),
    apply: Some(5),
    buffers: 0,
    scalar: Some(3),
};

/// momentum·buffer + (1 − dampening)·(g + weight_decay·p), from a buffer of zeros. In step 1, if `step` is given, nothing
/// is dampened. `parameter` is given where its weight decays.
pub static MOMENTUM: OpDef = OpDef {
    attrs: &[
        number(MOMENTUM_FACTOR),
        number(DAMPENING),
        number(WEIGHT_DECAY),
    ],
    ins: slots!["buffer", "gradient"; "parameter", "step", "grad_scale", "apply"],
    infer: |cx| infer(cx, &MOMENTUM_SLOTS),
    cost: |cx| cx.elementwise(5),
    memory: |cx| memory(cx, &MOMENTUM_SLOTS),
    ..update("Momentum", |cx| {
        let mut direction = gradient(cx, &MOMENTUM_SLOTS)?;
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
        updated(cx, &MOMENTUM_SLOTS, factor * buffer + weight * direction)
    })
};

/// Slots of [`ADAM_MEAN`] and [`ADAM_SQUARE`].
pub const ADAM_STATE_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0],
    gradient: Some(1),
    grad_scale: Some(2),
    apply: Some(3),
    buffers: 0,
    scalar: None,
};

/// mean + (1 − beta)·(g − mean).
pub static ADAM_MEAN: OpDef = OpDef {
    attrs: &[number(BETA)],
    ins: slots!["mean", "gradient"; "grad_scale", "apply"],
    infer: |cx| infer(cx, &ADAM_STATE_SLOTS),
    cost: |cx| cx.elementwise(3),
    memory: |cx| memory(cx, &ADAM_STATE_SLOTS),
    ..update("AdamMean", |cx| {
        let [mean] = wide(cx)?;
        let g = gradient(cx, &ADAM_STATE_SLOTS)?;
        let weight = cx.number(mean, 1.0 - decimal(cx.attrs.float(BETA)));
        updated(cx, &ADAM_STATE_SLOTS, mean + weight * (g - mean))
    })
};

/// beta·square + (1 − beta)·g².
pub static ADAM_SQUARE: OpDef = OpDef {
    attrs: &[number(BETA)],
    ins: slots!["square", "gradient"; "grad_scale", "apply"],
    infer: |cx| infer(cx, &ADAM_STATE_SLOTS),
    cost: |cx| cx.elementwise(4),
    memory: |cx| memory(cx, &ADAM_STATE_SLOTS),
    ..update("AdamSquare", |cx| {
        let [square] = wide(cx)?;
        let g = gradient(cx, &ADAM_STATE_SLOTS)?;
        let beta = decimal(cx.attrs.float(BETA));
        let factor = cx.number(square, beta);
        let kept = cx.bind(factor * square)?;
        let weight = cx.number(square, 1.0 - beta);
        updated(cx, &ADAM_STATE_SLOTS, kept + weight * g * g)
    })
};

/// Slots of [`ADAMW`].
pub const ADAMW_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0, 1, 2],
    gradient: None,
    grad_scale: None,
    apply: Some(5),
    buffers: 1,
    scalar: Some(3),
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
    ins: slots!["parameter", "mean", "square", "lr", "step"; "apply"],
    infer: |cx| infer(cx, &ADAMW_SLOTS),
    cost: |cx| cx.elementwise(12),
    memory: |cx| memory(cx, &ADAMW_SLOTS),
    ..update("AdamW", |cx| {
        let tensors = wide(cx)?;
        let new = adamw(cx, tensors, [3, 4])?;
        updated(cx, &ADAMW_SLOTS, new)
    })
};

/// Slots of [`LION`].
pub const LION_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0, 2],
    gradient: Some(1),
    grad_scale: Some(4),
    apply: Some(5),
    buffers: 1,
    scalar: Some(3),
};

/// p·(1 − lr·weight_decay) − lr·sign(beta1·mean + (1 − beta1)·g), of the mean before this step (Chen et al., arXiv
/// 2302.06675). The mean itself is an [`ADAM_MEAN`] of another beta.
pub static LION: OpDef = OpDef {
    attrs: &[number(BETA1), number(WEIGHT_DECAY)],
    ins: slots!["parameter", "gradient", "mean", "lr"; "grad_scale", "apply"],
    infer: |cx| infer(cx, &LION_SLOTS),
    cost: |cx| cx.elementwise(7),
    memory: |cx| memory(cx, &LION_SLOTS),
    ..update("Lion", |cx| {
        let [p] = wide(cx)?;
        let g = gradient(cx, &LION_SLOTS)?;
        let mean = cx.widened(cx.x(2))?;
        let lr = scalar_as(cx, 3, 0)?;
        let beta = decimal(cx.attrs.float(BETA1));
        let [kept, taken] = [beta, 1.0 - beta].map(|factor| cx.number(p, factor));
        let direction = cx.bind(unary_op(SIGN, kept * mean + taken * g))?;
        let mut new = p;
        let decay = decimal(cx.attrs.float(WEIGHT_DECAY));
        if decay != 0.0 {
            let (one, decay) = (cx.number(p, 1.0), cx.number(p, decay));
            new = cx.bind(p * (one - lr * decay))?;
        }
        updated(cx, &LION_SLOTS, new - lr * direction)
    })
};

/// Slots of [`ADD_GRADIENT`].
pub const ADD_GRADIENT_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0],
    gradient: Some(1),
    grad_scale: None,
    apply: None,
    buffers: 0,
    scalar: None,
};

/// sum + g; g where `restart` is true.
pub static ADD_GRADIENT: OpDef = OpDef {
    ins: slots!["sum", "gradient", "restart"],
    infer: |cx| infer(cx, &ADD_GRADIENT_SLOTS),
    cost: |cx| cx.elementwise(1),
    memory: |cx| memory(cx, &ADD_GRADIENT_SLOTS),
    ..update("AddGradient", |cx| {
        let [sum] = wide(cx)?;
        let g = gradient(cx, &ADD_GRADIENT_SLOTS)?;
        let zero = cx.number(sum, 0.0);
        let sum = cx.bind(select(cx.x(2), zero, sum))?;
        narrow(cx, sum + g)
    })
};

/// `new` in the type of `old`: a parameter that is the rounding of its master, or a state that is set.
pub static REPLACE: OpDef = OpDef {
    ins: slots!["old", "new"],
    infer: |cx| {
        let (old, new) = (cx.ty(0)?, cx.ty(1)?);
        let alike =
            old.dtype.is_float() == new.dtype.is_float() && may_be_same(&old.dims, &new.dims);
        match alike && (old.dtype.is_float() || old.dtype == new.dtype) {
            true => Ok(vec![old.clone()]),
            false => Err(cx
                .fail("type", "operand `new` does not fit")
                .expected(old.to_string())
                .found(new.to_string())),
        }
    },
    cost: |cx| cx.elementwise(1),
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..update("Replace", |cx| {
        let dtype = cx.ty(cx.x(0)).dtype;
        match cx.ty(cx.x(1)).dtype == dtype {
            true => Ok(vec![cx.eval(unary_op(IDENTITY, cx.x(1)))?]),
            false => Ok(vec![cx.b.cast(cx.x(1), dtype)?]),
        }
    })
};

/// Elements that are reduced one after the other to a partial norm.
pub const NORM_WIDTH: i64 = 4096;

/// √Σx² of all elements, computed in float32 or wider: one element of float32.
pub static L2_NORM: OpDef = OpDef {
    ins: slots!["x"],
    outs: slots!["norm"],
    infer: |cx| {
        cx.want_dtype(0, DType::is_float, "a floating-point type")?;
        Ok(vec![Ty::new(DType::F32, [1.into()])])
    },
    grad: Grad::Missing("a step of an optimizer is not differentiated"),
    cost: |cx| cx.per_largest_operand(2),
    memory: |cx| {
        let Some(x) = cx.operand(0) else {
            return fresh(cx);
        };
        let blocks = norm_blocks(cx.device, x);
        let elements = blocks.room + blocks.partials + blocks.sums;
        let bytes = elements as u64 * compute_type(x.dtype).size_bytes();
        fresh(cx).with_temp(bytes)
    },
    ..our_mixed("L2Norm", |cx| {
        let x = cx.widened(cx.x(0))?;
        let row = cx.b.reshape(x.0, &[-1])?;
        let norm =
            cx.b.emit(REDUCE_L2, &[row], Attrs::new().with("keepdims", 1))?;
        Ok(vec![cx.b.cast(norm, DType::F32)?])
    })
};

/// The blocks in which a norm is computed.
pub struct NormBlocks {
    /// The axes from the largest stride to the smallest, where the elements are dense in that order.
    pub dense: Option<Vec<usize>>,
    /// Elements of a widened or dense copy that exists at a time; 0 without copies.
    pub room: i64,
    /// Elements that are processed at a time.
    pub most: i64,
    /// Partial norms of [`NORM_WIDTH`] elements each, or less at the end of a block.
    pub partials: i64,
    /// Partial norms of those.
    pub sums: i64,
}

/// Returns the blocks in which the norm of a tensor is computed.
pub fn norm_blocks(device: DeviceKind, x: &Sized) -> NormBlocks {
    let mut axes: Vec<usize> = (0..x.dims.len()).filter(|i| x.dims[*i] != 1).collect();
    axes.sort_by_key(|i| std::cmp::Reverse(x.strides[*i]));
    let dims: Vec<i64> = axes.iter().map(|i| x.dims[*i]).collect();
    let is_dense = axes
        .iter()
        .map(|i| x.strides[*i])
        .eq(contiguous_strides(&dims));
    let elements: i64 = x.dims.iter().product();
    let copies = compute_type(x.dtype) != x.dtype || !is_dense;
    let most = match copies {
        true => block_elements(device, &x.dims, is_dense),
        false => elements,
    }
    .max(1);
    let rest = elements % most;
    let rows = |n: i64| (n + NORM_WIDTH - 1) / NORM_WIDTH;
    let partials = elements / most * rows(most) + rows(rest);
    NormBlocks {
        dense: is_dense.then_some(axes),
        room: if copies { most } else { 0 },
        most,
        partials,
        sums: rows(partials),
    }
}

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

/// Returns the parameter after a step by the mean and square of this step, of which the operands in `slots` are learning rate
/// and step number. Scalars are computed in float64: 1 − beta2^step is a small difference.
pub(super) fn adamw(
    cx: &mut BodyCx,
    [p, mean, square]: [Term; 3],
    [lr, step]: [usize; 2],
) -> Result<Expr> {
    let wide_type = cx.b.ty(p.0).dtype;
    let lr = cx.bind(cast(cx.x(lr), DType::F64))?;
    let step = cx.bind(cast(cx.x(step), DType::F64))?;
    let one = cx.number(lr, 1.0);
    let attrs = cx.attrs;
    let mut correction = |name: &str| {
        let beta = cx.number(lr, decimal(attrs.float(name)));
        cx.bind(one - binary_op(POW, beta, step))
    };
    let (of_mean, of_square) = (correction(BETA1)?, correction(BETA2)?);
    let size = cx.bind(cast(lr / of_mean, wide_type))?;
    let root = cx.bind(cast(unary_op(SQRT, of_square), wide_type))?;
    let mut new = p;
    let decay = decimal(attrs.float(WEIGHT_DECAY));
    if decay != 0.0 {
        let decay = cx.number(lr, decay);
        new = cx.bind(p * cast(one - lr * decay, wide_type))?;
    }
    let spread = cx.bind(unary_op(SQRT, square) / root)?;
    let eps = cx.number(p, decimal(attrs.float(EPS)));
    Ok(new - size * (mean / (spread + eps)))
}

/// The gradient as it enters a formula: in the type that is computed in, multiplied by its scale.
fn gradient(cx: &mut BodyCx, slots: &UpdateSlots) -> Result<Term> {
    let dtype = compute_type(cx.ty(cx.x(0)).dtype);
    gradient_as(cx, slots, dtype)
}

/// As [`gradient`], in a given type.
pub(super) fn gradient_as(cx: &mut BodyCx, slots: &UpdateSlots, dtype: DType) -> Result<Term> {
    let slot = slots.gradient.unwrap_or(1);
    let g = cx.bind(cast(cx.x(slot), dtype))?;
    match slots.grad_scale.and_then(|i| cx.opt_x(i)) {
        None => Ok(g),
        Some(scale) => cx.bind(cast(scale, dtype) * g),
    }
}

/// The result of an update: `new` rounded, or the first operand where the update does not apply.
pub(super) fn updated(
    cx: &mut BodyCx,
    slots: &UpdateSlots,
    new: impl Into<Expr>,
) -> Result<Vec<ValueId>> {
    let new = narrow(cx, new)?;
    match slots.apply.and_then(|i| cx.opt_x(i)) {
        None => Ok(new),
        Some(apply) => Ok(vec![cx.eval(select(apply, new[0], cx.x(0)))?]),
    }
}

/// Checks the operands of an update.
pub(super) fn infer(cx: &InferCx, slots: &UpdateSlots) -> Result<Vec<Ty>> {
    let dtype = cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    let old = cx.ty(0)?;
    for slot in slots.alike.iter().copied().chain(slots.gradient) {
        let Some(other) = cx.opt_ty(slot) else {
            continue;
        };
        let fits = match Some(slot) == slots.gradient {
            true => other.dtype.is_float() && compute_type(other.dtype) == compute_type(dtype),
            false => other.dtype == dtype,
        };
        if !fits || !may_be_same(&old.dims, &other.dims) {
            return Err(cx
                .fail(
                    "type",
                    format!("operand `{}` is of another type", cx.op.ins[slot].name),
                )
                .expected(old.to_string())
                .found(other.to_string()));
        }
    }
    check_scalars(cx)?;
    Ok(vec![old.clone()])
}

/// Checks the scalar operands of an update, which are told by the names of their slots.
pub(super) fn check_scalars(cx: &InferCx) -> Result<()> {
    for (slot, defined) in cx.op.ins.iter().enumerate() {
        let (allowed, what): (fn(DType) -> bool, _) = match defined.name {
            "lr" | GRAD_SCALE => (DType::is_float, "a floating-point scalar"),
            "step" => (|dtype| dtype == DType::I64, "an int64 scalar"),
            APPLY | RESTART => (|dtype| dtype == DType::Bool, "a truth value"),
            _ => continue,
        };
        let Some(ty) = cx.opt_ty(slot) else {
            continue;
        };
        if !allowed(ty.dtype) || ty.rank() != 0 {
            let name = defined.name;
            return Err(cx
                .fail("type", format!("operand `{name}` is no scalar of its type"))
                .expected(what)
                .found(ty.to_string()));
        }
    }
    Ok(())
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

/// Written over the first operand. Blocks of operands that are widened or scaled exist beside them.
fn memory(cx: &MemoryCx, slots: &UpdateSlots) -> Footprint {
    let tensors = slots.alike.iter().copied().chain(slots.gradient);
    let tensors: Vec<&Sized> = tensors.filter_map(|i| cx.operand(i)).collect();
    let Some(old) = tensors.first() else {
        return fresh(cx);
    };
    let is_flat = tensors.iter().all(|x| x.is_contiguous());
    let block = block_elements(cx.device, &old.dims, is_flat) as u64;
    fresh(cx)
        .with_temp(
            slots.blocks(cx) * block * compute_type(old.dtype).size_bytes()
                + slots.factor_bytes(cx),
        )
        .in_place_operands(cx, &[0])
}
