//! One query on one problem: the search at a budget, and the bound on what it finds.

use super::answer::{Query, Solution, allowed_seeds};
use super::bound;
use super::compact::Dag;
use super::incremental_liveness::Ledger;
use super::interval_bound::Intervals;
use super::local_search::{FAR_GAP, Search, anneal_in_rounds, fit_all};
use super::min_peak::{MinPeak, min_peak};
use super::multi_cut_bound;
use super::work::{BOUND_OPS, Effort, WIDE_GAP, Work};
use crate::constraint::{check_constraints, first_violation};
use crate::index::OpIdx;
use crate::objective::Objective;
use crate::problem::Problem;
use crate::schedule::{Score, evaluate};
use ckpt_error::{Error, Result};
use std::collections::BTreeMap;

/// A query with what is known of its problem, and what the search found so far.
pub struct Question<'a> {
    problem: &'a Problem,
    /// The problem in reduced form, made for the objective and constraints of `query`.
    pub dag: &'a Dag,
    /// The budget, objective, effort, constraints and seeds.
    pub query: &'a Query,
    /// Score of the unplanned step, the base of overheads.
    pub before: &'a Score,
    /// Seeds that are schedules and honour the constraints.
    seeds: Vec<Vec<u32>>,
    min_peak: Option<MinPeak>,
    /// The best bounds so far, by the cap they are for; `None` where nothing fits.
    bounds: BTreeMap<i64, Option<i64>>,
    /// Units of work that the searches at budgets took so far.
    pub work: u64,
}

impl<'a> Question<'a> {
    /// Returns a question without results yet. Drops seeds that do not run or that break a constraint.
    pub fn new(
        problem: &'a Problem,
        dag: &'a Dag,
        query: &'a Query,
        before: &'a Score,
    ) -> Question<'a> {
        let seeds = allowed_seeds(problem, query);
        Question {
            problem,
            dag,
            query,
            before,
            seeds: seeds.map(|(_, seed)| dag.from_problem(seed)).collect(),
            min_peak: None,
            bounds: BTreeMap::new(),
            work: 0,
        }
    }

    /// Returns the smallest peak for which a plan is known.
    pub fn min_peak(&mut self) -> Result<&MinPeak> {
        if self.min_peak.is_none() {
            // Whatever the objective, the same peak is the smallest.
            self.min_peak = Some(min_peak(self.problem, self.query)?);
        }
        self.min_peak
            .as_ref()
            .ok_or_else(|| Error::bug("plan", "no smallest peak was kept"))
    }

    /// Returns what a budget leaves above static bytes; `None` if that is negative.
    pub fn cap(&self, budget_bytes: u64) -> Option<i64> {
        let cap = budget_bytes.checked_sub(self.before.static_bytes)?;
        // No sum of sizes reaches half of this, so a larger budget is no different.
        Some(cap.min(i64::MAX as u64 / 4) as i64)
    }

    /// Returns the plan that a search at a budget finds.
    pub fn find(&mut self, budget_bytes: u64) -> Result<Option<Found>> {
        let (dag, problem) = (self.dag, self.problem);
        let Some(cap) = self.cap(budget_bytes) else {
            return Ok(None);
        };
        let known = self.min_peak.as_ref();
        let is_too_small = known.is_some_and(|known| budget_bytes < known.reached_bytes);
        if is_too_small || self.bound(cap).is_none() {
            return Ok(None);
        }
        let mut work = self.query.effort.work(dag.ops());
        let mut seeds = self.seeds.clone();
        // Views that are read late can keep a little more than the reduced form sees: then it is asked for less.
        let mut inner = cap;
        let mut failures = 0;
        for _ in 0..10 {
            let mut search = Search::new(dag, inner, &mut work);
            search.repairs_given = failures == 0;
            let Some(reduced) = search.run(&seeds) else {
                failures += 1;
                let min_peak = self.min_peak()?;
                if failures == 1 && min_peak.reached_bytes <= budget_bytes {
                    // The search for the smallest peak came further: this one starts again from its plan or from larger caps,
                    // with all of the work again.
                    seeds.push(dag.from_problem(&min_peak.schedule));
                    inner = cap;
                    self.work += work.done;
                    work = self.query.effort.work(dag.ops());
                    seeds.extend(Search::new(dag, cap, &mut work).descend());
                    continue;
                }
                break;
            };
            let optimal = search.optimal && inner == cap;
            let schedule = problem.unfold(&dag.op_in_problem, &reduced);
            let score = evaluate(problem, &schedule)?;
            if score.peak_bytes <= budget_bytes {
                if !self.query.constraints.is_empty() {
                    check_constraints(problem, &schedule, &self.query.constraints)?;
                }
                self.work += work.done;
                return Ok(Some(Found {
                    schedule,
                    score,
                    optimal,
                }));
            }
            // From where the plan itself peaks, or the same one would be found again.
            inner = inner.min(Ledger::new(dag, &reduced).peak());
            inner -= ((score.peak_bytes - budget_bytes) as i64).max(1);
        }
        self.work += work.done;
        // From that plan, too, a search in the reduced form can end above the budget: then the plan itself is the answer.
        let min_peak = self.min_peak()?;
        if min_peak.reached_bytes > budget_bytes {
            return Ok(None);
        }
        let schedule = min_peak.schedule.clone();
        let score = evaluate(problem, &schedule)?;
        Ok(Some(Found {
            schedule,
            score,
            optimal: false,
        }))
    }

    /// Returns a bound on schedules within `cap`, in weight over running every op once; `None` if none fits. At first this is the
    /// bound of one position; [`Question::answer`] may raise it.
    pub fn bound(&mut self, cap: i64) -> Option<i64> {
        let dag = self.dag;
        let positions = (BOUND_OPS / dag.ops().max(1)).clamp(1, 8);
        let mut work = Work::new(u64::MAX);
        let prove = || bound::one_position(dag, cap, &dag.price, positions, &mut work);
        *self.bounds.entry(cap).or_insert_with(prove)
    }

    /// Returns a plan with its bound. Where the search for the bound comes by a better plan, that takes the place of what was found.
    pub fn answer(&mut self, found: &mut Found) -> Result<Solution> {
        let (dag, objective) = (self.dag, self.query.objective);
        let cap = self.cap(self.query.budget_bytes).unwrap_or(0);
        let price = self.bound(cap).unwrap_or(0);
        let price = price.max(self.joint_price(cap, found, price)?);
        self.bounds.insert(cap, Some(price));
        let more = price as f64 * dag.unit;
        let more = match objective {
            Objective::Flops => next_multiple(more, repeated_flops(self.problem)),
            Objective::Cost => more,
        };
        let mut lower = objective.of(self.before) + more;
        if found.optimal && objective == Objective::Cost {
            lower = objective.of(&found.score);
        }
        let plan = (found.schedule.clone(), found.score.clone());
        Ok(Solution::new(plan, lower, objective, self.before))
    }

    /// Returns the cost of a plan over running every op once, in weight.
    pub fn above(&self, found: &Found) -> i64 {
        let objective = self.query.objective;
        let more = objective.of(&found.score) - objective.of(self.before);
        (more / self.dag.unit.max(f64::MIN_POSITIVE)) as i64
    }

    /// Returns a bound of several positions, where `price`, a known bound, leaves a wide gap and more than a first plan was asked for;
    /// otherwise 0.
    fn joint_price(&self, cap: i64, found: &mut Found, price: i64) -> Result<i64> {
        let (dag, above) = (self.dag, self.above(found));
        let is_wide = (above - price) as f64 > WIDE_GAP * dag.total_price as f64;
        if found.optimal || self.query.effort == Effort::First || !is_wide {
            return Ok(0);
        }
        let mut units = JOINT_UNITS + JOINT_UNITS_AN_OP * dag.ops() as u64;
        let is_far =
            |above: i64, price: i64| (above - price) as f64 > FAR_GAP * dag.total_price as f64;
        if is_far(above, price) {
            units *= 2;
        }
        let mut work = Work::new(units);
        let several =
            multi_cut_bound::several_positions(dag, cap, &dag.price, above, &mut work).unwrap_or(0);
        if !is_far(above, several.max(price)) {
            return Ok(several);
        }
        let share = if self.query.skips_proof {
            QUICK_SHARE
        } else {
            1
        };
        let units = self.query.effort.work(dag.ops()).stretched / share;
        self.improve(found, |known| anneal_in_rounds(dag, cap, known, units))?;
        let above = self.above(found);
        if self.query.skips_proof || !is_far(above, several.max(price)) {
            return Ok(several);
        }
        let units = match self.query.effort {
            Effort::Units(n) => n,
            _ => INTERVAL_UNITS.min(INTERVAL_UNITS_AN_OP * dag.ops() as u64),
        };
        let mut work = Work::new(units);
        let Some(mut intervals) = Intervals::new(dag, cap, &dag.price, above, &mut work) else {
            return Ok(several);
        };
        let units = work.limit.saturating_sub(work.done);
        // Many gaps are soon closed. Where one is not, a better plan saves more work than it takes to find.
        work.limit = work.done + units / FIRST_SHARE;
        let mut bound = several.max(intervals.bound(above, &mut work));
        if is_far(above, bound) {
            work.limit = work.done + units;
            intervals.choose_again(above, &mut work);
            let units = IMPROVE_UNITS.min(IMPROVE_UNITS_AN_OP * dag.ops() as u64);
            let starts = &intervals.starts;
            self.improve(found, |known| fit_all(dag, cap, starts, known, units))?;
            bound = bound.max(intervals.bound(self.above(found), &mut work));
        }
        Ok(bound)
    }

    /// Runs `search` on a plan, and keeps the result if it is better and allowed. Does nothing if the query limits the work to a number of
    /// units. `search` takes and returns a schedule of the reduced problem.
    fn improve(&self, found: &mut Found, search: impl FnOnce(Vec<u32>) -> Vec<u32>) -> Result<()> {
        let (dag, problem, query) = (self.dag, self.problem, self.query);
        if matches!(query.effort, Effort::Units(_)) {
            return Ok(());
        }
        let made = search(dag.from_problem(&found.schedule));
        let schedule = problem.unfold(&dag.op_in_problem, &made);
        let score = evaluate(problem, &schedule)?;
        let is_allowed = query.constraints.is_empty()
            || first_violation(problem, &schedule, &query.constraints).is_none();
        // Views that are read late can keep a little more than the reduced form sees.
        let fits = score.peak_bytes <= query.budget_bytes;
        if fits && is_allowed && query.objective.prefers(&score, &found.score) {
            *found = Found {
                schedule,
                score,
                optimal: false,
            };
        }
        Ok(())
    }
}

/// Returns what the FLOPs of all repeats of any plan are a multiple of: the greatest common divisor of what each op takes.
fn repeated_flops(problem: &Problem) -> u64 {
    let ops = problem.ops.iter().filter(|op| op.recomputable);
    ops.map(|op| op.flops).fold(0, |mut a, mut b| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    })
}

/// Returns the smallest multiple of `step` that is not below `x`: no sum of such multiples lies between. `x` itself where there
/// is no step, or so many that rounding could lead past one.
pub fn next_multiple(x: f64, step: u64) -> f64 {
    let times = x / step as f64;
    match step > 0 && times < 1e8 {
        true => x.max((times - 1e-6).ceil() * step as f64),
        false => x,
    }
}

/// Work of the bound of several positions; twice that where the gap is above [`FAR_GAP`].
const JOINT_UNITS: u64 = 80_000_000;
/// Most work of the bound of intervals, which is asked where the gap is above [`FAR_GAP`]; on small problems so much for each op.
const INTERVAL_UNITS: u64 = 800_000_000;
const INTERVAL_UNITS_AN_OP: u64 = 1_500_000;
/// Limits of the work that the search for a better plan spends on each start: in total, and for each op of the problem.
const IMPROVE_UNITS: u64 = 400_000_000;
const IMPROVE_UNITS_AN_OP: u64 = 750_000;
/// Without a proof, a round of annealing is limited to the work of a search divided by this number.
const QUICK_SHARE: u64 = 3;
/// The bound of intervals takes this part of its work before a better plan is looked for.
const FIRST_SHARE: u64 = 6;
/// Additional units of work of the bound of several positions, for each op of the reduced problem.
pub const JOINT_UNITS_AN_OP: u64 = 3_000;

/// A plan that a search found.
pub struct Found {
    /// The ops in the order they run, repeats included; indices into the problem.
    pub schedule: Vec<OpIdx>,
    /// Score of `schedule` on the whole problem, not on its reduced form.
    pub score: Score,
    /// Whether the search proved `schedule` optimal for the budget, within the class that bounds cover.
    pub optimal: bool,
}
