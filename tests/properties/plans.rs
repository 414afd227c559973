//! What holds for every plan, on real models and on random problems: never worse than a policy at that policy's own peak,
//! the same whoever asks beside it, within its budget at every percent, and what its JSON says is the plan.

use ckpt_opt::frontend;
use ckpt_passes::analysis::{MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Planned, Watch};
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::solve::answer::Query;
use ckpt_passes::plan::solve::solve;
use ckpt_passes::plan::{
    Budget, ByOp, Effort, Objective, Offload, OffloadSet, OpAnnotations, Plan, PlanRequest, Policy,
    Problem, evaluate, plan,
};
use ckpt_passes::testing::Random;
use ckpt_passes::testing::dags::{Shape, random_dag};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::remat::remat;
use std::path::Path;

const MODELS: &[(&str, &str, &[(&str, i64)])] = &[
    ("gpt2", "causal-lm", &[("batch", 4), ("seq", 32)]),
    ("bert", "cross-entropy", &[("batch", 2), ("seq", 24)]),
    ("llama32", "causal-lm", &[("batch", 2), ("seq", 16)]),
    ("llama32_bf16", "causal-lm", &[("batch", 2), ("seq", 16)]),
    ("llama32_mask", "causal-lm", &[("batch", 2), ("seq", 16)]),
];

/// The training graph of a fixture, unplanned, with what planning it takes.
fn training(model: &str, loss: &str, dims: &[(&str, i64)]) -> (Graph, Planned) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(model);
    let mut graph = frontend::read(&path.join("model.onnx")).unwrap().graph;
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        plan: Policy::NONE.into(),
        dims: dims.iter().map(|(n, s)| (n.to_string(), *s)).collect(),
        fuse: true,
        stop_after: Some("plan".into()),
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default());
    let done = done.unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.planned.unwrap())
}

fn budgeted(bytes: u64, objective: Objective, effort: Effort) -> PlanRequest {
    PlanRequest {
        objective,
        effort,
        ..Budget::Bytes(bytes).into()
    }
}

/// A plan is what its JSON says, and replaying that gives the plan again, without the proof.
fn reads_back(plan: &Plan, problem: &Problem, block_of: &ByOp<Option<usize>>, name: &str) {
    let text = serde_json::to_string(plan).unwrap();
    let read: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(&read, plan, "{name}");
    let replayed = read.replay(problem, block_of).unwrap();
    let unproven = Plan {
        certificate: None,
        ..plan.clone()
    };
    assert_eq!(replayed, unproven, "{name}");
}

#[test]
fn never_worse_than_a_policy_at_its_own_peak() {
    for (model, loss, dims) in MODELS {
        let (_, made) = training(model, loss, dims);
        let input = &made.bound.input;
        let layer_of = &input.annotations.layer_of;
        for policy in Policy::examples() {
            let Ok(theirs) = policy.unconstrained_plan(input) else {
                // Not every model has the sub-blocks of the example, and none is in chunks.
                let word = policy.to_string();
                assert!(
                    word.starts_with("parts:") || word == "chunks",
                    "{model} {word}"
                );
                continue;
            };
            for objective in [Objective::Cost, Objective::Flops] {
                let name = format!("{model} {policy} {objective:?}");
                let ask = budgeted(theirs.after.peak_bytes, objective, Effort::First);
                let ours = plan(input, &ask).unwrap_or_else(|e| panic!("{name}: {e:?}"));
                let ours = ours.plan;
                assert!(ours.after.peak_bytes <= theirs.after.peak_bytes, "{name}");
                let (own, other) = (objective.of(&ours.after), objective.of(&theirs.after));
                assert!(own <= other * (1.0 + 1e-12), "{name}: {own} {other}");
                reads_back(&ours, &input.problem, layer_of, &name);
            }
            reads_back(&theirs, &input.problem, layer_of, model);
        }
    }
}

#[test]
fn every_percent_is_kept_by_the_graph_that_is_written() {
    for (model, loss, dims) in &MODELS[..3] {
        let (graph, made) = training(model, loss, dims);
        let input = &made.bound.input;
        let before = evaluate(&input.problem, &input.problem.given_order()).unwrap();
        let mut planned = 0;
        // From the largest down to the first that is refused.
        for percent in (1..=100).rev() {
            let asked = Budget::Percent(f64::from(percent));
            let request = PlanRequest {
                effort: Effort::First,
                ..asked.into()
            };
            let name = format!("{model} at {percent} %");
            let budget = input.peak_bytes(asked).unwrap();
            let plan = match plan(input, &request) {
                Ok(outcome) => outcome.plan,
                Err(e) => {
                    assert!(e.is_infeasible(), "{name}: {e:?}");
                    break;
                }
            };
            planned += 1;
            assert!(plan.after.peak_bytes <= budget, "{name}");
            assert!(plan.after.cost >= before.cost, "{name}");
            let mut written = graph.clone();
            remat(&mut written, input, &made.bound.nodes, &plan).unwrap();
            let sizes = Sizes::new(&written, &made.binding).unwrap();
            let predicted = MemoryProfile::new(&written, &sizes).unwrap().peak_bytes;
            assert_eq!(predicted, plan.after.peak_bytes, "{name}");
        }
        assert!(planned >= 20, "{model}: {planned} plans");
    }
}

#[test]
fn one_percent_more_never_costs_more() {
    let (_, made) = training("gpt2", "causal-lm", &[("batch", 4), ("seq", 32)]);
    let input = &made.bound.input;
    let mut last: Option<(u32, f64)> = None;
    for percent in 78..=83 {
        let request = PlanRequest {
            effort: Effort::Units(50_000),
            ..Budget::Percent(f64::from(percent)).into()
        };
        let cost = plan(input, &request).unwrap().plan.after.cost;
        if let Some((less, dearer)) = last {
            assert!(
                cost <= dearer,
                "{percent} % costs {cost}, {less} % {dearer}"
            );
        }
        last = Some((percent, cost));
    }
    let (percent, cost) = last.unwrap();
    assert!(
        cost > made.outcome.plan.after.cost,
        "{percent} % asks for no recomputation"
    );
}

#[test]
fn plans_do_not_depend_on_threads() {
    let (_, made) = training("llama32", "causal-lm", &[("batch", 2), ("seq", 16)]);
    let input = &made.bound.input;
    let before = made.outcome.plan.after.peak_bytes;
    let plans = || -> Vec<Plan> {
        let budgets = [before * 9 / 10, before];
        let of = |b: &u64| {
            let request = budgeted(*b, Objective::Cost, Effort::Units(3_000_000));
            plan(input, &request).unwrap().plan
        };
        budgets.iter().map(of).collect()
    };
    let alone = plans();
    for threads in [2, 4] {
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(plans)).collect();
            for plan in running {
                assert_eq!(plan.join().unwrap(), alone, "{threads} threads");
            }
        });
    }
}

#[test]
fn random_steps_at_every_percent() {
    let mut r = Random(31);
    let (mut planned, mut impossible) = (0, 0);
    for n in 0..60 {
        let p = random_dag(&mut r, 6 + n % 13, Shape::Training);
        let before = evaluate(&p, &p.given_order()).unwrap();
        let annotations = OpAnnotations::unknown(p.ops.len());
        // From the largest down to the first that is refused.
        for percent in (0..=100u64).rev().step_by(5) {
            let budget_bytes = before.static_bytes + before.peak_above_static_bytes * percent / 100;
            let request = Query {
                budget_bytes,
                effort: Effort::First,
                ..Query::default()
            };
            let name = format!("problem {n} at {percent} %");
            match solve(&p, &request).unwrap() {
                Ok(solution) => {
                    let score = evaluate(&p, &solution.schedule).unwrap();
                    assert!(score.peak_bytes <= budget_bytes, "{name}");
                    assert_eq!(score, solution.score, "{name}");
                    assert!(solution.bound.lower <= score.cost * (1.0 + 1e-9), "{name}");
                    let plan = Plan::new(
                        "budget",
                        &p,
                        &solution.schedule,
                        &annotations.layer_of,
                        &p.by_value(String::new()),
                    );
                    reads_back(&plan.unwrap(), &p, &annotations.layer_of, &name);
                    planned += 1;
                }
                Err(lowest) => {
                    assert!(lowest.reached_bytes > budget_bytes, "{name}");
                    impossible += 1;
                    break;
                }
            }
        }
    }
    assert!(planned > 300 && impossible > 50, "{planned} {impossible}");
}

#[test]
fn moving_what_pays_never_makes_a_model_slower() {
    let mut moving = 0;
    for (model, loss, dims) in MODELS {
        let (_, made) = training(model, loss, dims);
        let mut input = made.bound.input;
        let before = evaluate(&input.problem, &input.problem.given_order()).unwrap();
        // From transfers that are nearly free to such that never pay, beside other ops or in their way.
        for (us_per_megabyte, busy_share) in [(1.0, 0.0), (40.0, 0.0), (40.0, 1.0), (4000.0, 0.5)] {
            let transfer = input.problem.transfer.as_mut().unwrap();
            (transfer.us_per_megabyte, transfer.busy_share) = (us_per_megabyte, busy_share);
            for percent in [90, 70, 55] {
                let above = before.peak_above_static_bytes * percent / 100;
                let bytes = before.static_bytes + above;
                let planned = |set| {
                    let request = PlanRequest {
                        offload: Offload {
                            set,
                            ..Offload::default()
                        },
                        ..budgeted(bytes, Objective::Cost, Effort::First)
                    };
                    plan(&input, &request).map(|outcome| outcome.plan)
                };
                let (none, auto) = (planned(OffloadSet::Nothing), planned(OffloadSet::Auto));
                let Ok(none) = none else { continue };
                let auto = auto.unwrap_or_else(|e| panic!("{model} {percent} %: {e:?}"));
                assert!(auto.after.peak_bytes <= bytes, "{model} {percent} %");
                assert!(
                    auto.after.cost <= none.after.cost * (1.0 + 1e-12),
                    "{model} {percent} % {us_per_megabyte} {busy_share}"
                );
                moving += usize::from(!auto.schedule.offloaded.is_empty());
            }
        }
    }
    assert!(moving > 0);
}
