//! Optimizer steps, a block of elements at a time. Blocks of 16-bit tensors are widened, updated and rounded once.

use super::context::*;
use ckpt_passes::analysis::fused_updates::UpdateFormula;
use ckpt_passes::ops::optimizer::*;

use Factor::{Here, There};

kernels! {
    SGD => sgd;
    MOMENTUM => momentum;
    ADAM_MEAN => adam_mean;
    ADAM_SQUARE => adam_square;
    ADAMW => adamw;
}

fn attr(cx: &KernelCx, name: &str) -> f64 {
    decimal(cx.attrs.float(name))
}

/// A factor of a formula.
enum Factor {
    Here(f64),
    /// One element of the compute type on the device, so that the host does not wait for it.
    There(Tensor),
}

/// Returns whether learning rate and step number stay on the device. On a device they always do, so that captured and other
/// steps compute the same bits.
fn leaves_numbers(cx: &KernelCx) -> Result<bool> {
    Ok(cx.deferred.is_some() || !backend(cx.x(0)?).is_host())
}

/// Returns an operand of one element in float64, at its place.
fn number(cx: &KernelCx, slot: usize) -> Result<Tensor> {
    let x = call("aten::reshape", args![cx.x(slot)?, Arg::Ints(&[])])?;
    x.f_to_kind(Kind::Double).map_err(|e| tch_error(&e))
}

fn times(x: &Tensor, by: f64) -> Result<Tensor> {
    call("aten::mul.Scalar", args![x, by])
}

/// Returns 1 − x.
fn rest(x: &Tensor) -> Result<Tensor> {
    call("aten::rsub.Scalar", args![x, 1.0, 1])
}

/// Converts a number to a factor on the device, in the compute type.
fn there(cx: &KernelCx, x: &Tensor) -> Result<Factor> {
    let x = x.f_to_kind(compute_kind(cx.x(0)?.kind()));
    Ok(There(x.map_err(|e| tch_error(&e))?))
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
fn step_there(cx: &KernelCx, slot: usize) -> Result<Tensor> {
    check_step(cx, slot)?;
    number(cx, slot)
}

fn sgd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (momentum, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    let (keep, down, along) = match leaves_numbers(cx)? {
        true => {
            let lr = number(cx, 2)?;
            (
                there(cx, &rest(&times(&lr, decay)?)?)?,
                there(cx, &times(&lr, -1.0)?)?,
                there(cx, &times(&lr, -momentum)?)?,
            )
        }
        false => {
            let lr = learning_rate(cx, 2)?;
            (Here(1.0 - lr * decay), Here(-lr), Here(-lr * momentum))
        }
    };
    in_blocks(cx, &[1, 3], 0, &|to, given, _| {
        scale(to, &keep)?;
        add_scaled(to, &given[0], &down)?;
        match given.get(1) {
            Some(buffer) => add_scaled(to, buffer, &along),
            None => Ok(()),
        }
    })
}

fn momentum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (factor, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    let later = 1.0 - attr(cx, DAMPENING);
    let (weight, decayed) = match (cx.opt(3).is_some(), leaves_numbers(cx)?) {
        (true, true) => {
            let step = step_there(cx, 3)?;
            let is_first = call("aten::eq.Scalar", args![&step, 1.0])?;
            let weight = empty(&[], Kind::Double, step.device())?;
            write("aten::fill_.Scalar", args![&weight, later])?;
            write("aten::masked_fill_.Scalar", args![&weight, &is_first, 1.0])?;
            (there(cx, &weight)?, there(cx, &times(&weight, decay)?)?)
        }
        (is_given, _) => {
            let is_first = is_given && step_number(cx, 3)? == 1.0;
            let weight = if is_first { 1.0 } else { later };
            (Here(weight), Here(weight * decay))
        }
    };
    in_blocks(cx, &[1, 2], 0, &|to, given, _| {
        scale(to, &Here(factor))?;
        add_scaled(to, &given[0], &weight)?;
        match given.get(1) {
            Some(parameter) => add_scaled(to, parameter, &decayed),
            None => Ok(()),
        }
    })
}

fn adam_mean(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let weight = 1.0 - attr(cx, BETA);
    in_blocks(cx, &[1], 0, &|to, given, _| {
        write("aten::lerp_.Scalar", args![to, &given[0], weight])
    })
}

fn adam_square(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let beta = attr(cx, BETA);
    in_blocks(cx, &[1], 0, &|to, given, _| {
        scale(to, &Here(beta))?;
        let g = Arg::Tensor(&given[0]);
        write("aten::addcmul_", args![to, g, g, 1.0 - beta])
    })
}

/// Returns the factors of a step: the negated step size, the divisor of the root of the square, and the share of the parameter
/// that is kept.
fn adamw_numbers(cx: &KernelCx) -> Result<[Factor; 3]> {
    let (beta1, beta2, decay) = (attr(cx, BETA1), attr(cx, BETA2), attr(cx, WEIGHT_DECAY));
    if !leaves_numbers(cx)? {
        let (lr, step) = (learning_rate(cx, 3)?, step_number(cx, 4)?);
        let size = lr / (1.0 - beta1.powf(step));
        let root = (1.0 - beta2.powf(step)).sqrt();
        return Ok([Here(-size), Here(root), Here(1.0 - lr * decay)]);
    }
    let (lr, step) = (number(cx, 3)?, step_there(cx, 4)?);
    let undone = |beta: f64| rest(&call("aten::pow.Scalar", args![beta, &step])?);
    let mean = undone(beta1)?;
    let size = call("aten::div.Tensor", args![&lr, &mean])?;
    let root = call("aten::sqrt", args![&undone(beta2)?])?;
    Ok([
        there(cx, &times(&size, -1.0)?)?,
        there(cx, &root)?,
        there(cx, &rest(&times(&lr, decay)?)?)?,
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
    let [size, root, keep] = adamw_numbers(cx)?;
    let eps = attr(cx, EPS);
    in_blocks(cx, &[1, 2], 1, &|to, given, room| {
        let (mean, square) = (&given[0], &given[1]);
        // A widened copy of the square may be overwritten.
        let spread = room.unwrap_or(square);
        write("aten::sqrt.out", args![square, spread])?;
        div_into(spread, &root.tensor(spread.kind())?)?;
        add_into(spread, &scalar(spread.kind(), eps)?)?;
        scale(to, &keep)?;
        match &size {
            Here(size) => write("aten::addcdiv_", args![to, mean, spread, *size]),
            There(_) => {
                write("aten::div.out", args![mean, spread, spread])?;
                add_scaled(to, spread, &size)
            }
        }
    })
}

impl Factor {
    fn tensor(&self, kind: Kind) -> Result<Tensor> {
        match self {
            Here(number) => scalar(kind, *number),
            There(number) => Ok(number.shallow_clone()),
        }
    }
}

fn scale(to: &Tensor, by: &Factor) -> Result<()> {
    match by {
        Here(1.0) => Ok(()),
        by => mul_into(to, &by.tensor(to.kind())?),
    }
}

fn add_scaled(to: &Tensor, what: &Tensor, by: &Factor) -> Result<()> {
    match by {
        Here(by) => write("aten::add_.Tensor", args![to, what, *by]),
        There(by) => write("aten::addcmul_", args![to, what, by, 1.0]),
    }
}

/// Updates a block of the first operand, given the blocks of the others and, if requested, a buffer of the same size.
type Formula<'a> = &'a dyn Fn(&Tensor, &[Tensor], Option<&Tensor>) -> Result<()>;

/// Applies a formula to the first operand, block by block: in place if the result overwrites it, else to copies. `others` are
/// slots of tensors of its type; missing ones are skipped. `buffers` is 1 for a formula that needs a buffer. For 16-bit types
/// the formula may overwrite the widened blocks.
fn in_blocks(
    cx: &KernelCx,
    others: &[usize],
    buffers: usize,
    formula: Formula,
) -> Result<Vec<Tensor>> {
    let old = cx.x(0)?;
    let out = cx.result_like(old)?;
    let elements = old.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let others: Vec<&Tensor> = others.iter().filter_map(|i| cx.opt(*i)).collect();
    let is_flat = old.is_contiguous() && others.iter().all(|t| t.is_contiguous());
    let laid = |t: &Tensor| match is_flat || t.dim() == 0 {
        true => call("aten::view", args![t, &[-1]]),
        false => Ok(t.alias()),
    };
    let (from, to) = (laid(old)?, laid(&out)?);
    let others: Vec<Tensor> = others.into_iter().map(laid).collect::<Result<_>>()?;
    let length = from.size()[0];
    let row = elements / length;
    let most = block_elements(cx.device, &old.size(), is_flat) / row;
    let wide = compute_kind(old.kind());
    let is_narrow = wide != old.kind();
    let mut dims = from.size();
    dims[0] = most;
    let count = if is_narrow { 1 + others.len() } else { buffers };
    let rooms = (0..count)
        .map(|_| empty(&dims, wide, old.device()))
        .collect::<Result<Vec<Tensor>>>()?;
    let is_in_place = cx.overwrites.is_some();
    for (at, n) in blocks(length, most) {
        let part = |t: &Tensor, at: i64| narrow(t, 0, at, n);
        let (own, target) = (part(&from, at)?, part(&to, at)?);
        if is_narrow {
            let widened = |(room, t): (&Tensor, &Tensor)| {
                let room = part(room, 0)?;
                copy_into(&room, &part(t, at)?)?;
                Ok(room)
            };
            let first = widened((&rooms[0], &from))?;
            let given = rooms[1..].iter().zip(&others).map(widened);
            formula(&first, &given.collect::<Result<Vec<Tensor>>>()?, None)?;
            copy_into(&target, &first)?;
            continue;
        }
        if !is_in_place {
            copy_into(&target, &own)?;
        }
        let given = others.iter().map(|t| part(t, at));
        let given = given.collect::<Result<Vec<Tensor>>>()?;
        let room = rooms.first().map(|room| part(room, 0)).transpose()?;
        formula(&target, &given, room.as_ref())?;
    }
    Ok(vec![out])
}
