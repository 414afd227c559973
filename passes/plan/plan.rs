//! A plan as data: what is recomputed and offloaded, and why. It can be stored, read, edited and replayed.

use super::index::{ByOp, ByValue, OpIdx, ValueIdx};
use super::overlap::elapsed_us;
use super::problem::{OpPhase, Problem, ValueKind, fingerprint};
use super::schedule::{Score, evaluate};
use super::steps::{Schedule, Step, settled};
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
    /// Files, also where the run is on a GPU.
    Disk,
    /// The ranks that share the layers: each keeps a slice ([`Problem::slices`]).
    Ranks,
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
    pub op: OpIdx,
    /// The value that is decided on, an index into the problem.
    pub value: ValueIdx,
    /// Name of the op that produces the value.
    pub name: String,
    /// Whether the value is kept in the device's memory.
    pub kept: bool,
    /// Whether the value is offloaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offloaded: bool,
    /// Size of the value in bytes.
    pub bytes: u64,
    /// The layer of `op`; `None` where no layer is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// Why the value is kept or not, for people; empty where nothing is known.
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The policy, or `budget`, with the options that constrained it.
    pub policy: String,
    /// The [`fingerprint`] of the problem that the plan is for.
    pub fingerprint: String,
    /// The steps to run, and the ops whose results are offloaded.
    #[serde(flatten)]
    pub schedule: Schedule,
    /// Where offloaded results are kept; `Host` where nothing is offloaded.
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
    /// The recomputations of the schedule, one segment for each layer and round of recomputing it.
    pub segments: Vec<Segment>,
    /// One entry for each forward result that the backward pass reads or that is recomputed or fetched.
    pub decisions: Vec<Decision>,
    /// Score of the unplanned step: every op once, in the given order.
    pub before: Score,
    /// Score of the schedule.
    pub after: Score,
    /// Whether the peaks of both scores are upper bounds, for data decides some sizes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub peak_is_bound: bool,
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
pub type Reasons = ByValue<String>;

impl Plan {
    /// Evaluates a schedule and writes down what it does. `layer_of` gives the layer of each op. With transfers, the cost is
    /// the time if they run beside other ops.
    ///
    /// # Errors
    /// An invalid schedule.
    pub fn new<S: Copy + Into<Step>>(
        policy: &str,
        problem: &Problem,
        schedule: &[S],
        layer_of: &ByOp<Option<usize>>,
        reasons: &Reasons,
    ) -> Result<Plan> {
        let schedule = Schedule::new(schedule.iter().map(|step| (*step).into()).collect());
        let mut after = evaluate(problem, &schedule.steps)?;
        if !schedule.offloaded.is_empty() {
            after.cost = elapsed_us(problem, &schedule.steps);
        }
        Ok(Plan {
            policy: policy.into(),
            fingerprint: fingerprint(problem),
            segments: segments(problem, &schedule.steps, layer_of),
            decisions: decisions(problem, &schedule, layer_of, reasons),
            before: evaluate(problem, &problem.given_order())?,
            after,
            peak_is_bound: problem.is_bound,
            schedule,
            ..Plan::default()
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

    /// Returns a schedule without anything else, to be [replayed](Plan::replay) on a problem.
    pub fn bare(schedule: Schedule) -> Plan {
        Plan {
            policy: "given".into(),
            schedule,
            ..Plan::default()
        }
    }

    /// Evaluates a stored plan again: the file may have been edited. Keeps its reasons, derives all else from the schedule,
    /// and drops the certificate.
    ///
    /// # Errors
    /// A plan for another problem, or an invalid schedule.
    pub fn replay(self, problem: &Problem, layer_of: &ByOp<Option<usize>>) -> Result<Plan> {
        let found = fingerprint(problem);
        if !self.fingerprint.is_empty() && self.fingerprint != found {
            return Err(Error::usage("plan", "this plan was made for another graph")
                .expected(format!("fingerprint {}", self.fingerprint))
                .found(found)
                .help("plan again, or use the model and options that the plan was made with"));
        }
        let reasons = self.reasons(problem);
        let Schedule { steps, offloaded } = self.schedule;
        problem.check_movable(&offloaded)?;
        let plan = Plan::new(&self.policy, problem, &settled(&steps), layer_of, &reasons)?;
        Ok(Plan {
            offload_to: match offloaded.is_empty() {
                true => OffloadTarget::Host,
                false => self.offload_to,
            },
            ..plan
        })
    }

    /// Returns why each storage is kept or not.
    pub fn reasons(&self, problem: &Problem) -> Reasons {
        let mut reasons = problem.by_value(String::new());
        for decision in &self.decisions {
            if let Some(reason) = reasons.get_mut(decision.value.0) {
                reason.clone_from(&decision.reason);
            }
        }
        reasons
    }

    /// Returns the ops in the order in which they run.
    pub fn runs(&self) -> impl Iterator<Item = OpIdx> + '_ {
        let steps = self.schedule.steps.iter();
        steps.filter(|step| !step.is_move()).map(|step| step.op())
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

/// Returns whether each step is a copy: a later run of its op than the first, or a fetch.
pub fn copies(problem: &Problem, steps: &[Step]) -> Vec<bool> {
    let mut has_run = problem.by_op(false);
    let is_copy = |step: &Step| match step {
        Step::Run(op) => std::mem::replace(&mut has_run[*op], true),
        Step::Fetch(_) => true,
        Step::Offload(_) | Step::Release(_) => false,
    };
    steps.iter().map(is_copy).collect()
}

/// Returns whether each value is made again for someone: whether a later run of its op is what an op or the caller reads, or
/// whether it is fetched. An op that runs again for one of its results makes the others too, without a use for them.
pub fn made_again(problem: &Problem, steps: &[Step]) -> ByValue<bool> {
    let roots = problem.roots();
    let mut is_copy = problem.by_value(false);
    let mut made_again = problem.by_value(false);
    for (step, is_again) in steps.iter().zip(copies(problem, steps)) {
        let op = &problem.ops[step.op()];
        match step {
            Step::Offload(_) | Step::Release(_) => {}
            Step::Fetch(_) => op.outs.iter().for_each(|v| made_again[*v] = true),
            Step::Run(_) => {
                for v in op.ins.iter().filter(|v| is_copy[**v]) {
                    made_again[roots[*v]] = true;
                }
                for v in &op.outs {
                    let base = problem.values[*v].view_of;
                    is_copy[*v] = base.map_or(is_again, |base| is_copy[base]);
                }
            }
        }
    }
    for v in problem.outputs.iter().filter(|v| is_copy[**v]) {
        made_again[roots[*v]] = true;
    }
    made_again
}

/// Returns one segment for each layer and each round of recomputing it. Where no layer is known, returns one for each run of
/// copies.
fn segments(problem: &Problem, steps: &[Step], layer_of: &ByOp<Option<usize>>) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut of_layer: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    let mut open_run: Option<usize> = None;
    let (mut runs, mut moves) = (problem.by_op(0usize), problem.by_op(0usize));
    for (at, step) in steps.iter().enumerate() {
        let op = step.op();
        let rounds = match step {
            Step::Run(_) => &mut runs[op],
            _ => &mut moves[op],
        };
        if !matches!(step, Step::Release(_)) {
            *rounds += 1;
        }
        if *rounds == 1 {
            open_run = None;
            continue;
        }
        let layer = layer_of[op];
        let segment = match layer {
            Some(l) => *of_layer.entry((l, *rounds)).or_insert(segments.len()),
            None => *open_run.get_or_insert(segments.len()),
        };
        if segment == segments.len() {
            segments.push(Segment {
                block: layer,
                steps: Vec::new(),
            });
        }
        // A fetch has its place among the copies of its layer, but is none.
        if !step.is_move() {
            segments[segment].steps.push(at);
        }
    }
    segments.retain(|segment| !segment.steps.is_empty());
    segments
}

/// Returns one entry for each forward storage that a backward op reads or that is recomputed or fetched, in the given order.
fn decisions(
    problem: &Problem,
    schedule: &Schedule,
    layer_of: &ByOp<Option<usize>>,
    reasons: &Reasons,
) -> Vec<Decision> {
    let roots = problem.roots();
    let is_copy = copies(problem, &schedule.steps);
    let is_made_again = made_again(problem, &schedule.steps);
    let mut is_read = problem.by_value(false);
    for (step, is_copy) in schedule.steps.iter().zip(is_copy) {
        let op = &problem.ops[step.op()];
        if !step.is_move() && (is_copy || op.phase == OpPhase::Backward) {
            op.ins.iter().for_each(|v| is_read[roots[*v]] = true);
        }
    }
    let mut list = Vec::new();
    for (o, op) in problem.ops.enumerated() {
        if op.phase == OpPhase::Backward {
            continue;
        }
        for v in &op.outs {
            let value = &problem.values[*v];
            if value.kind != ValueKind::Activation
                || value.view_of.is_some()
                || !(is_read[*v] || is_made_again[*v])
            {
                continue;
            }
            let kept = !is_made_again[*v];
            list.push(Decision {
                op: o,
                value: *v,
                name: op.name.clone(),
                kept,
                offloaded: !kept && schedule.offloaded.binary_search(&o).is_ok(),
                bytes: value.bytes,
                block: layer_of[o],
                reason: reasons.at(*v).cloned().unwrap_or_default(),
            });
        }
    }
    list
}
