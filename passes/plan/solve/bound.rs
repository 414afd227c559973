//! A lower bound on what any schedule within the budget costs.
//!
//! Take the moment at which the op at position p of the given order first runs. Whatever later first computations or
//! outputs read and earlier ops made is resident then, or its maker runs again afterwards, and so on for what that
//! reads. Resident bytes fit into the budget. Dropping everything else that a schedule must satisfy, and giving the
//! budget a price λ (Lagrange), leaves one minimum cut; its value minus λ · budget is a lower bound for every λ ≥ 0, and
//! the hull gives the best λ. The bound holds for any number of recomputations. The best of several positions counts.
//!
//! What waits elsewhere at that moment has left before it, through one lane, and the time until then is no less than what
//! that takes, and no less than what earlier ops take. Of a share μ of each, the sum is a lower bound too ([`Way`]).

use super::cut::{Bend, Cut, Scene};
use super::dag::Dag;
use super::simulate::Simulation;
use super::work::Work;

/// Schedules that the bound speaks of.
pub const CLASS: &str =
    "every schedule whose first computations follow the given order, any number of recomputations";

/// And those that it speaks of where another order than the given one was chosen.
pub const CLASS_REORDERED: &str = "every schedule whose first computations follow the order of this plan, any number of recomputations";

/// Added to a class where results may also wait elsewhere.
pub const CLASS_MOVING: &str = ", any of the results that may leave offloaded";

/// A bound in weight over the cost of running every op once; `None` if no schedule of the class fits.
pub fn one_position(
    dag: &Dag,
    cap: i64,
    weight: &[i64],
    positions: usize,
    work: &mut Work,
) -> Option<i64> {
    let none = [Way {
        elsewhere: Vec::new(),
        lane_share: 0.0,
    }];
    one_position_moving(dag, cap, (weight, &none), (&[], positions), work)
}

/// What it weighs to have a value wait elsewhere, by value, if so much of the time before the position is what the lane out
/// takes, and the rest what ops take. Several are tried in the order of their shares.
pub struct Way {
    pub elsewhere: Vec<Option<i64>>,
    /// From 0 to 1.
    pub lane_share: f64,
}

/// Positions at which all ways are tried; at others only the first.
const ALL_WAYS: usize = 3;

/// The same where values may wait elsewhere. A value that is read after the position is then
/// resident, or made again, or brought back, and that is paid. `ahead` is no less than what all ops weigh before
/// each of the dag, once; it may be empty where no way has a share of a lane.
pub fn one_position_moving(
    dag: &Dag,
    cap: i64,
    (weight, ways): (&[i64], &[Way]),
    (ahead, positions): (&[f64], usize),
    work: &mut Work,
) -> Option<i64> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let mut simulation = Simulation::default();
    simulation.run(dag, &given);
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
        let tried = if n < ALL_WAYS { ways.len() } else { 1 };
        // What they prove rises with their share of the lane, and falls again: it is the least of sums that are linear in it.
        let mut last = f64::NEG_INFINITY;
        for way in &ways[..tried.min(ways.len())] {
            let prices = (weight, way.elsewhere.as_slice());
            let (value, _) = at_step(dag, cap, prices, &given, step, work)?;
            let ops = way.lane_share * ahead.get(step).copied().unwrap_or(0.0);
            // Products of prices and sizes are rounded down, their difference may be off by a few units in the last place.
            let proven = value * (1.0 - 1e-9) - ops * (1.0 + 1e-9);
            if proven < last {
                break;
            }
            (best, last) = (best.max(proven as i64 - 1), proven);
        }
    }
    Some(best.max(0))
}

/// What the position at `step` of the given order proves, and the price of a byte at which it does; `None` if nothing
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
