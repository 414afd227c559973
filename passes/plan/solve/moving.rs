//! A lower bound on schedules that may also offload results.

use super::bound;
use super::compact::Dag;
use super::work::{BOUND_OPS, Work};
use crate::constraint::Constraint;
use crate::index::ByOp;
use crate::objective::Objective;
use crate::problem::{Problem, Wait};
use crate::schedule::evaluate;
use ckpt_error::Result;

/// Returns a lower bound on the cost of every schedule within a budget, if results may also be offloaded. `elsewhere` is the
/// least that offloading the results of an op takes, by op. The bound is in the unit of costs, for the whole step; `None` if
/// no schedule fits even so.
///
/// # Errors
/// A problem whose own order is not a schedule of it.
pub fn bound_moving(
    problem: &Problem,
    budget_bytes: u64,
    constraints: &ByOp<Option<Constraint>>,
    elsewhere: &ByOp<Option<Wait>>,
) -> Result<Option<f64>> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, Objective::Cost, constraints)?;
    let Some(cap) = budget_bytes.checked_sub(before.static_bytes) else {
        return Ok(None);
    };
    let cap = cap.min(i64::MAX as u64 / 4) as i64;
    let unit = dag.unit.max(f64::MIN_POSITIVE);
    let has_lane = elsewhere.iter().flatten().any(|w| w.lane_us > 0.0);
    let elsewhere = |v: usize, shares: f64| {
        let value = &problem.values[dag.value_in_problem[v]];
        let maker = value.producer?;
        let wait = elsewhere.at(maker).copied().flatten()?;
        let cost = (2.0 - shares) * wait.own_us + shares * wait.lane_us;
        let all = problem.result_bytes(maker);
        Some((cost / unit * value.bytes as f64 / all.max(1) as f64 * (1.0 - 1e-12)) as i64)
    };
    let way = |out: f64, back: f64| bound::Way {
        weight: dag
            .price
            .iter()
            .map(|price| match back > 0.0 {
                true => (*price as f64 * (1.0 - back) * (1.0 - 1e-12)) as i64,
                false => *price,
            })
            .collect(),
        elsewhere: (0..dag.values())
            .map(|v| elsewhere(v, out + back))
            .collect(),
    };
    let mut sum = 0.0;
    let sums = problem.ops.iter().map(|op| {
        let before = sum;
        sum += op.cost;
        before
    });
    let sums: ByOp<f64> = sums.collect();
    let mut ahead: Vec<f64> = dag.op_in_problem.iter().map(|o| sums[*o] / unit).collect();
    ahead.push(sum / unit);
    let moving = bound::Moving {
        way: &way,
        shares: if has_lane {
            LANE_SHARES
        } else {
            &LANE_SHARES[..1]
        },
        ahead: &ahead,
    };
    let positions = (BOUND_OPS / dag.ops().max(1)).clamp(1, 8);
    let mut work = Work::new(u64::MAX);
    let more = bound::one_position_moving(&dag, cap, &moving, positions, &mut work);
    Ok(more.map(|more| before.cost + more as f64 * dag.unit))
}

/// Shares of the time before a position that count for outgoing transfers, and of the time after it for incoming ones, to
/// be tried in turn.
const LANE_SHARES: &[f64] = &[
    0.0, 0.0005, 0.002, 0.006, 0.015, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0,
];
