//! Plans without offloading: by a policy, or within a budget with a certificate.
//!
//! A search for a budget starts from the policies that people know. So a budgeted plan is never worse than one of them that
//! fits. Bytes in here are peaks; what a user's number is on is the [`Basis`](super::budget::Basis).

use super::budget::Budget;
use super::constraint::Constraint;
use super::index::{ByValue, OpIdx, ValueIdx};
use super::infeasible::{Failure, Infeasible};
use super::input::PlanInput;
use super::plan::{Certificate, Plan, made_again};
use super::policy::Policy;
use super::problem::{OpPhase, Problem, Value, ValueKind};
use super::request::{Goal, PlanRequest};
use super::solve::answer::{Query, Solution};
use super::solve::bound;
use super::solve::min_peak::{MinPeak, min_peak};
use super::solve::reorder::min_peak_reordered;
use super::solve::{self, solve};
use super::steps::Step;
use ckpt_error::Result;

/// Plans what stays on the device.
///
/// # Errors
/// [`Failure::Infeasible`] where no plan fits the budget; a policy that does not apply; a stored plan for another problem.
pub fn plan(input: &PlanInput, request: &PlanRequest) -> Result<Plan, Failure> {
    match &request.goal {
        Goal::Policy(policy) => Ok(policy.plan(input)?),
        Goal::Budget(budget) => plan_budget(input, request, *budget),
        Goal::Stored(plan) => {
            let layer_of = &input.annotations.layer_of;
            Ok(Plan::clone(plan).replay(&input.problem, layer_of)?)
        }
    }
}

fn plan_budget(input: &PlanInput, request: &PlanRequest, budget: Budget) -> Result<Plan, Failure> {
    let problem = &input.problem;
    let mut query = query(input, request, input.peak_bytes(budget)?);
    let told = told_what_to_gather(problem, &query, &[query.budget_bytes])?;
    query.seeds.extend(told);
    let mut solved = solve(problem, &query)?;
    if let Err(min_peak) = &solved {
        // Nobody asked for this number and no device has it: then the budget is as little as is feasible.
        let is_automatic = budget == Budget::Auto && input.usable_bytes.is_none();
        if is_automatic || min_peak.reached_bytes <= query.budget_bytes {
            query.budget_bytes = query.budget_bytes.max(min_peak.reached_bytes);
            query.seeds.push(min_peak.schedule.clone());
            solved = solve(problem, &query)?;
        }
    }
    match solved {
        Ok(solution) => Ok(certified(input, request, query.budget_bytes, solution)?),
        Err(min_peak) => {
            let why = Infeasible::new(input, query.budget_bytes, &min_peak);
            Err(Failure::Infeasible(Box::new(why)))
        }
    }
}

/// Solves many budgets, given as peaks; a larger one never costs more. Returns `None` where none fits. `known` are
/// schedules to start from.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn frontier(
    input: &PlanInput,
    request: &PlanRequest,
    budgets: &[u64],
    known: Vec<Vec<OpIdx>>,
) -> Result<Vec<Option<Solution>>> {
    let mut query = query(input, request, 0);
    query.seeds.extend(known);
    let told = told_what_to_gather(&input.problem, &query, budgets)?;
    query.seeds.extend(told);
    solve::frontier(&input.problem, &query, budgets)
}

/// Returns the schedules of searches that keep every tensor gathered from other ranks, and of those that gather each again. A
/// plan that starts from them is not worse than either. Empty where nothing is gathered.
fn told_what_to_gather(
    problem: &Problem,
    query: &Query,
    budgets: &[u64],
) -> Result<Vec<Vec<OpIdx>>> {
    let is_open = |o: &OpIdx| {
        let op = &problem.ops[*o];
        let asked = query.constraints.get(o.0).copied().flatten();
        op.link_bytes > 0 && op.recomputable && asked.is_none()
    };
    let gathers: Vec<OpIdx> = problem.ops.indices().filter(is_open).collect();
    let mut found = Vec::new();
    if gathers.is_empty() {
        return Ok(found);
    }
    for constraint in [Constraint::Keep, Constraint::Recompute] {
        let mut told = query.clone();
        if told.constraints.is_empty() {
            told.constraints = problem.by_op(None);
        }
        for gather in &gathers {
            told.constraints[*gather] = Some(constraint);
        }
        let floor = floor(problem, &told)?;
        told.seeds.push(floor.schedule);
        let solutions = solve::frontier(problem, &told, budgets)?;
        found.extend(solutions.into_iter().flatten().map(|s| s.schedule));
    }
    Ok(found)
}

fn query(input: &PlanInput, request: &PlanRequest, budget_bytes: u64) -> Query {
    Query {
        budget_bytes,
        objective: request.objective,
        effort: request.effort,
        reorder: request.reorder,
        constraints: input.hard_constraints(),
        seeds: policies(input)
            .map(|(_, plan)| plan.runs().collect())
            .collect(),
        skips_proof: request.skips_proof,
    }
}

/// Returns a solution as a plan with its certificate.
fn certified(
    input: &PlanInput,
    request: &PlanRequest,
    budget_bytes: u64,
    solution: Solution,
) -> Result<Plan> {
    let Solution {
        schedule,
        bound,
        gap_pct,
        ..
    } = solution;
    let reasons = reasons(input, &schedule);
    let layer_of = &input.annotations.layer_of;
    let name = format!("budget {}", input.overrides);
    let mut plan = Plan::new(
        name.trim_end(),
        &input.problem,
        &schedule,
        layer_of,
        &reasons,
    )?;
    plan.certify(Certificate {
        objective: request.objective.word().into(),
        budget_bytes,
        lower_bound_pct: bound.lower_pct,
        gap_pct,
        class: bound::class(bound.class, !input.overrides.is_empty()),
    })?;
    Ok(plan)
}

/// Returns the smallest peak for which a plan is known.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn smallest_peak(input: &PlanInput, request: &PlanRequest) -> Result<MinPeak> {
    floor(&input.problem, &query(input, request, 0))
}

/// Returns the smallest peak for which a plan that a query allows is known.
fn floor(problem: &Problem, query: &Query) -> Result<MinPeak> {
    let search = match query.reorder {
        true => min_peak_reordered,
        false => min_peak,
    };
    search(problem, query)
}

/// Returns every compared policy that applies, with its plan.
pub fn policies(input: &PlanInput) -> impl Iterator<Item = (Policy, Plan)> + '_ {
    let all =
        Policy::compared(&input.annotations).filter(|policy| policy.applies(&input.annotations));
    all.filter_map(|policy| Some((policy, policy.unconstrained_plan(input).ok()?)))
}

/// Returns the words of the compared policies that do not apply. Without layers, numbers of layers are left open.
pub fn policies_left_out(input: &PlanInput) -> Vec<String> {
    let layers = input.annotations.layers;
    let applied: Vec<Policy> = policies(input).map(|(policy, _)| policy).collect();
    Policy::compared(&input.annotations)
        .filter(|policy| !applied.contains(policy))
        .map(|policy| policy.form(layers))
        .collect()
}

/// Returns why each value is kept or not: the override that settles it, else the bytes it holds and the cost of its op.
fn reasons(input: &PlanInput, schedule: &[OpIdx]) -> ByValue<String> {
    let problem = &input.problem;
    let mut runs = problem.by_op(0u32);
    for op in schedule {
        runs[*op] += 1;
    }
    let steps: Vec<Step> = schedule.iter().map(Step::from).collect();
    let made_again = made_again(problem, &steps);
    let reason = |(v, value): (ValueIdx, &Value)| {
        let op = match value.producer {
            Some(p) if value.kind == ValueKind::Activation => p,
            _ => return String::new(),
        };
        let constraint = match made_again[v] {
            true => Constraint::Recompute,
            false => Constraint::Keep,
        };
        // Without overrides, what is settled is no choice of the user's.
        let settled = input.constraints.reason(problem, op, constraint);
        if let Some(why) = settled.filter(|_| !input.overrides.is_empty()) {
            return why.into();
        }
        let known = &problem.ops[op];
        if known.phase == OpPhase::Backward && runs[op] < 2 {
            return String::new();
        }
        let (bytes, cost) = (value.bytes, known.cost);
        match made_again[v] {
            false => format!("{HOLDS} {bytes} bytes; its op costs {cost:.3}"),
            true => format!(
                "{GIVES} {bytes} bytes back; its op costs {cost:.3} and runs {} times",
                runs[op]
            ),
        }
    };
    problem.values.enumerated().map(reason).collect()
}

const HOLDS: &str = "holds";
const GIVES: &str = "gives";

/// Returns whether the reason of a budgeted plan is the price of the choice, and no override.
pub fn is_price(reason: &str) -> bool {
    let first = reason.split(' ').next();
    first.is_some_and(|word| [HOLDS, GIVES].contains(&word))
}
