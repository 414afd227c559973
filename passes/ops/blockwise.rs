//! AdamW with 8-bit states (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861), as
//! `bitsandbytes.optim.AdamW8bit` computes it.
//!
//! A state is a row-major vector of codes, and a float32 scale for each [`BLOCK`] of them: the largest magnitude in the
//! block. A code stands for one of 256 numbers ([`numbers`]) times that scale. Each row reads the codes and scales of the
//! step before and computes the state of this step from them, in float32. (Gradients in float64, which `verify` makes, are
//! computed in float64.) So the parameter is updated before the state is rounded. No row makes a whole state in float32:
//! kernels work on [`elements_at_once`].

use super::names::*;
use super::optimizer::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BodyCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpDef, fresh};
use ckpt_ir::{AttrSpec, DType, Dim, Tensor, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ADAMW_8BIT, &MOMENT_SCALES, &MOMENT_CODES];

/// Elements that share a scale.
pub const BLOCK: i64 = 256;
/// Numbers that codes stand for.
pub const NUMBERS: u64 = 256;
/// The least scale that numbers are divided by.
pub const LEAST_SCALE: f64 = 1e-38;
/// Attribute: the power of the gradient that a state is the mean of, 1 or 2.
pub const POWER: &str = "power";

/// Returns the numbers that codes stand for, ascending, for the mean of a power of gradients: with a sign for the first power.
///
/// These are 0, 1, and for each power of ten from 1e-6 to 1 the middles of equal steps between a tenth of it and it, twice as many
/// as for the power before. bitsandbytes computes them by `torch.linspace` in float32, whose last bit depends on the processor;
/// here they are rounded once.
pub fn numbers(power: i64) -> Vec<f32> {
    let is_signed = power == 1;
    let mut numbers = vec![0.0, 1.0];
    for i in 0..7 {
        let steps = 1 << (if is_signed { i } else { i + 1 });
        let unit = 10f64.powi(i - 6);
        for k in 0..steps {
            let middle = 0.1 + 0.9 * (f64::from(k) + 0.5) / f64::from(steps);
            let number = (unit * middle) as f32;
            numbers.push(number);
            numbers.extend(is_signed.then_some(-number));
        }
    }
    numbers.sort_by(f32::total_cmp);
    numbers
}

/// Returns the bounds between neighbouring numbers: a number above bound `i`, and not above the next one, has code `i + 1`.
pub fn bounds(power: i64) -> Vec<f32> {
    let numbers = numbers(power);
    numbers.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect()
}

/// Returns the number of blocks of a tensor.
pub fn blocks_of(elements: &Dim) -> Dim {
    elements.ceil_div(&BLOCK.into())
}

/// Slots of [`ADAMW_8BIT`].
pub const ADAMW_8BIT_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[0],
    gradient: Some(1),
    grad_scale: Some(8),
    apply: Some(9),
    buffers: 0,
    scalar: Some(2),
};

/// The step of [`ADAMW`], by the mean and square that codes and scales of the step before and the gradient make.
pub static ADAMW_8BIT: OpDef = OpDef {
    attrs: &[
        number(BETA1),
        number(BETA2),
        number(EPS),
        number(WEIGHT_DECAY),
    ],
    ins: slots![
        "parameter", "gradient", "lr", "step", "mean", "mean_scales", "square", "square_scales";
        "grad_scale", "apply"
    ],
    infer: |cx| {
        for (codes, scales) in [(4, 5), (6, 7)] {
            check_state(cx, [1, codes, scales])?;
        }
        infer(cx, &ADAMW_8BIT_SLOTS)
    },
    cost: |cx| cx.elementwise(22),
    memory: |cx| {
        let is_narrow = cx
            .operand(0)
            .is_some_and(|p| p.dtype != compute_type(p.dtype));
        let is_kept = keeps_old(cx, &ADAMW_8BIT_SLOTS);
        // Places in the table and two states; the parameter where it is widened; what it was where it may stay.
        let blocks = 2 + u64::from(is_narrow) + u64::from(is_kept);
        memory(cx, &ADAMW_8BIT_SLOTS, (8, blocks), 2 * NUMBERS).in_place_operands(cx, &[0])
    },
    ..update("AdamW8bit", |cx| {
        let p = cx.widened(cx.x(0))?;
        let g = wide_gradient(cx, &ADAMW_8BIT_SLOTS)?;
        let g = in_blocks(cx, g.0)?;
        let mut states = [p; 2];
        for (i, (state, beta)) in states.iter_mut().zip([BETA1, BETA2]).enumerate() {
            let beta = decimal(cx.attrs.float(beta));
            let new = moment(cx, [4 + 2 * i, 5 + 2 * i], g, (beta, 1 + i as i64))?;
            *state = out_of_blocks(cx, new.0, p.0)?;
        }
        let new = adamw(cx, [p, states[0], states[1]], [2, 3])?;
        updated(cx, &ADAMW_8BIT_SLOTS, new)
    })
};

/// Slots of [`MOMENT_SCALES`].
pub const MOMENT_SCALES_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[],
    gradient: Some(2),
    grad_scale: Some(3),
    apply: Some(4),
    buffers: 0,
    scalar: None,
};

/// The scales of this step: the largest magnitude of beta·state + (1 − beta)·g^power in each block.
pub static MOMENT_SCALES: OpDef = OpDef {
    attrs: &[number(BETA), AttrSpec::int(POWER, 1)],
    ins: slots!["codes", "scales", "gradient"; "grad_scale", "apply"],
    outs: slots!["new_scales"],
    grad: Grad::Missing("a step of an optimizer is not differentiated"),
    infer: |cx| {
        check_scalars(cx)?;
        check_state(cx, [2, 0, 1])?;
        Ok(vec![cx.ty(1)?.clone()])
    },
    cost: |cx| cx.per_largest_operand(7),
    memory: |cx| memory(cx, &MOMENT_SCALES_SLOTS, (8, 1), NUMBERS),
    ..our_mixed("MomentScales", |cx| {
        let new = moment_by_attrs(cx, &MOMENT_SCALES_SLOTS, 2)?;
        let axes = cx.b.ints(&[1]);
        let size = cx.eval(unary_op(ABS, new))?;
        let attrs = ckpt_ir::Attrs::new().with("keepdims", 0);
        let scales = cx.b.emit(REDUCE_MAX, &[size, axes], attrs)?;
        match cx.opt_x(4) {
            None => Ok(vec![scales]),
            Some(apply) => Ok(vec![cx.eval(select(apply, scales, cx.x(1)))?]),
        }
    })
};

/// Slots of [`MOMENT_CODES`].
pub const MOMENT_CODES_SLOTS: UpdateSlots = UpdateSlots {
    alike: &[],
    gradient: Some(1),
    grad_scale: Some(4),
    apply: Some(5),
    buffers: 0,
    scalar: None,
};

/// The codes of this step: those of the numbers nearest to beta·state + (1 − beta)·g^power, divided by the scales of this
/// step.
pub static MOMENT_CODES: OpDef = OpDef {
    attrs: &[number(BETA), AttrSpec::int(POWER, 1)],
    ins: slots!["codes", "gradient", "scales", "new_scales"; "grad_scale", "apply"],
    infer: |cx| {
        check_scalars(cx)?;
        check_state(cx, [1, 0, 2])?;
        check_state(cx, [1, 0, 3])?;
        Ok(vec![cx.ty(0)?.clone()])
    },
    cost: |cx| cx.elementwise(15),
    memory: |cx| {
        let at_once = elements_at_once(cx.device, cx.elements(0) as i64) as u64;
        let blocks = at_once.div_ceil(BLOCK as u64);
        let codes = u64::from(keeps_old(cx, &MOMENT_CODES_SLOTS));
        let mut footprint = memory(cx, &MOMENT_CODES_SLOTS, (8 + codes, 1), 2 * NUMBERS - 1);
        footprint.temp_bytes += wide_bytes(cx, &MOMENT_CODES_SLOTS) * blocks;
        let lies_alike = cx.operand(0).is_some_and(|codes| codes.is_contiguous());
        footprint.in_place_operands.extend(lies_alike.then_some(0));
        footprint
    },
    ..update("MomentCodes", |cx| {
        let new = moment_by_attrs(cx, &MOMENT_CODES_SLOTS, 1)?;
        let least = cx.number(new, LEAST_SCALE);
        let scales = cx.b.unsqueeze(cx.x(3), &[1])?;
        let inverse = unary_op(RECIPROCAL, binary_op(MAX, scales, least));
        let x = cx.bind(new * inverse)?;
        let bounds = table(cx, "bounds", &bounds(cx.attrs.int(POWER)));
        let bounds = cx.b.cast_like(bounds, x.0)?;
        // The number of bounds below x, by bisection.
        let none = cx.b.filled_like(x.0, 0.0)?;
        let mut code = cx.bind(cast(none, DType::I64))?;
        for bit in (0..8).rev() {
            let [size, before] = [1 << bit, (1 << bit) - 1].map(|n| cx.b.int(n));
            let at = cx.eval(binary_op(ADD, code, before))?;
            let bound = cx.b.gather(bounds, at, 0)?;
            let higher = binary_op(ADD, code, size);
            code = cx.bind(select(binary_op(LESS_OR_EQUAL, x, bound), code, higher))?;
        }
        let codes = out_of_blocks(cx, code.0, cx.x(0))?;
        updated(cx, &MOMENT_CODES_SLOTS, codes)
    })
};

/// Returns the number of elements that are processed at a time, whole blocks except at the end.
pub fn elements_at_once(device: DeviceKind, elements: i64) -> i64 {
    let most = match device {
        DeviceKind::Cpu => 1 << 16,
        DeviceKind::Cuda => 1 << 22,
    };
    elements.min(most)
}

/// Returns the rows of a gradient that is not row-major which hold `count` elements in a row, wherever these begin. A row is
/// what lies at one place of the first axis; `width` is its size.
pub fn rows_around(rows: i64, width: i64, count: i64) -> i64 {
    (count / width.max(1) + 2).min(rows)
}

/// Returns the bytes of a number of the type that is computed in.
fn wide_bytes(cx: &MemoryCx, slots: &UpdateSlots) -> u64 {
    let gradient = slots.gradient.and_then(|i| cx.operand(i));
    gradient.map_or(4, |g| compute_type(g.dtype).size_bytes())
}

/// Returns the bytes that a kernel makes of the gradient at a time: a copy where it is widened, scaled or not
/// row-major.
fn copied_gradient_bytes(cx: &MemoryCx, slots: &UpdateSlots) -> u64 {
    let Some(g) = slots.gradient.and_then(|i| cx.operand(i)) else {
        return 0;
    };
    let is_scaled = slots.grad_scale.is_some_and(|i| cx.operand(i).is_some());
    let elements = g.elements() as i64;
    let at_once = elements_at_once(cx.device, elements);
    let copied = match g.is_contiguous() {
        true if g.dtype == compute_type(g.dtype) && !is_scaled => 0,
        true => at_once,
        false => {
            let rows = g.dims[0].max(1);
            rows_around(rows, elements / rows, at_once) * (elements / rows)
        }
    };
    wide_bytes(cx, slots) * copied as u64
}

/// Returns true for a kernel that keeps what an update may leave as it was, because the host does not know whether it applies.
fn keeps_old(cx: &MemoryCx, slots: &UpdateSlots) -> bool {
    let is_given = slots.apply.is_some_and(|i| cx.operand(i).is_some());
    is_given && cx.device == DeviceKind::Cuda
}

/// Temporaries of so many bytes and numbers for every element that is processed at a time, of the gradient, and of tables where
/// these are on a device or not in float32.
fn memory(
    cx: &MemoryCx,
    slots: &UpdateSlots,
    (bytes, numbers): (u64, u64),
    table_numbers: u64,
) -> Footprint {
    let wide_bytes = wide_bytes(cx, slots);
    let elements = slots.gradient.map_or(0, |i| cx.elements(i));
    let at_once = elements_at_once(cx.device, elements as i64) as u64;
    let tables_bytes = match cx.device {
        DeviceKind::Cpu if wide_bytes == 4 => 0,
        _ => wide_bytes * table_numbers,
    };
    let each = bytes + wide_bytes * numbers;
    let factors_bytes = slots.factor_bytes(cx);
    fresh(cx)
        .with_temp(each * at_once + tables_bytes + copied_gradient_bytes(cx, slots) + factors_bytes)
}

/// Checks codes and scales of the state of a gradient, which are operands in these slots.
fn check_state(cx: &InferCx, [gradient, codes, scales]: [usize; 3]) -> Result<()> {
    let g = cx.ty(gradient)?;
    let (elements, wide) = (g.elements(), compute_type(g.dtype));
    let wanted = [
        (codes, Ty::new(DType::U8, [elements.clone()])),
        (scales, Ty::new(wide, [blocks_of(&elements)])),
    ];
    for (slot, wanted) in wanted {
        let found = cx.ty(slot)?;
        if !g.dtype.is_float()
            || found.dtype != wanted.dtype
            || !may_be_same(&found.dims, &wanted.dims)
        {
            let name = cx.op.ins[slot].name;
            return Err(cx
                .fail(
                    "type",
                    format!("operand `{name}` is no state of a gradient {g}"),
                )
                .expected(wanted.to_string())
                .found(found.to_string()));
        }
    }
    Ok(())
}

/// The gradient in the type that is computed in.
fn wide_gradient(cx: &mut BodyCx, slots: &UpdateSlots) -> Result<Term> {
    let gradient = cx.ty(cx.x(slots.gradient.unwrap_or(1)));
    gradient_as(cx, slots, compute_type(gradient.dtype))
}

fn table(cx: &mut BodyCx, name: &str, numbers: &[f32]) -> ValueId {
    let numbers_bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let dims = vec![numbers.len() as u64];
    cx.b.constant(name, Tensor::new(DType::F32, dims, numbers_bytes))
}

/// The elements of `x`, row-major, as rows of one block each, with zeros at the end.
fn in_blocks(cx: &mut BodyCx, x: ValueId) -> Result<Term> {
    let flat = cx.b.reshape(x, &[-1])?;
    let (count, width) = (cx.b.axis_vector(flat, 0)?, cx.b.int(BLOCK));
    let (zero, negative) = (cx.b.ints(&[0]), unary_op(NEG, count));
    let missing = cx.eval(binary_op(MOD, negative, width))?;
    let pads = cx.b.concat(&[zero, missing], 0)?;
    let padded = cx.b.op(PAD, &[flat, pads])?;
    Ok(Term(cx.b.reshape(padded, &[-1, BLOCK])?))
}

/// The elements of blocks in the sizes of `like`.
fn out_of_blocks(cx: &mut BodyCx, x: ValueId, like: ValueId) -> Result<Term> {
    let flat = cx.b.reshape(x, &[-1])?;
    let of = cx.b.reshape(like, &[-1])?;
    let (start, count) = (cx.b.ints(&[0]), cx.b.axis_vector(of, 0)?);
    let cut = cx.b.slice(flat, [start, count], 0)?;
    let shape = cx.b.shape(like)?;
    Ok(Term(cx.b.reshape_to(cut, shape)?))
}

/// A state of this step in blocks: beta·state + (1 − beta)·g^power.
fn moment(
    cx: &mut BodyCx,
    [codes, scales]: [usize; 2],
    g: Term,
    (beta, power): (f64, i64),
) -> Result<Term> {
    let numbers = table(cx, "numbers", &numbers(power));
    let numbers = cx.b.cast_like(numbers, g.0)?;
    let places = cx.b.cast(cx.x(codes), DType::I64)?;
    // Padded after the look-up: code 0 of the first power is no zero.
    let units = cx.b.gather(numbers, places, 0)?;
    let units = in_blocks(cx, units)?;
    let scales = cx.b.unsqueeze(cx.x(scales), &[1])?;
    let old = cx.bind(binary_op(MUL, units, scales))?;
    let [kept, taken] = [beta, 1.0 - beta].map(|factor| cx.number(g, factor));
    let old = cx.bind(kept * old)?;
    match power {
        1 => cx.bind(old + taken * g),
        _ => cx.bind(old + taken * g * g),
    }
}

/// As [`moment`], of the state that is operand 0, with its scales beside the gradient in slot `gradient`.
fn moment_by_attrs(cx: &mut BodyCx, slots: &UpdateSlots, gradient: usize) -> Result<Term> {
    let g = wide_gradient(cx, slots)?;
    let g = in_blocks(cx, g.0)?;
    let of = (decimal(cx.attrs.float(BETA)), cx.attrs.int(POWER));
    moment(cx, [0, 3 - gradient], g, of)
}
