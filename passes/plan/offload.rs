//! Which results wait outside the device's memory, and plans that know of it.
//!
//! What a user fixes (`cpu`, `disk`, `block-inputs`) is a constraint: such a result is never in the device's memory from
//! its last use in the forward part to its first in the backward part, and a policy or solver decides all else on the
//! [staged](super::staged) problem. With `auto` the choice is the planner's, and the bound speaks of any choice. Moving costs the same for each byte, while
//! what computing again costs for each byte differs from op to op, so in the order of that price there is one place to cut:
//! cheap bytes are computed again, dear ones moved. The search tries cuts along that order and what layers read, plans
//! each, and keeps the cheapest; moving nothing is one of them, so `auto` is never predicted to be slower than `none`.
//!
//! Transfers run beside other ops, so that what a plan takes is known only once they are placed ([`overlap`]). Plans are
//! made twice, with transfers at their whole price and at none, and the one that then takes less is kept. What is proven
//! is proven at none, and of `auto` with what the lane out takes before a moment besides.

use super::budgeted::{Budgeted, constraints};
use super::choice::{Choice, Place};
use super::decision::Plan;
use super::keep::SMALL_BYTES;
use super::policy::Policy;
use super::problem::Problem;
use super::solve::bound::{CLASS, CLASS_MOVING};
use super::solve::{Effort, Objective, Wait, bound_moving};
use super::staged::{movable, result_bytes};
use super::subject::Structure;
use super::{Budget, Setting};
use crate::error::{Error, Kind, Result};
use crate::ops::transfer::{TO_DISK, TO_HOST};
use serde::{Deserialize, Serialize};
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

    /// What is to be said where nobody knows which results scores of classes are computed from: those would stay.
    pub fn warning(&self, structure: &Structure) -> Option<String> {
        let is_wanted = self.what != What::Nothing;
        (is_wanted && !structure.feeds_scores.contains(&true)).then(|| {
            "no head over classes was found: what it reads may be offloaded like any other result".into()
        })
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
        let order = self.dearest_first(setting.problem, plain.as_ref().ok(), candidates.clone());
        let mut best = plain
            .as_ref()
            .ok()
            .map(|p| (p.after.cost, None, Vec::new()));
        // What layers read is worth more together than one by one: with all of it outside, layers are rebuilt from there.
        let opens_layer = |op: &&usize| setting.structure.opens_layer[**op];
        let streams: Vec<usize> = order.iter().filter(opens_layer).copied().collect();
        let cuts = (1..=CUTS).map(|share| order[..(order.len() * share).div_ceil(CUTS)].to_vec());
        let mut trials = vec![(Some(Choice::Recompute), streams.clone()), (None, streams)];
        trials.extend(cuts.map(|cut| (None, cut)));
        trials.dedup();
        for (wish, set) in trials.iter().filter(|(_, set)| !set.is_empty()) {
            if let Ok(plan) = self.moved(setting, By::Budget(&quick), set, *wish)
                && best
                    .as_ref()
                    .is_none_or(|(cost, ..)| plan.after.cost < *cost)
            {
                best = Some((plan.after.cost, *wish, plan.offloaded));
            }
        }
        let own = Budgeted {
            budget: quick.budget,
            ..*budgeted
        };
        let plan = match best {
            Some((_, wish, offloaded)) if !offloaded.is_empty() => {
                let found = self.moved(setting, By::Budget(&own), &offloaded, wish);
                // More work may find that computing again is cheaper after all.
                match (own.plan(setting), found) {
                    (Ok(plain), Ok(found)) if plain.after.cost > found.after.cost => found,
                    (Ok(plain), _) => plain,
                    (Err(_), found) => found?,
                }
            }
            // The refusal of a budget that nothing fits into speaks of plans that move nothing.
            _ => budgeted.plan(setting)?,
        };
        self.covered(setting, &candidates, plan)
    }

    /// A plan with what is proven of all choices: which results are moved, too.
    fn covered(&self, setting: &Setting, candidates: &[usize], mut plan: Plan) -> Result<Plan> {
        let (Some(certificate), Some(transfer)) = (&mut plan.certificate, setting.problem.transfer)
        else {
            return Ok(plan);
        };
        let mut elsewhere = vec![None; setting.problem.ops.len()];
        for op in candidates {
            // Out and back; beside other ops, all that is certain is what no op runs beside.
            let whole_us = transfer.cost(result_bytes(setting.problem, *op));
            elsewhere[*op] = Some(match self.streams {
                true => Wait {
                    own_us: transfer.own_us(whole_us),
                    lane_us: (whole_us - transfer.start_us).max(0.0),
                },
                false => Wait {
                    own_us: whole_us,
                    lane_us: 0.0,
                },
            });
        }
        let choices = constraints(setting);
        let budget_bytes = certificate.budget_bytes;
        let lower = bound_moving(setting.problem, budget_bytes, &choices, &elsewhere)?;
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

#[cfg(test)]
mod tests;
