//! What the parts of the planner promise, on random problems.

use super::answer::{Query, Solution};
use super::compact::{Dag, NONE};
use super::cut::{Bend, Cut, Scene};
use super::exact::{Outcome, exact};
use super::incremental_liveness::{Ledger, prune};
use super::interval_bound::Intervals;
use super::local_search::Search;
use super::min_peak::min_peak;
use super::question::{Question, next_multiple};
use super::simulate::{Simulation, drop_unread};
use super::work::{Effort, Random, Work};
use super::{bound, frontier, multi_cut_bound, solve};
use crate::constraint::{Constraint, first_violation};
use crate::index::{ByOp, OpIdx, ValueIdx};
use crate::objective::Objective;
use crate::problem::{Op, OpPhase, Problem, Value, ValueKind};
use crate::schedule::evaluate;
use crate::testing::{Shape, problem, random_dag, random_schedule, train};

/// A random training step.
fn random_problem(r: &mut Random, ops: usize) -> Problem {
    random_dag(r, ops, Shape::Training)
}

#[test]
fn the_simulation_agrees_with_the_judge() {
    let mut r = Random::new(3);
    for n in 0..2000 {
        let p = random_problem(&mut r, 2 + n % 12);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let schedule = random_schedule(&mut r, &p, 2 * p.ops.len());
        let mut simulation = Simulation::default();
        let mut reduced = dag.from_problem(&schedule);
        simulation.run(&dag, &reduced);
        let score = evaluate(&p, &schedule).unwrap();
        assert_eq!(simulation.peak as u64, score.peak_above_static_bytes);
        drop_unread(&dag, &mut reduced);
        simulation.run(&dag, &reduced);
        assert!(simulation.peak as u64 <= score.peak_above_static_bytes);
    }
}

#[test]
fn the_ledger_agrees_with_the_simulation() {
    let mut r = Random::new(4);
    let (mut removed, mut undone) = (0, 0);
    for n in 0..2000 {
        let p = random_problem(&mut r, 3 + n % 20);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let mut schedule = dag.from_problem(&random_schedule(&mut r, &p, 2 * p.ops.len()));
        drop_unread(&dag, &mut schedule);
        let mut simulation = Simulation::default();
        let mut ledger = Ledger::new(&dag, &schedule);
        for _ in 0..4 {
            let repeats: Vec<usize> = ledger.repeats().collect();
            if repeats.is_empty() {
                break;
            }
            let before = (ledger.peak(), ledger.schedule());
            let saved = ledger.remove(repeats[r.below(repeats.len())]);
            let after = ledger.schedule();
            simulation.run(&dag, &after);
            assert_eq!(ledger.peak(), simulation.peak);
            assert_eq!(
                saved,
                dag.weigh_schedule(&before.1) - dag.weigh_schedule(&after)
            );
            // Removing takes everything along that is read no more.
            let mut again = after.clone();
            drop_unread(&dag, &mut again);
            assert_eq!(again, after);
            if r.below(2) == 0 {
                ledger.undo();
                assert_eq!((ledger.peak(), ledger.schedule()), before);
                undone += 1;
            } else {
                ledger.accept();
                removed += 1;
            }
        }
        simulation.run(&dag, &schedule);
        let cap = simulation.peak;
        prune(&dag, &mut schedule, cap, n % 2 == 0);
        simulation.run(&dag, &schedule);
        assert!(simulation.peak <= cap);
    }
    assert!(removed > 500 && undone > 500, "{removed} {undone}");
}

/// The least weight + price · bytes kept at a step, by trying every set of ops to run again after it.
fn least_by_trying(dag: &Dag, scene: &Scene, step: usize, price: i64) -> i64 {
    let computed = step as u32 + 1;
    // An operand that the step could write over if nothing read it again is decided like the others.
    let over = dag.in_place_operands(step as u32);
    let kept = over.iter().all(|v| scene.needed[*v as usize]);
    let given_up = over.iter().find(|v| kept && dag.remaker(**v).is_some());
    let pinned = |v: u32| {
        let own = dag.ins(step as u32).contains(&v) || dag.outs(step as u32).contains(&v);
        own && given_up != Some(&v)
    };
    let there = |v: u32| dag.maker[v as usize] == NONE || dag.maker[v as usize] < computed;
    let mut least = i64::MAX;
    for again in 0u32..1 << computed {
        let runs = |o: u32| again & 1 << o != 0;
        if (0..computed).any(|o| runs(o) && !dag.repeatable[o as usize]) {
            continue;
        }
        let mut wanted: Vec<bool> = (0..dag.values())
            .map(|v| scene.needed[v] && there(v as u32))
            .collect();
        let mut cost = 0;
        for o in (0..computed).filter(|o| runs(*o)) {
            cost += dag.weight[o as usize];
            dag.ins(o).iter().for_each(|v| wanted[*v as usize] = true);
        }
        for v in (0..dag.values() as u32).filter(|v| wanted[*v as usize] && !pinned(*v)) {
            let made_again = dag.remaker(v).is_some_and(runs);
            let settled = scene.needed[v as usize] && dag.remaker(v).is_none();
            if !made_again && !settled {
                cost += price * dag.size[v as usize];
            }
        }
        least = least.min(cost);
    }
    least
}

#[test]
fn cuts_are_the_best_choice_at_their_price() {
    let mut r = Random::new(9);
    let bend = Bend {
        distance: 0.0,
        extend: true,
        penalty: &[],
        jitter: &[],
        slack: 0.0,
        elsewhere: &[],
    };
    let mut mixed = 0;
    for n in 0..1500 {
        let p = random_problem(&mut r, 4 + n % 7);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let given: Vec<u32> = (0..dag.ops() as u32).collect();
        let step = r.below(given.len());
        let scene = Scene::new(&dag, &given, step);
        let mut cut = Cut::new(&dag, &scene, 0, &dag.weight, &bend, None);
        let mut price = 0;
        for _ in 0..4 {
            price += 1 + r.below(20_000_000_000) as i64;
            let point = cut.solve(price as f64);
            let found = point.weight + price * point.kept;
            assert_eq!(
                found,
                least_by_trying(&dag, &scene, step, price),
                "problem {n}, step {step}"
            );
            mixed += (point.weight > 0 && point.kept > 0) as usize;
        }
    }
    assert!(mixed > 200, "{mixed}");
}

#[test]
fn plans_fit_bounds_hold_and_small_problems_are_solved() {
    let mut r = Random::new(5);
    let (mut feasible, mut equal, mut searched, mut joined, mut counted) = (0, 0, 0, 0, 0);
    for n in 0..300 {
        let p = random_problem(&mut r, 4 + n % 6);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let before = evaluate(&p, &p.given_order()).unwrap();
        let peak = before.peak_above_static_bytes;
        let cap = peak * (70 + r.below(30) as u64) / 100;
        let request = Query {
            budget_bytes: cap + before.static_bytes,
            effort: Effort::First,
            ..Query::default()
        };
        let best = match exact(&dag, cap as i64, &mut Work::new(100_000_000)) {
            Outcome::Optimal(best) => best,
            Outcome::Infeasible => {
                assert!(solve(&p, &request).unwrap().is_err());
                continue;
            }
            Outcome::Unknown => panic!("too large"),
        };
        feasible += 1;
        let best: Vec<OpIdx> = best
            .iter()
            .map(|o| dag.op_in_problem[*o as usize])
            .collect();
        let best = evaluate(&p, &best).unwrap();
        assert!(best.peak_above_static_bytes <= cap);
        let found = solve(&p, &request).unwrap().unwrap();
        assert!(found.score.peak_bytes <= request.budget_bytes);
        assert_eq!(found.score.cost, best.cost, "{n}");
        assert!(found.bound.lower <= best.cost + 1e-9);
        let lower = bound::one_position(&dag, cap as i64, &dag.price, 99, &mut Work::new(u64::MAX));
        let lower = before.cost + lower.unwrap() as f64 * dag.unit;
        assert!(lower <= best.cost + 1e-9, "{lower} {}", best.cost);
        let above = ((best.cost - before.cost) / dag.unit) as i64;
        let (mut several, mut enough) = (0, Work::new(u64::MAX));
        if let Some(found) =
            multi_cut_bound::several_positions(&dag, cap as i64, &dag.price, above + 1, &mut enough)
        {
            several = found;
            let lower = before.cost + found as f64 * dag.unit;
            assert!(lower <= best.cost + 1e-9, "{lower} {}", best.cost);
        }
        joined += (lower < before.cost + several as f64 * dag.unit - 1e-6) as usize;
        // Not limited by the cost of the best plan, so that a bound above it shows.
        let mut work = Work::new(600_000);
        let far = above + 2 * dag.total_price;
        let repeated = Intervals::new(&dag, cap as i64, &dag.price, far, &mut work)
            .map_or(0, |mut made| made.bound(far, &mut work));
        let lower = before.cost + repeated as f64 * dag.unit;
        assert!(lower <= best.cost + 1e-9, "{n}: {lower} {}", best.cost);
        counted += (repeated > several + dag.total_price / 1000) as usize;
        // The search alone, without the exact part.
        let mut work = Work::new(200_000);
        if let Some(made) = Search::new(&dag, cap as i64, &mut work).approximate(&[]) {
            let made: Vec<OpIdx> = made
                .iter()
                .map(|o| dag.op_in_problem[*o as usize])
                .collect();
            let made = evaluate(&p, &made).unwrap();
            assert!(made.peak_above_static_bytes <= cap && made.cost >= best.cost);
            searched += 1;
            equal += (made.cost == best.cost) as usize;
        }
    }
    assert!(
        feasible > 100 && joined > 5 && counted > 5,
        "{feasible} {joined} {counted}"
    );
    assert!(
        20 * searched >= 19 * feasible && 10 * equal >= 9 * searched,
        "{feasible} {searched} {equal}"
    );
}

#[test]
fn a_larger_budget_never_costs_more_and_plans_repeat() {
    let mut r = Random::new(6);
    for _ in 0..4 {
        let p = random_problem(&mut r, 40);
        let floor = min_peak(&p, &Query::default()).unwrap();
        let before = evaluate(&p, &p.given_order()).unwrap();
        assert!(floor.least_bytes <= floor.reached_bytes);
        let budgets: Vec<u64> = (floor.reached_bytes..=before.peak_bytes).collect();
        let request = Query {
            effort: Effort::Units(100_000),
            ..Query::default()
        };
        let line = frontier(&p, &request, &budgets).unwrap();
        let (mut last, mut last_bound) = (f64::INFINITY, f64::INFINITY);
        for (budget_bytes, solution) in budgets.iter().zip(&line) {
            let Some(solution) = solution else {
                continue;
            };
            assert!(solution.score.peak_bytes <= *budget_bytes);
            assert!(solution.score.cost <= last);
            assert!(solution.bound.lower <= last_bound, "{budget_bytes}");
            (last, last_bound) = (solution.score.cost, solution.bound.lower);
        }
        assert!(line.last().unwrap().is_some());
        let again = frontier(&p, &request, &budgets).unwrap();
        let schedules = |line: &[Option<Solution>]| -> Vec<Option<Vec<OpIdx>>> {
            line.iter()
                .map(|s| s.as_ref().map(|s| s.schedule.clone()))
                .collect()
        };
        assert_eq!(schedules(&line), schedules(&again));
    }
}

#[test]
fn a_larger_budget_never_costs_more_when_each_is_asked_for_by_itself() {
    let mut r = Random::new(16);
    let (mut helped, mut steps) = (0, 0);
    for _ in 0..12 {
        let p = random_problem(&mut r, 20);
        let before = evaluate(&p, &p.given_order()).unwrap();
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let mut last = f64::INFINITY;
        for percent in (70..100).step_by(3) {
            let request = Query {
                budget_bytes: before.static_bytes + before.peak_above_static_bytes * percent / 100,
                effort: Effort::Units(1_000),
                ..Query::default()
            };
            let Ok(found) = solve(&p, &request).unwrap() else {
                assert_eq!(last, f64::INFINITY, "{percent} % has no plan, less has");
                continue;
            };
            assert!(found.score.cost <= last, "{percent} %");
            last = found.score.cost;
            let mut question = Question::new(&p, &dag, &request, &before);
            let alone = question.find(request.budget_bytes).unwrap();
            helped += alone.is_none_or(|alone| alone.score.cost > last) as usize;
            steps += 1;
        }
    }
    assert!(steps > 60 && helped > 0, "{steps} {helped}");
}

#[test]
fn a_bound_without_the_proof_holds_and_is_lower() {
    let mut r = Random::new(18);
    let (mut same, mut lower) = (0, 0);
    for _ in 0..100 {
        let p = random_problem(&mut r, 60);
        let before = evaluate(&p, &p.given_order()).unwrap();
        let full = Query {
            budget_bytes: before.static_bytes + before.peak_above_static_bytes * 7 / 10,
            effort: Effort::Units(100_000),
            ..Query::default()
        };
        let short = Query {
            skips_proof: true,
            ..full.clone()
        };
        let [Ok(full), Ok(short)] = [full, short].map(|query| solve(&p, &query).unwrap()) else {
            continue;
        };
        assert!(short.bound.lower <= full.bound.lower);
        assert!(short.bound.lower <= short.score.cost);
        same += usize::from(short.score.cost == full.score.cost);
        lower += usize::from(short.bound.lower < full.bound.lower);
    }
    assert!(same > 20 && lower > 5, "{same} {lower}");
}

#[test]
fn choices_are_kept() {
    let mut r = Random::new(8);
    let (mut kept, mut dropped) = (0, 0);
    for n in 0..100 {
        let tenths = [9, 10][n % 2];
        let mut p = random_problem(&mut r, 24);
        // A chunk of the loss and its gradient run before other ops of the forward pass.
        if n % 4 > 1 {
            let early = p.ops.indices().nth(r.below(12)).unwrap();
            p.ops[early].phase = OpPhase::Backward;
        }
        let before = evaluate(&p, &p.given_order()).unwrap();
        let mut choices = p.by_op(None);
        for o in p.ops.indices() {
            if p.ops[o].phase == OpPhase::Forward {
                choices[o] = [
                    None,
                    None,
                    Some(Constraint::Keep),
                    Some(Constraint::Recompute),
                ][r.below(4)];
            }
        }
        let request = Query {
            budget_bytes: before.static_bytes + before.peak_above_static_bytes * tenths / 10,
            effort: Effort::Units(30_000),
            constraints: choices.clone(),
            ..Query::default()
        };
        let lowest = min_peak(
            &p,
            &Query {
                effort: Effort::Units(1_000),
                ..request.clone()
            },
        )
        .unwrap();
        assert_eq!(first_violation(&p, &lowest.schedule, &choices), None);
        let Ok(found) = solve(&p, &request).unwrap() else {
            continue;
        };
        assert_eq!(first_violation(&p, &found.schedule, &choices), None);
        let mut runs = p.by_op(0);
        found.schedule.iter().for_each(|o| runs[*o] += 1);
        for (o, choice) in choices.enumerated() {
            kept += (*choice == Some(Constraint::Keep)) as usize;
            dropped += (*choice == Some(Constraint::Recompute) && runs[o] > 1) as usize;
        }
    }
    assert!(kept > 50 && dropped > 15, "{kept} {dropped}");
}

#[test]
fn bounds_on_flops_are_sums_that_repeats_can_have() {
    assert_eq!(next_multiple(10.5, 7), 14.0);
    assert_eq!(next_multiple(14.0, 7), 14.0);
    // What rounding left above a multiple is no reason for the next.
    assert_eq!(next_multiple(14.000_000_1, 7), 14.000_000_1);
    assert_eq!(next_multiple(0.0, 7), 0.0);
    assert_eq!(next_multiple(10.5, 0), 10.5);
    assert_eq!(next_multiple(3e12, 7), 3e12);
}

/// Small results whose bytes are dearer than those of the one large result, but of which a few are enough.
#[test]
fn a_little_that_lacks_is_taken_from_many_small_results() {
    const SMALL: usize = 40;
    let mut p = Problem::default();
    let mut made = Vec::new();
    let input = ValueIdx(0);
    p.values.push(Value::new(1, ValueKind::Placeholder, None));
    let sizes = [(1000, 100.0)]
        .into_iter()
        .chain((0..SMALL).map(|_| (50, 10.0)));
    for (o, (bytes, cost)) in sizes.enumerate() {
        let v = p.values.len();
        p.values
            .push(Value::new(bytes, ValueKind::Activation, Some(OpIdx(o))));
        p.ops
            .push(Op::new("f", [input], [ValueIdx(v)], OpPhase::Forward, cost));
        made.push(ValueIdx(v));
    }
    for v in made.into_iter().rev() {
        let o = OpIdx(p.ops.len());
        let out = ValueIdx(p.values.len());
        p.values.push(Value::new(1, ValueKind::Activation, Some(o)));
        p.ops.push(Op::new("b", [v], [out], OpPhase::Backward, 1.0));
        p.outputs.push(out);
    }
    p.check().unwrap();
    let before = evaluate(&p, &p.given_order()).unwrap();
    let request = Query {
        // Two of the small ones, one for where the first is recomputed.
        budget_bytes: before.peak_bytes - 60,
        effort: Effort::First,
        ..Query::default()
    };
    let found = solve(&p, &request).unwrap().unwrap();
    assert_eq!(found.score.cost, before.cost + 20.0);
}

/// Near the smallest peak, a descent may find a cheaper schedule than repairs of the given order do.
#[test]
fn a_descent_keeps_to_its_cap_and_may_be_cheaper() {
    let mut r = Random::new(11);
    let (mut found, mut cheaper) = (0, 0);
    for n in 0..8 {
        let p = random_problem(&mut r, 40 + n);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let smallest = min_peak(&p, &Query::default()).unwrap();
        let cap = (smallest.reached_bytes - smallest.static_bytes) as i64 * 105 / 100;
        let weigh = |plan: &[u32]| {
            let mut simulation = Simulation::default();
            simulation.run(&dag, plan);
            assert!(simulation.peak <= cap);
            plan.iter().map(|op| dag.price[*op as usize]).sum::<i64>()
        };
        let mut work = Work::new(50_000);
        let once = Search::new(&dag, cap, &mut work).run(&[]);
        let mut work = Work::new(50_000);
        let Some(plan) = Search::new(&dag, cap, &mut work).descend() else {
            continue;
        };
        found += 1;
        let price = weigh(&plan);
        cheaper += usize::from(once.is_some_and(|once| price < weigh(&once)));
    }
    assert!(found > 3 && cheaper > 0, "{found} found, {cheaper} cheaper");
}

/// A chain of layers of unequal width, whose backward pass reads what the forward pass made.
fn long_chain(layers: usize) -> Problem {
    let mut ops: Vec<(&str, Vec<usize>, u64)> = Vec::new();
    let bytes = |i: usize| 900 + (i * 37 % 200) as u64;
    for i in 0..layers {
        ops.push(("forward", vec![i], bytes(i)));
    }
    for i in (0..layers).rev() {
        // The value of op `n` is `n` + 1.
        ops.push(("backward", vec![i, i + 1, ops.len()], bytes(i)));
    }
    let ops: Vec<(&str, &[usize], u64)> = ops
        .iter()
        .map(|(name, ins, bytes)| (*name, ins.as_slice(), *bytes))
        .collect();
    let mut p = problem(&[1000], &ops, &[2 * layers]);
    train(&mut p, layers);
    p
}

/// With work that grows with the ops only, the search reaches 19 layers.
#[test]
fn the_smallest_peak_of_a_long_chain_is_that_of_a_few_layers() {
    let found = min_peak(&long_chain(1000), &Query::default()).unwrap();
    assert!(found.reached_bytes <= 16_000, "{}", found.reached_bytes);
}
