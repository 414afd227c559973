//! The solver: the cheapest schedule that it finds within a budget on the true peak, with a proof of how far it is from the best.
//!
//! [`evaluate`](super::schedule::evaluate) measures every result on the problem as it was given. The search works on a reduced
//! form ([`compact`]). A plan is made in stages, each in its own file:
//!
//! - Minimum cuts at full steps make the given order fit ([`cut`], [`repair`]).
//! - Repeats that the budget has room to avoid are taken out ([`incremental_liveness`]).
//! - The search removes stretches of the schedule and rebuilds them while the work lasts ([`local_search`]), with cuts or one
//!   value at a time (`evict`).
//! - Small problems are solved exactly ([`exact`]).
//!
//! [`bound`] proves a lower bound, and the search stops when the plan meets it. Where the gap stays wide, [`multi_cut_bound`]
//! and [`interval_bound`] prove better ones. [`steps`] tries smaller budgets, [`reorder`] other orders of first runs, and [`moving`] bounds schedules
//! that may offload. `expanded` is the form in which the solver sees offloading.
//!
//! Work is counted in units, never in seconds, and nothing depends on threads: the same query gives the same plan.

pub mod answer;
pub mod bound;
pub mod compact;
pub mod cut;
mod evict;
pub mod exact;
pub(crate) mod expanded;
pub mod flow;
pub mod given;
pub mod incremental_liveness;
pub mod interval_bound;
pub mod linear_program;
pub mod local_search;
pub mod min_peak;
pub mod moving;
pub mod multi_cut_bound;
pub mod orders;
pub mod question;
pub mod reorder;
pub mod repair;
mod rounding;
pub mod simulate;
pub mod steps;
pub mod work;
pub mod writer;

use super::problem::Problem;
use answer::{Query, Solution};
use ckpt_error::Result;
use min_peak::MinPeak;

pub use moving::bound_moving;

/// Solves a problem within a budget. The inner error is the smallest peak for which a plan is known, where none fits.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn solve(problem: &Problem, query: &Query) -> Result<Result<Solution, Box<MinPeak>>> {
    match query.reorder {
        true => reorder::solve(problem, query),
        false => given::solve_given(problem, query),
    }
}

/// Solves a problem within many budgets. A schedule is reused at every larger budget at which nothing cheaper was found, so a
/// larger budget never costs more. Returns one solution for each budget, in their order; `None` where none was found.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn frontier(
    problem: &Problem,
    query: &Query,
    budgets: &[u64],
) -> Result<Vec<Option<Solution>>> {
    match query.reorder {
        true => reorder::frontier(problem, query, budgets),
        false => given::frontier_given(problem, query, budgets),
    }
}

#[cfg(test)]
mod tests;
