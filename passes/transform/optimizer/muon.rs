//! Muon, as `torch.optim.Muon` computes it (Jordan et al., <https://kellerjordan.github.io/posts/muon>): the step of a matrix
//! is its momentum with all singular values brought near 1, by five steps of a Newton-Schulz iteration.
//!
//! Parameters that are no matrices, and tables that are looked up, are updated by AdamW. The iteration is matrix products in
//! bfloat16 where gradients are that, else in float32.

use super::names::emit_update;
use super::options::Muon;
use super::scaling::{Shared, scalar_norm};
use crate::analysis::params::is_looked_up;
use crate::error::Result;
use crate::ir::{Attrs, DType, Graph, ValueId};
use crate::ops::extreme::MAX;
use crate::ops::matmul::GEMM;
use crate::ops::optimizer::{ADAM_MEAN, BETA, SGD, WEIGHT_DECAY, decimal};
use crate::ops::rule::{Formulas, Term, binary_op, cast};
use crate::ops::{Builder, EmitExt};

/// The coefficients of the iteration, and its steps.
const A: f32 = 3.4445;
const B: f32 = -4.775;
const C: f32 = 2.0315;
const STEPS: usize = 5;
/// The least norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Returns true for a parameter that Muon updates: a matrix, but no table whose rows are looked up.
pub(super) fn takes(graph: &Graph, parameter: ValueId) -> bool {
    graph.ty(parameter).rank() == 2 && !is_looked_up(graph, parameter)
}

/// Returns the factor of the learning rate of a matrix. It goes by the framework's rows and columns.
fn ratio(settings: &Muon, rows: f64, columns: f64) -> f64 {
    match settings.match_rms_adamw {
        true => 0.2 * rows.max(columns).sqrt(),
        false => (rows / columns).max(1.0).sqrt(),
    }
}

/// Emits the update of a matrix and its momentum. `transposed` says that it is the transpose of the framework's.
pub(super) fn emit(
    b: &mut Builder,
    settings: &Muon,
    (p, g): (ValueId, ValueId),
    (momentum, transposed): (ValueId, bool),
    shared: &Shared,
) -> Result<Vec<ValueId>> {
    let ins = vec![Some(momentum), Some(g), shared.grad_scale, shared.apply];
    let attrs = Attrs::new().with(BETA, settings.momentum);
    let mean = emit_update(b, &ADAM_MEAN, ins, attrs, momentum)?;
    let dtype = match b.dtype(g) {
        DType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let mut direction = Term(b.widen(mean)?);
    if settings.nesterov {
        let mut g = Term(b.widen(g)?);
        if let Some(factor) = shared.grad_scale {
            g = b.bind(g * cast(factor, DType::F32))?;
        }
        direction = b.bind(g + decimal(settings.momentum) * (direction - g))?;
    }
    let norm = Term(scalar_norm(b, direction.0)?);
    let least = b.scalar(DType::F32, EPS);
    let norm = b.bind(binary_op(&MAX, norm, least))?;
    // Rounded once, after the division.
    let mut x = b.eval(cast(direction / norm, dtype))?;
    let sizes: Vec<f64> = b
        .dims(p)
        .iter()
        .map(|d| d.as_const().unwrap_or(1) as f64)
        .collect();
    let [rows, columns] = [sizes[0], sizes[1]];
    let is_tall = rows > columns;
    if is_tall {
        x = b.transpose(x, &[1, 0])?;
    }
    for _ in 0..STEPS {
        let gram = b.emit(&GEMM, &[x, x], Attrs::new().with("transB", 1))?;
        let attrs = Attrs::new().with("alpha", C).with("beta", B);
        let factor = b.emit(&GEMM, &[gram, gram, gram], attrs)?;
        x = b.emit(&GEMM, &[factor, x, x], Attrs::new().with("beta", A))?;
    }
    if is_tall {
        x = b.transpose(x, &[1, 0])?;
    }
    let ratio = match transposed {
        true => ratio(settings, columns, rows),
        false => ratio(settings, rows, columns),
    };
    let ratio = b.scalar(DType::F32, ratio);
    let attrs = Attrs::new().with(WEIGHT_DECAY, settings.weight_decay);
    let ins = vec![
        Some(p),
        Some(x),
        Some(shared.lr),
        None,
        Some(ratio),
        shared.apply,
    ];
    Ok(vec![emit_update(b, &SGD, ins, attrs, p)?, mean])
}
