//! `frontier`: the overhead at every budget, from the smallest feasible one to the one that needs no recomputation.

use super::ablation::{Technique, spread};
use crate::planning::step::TrainingStep;
use crate::units::{at_most, bytes};
use ckpt_passes::Result;
use ckpt_passes::plan::budget::question;
use ckpt_passes::plan::on_device::{frontier, policies, smallest_peak};
use ckpt_passes::plan::solve::bound::class;
use ckpt_passes::plan::{Budget, PlanRequest, Score};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

/// The whole curve. Bytes are in the terms of budgets ([`Frontier::bytes_on`]); percentages are of the objective.
#[derive(Clone, Debug, Serialize)]
pub struct Frontier {
    /// What overhead is measured in: `cost` or `flops`.
    pub objective: &'static str,
    /// What bytes of budgets and peaks count: the whole peak, or the part above static bytes.
    pub bytes_on: &'static str,
    /// Parameters and inputs: resident throughout.
    pub static_bytes: u64,
    /// The peak without any recomputation.
    pub unplanned_bytes: u64,
    /// Whether peaks are upper bounds, for data decides some sizes.
    pub peak_is_bound: bool,
    /// Smallest peak that a schedule was found for.
    pub smallest_feasible_bytes: u64,
    /// Lower bound on the peak of any schedule.
    pub floor_bytes: u64,
    /// From the smallest budget to the largest.
    pub points: Vec<Point>,
    /// Policies that apply to the step, for comparison with the curve.
    pub policies: Vec<PolicyPoint>,
    /// Each memory-saving technique alone, and all together; empty unless asked for.
    pub ablation: Vec<Technique>,
    /// The schedules that the lower bounds cover; `None` if no budget is feasible.
    pub bound_class: Option<String>,
    /// Number of ops of the unplanned step.
    pub ops: usize,
    /// Number of layers.
    pub blocks: usize,
    /// Name of the device that the step is planned for.
    pub device: String,
    /// The sizes that the figures are for; empty for a cost graph.
    pub dims: BTreeMap<String, i64>,
    /// Wall-clock time of planning all points, in seconds.
    pub plan_seconds: f64,
    /// Warnings from reading and binding the step.
    pub warnings: Vec<String>,
}

/// One budget; the other fields are null where no plan fits.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The largest peak that the plan may have.
    pub budget_bytes: u64,
    /// Peak of the plan; at most the budget.
    pub peak_bytes: Option<u64>,
    /// Extra cost of the plan over the unplanned step, by the objective.
    pub overhead_pct: Option<f64>,
    /// Lower bound on the overhead of any schedule of the bound class at this budget.
    pub lower_bound_pct: Option<f64>,
    /// The most that the plan may be above the best of its class, in the same percent.
    pub gap_pct: Option<f64>,
    /// Extra time by the cost model, or as measured, whatever the objective.
    pub cost_overhead_pct: Option<f64>,
    /// Extra FLOPs, whatever the objective.
    pub flops_overhead_pct: Option<f64>,
    /// Extra bytes read and written.
    pub traffic_overhead_pct: Option<f64>,
}

/// A policy at its own peak, by the same judge.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyPoint {
    /// The policy as the command line spells it.
    pub policy: String,
    /// Peak of the plan that the policy gives.
    pub peak_bytes: u64,
    /// Extra cost of that plan over the unplanned step, by the objective.
    pub overhead_pct: f64,
}

impl Frontier {
    /// Plans at `given` budgets, or at `count` in equal steps where there are none.
    ///
    /// # Errors
    /// A step that cannot run in its own order.
    pub fn new(
        step: &TrainingStep,
        request: &PlanRequest,
        given: &[Budget],
        count: usize,
    ) -> Result<Frontier> {
        let started = Instant::now();
        let input = &step.input;
        let before = &step.before;
        let floor = smallest_peak(input, request)?;
        let mut budgets: Vec<u64> = if given.is_empty() {
            spread(floor.reached_bytes, before.peak_bytes, count)
        } else {
            let peak = |b: &Budget| b.peak_bytes(before, input.basis, input.usable_bytes);
            given.iter().map(peak).collect()
        };
        budgets.sort_unstable();
        budgets.dedup();
        let solutions = frontier(input, request, &budgets, vec![floor.schedule.clone()])?;
        let overhead = |score: &Score| request.objective.overhead_pct(score, before);
        let points = budgets.iter().zip(&solutions).map(|(budget, solution)| {
            let s = solution.as_ref();
            Point {
                budget_bytes: step.shown(*budget),
                peak_bytes: s.map(|s| step.shown(s.score.peak_bytes)),
                overhead_pct: s.map(|s| overhead(&s.score)),
                lower_bound_pct: s.map(|s| s.bound.lower_pct),
                gap_pct: s.map(|s| s.gap_pct),
                cost_overhead_pct: s.map(|s| s.score.overhead_pct(before)),
                flops_overhead_pct: s.map(|s| s.score.flops_overhead_pct(before)),
                traffic_overhead_pct: s.map(|s| s.score.traffic_overhead_pct(before)),
            }
        });
        let points: Vec<Point> = points.collect();
        let mut warnings = step.warnings.clone();
        let is_void = |n: u64| {
            points
                .iter()
                .any(|p| p.budget_bytes == n && p.peak_bytes.is_none())
        };
        warnings.extend(given.iter().filter_map(|budget| match budget {
            Budget::Bytes(n) if is_void(*n) => question(*n),
            _ => None,
        }));
        let policies = policies(input).map(|(policy, plan)| PolicyPoint {
            policy: policy.to_string(),
            peak_bytes: step.shown(plan.after.peak_bytes),
            overhead_pct: overhead(&plan.after),
        });
        Ok(Frontier {
            objective: request.objective.word(),
            bytes_on: input.basis.name(),
            static_bytes: before.static_bytes,
            unplanned_bytes: step.shown(before.peak_bytes),
            peak_is_bound: input.problem.is_bound,
            smallest_feasible_bytes: step.shown(floor.reached_bytes),
            floor_bytes: step.shown(floor.least_bytes),
            points,
            policies: policies.collect(),
            ablation: Vec::new(),
            bound_class: solutions
                .iter()
                .flatten()
                .next()
                .map(|s| class(s.bound.class, !input.overrides.is_empty())),
            ops: input.problem.ops.len(),
            blocks: input.annotations.layers,
            device: step.device.name.clone(),
            dims: step.dims.clone(),
            plan_seconds: started.elapsed().as_secs_f64(),
            warnings,
        })
    }

    /// Returns the table for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} ops, {} layers; bytes are {}the {}; overhead is {}; planned in {:.3} s\n",
            self.ops,
            self.blocks,
            at_most(self.peak_is_bound),
            self.bytes_on,
            match self.objective {
                "flops" => "FLOPs",
                _ => "time by the cost model",
            },
            self.plan_seconds
        );
        let _ = writeln!(
            out,
            "  {:>16}{:>12}{:>12}{:>12}{:>14}{:>10}",
            "budget bytes", "budget", "peak", "overhead", "lower bound", "gap"
        );
        let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.2} %"));
        for p in &self.points {
            let _ = writeln!(
                out,
                "  {:>16}{:>12}{:>12}{:>12}{:>14}{:>10}",
                p.budget_bytes,
                bytes(p.budget_bytes),
                p.peak_bytes.map_or("infeasible".into(), bytes),
                percent(p.overhead_pct),
                percent(p.lower_bound_pct),
                percent(p.gap_pct)
            );
        }
        let _ = writeln!(out, "\n  {:<16}{:>24}{:>12}", "policy", "peak", "overhead");
        for p in &self.policies {
            let _ = writeln!(
                out,
                "  {:<16}{:>24}{:>12}",
                p.policy,
                bytes(p.peak_bytes),
                percent(Some(p.overhead_pct))
            );
        }
        self.ablation_table(&mut out);
        let _ = writeln!(
            out,
            "\n  smallest feasible budget: {} bytes ({}); nothing goes below {} bytes",
            self.smallest_feasible_bytes,
            bytes(self.smallest_feasible_bytes),
            self.floor_bytes
        );
        out
    }
}

impl Frontier {
    /// Adds a table with the overhead of every technique at every budget.
    fn ablation_table(&self, out: &mut String) {
        let Some(first) = self.ablation.first() else {
            return;
        };
        let _ = write!(out, "\n  {:>16}{:>12}", "budget bytes", "budget");
        for technique in &self.ablation {
            let _ = write!(out, "{:>18}", technique.technique);
        }
        out.push('\n');
        for (i, point) in first.points.iter().enumerate() {
            let budget = point.budget_bytes;
            let _ = write!(out, "  {budget:>16}{:>12}", bytes(budget));
            for technique in &self.ablation {
                let percent = technique.points.get(i).and_then(|p| p.overhead_pct);
                let cell = percent.map_or("-".into(), |x| format!("{x:.2} %"));
                let _ = write!(out, "{cell:>18}");
            }
            out.push('\n');
        }
        let _ = write!(out, "  {:<28}", "smallest feasible");
        for technique in &self.ablation {
            let _ = write!(out, "{:>18}", bytes(technique.smallest_feasible_bytes));
        }
        out.push('\n');
    }
}
