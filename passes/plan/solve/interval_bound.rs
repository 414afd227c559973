//! A lower bound that counts an op once for each time that it must run again.
//!
//! [`super::multi_cut_bound`] pays an op once, however often it runs again. Here positions of the given order divide a schedule into
//! windows, and an op is paid once for each window in which it runs again. A linear program states what every
//! schedule obeys ([`program`]).
//!
//! Where the gap stays wide, positions whose bytes are worth nothing are left out. Then:
//!
//! 1. Rows that the last solution violates are added ([`Program::tighten`]), and a schedule is built from the solution. If first runs
//!    in it exceed the budget, the one that needs the most memory becomes a position too. This goes on while the bound rises.
//! 2. The number of repeats of an op, or of all ops of one weight, is fixed from below and above ([`branch`]).

mod branch;
mod program;

use super::compact::Dag;
use super::linear_program::Bounded;
use super::local_search::FAR_GAP;
use super::simulate::Simulation;
use super::work::Work;
use program::Program;

/// Limits of the number of stretches of full steps. Each gives up to two candidate positions. Their number times that of ops stays
/// near [`CANDIDATE_OPS`]: with more candidates, the linear program is not solved within its work limit.
const LEAST_STRETCHES: usize = 12;
const MOST_STRETCHES: usize = 40;
const CANDIDATE_OPS: usize = 14_000;

/// Most positions at first.
const MOST_POSITIONS: usize = 8;

/// Most ops at all positions together; large graphs get fewer positions.
const MOST_OPS: usize = 6_000;

/// Positions whose bytes are worth a smaller share of the whole cost are left out.
const LEAST_PRICE: f64 = 1e-5;

/// The share of the work that finds which positions matter.
const CHOICE_SHARE: u64 = 3;

/// Most rounds that add pairs of positions before positions that prove nothing are left out.
const PAIR_ROUNDS: usize = 4;

/// The search ends once the gap is below the first share of the whole cost. Branching starts only if it is below the second.
const CLOSE_GAP: f64 = 0.995 * FAR_GAP;
const BRANCH_GAP: f64 = 0.12;

/// Adding positions and branching may take this many times the work of the first bound, but no more than the units below, which
/// take about a minute on two cores. Adding positions takes one part in [`POSITIONS_SHARE`] of it.
const BRANCH_SHARE: u64 = 70;
const MOST_BRANCH_UNITS: u64 = 25_000_000_000;
const POSITIONS_SHARE: u64 = 2;

/// Rows are added while a round raises the bound by this share of the whole cost. Positions are added until [`MOST_IDLE`] of them in
/// sequence do not. Each round takes one part in [`ROUND_SHARE`] of the work of the first bound.
const LEAST_GAIN: f64 = 1e-3;
const MOST_IDLE: usize = 3;
const ROUND_SHARE: u64 = 3;

/// Returns a bound in weight over the cost of running every op once; `above` is what a known plan weighs over that. At least 0.
pub fn intervals(dag: &Dag, cap: i64, weight: &[i64], above: i64, work: &mut Work) -> i64 {
    let mut positions = positions(dag, cap);
    if positions.is_empty() {
        return 0;
    }
    let (start, limit) = (work.done, work.limit);
    let (above, total) = (above as f64, dag.total_price as f64);
    let mut best = 0.0f64;
    let most = (MOST_OPS / dag.ops().max(1)).clamp(2, MOST_POSITIONS);
    if positions.len() > most {
        // The positions whose bytes are worth most.
        let program = Program::new(dag, cap, weight, &positions);
        work.limit = start + (limit - start) / CHOICE_SHARE;
        let made = program.solve(above, &Bounded::default(), work);
        best = best.max(made.bound);
        let prices = program.prices(&made);
        let mut order: Vec<usize> = (0..positions.len()).collect();
        order.sort_by(|a, b| prices[*b].total_cmp(&prices[*a]).then(a.cmp(b)));
        order.truncate(most);
        order.sort_unstable();
        positions = order.into_iter().map(|k| positions[k]).collect();
    }
    work.limit = limit;
    let mut program = Program::new(dag, cap, weight, &positions);
    let mut made = program.solve(above, &Bounded::default(), work);
    for _ in 0..PAIR_ROUNDS {
        if made.bound >= above || work.spent() || program.join_pairs(&made.point) == 0 {
            break;
        }
        made = program.solve(above, &made, work);
    }
    best = best.max(made.bound);
    let enough = above - CLOSE_GAP * total;
    if best < above - FAR_GAP * total {
        // Without the positions that prove nothing, the program is much smaller.
        let prices = program.prices(&made);
        let priced: Vec<usize> = (positions.iter().zip(&prices))
            .filter(|(_, price)| **price > LEAST_PRICE * total)
            .map(|(position, _)| *position)
            .collect();
        if (1..positions.len()).contains(&priced.len()) {
            program = Program::new(dag, cap, weight, &priced);
            made = Bounded::default();
        }
        let units = limit - start;
        let more = BRANCH_SHARE.saturating_mul(units).min(MOST_BRANCH_UNITS);
        let begun = work.done;
        work.limit = begun + more / POSITIONS_SHARE;
        (program, made) = add_positions(program, made, enough, units / ROUND_SHARE, work);
        best = best.max(made.bound);
        work.limit = begun + more;
        if best < enough && above - best < BRANCH_GAP * total {
            best = best.max(program.branch(made, enough, work));
        }
    }
    (best.min(above) as i64 - 1).max(0)
}

/// Adds rows and positions while they raise the bound, up to `enough`. Each round takes at most `units` of work. Returns the program
/// as it was when the bound last rose, and its solution.
fn add_positions<'a>(
    mut program: Program<'a>,
    mut made: Bounded,
    enough: f64,
    units: u64,
    work: &mut Work,
) -> (Program<'a>, Bounded) {
    let limit = work.limit;
    let least_gain = LEAST_GAIN * program.dag.total_price as f64;
    let mut best: Option<(Program, Bounded)> = None;
    let mut idle = 0;
    loop {
        loop {
            let before = made.bound;
            work.limit = work.done + units;
            made = program.solve_fixing(enough, &made, work);
            let is_idle = made.bound < before + least_gain;
            if made.bound >= enough || is_idle || program.tighten(&made.point) == 0 {
                break;
            }
        }
        let is_better = |best: &(Program, Bounded)| made.bound > best.1.bound + least_gain;
        idle += 1;
        if best.as_ref().is_none_or(is_better) {
            best = Some((program.clone(), made.clone()));
            idle = 0;
        }
        let is_over = made.bound >= enough || work.done > limit || idle == MOST_IDLE;
        let Some(step) = program.fullest(&made.point).filter(|_| !is_over) else {
            return best.unwrap_or((program, made));
        };
        program.add(step);
        program.extend(&mut made.duals);
        program.extend(&mut made.last);
    }
}

/// Returns positions, ascending: of every stretch of full steps the one with the most resident and the one that takes the most by
/// itself.
fn positions(dag: &Dag, cap: i64) -> Vec<usize> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let mut simulation = Simulation::default();
    simulation.run(dag, &given);
    let live = &simulation.live;
    let full: Vec<usize> = (0..live.len()).filter(|t| live[*t] > cap).collect();
    let stretches = (CANDIDATE_OPS / dag.ops().max(1)).clamp(LEAST_STRETCHES, MOST_STRETCHES);
    let mut positions = Vec::new();
    for stretch in full.chunks(full.len().div_ceil(stretches).max(1)) {
        positions.extend(stretch.iter().max_by_key(|t| (live[**t], **t)));
        positions.extend(
            stretch
                .iter()
                .max_by_key(|t| (dag.least_bytes(**t as u32), **t)),
        );
    }
    positions.sort_unstable();
    positions.dedup();
    positions
}
