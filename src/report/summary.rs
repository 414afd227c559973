//! What optimize reports: one JSON object for programs, a before/after table for people.

use super::sharing::{self, KvSharing};
use crate::planning::trials;
use crate::provenance::keys;
use crate::report::account::Account;
use crate::report::console;
use crate::report::memory::Held;
use crate::report::verdict::Fate;
use crate::units::{bytes, flops};
use ckpt_passes::Result;
use ckpt_passes::analysis::{Binding, Breakdown, Device, MemoryProfile, Sizes};
use ckpt_passes::compile::Compiled;
use ckpt_passes::driver::Made;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::Trial;
use ckpt_passes::transform::joint::training_outputs;
use ckpt_passes::transform::optimizer::updated;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The outcome of a plan. Fields that only a budgeted plan has are null for a policy.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// With the options that refine it.
    pub policy: String,
    /// The loss that was differentiated; null where the file had its backward.
    pub loss: Option<String>,
    /// What was fused, and how often.
    pub fused: BTreeMap<&'static str, usize>,
    /// Into how many parts the head and the loss were cut, by the node that makes the scores.
    pub tiled: BTreeMap<String, usize>,
    /// Into how many parts chains of ops on tokens were cut, by their first nodes.
    pub tiled_mlps: BTreeMap<String, usize>,
    /// Numbers of parts that were planned, where that was left to the planner.
    pub parts_tried: Vec<Trial>,
    /// What updates the parameters, with all its settings; null where nothing does.
    pub optimizer: Option<String>,
    /// Whether each update runs as soon as its gradient is complete, so that gradients are no outputs.
    pub fuse_optimizer: bool,
    pub updated_parameters: usize,
    /// What a budgeted plan keeps small; the next three percentages are in its terms.
    pub objective: Option<String>,
    pub budget_bytes: Option<u64>,
    pub peak_before_bytes: u64,
    pub peak_after_bytes: u64,
    /// Parameters and inputs: resident throughout.
    pub static_bytes: u64,
    pub saved_bytes: u64,
    pub recompute_flops: u64,
    pub forward_backward_flops: u64,
    /// In percent of the unplanned step; time by the cost model, unless the objective says otherwise.
    pub overhead_pct: f64,
    pub lower_bound_pct: Option<f64>,
    pub gap_pct: Option<f64>,
    /// The schedules that the bound speaks of.
    pub bound_class: Option<String>,
    pub smallest_feasible_bytes: Option<u64>,
    pub plan_seconds: f64,
    /// How many results wait outside the device's memory, and the most bytes of them at once.
    pub offloaded: usize,
    pub outside_peak_bytes: u64,
    /// Recompute subgraphs.
    pub segments: usize,
    pub blocks: usize,
    pub kv_sharing: Vec<KvSharing>,
    /// Sizes the figures are for.
    pub dims: BTreeMap<String, i64>,
    /// Those of them that nobody gave.
    pub assumed_dims: Vec<String>,
    /// Sizes only the data decides, and the upper bounds that stand for them: the figures are upper bounds then.
    pub bounded_dims: BTreeMap<String, i64>,
    /// Forward outputs that the training graph keeps, and the bytes each holds to the end.
    pub kept_outputs: BTreeMap<String, u64>,
    pub at_peak_before: BTreeMap<&'static str, u64>,
    pub at_peak_after: BTreeMap<&'static str, u64>,
    /// The largest storages that are alive at the peak, largest first; at most [`LARGEST`].
    pub largest_at_peak: Vec<Held>,
    pub trained_parameters: usize,
    pub frozen_parameters: usize,
    /// Forward results that are freed and computed again.
    pub recomputed_bytes: u64,
    pub warnings: Vec<String>,
}

/// How many storages the table names.
pub const LARGEST: usize = 5;

/// The memory table of a graph at a binding, on a device.
pub struct Measured {
    pub sizes: Sizes,
    pub memory: MemoryProfile,
    pub rows: Breakdown,
}

impl Measured {
    /// # Errors
    /// A size without a number.
    pub fn new(graph: &Graph, binding: &Binding, device: &Device) -> Result<Measured> {
        let sizes = Sizes::new(graph, binding)?;
        let memory = MemoryProfile::rounded(graph, &sizes, device.granularity_bytes)?;
        let rows = Breakdown::new(graph, &memory);
        Ok(Measured {
            sizes,
            memory,
            rows,
        })
    }
}

impl Summary {
    /// `graph` is the rewritten graph that `made` led to, `before` the rows of the unplanned one.
    ///
    /// # Errors
    /// A bug if the rewritten graph does not have the memory that the plan predicts.
    pub fn new(
        graph: &Graph,
        compiled: &Compiled,
        made: &Made,
        before: &Breakdown,
    ) -> Result<Summary> {
        let after = Measured::new(graph, &made.binding, &made.subject.device)?;
        let score = &made.plan.after;
        let certificate = made.plan.certificate.as_ref();
        if after.memory.peak_bytes != score.peak_bytes {
            return Err(ckpt_passes::Error::bug(
                "memory",
                "the rewritten graph has another peak than its plan",
            )
            .expected(format!("{} bytes", score.peak_bytes))
            .found(format!("{} bytes", after.memory.peak_bytes)));
        }
        let training = training_outputs(graph);
        let named = |v: &ckpt_passes::ir::ValueId| graph.value(*v).name.clone();
        let kept = graph
            .outputs()
            .iter()
            .filter(|v| !training.contains(v) && named(v) != "loss");
        Ok(Summary {
            policy: made.plan.policy.clone(),
            loss: compiled.loss.as_ref().map(|l| l.to_string()),
            fused: compiled.fused.clone(),
            tiled: compiled.tiled.iter().cloned().collect(),
            tiled_mlps: compiled.tiled_mlps.iter().cloned().collect(),
            parts_tried: trials::list(compiled.tried.as_ref()),
            optimizer: graph.meta.get(keys::OPTIMIZER).cloned(),
            fuse_optimizer: graph.meta.contains_key(keys::FUSE_OPTIMIZER),
            updated_parameters: updated(graph).len(),
            objective: certificate.map(|c| c.objective.clone()),
            budget_bytes: certificate.map(|c| c.budget_bytes),
            peak_before_bytes: made.plan.before.peak_bytes,
            peak_after_bytes: score.peak_bytes,
            static_bytes: score.static_bytes,
            saved_bytes: made.plan.saved_bytes(),
            recompute_flops: made.plan.recompute_flops(),
            forward_backward_flops: made.plan.before.flops,
            overhead_pct: match certificate {
                Some(c) if c.objective == "flops" => score.flops_overhead_pct(&made.plan.before),
                _ => score.overhead_pct(&made.plan.before),
            },
            lower_bound_pct: certificate.map(|c| c.lower_bound_pct),
            gap_pct: certificate.map(|c| c.gap_pct),
            bound_class: certificate.map(|c| c.class.clone()),
            smallest_feasible_bytes: made.smallest_bytes,
            plan_seconds: made.seconds,
            offloaded: made.plan.offloaded.len(),
            outside_peak_bytes: after.memory.outside_peak_bytes,
            segments: made.plan.segments.len(),
            blocks: made.subject.blocks.list.len(),
            kv_sharing: sharing::kv_sharing(&made.subject.blocks),
            dims: made
                .binding
                .iter()
                .map(|(n, size)| (n.to_string(), size))
                .collect(),
            assumed_dims: made
                .binding
                .assumed()
                .map(|(n, ..)| n.to_string())
                .collect(),
            bounded_dims: after.sizes.bounded.clone(),
            kept_outputs: kept.map(|v| (named(v), after.sizes.bytes(*v))).collect(),
            at_peak_before: before.rows().into_iter().collect(),
            at_peak_after: after.rows.rows().into_iter().collect(),
            largest_at_peak: Vec::new(),
            trained_parameters: 0,
            frozen_parameters: 0,
            recomputed_bytes: 0,
            warnings: compiled.warnings.clone(),
        })
    }

    /// Adds what the account of the plan tells.
    #[must_use]
    pub fn with(mut self, account: &Account) -> Summary {
        let labels = &account.task.labels;
        let mut held = account.after.at_peak();
        held.truncate(LARGEST);
        self.largest_at_peak = held;
        (self.trained_parameters, self.frozen_parameters) = (labels.trained, labels.frozen);
        let again = account
            .verdicts
            .iter()
            .filter(|v| v.fate == Fate::Recomputed);
        self.recomputed_bytes = again.map(|v| v.bytes).sum();
        self
    }

    /// The table for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        let loss = self.loss.as_deref().unwrap_or("the file's own backward");
        let _ = writeln!(
            out,
            "policy {}, loss {loss}, {} layers, {} parameters trained, {} frozen",
            self.policy, self.blocks, self.trained_parameters, self.frozen_parameters
        );
        out.push_str(&sharing::human(&self.kv_sharing));
        let _ = writeln!(out, "planned at {}\n", self.planned_at());
        let _ = writeln!(
            out,
            "  {:<22}{:>14}{:>14}",
            "alive at the peak", "before", "after"
        );
        for (row, before) in Breakdown::default()
            .rows()
            .map(|(row, _)| (row, self.at_peak_before[row]))
        {
            if row == "state" && self.optimizer.is_none() {
                continue;
            }
            let after = self.at_peak_after[row];
            let _ = writeln!(out, "  {row:<22}{:>14}{:>14}", bytes(before), bytes(after));
        }
        let _ = writeln!(
            out,
            "  {:<22}{:>14}{:>14}   {:.1} % less",
            "peak",
            bytes(self.peak_before_bytes),
            bytes(self.peak_after_bytes),
            percent(self.saved_bytes, self.peak_before_bytes)
        );
        out.push('\n');
        out.push_str(&console::bars(
            self.peak_before_bytes,
            self.peak_after_bytes,
            self.budget_bytes,
        ));
        let _ = writeln!(out, "\n  largest at the peak");
        out.push_str(&console::largest(&self.largest_at_peak));
        let _ = writeln!(
            out,
            "\n  recomputes {} ({}) in {} segments: {:.1} % more FLOPs, {:.1} % overhead",
            bytes(self.recomputed_bytes),
            flops(self.recompute_flops),
            self.segments,
            percent(self.recompute_flops, self.forward_backward_flops),
            self.overhead_pct
        );
        if self.offloaded > 0 {
            let _ = writeln!(
                out,
                "  offloads the results of {} ops: at most {} outside at once",
                self.offloaded,
                bytes(self.outside_peak_bytes)
            );
        }
        for (node, parts) in &self.tiled {
            let _ = writeln!(
                out,
                "  tiled in {parts} parts: from {node} to the loss and back"
            );
        }
        if let Some((node, parts)) = self.tiled_mlps.iter().next() {
            let _ = writeln!(
                out,
                "  {} chains tiled in {parts} parts, forward and backward: from {node}, …",
                self.tiled_mlps.len()
            );
        }
        out.push_str(&trials::human(&self.parts_tried));
        if let Some(optimizer) = &self.optimizer {
            let when = match self.fuse_optimizer {
                true => "each as soon as its gradient is complete; gradients are no outputs",
                false => "at the end",
            };
            let _ = writeln!(
                out,
                "  updates {} parameters by {optimizer}, {when}",
                self.updated_parameters
            );
        }
        if let (Some(lower), Some(gap), Some(budget)) =
            (self.lower_bound_pct, self.gap_pct, self.budget_bytes)
        {
            let _ = writeln!(
                out,
                "  budget {}: proven that no plan within it has less than {lower:.2} % overhead; gap {gap:.2} %",
                bytes(budget)
            );
        }
        if let Some(smallest) = self.smallest_feasible_bytes {
            let _ = writeln!(
                out,
                "  smallest feasible budget: {smallest} bytes ({})",
                bytes(smallest)
            );
        }
        for (name, size) in &self.kept_outputs {
            let _ = writeln!(
                out,
                "  output {name} holds {} to the end (--drop-output {name})",
                bytes(*size)
            );
        }
        for (name, size) in &self.bounded_dims {
            let _ = writeln!(
                out,
                "  data decides ?{name}: taken at its bound {size}, so figures are upper bounds"
            );
        }
        out
    }

    fn planned_at(&self) -> String {
        let show = |(name, size): (&String, &i64)| match self.assumed_dims.contains(name) {
            true => format!("{name}={size} (assumed: say --dim {name}=N)"),
            false => format!("{name}={size}"),
        };
        let all: Vec<String> = self.dims.iter().map(show).collect();
        if all.is_empty() {
            "the file's fixed sizes".into()
        } else {
            all.join(", ")
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        100.0 * part as f64 / whole as f64
    }
}
