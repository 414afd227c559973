//! A lower bound on the cost of every schedule within the budget.
//!
//! Take the moment at which the op at position p of the given order first runs. Some values that earlier ops made are read by
//! later first runs, or are outputs. Each of these is resident at that moment, or its maker runs again afterwards; the
//! same holds for what that run reads. Resident bytes fit into the budget. All other demands on a schedule are dropped. With
//! a price λ for a byte of the budget (a Lagrange multiplier) what remains is one minimum cut. Its value minus λ · budget is a
//! lower bound for every λ ≥ 0, and the hull gives the best λ. The bound holds for any number of recomputations. The
//! best of several positions counts.
//!
//! Results that are offloaded at that moment have left before it, through one lane. So the time until that moment is at least
//! the time of these transfers, and at least the time of the earlier ops. For a share μ of the one and 1 − μ of the
//! other, the sum is a lower bound too. The same holds after the moment with a share ν of the lane back, against later ops
//! and repeats ([`Way`]).

use super::compact::Dag;
use super::cut::{Bend, Cut, Scene};
use super::simulate::Simulation;
use super::work::Work;

/// The schedules that the bound covers; see [`class`].
pub const CLASS: &str =
    "whose first computations follow the given order, any number of recomputations";

/// The schedules that the bound covers where another order than the given one was chosen.
pub const CLASS_REORDERED: &str =
    "whose first computations follow the order of this plan, any number of recomputations";

/// Added to a class where results may also be offloaded.
pub const CLASS_MOVING: &str = ", any of the results that may leave offloaded";

/// Returns a class of schedules in words. Overrides are hard constraints: the bound says nothing of schedules against them.
pub fn class(of: &str, is_overridden: bool) -> String {
    match is_overridden {
        true => format!("every schedule that obeys the overrides and {of}"),
        false => format!("every schedule {of}"),
    }
}

/// Returns a bound in weight over the cost of running every op once; `None` if no schedule of the class fits.
pub fn one_position(
    dag: &Dag,
    cap: i64,
    weight: &[i64],
    positions: usize,
    work: &mut Work,
) -> Option<i64> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    best_of(dag, cap, (&given, positions), work, &mut |_, step, work| {
        let (value, _) = single(dag, cap, weight, &given, step, work)?;
        Some(value * (1.0 - 1e-9))
    })
}

/// How time is told apart into what ops take and what transfers do.
pub struct Way {
    /// The weight of running an op again, by op.
    pub weight: Vec<i64>,
    /// The weight of offloading a value, by value.
    pub elsewhere: Vec<Option<i64>>,
}

/// A question about values that may be offloaded.
pub struct Moving<'a> {
    /// The way of a share of the lane out before a position, and of the lane back after it, each from 0 to 1. What ops weigh
    /// after the position counts for as much less as the lane back counts, what ops weigh before it for as much less as the
    /// lane out; the latter and the ops' first runs are taken off here.
    pub way: &'a dyn Fn(f64, f64) -> Way,
    /// Shares to try in turn, rising, the first of them 0; that one alone where transfers have no lane.
    pub shares: &'a [f64],
    /// No less than what all ops weigh before each of the dag, once, and then what all weigh.
    pub ahead: &'a [f64],
}

/// Positions at which all ways are tried; at others only the first.
const ALL_WAYS: usize = 3;

/// Returns the bound where values may be offloaded. A value that is read after the position is then resident, recomputed or
/// fetched, at a price.
pub fn one_position_moving(
    dag: &Dag,
    cap: i64,
    moving: &Moving,
    positions: usize,
    work: &mut Work,
) -> Option<i64> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let plain = (moving.way)(0.0, 0.0);
    let all = moving.ahead.last().copied().unwrap_or(0.0);
    best_of(dag, cap, (&given, positions), work, &mut |n, step, work| {
        let before = moving.ahead[step];
        let mut proven = |out: f64, back: f64| -> Option<f64> {
            let own = (out > 0.0 || back > 0.0).then(|| (moving.way)(out, back));
            let way = own.as_ref().unwrap_or(&plain);
            let prices = (way.weight.as_slice(), way.elsewhere.as_slice());
            let (value, _) = at_step(dag, cap, prices, &given, step, work)?;
            let ops = out * before + back * (all - before);
            // Products of prices and sizes are rounded down, their difference may be off by a few units in the last place.
            Some(value * (1.0 - 1e-9) - ops * (1.0 + 1e-9))
        };
        let mut best = (proven(0.0, 0.0)?, 0.0);
        if n >= ALL_WAYS {
            return Some(best.0);
        }
        // What they prove rises with a share, and falls again: it is the least of sums that are linear in it.
        for out in &moving.shares[1..] {
            let found = proven(*out, 0.0)?;
            if found < best.0 {
                break;
            }
            best = (found, *out);
        }
        let (mut most, out) = best;
        for back in &moving.shares[1..] {
            let found = proven(out, *back)?;
            if found < most {
                break;
            }
            most = found;
        }
        Some(most)
    })
}

/// Returns the most that some positions prove, which stand where the given order has more resident than may be: those with the most
/// are tried, then some of the others. `prove` is given how many were tried before, and the position.
fn best_of(
    dag: &Dag,
    cap: i64,
    (given, positions): (&[u32], usize),
    work: &mut Work,
    prove: &mut dyn FnMut(usize, usize, &mut Work) -> Option<f64>,
) -> Option<i64> {
    let mut simulation = Simulation::default();
    simulation.run(dag, given);
    let live = &simulation.live;
    work.spend(3 * given.len() as u64);
    let mut tops: Vec<usize> = (0..live.len())
        .filter(|t| {
            live[*t] > cap
                && (*t == 0 || live[*t] >= live[*t - 1])
                && (*t + 1 == live.len() || live[*t] >= live[*t + 1])
        })
        .collect();
    tops.sort_by_key(|t| (std::cmp::Reverse(live[*t]), *t));
    let stride = (tops.len() / positions.max(1)).max(1);
    let mut best = 0i64;
    for (n, step) in tops.into_iter().enumerate() {
        if n > 2 && n % stride != 0 {
            continue;
        }
        let proven = prove(n, step, work)?;
        best = best.max(proven as i64 - 1);
    }
    Some(best)
}

/// Returns what the position at `step` of the given order proves, and the price of a byte at which it does; `None` if nothing
/// fits there.
pub(super) fn single(
    dag: &Dag,
    cap: i64,
    weight: &[i64],
    given: &[u32],
    step: usize,
    work: &mut Work,
) -> Option<(f64, f64)> {
    at_step(dag, cap, (weight, &[]), given, step, work)
}

fn at_step(
    dag: &Dag,
    cap: i64,
    (weight, elsewhere): (&[i64], &[Option<i64>]),
    given: &[u32],
    step: usize,
    work: &mut Work,
) -> Option<(f64, f64)> {
    let bend = Bend {
        distance: 0.0,
        extend: true,
        penalty: &[],
        jitter: &[],
        slack: 0.0,
        elsewhere,
    };
    let scene = Scene::of_bound(dag, given, step);
    let mut cut = Cut::new(dag, &scene, cap, weight, &bend, None);
    let room = cut.room as f64;
    let mut best = (0.0f64, 0.0);
    let fits = cut
        .around(0.0, &mut |point| {
            let value = point.worth - point.price * room;
            if value > best.0 {
                best = (value, point.price);
            }
        })
        .1
        .is_some();
    work.spend(cut.visits() + 4 * given.len() as u64);
    fits.then_some(best)
}
