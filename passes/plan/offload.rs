//! Which results wait outside the device's memory, and plans that know of it.
//!
//! What a user fixes (`cpu`, `disk`, `block-inputs`) is a constraint: such a result is never in the device's memory from
//! its last use in the forward part to its first in the backward part, and a policy or solver decides all else on the
//! [staged](super::transfer_lowering) problem. With `auto` the choice is the planner's, and the bound speaks of any choice. Moving costs the same for each byte, while
//! what computing again costs for each byte differs from op to op, so in the order of that price there is one place to cut:
//! cheap bytes are computed again, dear ones moved. The search tries a few cuts along that order, then others around the best
//! of them, and what layers read, plans each quickly, and keeps the cheapest; moving nothing is one of them, so `auto` is never
//! predicted to be slower than `none`. Where the bound says that little is left to gain, nothing more is tried.
//!
//! Transfers run beside other ops, so that what a plan takes is known only once they are placed ([`overlap`]). Plans are
//! made twice, with transfers at their whole price and at none, and the one that then takes less is kept. What is proven
//! is proven at none, and of `auto` with what the lane out takes before a moment and the lane back after it besides.

use super::budgeted::{BudgetGoal, constraints};
use super::constraint::{Constraint, Place};
use super::input::OpAnnotations;
use super::plan::Plan;
use super::policy::Policy;
use super::problem::Problem;
use super::saved_set::SMALL_BYTES;
use super::solve::bound::{CLASS, CLASS_MOVING};
use super::solve::{Effort, Objective, bound_moving};
use super::transfer_lowering::{movable, result_bytes};
use super::{Budget, PlanContext};
use crate::error::{Error, Kind, Result};
use crate::ops::transfer::{TO_DISK, TO_HOST};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

mod settled;

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
    /// Results of an op that are fewer bytes together stay.
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
    Budget(&'a BudgetGoal),
}

impl By<'_> {
    fn plan(&self, setting: &PlanContext) -> Result<Plan> {
        match self {
            By::Policy(policy) => policy.refined(
                setting.problem,
                setting.structure,
                setting.choices,
                setting.overrides,
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
    pub fn plan(&self, setting: &PlanContext, by: By) -> Result<Plan> {
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
                let mut plan = self.moved(setting, by, &candidates, Some(Constraint::Recompute))?;
                self.check_room(setting.problem, &plan.offloaded)?;
                plan.offload_to = self.to;
                Ok(plan)
            }
        }
    }

    /// What is to be said where nobody knows which results scores of classes are computed from: those would stay.
    pub fn warning(&self, structure: &OpAnnotations) -> Option<String> {
        let is_wanted = self.what != What::Nothing;
        (is_wanted && !structure.feeds_scores.contains(&true)).then(|| {
            "no head over classes was found: what it reads may be offloaded like any other result".into()
        })
    }

    /// Ops whose results may be moved and are meant, in order.
    fn candidates(&self, setting: &PlanContext) -> Vec<usize> {
        let PlanContext {
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
        setting: &PlanContext,
        budgeted: &BudgetGoal,
        candidates: Vec<usize>,
    ) -> Result<Plan> {
        let quick = BudgetGoal {
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
        let order = self.dearest_first(setting.problem, plain.as_ref().ok(), candidates.clone());
        let lower = self.lower(setting, &candidates, budgeted.peak_bytes(setting)?)?;
        let tried = |trials: Vec<Trial>| -> Vec<(Trial, Plan)> {
            let plan = |trial: Trial| {
                let plan = self.moved(setting, By::Budget(&quick), &trial.offloaded, trial.wish);
                Some((trial, plan.ok()?))
            };
            trials.into_par_iter().filter_map(plan).collect()
        };
        let cut = |share: usize| Trial {
            share: Some(share),
            wish: None,
            offloaded: order[..(order.len() * share).div_ceil(CUTS)].to_vec(),
        };
        // What layers read is worth more together than one by one: with all of it outside, layers are rebuilt from there.
        let opens_layer = |op: &&usize| setting.structure.opens_layer[**op];
        let streams: Vec<usize> = order.iter().filter(opens_layer).copied().collect();
        let of_streams = |wish| Trial {
            share: None,
            wish,
            offloaded: streams.clone(),
        };
        let mut best: Option<(Trial, Plan)> = None;
        let cost = |best: &Option<(Trial, Plan)>| match (best, &plain) {
            (Some((_, plan)), Ok(plain)) => plan.after.cost.min(plain.after.cost),
            (Some((_, plan)), Err(_)) => plan.after.cost,
            (None, Ok(plain)) => plain.after.cost,
            (None, Err(_)) => f64::INFINITY,
        };
        let mut trials = vec![of_streams(Some(Constraint::Recompute)), of_streams(None)];
        let mut cuts: BTreeMap<usize, f64> = BTreeMap::new();
        let mut shares = vec![CUTS / 4, CUTS / 2, CUTS];
        // Where little is left to gain nothing is tried.
        while lower.is_some_and(|lower| cost(&best) > lower * ENOUGH) {
            cuts.extend(shares.iter().map(|share| (*share, f64::INFINITY)));
            trials.extend(shares.drain(..).map(cut));
            trials.retain(|trial| !trial.offloaded.is_empty());
            if trials.is_empty() {
                break;
            }
            for (trial, plan) in tried(std::mem::take(&mut trials)) {
                if let Some(share) = trial.share {
                    cuts.insert(share, plan.after.cost);
                }
                if plan.after.cost < cost(&best) {
                    best = Some((trial, plan));
                }
            }
            // The next are half way from the best cut to those beside it.
            let least = cuts.iter().min_by(|a, b| a.1.total_cmp(b.1));
            let Some((share, _)) = least.filter(|(_, cost)| cost.is_finite()) else {
                break;
            };
            let below = cuts.range(..share).next_back().map_or(0, |(s, _)| *s);
            let above = cuts.range(share + 1..).next().map_or(*share, |(s, _)| *s);
            shares = vec![(below + share) / 2, (share + above) / 2];
            shares.retain(|s| *s > 0 && !cuts.contains_key(s));
        }
        let own = BudgetGoal {
            budget: quick.budget,
            ..*budgeted
        };
        let is_quick = budgeted.effort == Effort::First;
        let plan = match best.filter(|(_, plan)| !plan.offloaded.is_empty()) {
            Some((_, found)) if is_quick => found,
            Some((trial, found)) => {
                let (plain, found) = rayon::join(
                    || own.plan(setting),
                    || self.moved(setting, By::Budget(&own), &found.offloaded, trial.wish),
                );
                // More work may find that computing again is cheaper after all.
                match (plain, found) {
                    (Ok(plain), Ok(found)) if plain.after.cost > found.after.cost => found,
                    (Ok(plain), _) => plain,
                    (Err(_), found) => found?,
                }
            }
            // The refusal of a budget that nothing fits into speaks of plans that move nothing.
            None if is_quick && plain.is_ok() => plain?,
            None => budgeted.plan(setting)?,
        };
        self.covered(setting, lower, plan)
    }

    /// What no plan within the budget costs less than, whatever it moves; `None` if none fits.
    fn lower(
        &self,
        setting: &PlanContext,
        candidates: &[usize],
        peak_bytes: u64,
    ) -> Result<Option<f64>> {
        let Some(transfer) = setting.problem.transfer else {
            return Ok(None);
        };
        let mut elsewhere = vec![None; setting.problem.ops.len()];
        for op in candidates {
            elsewhere[*op] = Some(transfer.wait(result_bytes(setting.problem, *op), self.streams));
        }
        bound_moving(
            setting.problem,
            peak_bytes,
            &constraints(setting),
            &elsewhere,
        )
    }

    /// A plan with what is proven of all choices: which results are moved, too.
    fn covered(&self, setting: &PlanContext, lower: Option<f64>, mut plan: Plan) -> Result<Plan> {
        let (Some(certificate), Some(_)) = (&mut plan.certificate, setting.problem.transfer) else {
            return Ok(plan);
        };
        let Some(lower) = lower else {
            return Err(Error::bug(
                "offload",
                "a plan fits where nothing was proven to fit",
            ));
        };
        let (own, before) = (plan.after.cost, plan.before.cost);
        let percent = |x: f64| {
            if before > 0.0 {
                100.0 * x / before
            } else {
                0.0
            }
        };
        certificate.lower_bound_pct = percent(lower.min(own) - before);
        certificate.gap_pct = percent((own - lower).max(0.0));
        certificate.class = format!("{CLASS}{CLASS_MOVING}");
        Ok(plan)
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

/// Into how many parts `auto` divides the order of what may be moved.
const CUTS: usize = 8;

/// A plan that costs no more than so many times what is proven of all is good enough.
const ENOUGH: f64 = 1.0005;

/// What `auto` tries: the results of these ops may be moved, or are.
struct Trial {
    /// How many of the [`CUTS`] it takes.
    share: Option<usize>,
    wish: Option<Constraint>,
    offloaded: Vec<usize>,
}

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

#[cfg(test)]
mod tests;
