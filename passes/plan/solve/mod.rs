//! The planner: the cheapest schedule known within a budget on true peak, with a proof of how far from the best it is.
//!
//! Everything is measured by [`evaluate`](super::evaluate) on the problem as it was given; the search itself works on a
//! reduced form ([`dag`]). A plan grows in steps, each in its own file: minimum cuts at full steps make the given order
//! fit ([`cut`], [`repair`]), repeats that the budget has room to avoid are taken out ([`ledger`]), parts are torn up
//! and rebuilt while the work lasts ([`search`]); small problems are solved exactly ([`exact`]). [`bound`] proves a lower
//! bound; when the plan meets it the search stops; where it stays wide, [`joint`] proves a better one.
//!
//! Work is counted in steps, never in seconds, and nothing depends on threads: same request, same plan.

pub mod bound;
pub mod cut;
pub mod dag;
pub mod exact;
pub mod flow;
pub mod joint;
pub mod ledger;
pub mod repair;
pub mod search;
pub mod simulate;
pub mod smallest;
pub mod work;
mod writer;

use super::choice::{Choice, broken_by, honours};
use super::problem::Problem;
use super::schedule::{Score, evaluate};
use crate::error::{Error, Result};
use dag::Dag;
use search::Search;
pub use smallest::{Floor, smallest_feasible};
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
        let normal = 45_000_000 + 8_000 * ops as u64;
        // While the gap is wide; the same for all sizes until a unit more or less for each op matters.
        let wide = 300_000_000 * 2000 / (ops as u64).max(2000);
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
    pub choices: Vec<Option<Choice>>,
    /// Schedules to start from, such as those of policies. The answer is never worse than one that fits and honours
    /// the choices.
    pub seeds: Vec<Vec<usize>>,
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
    pub floor: Floor,
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
    let before = evaluate(problem, &problem.given_order())?;
    let dag = Dag::new(problem, request.objective, &request.choices)?;
    solve_dag(problem, &dag, request, &before)
}

fn solve_dag(
    problem: &Problem,
    dag: &Dag,
    request: &Request,
    before: &Score,
) -> Result<Solution, Failure> {
    let infeasible = || match smallest::of_dag(problem, dag, before) {
        Ok(floor) => Failure::Infeasible(Box::new(Infeasible {
            budget_bytes: request.budget_bytes,
            floor,
        })),
        Err(error) => Failure::Invalid(error),
    };
    let Some(cap) = request.budget_bytes.checked_sub(before.static_bytes) else {
        return Err(infeasible());
    };
    // No sum of sizes reaches half of this, so a larger budget is no different.
    let cap = cap.min(i64::MAX as u64 / 4) as i64;
    let mut work = request.effort.work(dag.ops());
    let Some(price) = bound::one_position(dag, cap, &dag.price, 8, &mut Work::new(u64::MAX)) else {
        return Err(infeasible());
    };
    let allowed = |s: &&Vec<usize>| {
        evaluate(problem, s).is_ok()
            && (request.choices.is_empty() || broken_by(problem, s, &request.choices).is_none())
    };
    let seeds = request.seeds.iter().filter(allowed);
    let mut seeds: Vec<Vec<u32>> = seeds.map(|s| dag.from_problem(s)).collect();
    // Views that are read late can keep a little more than the reduced form sees: then it is asked for less.
    let mut inner = cap;
    let mut refusal = None;
    for _ in 0..10 {
        let mut search = Search::new(dag, inner, &mut work);
        let Some(schedule) = search.run(&seeds) else {
            if refusal.is_some() {
                break;
            }
            let failure = infeasible();
            let Failure::Infeasible(why) = &failure else {
                return Err(failure);
            };
            if why.floor.reached_bytes > request.budget_bytes {
                return Err(failure);
            }
            // The search for the smallest peak came further: its plan is where this one starts.
            seeds.push(dag.from_problem(&why.floor.schedule));
            refusal = Some(failure);
            inner = cap;
            continue;
        };
        let optimal = search.optimal && inner == cap;
        let steps: Vec<usize> = schedule.iter().map(|o| *o as usize).collect();
        let schedule = problem.unfold(&dag.op_in_problem, &steps);
        let score = evaluate(problem, &schedule)?;
        if score.peak_bytes <= request.budget_bytes {
            if !request.choices.is_empty() {
                honours(problem, &schedule, &request.choices)?;
            }
            let found = Found {
                schedule,
                score,
                optimal,
            };
            let price = price.max(joint_price(request, dag, cap, before, &found, price));
            return Ok(finish(request, dag, before, found, price, work.done));
        }
        inner -= ((score.peak_bytes - request.budget_bytes) as i64).max(1);
    }
    // From that plan, too, a search in the reduced form can end above the budget: then the plan itself is the answer.
    let failure = refusal.unwrap_or_else(infeasible);
    match &failure {
        Failure::Infeasible(why) if why.floor.reached_bytes <= request.budget_bytes => {
            let schedule = why.floor.schedule.clone();
            let found = Found {
                score: evaluate(problem, &schedule)?,
                schedule,
                optimal: false,
            };
            let price = price.max(joint_price(request, dag, cap, before, &found, price));
            Ok(finish(request, dag, before, found, price, work.done))
        }
        _ => Err(failure),
    }
}

struct Found {
    schedule: Vec<usize>,
    score: Score,
    optimal: bool,
}

/// The bound of several positions, where that of one leaves a wide gap and more than a first plan was asked for.
fn joint_price(
    request: &Request,
    dag: &Dag,
    cap: i64,
    before: &Score,
    found: &Found,
    price: i64,
) -> i64 {
    let (base, own) = (
        request.objective.of(before),
        request.objective.of(&found.score),
    );
    let above = ((own - base) / dag.unit.max(f64::MIN_POSITIVE)) as i64;
    let is_wide = (above - price) as f64 > WIDE_GAP * dag.total_price as f64;
    if found.optimal || request.effort == Effort::First || !is_wide {
        return 0;
    }
    let units = JOINT_UNITS + JOINT_UNITS_AN_OP * dag.ops() as u64;
    joint::several_positions(dag, cap, &dag.price, above, &mut Work::new(units)).unwrap_or(0)
}

/// Work of the bound of several positions.
const JOINT_UNITS: u64 = 80_000_000;
const JOINT_UNITS_AN_OP: u64 = 3_000;

fn finish(
    request: &Request,
    dag: &Dag,
    before: &Score,
    found: Found,
    price: i64,
    work: u64,
) -> Solution {
    let Found {
        schedule,
        score,
        optimal,
    } = found;
    let (base, own) = (request.objective.of(before), request.objective.of(&score));
    let mut lower = (base + price as f64 * dag.unit).min(own);
    if optimal && request.objective == Objective::Cost {
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
        schedule,
        score,
        before: before.clone(),
        work,
    }
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
            if budgets[i] < before.static_bytes + smallest::working_set_bytes(&dag).0 as u64 {
                None
            } else {
                match solve_dag(problem, &dag, &asked, &before) {
                    Ok(solution) => Some(solution),
                    Err(Failure::Infeasible(_)) => None,
                    Err(Failure::Invalid(error)) => return Err(error),
                }
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
