//! A lower bound that counts an op once for each time that it must run again.
//!
//! [`super::multi_cut_bound`] pays an op once, however often it runs again. Here positions of the given order divide a schedule into
//! windows, and an op is paid once for each window in which it runs again. A linear program states what every
//! schedule obeys ([`program`]).
//!
//! The first position is where the given order needs the most memory. Then:
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

/// The search ends once the gap is below the first share of the whole cost. Branching starts only if it is below the second.
const CLOSE_GAP: f64 = 0.995 * FAR_GAP;
const BRANCH_GAP: f64 = 0.12;

/// Adding positions and branching may take this many times the work that is allowed for one linear program, but no more than the
/// units below, which take up to two minutes. Adding positions takes one part in [`POSITIONS_SHARE`] of it.
const BRANCH_SHARE: u64 = 70;
const MOST_BRANCH_UNITS: u64 = 18_000_000_000;
const POSITIONS_SHARE: u64 = 4;

/// Rows are added while a round raises the bound by this share of the whole cost. Positions are added until [`MOST_IDLE`] of them in
/// sequence do not: often several are needed before the bound rises.
const LEAST_GAIN: f64 = 1e-3;
const MOST_IDLE: usize = 8;

/// Returns a bound in weight over the cost of running every op once; `above` is what a known plan weighs over that. At least 0.
/// The limit of `work` is that of one linear program; all together may take [`BRANCH_SHARE`] times that.
pub fn intervals(dag: &Dag, cap: i64, weight: &[i64], above: i64, work: &mut Work) -> i64 {
    let Some(first) = fullest(dag, cap) else {
        return 0;
    };
    let (above, total) = (above as f64, dag.total_price as f64);
    let enough = above - CLOSE_GAP * total;
    let units = work.limit - work.done;
    let more = BRANCH_SHARE.saturating_mul(units).min(MOST_BRANCH_UNITS);
    let begun = work.done;
    work.limit = begun + more / POSITIONS_SHARE;
    let program = Program::new(dag, cap, weight, &[first]);
    let (mut program, made) = add_positions(program, Bounded::default(), enough, units, work);
    let mut best = made.bound;
    work.limit = begun + more;
    if best < enough && above - best < BRANCH_GAP * total {
        best = best.max(program.branch(made, enough, work));
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
        program.extend(&mut made);
    }
}

/// Returns the op that needs the most memory when every op runs once, in the given order; `None` if that fits.
fn fullest(dag: &Dag, cap: i64) -> Option<usize> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let mut simulation = Simulation::default();
    simulation.run(dag, &given);
    let fullest = simulation
        .live
        .iter()
        .enumerate()
        .max_by_key(|(t, live)| (**live, *t));
    fullest.filter(|(_, live)| **live > cap).map(|(t, _)| t)
}
