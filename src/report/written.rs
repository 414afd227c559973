//! Reads the plan of a training graph back: its node order is the schedule, its metadata hold the reasons.
//!
//! The plan comes from the nodes and is evaluated again. Only reasons come from metadata.

use crate::planning::step::TrainingStep;
use crate::provenance::keys;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::{Graph, NodeId, SecondaryMap};
use ckpt_passes::ops::{collective::KEEP_SLICE, transfer};
use ckpt_passes::plan::on_device::is_price;
use ckpt_passes::plan::plan::made_again;
use ckpt_passes::plan::steps::settled;
use ckpt_passes::plan::{OffloadSet, OffloadTarget, OpIdx, Plan, PlanOutcome, Step};
use ckpt_passes::planning::shared_values::has_slices;
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::joint;
use ckpt_passes::transform::remat::{reason_in, strip_plan};
use ckpt_passes::{Error, Result};

/// Returns true for a graph with recomputations or transfers.
pub fn is_planned(graph: &Graph) -> bool {
    graph
        .nodes()
        .any(|(_, n)| n.recompute_of.is_some() || n.op.is_transfer())
}

/// Returns the training step of a planned graph without its copies, and the plan that the copies encode. `request` gives
/// the sizes and the cost model.
///
/// # Errors
/// A graph without a backward pass, that lacks the original of a copy, or that does not run in its own order.
pub fn read(graph: &mut Graph, request: &Request) -> Result<(TrainingStep, PlanOutcome)> {
    infer(graph)?;
    joint(graph)?;
    // The original of each node of the schedule, or the node whose results it moves, with the step that it is. All results
    // of a node move together.
    let mut steps: Vec<(NodeId, fn(OpIdx) -> Step)> = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        if !node.op.is_transfer() {
            steps.push((graph.original(*id), Step::Run));
            continue;
        }
        let moved = node.outs.first().map(|v| graph.origin(*v));
        let Some(maker) = moved.and_then(|v| graph.def_node(v)) else {
            return bug("a transfer moves a value that no node computes");
        };
        let step = match () {
            _ if node.op == &transfer::OFFLOAD || node.op == &KEEP_SLICE => Step::Offload,
            _ if node.op == &transfer::RELEASE => Step::Release,
            _ => Step::Fetch,
        };
        steps.push((maker, step));
    }
    let mut request = request.clone();
    if has_slices(graph) {
        (request.plan.offload.set, request.plan.offload.to) =
            (OffloadSet::All, OffloadTarget::Ranks);
    }
    let mut training = graph.clone();
    strip_plan(&mut training);
    let training_step = TrainingStep::of_training(&training, &request, None)?;
    let problem = &training_step.input.problem;
    let mut op_of: SecondaryMap<NodeId, Option<OpIdx>> =
        SecondaryMap::new(graph.node_bound(), None);
    for (op, node) in training.order().iter().enumerate() {
        op_of[*node] = Some(OpIdx(op));
    }
    let step = |(node, step): &(NodeId, fn(OpIdx) -> Step)| Some(step(op_of[*node]?));
    let Some(mut steps) = steps.iter().map(step).collect::<Option<Vec<Step>>>() else {
        return bug("a copy or transfer has no original in its graph");
    };
    steps.dedup_by(|a, b| a == b && a.is_move());
    let policy = graph.meta.get(keys::POLICY);
    let name = policy.map_or("as the file has it", String::as_str);
    let steps = settled(&steps);
    let made_again = made_again(problem, &steps);
    let mut reasons = problem.by_value(String::new());
    for (op, node) in problem.ops.iter().zip(training.order()) {
        let Some(text) = graph.node(*node).meta.get("ckpt.reason") else {
            continue;
        };
        for v in &op.outs {
            let reason = reason_in(text, !made_again[*v]);
            // Prices are computed anew.
            if !is_price(reason) {
                reasons[*v] = reason.into();
            }
        }
    }
    let layer_of = &training_step.input.annotations.layer_of;
    let plan = Plan::new(name, problem, &steps, layer_of, &reasons)?;
    Ok((
        training_step,
        PlanOutcome {
            plan,
            seconds: 0.0,
            min_peak_bytes: None,
        },
    ))
}

fn bug<T>(message: &str) -> Result<T> {
    Err(Error::bug("report", message))
}
