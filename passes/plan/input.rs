//! What a planner is given: a problem with what is known of its ops and what the user settled.

use super::annotations::OpAnnotations;
use super::budget::{Basis, Budget};
use super::chunks::Chunks;
use super::constraint::{Constraint, Constraints};
use super::index::ByOp;
use super::problem::Problem;
use super::schedule::evaluate;
use ckpt_error::Result;

/// A problem and its annotations.
#[derive(Clone, Debug)]
pub struct PlanInput {
    /// The ops and values to schedule.
    pub problem: Problem,
    /// Layers, sub-blocks and roles of the problem's ops.
    pub annotations: OpAnnotations,
    /// What the overrides settle: the scope of policies and forced choices, by op.
    pub constraints: Constraints,
    /// The options that the constraints come from; part of a plan's name.
    pub overrides: String,
    /// What budgets in bytes are on.
    pub basis: Basis,
    /// The memory of the device; `None` where no device is known.
    pub usable_bytes: Option<u64>,
    /// How often the step was cut before it became this problem.
    pub chunks: Chunks,
}

impl PlanInput {
    /// Returns an input without overrides, with budgets on the whole peak and no known device.
    pub fn new(problem: Problem, annotations: OpAnnotations) -> PlanInput {
        PlanInput {
            constraints: Constraints::of(&problem, &annotations),
            problem,
            annotations,
            overrides: String::new(),
            basis: Basis::Peak,
            usable_bytes: None,
            chunks: Chunks::default(),
        }
    }

    /// Returns a budget as a peak in bytes.
    ///
    /// # Errors
    /// A problem that does not run in its own order.
    pub fn peak_bytes(&self, budget: Budget) -> Result<u64> {
        let before = evaluate(&self.problem, &self.problem.given_order())?;
        Ok(budget.peak_bytes(&before, self.basis, self.usable_bytes))
    }

    /// Returns a peak in the terms of budgets.
    pub fn shown(&self, peak_bytes: u64) -> u64 {
        self.basis.shown(peak_bytes, self.problem.static_bytes())
    }

    /// Returns the hard constraints of a solver, by op; empty where there are none.
    pub fn hard_constraints(&self) -> ByOp<Option<Constraint>> {
        let by_op = self.constraints.by_op(&self.problem);
        match by_op.iter().all(Option::is_none) {
            true => ByOp::default(),
            false => by_op,
        }
    }
}
