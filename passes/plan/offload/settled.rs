//! Plans of a problem some of whose results may wait outside: planned on the staged problem, settled on the real one.

use super::super::PlanContext;
use super::super::budget::Budget;
use super::super::budgeted::{BudgetGoal, overhead_pct, word};
use super::super::constraint::{Constraint, Constraints, Forced};
use super::super::overlap::{self, Room};
use super::super::plan::{Certificate, Plan};
use super::super::schedule::evaluate;
use super::super::solve::Objective;
use super::super::transfer_lowering::{Price, Stage, Staged};
use super::{By, Offloading};
use crate::error::{Error, Result};

impl Offloading {
    /// A plan in which the results of `offloaded` may wait outside, or with a `wish` do; those that gain nothing by it
    /// stay.
    pub(super) fn moved(
        &self,
        setting: &PlanContext,
        by: By,
        offloaded: &[usize],
        wish: Option<Constraint>,
    ) -> Result<Plan> {
        let whole = self.at_price(setting, by, offloaded, wish, Price::Whole)?;
        let busy_share = setting.problem.transfer.map_or(0.0, |t| t.busy_share);
        if !self.streams || whole.offloaded.is_empty() || busy_share == 1.0 {
            return Ok(whole);
        }
        // What fits at one price fits at the other.
        let hidden = self.at_price(setting, by, offloaded, wish, Price::Hidden)?;
        let objective = match by {
            By::Budget(budgeted) => budgeted.objective,
            By::Policy(_) => Objective::Cost,
        };
        let taken = |plan: &Plan| (objective.of(&plan.after), plan.after.cost);
        let (mut best, other) = match taken(&hidden) < taken(&whole) {
            true => (hidden, whole),
            false => (whole, hidden),
        };
        // Of the same results offloaded, both bounds hold.
        if let (Some(own), Some(proven)) = (&mut best.certificate, other.certificate)
            && best.offloaded == other.offloaded
            && own.lower_bound_pct < proven.lower_bound_pct
        {
            own.lower_bound_pct = proven.lower_bound_pct;
            let overhead_pct = overhead_pct(objective, &best.after, &best.before);
            own.gap_pct = (overhead_pct - own.lower_bound_pct).max(0.0);
        }
        Ok(best)
    }

    fn at_price(
        &self,
        setting: &PlanContext,
        by: By,
        offloaded: &[usize],
        wish: Option<Constraint>,
        price: Price,
    ) -> Result<Plan> {
        let mut offloaded = offloaded.to_vec();
        // What the first plan for these results proves, and what is asked for less because plans were over it.
        let (mut proven, mut less_bytes) = (None::<Certificate>, 0);
        for _ in 0..=offloaded.len() + RETRIES {
            let brief = Staged::brief(setting.problem, &offloaded, price)?;
            let structure = brief.structure(setting.structure);
            let choices = wished(setting, &brief, wish);
            let inner = PlanContext {
                problem: &brief.problem,
                structure: &structure,
                choices: &choices,
                overrides: setting.overrides,
                basis: setting.basis,
                usable_bytes: setting.usable_bytes,
            };
            let mut plan = match (by, &proven) {
                (By::Budget(budgeted), Some(proven)) => {
                    let peak_bytes = proven.budget_bytes.saturating_sub(less_bytes);
                    let shown = setting
                        .basis
                        .shown(peak_bytes, setting.problem.static_bytes());
                    let budget = Budget::Bytes(shown);
                    BudgetGoal {
                        budget,
                        ..*budgeted
                    }
                    .plan(&inner)
                }
                _ => by.plan(&inner),
            }?;
            let used: Vec<usize> = brief
                .fetches(&plan.schedule)
                .into_iter()
                .filter_map(|(op, fetches)| (fetches > 0).then_some(op))
                .collect();
            if used.len() < brief.offloaded.len() {
                // Without the others the problem is smaller, and what is proven of it is proven of this plan.
                (offloaded, proven, less_bytes) = (used, None, 0);
                continue;
            }
            if proven.is_some() {
                plan.certificate = proven.clone();
            }
            let staged = Staged::new(setting.problem, &brief.offloaded)?;
            let schedule = overlap::late(&staged, &staged.translated(&brief, &plan.schedule))?;
            // A solver may compute something again between an op and its moving out, where the results are held after all.
            let peak_bytes = evaluate(&staged.problem, &schedule)?.peak_bytes;
            let budget_bytes = plan.certificate.as_ref().map(|c| c.budget_bytes);
            match budget_bytes.and_then(|budget| peak_bytes.checked_sub(budget)) {
                Some(over_bytes) if over_bytes > 0 => {
                    less_bytes += over_bytes;
                    proven = plan.certificate;
                }
                _ => {
                    let room = Room {
                        peak_bytes: budget_bytes.unwrap_or(peak_bytes),
                        in_flight: self.in_flight,
                    };
                    let schedule = match self.streams {
                        true => overlap::spread(&staged, &schedule, room)?,
                        false => schedule,
                    };
                    let base = evaluate(&brief.problem, &brief.problem.given_order())?.cost;
                    let is_proven = !self.streams || price == Price::Hidden;
                    let proves = is_proven.then_some(base);
                    return settled(setting, &staged, (plan, schedule), (proves, self.streams));
                }
            }
        }
        Err(
            Error::budget("no plan was found in which these results are offloaded")
                .help("raise the budget, or use --offload auto"),
        )
    }
}

/// How often a plan is asked for again that was over its budget once it was settled.
const RETRIES: usize = 4;

/// A plan for the brief problem as one for the problem itself, with that schedule. What was proven of it is a part of
/// the cost that the brief problem has in its own order, if it `proves` anything about time. Without `streams` its cost is
/// that of one transfer after the other.
fn settled(
    setting: &PlanContext,
    staged: &Staged,
    (plan, schedule): (Plan, Vec<usize>),
    (proves, streams): (Option<f64>, bool),
) -> Result<Plan> {
    let mut reasons = vec![String::new(); staged.problem.values.len()];
    for decision in &plan.decisions {
        reasons[decision.value] = decision.reason.clone();
    }
    let layers = staged.each(&setting.structure.block_of);
    let made = Plan::new(&plan.policy, &staged.problem, schedule, &layers, &reasons)?;
    let one_by_one_us = made.after.cost;
    let mut whole = made.unstaged(setting.problem, staged)?;
    if !streams {
        whole.after.cost = one_by_one_us;
    }
    let Some(mut certificate) = plan.certificate else {
        return Ok(whole);
    };
    if whole.after.peak_bytes > certificate.budget_bytes {
        return Err(Error::bug("offload", "the plan is over its budget")
            .expected(format!("{} bytes", certificate.budget_bytes))
            .found(format!("{} bytes", whole.after.peak_bytes)));
    }
    if certificate.objective == word(Objective::Cost) {
        // Percentages are of the step that moves nothing.
        let unplanned = whole.before.cost;
        let lower_pct = match proves {
            Some(base) if unplanned > 0.0 => {
                let scale = base / unplanned;
                100.0 * (scale - 1.0) + scale * certificate.lower_bound_pct
            }
            _ => 0.0,
        };
        certificate.lower_bound_pct = lower_pct;
        let overhead_pct = whole.after.overhead_pct(&whole.before);
        certificate.gap_pct = (overhead_pct - lower_pct).max(0.0);
    }
    if !whole.offloaded.is_empty() {
        certificate.class.push_str(", with these results offloaded");
    }
    whole.certificate = Some(certificate);
    Ok(whole)
}

/// The choices of the staged problem.
fn wished(setting: &PlanContext, staged: &Staged, wish: Option<Constraint>) -> Constraints {
    let mut choices = Constraints {
        units: setting.choices.units,
        place: staged.each(&setting.choices.place),
        forced: staged.each(&setting.choices.forced),
    };
    if let Some(choice) = wish {
        for (forced, stage) in choices.forced.iter_mut().zip(&staged.stages) {
            if matches!(stage, Stage::Move(_)) {
                *forced = Some(Forced {
                    choice,
                    by: "--offload".into(),
                });
            }
        }
    }
    choices
}
