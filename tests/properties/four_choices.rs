//! All choices of one plan at once, judged by brute force: what is kept, computed again or moved, into how many parts head
//! and loss are cut, and updates written over parameters, in random small training steps.

use ckpt_passes::analysis::Device;
use ckpt_passes::compile::{Compiled, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::error::{Kind, Result};
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::brute::{Move, cheapest_moving};
use ckpt_passes::plan::constraint::PolicyScope;
use ckpt_passes::plan::{
    Budget, ByOp, Effort, Offload, OffloadSet, OpIdx, PlanInput, PlanRequest, Policy, evaluate,
};
use ckpt_passes::testing::Random;
use ckpt_passes::text;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_passes::transform::tile::{Tile, Tiles};

const CASES: usize = 40;

/// Ops of the largest step of which every schedule is tried.
const LARGEST: usize = 18;

/// Activations of a few tokens through a layer or two, then a head wider than they are and a loss.
fn model(r: &mut Random) -> (String, usize) {
    let rows = 2 + r.below(5);
    let (width, classes) = (1 + r.below(3), 4 + r.below(9));
    let weights = |name: &str, m: usize, n: usize| {
        let numbers: Vec<String> = (0..m * n).map(|i| format!("0.{}", 1 + i % 9)).collect();
        format!(
            "  init %{name} : f32[{m}, {n}] = [{}]\n",
            numbers.join(", ")
        )
    };
    let (mut inits, mut nodes) = (weights("head", width, classes), String::new());
    let mut last = "x".to_string();
    for i in 0..1 + r.below(2) {
        if r.below(2) == 0 {
            inits += &weights(&format!("w{i}"), width, width);
            nodes += &format!("  %m{i} = MatMul %{last}, %w{i}\n");
            last = format!("m{i}");
        }
        let op = ["Tanh", "Sigmoid", "Exp"][r.below(3)];
        nodes += &format!("  %a{i} = {op} %{last}\n");
        last = format!("a{i}");
    }
    let source = format!(
        "graph @g imported (%x: f32[{rows}, {width}], %l: i64[{rows}]) -> (%loss) {{
{inits}{nodes}  %s = MatMul %{last}, %head
  %loss = SoftmaxCrossEntropyLoss %s, %l {{reduction=\"sum\"}}
}}
"
    );
    (source, rows)
}

/// A device on which the bytes and FLOPs of such small steps take time, and moving takes more or less of it.
fn device(r: &mut Random) -> Device {
    let mut device = Device {
        gigabytes_per_s: 0.02,
        outside_gigabytes_per_s: [0.01, 0.05, 0.5][r.below(3)],
        // So views, which brute force does not see, cost nothing.
        launch_us: 0.0,
        ..Device::default()
    };
    device.teraflops.f32 = 1e-4;
    device
}

struct Case {
    source: String,
    device: Device,
    optimizer: Option<Optimizer>,
}

impl Case {
    fn compiled(&self, loss: Tile, budget: Option<Budget>) -> Result<(Graph, Compiled)> {
        let mut graph = text::parse(&self.source)?;
        let request = Request {
            loss: Loss::parse("output:loss")?,
            plan: match budget {
                None => Policy::NONE.into(),
                Some(budget) => PlanRequest {
                    effort: Effort::First,
                    offload: Offload {
                        set: OffloadSet::Auto,
                        min_bytes: 0,
                        streams: false,
                        ..Offload::default()
                    },
                    ..budget.into()
                },
            },
            device: self.device.clone(),
            tile: Tiles {
                loss,
                mlp: Tile::Off,
            },
            updates: UpdateOptions {
                optimizer: self.optimizer,
                fuse: self.optimizer.is_some(),
                ..UpdateOptions::default()
            },
            stop_after: Some("plan".into()),
            ..Request::default()
        };
        let done = compile(&mut graph, &request, &mut Watch::default())?;
        Ok((graph, done))
    }

    /// The step with so many parts, as a planner sees it.
    fn input(&self, parts: usize) -> PlanInput {
        let tile = match parts {
            1 => Tile::Off,
            n => Tile::Chunks(n),
        };
        let (_, done) = self.compiled(tile, None).unwrap();
        done.planned.unwrap().bound.input
    }
}

/// Time of the best schedule of a step, transfers included, whether it computes something again and whether it moves
/// something; `None` where none fits.
fn best(input: &PlanInput, budget_bytes: u64) -> Option<(f64, bool, bool)> {
    let PlanInput {
        problem,
        annotations,
        constraints,
        ..
    } = input;
    let above_static_bytes = budget_bytes.checked_sub(problem.static_bytes())?;
    let (mut folded, ops) = problem.fold();
    let prices: ByOp<f64> = folded.ops.iter().map(|op| op.cost).collect();
    // What feeds the head stays, and what nothing trained flows into (plan/offload.rs, plan/constraint.rs).
    let mut may = folded.movable();
    for (o, op) in folded.ops.indices().zip(&ops) {
        if constraints.scope[*op] == PolicyScope::Frozen {
            folded.ops[o].recomputable = false;
            may[o] = false;
        }
        may[o] &= !annotations.feeds_scores[*op];
    }
    let transfer = problem.transfer.unwrap();
    let way = |o: OpIdx| {
        let each = transfer.cost(folded.result_bytes(o));
        may[o].then_some(Move {
            out: each,
            back: each,
        })
    };
    let moves: ByOp<Option<Move>> = folded.ops.indices().map(way).collect();
    let best = cheapest_moving(&folded, above_static_bytes, &prices, &moves)?;
    let repeats = best.schedule.len() > folded.ops.len();
    Some((best.price, repeats, !best.moved.is_empty()))
}

#[test]
fn no_plan_beats_brute_force_and_few_are_worse() {
    let mut r = Random(91);
    let (mut plans, mut optimal, mut worst, mut missed, mut larger) = (0, 0, 1.0f64, 0, 0);
    let (mut cut, mut repeating, mut moving) = (0, 0, 0);
    for n in 0..CASES {
        let (source, rows) = model(&mut r);
        let case = Case {
            source,
            device: device(&mut r),
            optimizer: [None, Some("sgd"), Some("sgd:momentum=0.5")][n % 3]
                .map(|text| Optimizer::parse(text).unwrap()),
        };
        let most = rows.min(4);
        let inputs: Vec<PlanInput> = (1..=most).map(|parts| case.input(parts)).collect();
        let uncut = &inputs[0].problem;
        let whole = evaluate(uncut, &uncut.given_order()).unwrap();
        let share = [0.5, 0.65, 0.8, 0.95][r.below(4)];
        let above_bytes = (whole.peak_above_static_bytes as f64 * share) as u64;
        let budget_bytes = whole.static_bytes + above_bytes;
        // Of steps that are too large for brute force nothing is known.
        let small = |input: &&PlanInput| input.problem.fold().0.ops.len() <= LARGEST;
        let each: Vec<_> = inputs.iter().take_while(small).collect();
        let each: Vec<_> = each.iter().map(|p| best(p, budget_bytes)).collect();
        let done = match case.compiled(Tile::Auto, Some(Budget::Bytes(budget_bytes))) {
            Ok((_, done)) => done,
            Err(e) => {
                assert_eq!(e.kind(), Kind::Budget, "graph {n}: {e}");
                missed += each.iter().any(Option::is_some) as usize;
                continue;
            }
        };
        let parts = done.tiled.first().map_or(1, |(_, parts)| *parts);
        let plan = done.planned.unwrap().outcome.plan;
        let name = format!("graph {n} in {parts} parts of {rows} rows at {budget_bytes} bytes");
        assert!(plan.after.peak_bytes <= budget_bytes, "{name}");
        // Of so many parts the plan is no better than the best, and the bound is not above it.
        if let Some(own) = each.get(parts - 1) {
            let Some((price, ..)) = *own else {
                panic!("{name}: brute force finds none: {:?}", plan.schedule);
            };
            let slack = 1e-6 * (1.0 + price);
            assert!(plan.after.cost + slack >= price, "{name}: {price}");
            let certificate = plan.certificate.as_ref().unwrap();
            let lower = plan.before.cost * (1.0 + certificate.lower_bound_pct / 100.0);
            assert!(lower <= price + slack, "{name}: {lower} > {price}");
            if let Some(tried) = &done.tried {
                let own = tried.trials.iter().find(|t| t.chosen).unwrap();
                assert_eq!(own.loss_chunks, parts, "{name}");
                assert!(certificate.class.contains("other numbers were not"));
            }
        }
        // Of every number that was tried quickly, the bound holds, too.
        for trial in done.tried.iter().flat_map(|t| &t.trials) {
            let brute = each.get(trial.loss_chunks - 1).copied().flatten();
            if let (Some(bound), Some((price, ..))) = (trial.lower_bound_pct, brute) {
                let least = whole.cost * (1.0 + bound / 100.0);
                assert!(least <= price + 1e-6 * (1.0 + price), "{name}: {trial:?}");
            }
            let unknown = trial.loss_chunks > each.len();
            assert!(
                !trial.fits || brute.is_some() || unknown,
                "{name}: {trial:?}"
            );
        }
        if parts > each.len() {
            larger += 1;
            continue;
        }
        // Among all numbers of parts that are known.
        let found = each.iter().flatten();
        let top = found.copied().reduce(|a, b| if b.0 < a.0 { b } else { a });
        let Some((price, repeats, moves)) = top else {
            continue;
        };
        plans += 1;
        optimal += (plan.after.cost <= price * (1.0 + 1e-6)) as usize;
        worst = worst.max(plan.after.cost / price);
        let at = each.iter().position(|b| b.is_some_and(|b| b.0 == price));
        cut += (at > Some(0)) as usize;
        repeating += repeats as usize;
        moving += moves as usize;
    }
    println!(
        "{optimal} of {plans} optimal, at worst {worst:.3} of the least time, {missed} not found, {larger} too large; of \
         the best {cut} cut, {repeating} compute again, {moving} move"
    );
    assert!(cut > 2 && repeating > 2 && moving > 2 && plans > 10);
    assert!(optimal * 4 >= plans * 3 && missed <= 1 && worst < 1.5);
}
