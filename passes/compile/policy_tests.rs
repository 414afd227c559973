//! What policies do to models: which results they keep, and what the rewritten graph recomputes.

use super::{Request, compile};
use crate::driver::{self, Cx, Pipeline, Planned, Watch};
use crate::error::Result;
use crate::ir::{Graph, Node, NodeId, Role};
use crate::plan::OpIdx;
use crate::plan::plan::Plan;
use crate::plan::policy::Policy;
use crate::testing::{Style, transformer};
use crate::transform::loss::Loss;
use std::collections::BTreeSet;

fn request(policy: Policy, sizes: [i64; 2]) -> Request {
    Request {
        loss: Loss::Vjp,
        plan: policy.into(),
        dims: vec![("b".into(), sizes[0]), ("s".into(), sizes[1])],
        ..Request::default()
    }
}

fn compiled(style: Style, layers: usize, policy: Policy) -> Result<(Graph, Planned)> {
    let mut g = transformer(layers, style);
    let done = compile(&mut g, &request(policy, [2, 64]), &mut Watch::default())?;
    Ok((g, done.planned.unwrap()))
}

/// Products of a layer by the weight they read, and what became of them: kept, recomputed, or not needed.
fn products(g: &Graph, plan: &Plan, layer: usize) -> Vec<(&'static str, Option<bool>)> {
    let names = ["q", "k", "v", "o", "gate", "up", "down"];
    let first = 2 + 9 * layer;
    let weights = [1, 2, 3, 4, 6, 7, 8].map(|w| format!("w{}", first + w));
    let decide = |w: &String| {
        let reads = |n: &Node| n.ins.iter().flatten().any(|v| g.value(*v).name == *w);
        let forward = |n: &Node| n.role == Role::Forward && n.recompute_of.is_none();
        let (_, node) = g.nodes().find(|(_, n)| forward(n) && reads(n)).unwrap();
        plan.decisions
            .iter()
            .find(|d| d.name == node.name)
            .map(|d| d.kept)
    };
    names.into_iter().zip(weights.iter().map(decide)).collect()
}

#[test]
fn selective_takes_seven_decisions_in_a_gated_layer() {
    let (g, done) = compiled(Style::PreNorm, 3, Policy::SELECTIVE).unwrap();
    for layer in 0..3 {
        let expected = [
            ("q", Some(true)),
            ("k", Some(false)),
            ("v", Some(true)),
            ("o", Some(false)),
            ("gate", Some(true)),
            ("up", Some(false)),
            // The rule keeps it, but no backward op reads it: neither kept nor recomputed.
            ("down", None),
        ];
        assert_eq!(
            products(&g, &done.outcome.plan, layer),
            expected,
            "layer {layer}"
        );
    }
    let probabilities: Vec<bool> = done
        .outcome
        .plan
        .decisions
        .iter()
        .filter(|d| d.reason == "attention probabilities")
        .map(|d| d.kept)
        .collect();
    assert_eq!(probabilities, [true; 3]);
}

#[test]
fn every_policy_saves_memory_and_copies_only_what_is_read() {
    for style in [Style::PreNorm, Style::PostNorm] {
        let unplanned = compiled(style, 4, Policy::NONE).unwrap().1.outcome.plan;
        assert_eq!(unplanned.before, unplanned.after);
        for policy in [
            Policy::FULL,
            Policy::SELECTIVE,
            Policy::every(2),
            Policy::first(3),
            Policy::group(2),
        ] {
            let (g, done) = compiled(style, 4, policy).unwrap();
            let plan = &done.outcome.plan;
            assert!(plan.after.peak_bytes < plan.before.peak_bytes, "{policy}");
            assert!(plan.recompute_flops() > 0);
            let layers: Vec<Option<usize>> = match () {
                _ if policy == Policy::every(2) => vec![Some(1), Some(3)],
                _ if policy == Policy::first(3) => vec![Some(0), Some(1), Some(2)],
                _ => (0..4).map(Some).collect(),
            };
            let mut rebuilt: Vec<Option<usize>> = plan.segments.iter().map(|s| s.block).collect();
            rebuilt.sort_unstable();
            assert_eq!(rebuilt, layers, "{policy}");
            for (_, node) in g.nodes().filter(|(_, n)| n.recompute_of.is_some()) {
                let read = node.outs.iter().any(|v| !g.value(*v).uses().is_empty());
                assert!(read, "{policy}: nothing reads {}", node.name);
                assert_eq!(node.role, Role::Forward);
            }
            // The mask lies outside the layers and is shared by them: it stays.
            assert!(plan.decisions.iter().all(|d| d.block.is_some() || d.kept));
        }
    }
}

#[test]
fn a_recomputed_layer_keeps_only_the_stream() {
    let (_, done) = compiled(Style::PreNorm, 4, Policy::FULL).unwrap();
    let inside = done
        .outcome
        .plan
        .decisions
        .iter()
        .filter(|d| d.block.is_some());
    let kept: Vec<&str> = inside
        .filter(|d| d.kept)
        .map(|d| d.reason.as_str())
        .collect();
    assert_eq!(kept, ["other layers read it"; 4]);
    // In groups of two, the stream between the two is dropped as well.
    let (_, done) = compiled(Style::PreNorm, 4, Policy::group(2)).unwrap();
    let kept = done
        .outcome
        .plan
        .decisions
        .iter()
        .filter(|d| d.block.is_some() && d.kept);
    assert_eq!(
        kept.map(|d| d.block).collect::<Vec<_>>(),
        [Some(1), Some(3)]
    );
}

#[test]
fn a_stored_plan_is_replayed_only_on_its_own_problem() {
    let (_, done) = compiled(Style::PreNorm, 2, Policy::FULL).unwrap();
    let text = serde_json::to_string(&done.outcome.plan).unwrap();
    let stored: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(stored, done.outcome.plan);
    let mut g = transformer(2, Style::PreNorm);
    let mut cx = Cx {
        request: request(Policy::SELECTIVE, [2, 64]),
        ..Cx::default()
    };
    let pipeline = Pipeline::parse("infer,simplify,loss,autodiff,simplify,plan").unwrap();
    driver::run(&pipeline, &mut g, &mut cx, &mut Watch::default()).unwrap();
    let input = cx.done.planned.unwrap().bound.input;
    let layer_of = &input.annotations.layer_of;
    assert_eq!(
        stored.clone().replay(&input.problem, layer_of).unwrap(),
        stored
    );
    // Without one copy its readers read the original, which lives that much longer.
    let mut edited = stored.clone();
    let copy = edited.segments[0].steps[0];
    let op = edited.schedule.steps.remove(copy).op();
    let judged = edited.replay(&input.problem, layer_of).unwrap();
    assert_eq!(judged.after.steps + 1, stored.after.steps);
    assert!(judged.decisions.iter().any(|d| d.op == op && d.kept));
    let mut broken = stored.clone();
    broken.schedule.steps.retain(|step| step.op() != op);
    assert!(broken.replay(&input.problem, layer_of).is_err());
    let mut other = input.problem.clone();
    other.ops[OpIdx(0)].kind = "Other".into();
    let e = stored.replay(&other, layer_of).unwrap_err();
    assert!(e.to_string().contains("made for another graph"), "{e}");
}

fn sub_blocks(style: Style, policy: &str) -> Result<(Graph, Planned)> {
    compiled(style, 3, Policy::parse(policy)?)
}

fn op_of(planned: &Planned, id: NodeId) -> OpIdx {
    let at = planned.bound.nodes.iter().position(|n| *n == id);
    OpIdx(at.unwrap())
}

/// Ops that are recomputed.
fn recomputed(g: &Graph) -> BTreeSet<&'static str> {
    let copies = g.nodes().filter(|(_, n)| n.recompute_of.is_some());
    copies.map(|(_, n)| n.op.name).collect()
}

#[test]
fn only_the_parts_that_are_named_are_rebuilt() {
    for style in [Style::PreNorm, Style::PostNorm] {
        let (none, _) = sub_blocks(style, "none").unwrap();
        let is_part = |g: &Graph, planned: &Planned, id: NodeId, word: &str| {
            let op = op_of(planned, g.original(id));
            let s = &planned.bound.input.annotations;
            s.core_of[op].as_deref() == Some(word)
                || s.sub_block_of[op].is_some_and(|i| s.sub_blocks[i] == word)
        };
        for word in ["norm", "attention", "mlp", "core-attn", "mlp-act"] {
            let (g, made) = sub_blocks(style, &format!("parts:{word}")).unwrap();
            let copies: Vec<NodeId> = g
                .nodes()
                .filter(|(_, n)| n.recompute_of.is_some())
                .map(|(id, _)| id)
                .collect();
            assert!(!copies.is_empty(), "{word}");
            assert!(
                copies.iter().all(|id| is_part(&g, &made, *id, word)),
                "{word}"
            );
            assert_eq!(g.outputs().len(), none.outputs().len());
            let plan = &made.outcome.plan;
            assert!(plan.after.peak_bytes <= plan.before.peak_bytes, "{word}");
        }
        let peak = |policy: &str| {
            sub_blocks(style, policy)
                .unwrap()
                .1
                .outcome
                .plan
                .after
                .peak_bytes
        };
        let (all, core) = (peak("none"), peak("parts:core-attn"));
        assert!(core < all && peak("parts:core-attn,mlp-act") < core);
        assert!(peak("parts:core-attn,mlp,norm") < peak("parts:core-attn"));
    }
}

/// The context is not kept for the projection that reads it: the layout steps to it are rebuilt with the core.
#[test]
fn nothing_is_kept_behind_a_discarded_core() {
    let (g, made) = sub_blocks(Style::PreNorm, "parts:core-attn").unwrap();
    let ops = recomputed(&g);
    for op in ["MatMul", "Softmax", "Add", "Transpose", "Reshape"] {
        assert!(ops.contains(op), "{op} of {ops:?}");
    }
    let kept = made.outcome.plan.decisions.iter().filter(|d| d.kept);
    for decision in kept {
        let id = g.find_node(&decision.name).unwrap();
        let op = op_of(&made, id);
        let core = made.bound.input.annotations.core_of[op].as_deref();
        assert_ne!(core, Some("core-attn"), "{}", decision.name);
    }
}

#[test]
fn a_part_that_no_layer_has_is_an_error() {
    let e = sub_blocks(Style::PreNorm, "parts:moe-act").err().unwrap();
    assert_eq!((e.code(), e.exit_code()), ("policy", 2));
    assert!(
        e.to_string().contains("core-attn, mlp, mlp-act, norm"),
        "{e}"
    );
}
