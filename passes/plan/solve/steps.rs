//! Plans at smaller budgets, so that a larger budget never costs more.
//!
//! A plan for a smaller budget fits a larger one, and an imperfect search may happen to do better there. So the budgets below
//! the requested one are searched too: at whole percents of what the unplanned step takes above static bytes, from the
//! largest down, each as if it had been requested. Between two such budgets the larger then never costs more. The
//! search ends where a bound proves that nothing smaller is cheaper. With plans near the bound that is at once. The work is
//! limited, so on large problems with wide gaps the guarantee can lapse. A plan that is asked for, and whose gap stays above
//! [`FAR_GAP`](super::local_search::FAR_GAP), is also improved after the search ([`Question::answer`]). Plans at smaller budgets are
//! not, because that takes up to a minute for each.

use super::local_search::FIRST_UNITS;
use super::multi_cut_bound;
use super::question::{Found, JOINT_UNITS_AN_OP, Question};
use super::work::{Effort, Work};
use ckpt_error::Result;

/// Steps from nothing to the peak of the given order.
const STEPS: u128 = 100;

/// Work at smaller budgets in all, and that of a bound there. A search that could exceed it is not begun.
const UNITS: u64 = 600_000_000;
const BOUND_UNITS: u64 = 20_000_000;

/// Budgets at which nothing was found before the descent ends, and how much of the smallest peak known the one asked for
/// must be if nothing was found there either.
const MOST_FAILURES: u32 = 3;
const NEAR_MIN_PEAK: f64 = 0.9;

/// Searches smaller budgets. Returns the best plan found there if it is better than `own`, the plan for the requested budget.
///
/// # Errors
/// A bug, if a search returns no schedule of the problem.
pub fn smaller(question: &mut Question, own: Option<Found>) -> Result<Option<Found>> {
    let (dag, before, query) = (question.dag, question.before, question.query);
    let most = query.effort.work(dag.ops()).stretched;
    let units = match query.effort {
        Effort::First => return Ok(None),
        Effort::Normal => UNITS,
        Effort::Thorough => 10 * UNITS,
        // A first plan takes what it takes, however few the units.
        Effort::Units(n) => n
            .saturating_add(FIRST_UNITS * dag.ops() as u64)
            .saturating_mul(100),
    };
    let limit = question.work + units;
    let bound_units = most.min(BOUND_UNITS + JOINT_UNITS_AN_OP * dag.ops() as u64);
    let mut failures_left = MOST_FAILURES;
    if own.is_none() {
        let min_peak = question.min_peak()?.reached_bytes - before.static_bytes;
        let cap = question.cap(query.budget_bytes).unwrap_or(0);
        if (cap as f64) < NEAR_MIN_PEAK * min_peak as f64 {
            return Ok(None);
        }
        failures_left -= 1;
    }
    let mut best = own;
    let mut is_better = false;
    for step in (1..STEPS).rev() {
        let cap = (u128::from(before.peak_above_static_bytes) * step / STEPS) as u64;
        let budget_bytes = before.static_bytes + cap;
        if budget_bytes >= query.budget_bytes {
            continue;
        }
        let above = best.as_ref().map_or(i64::MAX, |best| question.above(best));
        if failures_left == 0
            || question.work + most > limit
            || is_dearer(question, cap as i64, above, bound_units)
        {
            break;
        }
        match question.find(budget_bytes)? {
            Some(found) => {
                if best
                    .as_ref()
                    .is_none_or(|best| query.objective.prefers(&found.score, &best.score))
                {
                    best = Some(found);
                    is_better = true;
                }
            }
            None => failures_left -= 1,
        }
    }
    Ok(best.filter(|_| is_better))
}

/// Returns whether every schedule within `cap` is proven to cost at least so much, or none fits.
fn is_dearer(question: &mut Question, cap: i64, above: i64, units: u64) -> bool {
    let dag = question.dag;
    // Prices are rounded down, so a bound that is met may be short of the cost by a unit an op.
    let above = above - dag.ops() as i64 - 4;
    let Some(price) = question.bound(cap) else {
        return true;
    };
    if price >= above {
        return true;
    }
    if above > dag.total_price.saturating_mul(1000) {
        return false;
    }
    let mut work = Work::new(units);
    let several = multi_cut_bound::several_positions(dag, cap, &dag.price, above, &mut work);
    question.work += work.done;
    several.is_none_or(|price| price >= above - 2)
}
