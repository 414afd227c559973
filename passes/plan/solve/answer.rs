//! What the solver is asked, and what it answers.

use super::bound;
use super::work::Effort;
use crate::constraint::{Constraint, first_violation};
use crate::index::{ByOp, OpIdx};
use crate::objective::Objective;
use crate::problem::Problem;
use crate::schedule::{Score, evaluate, percent};

/// A question to the solver.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// The budget on the peak, static bytes included.
    pub budget_bytes: u64,
    /// What to minimize: cost or FLOPs.
    pub objective: Objective,
    /// The work that the search may take.
    pub effort: Effort,
    /// Hard constraints, by op of the problem; empty for none.
    pub constraints: ByOp<Option<Constraint>>,
    /// Schedules to start from, such as those of policies. The answer is never worse than one that fits and honours
    /// the constraints.
    pub seeds: Vec<Vec<OpIdx>>,
    /// Whether first runs may follow another order than the given one.
    pub reorder: bool,
    /// Whether work ends with the search for a plan. A wide gap to the lower bound then stays wide, and better plans that the proof would
    /// lead to are not found.
    pub skips_proof: bool,
}

/// Returns the seeds that are schedules of the problem and honour the constraints, each with its peak in bytes.
pub fn allowed_seeds<'a>(
    problem: &'a Problem,
    query: &'a Query,
) -> impl Iterator<Item = (u64, &'a Vec<OpIdx>)> {
    let constraints = &query.constraints;
    query.seeds.iter().filter_map(move |seed| {
        let peak_bytes = evaluate(problem, seed).ok()?.peak_bytes;
        let is_allowed =
            constraints.is_empty() || first_violation(problem, seed, constraints).is_none();
        is_allowed.then_some((peak_bytes, seed))
    })
}

/// A proven lower bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Of the objective, in its unit, for the whole step.
    pub lower: f64,
    /// The same as overhead over running every op once, in percent.
    pub lower_pct: f64,
    /// The schedules it speaks of.
    pub class: &'static str,
    /// Whether the plan meets it.
    pub met: bool,
}

/// A schedule within the budget.
#[derive(Clone, Debug)]
pub struct Solution {
    /// Op indices; repeats are recomputation.
    pub schedule: Vec<OpIdx>,
    /// Peak, cost and FLOPs of the schedule.
    pub score: Score,
    /// What no schedule of its class within the budget goes below.
    pub bound: Bound,
    /// What the plan may be above the best of its class, in percent of running every op once.
    pub gap_pct: f64,
}

impl Solution {
    /// Returns a plan with a bound, both in the unit of `objective`; the bound is at most the plan's own cost. `before` is
    /// the score of running every op once.
    pub fn new(
        (schedule, score): (Vec<OpIdx>, Score),
        lower: f64,
        objective: Objective,
        before: &Score,
    ) -> Solution {
        let (base, own) = (objective.of(before), objective.of(&score));
        let lower = lower.min(own);
        let gap_pct = percent(own - lower, base).max(0.0);
        Solution {
            bound: Bound {
                lower,
                lower_pct: percent(lower - base, base),
                class: bound::CLASS,
                met: gap_pct <= 1e-6,
            },
            gap_pct,
            schedule,
            score,
        }
    }
}
