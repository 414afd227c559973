//! The planner: the cheapest schedule known within a budget on true peak, with a proof of how far from the best it is.
//!
//! Everything is measured by [`evaluate`](super::evaluate) on the problem as it was given; the search itself works on a
//! reduced form ([`compact`]). A plan grows in steps, each in its own file: minimum cuts at full steps make the given order
//! fit ([`cut`], [`repair`]), repeats that the budget has room to avoid are taken out ([`incremental_liveness`]), parts are torn up
//! and rebuilt while the work lasts ([`local_search`]); small problems are solved exactly ([`exact`]). [`bound`] proves a lower
//! bound; when the plan meets it the search stops; where it stays wide, [`multi_cut_bound`] proves a better one.
//!
//! Work is counted in steps, never in seconds, and nothing depends on threads: same request, same plan.

pub mod bound;
pub mod compact;
pub mod cut;
pub mod exact;
pub mod flow;
pub mod incremental_liveness;
pub mod local_search;
pub mod min_peak;
pub mod multi_cut_bound;
pub mod orders;
mod reorder;
pub mod repair;
pub mod simulate;
mod steps;
pub mod work;
mod writer;

use super::constraint::{Constraint, broken_by, honours};
use super::problem::{Problem, Wait};
use super::schedule::{Score, evaluate};
use crate::error::{Error, Result};
use compact::Dag;
use local_search::Search;
pub use min_peak::{MinPeak, smallest_feasible};
pub use reorder::smallest_reordered;
use std::collections::BTreeMap;
use work::Work;

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// The sum of op costs.
    #[default]
    Cost,
    /// FLOPs; between plans with equal FLOPs, bytes read and written (their total weighs 1e-4 of all FLOPs). A problem
    /// without FLOPs is planned by cost.
    Flops,
}

impl Objective {
    /// What a schedule with this score costs, in the objective's unit.
    pub fn of(self, score: &Score) -> f64 {
        match self {
            Objective::Cost => score.cost,
            Objective::Flops => score.flops as f64,
        }
    }

    /// Whether the first of two scores is better: by the objective, then by traffic.
    fn prefers(self, own: &Score, other: &Score) -> bool {
        let (cost, others) = (self.of(own), self.of(other));
        cost < others || cost == others && own.traffic_bytes < other.traffic_bytes
    }
}

/// The share of the whole cost above which a gap is worth more work.
pub const WIDE_GAP: f64 = 0.003;

/// How much work a plan may take. One unit is about one operand looked at; 100 million are about half a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// The first good plan.
    First,
    /// A fraction of a second on a few thousand ops; up to a second while the gap is above [`WIDE_GAP`].
    #[default]
    Normal,
    /// About ten times that.
    Thorough,
    /// As many units.
    Units(u64),
}

impl Effort {
    fn work(self, ops: usize) -> Work {
        let ops = ops as u64;
        // Small problems are settled sooner.
        let normal = (300_000 * ops).min(45_000_000) + 8_000 * ops;
        // While the gap is wide; the same for all sizes until a unit more or less for each op matters.
        let wide = (1_000_000 * ops).min(300_000_000 * 2000 / ops.max(2000));
        let (limit, stretched) = match self {
            Effort::First => (0, 0),
            Effort::Normal => (normal, normal + wide),
            Effort::Thorough => (10 * normal, 10 * (normal + wide)),
            Effort::Units(n) => (n, n),
        };
        Work {
            stretched,
            ..Work::new(limit)
        }
    }
}

/// A question to the planner.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// On the peak, static bytes included.
    pub budget_bytes: u64,
    pub objective: Objective,
    pub effort: Effort,
    /// By op of the problem; empty for none.
    pub choices: Vec<Option<Constraint>>,
    /// Schedules to start from, such as those of policies. The answer is never worse than one that fits and honours
    /// the choices.
    pub seeds: Vec<Vec<usize>>,
    /// Whether first computations may follow another order than the given one.
    pub reorder: bool,
}

/// A proven lower bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Of the objective, in its unit, for the whole step.
    pub lower: f64,
    /// The same as overhead over running every op once, in percent.
    pub lower_pct: f64,
    /// The schedules it speaks of.
    pub class: &'static str,
    /// Whether the plan meets it.
    pub met: bool,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Solution {
    /// Op indices; repeats are recomputation.
    pub schedule: Vec<usize>,
    pub score: Score,
    /// Of the given order.
    pub before: Score,
    pub bound: Bound,
    /// What the plan may be above the best of its class, in percent of running every op once.
    pub gap_pct: f64,
    /// Units of work done.
    pub work: u64,
}

/// Why there is no plan.
#[derive(Clone, Debug)]
pub struct Infeasible {
    pub budget_bytes: u64,
    /// The smallest peak found, static bytes included, and what sets it.
    pub floor: MinPeak,
}

impl Infeasible {
    /// The error to show, exit code 3. It names the tensors by what `name_of` calls them.
    pub fn into_error(self, problem: &Problem, name_of: &dyn Fn(usize) -> String) -> Box<Error> {
        let floor = &self.floor;
        let mut tensors = String::new();
        for (v, bytes) in floor.tensors.iter().take(8) {
            tensors.push_str(&format!("{} ({bytes} bytes)\n", name_of(*v)));
        }
        let error = Error::budget(format!(
            "no plan fits into {} bytes; {} is the smallest budget {}",
            self.budget_bytes,
            floor.reached_bytes,
            if floor.is_proven() {
                "that is possible"
            } else {
                "known to be possible"
            },
        ));
        let error = match floor.op.and_then(|o| problem.ops.get(o)) {
            Some(op) => error.at(format!("`{}`, while it runs", op.name)),
            None => error,
        };
        error
            .found(format!(
                "{} resident bytes, and\n{}",
                floor.static_bytes,
                tensors.trim_end()
            ))
            .help(format!("ask for {} bytes or more", floor.reached_bytes))
    }
}

/// Why there is no solution.
#[derive(Clone, Debug)]
pub enum Failure {
    Infeasible(Box<Infeasible>),
    /// The problem is not one.
    Invalid(Box<Error>),
}

impl From<Box<Error>> for Failure {
    fn from(error: Box<Error>) -> Failure {
        Failure::Invalid(error)
    }
}

/// Plans a problem within a budget.
///
/// # Errors
/// [`Failure::Infeasible`] where no plan was found, with the smallest budget that has one; [`Failure::Invalid`] where
/// the problem's own order is not a schedule of it.
pub fn solve(problem: &Problem, request: &Request) -> Result<Solution, Failure> {
    match request.reorder {
        true => reorder::solve(problem, request),
        false => solve_given(problem, request),
    }
}

/// The same for plans whose first computations follow the given order.
fn solve_given(problem: &Problem, request: &Request) -> Result<Solution, Failure> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, request.objective, &request.choices)?;
    let mut question = Question::new(problem, &dag, request, &before);
    let own = question.find(request.budget_bytes)?;
    let mut answer = own.as_ref().map(|own| question.answer(own));
    if answer.as_ref().is_none_or(|answer| !answer.bound.met)
        && let Some(better) = steps::smaller(&mut question, own)?
    {
        answer = Some(question.answer(&better));
    }
    answer.map_or_else(|| Err(question.refusal()?), Ok)
}

/// What no schedule within a budget costs less than, if results may also wait elsewhere: `elsewhere` is what that takes at
/// least, by op; an op that has one brings all its results. In the unit of costs, for the whole step; `None` if
/// no schedule fits even so.
///
/// # Errors
/// A problem whose own order is not a schedule of it.
pub fn bound_moving(
    problem: &Problem,
    budget_bytes: u64,
    choices: &[Option<Constraint>],
    elsewhere: &[Option<Wait>],
) -> Result<Option<f64>> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, Objective::Cost, choices)?;
    let Some(cap) = budget_bytes.checked_sub(before.static_bytes) else {
        return Ok(None);
    };
    let cap = cap.min(i64::MAX as u64 / 4) as i64;
    let unit = dag.unit.max(f64::MIN_POSITIVE);
    let has_lane = elsewhere.iter().flatten().any(|w| w.lane_us > 0.0);
    let elsewhere = |v: usize, shares: f64| {
        let value = &problem.values[dag.value_in_problem[v] as usize];
        let maker = value.producer?;
        let wait = elsewhere.get(maker).copied().flatten()?;
        let cost = (2.0 - shares) * wait.own_us + shares * wait.lane_us;
        let outs = problem.ops[maker].outs.iter();
        let all: u64 = outs.map(|v| problem.values[*v].bytes).sum();
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
    let sums: Vec<f64> = sums.collect();
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

/// What part of the time before a position is taken for that of the lane out, and of the time after it for that of the lane
/// back, in turn.
const LANE_SHARES: &[f64] = &[
    0.0, 0.0005, 0.002, 0.006, 0.015, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0,
];

/// A request with what is known of its problem, and what was found out on the way.
struct Question<'a> {
    problem: &'a Problem,
    dag: &'a Dag,
    request: &'a Request,
    before: &'a Score,
    /// Seeds that are schedules and honour the choices.
    seeds: Vec<Vec<u32>>,
    floor: Option<MinPeak>,
    /// Bounds of one position, by the cap they are for; `None` where nothing fits.
    bounds: BTreeMap<i64, Option<i64>>,
    work: u64,
}

impl<'a> Question<'a> {
    fn new(
        problem: &'a Problem,
        dag: &'a Dag,
        request: &'a Request,
        before: &'a Score,
    ) -> Question<'a> {
        let allowed = |s: &&Vec<usize>| {
            evaluate(problem, s).is_ok()
                && (request.choices.is_empty() || broken_by(problem, s, &request.choices).is_none())
        };
        let seeds = request.seeds.iter().filter(allowed);
        Question {
            problem,
            dag,
            request,
            before,
            seeds: seeds.map(|s| dag.from_problem(s)).collect(),
            floor: None,
            bounds: BTreeMap::new(),
            work: 0,
        }
    }

    /// The smallest peak known.
    fn floor(&mut self) -> Result<&MinPeak> {
        if self.floor.is_none() {
            self.floor = Some(min_peak::of_dag(
                self.problem,
                self.dag,
                self.before,
                self.request.effort,
            )?);
        }
        self.floor
            .as_ref()
            .ok_or_else(|| Error::bug("plan", "no floor was kept"))
    }

    fn refusal(&mut self) -> Result<Failure> {
        Ok(Failure::Infeasible(Box::new(Infeasible {
            budget_bytes: self.request.budget_bytes,
            floor: self.floor()?.clone(),
        })))
    }

    /// What a budget leaves above static bytes.
    fn cap(&self, budget_bytes: u64) -> Option<i64> {
        let cap = budget_bytes.checked_sub(self.before.static_bytes)?;
        // No sum of sizes reaches half of this, so a larger budget is no different.
        Some(cap.min(i64::MAX as u64 / 4) as i64)
    }

    /// The plan that a search at a budget finds.
    fn find(&mut self, budget_bytes: u64) -> Result<Option<Found>> {
        let (dag, problem) = (self.dag, self.problem);
        let Some(cap) = self.cap(budget_bytes) else {
            return Ok(None);
        };
        if self.bound(cap).is_none() {
            return Ok(None);
        }
        let mut work = self.request.effort.work(dag.ops());
        let mut seeds = self.seeds.clone();
        // Views that are read late can keep a little more than the reduced form sees: then it is asked for less.
        let mut inner = cap;
        let mut failures = 0;
        for _ in 0..10 {
            let mut search = Search::new(dag, inner, &mut work);
            let Some(reduced) = search.run(&seeds) else {
                failures += 1;
                let floor = self.floor()?;
                if failures == 1 && floor.reached_bytes <= budget_bytes {
                    // The search for the smallest peak came further: its plan is where this one starts.
                    seeds.push(dag.from_problem(&floor.schedule));
                    inner = cap;
                    continue;
                }
                break;
            };
            let optimal = search.optimal && inner == cap;
            let steps: Vec<usize> = reduced.iter().map(|o| *o as usize).collect();
            let schedule = problem.unfold(&dag.op_in_problem, &steps);
            let score = evaluate(problem, &schedule)?;
            if score.peak_bytes <= budget_bytes {
                if !self.request.choices.is_empty() {
                    honours(problem, &schedule, &self.request.choices)?;
                }
                self.work += work.done;
                return Ok(Some(Found {
                    schedule,
                    score,
                    optimal,
                }));
            }
            // From where the plan itself peaks, or the same one would be found again.
            inner = inner.min(incremental_liveness::Ledger::new(dag, &reduced).peak());
            inner -= ((score.peak_bytes - budget_bytes) as i64).max(1);
        }
        self.work += work.done;
        // From that plan, too, a search in the reduced form can end above the budget: then the plan itself is the answer.
        let floor = self.floor()?;
        if floor.reached_bytes > budget_bytes {
            return Ok(None);
        }
        let schedule = floor.schedule.clone();
        let score = evaluate(problem, &schedule)?;
        Ok(Some(Found {
            schedule,
            score,
            optimal: false,
        }))
    }

    /// What one position proves of schedules within `cap`, in weight over running every op once; `None` if none fits.
    fn bound(&mut self, cap: i64) -> Option<i64> {
        let dag = self.dag;
        let positions = (BOUND_OPS / dag.ops().max(1)).clamp(1, 8);
        let mut work = Work::new(u64::MAX);
        let prove = || bound::one_position(dag, cap, &dag.price, positions, &mut work);
        *self.bounds.entry(cap).or_insert_with(prove)
    }

    /// A plan with its bound.
    fn answer(&mut self, found: &Found) -> Solution {
        let (dag, objective) = (self.dag, self.request.objective);
        let cap = self.cap(self.request.budget_bytes).unwrap_or(0);
        let price = self.bound(cap).unwrap_or(0);
        let price = price.max(self.joint_price(cap, found, price));
        let (base, own) = (objective.of(self.before), objective.of(&found.score));
        let more = price as f64 * dag.unit;
        let more = match objective {
            Objective::Flops => next_multiple(more, repeated_flops(self.problem)),
            Objective::Cost => more,
        };
        let mut lower = (base + more).min(own);
        if found.optimal && objective == Objective::Cost {
            lower = own;
        }
        let percent = |x: f64| if base > 0.0 { 100.0 * x / base } else { 0.0 };
        let gap_pct = percent(own - lower).max(0.0);
        Solution {
            bound: Bound {
                lower,
                lower_pct: percent(lower - base),
                class: bound::CLASS,
                met: gap_pct <= 1e-6,
            },
            gap_pct,
            schedule: found.schedule.clone(),
            score: found.score.clone(),
            before: self.before.clone(),
            work: self.work,
        }
    }

    /// What a plan costs over running every op once, in weight.
    fn above(&self, found: &Found) -> i64 {
        let objective = self.request.objective;
        let more = objective.of(&found.score) - objective.of(self.before);
        (more / self.dag.unit.max(f64::MIN_POSITIVE)) as i64
    }

    /// The bound of several positions, where that of one leaves a wide gap and more than a first plan was asked for.
    fn joint_price(&self, cap: i64, found: &Found, price: i64) -> i64 {
        let (dag, above) = (self.dag, self.above(found));
        let is_wide = (above - price) as f64 > WIDE_GAP * dag.total_price as f64;
        if found.optimal || self.request.effort == Effort::First || !is_wide {
            return 0;
        }
        let units = JOINT_UNITS + JOINT_UNITS_AN_OP * dag.ops() as u64;
        multi_cut_bound::several_positions(dag, cap, &dag.price, above, &mut Work::new(units))
            .unwrap_or(0)
    }
}

/// What the FLOPs of all repeats of any plan are a multiple of: the greatest common divisor of what each op takes.
fn repeated_flops(problem: &Problem) -> u64 {
    let ops = problem.ops.iter().filter(|op| op.recomputable);
    ops.map(|op| op.flops).fold(0, |mut a, mut b| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    })
}

/// The smallest multiple of `step` that is not below `x`: no sum of such multiples lies between. `x` itself where there
/// is no step, or so many that rounding could lead past one.
fn next_multiple(x: f64, step: u64) -> f64 {
    let times = x / step as f64;
    match step > 0 && times < 1e8 {
        true => x.max((times - 1e-6).ceil() * step as f64),
        false => x,
    }
}

/// Positions that a bound of one tries, beside the fullest: networks of so many ops together, and at most 8.
const BOUND_OPS: usize = 1_000_000;

/// Work of the bound of several positions.
const JOINT_UNITS: u64 = 80_000_000;
const JOINT_UNITS_AN_OP: u64 = 3_000;

/// A plan that a search found.
struct Found {
    schedule: Vec<usize>,
    score: Score,
    optimal: bool,
}

/// One point of a frontier.
#[derive(Clone, Debug)]
pub struct Point {
    pub budget_bytes: u64,
    /// `None` where no plan was found.
    pub solution: Option<Solution>,
}

/// Plans many budgets. A plan is reused at every larger budget at which nothing cheaper was found, so a larger budget
/// never costs more. The points come in the order of `budgets`.
///
/// # Errors
/// See [`solve`]; an infeasible budget is a point without a solution.
pub fn frontier(problem: &Problem, request: &Request, budgets: &[u64]) -> Result<Vec<Point>> {
    match request.reorder {
        true => reorder::frontier(problem, request, budgets),
        false => frontier_given(problem, request, budgets),
    }
}

/// The same for plans whose first computations follow the given order.
fn frontier_given(problem: &Problem, request: &Request, budgets: &[u64]) -> Result<Vec<Point>> {
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, request.objective, &request.choices)?;
    let mut order: Vec<usize> = (0..budgets.len()).collect();
    order.sort_by_key(|i| budgets[*i]);
    let mut points: Vec<Option<Point>> = vec![None; budgets.len()];
    let mut smaller: Option<Solution> = None;
    for i in order {
        let mut asked = request.clone();
        asked.budget_bytes = budgets[i];
        asked
            .seeds
            .extend(smaller.iter().map(|s| s.schedule.clone()));
        let solution =
            if budgets[i] < before.static_bytes + min_peak::working_set_bytes(&dag).0 as u64 {
                None
            } else {
                let mut question = Question::new(problem, &dag, &asked, &before);
                let found = question.find(asked.budget_bytes)?;
                found.map(|found| question.answer(&found))
            };
        smaller = solution.clone().or(smaller);
        points[i] = Some(Point {
            budget_bytes: budgets[i],
            solution,
        });
    }
    Ok(points.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests;
