//! The data that every view of a plan prints, computed once.

use super::memory::{Held, KINDS, Kind, Memory};
use super::terms::Terms;
use super::verdict::{Fate, Verdict, verdicts};
use crate::planning::step::TrainingStep;
use ckpt_passes::Result;
use ckpt_passes::plan::{OpPhase, Plan, PlanOutcome, Schedule, Step};
use serde::Serialize;
use std::collections::BTreeMap;

/// A plan with its effect on memory, values and layers.
pub struct Account<'a> {
    /// The step without the plan: its problem, labels and device.
    pub step: &'a TrainingStep,
    /// The plan of `outcome`.
    pub plan: &'a Plan,
    /// The result of planning, with figures beside the plan itself.
    pub outcome: &'a PlanOutcome,
    /// Memory of the given order, without recomputation or transfers.
    pub before: Memory<'a>,
    /// Memory of the plan's schedule.
    pub after: Memory<'a>,
    /// What the plan does with each value, and why.
    pub verdicts: Vec<Verdict>,
    /// One row for each layer, in model order.
    pub layers: Vec<LayerRow>,
}

/// The effect of a plan on one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerRow {
    /// Position in model order, from 0.
    pub index: usize,
    /// Module path or class where the file names them, else its kind.
    pub name: String,
    /// Sub-blocks of the layer: `attention+mlp` and the like.
    pub kind: String,
    /// Equal layers have the same number.
    pub run: usize,
    /// Forward ops.
    pub ops: usize,
    /// Ops that the plan runs again; each counts once.
    pub recomputed_ops: usize,
    /// Forward results held for the backward pass.
    pub kept_bytes: u64,
    /// Forward results that are freed and recomputed.
    pub recomputed_bytes: u64,
    /// Forward results that are offloaded.
    pub offloaded_bytes: u64,
    /// Time of its recomputations.
    pub recompute_us: f64,
    /// Time of its transfers, out and back.
    pub transfer_us: f64,
    /// Bytes that it holds at the peak of the unplanned step.
    pub peak_before_bytes: u64,
    /// Bytes that it holds at the peak of the planned step.
    pub peak_after_bytes: u64,
}

/// The storages that are live at the peak of one schedule.
#[derive(Clone, Debug, Serialize)]
pub struct AtPeak {
    /// The node that runs.
    pub node: Option<String>,
    /// Position of the peak in the schedule, from 0; `None` where nothing above static is ever held.
    pub step: Option<usize>,
    /// All bytes live at the peak, static bytes included.
    pub bytes: u64,
    /// Bytes by what they are for; they add up to `bytes`.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Largest first.
    pub largest: Vec<Held>,
}

impl<'a> Account<'a> {
    /// Computes the account.
    ///
    /// # Errors
    /// A plan that does not fit the step; a bug where the memory differs from the prediction.
    pub fn new(step: &'a TrainingStep, outcome: &'a PlanOutcome) -> Result<Account<'a>> {
        let (input, plan) = (&step.input, &outcome.plan);
        let terms = Terms {
            problem: &input.problem,
            annotations: &input.annotations,
            labels: &step.labels,
        };
        let after = Memory::new(terms, plan.schedule.clone())?;
        let given = input.problem.ops.indices().map(Step::Run);
        let before = Memory::new(terms, Schedule::new(given.collect()))?;
        for (memory, score) in [(&before, &plan.before), (&after, &plan.after)] {
            if memory.peak_bytes != score.peak_bytes {
                return Err(ckpt_passes::Error::bug(
                    "report",
                    "what is alive at the peak does not add up to it",
                )
                .expected(format!("{} bytes", score.peak_bytes))
                .found(format!("{} bytes", memory.peak_bytes)));
            }
        }
        let verdicts = verdicts(plan, &after, &input.constraints);
        let mut account = Account {
            step,
            plan,
            outcome,
            before,
            after,
            verdicts,
            layers: Vec::new(),
        };
        account.layers = account.layer_rows();
        Ok(account)
    }

    /// Returns the ops and values that the steps of the plan refer to.
    pub fn terms(&self) -> &Terms<'a> {
        &self.after.terms
    }

    fn layer_rows(&self) -> Vec<LayerRow> {
        let terms = self.terms();
        let (problem, labels) = (&terms.problem, &terms.labels);
        let mut rows: Vec<LayerRow> = labels
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| LayerRow {
                index,
                name: layer.name().into(),
                kind: layer.kind.clone(),
                run: layer.run,
                ..LayerRow::default()
            })
            .collect();
        let layer_of = &terms.annotations.layer_of;
        for (o, op) in problem.ops.enumerated() {
            if let (Some(layer), OpPhase::Forward) = (layer_of[o], op.phase) {
                rows[layer].ops += 1;
            }
        }
        let mut is_counted = problem.by_op(false);
        for (step, is_recompute) in self
            .after
            .schedule
            .steps
            .iter()
            .zip(&self.after.is_recompute)
        {
            let Some(layer) = layer_of[step.op()] else {
                continue;
            };
            if step.is_move() {
                rows[layer].transfer_us += problem.cost(*step);
            } else if *is_recompute {
                rows[layer].recompute_us += problem.cost(*step);
                let is_known = std::mem::replace(&mut is_counted[step.op()], true);
                rows[layer].recomputed_ops += usize::from(!is_known);
            }
        }
        for verdict in &self.verdicts {
            if let Some(layer) = verdict.layer {
                match verdict.fate {
                    Fate::Kept => rows[layer].kept_bytes += verdict.bytes,
                    Fate::Recomputed => rows[layer].recomputed_bytes += verdict.bytes,
                    Fate::Offloaded => rows[layer].offloaded_bytes += verdict.bytes,
                    _ => {}
                }
            }
        }
        for t in self.before.tenants_at(self.before.peak_step.unwrap_or(0)) {
            if let Some(layer) = t.layer {
                rows[layer].peak_before_bytes += t.bytes;
            }
        }
        for t in self.after.tenants_at(self.after.peak_step.unwrap_or(0)) {
            if let Some(layer) = t.layer {
                rows[layer].peak_after_bytes += t.bytes;
            }
        }
        rows
    }

    /// Returns what is live at the peak of one of the two schedules.
    pub fn at_peak(&self, memory: &Memory) -> AtPeak {
        AtPeak {
            node: memory.peak_node().map(str::to_string),
            step: memory.peak_step,
            bytes: memory.peak_bytes,
            kinds: by_kind(memory.kinds_at(memory.peak_step.unwrap_or(0))),
            largest: memory.at_peak(),
        }
    }
}

fn by_kind(bytes: [u64; KINDS]) -> BTreeMap<&'static str, u64> {
    Kind::ALL.iter().map(|k| k.word()).zip(bytes).collect()
}
