//! What to do about a plan that takes time and saves no memory, judged from what is held where it peaks.

use super::memory::{Kind, Memory, Tenant};
use super::terms::Terms;
use crate::planning::step::TrainingStep;
use crate::units::{bytes, percent};
use ckpt_passes::Result;
use ckpt_passes::plan::{OpIdx, OpPhase, PlanOutcome};

/// Less than this share of the peak, in percent, reads as nothing.
const NOTHING_PCT: f64 = 0.05;

/// A technique is named if it is about at least this share of what the peak holds above static bytes, in percent.
const WORTH_PCT: f64 = 10.0;

/// Returns a warning about a plan that adds time and lowers no peak: where the peak is, and which options are about the bytes
/// there.
///
/// # Errors
/// A plan that does not fit the step.
pub fn advice(step: &TrainingStep, outcome: &PlanOutcome) -> Result<Option<String>> {
    let (input, plan) = (&step.input, &outcome.plan);
    let saved_pct = percent(plan.saved_bytes(), plan.before.peak_bytes);
    let overhead_pct = plan.after.overhead_pct(&plan.before);
    if saved_pct >= NOTHING_PCT || overhead_pct < NOTHING_PCT {
        return Ok(None);
    }
    let terms = Terms {
        problem: &input.problem,
        annotations: &input.annotations,
        labels: &step.labels,
    };
    let memory = Memory::new(terms, plan.schedule.clone())?;
    let cost = format!(
        "{} takes {overhead_pct:.1} % more time for {saved_pct:.1} % less peak",
        plan.policy
    );
    let Some(at) = memory.peak_step else {
        return Ok(Some(cost));
    };
    let op = memory.schedule.steps[at].op();
    // The layers of backward nodes are not known.
    let place = match input.annotations.layer_of[op] {
        Some(layer) => format!(", in layer {layer}"),
        None => String::new(),
    };
    let node = &input.problem.ops[op].name;
    let mut text = format!("{cost}: it peaks while `{node}` runs{place}");
    for (count, (bytes_there, help)) in helps(step, outcome, &memory, (at, op)).iter().enumerate() {
        let link = if count == 0 {
            "; what would help: "
        } else {
            ", "
        };
        text.push_str(&format!(
            "{link}{help} ({} of the peak)",
            bytes(*bytes_there)
        ));
    }
    Ok(Some(text))
}

/// Returns the options that are about what is held at the peak, with the bytes that each is about, most bytes first.
fn helps(
    step: &TrainingStep,
    outcome: &PlanOutcome,
    memory: &Memory,
    (at, op): (usize, OpIdx),
) -> Vec<(u64, String)> {
    let problem = &step.input.problem;
    let roots = problem.roots();
    let score_bytes = score_bytes(step);
    // Casts to another width of float make them twice or half as large.
    let is_score =
        |bytes: u64| score_bytes.is_some_and(|n| bytes > 0 && [n, 2 * n, n / 2].contains(&bytes));
    let held = |is_meant: &dyn Fn(&Tenant) -> bool| -> u64 {
        let tenants = memory.tenants_at(at).filter(|t| is_meant(t));
        tenants.map(|t| t.bytes).sum()
    };
    let of_scores = held(&|t| {
        let is_result = matches!(
            t.kind,
            Kind::Activations | Kind::Recomputed | Kind::Cotangents
        );
        is_result && t.layer.is_none() && is_score(t.bytes)
    });
    let operands = problem.ops[op].ins.iter().chain(&problem.ops[op].outs);
    let mut sizes = operands.map(|v| problem.values[roots[*v]].bytes);
    let temp_bytes = match step.input.annotations.layer_of[op].is_none() && sizes.any(is_score) {
        true => memory.temp_bytes[at],
        false => 0,
    };
    let outputs = memory.tenants_at(at).filter(|t| t.kind == Kind::Outputs);
    let output = outputs.max_by_key(|t| t.bytes).map(|t| {
        let name = &step.labels.names[t.value];
        (t.bytes, format!("--drop-output {name}"))
    });
    let gradients = held(&|t| t.kind == Kind::Gradients);
    let activations = held(&|t| t.kind == Kind::Activations);
    let can_tile = score_bytes.is_some() && outcome.plan.loss_chunks.is_none();
    let can_offload = outcome.plan.schedule.offloaded.is_empty() && problem.transfer.is_some();
    let tile = can_tile.then(|| (of_scores + temp_bytes, "--tile-loss auto".into()));
    let fuse = (gradients, "--fuse-optimizer with --optimizer".into());
    let offload = can_offload.then(|| (activations, "--offload cpu".into()));
    let above_static = memory.peak_bytes.saturating_sub(memory.static_bytes);
    let all = [tile, output, Some(fuse), offload].into_iter().flatten();
    let mut helps: Vec<(u64, String)> = all
        .filter(|(bytes, _)| percent(*bytes, above_static) >= WORTH_PCT)
        .collect();
    helps.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    helps
}

/// Returns the bytes of the class scores, where there is a head over classes.
fn score_bytes(step: &TrainingStep) -> Option<u64> {
    let (problem, annotations) = (&step.input.problem, &step.input.annotations);
    let roots = problem.roots();
    let reads_head = |o: OpIdx| {
        let producers = problem.ops[o]
            .ins
            .iter()
            .filter_map(|v| problem.values[roots[*v]].producer);
        producers.into_iter().any(|p| annotations.feeds_scores[p])
    };
    let ops = problem.ops.indices();
    let heads = ops.filter(|o| {
        problem.ops[*o].phase == OpPhase::Forward
            && annotations.layer_of[*o].is_none()
            && !problem.is_view(*o)
            && reads_head(*o)
    });
    heads.map(|o| problem.result_bytes(o)).max()
}
