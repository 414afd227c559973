//! Applies a plan: repeats in its schedule become copies (`again`), readers read the most recent computation, and the
//! order of the graph becomes the schedule.
//!
//! In: `Training`. Out: `Rewritten`. Nothing but `order`, operands and metadata changes; every original stays, so the
//! plan can be taken back by [`strip_again`]. The memory of the result is what the plan's score says, byte for byte,
//! because `evaluate` and the memory analysis follow the same rules.
//!
//! Every node gets the metadata that a reader of the written file wants: `ckpt.role`, and where they apply `ckpt.of`,
//! `ckpt.segment`, `ckpt.block`, `ckpt.bytes` (of the storage the node makes) and `ckpt.reason`.

use crate::error::{Error, Result};
use crate::ir::{Graph, NodeId, Phase, Role, Side, ValueId};
use crate::plan::problem::Correspondence;
use crate::plan::{Plan, Problem};

/// The metadata keys this pass owns.
pub const META_KEYS: [&str; 6] = [
    "ckpt.role",
    "ckpt.of",
    "ckpt.segment",
    "ckpt.block",
    "ckpt.bytes",
    "ckpt.reason",
];

/// Rewrites `graph`, from which `problem` and `map` were made, as `plan` says. Returns the number of copies.
///
/// # Errors
/// A plan that does not fit the problem: an op that never runs, a result read before it is computed.
pub fn remat(
    graph: &mut Graph,
    problem: &Problem,
    map: &Correspondence,
    plan: &Plan,
    block_of: &[Option<usize>],
) -> Result<usize> {
    crate::plan::evaluate(problem, &plan.schedule)?;
    if map.nodes.len() != graph.order().len() || map.nodes != graph.order() {
        return Err(Error::bug(
            "remat",
            "the graph changed since its problem was made",
        ));
    }
    let mut segment_of: Vec<Option<u32>> = vec![None; plan.schedule.len()];
    for (i, segment) in plan.segments.iter().enumerate() {
        for step in &segment.steps {
            segment_of[*step] = Some(i as u32);
        }
    }
    // The most recent computation of each original value.
    let mut current: Side<ValueId, Option<ValueId>> = Side::new(graph.value_bound(), None);
    let latest = |current: &Side<ValueId, Option<ValueId>>, v: ValueId| current[v].unwrap_or(v);
    let mut ran = vec![false; problem.ops.len()];
    let mut order = Vec::with_capacity(plan.schedule.len());
    for (step, op) in plan.schedule.iter().enumerate() {
        let original = map.nodes[*op];
        let ins: Vec<Option<ValueId>> = graph
            .node(original)
            .ins
            .iter()
            .map(|v| v.map(|v| latest(&current, graph.origin(v))))
            .collect();
        if !std::mem::replace(&mut ran[*op], true) {
            for (slot, value) in ins.into_iter().enumerate() {
                if graph.node(original).ins[slot] != value {
                    graph.set_operand(original, slot, value);
                }
            }
            order.push(original);
            continue;
        }
        let copy = graph.add_again(original, ins, segment_of[step]);
        for slot in 0..graph.node(original).outs.len() {
            current[graph.node(original).outs[slot]] = Some(graph.node(copy).outs[slot]);
        }
        order.push(copy);
    }
    let copies = order.len() - map.nodes.len();
    graph.set_order(order);
    let outputs: Vec<ValueId> = graph.outputs().to_vec();
    let latest_outputs: Vec<ValueId> = outputs.iter().map(|v| latest(&current, *v)).collect();
    for (old, new) in outputs.iter().zip(&latest_outputs) {
        if old != new {
            swap_names(graph, *old, *new);
        }
    }
    graph.set_outputs(latest_outputs);
    annotate(graph, problem, map, plan, block_of);
    graph.phase = Phase::Rewritten;
    Ok(copies)
}

/// Gives the name of `from` to `to`, and the other way round: a graph output keeps its name whoever computes it.
fn swap_names(graph: &mut Graph, from: ValueId, to: ValueId) {
    let (a, b) = (graph.value(from).name.clone(), graph.value(to).name.clone());
    graph.rename_value(from, "ckpt.swap");
    graph.rename_value(to, &a);
    graph.rename_value(from, &b);
}

fn annotate(
    graph: &mut Graph,
    problem: &Problem,
    map: &Correspondence,
    plan: &Plan,
    block_of: &[Option<usize>],
) {
    let mut op_of: Side<NodeId, usize> = Side::new(graph.node_bound(), usize::MAX);
    for (op, node) in map.nodes.iter().enumerate() {
        op_of[*node] = op;
    }
    let mut reason_of: Vec<Option<String>> = vec![None; problem.ops.len()];
    for decision in &plan.decisions {
        let verb = if decision.kept { "kept" } else { "recomputed" };
        reason_of[decision.op].get_or_insert(match decision.reason.as_str() {
            "" => verb.to_string(),
            why => format!("{verb}: {why}"),
        });
    }
    for id in graph.order().to_vec() {
        let op = op_of[graph.original(id)];
        let bytes: u64 = problem.ops[op]
            .outs
            .iter()
            .map(|v| problem.values[*v].bytes)
            .sum();
        let node = graph.node(id);
        let of = node.again.map(|n| graph.node(n).name.clone());
        let segment = node.segment;
        let role = match (node.again, node.role) {
            (Some(_), _) => "recompute",
            (None, Role::Forward) => "forward",
            (None, Role::Loss) => "loss",
            (None, Role::Backward) => "backward",
        };
        let meta = graph.meta_mut(id);
        for key in META_KEYS {
            meta.remove(key);
        }
        meta.insert("ckpt.role".into(), role.into());
        meta.insert("ckpt.bytes".into(), bytes.to_string());
        let entries = [
            ("ckpt.of", of),
            ("ckpt.segment", segment.map(|s| s.to_string())),
            ("ckpt.block", block_of[op].map(|b| b.to_string())),
            ("ckpt.reason", reason_of[op].clone()),
        ];
        for (key, value) in entries {
            if let Some(value) = value {
                meta.insert(key.into(), value);
            }
        }
    }
}

/// Takes a plan back: readers of copies read the originals, copies go. Returns how many went.
///
/// The order that remains is the originals' own, so planning the result again starts where the first plan did.
pub fn strip_again(graph: &mut Graph) -> usize {
    let mut is_copy = Side::new(graph.node_bound(), false);
    let mut is_output = Side::new(graph.value_bound(), false);
    for output in graph.outputs() {
        is_output[*output] = true;
    }
    for id in graph.order().to_vec() {
        is_copy[id] = graph.node(id).again.is_some();
        for slot in 0..if is_copy[id] {
            graph.node(id).outs.len()
        } else {
            0
        } {
            let value = graph.node(id).outs[slot];
            let origin = graph.origin(value);
            if is_output[value] {
                swap_names(graph, value, origin);
            }
            graph.replace_uses(value, origin);
        }
    }
    let gone = graph.remove_nodes(&|id| is_copy[id]);
    for id in graph.order().to_vec() {
        let meta = graph.meta_mut(id);
        for key in META_KEYS {
            meta.remove(key);
        }
    }
    if graph.phase == Phase::Rewritten {
        graph.phase = Phase::Training;
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Device, MemoryProfile, Sizes};
    use crate::ir::verify::verify;
    use crate::plan::{keep, problem::Kind};
    use crate::testing::{Random, random_graph};

    fn measure(g: &Graph) -> (Sizes, MemoryProfile) {
        let sizes = Sizes::new(g, &Binding::new(g, &[]).unwrap()).unwrap();
        let memory = MemoryProfile::new(g, &sizes).unwrap();
        (sizes, memory)
    }

    /// Random valid schedules: some ops of either part run again somewhere after their first run.
    fn anything(p: &Problem, r: &mut Random) -> Vec<usize> {
        let mut schedule = p.given_order();
        for _ in 0..r.below(12) {
            let op = r.below(p.ops.len());
            if p.ops[op].may_repeat {
                let first = schedule.iter().position(|o| *o == op).unwrap();
                schedule.insert(first + 1 + r.below(schedule.len() - first), op);
            }
        }
        schedule
    }

    #[test]
    fn the_rewritten_graph_has_the_memory_the_plan_predicts_and_can_be_taken_back() {
        let mut r = Random(23);
        let (mut nested, mut renamed) = (0, 0);
        for n in 0..400 {
            let mut g = random_graph(&mut r, 3 + n % 25);
            g.phase = Phase::Training;
            let (sizes, memory) = measure(&g);
            let (p, map) = Problem::of_graph(&g, &sizes, &memory, &Device::default()).unwrap();
            let names = |g: &Graph| {
                g.outputs()
                    .iter()
                    .map(|v| g.value(*v).name.clone())
                    .collect::<Vec<_>>()
            };
            let (before, order) = (names(&g), g.order().to_vec());
            let schedule = if n % 2 == 0 {
                let keep: Vec<bool> = p.values.iter().map(|_| r.below(3) == 0).collect();
                keep::schedule(&p, &keep)
            } else {
                anything(&p, &mut r)
            };
            let none = vec![None; p.ops.len()];
            let plan = Plan::new("test", &p, schedule, &none, &Vec::new()).unwrap();
            let outputs = g.outputs().to_vec();
            let copies = remat(&mut g, &p, &map, &plan, &none).unwrap();
            verify(&g).unwrap();
            assert_eq!(copies, plan.schedule.len() - p.ops.len());
            assert_eq!(names(&g), before);
            nested += g
                .nodes()
                .filter(|(_, n)| n.name.ends_with("/again.2"))
                .count();
            renamed += (g.outputs() != outputs) as usize;
            let (_, after) = measure(&g);
            assert_eq!(after.peak_bytes, plan.after.peak_bytes);
            assert_eq!(after.at, plan.after.at_step.map(|s| g.order()[s]));
            assert!(
                g.nodes()
                    .all(|(_, n)| n.again.is_none() || n.segment.is_some())
            );

            assert_eq!(strip_again(&mut g), copies);
            verify(&g).unwrap();
            assert_eq!((names(&g), g.order()), (before, order.as_slice()));
            assert_eq!(measure(&g).1.peak_bytes, memory.peak_bytes);
            assert!(p.values.iter().any(|v| v.kind == Kind::Activation));
        }
        assert!(nested > 50 && renamed > 20, "{nested} {renamed}");
    }
}
