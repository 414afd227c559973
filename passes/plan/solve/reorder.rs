//! Schedules whose first runs follow another order than the given one.
//!
//! The problem is solved in the given order and in a few others ([`orders`]), each as a problem of its own. The cheapest plan
//! counts, so `--reorder` never makes a plan dearer. Its schedule is evaluated on the given problem. Only its bound is about
//! another class.

use super::answer::{Bound, Query, Solution};
use super::bound;
use super::given::{frontier_given, solve_given};
use super::min_peak::{MinPeak, min_peak};
use super::orders;
use crate::constraint::Constraint;
use crate::index::{ByOp, OpIdx};
use crate::objective::Objective;
use crate::problem::Problem;
use crate::schedule::evaluate;
use ckpt_error::Result;

/// A problem with its ops in another order.
struct Moved {
    problem: Problem,
    /// The given index of each of its ops.
    order: ByOp<OpIdx>,
}

impl Moved {
    fn all(problem: &Problem) -> Vec<Moved> {
        let orders = orders::lower(problem).into_iter();
        let moved = orders.map(|order| Moved {
            problem: problem.in_order(&order),
            order: order.into(),
        });
        moved.collect()
    }

    /// Returns constraints by op in this order; none stay none.
    fn constraints(&self, constraints: &ByOp<Option<Constraint>>) -> ByOp<Option<Constraint>> {
        match constraints.is_empty() {
            true => ByOp::default(),
            false => self.order.iter().map(|o| constraints[*o]).collect(),
        }
    }

    fn query(&self, query: &Query) -> Query {
        Query {
            constraints: self.constraints(&query.constraints),
            // First runs of those follow the given order.
            seeds: Vec::new(),
            ..query.clone()
        }
    }

    fn schedule(&self, schedule: &[OpIdx]) -> Vec<OpIdx> {
        schedule.iter().map(|o| self.order[*o]).collect()
    }

    fn solution(&self, given: &Problem, own: &Solution) -> Result<Solution> {
        let schedule = self.schedule(&own.schedule);
        Ok(Solution {
            score: evaluate(given, &schedule)?,
            schedule,
            bound: Bound {
                class: bound::CLASS_REORDERED,
                ..own.bound
            },
            ..*own
        })
    }

    fn min_peak(&self, own: MinPeak) -> MinPeak {
        MinPeak {
            schedule: self.schedule(&own.schedule),
            op: own.op.map(|o| self.order[o]),
            ..own
        }
    }
}

/// Returns whether a plan in another order is better by more than what sums differ by that are added up in another order.
fn is_better(objective: Objective, other: &Solution, own: &Solution) -> bool {
    objective.of(&other.score) < objective.of(&own.score) * (1.0 - 1e-9)
}

/// Returns the lower of two peaks, with the bound that holds for both.
fn lower_peak(own: MinPeak, other: MinPeak) -> MinPeak {
    let least_bytes = own.least_bytes.min(other.least_bytes);
    let best = if other.reached_bytes < own.reached_bytes {
        other
    } else {
        own
    };
    MinPeak {
        least_bytes,
        ..best
    }
}

/// Solves a query in the given order and in others; see [`solve_given`].
///
/// # Errors
/// A problem that does not run in its own order.
pub fn solve(problem: &Problem, query: &Query) -> Result<Result<Solution, Box<MinPeak>>> {
    let before = evaluate(problem, &problem.given_order())?;
    let least = query.objective.of(&before);
    let mut best = solve_given(problem, query)?;
    for moved in Moved::all(problem) {
        if best
            .as_ref()
            .is_ok_and(|own| query.objective.of(&own.score) <= least)
        {
            break;
        }
        let other = match solve_given(&moved.problem, &moved.query(query))? {
            Ok(other) => Ok(moved.solution(problem, &other)?),
            Err(other) => Err(moved.min_peak(*other)),
        };
        best = match (best, other) {
            (Ok(own), Ok(other)) if is_better(query.objective, &other, &own) => Ok(other),
            (Err(_), Ok(other)) => Ok(other),
            (Ok(own), _) => Ok(own),
            (Err(own), Err(other)) => Err(Box::new(lower_peak(*own, other))),
        };
    }
    Ok(best)
}

/// Solves many budgets in the given order and in others; see [`frontier_given`].
///
/// # Errors
/// A problem that does not run in its own order.
pub fn frontier(
    problem: &Problem,
    query: &Query,
    budgets: &[u64],
) -> Result<Vec<Option<Solution>>> {
    let mut solutions = frontier_given(problem, query, budgets)?;
    for moved in Moved::all(problem) {
        let others = frontier_given(&moved.problem, &moved.query(query), budgets)?;
        for (own, other) in solutions.iter_mut().zip(others) {
            let Some(other) = other else {
                continue;
            };
            let other = moved.solution(problem, &other)?;
            if own
                .as_ref()
                .is_none_or(|own| is_better(query.objective, &other, own))
            {
                *own = Some(other);
            }
        }
    }
    Ok(solutions)
}

/// Returns the smallest peak for which a plan in any of the orders was found.
///
/// # Errors
/// A problem whose own order is not a schedule of it.
pub fn min_peak_reordered(problem: &Problem, query: &Query) -> Result<MinPeak> {
    let mut lowest = min_peak(problem, query)?;
    for moved in Moved::all(problem) {
        if lowest.is_proven() {
            break;
        }
        let other = min_peak(&moved.problem, &moved.query(query))?;
        lowest = lower_peak(lowest, moved.min_peak(other));
    }
    Ok(lowest)
}
