//! Steps of optimizers, a stretch of elements at a time: 16-bit tensors are widened, worked on and rounded once.

use super::super::convert::tch_error;
use super::{Kernel, KernelCx, call, copy_into, empty, scalar, write};
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::optimizer::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SGD, sgd),
    (&MOMENTUM, momentum),
    (&ADAM_MEAN, adam_mean),
    (&ADAM_SQUARE, adam_square),
    (&ADAMW, adamw),
];

fn attr(cx: &KernelCx, name: &str) -> f64 {
    decimal(cx.attrs.float(name))
}

fn learning_rate(cx: &KernelCx, slot: usize) -> Result<f64> {
    // Read where it is: a conversion would make a temporary.
    let lr = cx.x(slot)?.f_double_value(&[]);
    lr.map_err(|e| tch_error(&e))
}

/// The number of the step, from 1.
fn step_number(cx: &KernelCx, slot: usize) -> Result<f64> {
    match cx.ints(slot)?.first() {
        Some(n) if *n >= 1 => Ok(*n as f64),
        other => Err(Error::usage("input", "`step` counts training steps")
            .expected("1 or more")
            .found(other.map_or("nothing".into(), i64::to_string))),
    }
}

fn sgd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let lr = learning_rate(cx, 2)?;
    let (momentum, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    stretches(cx, &[1, 3], 0, &|to, given, _| {
        scale(to, 1.0 - lr * decay)?;
        add_scaled(to, &given[0], -lr)?;
        match given.get(1) {
            Some(buffer) => add_scaled(to, buffer, -lr * momentum),
            None => Ok(()),
        }
    })
}

fn momentum(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (factor, decay) = (attr(cx, MOMENTUM_FACTOR), attr(cx, WEIGHT_DECAY));
    let is_first = cx.opt(3).is_some() && step_number(cx, 3)? == 1.0;
    let weight = match is_first {
        true => 1.0,
        false => 1.0 - attr(cx, DAMPENING),
    };
    stretches(cx, &[1, 2], 0, &|to, given, _| {
        scale(to, factor)?;
        add_scaled(to, &given[0], weight)?;
        match given.get(1) {
            Some(parameter) => add_scaled(to, parameter, weight * decay),
            None => Ok(()),
        }
    })
}

fn adam_mean(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let weight = 1.0 - attr(cx, BETA);
    stretches(cx, &[1], 0, &|to, given, _| {
        let args = [Arg::Tensor(to), Arg::Tensor(&given[0]), Arg::Double(weight)];
        write("aten::lerp_", "Scalar", &args)
    })
}

fn adam_square(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let beta = attr(cx, BETA);
    stretches(cx, &[1], 0, &|to, given, _| {
        scale(to, beta)?;
        let g = Arg::Tensor(&given[0]);
        write(
            "aten::addcmul_",
            "",
            &[Arg::Tensor(to), g, g, Arg::Double(1.0 - beta)],
        )
    })
}

fn adamw(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (lr, step) = (learning_rate(cx, 3)?, step_number(cx, 4)?);
    let size = lr / (1.0 - attr(cx, BETA1).powf(step));
    let root = (1.0 - attr(cx, BETA2).powf(step)).sqrt();
    let (eps, decay) = (attr(cx, EPS), attr(cx, WEIGHT_DECAY));
    stretches(cx, &[1, 2], 1, &|to, given, room| {
        let (mean, square) = (&given[0], &given[1]);
        // The square's own stretch where that is a widened copy.
        let spread = room.unwrap_or(square);
        write(
            "aten::sqrt",
            "out",
            &[Arg::Tensor(square), Arg::Tensor(spread)],
        )?;
        let number = scalar(spread.kind(), root)?;
        write(
            "aten::div_",
            "Tensor",
            &[Arg::Tensor(spread), Arg::Tensor(&number)],
        )?;
        let number = scalar(spread.kind(), eps)?;
        write(
            "aten::add_",
            "Tensor",
            &[Arg::Tensor(spread), Arg::Tensor(&number), Arg::Int(1)],
        )?;
        scale(to, 1.0 - lr * decay)?;
        let args = [
            Arg::Tensor(to),
            Arg::Tensor(mean),
            Arg::Tensor(spread),
            Arg::Double(-size),
        ];
        write("aten::addcdiv_", "", &args)
    })
}

fn scale(to: &Tensor, by: f64) -> Result<()> {
    if by == 1.0 {
        return Ok(());
    }
    let number = scalar(to.kind(), by)?;
    write(
        "aten::mul_",
        "Tensor",
        &[Arg::Tensor(to), Arg::Tensor(&number)],
    )
}

fn add_scaled(to: &Tensor, what: &Tensor, by: f64) -> Result<()> {
    let args = [Arg::Tensor(to), Arg::Tensor(what), Arg::Double(by)];
    write("aten::add_", "Tensor", &args)
}

/// What a formula does to a stretch of the first operand, given those of others and, where it wants it, room of that size.
type Formula<'a> = &'a dyn Fn(&Tensor, &[Tensor], Option<&Tensor>) -> Result<()>;

/// Runs a formula in place over copies of the first operand's stretches, or over itself where the result is written
/// over it. `others` are slots of tensors of its type; those not given are left out. `buffers` is 1 where a formula wants
/// room; for 16-bit types the widened stretches are free to be written over.
fn stretches(
    cx: &KernelCx,
    others: &[usize],
    buffers: usize,
    formula: Formula,
) -> Result<Vec<Tensor>> {
    let old = cx.x(0)?;
    let out = cx.result(&old.size(), old.kind(), old.device())?;
    let elements = old.numel() as i64;
    if elements == 0 {
        return Ok(vec![out]);
    }
    let others: Vec<&Tensor> = others.iter().filter_map(|i| cx.opt(*i)).collect();
    let is_flat = old.is_contiguous() && others.iter().all(|t| t.is_contiguous());
    let laid = |t: &Tensor| match is_flat || t.dim() == 0 {
        true => call("aten::view", "", &[Arg::Tensor(t), Arg::Ints(&[-1])]),
        false => Ok(t.alias()),
    };
    let (from, to) = (laid(old)?, laid(&out)?);
    let others: Vec<Tensor> = others.into_iter().map(laid).collect::<Result<_>>()?;
    let length = from.size()[0];
    let row = elements / length;
    let most = stretch(&old.size(), is_flat) / row;
    let wide = match old.kind() {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        kind => kind,
    };
    let is_narrow = wide != old.kind();
    let mut dims = from.size();
    dims[0] = most;
    let count = if is_narrow { 1 + others.len() } else { buffers };
    let rooms = (0..count)
        .map(|_| empty(&dims, wide, old.device()))
        .collect::<Result<Vec<Tensor>>>()?;
    let is_in_place = cx.over.is_some();
    for at in (0..length).step_by(most as usize) {
        let n = most.min(length - at);
        let part = |t: &Tensor, at: i64| {
            let args = [Arg::Tensor(t), Arg::Int(0), Arg::Int(at), Arg::Int(n)];
            call("aten::narrow", "", &args)
        };
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
