//! Which results wait outside the device's memory, and plans that know of it.
//!
//! What a user fixes (`cpu`, `disk`, `block-inputs`) is a constraint: such a result is never in the device's memory from
//! its last use in the forward part to its first in the backward part, and a policy or solver decides all else on the
//! [staged](super::staged) problem. With `auto` the choice is the planner's. Moving costs the same for each byte, while
//! what computing again costs for each byte differs from op to op, so in the order of that price there is one place to cut:
//! cheap bytes are computed again, dear ones moved. The search tries cuts along that order, plans each, and keeps the
//! cheapest; moving nothing is one of them, so `auto` is never predicted to be slower than `none`.
//!
//! Transfers run beside other ops, so that what a plan takes is known only once they are placed ([`overlap`]). Plans are
//! made twice, with transfers at their whole price and at none, and the one that then takes less is kept. What is proven
//! is proven at none.

use super::budgeted::{Budgeted, overhead_pct};
use super::choice::{Choice, Choices, Forced, Place};
use super::decision::{Certificate, Plan};
use super::keep::SMALL_BYTES;
use super::overlap::{self, Room};
use super::policy::Policy;
use super::problem::Problem;
use super::schedule::evaluate;
use super::solve::{Effort, Objective};
use super::staged::{Price, Stage, Staged, movable, result_bytes};
use super::{Budget, Setting};
use crate::error::{Error, Kind, Result};
use crate::ops::transfer::{TO_DISK, TO_HOST};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    #[default]
    Nothing,
    /// What the planner finds worth it.
    Auto,
    /// Whatever may be.
    All,
    /// The residual stream that each layer reads.
    BlockInputs,
}

/// Where to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum To {
    /// The host's memory; a file where the run is on the CPU.
    #[default]
    Host,
    Disk,
}

impl To {
    /// The word that the op has for it.
    pub fn word(self) -> &'static str {
        match self {
            To::Host => TO_HOST,
            To::Disk => TO_DISK,
        }
    }

    pub fn is_host(&self) -> bool {
        *self == To::Host
    }
}

/// A wish to move results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offloading {
    pub what: What,
    pub to: To,
    /// Results of fewer bytes stay.
    pub min_bytes: u64,
    /// The most bytes that may be outside at once.
    pub outside_bytes: Option<u64>,
    /// Whether transfers run beside other ops.
    pub streams: bool,
    /// How many transfers may be under way in either direction: results of so many ops are held in memory only because they are
    /// not outside yet. At least 1.
    pub in_flight: usize,
}

/// As many transfers are under way, as in TRL's activation offloading.
pub const IN_FLIGHT: usize = 5;

/// Moving less is not worth a transfer, as PyTorch's and TRL's activation offloading have it.
pub const MIN_BYTES: u64 = 1024;

impl Default for Offloading {
    fn default() -> Offloading {
        Offloading {
            what: What::Nothing,
            to: To::Host,
            min_bytes: MIN_BYTES,
            outside_bytes: None,
            streams: true,
            in_flight: IN_FLIGHT,
        }
    }
}

impl fmt::Display for Offloading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.what, self.to) {
            (What::Nothing, _) => "none",
            (What::Auto, _) => "auto",
            (What::All, To::Host) => "cpu",
            (What::All, To::Disk) => "disk",
            (What::BlockInputs, _) => "block-inputs",
        })
    }
}

/// Who plans what is not moved.
#[derive(Clone, Copy, Debug)]
pub enum By<'a> {
    Policy(Policy),
    Budget(&'a Budgeted),
}

impl By<'_> {
    fn plan(&self, setting: &Setting) -> Result<Plan> {
        match self {
            By::Policy(policy) => policy.refined(
                setting.problem,
                setting.structure,
                setting.choices,
                setting.wishes,
            ),
            By::Budget(budgeted) => budgeted.plan(setting),
        }
    }
}

impl Offloading {
    /// Reads the value of `--offload`.
    ///
    /// # Errors
    /// Another word.
    pub fn parse(text: &str) -> Result<(What, To)> {
        Ok(match text {
            "none" => (What::Nothing, To::Host),
            "auto" => (What::Auto, To::Host),
            "cpu" => (What::All, To::Host),
            "disk" => (What::All, To::Disk),
            "block-inputs" => (What::BlockInputs, To::Host),
            _ => {
                return Err(Error::usage(
                    "offload",
                    format!("values cannot be offloaded to `{text}`"),
                )
                .expected("none, auto, cpu, disk or block-inputs"));
            }
        })
    }

    /// The plan.
    ///
    /// # Errors
    /// Those of the policy or budget; `auto` without a budget in time; more bytes outside than allowed.
    pub fn plan(&self, setting: &Setting, by: By) -> Result<Plan> {
        if self.what == What::Nothing {
            return by.plan(setting);
        }
        let candidates = self.candidates(setting);
        match (self.what, by) {
            (What::Auto, By::Budget(budgeted)) if budgeted.objective == Objective::Cost => {
                self.chosen(setting, budgeted, candidates)
            }
            (What::Auto, _) => Err(Error::usage(
                "offload",
                "--offload auto weighs the time of transfers against that of computing again",
            )
            .expected("--budget with --objective cost")),
            _ => {
                let mut plan = self.moved(setting, by, &candidates, Some(Choice::Recompute))?;
                self.check_room(setting.problem, &plan.offloaded)?;
                plan.offload_to = self.to;
                Ok(plan)
            }
        }
    }

    /// Ops whose results may be moved and are meant, in order.
    fn candidates(&self, setting: &Setting) -> Vec<usize> {
        let Setting {
            problem,
            structure,
            choices,
            ..
        } = setting;
        let movable = movable(problem);
        let wanted = |op: &usize| {
            let bytes = result_bytes(problem, *op);
            let outs = &problem.ops[*op].outs;
            let is_small = outs.iter().all(|v| problem.values[*v].integral) && bytes <= SMALL_BYTES;
            let settled = choices.forced[*op].is_some()
                || matches!(choices.place[*op], Place::Elsewhere | Place::Frozen);
            movable[*op]
                && bytes >= self.min_bytes
                && !is_small
                && !settled
                && !structure.feeds_scores[*op]
                && (self.what != What::BlockInputs || structure.opens_layer[*op])
        };
        (0..problem.ops.len()).filter(wanted).collect()
    }

    fn check_room(&self, problem: &Problem, offloaded: &[usize]) -> Result<()> {
        let bytes: u64 = offloaded.iter().map(|op| result_bytes(problem, *op)).sum();
        match self.outside_bytes {
            Some(room) if bytes > room => Err(Error::usage(
                "offload",
                "what is to be offloaded is more than the host may hold",
            )
            .expected(format!("{room} bytes or less"))
            .found(format!("{bytes} bytes"))
            .help("raise --host-budget or --min-offload-bytes, or use --offload auto")),
            _ => Ok(()),
        }
    }

    /// The cheapest of several cuts.
    fn chosen(
        &self,
        setting: &Setting,
        budgeted: &Budgeted,
        candidates: Vec<usize>,
    ) -> Result<Plan> {
        let quick = Budgeted {
            effort: Effort::First,
            // All of them are planned for the same peak.
            budget: Budget::Bytes(setting.basis.shown(
                budgeted.peak_bytes(setting)?,
                setting.problem.static_bytes(),
            )),
            ..*budgeted
        };
        let plain = match By::Budget(&quick).plan(setting) {
            Err(error) if error.kind() != Kind::Budget => return Err(error),
            plain => plain,
        };
        let order = self.dearest_first(setting.problem, plain.as_ref().ok(), candidates);
        let mut best: Option<(f64, Vec<usize>)> =
            plain.as_ref().ok().map(|p| (p.after.cost, Vec::new()));
        let mut tried = 0;
        for share in 1..=CUTS {
            let end = (order.len() * share).div_ceil(CUTS);
            if end == tried {
                continue;
            }
            tried = end;
            if let Ok(plan) = self.moved(setting, By::Budget(&quick), &order[..end], None)
                && best
                    .as_ref()
                    .is_none_or(|(cost, _)| plan.after.cost < *cost)
            {
                best = Some((plan.after.cost, plan.offloaded));
            }
        }
        let own = Budgeted {
            budget: quick.budget,
            ..*budgeted
        };
        match best {
            Some((_, offloaded)) if !offloaded.is_empty() => {
                let found = self.moved(setting, By::Budget(&own), &offloaded, None)?;
                // More work may find that computing again is cheaper after all.
                match own.plan(setting) {
                    Ok(plain) if plain.after.cost <= found.after.cost => Ok(plain),
                    _ => Ok(found),
                }
            }
            // The refusal of a budget that nothing fits into speaks of plans that move nothing.
            _ => budgeted.plan(setting),
        }
    }

    /// Candidates by what computing them again costs for each byte, most first, as far as the host has room for them.
    ///
    /// What `plan` computes again costs what it does there, ops that are run again only for others included; of other
    /// results, what their own op costs.
    fn dearest_first(
        &self,
        problem: &Problem,
        plan: Option<&Plan>,
        mut candidates: Vec<usize>,
    ) -> Vec<usize> {
        let again = plan.map_or_else(
            || vec![0.0; problem.ops.len()],
            |plan| repeat_costs(problem, &plan.schedule),
        );
        let price = |op: &usize| {
            let cost = problem.ops[*op].cost.max(again[*op]);
            cost / result_bytes(problem, *op).max(1) as f64
        };
        candidates.sort_by(|a, b| price(b).total_cmp(&price(a)).then(a.cmp(b)));
        let mut left = self.outside_bytes.unwrap_or(u64::MAX);
        candidates.retain(|op| match left.checked_sub(result_bytes(problem, *op)) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        candidates
    }
}

/// How many cuts `auto` tries.
const CUTS: usize = 8;

/// What the repeats of each op cost in a schedule, with their share of what was run again only for them.
fn repeat_costs(problem: &Problem, schedule: &[usize]) -> Vec<f64> {
    // Which step made the value that each step reads.
    let mut made_at: Vec<Option<usize>> = vec![None; problem.values.len()];
    let mut ran = vec![false; problem.ops.len()];
    let mut is_repeat = Vec::with_capacity(schedule.len());
    let mut reads: Vec<Vec<usize>> = Vec::with_capacity(schedule.len());
    let mut readers = vec![0usize; schedule.len()];
    for (step, o) in schedule.iter().enumerate() {
        let op = &problem.ops[*o];
        is_repeat.push(std::mem::replace(&mut ran[*o], true));
        let mut makers: Vec<usize> = op.ins.iter().filter_map(|v| made_at[*v]).collect();
        makers.retain(|maker| is_repeat[*maker]);
        makers.iter().for_each(|maker| readers[*maker] += 1);
        reads.push(makers);
        for v in &op.outs {
            made_at[*v] = Some(step);
        }
    }
    let mut through = vec![0.0; schedule.len()];
    let mut cost = vec![0.0; problem.ops.len()];
    // What a repeat costs is borne by those that read it; first runs bear nothing.
    for step in 0..schedule.len() {
        if !is_repeat[step] {
            continue;
        }
        through[step] += problem.ops[schedule[step]].cost;
        for maker in &reads[step] {
            through[step] += through[*maker] / readers[*maker] as f64;
        }
        cost[schedule[step]] += through[step];
    }
    cost
}

impl Offloading {
    /// A plan in which the results of `offloaded` may wait outside, or with a `wish` do; those that gain nothing by it
    /// stay.
    fn moved(
        &self,
        setting: &Setting,
        by: By,
        offloaded: &[usize],
        wish: Option<Choice>,
    ) -> Result<Plan> {
        let whole = self.at_price(setting, by, offloaded, wish, Price::Whole)?;
        if !self.streams || whole.offloaded.is_empty() {
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
        setting: &Setting,
        by: By,
        offloaded: &[usize],
        wish: Option<Choice>,
        price: Price,
    ) -> Result<Plan> {
        let mut offloaded = offloaded.to_vec();
        // What the first plan for these results proves, and what is asked for less because plans were over it.
        let (mut proven, mut less_bytes) = (None::<Certificate>, 0);
        for _ in 0..=offloaded.len() + RETRIES {
            let brief = Staged::brief(setting.problem, &offloaded, price)?;
            let structure = brief.structure(setting.structure);
            let choices = wished(setting, &brief, wish);
            let inner = Setting {
                problem: &brief.problem,
                structure: &structure,
                choices: &choices,
                wishes: setting.wishes,
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
                    Budgeted {
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
                    return settled(setting, &staged, (plan, schedule), proves);
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
/// the cost that the brief problem has in its own order, if it `proves` anything about time.
fn settled(
    setting: &Setting,
    staged: &Staged,
    (plan, schedule): (Plan, Vec<usize>),
    proves: Option<f64>,
) -> Result<Plan> {
    let mut reasons = vec![String::new(); staged.problem.values.len()];
    for decision in &plan.decisions {
        reasons[decision.value] = decision.reason.clone();
    }
    let layers = staged.each(&setting.structure.block_of);
    let mut whole = Plan::new(&plan.policy, &staged.problem, schedule, &layers, &reasons)?
        .unstaged(setting.problem, staged)?;
    let Some(mut certificate) = plan.certificate else {
        return Ok(whole);
    };
    if whole.after.peak_bytes > certificate.budget_bytes {
        return Err(Error::bug("offload", "the plan is over its budget")
            .expected(format!("{} bytes", certificate.budget_bytes))
            .found(format!("{} bytes", whole.after.peak_bytes)));
    }
    if certificate.objective == super::budgeted::word(Objective::Cost) {
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
fn wished(setting: &Setting, staged: &Staged, wish: Option<Choice>) -> Choices {
    let mut choices = Choices {
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
