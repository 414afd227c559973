//! AdamW with 8-bit states, some blocks of codes at a time.

use super::context::*;
use super::optimizer::{
    Factor, adamw_numbers, adamw_step, add_scaled, attr, is_left_out, mask, scale,
    scale_of_gradient,
};
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ops::blockwise::*;
use ckpt_passes::ops::optimizer::*;
use ckpt_torch::bytes::from_bytes;
use std::sync::{Arc, LazyLock};

kernels! {
    ADAMW_8BIT => adamw_8bit;
    MOMENT_SCALES => moment_scales;
    MOMENT_CODES => moment_codes;
}

/// 256 numbers of float32, aligned as libtorch's own storages.
#[repr(align(64))]
struct Table([[u8; 4]; 256]);

impl AsRef<[u8]> for Table {
    fn as_ref(&self) -> &[u8] {
        self.0.as_flattened()
    }
}

/// The numbers of both powers, and the bounds between them.
static TABLES: LazyLock<[Arc<Table>; 4]> = LazyLock::new(|| {
    let of = |from: Vec<f32>| {
        let mut table = Table([[0; 4]; 256]);
        for (bytes, number) in table.0.iter_mut().zip(from) {
            *bytes = number.to_le_bytes();
        }
        Arc::new(table)
    };
    [numbers(1), numbers(2), bounds(1), bounds(2)].map(of)
});

/// Returns the first `count` numbers of a table, as a copy on a device or in float64.
fn table(cx: &KernelCx, which: i64, count: i64, kind: Kind) -> Result<Tensor> {
    let owner = TABLES[which as usize].clone();
    let lent = from_bytes(owner, Kind::Float, &[256]).map_err(torch_error)?;
    let lent = narrow(&lent, 0, 0, count)?;
    if cx.device == DeviceKind::Cpu && kind == Kind::Float {
        return Ok(lent);
    }
    let there = empty(&[count], kind, cx.x(0)?.device())?;
    copy_into(&there, &lent)?;
    Ok(there)
}

/// The gradient, which kernels read in the type that is computed in and in row-major order.
struct Gradient {
    tensor: Tensor,
    /// Size of what lies at one place of the first axis; 1 for a row-major tensor, which is read as a vector.
    width: i64,
    room: Option<Tensor>,
    factor: Option<Factor>,
}

impl Gradient {
    fn new(cx: &KernelCx, slots: &UpdateSlots, most: i64) -> Result<Gradient> {
        let g = cx.x(slots.gradient.unwrap_or(1))?;
        let factor = scale_of_gradient(cx, slots)?;
        let is_flat = g.is_contiguous();
        let rows = if is_flat { 1 } else { g.size()[0].max(1) };
        let width = if is_flat { 1 } else { g.numel() as i64 / rows };
        let copied = match is_flat {
            true => most,
            false => rows_around(rows, width, most) * width,
        };
        let wide = compute_kind(g.kind());
        let copies = !is_flat || g.kind() != wide || factor.is_some();
        let room = copies.then(|| empty(&[copied], wide, g.device()));
        Ok(Gradient {
            tensor: if is_flat { as_vector(g)? } else { g.alias() },
            width,
            room: room.transpose()?,
            factor,
        })
    }

    /// Returns `n` elements from `at` on.
    fn take(&self, at: i64, n: i64) -> Result<Tensor> {
        let first = at / self.width;
        let rows = div_ceil(at + n, self.width) - first;
        let mut part = narrow(&self.tensor, 0, first, rows)?;
        if let Some(room) = &self.room {
            let copy = narrow(room, 0, 0, rows * self.width)?;
            copy_into(&call("aten::view", args![&copy, &part.size()])?, &part)?;
            part = copy;
        }
        let part = narrow(&part, 0, at - first * self.width, n)?;
        if let Some(factor) = &self.factor {
            scale(&part, factor)?;
        }
        Ok(part)
    }
}

fn div_ceil(n: i64, by: i64) -> i64 {
    (n + by - 1) / by
}

/// A state of the step before: codes and scales as vectors, and what they mean.
struct State {
    codes: Tensor,
    scales: Tensor,
    numbers: Tensor,
    beta: f64,
    power: i64,
}

impl State {
    fn new(cx: &KernelCx, [codes, scales]: [usize; 2], (beta, power): (f64, i64)) -> Result<State> {
        let (codes, scales) = (cx.x(codes)?, cx.x(scales)?);
        Ok(State {
            numbers: table(cx, power - 1, 256, scales.kind())?,
            codes: dense(codes)?,
            scales: dense(scales)?,
            beta,
            power,
        })
    }

    /// The only state of a node, with beta and power in its attributes.
    fn of(cx: &KernelCx, slots: [usize; 2]) -> Result<State> {
        State::new(cx, slots, (attr(cx, BETA), cx.attrs.int(POWER)))
    }

    /// Writes elements from `at` on, of this step, to `to`. `places` is as long, and is overwritten.
    fn moment(&self, at: i64, g: &Tensor, [places, to]: [&Tensor; 2]) -> Result<()> {
        let n = to.size()[0];
        copy_into(places, &narrow(&self.codes, 0, at, n)?)?;
        write("aten::take.out", args![&self.numbers, places, to])?;
        by_block(at, [to, &self.scales])?;
        scale(to, &Factor::Here(self.beta))?;
        match self.power {
            1 => add_scaled(to, g, &Factor::Here(1.0 - self.beta)),
            _ => write("aten::addcmul_", args![to, g, g, 1.0 - self.beta]),
        }
    }
}

/// Splits `n` elements into whole blocks and the rest: first element, number of blocks, size of a block.
fn whole_and_rest(n: i64) -> impl Iterator<Item = (i64, i64, i64)> {
    let (whole, rest) = (n / BLOCK, n % BLOCK);
    let parts = [(0, whole, BLOCK), (whole * BLOCK, rest.min(1), rest)];
    parts.into_iter().filter(|(_, count, _)| *count > 0)
}

/// Multiplies elements, which are those from `at` on of a tensor, by the factors of their blocks in the tensor.
fn by_block(at: i64, [x, factors]: [&Tensor; 2]) -> Result<()> {
    for (first, count, size) in whole_and_rest(x.size()[0]) {
        let rows = call(
            "aten::view",
            args![&narrow(x, 0, first, count * size)?, &[count, size]],
        )?;
        let factors = narrow(factors, 0, (at + first) / BLOCK, count)?;
        mul_into(&rows, &call("aten::view", args![&factors, &[count, 1]])?)?;
    }
    Ok(())
}

fn adamw_8bit(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let slots = &ADAMW_8BIT_SLOTS;
    let parameter = cx.x(0)?;
    let device = parameter.device();
    let out = cx.result_from(parameter)?;
    let elements = out.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let most = elements_at_once(cx.device, elements);
    let room = |kind| empty(&[most], kind, device);
    let betas = [BETA1, BETA2].map(|name| attr(cx, name));
    let mean = State::new(cx, [4, 5], (betas[0], 1))?;
    let square = State::new(cx, [6, 7], (betas[1], 2))?;
    let gradient = Gradient::new(cx, slots, most)?;
    let numbers = adamw_numbers(cx, [2, 3])?;
    let eps = attr(cx, EPS);
    let kind = compute_kind(out.kind());
    let rooms = [room(Kind::Int64)?, room(kind)?, room(kind)?];
    let is_narrow = out.kind() != kind;
    let wide = is_narrow.then(|| room(kind)).transpose()?;
    let mask = mask(cx, slots)?;
    let before = mask.is_some().then(|| room(kind)).transpose()?;
    // The blocks exist already: a step takes the same memory whether it applies or not.
    if is_left_out(cx, slots, mask)? {
        return Ok(vec![out]);
    }
    let to = as_vector(&out)?;
    for (at, n) in blocks(elements, most) {
        let [places, m, v] = [&rooms[0], &rooms[1], &rooms[2]].map(|room| narrow(room, 0, 0, n));
        let (places, m, v) = (places?, m?, v?);
        let g = gradient.take(at, n)?;
        mean.moment(at, &g, [&places, &m])?;
        square.moment(at, &g, [&places, &v])?;
        let target = narrow(&to, 0, at, n)?;
        let p = match &wide {
            Some(room) => narrow(room, 0, 0, n)?,
            None => target.alias(),
        };
        if is_narrow {
            copy_into(&p, &target)?;
        }
        let before = before.as_ref().map(|room| narrow(room, 0, 0, n));
        let before = before.transpose()?;
        if let Some(before) = &before {
            copy_into(before, &p)?;
        }
        adamw_step([&p, &m, &v, &v], &numbers, eps)?;
        if let (Some(mask), Some(before)) = (mask, &before) {
            write("aten::where.self_out", args![mask, &p, before, &p])?;
        }
        if is_narrow {
            copy_into(&target, &p)?;
        }
    }
    Ok(vec![out])
}

fn moment_scales(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let slots = &MOMENT_SCALES_SLOTS;
    let old = cx.x(1)?;
    let out = cx.result_from(old)?;
    let state = State::of(cx, [0, 1])?;
    let elements = state.codes.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let most = elements_at_once(cx.device, elements);
    let gradient = Gradient::new(cx, slots, most)?;
    let (places, x) = (
        empty(&[most], Kind::Int64, old.device())?,
        empty(&[most], out.kind(), old.device())?,
    );
    let mask = mask(cx, slots)?;
    if is_left_out(cx, slots, mask)? {
        return Ok(vec![out]);
    }
    for (at, n) in blocks(elements, most) {
        let x = narrow(&x, 0, 0, n)?;
        let g = gradient.take(at, n)?;
        state.moment(at, &g, [&narrow(&places, 0, 0, n)?, &x])?;
        write("aten::abs_", args![&x])?;
        for (first, count, size) in whole_and_rest(n) {
            let rows = narrow(&x, 0, first, count * size)?;
            let rows = call("aten::view", args![&rows, &[count, size]])?;
            let to = narrow(&out, 0, (at + first) / BLOCK, count)?;
            write("aten::amax.out", args![&rows, &[1], false, &to])?;
        }
    }
    if let Some(mask) = mask {
        write("aten::where.self_out", args![mask, &out, old, &out])?;
    }
    Ok(vec![out])
}

fn moment_codes(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let slots = &MOMENT_CODES_SLOTS;
    let old = cx.x(0)?;
    let device = old.device();
    let out = cx.result_from(old)?;
    let elements = out.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let most = elements_at_once(cx.device, elements);
    let state = State::of(cx, [0, 2])?;
    let wide = state.scales.kind();
    let bounds = table(cx, 1 + state.power, 255, wide)?;
    let new_scales = dense(cx.x(3)?)?;
    let gradient = Gradient::new(cx, slots, most)?;
    let (places, x) = (
        empty(&[most], Kind::Int64, device)?,
        empty(&[most], wide, device)?,
    );
    let inverse = empty(&[div_ceil(most, BLOCK)], wide, device)?;
    let mask = mask(cx, slots)?;
    let codes = mask.map(|_| empty(&[most], Kind::Uint8, device));
    let codes = codes.transpose()?;
    if is_left_out(cx, slots, mask)? {
        return Ok(vec![out]);
    }
    for (at, n) in blocks(elements, most) {
        let [x, places] = [&x, &places].map(|room| narrow(room, 0, 0, n));
        let (x, places) = (x?, places?);
        let g = gradient.take(at, n)?;
        state.moment(at, &g, [&places, &x])?;
        let count = div_ceil(n, BLOCK);
        let inverse = narrow(&inverse, 0, 0, count)?;
        let scales = narrow(&new_scales, 0, at / BLOCK, count)?;
        write("aten::clamp_min.out", args![&scales, LEAST_SCALE, &inverse])?;
        write("aten::reciprocal_", args![&inverse])?;
        by_block(0, [&x, &inverse])?;
        let bucketize = args![&x, &bounds, false, false, &places];
        write("aten::bucketize.Tensor_out", bucketize)?;
        let target = narrow(&out, 0, at, n)?;
        match (mask, &codes) {
            (Some(mask), Some(codes)) => {
                let codes = narrow(codes, 0, 0, n)?;
                copy_into(&codes, &places)?;
                let chosen = args![mask, &codes, &target, &target];
                write("aten::where.self_out", chosen)?;
            }
            _ => copy_into(&target, &places)?,
        }
    }
    Ok(vec![out])
}
