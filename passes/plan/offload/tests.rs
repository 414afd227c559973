//! Which results are offloaded.

use super::*;
use crate::annotations::OpAnnotations;
use crate::brute::{Move, cheapest_moving};
use crate::budget::Budget;
use crate::policy::Policy;
use crate::problem::{OpPhase, Problem, Transfer};
use crate::request::Offload;
use crate::testing::{Random, Shape, problem, random_dag, schedule, train, waits};

/// Forward ops of one result each, and a backward op for each that reads it.
fn chain(result_bytes: &[u64]) -> Problem {
    let n = result_bytes.len();
    let ins = |o: usize| -> Vec<usize> {
        let before = o.checked_sub(1).into_iter();
        before.chain((o > n).then(|| 2 * n - 1 - o)).collect()
    };
    let ins: Vec<Vec<usize>> = (0..2 * n).map(ins).collect();
    let bytes = |o: usize| result_bytes.get(o).copied().unwrap_or(1);
    let ops: Vec<(&str, &[usize], u64)> =
        (0..2 * n).map(|o| ("op", &ins[o][..], bytes(o))).collect();
    let mut p = problem(&[], &ops, &[2 * n - 1]);
    train(&mut p, n);
    p.check().unwrap();
    p
}

fn planned(p: &Problem, annotations: &OpAnnotations, offload: Offload) -> Result<Plan, Failure> {
    let input = PlanInput::new(p.clone(), annotations.clone());
    let request = PlanRequest {
        offload,
        ..PlanRequest::from(Policy::NONE)
    };
    plan(&input, &request)
}

#[test]
fn only_results_of_enough_bytes_are_moved() {
    let p = chain(&[1023, 1024, 1025, 1]);
    let annotations = OpAnnotations::unknown(p.ops.len());
    let all = Offload {
        set: OffloadSet::All,
        ..Offload::default()
    };
    assert_eq!(
        planned(&p, &annotations, all).unwrap().schedule.offloaded,
        schedule(&[1, 2])
    );
    let less = Offload {
        min_bytes: 1023,
        ..all
    };
    assert_eq!(
        planned(&p, &annotations, less).unwrap().schedule.offloaded,
        schedule(&[0, 1, 2])
    );
    let more = Offload {
        min_bytes: 1025,
        ..all
    };
    assert_eq!(
        planned(&p, &annotations, more).unwrap().schedule.offloaded,
        schedule(&[2])
    );
}

#[test]
fn the_host_has_room_for_all_of_it_or_it_is_refused() {
    let p = chain(&[2000, 3000, 1]);
    let annotations = OpAnnotations::unknown(p.ops.len());
    let within = |bytes| Offload {
        set: OffloadSet::All,
        host_bytes: Some(bytes),
        ..Offload::default()
    };
    let plan = planned(&p, &annotations, within(5000)).unwrap();
    assert_eq!(plan.schedule.offloaded, schedule(&[0, 1]));
    let error: Box<Error> = planned(&p, &annotations, within(4999)).unwrap_err().into();
    assert_eq!((error.code(), error.exit_code()), ("offload", 2));
}

#[test]
fn what_feeds_the_head_stays_and_no_head_is_told() {
    let p = chain(&[2000, 3000, 1]);
    let mut annotations = OpAnnotations::unknown(p.ops.len());
    let all = Offload {
        set: OffloadSet::All,
        ..Offload::default()
    };
    assert!(warned(&annotations, all).is_some());
    assert_eq!(warned(&annotations, Offload::default()), None);
    annotations.feeds_scores[OpIdx(1)] = true;
    assert_eq!(warned(&annotations, all), None);
    assert_eq!(
        planned(&p, &annotations, all).unwrap().schedule.offloaded,
        schedule(&[0])
    );
}

fn warned(annotations: &OpAnnotations, offload: Offload) -> Option<String> {
    let input = PlanInput::new(Problem::default(), annotations.clone());
    let request = PlanRequest {
        offload,
        ..PlanRequest::default()
    };
    warning(&input, &request)
}

/// A random problem with transfers.
fn random(r: &mut Random, ops: usize) -> Problem {
    let mut p = random_dag(r, ops, Shape::Training);
    p.transfer = Some(Transfer {
        us_per_megabyte: [0.0, 5e4, 2e5, 1e6][r.below(4)],
        start_us: [0.0, 0.1, 1.0][r.below(3)],
        busy_share: [0.0, 0.0, 0.3, 1.0][r.below(4)],
    });
    p
}

fn budgeted(p: &Problem, offload: Offload, budget: u64, effort: Effort) -> Result<Plan, Failure> {
    let input = PlanInput::new(p.clone(), OpAnnotations::unknown(p.ops.len()));
    let request = PlanRequest {
        offload,
        effort,
        ..PlanRequest::from(Budget::Bytes(budget))
    };
    plan(&input, &request)
}

fn auto(streams: bool) -> Offload {
    Offload {
        set: OffloadSet::Auto,
        min_bytes: 0,
        streams,
        ..Offload::default()
    }
}

#[test]
fn moving_what_pays_is_never_slower_than_moving_nothing() {
    let mut r = Random(77);
    let (mut faster, mut possible, mut hidden) = (0, 0, 0);
    for n in 0..150 {
        let p = random(&mut r, 6 + n % 5);
        let unplanned = evaluate(&p, &p.given_order()).unwrap();
        let share = [0.5, 0.7, 0.9][n % 3];
        let budget = p.static_bytes() + (unplanned.peak_above_static_bytes as f64 * share) as u64;
        let none = budgeted(&p, Offload::default(), budget, Effort::First);
        let mut costs = Vec::new();
        for streams in [false, true] {
            let plan = budgeted(&p, auto(streams), budget, Effort::First);
            let (Ok(plan), Ok(none)) = (&plan, &none) else {
                possible += (plan.is_ok() && none.is_err()) as usize;
                assert!(plan.is_ok() || none.is_err(), "graph {n}");
                continue;
            };
            assert!(plan.after.peak_bytes <= budget);
            assert!(plan.after.cost <= none.after.cost + 1e-9, "graph {n}");
            let certificate = plan.certificate.as_ref().unwrap();
            let overhead = plan.after.overhead_pct(&plan.before);
            assert!(overhead + 1e-6 >= certificate.lower_bound_pct, "graph {n}");
            assert!((overhead - certificate.lower_bound_pct - certificate.gap_pct).abs() < 1e-6);
            faster += (plan.after.cost + 1e-9 < none.after.cost) as usize;
            costs.push(plan.after.cost);
        }
        hidden += (costs.len() == 2 && costs[1] + 1e-9 < costs[0]) as usize;
    }
    assert!(
        faster > 20 && possible > 3 && hidden > 5,
        "{faster} {possible} {hidden}"
    );
}

#[test]
fn what_comes_back_beside_a_short_backward_part_is_proven_to_take_time() {
    let mut p = chain(&[2_000_000; 6]);
    for op in p.ops.iter_mut().filter(|op| op.phase == OpPhase::Backward) {
        op.cost = 1.0;
    }
    let budget = p.static_bytes() + 5_000_000;
    let transfer = p.transfer.unwrap();
    let lower = |has_lane: bool| {
        let waits = waits(&p, &transfer, has_lane);
        bound_moving(&p, budget, &ByOp::default(), &waits)
            .unwrap()
            .unwrap()
    };
    // All that leaves fits beside the forward part, so that the lane out proves nothing.
    let (free, laned) = (lower(false), lower(true));
    let plan = budgeted(&p, auto(true), budget, Effort::Normal).unwrap();
    assert!(laned > free + 50.0, "{free} {laned}");
    assert!(laned <= plan.after.cost, "{laned} {}", plan.after.cost);
}

#[test]
fn no_choice_beats_the_bound_and_few_beat_the_plan() {
    let mut r = Random(78);
    let (mut instances, mut optimal, mut moving, mut tight, mut gained) = (0, 0, 0, 0, 0);
    let mut lanes = 0;
    for n in 0..400 {
        let p = random(&mut r, 4 + n % 6);
        let prices: ByOp<f64> = p.ops.iter().map(|op| op.cost).collect();
        let unplanned = evaluate(&p, &p.given_order()).unwrap();
        let peak = unplanned.peak_above_static_bytes;
        let above_bytes = (peak as f64 * [0.6, 0.75, 0.9][n % 3]) as u64;
        let transfer = p.transfer.unwrap();
        let may = p.movable();
        let ways = |price: &dyn Fn(OpIdx) -> f64| -> ByOp<Option<Move>> {
            let way = |o: OpIdx| {
                may[o].then(|| Move {
                    out: price(o),
                    back: price(o),
                })
            };
            p.ops.indices().map(way).collect()
        };
        let serial = ways(&|o| transfer.cost(p.result_bytes(o)));
        let best = cheapest_moving(&p, above_bytes, &prices, &serial);
        let budget = above_bytes + p.static_bytes();
        let plan = budgeted(&p, auto(false), budget, Effort::Normal);
        let (best, plan) = match (best, plan) {
            (Some(best), Ok(plan)) => (best, plan),
            (None, Ok(plan)) => panic!(
                "graph {n}: brute force has none, the plan {:?}",
                plan.schedule
            ),
            (best, Err(e)) => {
                // What nothing computes again may fit only if more is moved than any cut tries.
                assert!(e.is_infeasible(), "graph {n}: {e:?}");
                tight += best.is_some() as usize;
                continue;
            }
        };
        let slack = 1e-6 * (1.0 + best.price);
        assert!(
            plan.after.cost + slack >= best.price,
            "graph {n}: brute force is not the best"
        );
        let certificate = plan.certificate.as_ref().unwrap();
        let lower = plan.before.cost * (1.0 + certificate.lower_bound_pct / 100.0);
        assert!(
            lower <= best.price + slack,
            "graph {n}: {lower} > {}",
            best.price
        );
        instances += 1;
        optimal += (plan.after.cost <= best.price + slack) as usize;
        moving += !best.moved.is_empty() as usize;
        gained += !plan.schedule.offloaded.is_empty() as usize;

        // Beside other ops transfers take no less than what none runs beside.
        let hidden = ways(&|o| transfer.own_us(transfer.cost(p.result_bytes(o))));
        let best = cheapest_moving(&p, above_bytes, &prices, &hidden).unwrap();
        let plan = budgeted(&p, auto(true), budget, Effort::Normal).unwrap();
        assert!(plan.after.cost + slack >= best.price, "graph {n}: hidden");
        // With a lane of any speed nothing but those is certain; with the lane there is more, and no plan is below it.
        let lower = |has_lane: bool| {
            let waits = waits(&p, &transfer, has_lane);
            bound_moving(&p, budget, &ByOp::default(), &waits)
                .unwrap()
                .unwrap()
        };
        let (free, laned) = (lower(false), lower(true));
        assert!(free <= best.price + slack, "graph {n}: {free}");
        assert!(
            free <= laned + slack && laned <= plan.after.cost + slack,
            "graph {n}: {laned}"
        );
        lanes += (laned > free + slack) as usize;
    }
    println!(
        "{optimal} of {instances} optimal, {moving} move, {gained} plans move, {tight} not found"
    );
    assert!(
        instances > 100 && moving > 50 && gained > 50 && lanes > 0,
        "{instances} {moving} {gained} {lanes}"
    );
    assert!(100 * optimal >= 95 * instances, "{optimal} of {instances}");
    assert!(20 * tight <= instances, "{tight}");
}
