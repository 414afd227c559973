//! The nodes of an update, by optimizer.

use super::adafactor::{self, StepNumbers};
use super::muon;
use super::names::{emit_optional, emit_update};
use super::options::Optimizer;
use super::scaling::Shared;
use crate::error::{Error, Result};
use crate::ir::{Attrs, ValueId};
use crate::ops::Builder;
use crate::ops::blockwise::{ADAMW_8BIT, MOMENT_CODES, MOMENT_SCALES, POWER};
use crate::ops::optimizer::{
    ADAM_MEAN, ADAM_SQUARE, ADAMW, BETA, BETA1, BETA2, DAMPENING, EPS, LION, MOMENTUM,
    MOMENTUM_FACTOR, REPLACE, SGD, WEIGHT_DECAY,
};

/// The optimizer of one parameter, with its states.
pub(super) struct Own {
    pub optimizer: Optimizer,
    pub states: Vec<ValueId>,
    /// The parameter is the transpose of the framework's.
    pub is_transposed: bool,
}

/// Numbers of a step that an optimizer computes once for all parameters.
pub(super) struct Prepared(Option<StepNumbers>);

/// Emits the numbers of a step that all parameters share.
pub(super) fn prepare(b: &mut Builder, optimizer: &Optimizer, shared: &Shared) -> Result<Prepared> {
    Ok(Prepared(match (optimizer, shared.step) {
        (Optimizer::Adafactor(settings), Some(step)) => {
            Some(adafactor::step_numbers(b, settings, (shared.lr, step))?)
        }
        _ => None,
    }))
}

/// Emits the updates of a parameter (or its master) and its states by a gradient. Returns them in this order.
pub(super) fn emit(
    b: &mut Builder,
    own: &Own,
    (p, g): (ValueId, ValueId),
    (shared, prepared): (&Shared, &Prepared),
) -> Result<Vec<ValueId>> {
    let Shared {
        lr,
        step,
        grad_scale,
        apply,
        ..
    } = *shared;
    let states = &own.states[..];
    let missing = || Error::bug("optimizer", "a state is missing");
    match own.optimizer {
        Optimizer::Sgd {
            momentum,
            dampening,
            weight_decay,
            nesterov,
        } => {
            let decay = Attrs::new().with(WEIGHT_DECAY, weight_decay);
            let [buffer] = *states else {
                let ins = vec![Some(p), Some(g), Some(lr), None, grad_scale, apply];
                return Ok(vec![emit_update(b, &SGD, ins, decay, p)?]);
            };
            let decayed = (weight_decay != 0.0).then_some(p);
            let ins = vec![Some(buffer), Some(g), decayed, step, grad_scale, apply];
            let with_momentum = decay.with(MOMENTUM_FACTOR, momentum);
            let attrs = with_momentum.clone().with(DAMPENING, dampening);
            let buffer = emit_update(b, &MOMENTUM, ins, attrs, buffer)?;
            let (ins, attrs) = match nesterov {
                true => (
                    vec![Some(p), Some(g), Some(lr), Some(buffer), grad_scale, apply],
                    with_momentum,
                ),
                false => (
                    vec![Some(p), Some(buffer), Some(lr), None, None, apply],
                    Attrs::new(),
                ),
            };
            Ok(vec![emit_update(b, &SGD, ins, attrs, p)?, buffer])
        }
        Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } => {
            let attrs = Attrs::new()
                .with(BETA1, beta1)
                .with(BETA2, beta2)
                .with(EPS, eps)
                .with(WEIGHT_DECAY, weight_decay);
            if let [mean, mean_scales, square, square_scales] = *states {
                let ins = [p, g, lr].map(Some).into_iter().chain([step]);
                let ins = ins.chain(states.iter().copied().map(Some));
                let ins = ins.chain([grad_scale, apply]).collect();
                let mut results = vec![emit_update(b, &ADAMW_8BIT, ins, attrs, p)?];
                // Codes and scales are functions of both, so the new scales wait beside the old ones.
                let both = [(mean, mean_scales, beta1), (square, square_scales, beta2)];
                for (power, (codes, scales, beta)) in (1..).zip(both) {
                    let attrs = Attrs::new().with(BETA, beta).with(POWER, power);
                    let ins = vec![Some(codes), Some(scales), Some(g), grad_scale, apply];
                    let new = emit_optional(b, &MOMENT_SCALES, ins, attrs.clone())?;
                    let ins = [codes, g, scales, new].map(Some).into_iter();
                    let ins = ins.chain([grad_scale, apply]).collect();
                    results.push(emit_update(b, &MOMENT_CODES, ins, attrs, codes)?);
                    let ins = vec![Some(scales), Some(new)];
                    results.push(emit_update(b, &REPLACE, ins, Attrs::new(), scales)?);
                }
                return Ok(results);
            }
            let [mean, square] = *states else {
                return Err(missing());
            };
            let of = |beta: f32| Attrs::new().with(BETA, beta);
            let ins = |state: ValueId| vec![Some(state), Some(g), grad_scale, apply];
            let mean = emit_update(b, &ADAM_MEAN, ins(mean), of(beta1), mean)?;
            let square = emit_update(b, &ADAM_SQUARE, ins(square), of(beta2), square)?;
            let ins = vec![Some(p), Some(mean), Some(square), Some(lr), step, apply];
            Ok(vec![emit_update(b, &ADAMW, ins, attrs, p)?, mean, square])
        }
        Optimizer::Lion {
            beta1,
            beta2,
            weight_decay,
        } => {
            let [mean] = *states else {
                return Err(missing());
            };
            let attrs = Attrs::new()
                .with(BETA1, beta1)
                .with(WEIGHT_DECAY, weight_decay);
            // The step reads the mean before its update.
            let ins = vec![Some(p), Some(g), Some(mean), Some(lr), grad_scale, apply];
            let p = emit_update(b, &LION, ins, attrs, p)?;
            let ins = vec![Some(mean), Some(g), grad_scale, apply];
            let attrs = Attrs::new().with(BETA, beta2);
            Ok(vec![p, emit_update(b, &ADAM_MEAN, ins, attrs, mean)?])
        }
        Optimizer::Adafactor(settings) => {
            let numbers = prepared.0.ok_or_else(missing)?;
            adafactor::emit(b, &settings, (p, g), states, (shared, numbers))
        }
        Optimizer::Muon(settings) => {
            let momentum = *states.first().ok_or_else(missing)?;
            muon::emit(b, &settings, (p, g), (momentum, own.is_transposed), shared)
        }
    }
}
