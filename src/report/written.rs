//! Reads the plan of a training graph back: its node order is the schedule, its metadata hold the reasons.
//!
//! The plan comes from the nodes and is judged again. Only reasons come from metadata.

use crate::planning::step::TrainingStep;
use crate::provenance::keys;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::{Graph, NodeId, SecondaryMap};
use ckpt_passes::ops::transfer;
use ckpt_passes::plan::transfer_lowering::{ExpandedOp, ExpandedProblem};
use ckpt_passes::plan::{Plan, PlanOutcome};
use ckpt_passes::transform::remat::strip_again;
use ckpt_passes::{Error, Result};

/// Returns true for a graph with recomputations or transfers.
pub fn is_planned(graph: &Graph) -> bool {
    graph
        .nodes()
        .any(|(_, n)| n.recompute_of.is_some() || n.op.is_transfer())
}

#[derive(Clone, Copy, PartialEq)]
enum Does {
    Run,
    MoveOut,
    Release,
    MoveIn,
}

/// Returns the training step of a planned graph without its copies, and the plan that the copies encode. `request` gives
/// the sizes and the cost model.
///
/// # Errors
/// A graph that lacks the original of a copy, or does not run in its own order.
pub fn read(graph: &Graph, request: &Request) -> Result<(TrainingStep, PlanOutcome)> {
    // By node of the schedule: its original, or the node whose results it moves. All results of a node move together.
    let (mut steps, mut waiting) = (Vec::new(), Vec::new());
    for id in graph.order() {
        let node = graph.node(*id);
        if !node.op.is_transfer() {
            steps.push((graph.original(*id), Does::Run));
            continue;
        }
        let moved = node.outs.first().map(|v| graph.origin(*v));
        let Some(maker) = moved.and_then(|v| graph.def_node(v)) else {
            return bug("a transfer moves a value that no node computes");
        };
        let does = match () {
            _ if node.op == &transfer::OFFLOAD => Does::MoveOut,
            _ if node.op == &transfer::RELEASE => Does::Release,
            _ => Does::MoveIn,
        };
        if does == Does::MoveOut {
            waiting.push(maker);
        }
        if steps.last() != Some(&(maker, does)) {
            steps.push((maker, does));
        }
    }
    let mut training = graph.clone();
    strip_again(&mut training);
    let training_step = TrainingStep::of_training(&training, request)?;
    let mut op_of: SecondaryMap<NodeId, Option<usize>> =
        SecondaryMap::new(graph.node_bound(), None);
    for (op, node) in training.order().iter().enumerate() {
        op_of[*node] = Some(op);
    }
    let ops = |nodes: Vec<NodeId>| nodes.iter().map(|n| op_of[*n]).collect::<Option<Vec<_>>>();
    let Some(waiting) = ops(waiting) else {
        return bug("no node of the graph computes an offloaded value");
    };
    let expanded = ExpandedProblem::new(&training_step.input.problem, &waiting)?;
    let step = |(node, does): &(NodeId, Does)| {
        let op = op_of[*node]?;
        let stage = match does {
            Does::Run => ExpandedOp::Run(op),
            Does::MoveOut | Does::MoveIn => ExpandedOp::Transfer(op),
            Does::Release => ExpandedOp::Release(op),
        };
        expanded.index(stage)
    };
    let Some(schedule) = steps.iter().map(step).collect::<Option<Vec<usize>>>() else {
        return bug("a copy has no original in its graph");
    };
    let policy = graph.meta.get(keys::POLICY);
    let name = policy.map_or("as the file has it", String::as_str);
    let mut reasons = vec![String::new(); training_step.input.problem.values.len()];
    // The reasons of a budget are its costs, which are computed anew.
    let is_rule = !name.starts_with("budget");
    for (op, node) in training.order().iter().enumerate().filter(|_| is_rule) {
        let Some(text) = graph.node(*node).meta.get("ckpt.reason") else {
            continue;
        };
        let reason = text.split_once(": ").map_or("", |(_, why)| why);
        for v in &training_step.input.problem.ops[op].outs {
            reasons[*v] = reason.into();
        }
    }
    let layers = &training_step.input.annotations.layer_of;
    reasons.resize(expanded.problem.values.len(), String::new());
    let (schedule, layers) = (expanded.settled(&schedule), expanded.each(layers));
    let plan = Plan::new(name, &expanded.problem, schedule, &layers, &reasons)?;
    let plan = match waiting.is_empty() {
        true => plan,
        false => plan.contracted(&training_step.input.problem, &expanded)?,
    };
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
