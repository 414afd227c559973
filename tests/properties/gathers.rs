//! Plans of steps whose parameters are sharded, judged by brute force: a whole parameter is kept for the backward pass or
//! gathered again, together with every other recomputation.

use ckpt_passes::analysis::Device;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::error::Result;
use ckpt_passes::ops::collective::ALL_GATHER;
use ckpt_passes::plan::brute::cheapest;
use ckpt_passes::plan::constraint::PolicyScope;
use ckpt_passes::plan::{
    Budget, ByOp, Effort, Failure, OpIdx, PlanInput, PlanRequest, Policy, Problem, evaluate, plan,
};
use ckpt_passes::testing::Random;
use ckpt_passes::text;
use ckpt_passes::transform::collectives::{Mesh, Shard};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};

const CASES: usize = 12;

/// A few layers and a mean over examples.
fn model(r: &mut Random) -> String {
    let width = 2 + r.below(4);
    let (mut inits, mut nodes) = (String::new(), String::new());
    let mut last = "x".to_string();
    for i in 0..2 {
        let numbers: Vec<String> = (0..width * width)
            .map(|n| format!("0.{}", 1 + n % 9))
            .collect();
        inits += &format!(
            "  init %w{i} : f32[{width}, {width}] = [{}]\n",
            numbers.join(", ")
        );
        nodes += &format!("  %m{i} = MatMul %{last}, %w{i}\n");
        last = format!("m{i}");
        if r.below(2) == 0 {
            let op = ["Tanh", "Sigmoid", "Exp"][r.below(3)];
            nodes += &format!("  %a{i} = {op} %{last}\n");
            last = format!("a{i}");
        }
    }
    format!(
        "graph @g imported (%x: f32[batch, {width}]) -> (%loss) {{
{inits}{nodes}  %loss = ReduceMean %{last} {{keepdims=0}}
}}
"
    )
}

/// A device on which the bytes and FLOPs of such small steps take time, and gathering takes more or less of it.
fn device(r: &mut Random) -> Device {
    let mut device = Device {
        gigabytes_per_s: 0.02,
        link_gigabytes_per_s: [0.005, 0.05, 0.5][r.below(3)],
        link_us: [0.1, 3.0][r.below(2)],
        launch_us: 0.0,
        ..Device::default()
    };
    device.teraflops.f32 = 1e-4;
    device
}

/// Returns the unplanned step of a rank that keeps slices of its parameters.
fn input(r: &mut Random) -> Result<PlanInput> {
    let mut graph = text::parse(&model(r))?;
    let request = Request {
        loss: Loss::parse("output:loss")?,
        plan: Policy::NONE.into(),
        device: device(r),
        dims: vec![("batch".into(), 1 + r.below(6) as i64)],
        mesh: Some(Mesh {
            dp: 2 + r.below(3) as u32,
            tp: 1,
            shard: Shard::Params,
            bucket_bytes: [0, 100][r.below(2)],
            ..Mesh::default()
        }),
        updates: UpdateOptions {
            optimizer: Some(Optimizer::parse("sgd")?),
            fuse: true,
            ..UpdateOptions::default()
        },
        stop_after: Some("plan".into()),
        ..Request::default()
    };
    let done = compile(&mut graph, &request, &mut Watch::default())?;
    Ok(done.planned.unwrap().bound.input)
}

/// Returns a step in which single numbers take no bytes, so that brute force need not weigh them, with its folded form, and the
/// op here of each op there.
fn weighed(mut input: PlanInput) -> (PlanInput, Problem, Vec<OpIdx>) {
    for value in &mut input.problem.values {
        if value.bytes <= 4 {
            value.bytes = 0;
        }
    }
    let (mut folded, ops) = input.problem.fold();
    for (o, op) in folded.ops.indices().zip(&ops) {
        if input.constraints.scope[*op] == PolicyScope::Frozen {
            folded.ops[o].recomputable = false;
        }
    }
    (input, folded, ops)
}

/// Returns the ops that gather a parameter, of those that run.
fn gathers(problem: &Problem, runs: impl Iterator<Item = OpIdx>) -> usize {
    runs.filter(|o| problem.ops[*o].kind == ALL_GATHER.name)
        .count()
}

#[test]
fn no_plan_beats_brute_force_and_few_are_worse() {
    let mut r = Random(92);
    let (mut plans, mut optimal, mut worst, mut missed, mut impossible) = (0, 0, 1.0f64, 0, 0);
    let (mut regathering, mut repeating) = (0, 0);
    for n in 0..CASES {
        let (input, folded, ops) = weighed(input(&mut r).unwrap());
        let problem = &input.problem;
        let once = gathers(problem, problem.ops.indices());
        let whole = evaluate(problem, &problem.given_order()).unwrap();
        let without_views = evaluate(&folded, &folded.given_order()).unwrap();
        assert_eq!(without_views.peak_bytes, whole.peak_bytes, "step {n}");
        let prices: ByOp<f64> = folded.ops.iter().map(|op| op.cost).collect();
        for share in [0.97, 0.9, 0.8] {
            let above_bytes = (whole.peak_above_static_bytes as f64 * share) as u64;
            let budget_bytes = whole.static_bytes + above_bytes;
            let name = format!("step {n} at {budget_bytes} bytes");
            let best = cheapest(&folded, above_bytes, &prices);
            let request = PlanRequest {
                effort: Effort::First,
                ..Budget::Bytes(budget_bytes).into()
            };
            let (best, plan) = match (best, plan(&input, &request)) {
                (None, Err(e)) => {
                    assert!(e.is_infeasible(), "{name}: {e:?}");
                    impossible += 1;
                    continue;
                }
                (Some(best), Ok(outcome)) => (best, outcome.plan),
                (Some(best), Err(e)) => {
                    let proven = matches!(&e, Failure::Infeasible(i) if i.shortfall.is_proven);
                    assert!(e.is_infeasible() && !proven, "{name}: {best:?} fits: {e:?}");
                    missed += 1;
                    continue;
                }
                (None, Ok(outcome)) => {
                    panic!(
                        "{name}: brute force finds none: {:?}",
                        outcome.plan.schedule
                    )
                }
            };
            assert!(plan.after.peak_bytes <= budget_bytes, "{name}");
            let slack = 1e-6 * (1.0 + best.price);
            assert!(plan.after.cost + slack >= best.price, "{name}: {best:?}");
            let certificate = plan.certificate.as_ref().unwrap();
            let lower = plan.before.cost * (1.0 + certificate.lower_bound_pct / 100.0);
            assert!(lower <= best.price + slack, "{name}: {lower}: {best:?}");
            plans += 1;
            optimal += usize::from(plan.after.cost <= best.price + slack);
            worst = worst.max(plan.after.cost / best.price);
            repeating += usize::from(best.schedule.len() > folded.ops.len());
            let again = best.schedule.iter().map(|o| ops[o.0]);
            regathering += usize::from(gathers(problem, again) > once);
        }
    }
    println!(
        "{optimal} of {plans} optimal, at worst {worst:.3} of the least time; {missed} not found, {impossible} have none; of \
         the best {repeating} repeat something, {regathering} gather again"
    );
    assert!(regathering > 2 && impossible > 2);
    assert!(optimal * 2 >= plans && worst < 1.5);
}
