//! What holds for every plan, on real models and on random problems: never worse than a policy at that policy's own peak,
//! the same whoever asks beside it, within its budget at every percent, and what its JSON says is the plan.

use ckpt_opt::frontend;
use ckpt_passes::analysis::{MemoryProfile, Sizes};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Made, Watch};
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::offload::{By, What};
use ckpt_passes::plan::solve::{self, Failure};
use ckpt_passes::plan::{
    Budget, BudgetGoal, Effort, Objective, Offloading, OpAnnotations, Plan, PlanContext, Policy,
    Problem, evaluate,
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

const POLICIES: &[Policy] = &[
    Policy::None,
    Policy::Selective,
    Policy::Full,
    Policy::Submodule,
    Policy::Every(2),
    Policy::First(1),
    Policy::Group(2),
];

/// The training graph of a fixture, unplanned, with what planning it takes.
fn training(model: &str, loss: &str, dims: &[(&str, i64)]) -> (Graph, Made) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(model);
    let mut graph = frontend::read(&path.join("model.onnx")).unwrap().graph;
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        policy: Policy::None,
        dims: dims.iter().map(|(n, s)| (n.to_string(), *s)).collect(),
        fuse: true,
        stop_after: Some("plan".into()),
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default());
    let done = done.unwrap_or_else(|e| panic!("{model}: {e}"));
    (graph, done.made.unwrap())
}

fn setting(made: &Made) -> PlanContext<'_> {
    PlanContext::plain(
        &made.subject.problem,
        &made.subject.structure,
        &made.choices,
    )
}

fn budgeted(bytes: u64, objective: Objective, effort: Effort) -> BudgetGoal {
    BudgetGoal {
        budget: Budget::Bytes(bytes),
        objective,
        effort,
        ..BudgetGoal::default()
    }
}

/// A plan is what its JSON says, and replaying that gives the plan again, without the proof.
fn reads_back(plan: &Plan, problem: &Problem, block_of: &[Option<usize>], name: &str) {
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
        let (setting, subject) = (setting(&made), &made.subject);
        for policy in POLICIES {
            let theirs = policy.plan(&subject.problem, &subject.structure).unwrap();
            for objective in [Objective::Cost, Objective::Flops] {
                let name = format!("{model} {policy} {objective:?}");
                let ask = budgeted(theirs.after.peak_bytes, objective, Effort::First);
                let ours = ask.plan(&setting).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert!(ours.after.peak_bytes <= theirs.after.peak_bytes, "{name}");
                let (own, other) = (objective.of(&ours.after), objective.of(&theirs.after));
                assert!(own <= other * (1.0 + 1e-12), "{name}: {own} {other}");
                reads_back(&ours, &subject.problem, &subject.structure.block_of, &name);
            }
            reads_back(
                &theirs,
                &subject.problem,
                &subject.structure.block_of,
                model,
            );
        }
    }
}

#[test]
fn every_percent_is_kept_by_the_graph_that_is_written() {
    for (model, loss, dims) in &MODELS[..3] {
        let (graph, made) = training(model, loss, dims);
        let (setting, subject) = (setting(&made), &made.subject);
        let before = evaluate(&subject.problem, &subject.problem.given_order()).unwrap();
        let mut planned = 0;
        // From the largest down to the first that is refused.
        for percent in (1..=100).rev() {
            let ask = BudgetGoal {
                budget: Budget::Percent(f64::from(percent)),
                objective: Objective::Cost,
                effort: Effort::First,
                ..BudgetGoal::default()
            };
            let name = format!("{model} at {percent} %");
            let budget = ask.peak_bytes(&setting).unwrap();
            let plan = match ask.plan(&setting) {
                Ok(plan) => plan,
                Err(e) => {
                    assert_eq!(e.exit_code(), 3, "{name}: {e}");
                    break;
                }
            };
            planned += 1;
            assert!(plan.after.peak_bytes <= budget, "{name}");
            assert!(plan.after.cost >= before.cost, "{name}");
            let mut written = graph.clone();
            let blocks = &subject.structure.block_of;
            remat(&mut written, &subject.problem, &subject.map, &plan, blocks).unwrap();
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
    let setting = setting(&made);
    let mut last: Option<(u32, f64)> = None;
    for percent in 78..=83 {
        let ask = BudgetGoal {
            budget: Budget::Percent(f64::from(percent)),
            objective: Objective::Cost,
            effort: Effort::Units(50_000),
            ..BudgetGoal::default()
        };
        let cost = ask.plan(&setting).unwrap().after.cost;
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
        cost > made.plan.after.cost,
        "{percent} % asks for no recomputation"
    );
}

#[test]
fn plans_do_not_depend_on_threads() {
    let (_, made) = training("llama32", "causal-lm", &[("batch", 2), ("seq", 16)]);
    let setting = setting(&made);
    let before = made.plan.after.peak_bytes;
    let plans = || -> Vec<Plan> {
        let budgets = [before * 9 / 10, before];
        let of = |b: &u64| {
            budgeted(*b, Objective::Cost, Effort::Units(3_000_000))
                .plan(&setting)
                .unwrap()
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
        let structure = OpAnnotations::unknown(p.ops.len());
        // From the largest down to the first that is refused.
        for percent in (0..=100u64).rev().step_by(5) {
            let budget_bytes = before.static_bytes + before.peak_above_static_bytes * percent / 100;
            let request = solve::Request {
                budget_bytes,
                effort: Effort::First,
                ..solve::Request::default()
            };
            let name = format!("problem {n} at {percent} %");
            match solve::solve(&p, &request) {
                Ok(solution) => {
                    let score = evaluate(&p, &solution.schedule).unwrap();
                    assert!(score.peak_bytes <= budget_bytes, "{name}");
                    assert_eq!(score, solution.score, "{name}");
                    assert!(solution.bound.lower <= score.cost * (1.0 + 1e-9), "{name}");
                    let plan = Plan::new(
                        "budget",
                        &p,
                        solution.schedule,
                        &structure.block_of,
                        &vec![String::new(); p.values.len()],
                    );
                    reads_back(&plan.unwrap(), &p, &structure.block_of, &name);
                    planned += 1;
                }
                Err(Failure::Infeasible(why)) => {
                    assert!(why.floor.reached_bytes > budget_bytes, "{name}");
                    impossible += 1;
                    break;
                }
                Err(Failure::Invalid(e)) => panic!("{name}: {e}"),
            }
        }
    }
    assert!(planned > 300 && impossible > 50, "{planned} {impossible}");
}

#[test]
fn moving_what_pays_never_makes_a_model_slower() {
    let mut moving = 0;
    for (model, loss, dims) in MODELS {
        let (_, mut made) = training(model, loss, dims);
        let before = evaluate(&made.subject.problem, &made.subject.problem.given_order()).unwrap();
        // From transfers that are nearly free to such that never pay, beside other ops or in their way.
        for (us_per_megabyte, busy_share) in [(1.0, 0.0), (40.0, 0.0), (40.0, 1.0), (4000.0, 0.5)] {
            let transfer = made.subject.problem.transfer.as_mut().unwrap();
            (transfer.us_per_megabyte, transfer.busy_share) = (us_per_megabyte, busy_share);
            for percent in [90, 70, 55] {
                let above = before.peak_above_static_bytes * percent / 100;
                let bytes = before.static_bytes + above;
                let budgeted = budgeted(bytes, Objective::Cost, Effort::First);
                let plan = |what| {
                    let wish = Offloading {
                        what,
                        ..Offloading::default()
                    };
                    wish.plan(&setting(&made), By::Budget(&budgeted))
                };
                let (none, auto) = (plan(What::Nothing), plan(What::Auto));
                let Ok(none) = none else { continue };
                let auto = auto.unwrap_or_else(|e| panic!("{model} {percent} %: {e}"));
                assert!(auto.after.peak_bytes <= bytes, "{model} {percent} %");
                assert!(
                    auto.after.cost <= none.after.cost * (1.0 + 1e-12),
                    "{model} {percent} % {us_per_megabyte} {busy_share}"
                );
                moving += usize::from(!auto.offloaded.is_empty());
            }
        }
    }
    assert!(moving > 0);
}
