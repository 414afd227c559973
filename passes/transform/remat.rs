//! Applies a plan: repeats in its schedule become copies (`recompute_of`), readers read the most recent computation, and the
//! order of the graph becomes the schedule.
//!
//! In: `Training`. Out: `Rewritten`. Nothing but `order`, operands and metadata changes; every original stays, so the
//! plan can be taken back by [`strip_plan`]. Offloaded results leave the device right after their op
//! (`Offload`), are held until they are outside (`Release`) and come back where the schedule says (`Fetch`). Where ranks keep slices
//! of them, `KeepSlice` and `GatherKept` do that. The memory of the result is what the plan's score says, byte for byte,
//! because `evaluate` and the memory analysis follow the same rules.
//!
//! Every node gets the metadata that a reader of the written file wants: `ckpt.role`, and where they apply `ckpt.of`,
//! `ckpt.segment`, `ckpt.block`, `ckpt.bytes` (of the storage the node makes) and `ckpt.reason`. Where a first computation
//! runs later than the graph had it, `ckpt.place` is the place that each node had, for [`strip_plan`].

use crate::error::{Error, Result};
use crate::ir::edit::NewNode;
use crate::ir::{Attr, Attrs, Graph, Node, NodeId, OpDef, Phase, Role, SecondaryMap, ValueId};
use crate::ops::collective::{
    GATHER_KEPT, KEEP_SLICE, TENSOR_PARALLEL, kept_types, of_group, tensor_parallel_ranks,
};
use crate::ops::transfer;
use crate::plan::index::{ByOp, OpIdx};
use crate::plan::input::PlanInput;
use crate::plan::plan::{Decision, OffloadTarget, Plan};
use crate::plan::schedule::evaluate;
use crate::plan::steps::Step;
use std::collections::BTreeMap;

/// The metadata keys this pass owns.
pub const META_KEYS: [&str; 7] = [
    "ckpt.role",
    "ckpt.of",
    "ckpt.segment",
    "ckpt.block",
    "ckpt.bytes",
    "ckpt.reason",
    "ckpt.place",
];

/// Rewrites `graph` as `plan` says. `input` was made from the graph, and `nodes` gives the node of each op. Returns the number
/// of copies.
///
/// # Errors
/// A plan that does not fit the problem: an op that never runs, a result read before it is computed.
pub fn remat(
    graph: &mut Graph,
    input: &PlanInput,
    nodes: &ByOp<NodeId>,
    plan: &Plan,
) -> Result<usize> {
    let problem = &input.problem;
    let steps = &plan.schedule.steps;
    problem.check_movable(&plan.schedule.offloaded)?;
    evaluate(problem, steps)?;
    if **nodes != *graph.order() {
        return Err(Error::bug(
            "remat",
            "the graph changed since its problem was made",
        ));
    }
    let mut segment_of: Vec<Option<u32>> = vec![None; steps.len()];
    for (i, segment) in plan.segments.iter().enumerate() {
        for step in &segment.steps {
            segment_of[*step] = Some(i as u32);
        }
    }
    // The most recent computation of each original value.
    let mut current: SecondaryMap<ValueId, Option<ValueId>> =
        SecondaryMap::new(graph.value_bound(), None);
    let latest =
        |current: &SecondaryMap<ValueId, Option<ValueId>>, v: ValueId| current[v].unwrap_or(v);
    let mut ran = problem.by_op(false);
    let mut transfers = Transfers::default();
    let mut order = Vec::with_capacity(steps.len());
    for (at, step) in steps.iter().enumerate() {
        let op = step.op();
        let original = nodes[op];
        match step {
            Step::Run(_) => {}
            Step::Release(_) => {
                transfers.release(graph, original, &mut order);
                continue;
            }
            Step::Offload(_) | Step::Fetch(_) => {
                transfers.apply(graph, original, plan.offload_to, &mut current, &mut order);
                continue;
            }
        }
        let ins: Vec<Option<ValueId>> = graph
            .node(original)
            .ins
            .iter()
            .map(|v| v.map(|v| latest(&current, graph.origin(v))))
            .collect();
        if !std::mem::replace(&mut ran[op], true) {
            for (slot, value) in ins.into_iter().enumerate() {
                if graph.node(original).ins[slot] != value {
                    graph.set_operand(original, slot, value);
                }
            }
            order.push(original);
            continue;
        }
        let copy = graph.add_recompute(original, ins, segment_of[at]);
        for slot in 0..graph.node(original).outs.len() {
            current[graph.node(original).outs[slot]] = Some(graph.node(copy).outs[slot]);
        }
        order.push(copy);
    }
    let copies = order.len() - nodes.len() - transfers.made;
    graph.set_order(order);
    let outputs: Vec<ValueId> = graph.outputs().to_vec();
    let latest_outputs: Vec<ValueId> = outputs.iter().map(|v| latest(&current, *v)).collect();
    for (old, new) in outputs.iter().zip(&latest_outputs) {
        if old != new {
            swap_names(graph, *old, *new);
        }
    }
    graph.set_outputs(latest_outputs);
    annotate(graph, input, nodes, plan);
    graph.phase = Phase::Rewritten;
    Ok(copies)
}

/// The offloaded values so far.
#[derive(Default)]
struct Transfers {
    /// The value outside, by the result that it is of.
    outside: BTreeMap<ValueId, ValueId>,
    /// This rank's slice of a result and what has its form, by the result.
    slices: BTreeMap<ValueId, (ValueId, ValueId)>,
    made: usize,
}

impl Transfers {
    /// Offloads the results of `original`, or fetches them if they are offloaded.
    fn apply(
        &mut self,
        graph: &mut Graph,
        original: NodeId,
        to: OffloadTarget,
        current: &mut SecondaryMap<ValueId, Option<ValueId>>,
        order: &mut Vec<NodeId>,
    ) {
        for value in graph.node(original).outs.clone() {
            if to == OffloadTarget::Ranks {
                let id = self.share(graph, original, value, current);
                self.made += 1;
                order.push(id);
                continue;
            }
            let place = format!("{}/{to}", graph.value(value).name, to = target_word(to));
            let there = format!("{}/fetch", graph.value(value).name);
            let id = match self.outside.get(&value) {
                None => {
                    let mut attrs = Attrs::new();
                    attrs.set(transfer::TO, Attr::Str(target_word(to).into()));
                    let from = vec![Some(value)];
                    let id = emit(graph, &transfer::OFFLOAD, original, attrs, (from, &place));
                    self.outside.insert(value, graph.node(id).outs[0]);
                    id
                }
                Some(outside) => {
                    let from = vec![Some(*outside)];
                    let id = emit(
                        graph,
                        &transfer::FETCH,
                        original,
                        Attrs::new(),
                        (from, &there),
                    );
                    current[value] = Some(graph.node(id).outs[0]);
                    id
                }
            };
            self.made += 1;
            order.push(id);
        }
    }

    /// Keeps this rank's slice of a result, or gathers the slices of all ranks if it is kept.
    fn share(
        &mut self,
        graph: &mut Graph,
        original: NodeId,
        value: ValueId,
        current: &mut SecondaryMap<ValueId, Option<ValueId>>,
    ) -> NodeId {
        let ranks = tensor_parallel_ranks(graph).unwrap_or(1);
        let attrs = of_group(TENSOR_PARALLEL, ranks);
        let whole = graph.ty(value).clone();
        let name = graph.value(value).name.clone();
        let node = graph.node(original);
        let of = |op: &'static OpDef| format!("{}/{}", node.name, op.name.to_lowercase());
        let loc = node.loc.clone();
        match self.slices.get(&value) {
            None => {
                let ends = ["slice", "form"].map(|end| format!("{name}/{end}"));
                let types = kept_types(&whole, ranks).into_iter().map(Some);
                let id = graph.add_node(NewNode {
                    op: &KEEP_SLICE,
                    name: &of(&KEEP_SLICE),
                    attrs,
                    ins: vec![Some(value)],
                    outs: ends.into_iter().zip(types).collect(),
                    loc,
                    role: node.role,
                });
                let outs = &graph.node(id).outs;
                self.slices.insert(value, (outs[0], outs[1]));
                id
            }
            Some((slice, form)) => {
                let id = graph.add_node(NewNode {
                    op: &GATHER_KEPT,
                    name: &of(&GATHER_KEPT),
                    attrs,
                    ins: vec![Some(*slice), Some(*form)],
                    outs: vec![(format!("{name}/gathered"), Some(whole))],
                    loc,
                    role: node.role,
                });
                current[value] = Some(graph.node(id).outs[0]);
                id
            }
        }
    }

    /// Frees the results of `original` on the device once they have left it.
    fn release(&mut self, graph: &mut Graph, original: NodeId, order: &mut Vec<NodeId>) {
        for value in graph.node(original).outs.clone() {
            let Some(outside) = self.outside.get(&value).copied() else {
                continue;
            };
            let there = format!("{}/released", graph.value(value).name);
            let ins = vec![Some(value), Some(outside)];
            let id = emit(
                graph,
                &transfer::RELEASE,
                original,
                Attrs::new(),
                (ins, &there),
            );
            self.outside.insert(value, graph.node(id).outs[0]);
            self.made += 1;
            order.push(id);
        }
    }
}

fn target_word(target: OffloadTarget) -> &'static str {
    match target {
        OffloadTarget::Host => transfer::TO_HOST,
        OffloadTarget::Disk => transfer::TO_DISK,
        OffloadTarget::Ranks => TENSOR_PARALLEL,
    }
}

/// Adds a transfer node for the result of `of`, named after both.
fn emit(
    graph: &mut Graph,
    op: &'static OpDef,
    of: NodeId,
    attrs: Attrs,
    (ins, to): (Vec<Option<ValueId>>, &str),
) -> NodeId {
    let name = format!("{}/{}", graph.node(of).name, op.name.to_lowercase());
    // All operands of a transfer are of the type of what is moved.
    let moved = ins.iter().flatten().next();
    let ty = moved.and_then(|v| graph.value(*v).ty.clone());
    let node = graph.node(of);
    let (loc, role) = (node.loc.clone(), node.role);
    graph.add_node(NewNode {
        op,
        name: &name,
        attrs,
        ins,
        outs: vec![(to.to_string(), ty)],
        loc,
        role,
    })
}

/// Gives the name of `from` to `to`, and the other way round: a graph output keeps its name whoever computes it.
fn swap_names(graph: &mut Graph, from: ValueId, to: ValueId) {
    let (a, b) = (graph.value(from).name.clone(), graph.value(to).name.clone());
    graph.rename_value(from, "ckpt.swap");
    graph.rename_value(to, &a);
    graph.rename_value(from, &b);
}

fn annotate(graph: &mut Graph, input: &PlanInput, nodes: &ByOp<NodeId>, plan: &Plan) {
    let problem = &input.problem;
    let mut op_of = SecondaryMap::new(graph.node_bound(), OpIdx(usize::MAX));
    for (op, node) in nodes.enumerated() {
        op_of[*node] = op;
    }
    let mut decided: ByOp<Vec<&Decision>> = problem.by_op(Vec::new());
    for decision in &plan.decisions {
        decided[decision.op].push(decision);
    }
    let reason_of: ByOp<Option<String>> = decided.iter().map(|list| reason_text(list)).collect();
    let originals = graph.order().iter().filter(|id| {
        let node = graph.node(**id);
        node.recompute_of.is_none() && !node.op.is_transfer()
    });
    let is_moved = !originals.map(|id| op_of[*id]).is_sorted();
    for id in graph.order().to_vec() {
        let moves = graph.node(id).op.is_transfer();
        // A transfer belongs where the node does whose result it moves.
        let moved = graph.node(id).outs.first().filter(|_| moves);
        let maker = moved.and_then(|v| graph.def_node(graph.origin(*v)));
        let op = op_of[maker.unwrap_or(graph.original(id))];
        let bytes = problem.result_bytes(op);
        let node = graph.node(id);
        let of = node.recompute_of.map(|n| graph.node(n).name.clone());
        let place = (is_moved && of.is_none() && !moves).then(|| op.to_string());
        let segment = node.segment;
        let role = role_word(node);
        let meta = graph.meta_mut(id);
        for key in META_KEYS {
            meta.remove(key);
        }
        meta.insert("ckpt.role".into(), role.into());
        meta.insert("ckpt.bytes".into(), bytes.to_string());
        let entries = [
            ("ckpt.of", of),
            ("ckpt.segment", segment.map(|s| s.to_string())),
            (
                "ckpt.block",
                input.annotations.layer_of[op].map(|l| l.to_string()),
            ),
            ("ckpt.reason", reason_of[op].clone()),
            ("ckpt.place", place),
        ];
        for (key, value) in entries {
            if let Some(value) = value {
                meta.insert(key.into(), value);
            }
        }
    }
}

/// Stands in `ckpt.reason` between what is kept of a node and what is not.
const BUT: &str = "; its other results are ";

/// Returns what `ckpt.reason` says of a node, given the decisions about its results: that about the first, and where a node
/// that keeps a result runs again for another, that about the other.
fn reason_text(decisions: &[&Decision]) -> Option<String> {
    let text = |decision: &Decision| {
        let verb = match (decision.kept, decision.offloaded) {
            (true, _) => "kept",
            (false, true) => "offloaded",
            (false, false) => "recomputed",
        };
        match decision.reason.as_str() {
            "" => verb.to_string(),
            why => format!("{verb}: {why}"),
        }
    };
    let first = decisions.first()?;
    let kept = decisions.iter().find(|d| d.kept);
    let other = decisions.iter().find(|d| !d.kept);
    Some(match (kept, other) {
        (Some(kept), Some(other)) => format!("{}{BUT}{}", text(kept), text(other)),
        _ => text(first),
    })
}

/// Returns why a result is kept, or is not, from what `ckpt.reason` says of its node.
pub fn reason_in(text: &str, is_kept: bool) -> &str {
    let (kept, other) = text.split_once(BUT).unwrap_or((text, text));
    let text = if is_kept { kept } else { other };
    text.split_once(": ").map_or("", |(_, why)| why)
}

/// Returns what `ckpt.role` says of a node.
pub fn role_word(node: &Node) -> &'static str {
    match (node.recompute_of, node.role) {
        _ if node.op == &transfer::OFFLOAD || node.op == &KEEP_SLICE => "offload",
        _ if node.op == &transfer::RELEASE => "release",
        _ if node.op == &transfer::FETCH || node.op == &GATHER_KEPT => "fetch",
        (Some(_), _) => "recompute",
        _ if node.op.is_update() => "update",
        (None, Role::Forward) => "forward",
        (None, Role::Loss) => "loss",
        (None, Role::Backward) => "backward",
    }
}

/// Removes a plan: readers of copies and of fetched values read the originals, and copies and transfers are removed. Returns
/// the number of copies.
///
/// The order that remains is the one that was planned, so planning the result again starts where the first plan did.
pub fn strip_plan(graph: &mut Graph) -> usize {
    let mut goes = SecondaryMap::new(graph.node_bound(), false);
    let mut copies = 0;
    let mut is_output = SecondaryMap::new(graph.value_bound(), false);
    for output in graph.outputs() {
        is_output[*output] = true;
    }
    for id in graph.order().to_vec() {
        let is_copy = graph.node(id).recompute_of.is_some();
        goes[id] = is_copy || graph.node(id).op.is_transfer();
        copies += is_copy as usize;
        for slot in 0..if goes[id] {
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
    graph.remove_nodes(&|id| goes[id]);
    if let Some(order) = places(graph) {
        graph.set_order(order);
    }
    for id in graph.order().to_vec() {
        let meta = graph.meta_mut(id);
        for key in META_KEYS {
            meta.remove(key);
        }
    }
    if graph.phase == Phase::Rewritten {
        graph.phase = Phase::Training;
    }
    copies
}

/// Returns the order that `ckpt.place` tells, if every node has one and results are computed before they are read.
fn places(graph: &Graph) -> Option<Vec<NodeId>> {
    let place = |id: &NodeId| {
        let text = graph.node(*id).meta.get("ckpt.place")?;
        Some((text.parse::<usize>().ok()?, *id))
    };
    let mut placed: Vec<(usize, NodeId)> =
        graph.order().iter().map(place).collect::<Option<_>>()?;
    placed.sort_by_key(|(place, _)| *place);
    let mut ran = SecondaryMap::new(graph.node_bound(), false);
    for (_, id) in &placed {
        let operands = graph.node(*id).ins.iter().flatten();
        let mut makers = operands.filter_map(|v| graph.def_node(*v));
        if !makers.all(|maker| ran[maker]) {
            return None;
        }
        ran[*id] = true;
    }
    Some(placed.into_iter().map(|(_, id)| id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Device, MemoryProfile, Sizes};
    use crate::ir::verify::verify;
    use crate::plan::plan::Reasons;
    use crate::plan::{
        Budget, Effort, Offload, OffloadSet, OpAnnotations, PlanRequest, Policy, ValueKind, plan,
        saved_set,
    };
    use crate::planning::GraphProblem;
    use crate::testing::dags::random_schedule;
    use crate::testing::{Random, random_graph};

    fn measure(g: &Graph) -> (Sizes, MemoryProfile) {
        let sizes = Sizes::new(g, &Binding::new(g, &[]).unwrap()).unwrap();
        let memory = MemoryProfile::new(g, &sizes).unwrap();
        (sizes, memory)
    }

    fn planning_input(g: &Graph) -> (PlanInput, ByOp<NodeId>) {
        let (sizes, memory) = measure(g);
        let made = GraphProblem::new(g, &sizes, &memory, &Device::default()).unwrap();
        let annotations = OpAnnotations::unknown(made.problem.ops.len());
        (PlanInput::new(made.problem, annotations), made.nodes)
    }

    #[test]
    fn the_rewritten_graph_has_the_memory_the_plan_predicts_and_can_be_taken_back() {
        let mut r = Random(23);
        let (mut nested, mut renamed) = (0, 0);
        for n in 0..400 {
            let mut g = random_graph(&mut r, 3 + n % 25);
            g.phase = Phase::Training;
            let (_, memory) = measure(&g);
            let (input, nodes) = planning_input(&g);
            let p = &input.problem;
            let names = |g: &Graph| {
                g.outputs()
                    .iter()
                    .map(|v| g.value(*v).name.clone())
                    .collect::<Vec<_>>()
            };
            let (before, order) = (names(&g), g.order().to_vec());
            let schedule = if n % 2 == 0 {
                let keep = p.values.iter().map(|_| r.below(3) == 0).collect();
                saved_set::schedule(p, &keep)
            } else {
                random_schedule(&mut r, p, 12)
            };
            let none = p.by_op(None);
            let plan = Plan::new("test", p, &schedule, &none, &Reasons::default()).unwrap();
            let outputs = g.outputs().to_vec();
            let copies = remat(&mut g, &input, &nodes, &plan).unwrap();
            verify(&g).unwrap();
            assert_eq!(copies, plan.schedule.steps.len() - p.ops.len());
            assert_eq!(names(&g), before);
            nested += g
                .nodes()
                .filter(|(_, n)| n.name.ends_with("/recompute.2"))
                .count();
            renamed += (g.outputs() != outputs) as usize;
            let (_, after) = measure(&g);
            assert_eq!(after.peak_bytes, plan.after.peak_bytes);
            assert_eq!(after.at, plan.after.at_step.map(|s| g.order()[s]));
            assert!(
                g.nodes()
                    .all(|(_, n)| n.recompute_of.is_none() || n.segment.is_some())
            );

            assert_eq!(strip_plan(&mut g), copies);
            verify(&g).unwrap();
            assert_eq!((names(&g), g.order()), (before, order.as_slice()));
            assert_eq!(measure(&g).1.peak_bytes, memory.peak_bytes);
            assert!(p.values.iter().any(|v| v.kind == ValueKind::Activation));
        }
        assert!(nested > 50 && renamed > 20, "{nested} {renamed}");
    }

    /// Random graphs in which random results are moved, by policies, budgets and the planner's own choice.
    #[test]
    fn what_waits_outside_has_the_memory_the_plan_predicts_and_can_be_taken_back() {
        let mut r = Random(29);
        let (mut moved, mut fetched_often, mut chosen) = (0, 0, 0);
        for n in 0..60 {
            let mut g = random_graph(&mut r, 3 + n % 25);
            g.phase = Phase::Training;
            let (_, memory) = measure(&g);
            let (input, nodes) = planning_input(&g);
            let p = &input.problem;
            let set = match n % 3 {
                0 => OffloadSet::Auto,
                _ => OffloadSet::All,
            };
            let min_bytes = r.below(6) as u64;
            let budget = Budget::Percent(60.0 + 10.0 * r.below(4) as f64);
            let request = PlanRequest {
                effort: Effort::First,
                offload: Offload {
                    set,
                    min_bytes,
                    ..Offload::default()
                },
                ..match n % 3 {
                    1 => Policy::NONE.into(),
                    _ => budget.into(),
                }
            };
            let Ok(outcome) = plan(&input, &request) else {
                continue;
            };
            let plan = outcome.plan;
            assert_eq!(plan.before.peak_bytes, memory.peak_bytes);
            if let Some(certificate) = &plan.certificate {
                assert!(plan.after.peak_bytes <= certificate.budget_bytes);
                let overhead = plan.after.overhead_pct(&plan.before);
                assert!(overhead + 1e-6 >= certificate.lower_bound_pct, "graph {n}");
            }
            chosen += (n % 3 == 0 && !plan.schedule.offloaded.is_empty()) as usize;
            moved += plan.schedule.offloaded.len();
            let (outputs, order) = (g.outputs().to_vec(), g.order().to_vec());
            let none = p.by_op(None);
            let copies = remat(&mut g, &input, &nodes, &plan).unwrap();
            verify(&g).unwrap();
            let (_, after) = measure(&g);
            assert_eq!(after.peak_bytes, plan.after.peak_bytes, "graph {n}");
            let out = g
                .nodes()
                .filter(|(_, n)| n.op == &transfer::OFFLOAD)
                .count();
            let back = g.nodes().filter(|(_, n)| n.op == &transfer::FETCH).count();
            assert_eq!(out, plan.schedule.offloaded.len());
            assert_eq!(after.outside_peak_bytes > 0, out > 0);
            fetched_often += (back > out) as usize;
            let text = serde_json::to_string(&plan).unwrap();
            let read: Plan = serde_json::from_str(&text).unwrap();
            let replayed = read.replay(p, &none).unwrap();
            assert_eq!(
                (&replayed.after, &replayed.schedule),
                (&plan.after, &plan.schedule)
            );

            assert_eq!(strip_plan(&mut g), copies);
            verify(&g).unwrap();
            assert_eq!(
                (g.outputs(), g.order()),
                (outputs.as_slice(), order.as_slice())
            );
        }
        assert!(
            moved > 50 && fetched_often > 0 && chosen > 2,
            "{moved} {fetched_often} {chosen}"
        );
    }
}
