//! Optimizer steps, a block of elements at a time. Blocks of 16-bit tensors are widened, updated and rounded once.

use super::context::*;
use ckpt_passes::analysis::fused_updates::UpdateFormula;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ops::optimizer::*;
use std::cell::Cell;

use Factor::{Here, There};

kernels! {
    SGD => sgd;
    MOMENTUM => momentum;
    ADAM_MEAN => adam_mean;
    ADAM_SQUARE => adam_square;
    ADAMW => adamw;
    LION => lion;
    ADD_GRADIENT => add_gradient;
    REPLACE => replace;
    L2_NORM => l2_norm;
}

pub(super) fn attr(cx: &KernelCx, name: &str) -> f64 {
    decimal(cx.attrs.float(name))
}

/// A factor of a formula.
pub(super) enum Factor {
    Here(f64),
    /// One element of the compute type on the device, so that the host does not wait for it.
    There(Tensor),
}

/// Returns whether learning rate and step number stay on the device. On a device they always do, so that captured and other
/// steps compute the same bits.
fn leaves_numbers(cx: &KernelCx) -> bool {
    cx.deferred.is_some() || cx.device == DeviceKind::Cuda
}

/// Scalars on the device, in one block of memory, in which the factors of an update are computed.
struct Numbers {
    room: Tensor,
    taken: Cell<i64>,
    /// The type of factors: the compute type, and float32 for codes.
    kind: Kind,
}

impl Numbers {
    fn new(cx: &KernelCx) -> Result<Numbers> {
        let x = cx.x(0)?;
        let own = Some(x.kind()).filter(|kind| is_float(*kind));
        Ok(Numbers {
            room: empty(&[FACTOR_NUMBERS], Kind::Double, x.device())?,
            taken: Cell::new(0),
            kind: own.map_or(Kind::Float, compute_kind),
        })
    }

    /// Returns an unused scalar of the block.
    fn free(&self, kind: Kind) -> Result<Tensor> {
        let at = self.taken.replace(self.taken.get() + 1);
        let bytes = narrow(&self.room, 0, at, 1)?;
        let seen = call("aten::view.dtype", args![&bytes, kind])?;
        call("aten::select.int", args![&seen, 0, 0])
    }

    /// Returns what an operator writes to its last argument, in float64.
    fn by(&self, name: &str, args: &[Arg]) -> Result<Tensor> {
        let out = self.free(Kind::Double)?;
        write_with(name, args, &[], &out)?;
        Ok(out)
    }

    /// Returns an operand of one element in float64.
    fn operand(&self, cx: &KernelCx, slot: usize) -> Result<Tensor> {
        self.copy(&call("aten::reshape", args![cx.x(slot)?, Arg::Ints(&[])])?)
    }

    fn copy(&self, x: &Tensor) -> Result<Tensor> {
        let copy = self.free(Kind::Double)?;
        copy_into(&copy, x)?;
        Ok(copy)
    }

    // Not by `mul.Scalar`: libtorch would allocate a tensor for the number.
    fn times(&self, x: &Tensor, by: f64) -> Result<Tensor> {
        let product = self.copy(x)?;
        mul_into(&product, &scalar(Kind::Double, by)?)?;
        Ok(product)
    }

    /// Returns 1 − x.
    fn rest(&self, x: &Tensor) -> Result<Tensor> {
        let rest = self.times(x, -1.0)?;
        add_into(&rest, &scalar(Kind::Double, 1.0)?)?;
        Ok(rest)
    }

    fn power(&self, base: f64, exponent: &Tensor) -> Result<Tensor> {
        let power = self.free(Kind::Double)?;
        fill(&power, &scalar(Kind::Double, base)?)?;
        write("aten::pow_.Tensor", args![&power, exponent])?;
        Ok(power)
    }

    /// Returns a number as a factor.
    fn factor(&self, x: &Tensor) -> Result<Factor> {
        if x.kind() == self.kind {
            return Ok(There(x.shallow_clone()));
        }
        let factor = self.free(self.kind)?;
        copy_into(&factor, x)?;
        Ok(There(factor))
    }
}

fn learning_rate(cx: &KernelCx, slot: usize) -> Result<f64> {
    // Read in its own type, because a conversion would allocate a temporary.
    let lr = cx.x(slot)?.f_double_value(&[]);
    lr.map_err(|e| tch_error(&e))
}

fn is_step(n: Option<i64>) -> Result<()> {
    match n {
        Some(n) if n >= 1 => Ok(()),
        other => Err(Error::usage("input", "`step` counts training steps")
            .expected("1 or more")
            .found(other.map_or("nothing".into(), |n| n.to_string()))),
    }
}

/// Returns the step number, from 1.
fn step_number(cx: &KernelCx, slot: usize) -> Result<f64> {
    let first = cx.ints(slot)?.first().copied();
    is_step(first).map(|()| first.unwrap_or(1) as f64)
}

/// Checks the step number, after the step where the host must not wait for the device.
fn check_step(cx: &KernelCx, slot: usize) -> Result<()> {
    let Some(deferred) = cx.deferred else {
        return step_number(cx, slot).map(drop);
    };
    let wide = cx.x(slot)?.f_to_kind(Kind::Int64);
    let wide = wide.map_err(|e| tch_error(&e))?;
    deferred.defer(&wide, Box::new(|low, _| is_step(Some(low))))
}

/// Returns the step number at its place, checked.
fn step_there(cx: &KernelCx, numbers: &Numbers, slot: usize) -> Result<Tensor> {
    check_step(cx, slot)?;
    numbers.operand(cx, slot)
}

fn sgd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (momentum, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    let (keep, down, along) = match leaves_numbers(cx) {
        true => {
            let numbers = Numbers::new(cx)?;
            let lr = numbers.operand(cx, 2)?;
            (
                numbers.factor(&numbers.rest(&numbers.times(&lr, decay)?)?)?,
                numbers.factor(&numbers.times(&lr, -1.0)?)?,
                numbers.factor(&numbers.times(&lr, -momentum)?)?,
            )
        }
        false => {
            let lr = learning_rate(cx, 2)?;
            (Here(1.0 - lr * decay), Here(-lr), Here(-lr * momentum))
        }
    };
    in_blocks(cx, &SGD_SLOTS, &|block| {
        scale(&block.to, &keep)?;
        add_scaled(&block.to, block.gradient()?, &down)?;
        match block.others.first() {
            Some(buffer) => add_scaled(&block.to, buffer, &along),
            None => Ok(()),
        }
    })
}

fn momentum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (factor, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    let later = 1.0 - attr(cx, DAMPENING);
    let (weight, decayed) = match (cx.opt(3).is_some(), leaves_numbers(cx)) {
        (true, true) => {
            let numbers = Numbers::new(cx)?;
            let step = step_there(cx, &numbers, 3)?;
            let is_first = numbers.free(Kind::Bool)?;
            let one = scalar(Kind::Double, 1.0)?;
            write("aten::eq.Tensor_out", args![&step, &one, &is_first])?;
            let weight = numbers.free(Kind::Double)?;
            fill(&weight, &scalar(Kind::Double, later)?)?;
            write("aten::masked_fill_.Tensor", args![&weight, &is_first, &one])?;
            let decayed = numbers.times(&weight, decay)?;
            (numbers.factor(&weight)?, numbers.factor(&decayed)?)
        }
        (is_given, _) => {
            let is_first = is_given && step_number(cx, 3)? == 1.0;
            let weight = if is_first { 1.0 } else { later };
            (Here(weight), Here(weight * decay))
        }
    };
    in_blocks(cx, &MOMENTUM_SLOTS, &|block| {
        scale(&block.to, &Here(factor))?;
        add_scaled(&block.to, block.gradient()?, &weight)?;
        match block.others.first() {
            Some(parameter) => add_scaled(&block.to, parameter, &decayed),
            None => Ok(()),
        }
    })
}

fn adam_mean(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let weight = 1.0 - attr(cx, BETA);
    in_blocks(cx, &ADAM_STATE_SLOTS, &|block| {
        let g = block.gradient()?;
        write("aten::lerp_.Scalar", args![&block.to, g, weight])
    })
}

fn adam_square(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let beta = attr(cx, BETA);
    in_blocks(cx, &ADAM_STATE_SLOTS, &|block| {
        scale(&block.to, &Here(beta))?;
        let g = block.gradient()?;
        write("aten::addcmul_", args![&block.to, g, g, 1.0 - beta])
    })
}

/// Returns the factors of a step, of which learning rate and step number are in `slots`: the negated step size, the divisor of
/// the root of the square, and the share of the parameter that is kept.
pub(super) fn adamw_numbers(cx: &KernelCx, [lr, step]: [usize; 2]) -> Result<[Factor; 3]> {
    let (beta1, beta2, decay) = (attr(cx, BETA1), attr(cx, BETA2), attr(cx, WEIGHT_DECAY));
    if !leaves_numbers(cx) {
        let (lr, step) = (learning_rate(cx, lr)?, step_number(cx, step)?);
        let size = lr / (1.0 - beta1.powf(step));
        let root = (1.0 - beta2.powf(step)).sqrt();
        return Ok([Here(-size), Here(root), Here(1.0 - lr * decay)]);
    }
    let numbers = Numbers::new(cx)?;
    let (lr, step) = (numbers.operand(cx, lr)?, step_there(cx, &numbers, step)?);
    let undone = |beta: f64| numbers.rest(&numbers.power(beta, &step)?);
    let size = numbers.by("aten::div.out", args![&lr, &undone(beta1)?])?;
    let root = numbers.by("aten::sqrt.out", args![&undone(beta2)?])?;
    Ok([
        numbers.factor(&numbers.times(&size, -1.0)?)?,
        numbers.factor(&root)?,
        numbers.factor(&numbers.rest(&numbers.times(&lr, decay)?)?)?,
    ])
}

/// The tensors of an update that is computed in one call: all row-major, parameter and states to be overwritten.
pub struct UpdatedTensors {
    /// The parameter.
    pub parameter: Tensor,
    /// Its gradient.
    pub gradient: Tensor,
    /// Its states, in the order of the formula.
    pub states: Vec<Tensor>,
}

/// Computes updates in one call of a fused kernel. `cx` is a node of one of them, which gives learning rate and step number.
pub fn update(cx: &KernelCx, formula: &UpdateFormula, updates: &[UpdatedTensors]) -> Result<()> {
    let parameters: Vec<&Tensor> = updates.iter().map(|u| &u.parameter).collect();
    let gradients = updates.iter().map(|u| dense(&u.gradient));
    let gradients = gradients.collect::<Result<Vec<Tensor>>>()?;
    let gradients: Vec<&Tensor> = gradients.iter().collect();
    let states = |i: usize| -> Vec<&Tensor> {
        let states = updates.iter().filter_map(|u| u.states.get(i));
        states.collect()
    };
    let both = [Arg::Tensors(&parameters), Arg::Tensors(&gradients)];
    match *formula {
        UpdateFormula::Sgd {
            momentum,
            weight_decay,
            nesterov,
        } => {
            let (buffers, lr) = (states(0), cx.x(2)?);
            let is_narrow = parameters.iter().any(|p| is_narrow(p.kind()));
            if is_narrow && !buffers.is_empty() && backend(lr).is_host() {
                let text = "libtorch 2.11 updates 16-bit momentum wrongly on a CPU";
                return Err(cx.bug(text));
            }
            let numbers = args![weight_decay, momentum, lr, 0.0, nesterov, false, false];
            let all = [&both[..], args![&buffers], &numbers[..]].concat();
            write("aten::_fused_sgd_.tensor_lr", &all)
        }
        UpdateFormula::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } => {
            check_step(cx, 4)?;
            let step = copied_as(cx.x(4)?, Kind::Float)?;
            let (means, squares, lr) = (states(0), states(1), cx.x(3)?);
            let steps = vec![&step; updates.len()];
            let lists = [&means[..], &squares, &[], &steps].map(Arg::Tensors);
            let numbers = args![lr, beta1, beta2, weight_decay, eps, false, false];
            let all = [&both[..], &lists[..], &numbers[..]].concat();
            write("aten::_fused_adamw_.tensor_lr", &all)
        }
    }
}

fn adamw(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let numbers = adamw_numbers(cx, [3, 4])?;
    let eps = attr(cx, EPS);
    in_blocks(cx, &ADAMW_SLOTS, &|block| {
        let (to, mean, square) = (&block.to, &block.others[0], &block.others[1]);
        // A widened copy of the square may be overwritten.
        let spread = block.buffers.first().unwrap_or(square);
        adamw_step([to, mean, square, spread], &numbers, eps)
    })
}

/// Updates `to` by mean and square. `spread` is overwritten, and may be the square.
pub(super) fn adamw_step(
    [to, mean, square, spread]: [&Tensor; 4],
    [size, root, keep]: &[Factor; 3],
    eps: f64,
) -> Result<()> {
    write("aten::sqrt.out", args![square, spread])?;
    div_into(spread, &root.tensor(spread.kind())?)?;
    add_into(spread, &scalar(spread.kind(), eps)?)?;
    scale(to, keep)?;
    match size {
        Here(size) => write("aten::addcdiv_", args![to, mean, spread, *size]),
        There(_) => {
            write("aten::div.out", args![mean, spread, spread])?;
            add_scaled(to, spread, size)
        }
    }
}

impl Factor {
    fn tensor(&self, kind: Kind) -> Result<Tensor> {
        match self {
            Here(number) => scalar(kind, *number),
            There(number) => Ok(number.shallow_clone()),
        }
    }
}

pub(super) fn scale(to: &Tensor, by: &Factor) -> Result<()> {
    match by {
        Here(1.0) => Ok(()),
        by => mul_into(to, &by.tensor(to.kind())?),
    }
}

pub(super) fn add_scaled(to: &Tensor, what: &Tensor, by: &Factor) -> Result<()> {
    match by {
        Here(by) => write("aten::add_.Tensor", args![to, what, *by]),
        There(by) => write("aten::addcmul_", args![to, what, by, 1.0]),
    }
}

fn lion(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (beta, decay) = (attr(cx, BETA1), attr(cx, WEIGHT_DECAY));
    let (keep, down) = match leaves_numbers(cx) {
        true => {
            let numbers = Numbers::new(cx)?;
            let lr = numbers.operand(cx, 3)?;
            let keep = numbers.factor(&numbers.rest(&numbers.times(&lr, decay)?)?)?;
            (keep, numbers.factor(&numbers.times(&lr, -1.0)?)?)
        }
        false => {
            let lr = learning_rate(cx, 3)?;
            (Here(1.0 - lr * decay), Here(-lr))
        }
    };
    in_blocks(cx, &LION_SLOTS, &|block| {
        let mean = &block.others[0];
        // A widened copy of the mean may be overwritten.
        let direction = block.buffers.first().unwrap_or(mean);
        let factor = scalar(direction.kind(), beta)?;
        write("aten::mul.out", args![mean, &factor, direction])?;
        add_scaled(direction, block.gradient()?, &Here(1.0 - beta))?;
        write("aten::sign.out", args![direction, direction])?;
        scale(&block.to, &keep)?;
        add_scaled(&block.to, direction, &down)
    })
}

fn add_gradient(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let restart = cx.x(2)?;
    in_blocks(cx, &ADD_GRADIENT_SLOTS, &|block| {
        write("aten::masked_fill_.Scalar", args![&block.to, restart, 0.0])?;
        add_into(&block.to, block.gradient()?)
    })
}

fn replace(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let out = cx.result_like(cx.x(0)?)?;
    copy_into(&out, cx.x(1)?)?;
    Ok(vec![out])
}

/// A block of an update: tensors of the compute type.
struct Block {
    /// The block of the first operand, to be overwritten.
    to: Tensor,
    /// The gradient, multiplied by its scale.
    gradient: Option<Tensor>,
    /// The blocks of the other tensors that are given.
    others: Vec<Tensor>,
    /// Blocks to be overwritten; none where those of the operands may be, which are copies for 16-bit types.
    buffers: Vec<Tensor>,
}

impl Block {
    fn gradient(&self) -> Result<&Tensor> {
        let gradient = self.gradient.as_ref();
        gradient.ok_or_else(|| Error::bug("run", "an update has no gradient"))
    }
}

/// A tensor of an update, and the memory for a block of it where it is widened or scaled.
struct Source {
    tensor: Tensor,
    room: Option<Tensor>,
}

impl Source {
    fn block(&self, at: i64, n: i64) -> Result<Tensor> {
        let own = narrow(&self.tensor, 0, at, n)?;
        let Some(room) = &self.room else {
            return Ok(own);
        };
        let room = narrow(room, 0, 0, n)?;
        copy_into(&room, &own)?;
        Ok(room)
    }
}

/// Returns the truth value that decides whether an update applies, where it is read on the device.
pub(super) fn mask<'a>(cx: &'a KernelCx, slots: &UpdateSlots) -> Result<Option<&'a Tensor>> {
    let apply = slots.apply.and_then(|i| cx.opt(i));
    let is_there = leaves_numbers(cx);
    Ok(apply.filter(|_| is_there))
}

/// Returns true for an update that does not apply, where the host reads that; `mask` says so where it does not.
pub(super) fn is_left_out(
    cx: &KernelCx,
    slots: &UpdateSlots,
    mask: Option<&Tensor>,
) -> Result<bool> {
    match (slots.apply.and_then(|i| cx.opt(i)), mask) {
        (Some(apply), None) => Ok(!is_true(apply)?),
        _ => Ok(false),
    }
}

fn is_true(x: &Tensor) -> Result<bool> {
    let number = x.f_int64_value(&[]);
    number.map(|n| n != 0).map_err(|e| tch_error(&e))
}

/// Applies a formula to the first operand, block by block: in place if the result overwrites it, else to copies.
fn in_blocks(
    cx: &KernelCx,
    slots: &UpdateSlots,
    formula: &dyn Fn(&Block) -> Result<()>,
) -> Result<Vec<Tensor>> {
    let old = cx.x(0)?;
    let out = cx.result_like(old)?;
    let elements = old.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let is_in_place = cx.overwrites.is_some();
    let mask = mask(cx, slots)?;
    let others: Vec<&Tensor> = slots.alike[1..].iter().filter_map(|i| cx.opt(*i)).collect();
    let gradient = slots.gradient.map(|i| cx.x(i)).transpose()?;
    let mut all = others.iter().copied().chain(gradient).chain([old]);
    let is_flat = all.all(|t| t.is_contiguous());
    let laid = |t: &Tensor| match is_flat || t.dim() == 0 {
        true => call("aten::view", args![t, &[-1]]),
        false => Ok(t.alias()),
    };
    let (from, to) = (laid(old)?, laid(&out)?);
    let length = from.size()[0];
    let most = block_elements(cx.device, &old.size(), is_flat) / (elements / length);
    let wide = compute_kind(old.kind());
    let is_narrow = wide != old.kind();
    let mut dims = from.size();
    dims[0] = most;
    let room = || empty(&dims, wide, old.device());
    let source = |t: &Tensor, copies: bool| {
        Ok(Source {
            tensor: laid(t)?,
            room: copies.then(room).transpose()?,
        })
    };
    let own = Source {
        tensor: from.alias(),
        room: is_narrow.then(room).transpose()?,
    };
    let others = others.into_iter().map(|t| source(t, is_narrow));
    let others = others.collect::<Result<Vec<Source>>>()?;
    let factor = scale_of_gradient(cx, slots)?;
    let gradient = gradient.map(|t| source(t, t.kind() != wide || factor.is_some()));
    let gradient = gradient.transpose()?;
    let buffers = (0..slots.buffers).filter(|_| !is_narrow).map(|_| room());
    let buffers = buffers.collect::<Result<Vec<Tensor>>>()?;
    let before = mask.is_some().then(room).transpose()?;
    // The blocks exist already: a step takes the same memory whether it applies or not.
    if is_left_out(cx, slots, mask)? {
        if !is_in_place {
            copy_into(&out, old)?;
        }
        return Ok(vec![out]);
    }
    for (at, n) in blocks(length, most) {
        let target = narrow(&to, 0, at, n)?;
        if !is_narrow && !is_in_place {
            copy_into(&target, &narrow(&from, 0, at, n)?)?;
        }
        let of = |source: &Source| source.block(at, n);
        let block = Block {
            to: if is_narrow { of(&own)? } else { target.alias() },
            gradient: gradient.as_ref().map(of).transpose()?,
            others: others.iter().map(of).collect::<Result<_>>()?,
            buffers: buffers
                .iter()
                .map(|room| narrow(room, 0, 0, n))
                .collect::<Result<_>>()?,
        };
        let before = before
            .as_ref()
            .map(|room| narrow(room, 0, 0, n))
            .transpose()?;
        if let Some(before) = &before {
            copy_into(before, &block.to)?;
        }
        if let (Some(g), Some(factor)) = (&block.gradient, &factor) {
            scale(g, factor)?;
        }
        formula(&block)?;
        if let (Some(mask), Some(before)) = (mask, &before) {
            write(
                "aten::where.self_out",
                args![mask, &block.to, before, &block.to],
            )?;
        }
        if is_narrow {
            copy_into(&target, &block.to)?;
        }
    }
    Ok(vec![out])
}

/// Returns the factor of the gradient, if there is one.
pub(super) fn scale_of_gradient(cx: &KernelCx, slots: &UpdateSlots) -> Result<Option<Factor>> {
    let Some(slot) = slots.grad_scale.filter(|i| cx.opt(*i).is_some()) else {
        return Ok(None);
    };
    Ok(Some(match leaves_numbers(cx) {
        true => {
            let numbers = Numbers::new(cx)?;
            numbers.factor(&numbers.operand(cx, slot)?)?
        }
        false => Here(learning_rate(cx, slot)?),
    }))
}

/// Reduces rows of [`NORM_WIDTH`] elements to their norms, and those to one. How threads share the rows changes no bit.
fn l2_norm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let out = empty(&[1], Kind::Float, x.device())?;
    let elements = x.numel() as i64;
    if elements == 0 {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let shape = norm_blocks(cx.device, &sized(x)?);
    let wide = compute_kind(x.kind());
    let [partials, sums] = [shape.partials, shape.sums].map(|n| empty(&[n], wide, x.device()));
    let (partials, sums) = (partials?, sums?);
    let flat = match &shape.dense {
        Some(axes) => {
            let dims: Vec<i64> = axes.iter().map(|i| x.size()[*i]).collect();
            let strides: Vec<i64> = axes.iter().map(|i| x.stride()[*i]).collect();
            let ordered = strided(x, &dims, &strides)?;
            Some(call("aten::view", args![&ordered, &[-1]])?)
        }
        None => None,
    };
    let source = flat.as_ref().unwrap_or(x);
    let length = source.size()[0];
    let width = elements / length;
    let room = (shape.room > 0).then(|| empty(&[shape.room], wide, x.device()));
    let room = room.transpose()?;
    let mut made = 0;
    for (at, n) in blocks(length, shape.most / width) {
        let mut part = narrow(source, 0, at, n)?;
        if let Some(room) = &room {
            let copy = narrow(room, 0, 0, n * width)?;
            let laid = call("aten::view", args![&copy, &part.size()])?;
            copy_into(&laid, &part)?;
            part = copy;
        }
        made += norms_of_rows(&part, &partials, made)?;
    }
    norms_of_rows(&partials, &sums, 0)?;
    let last = narrow(&sums, 0, 0, shape.sums)?;
    // No longer read: the place for the result in the type that is computed in.
    let total = narrow(&partials, 0, 0, 1)?;
    norm_into(&call("aten::view", args![&last, &[1, -1]])?, &total)?;
    copy_into(&out, &total)?;
    Ok(vec![out])
}

/// Writes the norms of rows of a vector, of which the last may be shorter, from place `at` on. Returns their number.
fn norms_of_rows(x: &Tensor, to: &Tensor, at: i64) -> Result<i64> {
    let (rows, rest) = (x.size()[0] / NORM_WIDTH, x.size()[0] % NORM_WIDTH);
    if rows > 0 {
        let whole = narrow(x, 0, 0, rows * NORM_WIDTH)?;
        let whole = call("aten::view", args![&whole, &[rows, NORM_WIDTH]])?;
        norm_into(&whole, &narrow(to, 0, at, rows)?)?;
    }
    if rest > 0 {
        let last = narrow(x, 0, rows * NORM_WIDTH, rest)?;
        let last = call("aten::view", args![&last, &[1, rest]])?;
        norm_into(&last, &narrow(to, 0, at + rows, 1)?)?;
    }
    Ok(rows + i64::from(rest > 0))
}

fn norm_into(rows: &Tensor, to: &Tensor) -> Result<()> {
    write(
        "aten::linalg_vector_norm.out",
        args![rows, 2, &[1], false, Arg::None, to],
    )
}
