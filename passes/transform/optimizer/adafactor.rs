//! Adafactor, as `torch.optim.Adafactor` computes it (Shazeer and Stern, arXiv 1804.04235): the mean square of a matrix of
//! gradients is estimated from those of its rows and columns.
//!
//! The nodes are standard ones around the step along the estimate's direction. They hold two tensors of the parameter's size
//! in float32 at a time.

use super::names::emit_update;
use super::options::Adafactor;
use super::scaling::{Shared, scalar_norm};
use crate::error::Result;
use crate::ir::{Attrs, DType, ValueId};
use crate::ops::extreme::{MAX, MIN};
use crate::ops::names::{POW, REDUCE_MEAN, SQRT};
use crate::ops::optimizer::{REPLACE, SGD, WEIGHT_DECAY, decimal};
use crate::ops::reduce::REDUCE_L2;
use crate::ops::rule::{Formulas, Term, binary_op, cast, select, unary_op};
use crate::ops::{Builder, EmitExt};

/// Numbers of a step that all parameters share.
#[derive(Clone, Copy)]
pub(super) struct StepNumbers {
    /// The weight of the new mean squares.
    weight: Term,
    /// The step size, relative to the learning rate.
    rate: Term,
}

/// Emits the numbers of a step.
pub(super) fn step_numbers(
    b: &mut Builder,
    settings: &Adafactor,
    (lr, step): (ValueId, ValueId),
) -> Result<StepNumbers> {
    let step = b.bind(cast(step, DType::F32))?;
    let decay = b.scalar(DType::F32, decimal(settings.beta2_decay));
    let weight = b.bind(binary_op(POW, step, decay))?;
    // min(lr, 1/√step) / lr, which is 1 at a learning rate of 0.
    let slowed = b.bind(1.0 / (Term(lr) * unary_op(SQRT, step)))?;
    let one = b.scalar(DType::F32, 1.0);
    let rate = b.bind(binary_op(&MIN, slowed, one))?;
    Ok(StepNumbers { weight, rate })
}

/// Emits the update of a parameter and its states.
pub(super) fn emit(
    b: &mut Builder,
    settings: &Adafactor,
    (p, g): (ValueId, ValueId),
    states: &[ValueId],
    (shared, numbers): (&Shared, StepNumbers),
) -> Result<Vec<ValueId>> {
    let own = b.ty(p).clone();
    let elements: f64 = own
        .dims
        .iter()
        .filter_map(|d| d.as_const())
        .map(|n| n as f64)
        .product();
    let root = elements.sqrt();
    let eps1 = match settings.eps1 {
        0.0 => epsilon(own.dtype),
        given => decimal(given),
    };
    let mut g = Term(b.widen(g)?);
    if let Some(factor) = shared.grad_scale {
        g = b.bind(g * cast(factor, DType::F32))?;
    }
    let size = Term(scalar_norm(b, p)?);
    let least = b.scalar(DType::F32, decimal(settings.eps2));
    let size = b.bind(binary_op(&MAX, size * (1.0 / root), least))?;
    let mut results = Vec::new();
    let mut mean_of = |b: &mut Builder, state: ValueId, new: Term| -> Result<Term> {
        let old = Term(b.widen(state)?);
        let mut mean = b.bind(old + numbers.weight * (new - old))?;
        if let Some(apply) = shared.apply {
            mean = b.bind(select(apply, mean, old))?;
        }
        let ins = vec![Some(state), Some(mean.0)];
        results.push(emit_update(b, &REPLACE, ins, Attrs::new(), state)?);
        Ok(mean)
    };
    let square = match *states {
        [row, col] => {
            let rank = own.rank();
            let mean_square = |b: &mut Builder, axis: usize| {
                let axes = b.ints(&[axis as i64]);
                let norm = b.emit(&REDUCE_L2, &[g.0, axes], Attrs::new().with("keepdims", 1))?;
                let n = own.dims[axis].as_const().unwrap_or(1).max(1) as f64;
                b.bind(Term(norm) * Term(norm) * (1.0 / n))
            };
            let (of_row, of_col) = (mean_square(b, rank - 1)?, mean_square(b, rank - 2)?);
            let (row, col) = (mean_of(b, row, of_row)?, mean_of(b, col, of_col)?);
            let axes = b.ints(&[rank as i64 - 2]);
            let whole = b.emit(
                REDUCE_MEAN,
                &[row.0, axes],
                Attrs::new().with("keepdims", 1),
            )?;
            let least = b.scalar(DType::F32, eps1);
            let share = b.bind(row / binary_op(&MAX, whole, least))?;
            b.bind(share * col)?
        }
        _ => {
            let new = b.bind(g * g)?;
            mean_of(b, states[0], new)?
        }
    };
    let least = b.scalar(DType::F32, eps1 * eps1);
    let root_of_square = b.bind(unary_op(SQRT, binary_op(&MAX, square, least)))?;
    let direction = b.bind(g / root_of_square)?;
    let norm = Term(scalar_norm(b, direction.0)?);
    let one = b.scalar(DType::F32, 1.0);
    let most = root * decimal(settings.d);
    let too_large = b.bind(binary_op(&MAX, norm * (1.0 / most), one))?;
    let factor = b.eval(size * numbers.rate / too_large)?;
    let attrs = Attrs::new().with(WEIGHT_DECAY, settings.weight_decay);
    let ins = vec![
        Some(p),
        Some(direction.0),
        Some(shared.lr),
        None,
        Some(factor),
        shared.apply,
    ];
    results.insert(0, emit_update(b, &SGD, ins, attrs, p)?);
    Ok(results)
}

/// The difference between 1 and the next larger number.
fn epsilon(dtype: DType) -> f64 {
    let digits = match dtype {
        DType::BF16 => 7,
        DType::F16 => 10,
        DType::F64 => 52,
        _ => 23,
    };
    0.5f64.powi(digits)
}
