//! What `plan` says: one JSON object for programs, a few lines for people.

use super::task::{Planned, Task};
use super::trials;
use crate::units::{bytes, flops};
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::plan::offload::{By, What};
use ckpt_passes::plan::{Basis, Objective, Offloading, Plan, Policy, Score, Trial, budgeted};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The outcome of a plan. Fields that only a budgeted plan has are null for others.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub policy: String,
    /// What overhead, bound and gap are measured in: `cost` or `flops`.
    pub objective: &'static str,
    pub budget_bytes: Option<u64>,
    /// What `budget_bytes` and `smallest_feasible_bytes` are on: `peak`, or `peak above static` for a cost graph.
    pub budget_on: &'static str,
    pub peak_before_bytes: u64,
    pub peak_after_bytes: u64,
    pub static_bytes: u64,
    pub peak_above_static_before_bytes: u64,
    pub peak_above_static_after_bytes: u64,
    pub saved_bytes: u64,
    pub recompute_flops: u64,
    pub forward_backward_flops: u64,
    pub cost_before: f64,
    pub cost_after: f64,
    pub traffic_after_bytes: u64,
    /// By the objective, in percent of the unplanned step; so are the next two.
    pub overhead_pct: f64,
    pub lower_bound_pct: Option<f64>,
    pub gap_pct: Option<f64>,
    /// The schedules that the bound speaks of.
    pub bound_class: Option<String>,
    pub cost_overhead_pct: f64,
    pub flops_overhead_pct: f64,
    pub traffic_overhead_pct: f64,
    pub smallest_feasible_bytes: Option<u64>,
    pub plan_seconds: f64,
    /// How many ops have results that wait outside the device's memory.
    pub offloaded: usize,
    /// Into how many parts the loss was cut.
    pub loss_parts: Option<usize>,
    /// The same for chains of ops on tokens.
    pub mlp_parts: Option<usize>,
    /// Numbers of parts that were planned, where that was left to the planner.
    pub parts_tried: Vec<Trial>,
    pub segments: usize,
    pub blocks: usize,
    pub kv_sharing: Vec<KvSharing>,
    pub ops: usize,
    pub steps: usize,
    /// The op at which the peak is reached.
    pub peak_at: Option<String>,
    pub device: String,
    pub dims: BTreeMap<String, i64>,
    pub assumed_dims: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Vec<Row>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare_left_out: Option<LeftOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maximized: Option<super::maximize::Maximized>,
    pub warnings: Vec<String>,
}

/// Policies that mean nothing here.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    pub policies: Vec<String>,
    pub because: &'static str,
}

/// A policy beside the best that is known at its peak.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub policy: String,
    /// In the terms of budgets.
    pub peak_bytes: u64,
    pub overhead_pct: f64,
    /// What a budgeted plan of the same peak takes, and what nothing goes below.
    pub budget_overhead_pct: Option<f64>,
    pub lower_bound_pct: Option<f64>,
}

/// Extra bytes read and written, in percent.
pub fn traffic_overhead_pct(score: &Score, before: &Score) -> f64 {
    if before.traffic_bytes == 0 {
        return 0.0;
    }
    100.0 * (score.traffic_bytes as f64 - before.traffic_bytes as f64) / before.traffic_bytes as f64
}

impl Report {
    pub fn new(task: &Task, planned: &Planned, objective: Objective) -> Report {
        let plan: &Plan = &planned.plan;
        let (before, after) = (&plan.before, &plan.after);
        let certificate = plan.certificate.as_ref();
        let at = after.at_step.and_then(|step| plan.schedule.get(step));
        let at = at.map(|step| plan.op_of(*step));
        Report {
            policy: plan.policy.clone(),
            objective: budgeted::word(objective),
            budget_bytes: certificate.map(|c| task.shown(c.budget_bytes)),
            budget_on: task.basis.name(),
            peak_before_bytes: before.peak_bytes,
            peak_after_bytes: after.peak_bytes,
            static_bytes: after.static_bytes,
            peak_above_static_before_bytes: before.peak_above_static_bytes,
            peak_above_static_after_bytes: after.peak_above_static_bytes,
            saved_bytes: plan.saved_bytes(),
            recompute_flops: plan.recompute_flops(),
            forward_backward_flops: before.flops,
            cost_before: before.cost,
            cost_after: after.cost,
            traffic_after_bytes: after.traffic_bytes,
            overhead_pct: budgeted::overhead_pct(objective, after, before),
            lower_bound_pct: certificate.map(|c| c.lower_bound_pct),
            gap_pct: certificate.map(|c| c.gap_pct),
            bound_class: certificate.map(|c| c.class.clone()),
            cost_overhead_pct: after.overhead_pct(before),
            flops_overhead_pct: after.flops_overhead_pct(before),
            traffic_overhead_pct: traffic_overhead_pct(after, before),
            smallest_feasible_bytes: planned.smallest_bytes.map(|b| task.shown(b)),
            plan_seconds: planned.seconds,
            offloaded: plan.offloaded.len(),
            loss_parts: plan.loss_parts,
            mlp_parts: plan.mlp_parts,
            parts_tried: trials::list(task.tried.as_ref()),
            segments: plan.segments.len(),
            blocks: task.structure.blocks,
            kv_sharing: task.kv_sharing.clone(),
            ops: task.problem.ops.len(),
            steps: plan.schedule.len(),
            peak_at: at.map(|op| task.problem.ops[op].name.clone()),
            device: task.device.name.clone(),
            dims: task.dims.clone(),
            assumed_dims: task.assumed_dims.clone(),
            compare: None,
            compare_left_out: None,
            maximized: None,
            warnings: task.warnings.clone(),
        }
    }

    /// The lines for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        if let Some(found) = &self.maximized {
            let _ = writeln!(out, "{}", found.human());
        }
        let budget = match self.budget_bytes {
            Some(n) => format!(" {} on the {}", bytes(n), self.budget_on),
            None => String::new(),
        };
        let _ = writeln!(
            out,
            "{}{budget}: {} ops, {} layers, {} steps, planned in {:.3} s",
            self.policy, self.ops, self.blocks, self.steps, self.plan_seconds
        );
        let line = |out: &mut String, what: &str, before: u64, after: u64| {
            let _ = writeln!(
                out,
                "  {what:<20}{:>12} -> {:>10}   {:.1} % less",
                bytes(before),
                bytes(after),
                100.0 * (before as f64 - after as f64) / (before as f64).max(1.0)
            );
        };
        line(
            &mut out,
            "peak",
            self.peak_before_bytes,
            self.peak_after_bytes,
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
            flops(self.recompute_flops),
            self.segments,
            self.traffic_overhead_pct
        );
        if let (Some(lower), Some(gap)) = (self.lower_bound_pct, self.gap_pct) {
            let _ = writeln!(
                out,
                "  proven: no plan within the budget has less than {lower:.2} % {}; gap {gap:.2} %",
                match self.objective {
                    "flops" => "more FLOPs",
                    _ => "more time",
                }
            );
        }
        if let Some(class) = &self.bound_class {
            let _ = writeln!(out, "  (among {class})");
        }
        for (what, parts) in [("the loss", self.loss_parts), ("MLPs", self.mlp_parts)] {
            if let Some(parts) = parts {
                let _ = writeln!(out, "  {what} in {parts} parts");
            }
        }
        out.push_str(&trials::human(&self.parts_tried));
        if let Some(smallest) = self.smallest_feasible_bytes {
            let _ = writeln!(
                out,
                "  smallest feasible budget: {smallest} bytes ({})",
                bytes(smallest)
            );
        }
        if let Some(rows) = &self.compare {
            out.push_str(&table(rows));
        }
        if let Some(left_out) = &self.compare_left_out {
            let words = left_out.policies.join(", ");
            let _ = writeln!(out, "  not compared: {words}: {}", left_out.because);
        }
        out
    }
}

/// Policies beside budgeted plans of the same peak.
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "\n  {:<14}{:>12}{:>12}{:>22}{:>14}",
        "policy", "peak", "overhead", "budgeted, same peak", "lower bound"
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

/// The policies that are not in the table of [`compare`], and why; `None` if all are.
pub fn left_out(task: &Task) -> Option<LeftOut> {
    let policies = budgeted::left_out(&task.setting());
    let because = match task.basis {
        Basis::AboveStatic => "they need a model, a cost graph does not say what its layers are",
        Basis::Peak if task.structure.blocks == 0 => "they need layers, none were found",
        Basis::Peak => "they do not apply to this model",
    };
    (!policies.is_empty()).then_some(LeftOut { policies, because })
}

/// Every policy that applies, all that may be moved moved out, and budgeted plans at their peaks.
///
/// # Errors
/// A task whose own order is not a schedule.
pub fn compare(
    task: &Task,
    budgeted: &ckpt_passes::plan::BudgetGoal,
) -> ckpt_passes::Result<Vec<Row>> {
    let setting = task.setting();
    let policies = budgeted::policies(&setting).map(|(policy, plan)| (policy.to_string(), plan));
    let mut policies: Vec<(String, Plan)> = policies.collect();
    if task.problem.transfer.is_some() {
        // To a disk it takes as long, as far as devices are known.
        let moved = Offloading {
            what: What::All,
            outside_bytes: None,
            ..task.offload
        };
        let plan = moved.plan(&setting, By::Policy(Policy::None))?;
        policies.push(("offload cpu".into(), plan));
    }
    let peaks: Vec<u64> = policies.iter().map(|(_, p)| p.after.peak_bytes).collect();
    let solutions = budgeted.frontier(&setting, &peaks, Vec::new())?;
    let rows = policies
        .iter()
        .zip(&solutions)
        .map(|((policy, plan), solution)| Row {
            policy: policy.clone(),
            peak_bytes: task.shown(plan.after.peak_bytes),
            overhead_pct: budgeted::overhead_pct(budgeted.objective, &plan.after, &plan.before),
            budget_overhead_pct: solution
                .as_ref()
                .map(|s| budgeted::overhead_pct(budgeted.objective, &s.score, &plan.before)),
            lower_bound_pct: solution.as_ref().map(|s| s.bound.lower_pct),
        });
    Ok(rows.collect())
}
