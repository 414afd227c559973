//! A plan for a budget: what the solver is asked, and its answer as a [`Plan`] with its certificate.
//!
//! The policies people know start the search, so a budgeted plan is never worse than one of them that fits. Numbers of
//! bytes inside are on the peak; what a user's number is on is the [`Basis`].

use super::budget::{Basis, Budget};
use super::constraint::{Constraint, Constraints};
use super::input::OpAnnotations;
use super::plan::{Certificate, Plan};
use super::policy::Policy;
use super::problem::{Kind, Phase, Problem};
use super::schedule::{Score, evaluate};
use super::solve::{self, Effort, Failure, MinPeak, Objective, Solution};
use crate::error::{Error, Held, Result, Shortfall};

/// A budget with what is to be minimised within it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetGoal {
    pub budget: Budget,
    pub objective: Objective,
    pub effort: Effort,
    /// Whether first computations may follow another order than the graph's.
    pub reorder: bool,
}

impl Default for BudgetGoal {
    fn default() -> BudgetGoal {
        BudgetGoal {
            budget: Budget::Auto,
            objective: Objective::default(),
            effort: Effort::default(),
            reorder: false,
        }
    }
}

/// What is planned, and for what.
#[derive(Clone, Copy)]
pub struct PlanContext<'a> {
    pub problem: &'a Problem,
    pub structure: &'a OpAnnotations,
    pub choices: &'a Constraints,
    /// How they were said.
    pub overrides: &'a str,
    /// What a number of bytes is on.
    pub basis: Basis,
    /// What the device has; `None` where none is known.
    pub usable_bytes: Option<u64>,
}

impl<'a> PlanContext<'a> {
    /// On the true peak, with nothing to be said of overrides and no device known.
    pub fn plain(
        problem: &'a Problem,
        structure: &'a OpAnnotations,
        choices: &'a Constraints,
    ) -> PlanContext<'a> {
        PlanContext {
            problem,
            structure,
            choices,
            overrides: "",
            basis: Basis::Peak,
            usable_bytes: None,
        }
    }
}

impl BudgetGoal {
    /// The budget as a peak in bytes.
    ///
    /// # Errors
    /// A problem whose own order is not a schedule.
    pub fn peak_bytes(&self, setting: &PlanContext) -> Result<u64> {
        let before = evaluate(setting.problem, &setting.problem.given_order())?;
        Ok(self
            .budget
            .peak_bytes(&before, setting.basis, setting.usable_bytes))
    }

    /// The plan.
    ///
    /// # Errors
    /// `error[budget]`, exit code 3, where none fits: with the smallest budget that does and the tensors that set it.
    pub fn plan(&self, setting: &PlanContext) -> Result<Plan> {
        let mut request = self.request(setting, self.peak_bytes(setting)?)?;
        let mut answer = solve::solve(setting.problem, &request);
        if let Err(Failure::Infeasible(why)) = &answer {
            let least_bytes = why.floor.reached_bytes;
            // Nobody asked for this number and no device has it: then as little as is feasible.
            let is_wish = self.budget == Budget::Auto && setting.usable_bytes.is_none();
            if is_wish || least_bytes <= request.budget_bytes {
                request.budget_bytes = request.budget_bytes.max(least_bytes);
                request.seeds.push(why.floor.schedule.clone());
                answer = solve::solve(setting.problem, &request);
            }
        }
        match answer {
            Ok(solution) => self.written(setting, request.budget_bytes, solution),
            Err(failure) => Err(refused(setting, failure)),
        }
    }

    /// Solutions for many budgets, given as peaks; a larger one never costs more. `None` where none fits. `known` are
    /// schedules to start from.
    ///
    /// # Errors
    /// A problem whose own order is not a schedule.
    pub fn frontier(
        &self,
        setting: &PlanContext,
        budgets: &[u64],
        known: Vec<Vec<usize>>,
    ) -> Result<Vec<Option<Solution>>> {
        let mut request = self.request(setting, 0)?;
        request.seeds.extend(known);
        let points = solve::frontier(setting.problem, &request, budgets)?;
        Ok(points.into_iter().map(|p| p.solution).collect())
    }

    fn request(&self, setting: &PlanContext, budget_bytes: u64) -> Result<solve::Request> {
        Ok(solve::Request {
            budget_bytes,
            objective: self.objective,
            effort: self.effort,
            reorder: self.reorder,
            choices: constraints(setting),
            seeds: policies(setting).map(|(_, plan)| plan.schedule).collect(),
        })
    }

    /// A solution as a plan.
    ///
    /// # Errors
    /// A bug, if the solver's schedule is not one.
    pub fn written(
        &self,
        setting: &PlanContext,
        budget_bytes: u64,
        solution: Solution,
    ) -> Result<Plan> {
        let Solution {
            schedule,
            bound,
            gap_pct,
            ..
        } = solution;
        let reasons = reasons(setting.problem, &schedule);
        let block_of = &setting.structure.block_of;
        let name = format!("budget {}", setting.overrides);
        let name = name.trim_end();
        let mut plan = Plan::new(name, setting.problem, schedule, block_of, &reasons)?;
        if plan.after.peak_bytes > budget_bytes {
            return Err(Error::bug("plan", "the plan is over its budget")
                .expected(format!("{budget_bytes} bytes"))
                .found(format!("{} bytes", plan.after.peak_bytes)));
        }
        plan.certificate = Some(Certificate {
            objective: word(self.objective).into(),
            budget_bytes,
            lower_bound_pct: bound.lower_pct,
            gap_pct,
            class: bound.class.into(),
        });
        Ok(plan)
    }
}

impl BudgetGoal {
    /// The smallest peak for which a plan is known, to be reported beside a plan. Looking for it takes longer than a
    /// first plan does: `None` where only that was wanted.
    ///
    /// # Errors
    /// A problem whose own order is not a schedule.
    pub fn smallest_bytes(&self, setting: &PlanContext, plan: &Plan) -> Result<Option<u64>> {
        match self.effort {
            Effort::First => Ok(None),
            _ => {
                let reached = self.smallest(setting)?.reached_bytes;
                Ok(Some(reached.min(plan.after.peak_bytes)))
            }
        }
    }

    /// The smallest peak for which a plan is known.
    ///
    /// # Errors
    /// A problem whose own order is not a schedule.
    pub fn smallest(&self, setting: &PlanContext) -> Result<MinPeak> {
        let look = match self.reorder {
            true => solve::smallest_reordered,
            false => solve::smallest_feasible,
        };
        look(setting.problem, &constraints(setting), self.effort)
    }
}

/// An objective's word.
pub fn word(objective: Objective) -> &'static str {
    match objective {
        Objective::Cost => "cost",
        Objective::Flops => "flops",
    }
}

/// Reads an objective.
///
/// # Errors
/// Any other word.
pub fn objective(text: &str) -> Result<Objective> {
    [Objective::Cost, Objective::Flops]
        .into_iter()
        .find(|o| word(*o) == text)
        .ok_or_else(|| {
            Error::usage("objective", format!("there is no objective `{text}`"))
                .expected("cost or flops")
        })
}

/// What a score costs more than another by an objective, in percent.
pub fn overhead_pct(objective: Objective, score: &Score, before: &Score) -> f64 {
    match objective {
        Objective::Cost => score.overhead_pct(before),
        Objective::Flops => score.flops_overhead_pct(before),
    }
}

/// The policies that plans are compared with.
fn known_policies(blocks: usize) -> [Policy; 6] {
    [
        Policy::None,
        Policy::Selective,
        Policy::Full,
        Policy::Every(2),
        Policy::First(blocks.div_ceil(2)),
        Policy::Group(2),
    ]
}

/// Every policy that applies, with its plan.
pub fn policies<'a>(setting: &'a PlanContext<'a>) -> impl Iterator<Item = (Policy, Plan)> + 'a {
    let blocks = setting.structure.blocks;
    // Without layers there is nothing that a policy of layers could mean.
    let applies = move |p: &Policy| *p == Policy::None || blocks > 0;
    let all = known_policies(blocks).into_iter().filter(applies);
    all.filter_map(|policy| {
        let plan = policy.plan(setting.problem, setting.structure).ok()?;
        Some((policy, plan))
    })
}

/// The policies that do not apply, by their words; without layers, a number of them is left open.
pub fn left_out(setting: &PlanContext) -> Vec<String> {
    let blocks = setting.structure.blocks;
    let applied: Vec<Policy> = policies(setting).map(|(policy, _)| policy).collect();
    let others = known_policies(blocks).into_iter();
    let words = others.filter(|p| !applied.contains(p)).map(|policy| {
        let word = policy.to_string();
        match word.split_once(':') {
            Some((word, _)) if blocks == 0 => format!("{word}:N"),
            _ => word,
        }
    });
    words.collect()
}

/// What the user settled, by op; empty where that is nothing.
pub(super) fn constraints(setting: &PlanContext) -> Vec<Option<Constraint>> {
    let overrides = setting.choices.constraints(setting.problem);
    match overrides.iter().all(Option::is_none) {
        true => Vec::new(),
        false => overrides,
    }
}

/// Why each value is kept or not: what it holds and what making it again takes.
fn reasons(problem: &Problem, schedule: &[usize]) -> Vec<String> {
    let mut runs = vec![0u32; problem.ops.len()];
    for op in schedule {
        runs[*op] += 1;
    }
    let reason = |v: &super::problem::Value| {
        let op = match v.producer {
            Some(p) if v.kind == Kind::Activation => p,
            _ => return String::new(),
        };
        let known = &problem.ops[op];
        if known.phase == Phase::Backward && runs[op] < 2 {
            return String::new();
        }
        let (bytes, cost) = (v.bytes, known.cost);
        match runs[op] {
            0 | 1 => format!("holds {bytes} bytes; its op costs {cost:.3}"),
            n => format!("gives {bytes} bytes back; its op costs {cost:.3} and runs {n} times"),
        }
    };
    problem.values.iter().map(reason).collect()
}

/// The error of a budget that nothing fits into, in the numbers that the user works with.
fn refused(setting: &PlanContext, failure: Failure) -> Box<Error> {
    let infeasible = match failure {
        Failure::Invalid(error) => return error,
        Failure::Infeasible(infeasible) => infeasible,
    };
    let floor = &infeasible.floor;
    let shown = |peak| setting.basis.shown(peak, floor.static_bytes);
    let smallest = shown(floor.reached_bytes);
    let known = if floor.is_proven() {
        "possible"
    } else {
        "known to be possible"
    };
    let mut error = Error::budget(format!(
        "no plan fits into {} bytes of {}; {smallest} is the smallest that is {known}",
        shown(infeasible.budget_bytes),
        setting.basis.name(),
    ));
    if let Some(op) = floor.op.and_then(|o| setting.problem.ops.get(o)) {
        error = error.at(format!("`{}`, while it runs", op.name));
    }
    let mut tensors = match setting.basis {
        Basis::Peak => format!("{} bytes of parameters and inputs\n", floor.static_bytes),
        Basis::AboveStatic => String::new(),
    };
    for (value, bytes) in floor.tensors.iter().take(SHOWN_TENSORS) {
        tensors.push_str(&format!(
            "{bytes} bytes: {}\n",
            tensor_name(setting.problem, *value)
        ));
    }
    if let Some(more) = floor.tensors.len().checked_sub(SHOWN_TENSORS + 1) {
        tensors.push_str(&format!("and {} smaller ones\n", more + 1));
    }
    error = error
        .found(tensors.trim_end())
        .help(format!("--budget {smallest}"));
    let held = |(value, bytes): &(usize, u64)| Held {
        name: tensor_name(setting.problem, *value),
        bytes: *bytes,
    };
    error = error.short_of(Shortfall {
        budget_bytes: shown(infeasible.budget_bytes),
        smallest_feasible_bytes: smallest,
        is_proven: floor.is_proven(),
        budget_on: setting.basis.name(),
        static_bytes: floor.static_bytes,
        peak_at: floor.op.map(|op| setting.problem.ops[op].name.clone()),
        tensors: floor.tensors.iter().map(held).collect(),
    });
    if constraints(setting).iter().any(Option::is_some) {
        error = error.help("what --layers, --save-ops and the like settle was taken as given");
    }
    error
}

const SHOWN_TENSORS: usize = 8;

/// A value as people find it: by the op that makes it.
pub fn tensor_name(problem: &Problem, value: usize) -> String {
    match problem.values[value].producer {
        Some(p) if problem.ops[p].outs.len() == 1 => format!("result of `{}`", problem.ops[p].name),
        Some(p) => {
            let at = problem.ops[p]
                .outs
                .iter()
                .position(|v| *v == value)
                .unwrap_or(0);
            format!("result {at} of `{}`", problem.ops[p].name)
        }
        None => format!("value {value}, there from the start"),
    }
}
