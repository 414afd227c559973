//! Solvers against brute force, on thousands of small random problems: never over budget, never infeasible where a plan
//! exists, a bound that no schedule beats, and nearly always the optimum.

use ckpt_passes::plan::brute::{cheapest, smallest_peak};
use ckpt_passes::plan::solve::answer::Query;
use ckpt_passes::plan::solve::min_peak::min_peak;
use ckpt_passes::plan::solve::solve;
use ckpt_passes::plan::{ByOp, Objective, Problem, evaluate};
use ckpt_passes::testing::Random;
use ckpt_passes::testing::dags::{Shape, random_dag};

/// How a batch of problems went.
#[derive(Default)]
struct Tally {
    instances: usize,
    optimal: usize,
    repeats: usize,
    impossible: usize,
}

/// The solver's answer against the best there is. `budget_bytes` is above static.
fn compare(p: &Problem, budget_bytes: u64, tally: &mut Tally, name: &str) {
    let prices: ByOp<f64> = p.ops.iter().map(|op| op.cost).collect();
    let best = cheapest(p, budget_bytes, &prices);
    let request = Query {
        budget_bytes: budget_bytes + p.static_bytes(),
        objective: Objective::Cost,
        ..Query::default()
    };
    let dump = || serde_json::to_string(p).unwrap();
    let solved = solve(p, &request).unwrap_or_else(|e| panic!("{name}: {e}: {}", dump()));
    let (best, solution) = match (best, solved) {
        (None, Err(lowest)) => {
            assert!(
                lowest.reached_bytes > request.budget_bytes,
                "{name}: {}",
                dump()
            );
            tally.impossible += 1;
            return;
        }
        (None, Ok(s)) => panic!(
            "{name}: brute force has none, the solver {:?}: {}",
            s.schedule,
            dump()
        ),
        (Some(b), Err(e)) => panic!(
            "{name}: {:?} fits, and the solver says {e:?}: {}",
            b.schedule,
            dump()
        ),
        (Some(best), Ok(solution)) => (best, solution),
    };
    let score = evaluate(p, &solution.schedule).unwrap();
    assert_eq!(score, solution.score, "{name}");
    assert!(
        score.peak_bytes <= request.budget_bytes,
        "{name}: over budget: {}",
        dump()
    );
    let slack = 1e-6 * (1.0 + best.price);
    assert!(
        score.cost >= best.price - slack,
        "{name}: brute force is not the best: {}",
        dump()
    );
    assert!(
        solution.bound.lower <= best.price + slack,
        "{name}: the bound {} is above the optimum {}: {}",
        solution.bound.lower,
        best.price,
        dump()
    );
    assert!(
        !solution.bound.met || score.cost <= best.price + slack,
        "{name}: not optimal, and says so: {}",
        dump()
    );
    tally.instances += 1;
    tally.optimal += (score.cost <= best.price + slack) as usize;
    tally.repeats += (best.schedule.len() > p.ops.len()) as usize;
}

/// Problems of `ops` ops at budgets from the smallest feasible peak to the unplanned one.
fn batch(seed: u64, count: usize, ops: std::ops::RangeInclusive<usize>, shape: Shape) -> Tally {
    let mut r = Random(seed);
    let mut tally = Tally::default();
    for n in 0..count {
        let size = ops.start() + r.below(ops.end() - ops.start() + 1);
        let p = random_dag(&mut r, size, shape);
        let unplanned = evaluate(&p, &p.given_order())
            .unwrap()
            .peak_above_static_bytes;
        let least = smallest_peak(&p);
        let name = format!("{shape:?} {n}");
        let floor = min_peak(&p, &Query::default()).unwrap();
        assert!(
            floor.least_bytes <= least + p.static_bytes(),
            "{name}: the floor is too high"
        );
        assert!(
            floor.reached_bytes >= least + p.static_bytes(),
            "{name}: reached the impossible"
        );
        // Somewhere between, the smallest itself every other time, and every eighth time too little.
        let budget = match n % 8 {
            0 | 2 | 4 => least,
            7 => least.saturating_sub(1 + r.below(3) as u64),
            _ => least + r.below((unplanned - least) as usize + 1) as u64,
        };
        compare(&p, budget, &mut tally, &name);
    }
    tally
}

#[test]
fn random_problems_against_brute_force() {
    let mut all = Tally::default();
    for (seed, count, ops, shape) in [
        (11, 700, 1..=9, Shape::Any),
        (12, 900, 4..=9, Shape::Training),
        (13, 700, 9..=9, Shape::Training),
    ] {
        let tally = batch(seed, count, ops, shape);
        println!(
            "{shape:?}: {} of {} optimal, {} need repeats, {} impossible",
            tally.optimal, tally.instances, tally.repeats, tally.impossible
        );
        all.instances += tally.instances;
        all.optimal += tally.optimal;
        all.repeats += tally.repeats;
        all.impossible += tally.impossible;
    }
    assert!(all.instances >= 2000 && all.repeats > 500 && all.impossible > 100);
    assert!(
        100 * all.optimal >= 99 * all.instances,
        "only {} of {} are optimal",
        all.optimal,
        all.instances
    );
}
