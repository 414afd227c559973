//! Plans whose first computations follow another order than the given one, where that was asked for.
//!
//! The problem is solved in the given order and in a few others ([`orders`]), each as a problem of its own; the cheapest
//! plan counts, so asking for it never makes a plan dearer. Its schedule is one of the given problem, judged there; only
//! its bound speaks of another class.

use super::min_peak::{MinPeak, smallest_feasible};
use super::orders;
use super::{
    Bound, Effort, Failure, Objective, Point, Request, Solution, bound, frontier_given, solve_given,
};
use crate::error::Result;
use crate::plan::constraint::Constraint;
use crate::plan::problem::Problem;
use crate::plan::schedule::{Score, evaluate};

/// A problem with its ops in another order.
struct Moved {
    problem: Problem,
    /// The given index of each of its ops.
    order: Vec<usize>,
}

impl Moved {
    fn all(problem: &Problem) -> Vec<Moved> {
        let orders = orders::lower(problem).into_iter();
        let moved = orders.map(|order| Moved {
            problem: problem.in_order(&order),
            order,
        });
        moved.collect()
    }

    /// What is said by op, in this order; nothing stays nothing.
    fn choices(&self, choices: &[Option<Constraint>]) -> Vec<Option<Constraint>> {
        match choices.is_empty() {
            true => Vec::new(),
            false => self.order.iter().map(|o| choices[*o]).collect(),
        }
    }

    fn request(&self, request: &Request) -> Request {
        Request {
            choices: self.choices(&request.choices),
            // First computations of those follow the given order.
            seeds: Vec::new(),
            ..request.clone()
        }
    }

    fn schedule(&self, schedule: &[usize]) -> Vec<usize> {
        schedule.iter().map(|o| self.order[*o]).collect()
    }

    fn solution(&self, given: &Problem, before: &Score, own: Solution) -> Result<Solution> {
        let schedule = self.schedule(&own.schedule);
        Ok(Solution {
            score: evaluate(given, &schedule)?,
            schedule,
            before: before.clone(),
            bound: Bound {
                class: bound::CLASS_REORDERED,
                ..own.bound
            },
            ..own
        })
    }

    fn floor(&self, own: MinPeak) -> MinPeak {
        MinPeak {
            schedule: self.schedule(&own.schedule),
            op: own.op.map(|o| self.order[o]),
            ..own
        }
    }
}

/// Whether a plan in another order is better by more than what sums differ by that are added up in another order.
fn is_better(objective: Objective, other: &Solution, own: &Solution) -> bool {
    objective.of(&other.score) < objective.of(&own.score) * (1.0 - 1e-9)
}

/// The floor that is reached lower, with what neither can go below.
fn lower_floor(own: MinPeak, other: MinPeak) -> MinPeak {
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

/// See [`super::solve`].
pub(super) fn solve(problem: &Problem, request: &Request) -> Result<Solution, Failure> {
    let before = evaluate(problem, &problem.given_order())?;
    let least = request.objective.of(&before);
    let mut best = solve_given(problem, request);
    for moved in Moved::all(problem) {
        if best
            .as_ref()
            .is_ok_and(|own| request.objective.of(&own.score) <= least)
        {
            break;
        }
        let other = solve_given(&moved.problem, &moved.request(request));
        best = match (best, other) {
            (Err(Failure::Invalid(error)), _) | (_, Err(Failure::Invalid(error))) => {
                return Err(Failure::Invalid(error));
            }
            (Ok(own), Ok(other)) => {
                let other = moved.solution(problem, &before, other)?;
                let turns = is_better(request.objective, &other, &own);
                Ok(if turns { other } else { own })
            }
            (Ok(own), Err(_)) => Ok(own),
            (Err(_), Ok(other)) => Ok(moved.solution(problem, &before, other)?),
            (Err(Failure::Infeasible(mut why)), Err(Failure::Infeasible(other))) => {
                why.floor = lower_floor(why.floor, moved.floor(other.floor));
                Err(Failure::Infeasible(why))
            }
        };
    }
    best
}

/// See [`super::frontier`].
pub(super) fn frontier(
    problem: &Problem,
    request: &Request,
    budgets: &[u64],
) -> Result<Vec<Point>> {
    let before = evaluate(problem, &problem.given_order())?;
    let mut points = frontier_given(problem, request, budgets)?;
    for moved in Moved::all(problem) {
        let others = frontier_given(&moved.problem, &moved.request(request), budgets)?;
        for (point, other) in points.iter_mut().zip(others) {
            let Some(other) = other.solution else {
                continue;
            };
            let other = moved.solution(problem, &before, other)?;
            let own = point.solution.as_ref();
            if own.is_none_or(|own| is_better(request.objective, &other, own)) {
                point.solution = Some(other);
            }
        }
    }
    Ok(points)
}

/// The smallest peak for which a plan in any of the orders was found.
///
/// # Errors
/// A problem whose own order is not a schedule of it.
pub fn smallest_reordered(
    problem: &Problem,
    choices: &[Option<Constraint>],
    effort: Effort,
) -> Result<MinPeak> {
    let mut floor = smallest_feasible(problem, choices, effort)?;
    for moved in Moved::all(problem) {
        if floor.is_proven() {
            break;
        }
        let other = smallest_feasible(&moved.problem, &moved.choices(choices), effort)?;
        floor = lower_floor(floor, moved.floor(other));
    }
    Ok(floor)
}
