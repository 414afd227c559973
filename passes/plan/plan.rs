//! A plan: data that says what is computed again and why; it can be stored, read, edited and replayed.

use super::offload::To;
use super::overlap::elapsed_us;
use super::problem::{Kind, Phase, Problem, fingerprint};
use super::schedule::{Score, evaluate};
use super::transfer_lowering::{Stage, Staged};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What becomes of one forward result that the backward part needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The op that makes it.
    pub op: usize,
    /// The value, by its index in the problem.
    pub value: usize,
    pub name: String,
    /// It stays in the device's memory.
    pub kept: bool,
    /// It waits outside the device's memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offloaded: bool,
    pub bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    pub reason: String,
}

/// Copies that rebuild one part of the model: the explicit recompute subgraph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The block that is rebuilt, where blocks are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// Positions in the schedule.
    pub steps: Vec<usize>,
}

/// The answer of a policy or solver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What made it: the policy as text.
    pub policy: String,
    /// Of the problem it is for; see [`fingerprint`].
    pub fingerprint: String,
    /// Op indices; repeats are recomputation. Where ops are offloaded: of the [staged](super::transfer_lowering) problem.
    pub schedule: Vec<usize>,
    /// Ops whose results wait outside the device's memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offloaded: Vec<usize>,
    #[serde(default, skip_serializing_if = "To::is_host")]
    pub offload_to: To,
    /// Into how many parts the loss was cut; what the ops are depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_parts: Option<usize>,
    /// The same for chains of ops on tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_parts: Option<usize>,
    pub segments: Vec<Segment>,
    pub decisions: Vec<Decision>,
    pub before: Score,
    pub after: Score,
    /// What a solver proved about it; absent for policies and for plans that were read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
}

/// How good a plan is, as far as it is proven.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// What was minimised: `cost` or `flops`.
    pub objective: String,
    /// The budget, on the peak.
    pub budget_bytes: u64,
    /// No schedule of the class within the budget has less overhead by the objective, in percent.
    pub lower_bound_pct: f64,
    /// What the plan may be above the best of its class, in percent of running every op once.
    pub gap_pct: f64,
    /// The schedules that the bound speaks of.
    pub class: String,
}

/// Why each storage is kept or not, by its owner; empty where the policy has nothing to say.
pub type Reasons = Vec<String>;

impl Plan {
    /// Judges a schedule and writes down what it does. `block_of` gives the block of each op.
    ///
    /// # Errors
    /// An invalid schedule.
    pub fn new(
        policy: &str,
        problem: &Problem,
        schedule: Vec<usize>,
        block_of: &[Option<usize>],
        reasons: &Reasons,
    ) -> Result<Plan> {
        let after = evaluate(problem, &schedule)?;
        let before = evaluate(problem, &problem.given_order())?;
        Ok(Plan {
            policy: policy.into(),
            fingerprint: fingerprint(problem),
            segments: segments(problem, &schedule, block_of),
            decisions: decisions(problem, &schedule, block_of, reasons),
            schedule,
            offloaded: Vec::new(),
            offload_to: To::Host,
            loss_parts: None,
            mlp_parts: None,
            before,
            after,
            certificate: None,
        })
    }

    /// A plan for a staged problem as one for the problem that was staged: what happens in it is said in the terms of that.
    ///
    /// # Errors
    /// See [`evaluate`].
    pub fn unstaged(self, problem: &Problem, staged: &Staged) -> Result<Plan> {
        let moves = |step: &usize| !matches!(staged.stages[self.schedule[*step]], Stage::Run(_));
        let mut segments = self.segments;
        for segment in &mut segments {
            segment.steps.retain(|step| !moves(step));
        }
        segments.retain(|s| !s.steps.is_empty());
        let is_offloaded = |op: &usize| staged.offloaded.binary_search(op).is_ok();
        let mut decisions = self.decisions;
        decisions.retain(|d| d.value < problem.values.len());
        for decision in &mut decisions {
            decision.op = staged.stages[decision.op].op();
            decision.name = problem.ops[decision.op].name.clone();
            decision.offloaded = !decision.kept && is_offloaded(&decision.op);
        }
        Ok(Plan {
            fingerprint: fingerprint(problem),
            before: evaluate(problem, &problem.given_order())?,
            after: Score {
                cost: elapsed_us(staged, &self.schedule),
                ..self.after
            },
            offloaded: staged.offloaded.clone(),
            segments,
            decisions,
            ..self
        })
    }

    /// A schedule without anything else, to be [replayed](Plan::replay) on a problem.
    pub fn bare(schedule: Vec<usize>) -> Plan {
        Plan {
            policy: "given".into(),
            fingerprint: String::new(),
            schedule,
            offloaded: Vec::new(),
            offload_to: To::Host,
            loss_parts: None,
            mlp_parts: None,
            segments: Vec::new(),
            decisions: Vec::new(),
            before: Score::default(),
            after: Score::default(),
            certificate: None,
        }
    }

    /// A stored plan judged anew: the file may have been edited. Its reasons stay; all else follows the schedule, and what
    /// was proven about the plan is dropped.
    ///
    /// # Errors
    /// A plan for another problem, or an invalid schedule.
    pub fn replay(self, problem: &Problem, block_of: &[Option<usize>]) -> Result<Plan> {
        let found = fingerprint(problem);
        if !self.fingerprint.is_empty() && self.fingerprint != found {
            return Err(Error::usage("plan", "this plan was made for another graph")
                .expected(format!("fingerprint {}", self.fingerprint))
                .found(found)
                .help("plan again, or use the model and options that the plan was made with"));
        }
        let mut reasons: Reasons = vec![String::new(); problem.values.len()];
        for decision in self.decisions {
            if let Some(reason) = reasons.get_mut(decision.value) {
                *reason = decision.reason;
            }
        }
        if self.offloaded.is_empty() {
            return Plan::new(&self.policy, problem, self.schedule, block_of, &reasons);
        }
        let staged = Staged::new(problem, &self.offloaded)?;
        reasons.resize(staged.problem.values.len(), String::new());
        let schedule = match self.schedule.iter().all(|s| *s < staged.stages.len()) {
            true => staged.settled(&self.schedule),
            false => self.schedule,
        };
        let block_of = staged.each(block_of);
        let judged = Plan::new(&self.policy, &staged.problem, schedule, &block_of, &reasons)?;
        Ok(Plan {
            offload_to: self.offload_to,
            ..judged.unstaged(problem, &staged)?
        })
    }

    /// The op of the problem that a step of the schedule is about: itself, or in a plan that offloads, the one that it
    /// runs or whose results it moves.
    pub fn op_of(&self, step: usize) -> usize {
        // Every offloaded op before it puts two more ops in front: its move and its release.
        let (mut low, mut high) = (0, self.offloaded.len());
        while low < high {
            let middle = (low + high) / 2;
            match self.offloaded[middle] + 2 * middle < step {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        match low.checked_sub(1) {
            // One of the three that an offloaded op has become, or one behind them.
            Some(last) => self.offloaded[last].max(step.saturating_sub(2 * low)),
            None => step,
        }
    }

    /// Bytes saved at the peak.
    pub fn saved_bytes(&self) -> u64 {
        self.before.peak_bytes.saturating_sub(self.after.peak_bytes)
    }

    pub fn recompute_flops(&self) -> u64 {
        self.after.flops - self.before.flops
    }
}

/// Whether each step computes its op again.
pub fn copies(problem: &Problem, schedule: &[usize]) -> Vec<bool> {
    let mut seen = vec![false; problem.ops.len()];
    schedule
        .iter()
        .map(|op| {
            seen.get_mut(*op)
                .is_some_and(|s| std::mem::replace(s, true))
        })
        .collect()
}

/// One segment for each block and each round of recomputing it; where no block is known, one for each run of copies.
fn segments(problem: &Problem, schedule: &[usize], block_of: &[Option<usize>]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut of_block: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut open_run: Option<usize> = None;
    let mut runs = vec![0usize; problem.ops.len()];
    for (step, op) in schedule.iter().enumerate() {
        runs[*op] += 1;
        if runs[*op] == 1 {
            open_run = None;
            continue;
        }
        let block = block_of[*op];
        let at = match block {
            Some(b) => *of_block.entry((b, runs[*op])).or_insert(segments.len()),
            None => *open_run.get_or_insert(segments.len()),
        };
        if at == segments.len() {
            segments.push(Segment {
                block,
                steps: Vec::new(),
            });
        }
        segments[at].steps.push(step);
    }
    segments
}

/// One entry for each forward storage that is alive at a backward op or made again, in the given order.
fn decisions(
    problem: &Problem,
    schedule: &[usize],
    block_of: &[Option<usize>],
    reasons: &Reasons,
) -> Vec<Decision> {
    let roots = problem.roots();
    let is_copy = copies(problem, schedule);
    let (mut read, mut again) = (
        vec![false; problem.values.len()],
        vec![false; problem.values.len()],
    );
    for (step, op) in schedule.iter().enumerate() {
        let op = &problem.ops[*op];
        if is_copy[step] {
            for out in &op.outs {
                again[*out] = true;
            }
        }
        if is_copy[step] || op.phase == Phase::Backward {
            for v in &op.ins {
                read[roots[*v]] = true;
            }
        }
    }
    let mut list = Vec::new();
    for (o, op) in problem.ops.iter().enumerate() {
        if op.phase == Phase::Backward {
            continue;
        }
        for v in &op.outs {
            let value = &problem.values[*v];
            if value.kind != Kind::Activation || value.view_of.is_some() || !(read[*v] || again[*v])
            {
                continue;
            }
            list.push(Decision {
                op: o,
                value: *v,
                name: op.name.clone(),
                kept: !again[*v],
                offloaded: false,
                bytes: value.bytes,
                block: block_of[o],
                reason: reasons.get(*v).cloned().unwrap_or_default(),
            });
        }
    }
    list
}
