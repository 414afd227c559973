//! The report of a plan: one JSON object for programs, a few lines for people.

use super::step::TrainingStep;
use super::trials;
use crate::units::{at_most, bytes, flops};
use ckpt_passes::Result;
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::plan::on_device::{frontier, policies, policies_left_out};
use ckpt_passes::plan::spill::outside_bytes;
use ckpt_passes::plan::{
    Basis, Goal, Objective, Offload, OffloadSet, OffloadTarget, Plan, PlanOutcome, PlanRequest,
    Policy, Score, Step, Trial, offload,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The figures of a plan, in the reports of `plan` and of `optimize`. Those that only a budgeted plan has are null for
/// others.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// The policy, or `budget`, with the options that constrain it.
    pub policy: String,
    /// The budget, on the peak or, for a cost graph, on the peak above static.
    pub budget_bytes: Option<u64>,
    /// Peak of the step in its given order, static bytes included.
    pub peak_before_bytes: u64,
    /// Peak of the plan, static bytes included.
    pub peak_after_bytes: u64,
    /// Whether peaks are upper bounds, for data decides some sizes.
    pub peak_is_bound: bool,
    /// Parameters and inputs: resident throughout.
    pub static_bytes: u64,
    /// Peak before less peak after; 0 where the plan needs more.
    pub saved_bytes: u64,
    /// FLOPs that the plan adds by recomputation.
    pub recompute_flops: u64,
    /// FLOPs of the unplanned step.
    pub forward_backward_flops: u64,
    /// By the objective, in percent of the unplanned step; so are the next two.
    pub overhead_pct: f64,
    /// Overhead that no plan of `bound_class` within the budget goes below.
    pub lower_bound_pct: Option<f64>,
    /// The most that the plan may be above the best of its class.
    pub gap_pct: Option<f64>,
    /// The schedules that the bound covers.
    pub bound_class: Option<String>,
    /// The smallest budget for which a plan is known, counted as `budget_bytes`.
    pub smallest_feasible_bytes: Option<u64>,
    /// The time that planning took.
    pub plan_seconds: f64,
    /// The number of ops whose results are offloaded.
    pub offloaded: usize,
    /// The bytes that a rank keeps of these results, if ranks that share the layers keep slices of them; else 0.
    pub slice_bytes: u64,
    /// The chunk counts that the planner tried, where they were left to it.
    pub parts_tried: Vec<Trial>,
    /// The number of recompute subgraphs.
    pub segments: usize,
    /// The number of layers.
    pub blocks: usize,
    /// Layers whose keys or values other layers read; empty for cost graphs.
    pub kv_sharing: Vec<KvSharing>,
    /// The sizes that the figures are for.
    pub dims: BTreeMap<String, i64>,
    /// Sizes that nobody gave.
    pub assumed_dims: Vec<String>,
}

impl PlanReport {
    /// Returns the figures of a plan, with overhead by an objective.
    pub fn new(step: &TrainingStep, outcome: &PlanOutcome, objective: Objective) -> PlanReport {
        let plan = &outcome.plan;
        let (before, after) = (&plan.before, &plan.after);
        let certificate = plan.certificate.as_ref();
        PlanReport {
            policy: plan.policy.clone(),
            budget_bytes: certificate.map(|c| step.shown(c.budget_bytes)),
            peak_before_bytes: before.peak_bytes,
            peak_after_bytes: after.peak_bytes,
            peak_is_bound: plan.peak_is_bound,
            static_bytes: after.static_bytes,
            saved_bytes: plan.saved_bytes(),
            recompute_flops: plan.recompute_flops(),
            forward_backward_flops: before.flops,
            overhead_pct: objective.overhead_pct(after, before),
            lower_bound_pct: certificate.map(|c| c.lower_bound_pct),
            gap_pct: certificate.map(|c| c.gap_pct),
            bound_class: certificate.map(|c| c.class.clone()),
            smallest_feasible_bytes: outcome.min_peak_bytes.map(|b| step.shown(b)),
            plan_seconds: outcome.seconds,
            offloaded: plan.schedule.offloaded.len(),
            slice_bytes: slice_bytes(step, plan),
            parts_tried: trials::list(step.input.chunks.tried.as_ref()),
            segments: plan.segments.len(),
            blocks: step.input.annotations.layers,
            kv_sharing: step.kv_sharing.clone(),
            dims: step.dims.clone(),
            assumed_dims: step.assumed_dims.clone(),
        }
    }

    /// Returns the line about results of which ranks keep slices; empty where they keep none.
    pub fn slices_line(&self) -> String {
        match self.slice_bytes {
            0 => String::new(),
            kept => format!(
                "  keeps a slice of the results of {} ops: {} on each rank, gathered before they are read again\n",
                self.offloaded,
                bytes(kept)
            ),
        }
    }

    /// Returns the line with the smallest feasible budget; empty where that is unknown.
    pub fn smallest_line(&self) -> String {
        self.smallest_feasible_bytes
            .map_or(String::new(), |smallest| {
                format!(
                    "  smallest feasible budget: {smallest} bytes ({})\n",
                    bytes(smallest)
                )
            })
    }
}

/// Returns what a rank keeps of the results that are moved to other ranks.
fn slice_bytes(step: &TrainingStep, plan: &Plan) -> u64 {
    let moved = plan.schedule.offloaded.iter();
    moved.map(|op| step.input.problem.slice_bytes(*op)).sum()
}

/// What `plan` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The figures that `optimize` reports too.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// What overhead, bound and gap are measured in: `cost` or `flops`.
    pub objective: &'static str,
    /// What `budget_bytes` and `smallest_feasible_bytes` are on: `peak`, or `peak above static` for a cost graph.
    pub budget_on: &'static str,
    /// Peak of the unplanned step without its static bytes.
    pub peak_above_static_before_bytes: u64,
    /// Peak of the plan without its static bytes.
    pub peak_above_static_after_bytes: u64,
    /// Cost of the unplanned step: microseconds, unless the maker of a cost graph says otherwise.
    pub cost_before: f64,
    /// Cost of the plan, transfers included, in the unit of `cost_before`.
    pub cost_after: f64,
    /// Bytes that the plan reads, writes and transfers.
    pub traffic_after_bytes: u64,
    /// The most bytes that are off the device at once.
    pub outside_peak_bytes: u64,
    /// Bytes that leave the device and bytes that come back.
    pub transferred_bytes: u64,
    /// Bytes that a rank receives from the others in a step; 0 for one process.
    pub link_bytes: u64,
    /// The part of `cost_after` that exchanges between ranks take, as if nothing ran beside them.
    pub link_cost: f64,
    /// Extra cost over the unplanned step, in percent of it.
    pub cost_overhead_pct: f64,
    /// Extra FLOPs over the unplanned step, in percent of it.
    pub flops_overhead_pct: f64,
    /// Extra bytes read and written over the unplanned step, in percent of it.
    pub traffic_overhead_pct: f64,
    /// The chunk count of the loss.
    pub loss_parts: Option<usize>,
    /// The chunk count of chains of ops on tokens.
    pub mlp_parts: Option<usize>,
    /// The number of ops of the unplanned step.
    pub ops: usize,
    /// The number of steps of the plan: runs of ops, recomputation included, and moves.
    pub steps: usize,
    /// The op at which the peak is reached.
    pub peak_at: Option<String>,
    /// Name of the device whose rates the costs are for.
    pub device: String,
    /// With `--compare`: policies beside budgeted plans of the same peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Vec<Row>>,
    /// With `--compare`: policies that do not apply; `None` if all do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare_left_out: Option<LeftOut>,
    /// With `--maximize`: the largest size that fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maximized: Option<super::maximize::Maximized>,
    /// Remarks for the user; empty if there are none.
    pub warnings: Vec<String>,
}

/// Policies that mean nothing here.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    /// Words of the policies, as users write them.
    pub policies: Vec<String>,
    /// Why they do not apply, as a clause for people.
    pub because: &'static str,
}

/// A policy beside the best that is known at its peak.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The policy as users write it, or `offload cpu` for all results offloaded.
    pub policy: String,
    /// In the terms of budgets.
    pub peak_bytes: u64,
    /// Overhead of the policy by the objective, in percent of the unplanned step.
    pub overhead_pct: f64,
    /// What a budgeted plan of the same peak takes, and what nothing goes below.
    pub budget_overhead_pct: Option<f64>,
    /// Overhead that no plan of that peak goes below, in percent; `None` where none is known to fit.
    pub lower_bound_pct: Option<f64>,
}

impl Report {
    /// Returns the report of a plan, with overhead by an objective.
    pub fn new(step: &TrainingStep, outcome: &PlanOutcome, objective: Objective) -> Report {
        let (input, plan) = (&step.input, &outcome.plan);
        let (before, after) = (&plan.before, &plan.after);
        let peak_at = after.at_step.and_then(|at| plan.schedule.steps.get(at));
        let runs = plan.runs().map(|o| &input.problem.ops[o]);
        let mut exchanges: Vec<(u64, f64)> = runs
            .filter(|op| op.link_bytes > 0)
            .map(|op| (op.link_bytes, op.cost))
            .collect();
        let problem = &input.problem;
        let steps = plan.schedule.steps.iter();
        let fetches = steps.filter(|step| matches!(step, Step::Fetch(_)));
        exchanges.extend(fetches.filter_map(|step| {
            let own = problem.slice_bytes(step.op());
            let others = problem.result_bytes(step.op()).saturating_sub(own);
            (own > 0).then(|| (others, problem.cost(*step)))
        }));
        let (outside_peak_bytes, transferred_bytes) = match plan.offload_to {
            OffloadTarget::Ranks => (0, 0),
            _ => outside_bytes(problem, &plan.schedule.steps),
        };
        Report {
            plan: PlanReport::new(step, outcome, objective),
            outside_peak_bytes,
            transferred_bytes,
            objective: objective.word(),
            budget_on: input.basis.name(),
            peak_above_static_before_bytes: before.peak_above_static_bytes,
            peak_above_static_after_bytes: after.peak_above_static_bytes,
            cost_before: before.cost,
            cost_after: after.cost,
            traffic_after_bytes: after.traffic_bytes,
            link_bytes: exchanges.iter().map(|(bytes, _)| bytes).sum(),
            link_cost: exchanges.iter().map(|(_, cost)| cost).sum(),
            cost_overhead_pct: after.overhead_pct(before),
            flops_overhead_pct: after.flops_overhead_pct(before),
            traffic_overhead_pct: after.traffic_overhead_pct(before),
            loss_parts: plan.loss_chunks,
            mlp_parts: plan.mlp_chunks,
            ops: input.problem.ops.len(),
            steps: plan.schedule.steps.len(),
            peak_at: peak_at.map(|step| input.problem.ops[step.op()].name.clone()),
            device: step.device.name.clone(),
            compare: None,
            compare_left_out: None,
            maximized: None,
            warnings: step.warnings.clone(),
        }
    }

    /// Returns the lines for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        if let Some(found) = &self.maximized {
            let _ = writeln!(out, "{}", found.human());
        }
        let budget = match self.plan.budget_bytes {
            Some(n) => format!(" {} on the {}", bytes(n), self.budget_on),
            None => String::new(),
        };
        let _ = writeln!(
            out,
            "{}{budget}: {} ops, {} layers, {} steps, planned in {:.3} s",
            self.plan.policy, self.ops, self.plan.blocks, self.steps, self.plan.plan_seconds
        );
        let most = at_most(self.plan.peak_is_bound);
        let line = |out: &mut String, what: &str, before: u64, after: u64| {
            let _ = writeln!(
                out,
                "  {what:<20}{most}{:>12} -> {most}{:>10}   {:.1} % less",
                bytes(before),
                bytes(after),
                100.0 * (before as f64 - after as f64) / (before as f64).max(1.0)
            );
        };
        line(
            &mut out,
            "peak",
            self.plan.peak_before_bytes,
            self.plan.peak_after_bytes,
        );
        line(
            &mut out,
            "peak above static",
            self.peak_above_static_before_bytes,
            self.peak_above_static_after_bytes,
        );
        if let Some(at) = &self.peak_at {
            let _ = writeln!(out, "  reached at `{at}`");
        }
        let _ = writeln!(
            out,
            "  overhead: {:.2} % time by the cost model, {:.2} % FLOPs ({} in {} segments), {:.2} % bytes moved",
            self.cost_overhead_pct,
            self.flops_overhead_pct,
            flops(self.plan.recompute_flops),
            self.plan.segments,
            self.traffic_overhead_pct
        );
        out.push_str(&self.plan.slices_line());
        if self.transferred_bytes > 0 {
            let _ = writeln!(
                out,
                "  offloads results of {} ops: at most {} are outside at once, {} leave and come back",
                self.plan.offloaded,
                bytes(self.outside_peak_bytes),
                bytes(self.transferred_bytes)
            );
        }
        if self.link_bytes > 0 {
            let _ = writeln!(
                out,
                "  exchanges: a rank receives {}, which takes {:.1} % of the time by the cost model",
                bytes(self.link_bytes),
                100.0 * self.link_cost / self.cost_after
            );
        }
        if let (Some(lower), Some(gap)) = (self.plan.lower_bound_pct, self.plan.gap_pct) {
            let _ = writeln!(
                out,
                "  proven: no plan within the budget has less than {lower:.2} % {}; gap {gap:.2} %",
                match self.objective {
                    "flops" => "more FLOPs",
                    _ => "more time",
                }
            );
        }
        if let Some(class) = &self.plan.bound_class {
            let _ = writeln!(out, "  (among {class})");
        }
        for (what, parts) in [("the loss", self.loss_parts), ("MLPs", self.mlp_parts)] {
            if let Some(parts) = parts {
                let _ = writeln!(out, "  {what} in {parts} parts");
            }
        }
        out.push_str(&trials::human(&self.plan.parts_tried));
        out.push_str(&self.plan.smallest_line());
        if let Some(rows) = &self.compare {
            out.push_str(&table(rows, self.plan.peak_is_bound));
        }
        if let Some(left_out) = &self.compare_left_out {
            let words = left_out.policies.join(", ");
            let _ = writeln!(out, "  not compared: {words}: {}", left_out.because);
        }
        out
    }
}

/// Policies beside budgeted plans of the same peak.
pub fn table(rows: &[Row], peak_is_bound: bool) -> String {
    let mut out = String::new();
    let peak = format!("{}peak", at_most(peak_is_bound));
    let _ = writeln!(
        out,
        "\n  {:<14}{:>12}{:>12}{:>22}{:>14}",
        "policy", peak, "overhead", "budgeted, same peak", "lower bound"
    );
    let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.2} %"));
    for row in rows {
        let _ = writeln!(
            out,
            "  {:<14}{:>12}{:>12}{:>22}{:>14}",
            row.policy,
            bytes(row.peak_bytes),
            percent(Some(row.overhead_pct)),
            percent(row.budget_overhead_pct),
            percent(row.lower_bound_pct)
        );
    }
    out
}

/// Returns the policies that are not in the table of [`compare`], and why; `None` if all are.
pub fn left_out(step: &TrainingStep) -> Option<LeftOut> {
    let policies = policies_left_out(&step.input);
    let because = match step.input.basis {
        Basis::AboveStatic => "they need a model, a cost graph does not say what its layers are",
        Basis::Peak if step.input.annotations.layers == 0 => "they need layers, none were found",
        Basis::Peak => "they do not apply to this model",
    };
    (!policies.is_empty()).then_some(LeftOut { policies, because })
}

/// Returns a row for every policy that applies, and one with all results offloaded that may be, each beside the budgeted plan at
/// its peak.
///
/// # Errors
/// A step that does not run in its own order.
pub fn compare(step: &TrainingStep, request: &PlanRequest) -> Result<Vec<Row>> {
    let input = &step.input;
    let mut rivals: Vec<(String, Plan)> = policies(input)
        .map(|(policy, plan)| (policy.to_string(), plan))
        .collect();
    if input.problem.transfer.is_some() {
        // To a disk it takes as long, as far as devices are known.
        let moved = PlanRequest {
            goal: Goal::Policy(Policy::NONE),
            offload: Offload {
                set: OffloadSet::All,
                host_bytes: None,
                ..request.offload
            },
            ..*request
        };
        rivals.push(("offload cpu".into(), offload::plan(input, &moved)?));
    }
    let peaks: Vec<u64> = rivals.iter().map(|(_, p)| p.after.peak_bytes).collect();
    let solutions = frontier(input, request, &peaks, Vec::new())?;
    let overhead_pct =
        |after: &Score, before: &Score| request.objective.overhead_pct(after, before);
    let rows = rivals
        .iter()
        .zip(&solutions)
        .map(|((policy, plan), solution)| Row {
            policy: policy.clone(),
            peak_bytes: step.shown(plan.after.peak_bytes),
            overhead_pct: overhead_pct(&plan.after, &plan.before),
            budget_overhead_pct: solution
                .as_ref()
                .map(|s| overhead_pct(&s.score, &plan.before)),
            lower_bound_pct: solution.as_ref().map(|s| s.bound.lower_pct),
        });
    Ok(rows.collect())
}
