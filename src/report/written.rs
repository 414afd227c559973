//! A planned file as it is: its node order is its schedule, its metadata say why.
//!
//! The plan is read back from the graph, not from what the file says of itself, and judged again. Reasons are the only
//! thing that is taken from metadata.

use crate::optimize::record;
use crate::planning::task::{Planned, Task};
use ckpt_passes::compile::Request;
use ckpt_passes::ir::{Graph, NodeId, Side};
use ckpt_passes::plan::Plan;
use ckpt_passes::transform::remat::strip_again;
use ckpt_passes::{Error, Result};

/// Whether a graph has copies: whether there is a plan to be read from it.
pub fn is_planned(graph: &Graph) -> bool {
    graph.nodes().any(|(_, n)| n.again.is_some())
}

/// The training step of a planned graph without its copies, and the plan that the copies are. `request` binds sizes and
/// says what prices are.
///
/// # Errors
/// A graph whose originals are not all there, or that does not run in its own order.
pub fn read(graph: &Graph, request: &Request) -> Result<(Task, Planned)> {
    let originals: Vec<NodeId> = graph.order().iter().map(|n| graph.original(*n)).collect();
    let mut training = graph.clone();
    strip_again(&mut training);
    let task = Task::of_training(&training, request)?;
    let mut op_of: Side<NodeId, Option<usize>> = Side::new(graph.node_bound(), None);
    for (op, node) in training.order().iter().enumerate() {
        op_of[*node] = Some(op);
    }
    let schedule: Option<Vec<usize>> = originals.iter().map(|n| op_of[*n]).collect();
    let Some(schedule) = schedule else {
        return Err(Error::bug("report", "a copy has no original in its graph"));
    };
    let policy = graph.meta.get(record::POLICY);
    let name = policy.map_or("as the file has it", String::as_str);
    let mut reasons = vec![String::new(); task.problem.values.len()];
    // A budget's reasons are its prices, which are here anyway.
    let is_rule = !name.starts_with("budget");
    for (op, node) in training.order().iter().enumerate().filter(|_| is_rule) {
        let Some(text) = graph.node(*node).meta.get("ckpt.reason") else {
            continue;
        };
        let reason = text.split_once(": ").map_or("", |(_, why)| why);
        for v in &task.problem.ops[op].outs {
            reasons[*v] = reason.into();
        }
    }
    let layers = &task.structure.block_of;
    let plan = Plan::new(name, &task.problem, schedule, layers, &reasons)?;
    Ok((
        task,
        Planned {
            plan,
            seconds: 0.0,
            smallest_bytes: None,
        },
    ))
}
