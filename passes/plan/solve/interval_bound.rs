//! A lower bound that counts an op once for each time that it must run again.
//!
//! [`super::multi_cut_bound`] pays an op once, however often it runs again. Here positions of the given order divide a schedule into
//! windows, and an op is paid once for each window in which it runs again. A linear program states what every
//! schedule obeys ([`program`]).
//!
//! The first position is where the given order needs the most memory. Then:
//!
//! 1. While the bound rises, the program grows: it gets rows that the last solution violates ([`Program::tighten`]), and one more
//!    position ([`Program::next_position`]).
//! 2. The number of repeats of an op, or of all ops of one weight, is fixed from below and above ([`branch`]).
//! 3. If a gap to the known plan remains, another rule chooses positions anew ([`Intervals::choose_again`]). Step 2 then runs once
//!    more, with more work.

mod branch;
mod position;
mod program;

use super::compact::Dag;
use super::linear_program::Bounded;
use super::local_search::FAR_GAP;
use super::simulate::{Simulation, drop_unread};
use super::work::Work;
use position::Rule;
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

/// A solution keeps fractions of values. A schedule made from it keeps values whose fraction exceeds one of these shares.
const STARTS: [f64; 3] = [0.25, 0.5, 0.75];
/// Most of these schedules that are kept for each choice of positions. The search for a better plan starts from them.
const MOST_STARTS: usize = 32;

/// The bound, as far as it is proven.
pub struct Intervals<'a> {
    /// The program of the first position.
    first: Program<'a>,
    /// Most work on one linear program.
    units: u64,
    /// The program of all positions.
    program: Program<'a>,
    made: Bounded,
    /// The best bound.
    best: f64,
    /// Schedules made from solutions of the program. They cost about as much as the bound, and may exceed the budget.
    pub starts: Vec<Vec<u32>>,
}

impl<'a> Intervals<'a> {
    /// Adds positions and proves a first bound; `None` if every op can run once. `above` is what a known plan weighs over that.
    /// The limit of `work` is that of one linear program; all together may take [`BRANCH_SHARE`] times that.
    pub fn new(
        dag: &'a Dag,
        cap: i64,
        weight: &'a [i64],
        above: i64,
        work: &mut Work,
    ) -> Option<Intervals<'a>> {
        let units = work.limit - work.done;
        let more = BRANCH_SHARE.saturating_mul(units).min(MOST_BRANCH_UNITS);
        let program = Program::new(dag, cap, weight, &[first_position(dag, cap)?]);
        work.limit = work.done + more;
        Some(Intervals::with_positions(
            program,
            Rule::Dearest,
            above,
            units,
            work,
        ))
    }

    /// Adds positions, which `rule` chooses, to the program of the first one.
    fn with_positions(
        program: Program<'a>,
        rule: Rule,
        above: i64,
        units: u64,
        work: &mut Work,
    ) -> Intervals<'a> {
        let limit = work.limit;
        work.limit = work.done + limit.saturating_sub(work.done) / POSITIONS_SHARE;
        let mut made = Intervals {
            first: program.clone(),
            units,
            program,
            made: Bounded::default(),
            best: 0.0,
            starts: Vec::new(),
        };
        made.add_positions(above, rule, work);
        work.limit = limit;
        made
    }

    /// Builds a second program, in which another rule chooses the positions, and keeps the program with the higher bound. Neither rule
    /// is better for all graphs.
    pub fn choose_again(&mut self, above: i64, work: &mut Work) {
        let first = self.first.clone();
        let other = Intervals::with_positions(first, Rule::Fullest, above, self.units, work);
        self.best = self.best.max(other.best);
        self.starts.extend(other.starts);
        if other.made.bound > self.made.bound {
            (self.program, self.made) = (other.program, other.made);
        }
    }

    /// Branches where this may close the gap to a known plan, and work is left. Returns the bound in weight over the cost of running every
    /// op once, at least 0.
    pub fn bound(&mut self, above: i64, work: &mut Work) -> i64 {
        let enough = enough(self.program.dag, above);
        if self.best < enough && self.is_near(above) && !work.spent() {
            // Branching makes the program larger. Where a better plan is found after it, the small one is a better start.
            let (mut program, made) = (self.program.clone(), self.made.clone());
            self.best = self.best.max(program.branch(made, enough, work));
        }
        (self.best.min(above as f64) as i64 - 1).max(0)
    }

    /// Returns whether branching may close the gap to a known plan.
    fn is_near(&self, above: i64) -> bool {
        above as f64 - self.best < BRANCH_GAP * self.program.dag.total_price as f64
    }

    /// Solves a program with rows added while they raise the bound.
    fn add_rows(
        &self,
        program: &mut Program,
        mut made: Bounded,
        enough: f64,
        work: &mut Work,
    ) -> Bounded {
        loop {
            let before = made.bound;
            work.limit = work.done + self.units;
            made = program.solve_fixing(enough, &made, work);
            let is_idle = made.bound < before + self.least_gain();
            if made.bound >= enough || is_idle || program.tighten(&made.point) == 0 {
                return made;
            }
        }
    }

    fn least_gain(&self) -> f64 {
        LEAST_GAIN * self.program.dag.total_price as f64
    }

    /// Adds rows and positions while they raise the bound, until it is close to `above`. Keeps the program as it was when the bound last
    /// rose.
    fn add_positions(&mut self, above: i64, rule: Rule, work: &mut Work) {
        let limit = work.limit;
        let enough = enough(self.program.dag, above);
        let (mut program, mut made) = (self.program.clone(), self.made.clone());
        let mut idle = 0;
        loop {
            made = self.add_rows(&mut program, made, enough, work);
            for share in STARTS {
                let mut start = program.schedule(&made.point, share);
                drop_unread(program.dag, &mut start);
                if !self.starts.contains(&start) {
                    self.starts.push(start);
                }
            }
            idle += 1;
            if self.made.point.is_empty() || made.bound > self.made.bound + self.least_gain() {
                (self.program, self.made) = (program.clone(), made.clone());
                self.best = made.bound;
                idle = 0;
            }
            let is_over = made.bound >= enough || work.done > limit || idle == MOST_IDLE;
            if is_over {
                break;
            }
            let rule = match self.is_near(above) {
                true => rule,
                false => Rule::Neediest,
            };
            let Some(step) = program.next_position(&made.point, rule, work) else {
                break;
            };
            program.add(step);
            program.extend(&mut made);
        }
        let each = self.starts.len().div_ceil(MOST_STARTS);
        self.starts = std::mem::take(&mut self.starts)
            .into_iter()
            .step_by(each)
            .collect();
    }
}

/// Returns the bound at which the gap to what a plan weighs is narrow.
fn enough(dag: &Dag, above: i64) -> f64 {
    above as f64 - CLOSE_GAP * dag.total_price as f64
}

/// Returns the op that needs the most memory when every op runs once, in the given order; `None` if that fits.
fn first_position(dag: &Dag, cap: i64) -> Option<usize> {
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
