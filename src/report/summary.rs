//! The report of `optimize`: a JSON object for programs, a table before and after for people.

use super::sharing;
use crate::planning::report::PlanReport;
use crate::planning::trials;
use crate::provenance::keys;
use crate::report::account::Account;
use crate::report::console;
use crate::report::memory::Held;
use crate::report::verdict::Fate;
use crate::units::{bytes, flops, percent};
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::{FOUND_INF, GRAD_NORM, training_outputs, updated};
use ckpt_passes::analysis::loss_values;
use ckpt_passes::analysis::sdpa::choice::{AttentionKernels, memory_on};
use ckpt_passes::analysis::{Binding, Breakdown, Device, MemoryProfile, Sizes};
use ckpt_passes::compile::Compiled;
use ckpt_passes::ir::{Graph, ValueId};
use ckpt_passes::plan::{Objective, PlanOutcome};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// What `optimize` prints: the figures of the plan, and of the graph that it rewrote.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The figures of the plan; their keys stand at the top level of the JSON.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// The loss that was differentiated; null where the file had its backward.
    pub loss: Option<String>,
    /// The ops that were fused, and how often.
    pub fused: BTreeMap<&'static str, usize>,
    /// The chunk counts of the head and the loss, by the node that makes the scores.
    pub tiled: BTreeMap<String, usize>,
    /// The chunk counts of chains of ops on tokens, by their first nodes.
    pub tiled_mlps: BTreeMap<String, usize>,
    /// The number of chunks of the sequence that go through the model one after the other; null where it is not cut.
    pub sequence_chunks: Option<usize>,
    /// What updates the parameters, with all its settings; null where nothing does.
    pub optimizer: Option<String>,
    /// Whether each update runs as soon as its gradient is complete, so that gradients are no outputs.
    pub fuse_optimizer: bool,
    /// Number of parameters that the graph itself updates; 0 without an optimizer.
    pub updated_parameters: usize,
    /// The objective of a budgeted plan: `cost` or `flops`.
    pub objective: Option<String>,
    /// How many attention nodes are counted with which kernels of the device, gradients and recomputations included.
    pub attention: AttentionKernels,
    /// The most bytes that are offloaded at once.
    pub outside_peak_bytes: u64,
    /// Sizes only the data decides, and the upper bounds that stand for them: the figures are upper bounds then.
    pub bounded_dims: BTreeMap<String, i64>,
    /// Forward outputs that the training graph keeps, and the bytes each holds to the end.
    pub kept_outputs: BTreeMap<String, u64>,
    /// Bytes live at the peak of the unplanned graph, by row of the table.
    pub at_peak_before: BTreeMap<&'static str, u64>,
    /// Bytes live at the peak of the rewritten graph, by the same rows.
    pub at_peak_after: BTreeMap<&'static str, u64>,
    /// The largest storages that are alive at the peak, largest first; at most [`LARGEST`].
    pub largest_at_peak: Vec<Held>,
    /// The largest value between the last products of the model and the loss, or cotangent of one, whenever it is alive; null
    /// where no output is a loss.
    pub largest_of_loss: Option<ValueSize>,
    /// Number of parameters with a gradient.
    pub trained_parameters: usize,
    /// Number of parameters without a gradient.
    pub frozen_parameters: usize,
    /// Forward results that are freed and recomputed.
    pub recomputed_bytes: u64,
    /// Warnings of the passes.
    pub warnings: Vec<String>,
}

/// A value and its size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ValueSize {
    /// The name of the value.
    pub name: String,
    /// The size of its contents.
    pub bytes: u64,
}

/// The number of storages in the table.
pub const LARGEST: usize = 5;

/// The memory table of a graph at a binding, on a device.
pub struct Measured {
    /// Shapes and bytes of all values at the binding.
    pub sizes: Sizes,
    /// Memory profile at the device's block size.
    pub memory: MemoryProfile,
    /// How many attention nodes are counted with which kernels.
    pub attention: AttentionKernels,
    /// Bytes live at the peak of `memory`, by what they are for.
    pub rows: Breakdown,
}

impl Measured {
    /// # Errors
    /// A size without a number.
    pub fn new(graph: &Graph, binding: &Binding, device: &Device) -> Result<Measured> {
        let sizes = Sizes::new(graph, binding)?;
        let (memory, attention) = memory_on(graph, &sizes, device)?;
        let rows = Breakdown::new(graph, &memory);
        Ok(Measured {
            sizes,
            memory,
            attention,
            rows,
        })
    }
}

/// Returns true if the value that leaves the graph is the result of a recompute node.
fn is_recomputed(graph: &Graph, output: ValueId) -> bool {
    let node = graph.def_node(output);
    node.is_some_and(|id| graph.node(id).recompute_of.is_some())
}

impl Summary {
    /// Returns the summary of a rewritten graph. `account` is of its plan, `unplanned` the graph before it was rewritten.
    ///
    /// # Errors
    /// A bug if the rewritten graph does not have the memory that the plan predicts.
    pub fn new(
        graph: &Graph,
        unplanned: &Graph,
        compiled: &Compiled,
        binding: &Binding,
        (outcome, account): (&PlanOutcome, &Account),
    ) -> Result<Summary> {
        let (step, plan) = (account.step, &outcome.plan);
        let before = Measured::new(unplanned, binding, &step.device)?;
        let after = Measured::new(graph, binding, &step.device)?;
        if after.memory.peak_bytes != plan.after.peak_bytes {
            return Err(ckpt_passes::Error::bug(
                "memory",
                "the peak of the rewritten graph is not the peak of its plan",
            )
            .expected(format!("{} bytes", plan.after.peak_bytes))
            .found(format!("{} bytes", after.memory.peak_bytes)));
        }
        let training = training_outputs(graph);
        let named = |v: &ValueId| graph.value(*v).name.clone();
        let is_told = |name: &str| ["loss", GRAD_NORM, FOUND_INF].contains(&name);
        let kept = graph
            .outputs()
            .iter()
            .filter(|v| !training.contains(v) && !is_told(&named(v)) && !is_recomputed(graph, **v));
        let objective = plan.certificate.as_ref().map(|c| c.objective.clone());
        let by = objective
            .as_deref()
            .map_or(Ok(Objective::Cost), Objective::parse)?;
        let mut largest_at_peak = account.after.at_peak();
        largest_at_peak.truncate(LARGEST);
        let largest_of_loss = loss_values::largest(unplanned, &before.sizes);
        let recomputed = account.verdicts.iter();
        let recomputed = recomputed.filter(|v| v.fate == Fate::Recomputed);
        Ok(Summary {
            plan: PlanReport::new(step, outcome, by),
            loss: step.loss.clone(),
            fused: compiled.fused.clone(),
            tiled: compiled.tiled.iter().cloned().collect(),
            tiled_mlps: compiled.tiled_mlps.iter().cloned().collect(),
            sequence_chunks: compiled.sequence.as_ref().map(|s| s.chunks),
            optimizer: graph.meta.get(keys::OPTIMIZER).cloned(),
            fuse_optimizer: graph.meta.contains_key(keys::FUSE_OPTIMIZER),
            updated_parameters: updated(graph).len(),
            objective,
            attention: after.attention,
            outside_peak_bytes: after.memory.outside_peak_bytes,
            bounded_dims: after.sizes.bounded.clone(),
            kept_outputs: kept.map(|v| (named(v), after.sizes.bytes(*v))).collect(),
            at_peak_before: before.rows.rows().into_iter().collect(),
            at_peak_after: after.rows.rows().into_iter().collect(),
            largest_at_peak,
            largest_of_loss: largest_of_loss.map(|(value, bytes)| ValueSize {
                name: unplanned.value(value).name.clone(),
                bytes,
            }),
            trained_parameters: step.labels.trained,
            frozen_parameters: step.labels.frozen,
            recomputed_bytes: recomputed.map(|v| v.bytes).sum(),
            warnings: compiled.warnings.clone(),
        })
    }

    /// Returns the table for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        let loss = self.loss.as_deref().unwrap_or("the file's own backward");
        let _ = writeln!(
            out,
            "policy {}, loss {loss}, {} layers, {} parameters trained, {} frozen",
            self.plan.policy, self.plan.blocks, self.trained_parameters, self.frozen_parameters
        );
        out.push_str(&sharing::human(&self.plan.kv_sharing));
        let sizes = console::sizes(&self.plan.dims, |name| {
            match self.plan.assumed_dims.contains(name) {
                true => format!(" (assumed: say --dim {name}=N)"),
                false => String::new(),
            }
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
            match self.plan.peak_is_bound {
                true => "peak, at most",
                false => "peak",
            },
            bytes(self.plan.peak_before_bytes),
            bytes(self.plan.peak_after_bytes),
            percent(self.plan.saved_bytes, self.plan.peak_before_bytes)
        );
        out.push('\n');
        out.push_str(&console::bars(
            self.plan.peak_before_bytes,
            self.plan.peak_after_bytes,
            self.plan.budget_bytes,
            self.plan.peak_is_bound,
        ));
        let _ = writeln!(out, "\n  largest at the peak");
        out.push_str(&console::largest(&self.largest_at_peak));
        if let Some(value) = &self.largest_of_loss {
            let of = format!(
                "  largest of the loss: {} of `{}`",
                bytes(value.bytes),
                value.name
            );
            let _ = writeln!(out, "{of}");
        }
        let _ = writeln!(
            out,
            "\n  recomputes {} ({}) in {} segments: {:.1} % more FLOPs, {:.1} % overhead",
            bytes(self.recomputed_bytes),
            flops(self.plan.recompute_flops),
            self.plan.segments,
            percent(self.plan.recompute_flops, self.plan.forward_backward_flops),
            self.plan.overhead_pct
        );
        if let Some(line) = self.attention.line() {
            let _ = writeln!(out, "  {line}");
        }
        out.push_str(&self.plan.slices_line());
        if self.plan.offloaded > 0 && self.plan.slice_bytes == 0 {
            let _ = writeln!(
                out,
                "  offloads the results of {} ops: at most {} outside at once",
                self.plan.offloaded,
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
        if let Some(chunks) = self.sequence_chunks {
            let _ = writeln!(
                out,
                "  the sequence goes through the model in {chunks} chunks, one after the other"
            );
        }
        out.push_str(&trials::human(&self.plan.parts_tried));
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
        if let (Some(lower), Some(gap), Some(budget)) = (
            self.plan.lower_bound_pct,
            self.plan.gap_pct,
            self.plan.budget_bytes,
        ) {
            let _ = writeln!(
                out,
                "  budget {}: proven that no plan within it has less than {lower:.2} % overhead; gap {gap:.2} %",
                bytes(budget)
            );
        }
        out.push_str(&self.plan.smallest_line());
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
