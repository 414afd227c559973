//! Parameters that ranks gather begin to arrive before they are read.
//!
//! A plan says where each parameter is gathered, and prices every gather as if nothing ran beside it. Here gathers are moved to
//! earlier places, so that other ops run until the first reader: each as early as it needs to be hidden, within the memory that
//! the plan may take, and with at most so many begun ahead. All ranks run the same plan, so they begin the same gathers in the same
//! order. Neither the price of the plan nor its bound changes.

use super::index::{ByOp, OpIdx};
use super::input::PlanInput;
use super::plan::Plan;
use super::problem::{Op, Problem, ValueKind};
use super::schedule::Timeline;
use super::steps::Step;
use ckpt_error::{Error, Result};

/// Returns the plan with gathers of parameters begun earlier, at most `ahead` at once; as it was where there are none.
///
/// # Errors
/// None but bugs: the plan is valid.
pub fn early(input: &PlanInput, plan: Plan, ahead: usize) -> Result<Plan> {
    let problem = &input.problem;
    let is_gather = problem.ops.iter().map(|op| gathers(problem, op)).collect();
    let budget_bytes = plan.certificate.as_ref().map(|c| c.budget_bytes);
    let peak_bytes = budget_bytes.unwrap_or(plan.after.peak_bytes);
    let steps = hoisted(problem, &plan.schedule.steps, &is_gather, peak_bytes, ahead)?;
    if steps == plan.schedule.steps {
        return Ok(plan);
    }
    let (layer_of, reasons) = (&input.annotations.layer_of, plan.reasons(problem));
    let mut early = Plan::new(&plan.policy, problem, &steps, layer_of, &reasons)?;
    if early.after.peak_bytes > peak_bytes {
        return Err(Error::bug(
            "plan",
            "gathers that begin early take more memory than there is",
        )
        .expected(format!("{peak_bytes} bytes"))
        .found(format!("{} bytes", early.after.peak_bytes)));
    }
    early.after.cost = plan.after.cost;
    early.offload_to = plan.offload_to;
    if let Some(certificate) = plan.certificate {
        early.certify(certificate)?;
    }
    Ok(early)
}

/// Whether an op brings what other ranks have, and reads only what is there from the start.
fn gathers(problem: &Problem, op: &Op) -> bool {
    let is_there = |v| {
        let value = &problem.values[v];
        value.kind == ValueKind::Static && value.producer.is_none()
    };
    op.link_bytes > 0 && op.recomputable && op.ins.iter().all(|v| is_there(*v))
}

/// Returns the steps with gathers at earlier places.
fn hoisted(
    problem: &Problem,
    steps: &[Step],
    is_gather: &ByOp<bool>,
    peak_bytes: u64,
    ahead: usize,
) -> Result<Vec<Step>> {
    let gather_of = |step: &Step| match step {
        Step::Run(op) if is_gather[*op] => Some(*op),
        _ => None,
    };
    let gathers: Vec<(usize, OpIdx)> = steps
        .iter()
        .enumerate()
        .filter_map(|(at, step)| Some((at, gather_of(step)?)))
        .collect();
    if gathers.is_empty() || ahead == 0 {
        return Ok(steps.to_vec());
    }
    let cap_bytes = peak_bytes.saturating_sub(problem.static_bytes());
    let mut live_bytes = Timeline::new(problem, steps)?.live_bytes;
    // When each step begins if gathers take no time of their own.
    let mut now_us = 0.0;
    let mut start_us = Vec::with_capacity(steps.len());
    for step in steps {
        start_us.push(now_us);
        if gather_of(step).is_none() {
            now_us += problem.cost(*step);
        }
    }
    // The first reader of each gather, and of all before it the last one.
    let mut next = problem.by_value(steps.len() - 1);
    let mut readers = vec![0; gathers.len()];
    let mut latest = gathers.len();
    for (at, step) in steps.iter().enumerate().rev() {
        let op = &problem.ops[step.op()];
        if gather_of(step).is_some() {
            latest -= 1;
            readers[latest] = next[op.outs[0]];
        }
        if let Step::Run(_) = step {
            op.ins.iter().for_each(|v| next[*v] = at);
        }
    }
    let mut arrived = readers.clone();
    for n in 1..arrived.len() {
        arrived[n] = arrived[n].max(arrived[n - 1]);
    }
    // By place, the gathers that go before the step there.
    let mut before: Vec<Vec<Step>> = vec![Vec::new(); steps.len()];
    let mut is_gone = vec![false; steps.len()];
    let mut lane_us = f64::INFINITY;
    for n in (0..gathers.len()).rev() {
        let (at, op) = gathers[n];
        let outs = &problem.ops[op].outs;
        let bytes = problem.result_bytes(op);
        lane_us = lane_us.min(start_us[readers[n]]) - problem.ops[op].cost;
        let earliest = n.checked_sub(ahead).map_or(0, |n| arrived[n] + 1);
        let touches = |step: &Step| {
            let other = &problem.ops[step.op()];
            step.op() == op || other.ins.iter().any(|v| outs.contains(v))
        };
        let mut to = at;
        while to > earliest
            && start_us[to] > lane_us
            && live_bytes[to - 1] + bytes <= cap_bytes
            && !touches(&steps[to - 1])
        {
            to -= 1;
        }
        // Between an op and the transfer of its results stands nothing.
        while to < at && matches!(steps[to], Step::Offload(_) | Step::Release(_)) {
            to += 1;
        }
        if to < at {
            live_bytes[to..at].iter_mut().for_each(|b| *b += bytes);
            before[to].push(steps[at]);
            is_gone[at] = true;
        }
    }
    let mut hoisted = Vec::with_capacity(steps.len());
    for (at, step) in steps.iter().enumerate() {
        hoisted.extend(before[at].iter().rev());
        if !is_gone[at] {
            hoisted.push(*step);
        }
    }
    Ok(hoisted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::evaluate;
    use crate::testing::{Random, Shape, random_dag, random_schedule};

    /// Returns the most gathers at any step that have begun and that nothing has read yet.
    fn most_in_flight(problem: &Problem, steps: &[Step], is_gather: &ByOp<bool>) -> usize {
        let (mut under_way, mut most) = (Vec::new(), 0);
        for step in steps {
            let op = &problem.ops[step.op()];
            under_way.retain(|v| !op.ins.contains(v));
            most = most.max(under_way.len());
            if is_gather[step.op()] {
                under_way.push(op.outs[0]);
            }
        }
        most
    }

    #[test]
    fn gathers_begin_no_later_and_take_no_more_memory_than_allowed() {
        let mut r = Random(7);
        let (mut moved, mut limited) = (0, 0);
        for n in 0..600 {
            let mut p = random_dag(&mut r, 6 + n % 14, Shape::Training);
            let slice = p.values.indices().find(|v| {
                let value = &p.values[*v];
                value.kind == ValueKind::Static && value.producer.is_none()
            });
            let Some(slice) = slice else { continue };
            for op in p.ops.iter_mut().filter(|_| r.below(3) == 0) {
                (op.ins, op.in_place_operands) = (vec![slice], Vec::new());
                (op.link_bytes, op.recomputable, op.temp_bytes) = (1, true, 0);
            }
            let is_gather: ByOp<bool> = p.ops.iter().map(|op| gathers(&p, op)).collect();
            let given: Vec<Step> = random_schedule(&mut r, &p, 6)
                .into_iter()
                .map(Step::Run)
                .collect();
            let before = evaluate(&p, &given).unwrap();
            let (room, ahead) = (before.peak_bytes + [0, 5, 1000][r.below(3)], r.below(4));
            let early = hoisted(&p, &given, &is_gather, room, ahead).unwrap();
            let after = evaluate(&p, &early).unwrap();
            assert!(
                after.peak_bytes <= room,
                "graph {n}: {} of {room}",
                after.peak_bytes
            );
            // Other steps keep their order, and every gather has at most the steps before it that it had.
            let others = |steps: &[Step]| -> Vec<Step> {
                let others = steps.iter().filter(|step| !is_gather[step.op()]);
                others.copied().collect()
            };
            assert_eq!(others(&early), others(&given), "graph {n}");
            let places = |steps: &[Step]| -> Vec<(OpIdx, usize)> {
                let at = |i: usize| others(&steps[..i]).len();
                let gathers = steps
                    .iter()
                    .enumerate()
                    .filter(|(_, step)| is_gather[step.op()]);
                let mut places: Vec<_> = gathers.map(|(i, step)| (step.op(), at(i))).collect();
                places.sort_unstable();
                places
            };
            let (old, new) = (places(&given), places(&early));
            assert_eq!(old.len(), new.len(), "graph {n}");
            assert!(
                old.iter().zip(&new).all(|(o, n)| o.0 == n.0 && n.1 <= o.1),
                "graph {n}"
            );
            let (most, had) = (
                most_in_flight(&p, &early, &is_gather),
                most_in_flight(&p, &given, &is_gather),
            );
            assert!(
                most <= ahead.max(had),
                "graph {n}: {most} of {ahead}, {had}"
            );
            moved += usize::from(old != new);
            limited += usize::from(most == ahead && most > had);
        }
        assert!(moved > 100 && limited > 5, "{moved} {limited}");
    }
}
