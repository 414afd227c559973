//! The one way to a plan.

use super::infeasible::Failure;
use super::input::PlanInput;
use super::offload;
use super::plan::Plan;
use super::prefetch;
use super::request::{Goal, PlanRequest};
use super::solve::work::Effort;
use ckpt_error::Result;
use std::time::Instant;

/// A plan, with what making it took.
#[derive(Clone, Debug)]
pub struct PlanOutcome {
    /// The plan, for the problem of the [`PlanInput`].
    pub plan: Plan,
    /// The time that planning took, in seconds.
    pub seconds: f64,
    /// The smallest peak for which a plan is known. Only for budgets, and not with [`Effort::First`]: the search for it
    /// takes longer than a first plan. `None` also where the request leaves the search out.
    pub min_peak_bytes: Option<u64>,
}

/// Plans a step.
///
/// # Errors
/// [`Failure::Infeasible`] where no plan fits the budget; a policy that does not apply; a stored plan for another problem;
/// offloading that is impossible.
pub fn plan(input: &PlanInput, request: &PlanRequest) -> Result<PlanOutcome, Failure> {
    let started = Instant::now();
    let tried = input.chunks.tried.as_ref();
    let mut plan = match (request.budget(), tried) {
        (Some(asked), Some(tried)) => {
            offload::plan(input, &request.with_budget(tried.budget(asked)))?
        }
        _ => offload::plan(input, request)?,
    };
    if request.offload.streams && !matches!(request.goal, Goal::Stored(_)) {
        plan = prefetch::early(input, plan, request.offload.in_flight)?;
    }
    (plan.loss_chunks, plan.mlp_chunks) = (input.chunks.loss, input.chunks.mlp);
    if let Some(tried) = tried {
        tried.qualify(&mut plan);
    }
    let seconds = started.elapsed().as_secs_f64();
    let min_peak_bytes = match request.budget() {
        Some(_) if request.wants_min_peak && request.effort != Effort::First => {
            let reached_bytes = offload::smallest_peak(input, request)?;
            Some(reached_bytes.min(plan.after.peak_bytes))
        }
        _ => None,
    };
    Ok(PlanOutcome {
        plan,
        seconds,
        min_peak_bytes,
    })
}
