//! A plan as data: what is recomputed and offloaded, and why. It can be stored, read, edited and replayed.

use super::overlap::elapsed_us;
use super::problem::{OpPhase, Problem, ValueKind, fingerprint};
use super::schedule::{Score, evaluate};
use super::transfer_lowering::{ExpandedOp, ExpandedProblem};
use ckpt_error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where offloaded results are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OffloadTarget {
    /// The host's memory; a file where the run is on the CPU.
    #[default]
    Host,
    Disk,
}

impl OffloadTarget {
    fn is_host(&self) -> bool {
        *self == OffloadTarget::Host
    }
}

/// The fate of one forward result that the backward pass needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The op that produces the value.
    pub op: usize,
    /// The value, by its index in the problem.
    pub value: usize,
    pub name: String,
    /// Whether the value is kept in the device's memory.
    pub kept: bool,
    /// Whether the value is offloaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offloaded: bool,
    pub bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    pub reason: String,
}

/// Copies that rebuild one layer, or one run of copies where no layer is known: an explicit recompute subgraph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The layer that is rebuilt, where layers are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// Positions in the schedule.
    pub steps: Vec<usize>,
}

/// The result of a policy or solver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The policy, or `budget`, with the options that constrained it.
    pub policy: String,
    /// The [`fingerprint`] of the problem that the plan is for.
    pub fingerprint: String,
    /// Op indices; repeats are recomputation. With offloaded ops, indices of the [expanded](super::transfer_lowering)
    /// problem.
    pub schedule: Vec<usize>,
    /// Ops whose results are offloaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offloaded: Vec<usize>,
    #[serde(default, skip_serializing_if = "OffloadTarget::is_host")]
    pub offload_to: OffloadTarget,
    /// The chunk count of the loss, on which the ops of the problem depend.
    #[serde(
        default,
        rename = "loss_parts",
        skip_serializing_if = "Option::is_none"
    )]
    pub loss_chunks: Option<usize>,
    /// The chunk count of chains of ops on tokens.
    #[serde(default, rename = "mlp_parts", skip_serializing_if = "Option::is_none")]
    pub mlp_chunks: Option<usize>,
    pub segments: Vec<Segment>,
    pub decisions: Vec<Decision>,
    pub before: Score,
    pub after: Score,
    /// The solver's proof; absent for policies and for plans that were read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
}

/// A proven bound on how much better another plan could be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    /// The objective: `cost` or `flops`.
    pub objective: String,
    /// The budget, as a peak.
    pub budget_bytes: u64,
    /// No schedule of the class within the budget has less overhead, by the objective, in percent of running every op once.
    pub lower_bound_pct: f64,
    /// The most that the plan may be above the best of its class, in the same percent.
    pub gap_pct: f64,
    /// The schedules that the bound covers.
    pub class: String,
}

/// Why each storage is kept or not, by its owner; empty where the policy does not say.
pub type Reasons = Vec<String>;

impl Plan {
    /// Evaluates a schedule and writes down what it does. `layer_of` gives the layer of each op.
    ///
    /// # Errors
    /// An invalid schedule.
    pub fn new(
        policy: &str,
        problem: &Problem,
        schedule: Vec<usize>,
        layer_of: &[Option<usize>],
        reasons: &Reasons,
    ) -> Result<Plan> {
        let after = evaluate(problem, &schedule)?;
        let before = evaluate(problem, &problem.given_order())?;
        Ok(Plan {
            policy: policy.into(),
            fingerprint: fingerprint(problem),
            segments: segments(problem, &schedule, layer_of),
            decisions: decisions(problem, &schedule, layer_of, reasons),
            schedule,
            offloaded: Vec::new(),
            offload_to: OffloadTarget::Host,
            loss_chunks: None,
            mlp_chunks: None,
            before,
            after,
            certificate: None,
        })
    }

    /// Attaches a certificate to a plan within its budget.
    ///
    /// # Errors
    /// A bug, if the plan is over the budget of the certificate.
    pub fn certify(&mut self, certificate: Certificate) -> Result<()> {
        if self.after.peak_bytes > certificate.budget_bytes {
            return Err(Error::bug("plan", "the plan is over its budget")
                .expected(format!("{} bytes", certificate.budget_bytes))
                .found(format!("{} bytes", self.after.peak_bytes)));
        }
        self.certificate = Some(certificate);
        Ok(())
    }

    /// Returns a plan for an expanded problem as one for the problem that was expanded.
    ///
    /// # Errors
    /// See [`evaluate`].
    pub fn contracted(self, problem: &Problem, expanded: &ExpandedProblem) -> Result<Plan> {
        let moves = |step: &usize| {
            !matches!(
                expanded.expanded_ops[self.schedule[*step]],
                ExpandedOp::Run(_)
            )
        };
        let mut segments = self.segments;
        for segment in &mut segments {
            segment.steps.retain(|step| !moves(step));
        }
        segments.retain(|s| !s.steps.is_empty());
        let is_offloaded = |op: &usize| expanded.offloaded.binary_search(op).is_ok();
        let mut decisions = self.decisions;
        decisions.retain(|d| d.value < problem.values.len());
        for decision in &mut decisions {
            decision.op = expanded.expanded_ops[decision.op].op();
            decision.name = problem.ops[decision.op].name.clone();
            decision.offloaded = !decision.kept && is_offloaded(&decision.op);
        }
        Ok(Plan {
            fingerprint: fingerprint(problem),
            before: evaluate(problem, &problem.given_order())?,
            after: Score {
                cost: elapsed_us(expanded, &self.schedule),
                ..self.after
            },
            offloaded: expanded.offloaded.clone(),
            segments,
            decisions,
            ..self
        })
    }

    /// Returns a schedule without anything else, to be [replayed](Plan::replay) on a problem.
    pub fn bare(schedule: Vec<usize>) -> Plan {
        Plan {
            policy: "given".into(),
            fingerprint: String::new(),
            schedule,
            offloaded: Vec::new(),
            offload_to: OffloadTarget::Host,
            loss_chunks: None,
            mlp_chunks: None,
            segments: Vec::new(),
            decisions: Vec::new(),
            before: Score::default(),
            after: Score::default(),
            certificate: None,
        }
    }

    /// Evaluates a stored plan again: the file may have been edited. Keeps its reasons, derives all else from the schedule,
    /// and drops the certificate.
    ///
    /// # Errors
    /// A plan for another problem, or an invalid schedule.
    pub fn replay(self, problem: &Problem, layer_of: &[Option<usize>]) -> Result<Plan> {
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
            return Plan::new(&self.policy, problem, self.schedule, layer_of, &reasons);
        }
        let expanded = ExpandedProblem::new(problem, &self.offloaded)?;
        reasons.resize(expanded.problem.values.len(), String::new());
        let schedule = match self
            .schedule
            .iter()
            .all(|s| *s < expanded.expanded_ops.len())
        {
            true => expanded.settled(&self.schedule),
            false => self.schedule,
        };
        let layer_of = expanded.each(layer_of);
        let judged = Plan::new(
            &self.policy,
            &expanded.problem,
            schedule,
            &layer_of,
            &reasons,
        )?;
        Ok(Plan {
            offload_to: self.offload_to,
            ..judged.contracted(problem, &expanded)?
        })
    }

    /// Returns the op of the problem behind a step of the schedule. In a plan that offloads it is the op that the step runs or
    /// whose results it moves.
    pub fn op_of(&self, step: usize) -> usize {
        // Every offloaded op before it adds two ops in front: its transfer and its release.
        let (mut low, mut high) = (0, self.offloaded.len());
        while low < high {
            let middle = (low + high) / 2;
            match self.offloaded[middle] + 2 * middle < step {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        match low.checked_sub(1) {
            // One of the three ops that an offloaded op became, or one behind them.
            Some(last) => self.offloaded[last].max(step.saturating_sub(2 * low)),
            None => step,
        }
    }

    /// Returns the bytes saved at the peak.
    pub fn saved_bytes(&self) -> u64 {
        self.before.peak_bytes.saturating_sub(self.after.peak_bytes)
    }

    /// Returns the FLOPs of all copies.
    pub fn recompute_flops(&self) -> u64 {
        self.after.flops - self.before.flops
    }
}

/// Returns whether each step is a copy: a later run of its op than the first.
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

/// Returns one segment for each layer and each round of recomputing it. Where no layer is known, returns one for each run of
/// copies.
fn segments(problem: &Problem, schedule: &[usize], layer_of: &[Option<usize>]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut of_layer: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut open_run: Option<usize> = None;
    let mut runs = vec![0usize; problem.ops.len()];
    for (step, op) in schedule.iter().enumerate() {
        runs[*op] += 1;
        if runs[*op] == 1 {
            open_run = None;
            continue;
        }
        let layer = layer_of[*op];
        let at = match layer {
            Some(l) => *of_layer.entry((l, runs[*op])).or_insert(segments.len()),
            None => *open_run.get_or_insert(segments.len()),
        };
        if at == segments.len() {
            segments.push(Segment {
                block: layer,
                steps: Vec::new(),
            });
        }
        segments[at].steps.push(step);
    }
    segments
}

/// Returns one entry for each forward storage that a backward op reads or that is recomputed, in the given order.
fn decisions(
    problem: &Problem,
    schedule: &[usize],
    layer_of: &[Option<usize>],
    reasons: &Reasons,
) -> Vec<Decision> {
    let roots = problem.roots();
    let is_copy = copies(problem, schedule);
    let (mut read, mut recomputed) = (
        vec![false; problem.values.len()],
        vec![false; problem.values.len()],
    );
    for (step, op) in schedule.iter().enumerate() {
        let op = &problem.ops[*op];
        if is_copy[step] {
            for out in &op.outs {
                recomputed[*out] = true;
            }
        }
        if is_copy[step] || op.phase == OpPhase::Backward {
            for v in &op.ins {
                read[roots[*v]] = true;
            }
        }
    }
    let mut list = Vec::new();
    for (o, op) in problem.ops.iter().enumerate() {
        if op.phase == OpPhase::Backward {
            continue;
        }
        for v in &op.outs {
            let value = &problem.values[*v];
            if value.kind != ValueKind::Activation
                || value.view_of.is_some()
                || !(read[*v] || recomputed[*v])
            {
                continue;
            }
            list.push(Decision {
                op: o,
                value: *v,
                name: op.name.clone(),
                kept: !recomputed[*v],
                offloaded: false,
                bytes: value.bytes,
                block: layer_of[o],
                reason: reasons.get(*v).cloned().unwrap_or_default(),
            });
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer_lowering::tests::chain;

    #[test]
    fn a_plan_knows_the_ops_of_its_steps() {
        let p = chain();
        let expanded = ExpandedProblem::new(&p, &[0, 2]).unwrap();
        for (index, stage) in expanded.expanded_ops.iter().enumerate() {
            assert_eq!(expanded.index(*stage), Some(index));
        }
        assert_eq!(expanded.index(ExpandedOp::Transfer(1)), None);
        let plan = Plan {
            offloaded: expanded.offloaded.clone(),
            ..Plan::bare(Vec::new())
        };
        for (step, stage) in expanded.expanded_ops.iter().enumerate() {
            assert_eq!(plan.op_of(step), stage.op());
        }
    }
}
