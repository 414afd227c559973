//! The report of `optimize`: a JSON object for programs, a table before and after for people.

use super::sharing;
use crate::planning::trials;
use crate::provenance::keys;
use crate::report::account::Account;
use crate::report::console;
use crate::report::memory::Held;
use crate::report::verdict::Fate;
use crate::units::{bytes, flops, percent};
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::training_outputs;
use ckpt_passes::analysis::gradients::updated;
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::analysis::{Binding, Breakdown, Device, MemoryProfile, Sizes};
use ckpt_passes::compile::Compiled;
use ckpt_passes::driver::Made;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::Trial;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The result of a plan. Fields of budgets are null for a policy.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The policy with its overrides.
    pub policy: String,
    /// The loss that was differentiated; null where the file had its backward.
    pub loss: Option<String>,
    /// Fused ops, and how many of each.
    pub fused: BTreeMap<&'static str, usize>,
    /// Chunk counts of the head and the loss, by the node that computes the logits.
    pub tiled: BTreeMap<String, usize>,
    /// Chunk counts of chains of ops on tokens, by their first nodes.
    pub tiled_mlps: BTreeMap<String, usize>,
    /// Chunk counts that the planner tried (`auto` only).
    pub parts_tried: Vec<Trial>,
    /// The optimizer with all its settings; null without one.
    pub optimizer: Option<String>,
    /// True if each update runs as soon as its gradient is complete. Gradients are no outputs then.
    pub fuse_optimizer: bool,
    pub updated_parameters: usize,
    /// What the plan minimizes within its budget; the next three percentages are in its terms.
    pub objective: Option<String>,
    pub budget_bytes: Option<u64>,
    pub peak_before_bytes: u64,
    pub peak_after_bytes: u64,
    /// Parameters and inputs: resident throughout.
    pub static_bytes: u64,
    pub saved_bytes: u64,
    pub recompute_flops: u64,
    pub forward_backward_flops: u64,
    /// In percent of the unplanned step: time by the cost model, or FLOPs if those are the objective.
    pub overhead_pct: f64,
    pub lower_bound_pct: Option<f64>,
    pub gap_pct: Option<f64>,
    /// The class of schedules that the bound covers.
    pub bound_class: Option<String>,
    pub smallest_feasible_bytes: Option<u64>,
    pub plan_seconds: f64,
    /// The number of offloaded ops, and the most bytes offloaded at once.
    pub offloaded: usize,
    pub outside_peak_bytes: u64,
    /// Recompute subgraphs.
    pub segments: usize,
    pub blocks: usize,
    pub kv_sharing: Vec<KvSharing>,
    /// The sizes that all figures are for.
    pub dims: BTreeMap<String, i64>,
    /// The sizes among them that are defaults.
    pub assumed_dims: Vec<String>,
    /// Sizes that depend on data, with the upper bounds used for them; figures are then upper bounds.
    pub bounded_dims: BTreeMap<String, i64>,
    /// Forward outputs of the training graph, and the bytes that each holds to the end.
    pub kept_outputs: BTreeMap<String, u64>,
    pub at_peak_before: BTreeMap<&'static str, u64>,
    pub at_peak_after: BTreeMap<&'static str, u64>,
    /// The largest storages live at the peak, largest first; at most [`LARGEST`].
    pub largest_at_peak: Vec<Held>,
    pub trained_parameters: usize,
    pub frozen_parameters: usize,
    /// Bytes of forward results that are freed and recomputed.
    pub recomputed_bytes: u64,
    pub warnings: Vec<String>,
}

/// The number of storages in the table.
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
    /// Reports on the rewritten `graph`; `before` is the table of the unplanned graph.
    ///
    /// # Errors
    /// A bug if the peak of the rewritten graph is not the predicted one.
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
                "the peak of the rewritten graph is not the peak of its plan",
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
            kv_sharing: made.subject.blocks.kv_sharing.clone(),
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

    /// Adds figures from the account of the plan.
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

    /// Returns the table for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        let loss = self.loss.as_deref().unwrap_or("the file's own backward");
        let _ = writeln!(
            out,
            "policy {}, loss {loss}, {} layers, {} parameters trained, {} frozen",
            self.policy, self.blocks, self.trained_parameters, self.frozen_parameters
        );
        out.push_str(&sharing::human(&self.kv_sharing));
        let sizes = console::sizes(&self.dims, |name| match self.assumed_dims.contains(name) {
            true => format!(" (assumed: say --dim {name}=N)"),
            false => String::new(),
        });
        let _ = writeln!(out, "planned at {sizes}\n");
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
                "  computed in {parts} chunks: from {node} to the loss and back"
            );
        }
        if let Some((node, parts)) = self.tiled_mlps.iter().next() {
            let _ = writeln!(
                out,
                "  {} chains computed in {parts} chunks, forward and backward: from {node}, …",
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
}
