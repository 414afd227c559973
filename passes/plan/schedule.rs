//! Evaluates schedules: peak, cost, and what is alive at every step.
//!
//! A schedule is a list of ops or of [`Step`]s; repeats are recomputation. A use reads the most recent computation of its
//! value. An instance is freed right after its last use. While an op runs, its operands, results and temporaries are all alive.
//! An instance of a view keeps the instance of the storage it was made from. A result takes no bytes while it is made if it is
//! written over an operand that is read there for the last time. A result that is written over a static value takes none at
//! all, unless that value is read later or is an output: then it takes as many bytes as that value.
//!
//! Offloaded results are alive until their `Release`, and again from each `Fetch` on. Where ranks keep slices of them, the slice
//! is alive from the `Offload` to the last `Fetch`. On problems without views, temporaries
//! and results written over operands, the planner benches give the same numbers.

use super::index::{ByValue, ValueIdx};
use super::problem::{Problem, ValueKind};
use super::steps::Step;
use ckpt_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a schedule costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The most bytes alive at any step, static bytes included.
    pub peak_bytes: u64,
    /// Bytes of parameters and other static values, which are resident throughout.
    pub static_bytes: u64,
    /// The peak without the static bytes; 0 if nothing else is ever alive.
    pub peak_above_static_bytes: u64,
    /// The first step at which the peak is reached.
    pub at_step: Option<usize>,
    /// Sum of the costs of all steps: microseconds, unless the maker of the graph says otherwise.
    /// In a plan with transfers, the time if they run beside other ops.
    pub cost: f64,
    /// FLOPs of all runs of ops, recomputation included.
    pub flops: u64,
    /// Bytes read and written.
    pub traffic_bytes: u64,
    /// Length of the schedule: runs of ops and moves.
    pub steps: usize,
}

impl Score {
    /// Returns the extra cost over `base`, in percent.
    pub fn overhead_pct(&self, base: &Score) -> f64 {
        percent(self.cost - base.cost, base.cost)
    }

    /// Returns the extra bytes read and written over `base`, in percent.
    pub fn traffic_overhead_pct(&self, base: &Score) -> f64 {
        let (own, other) = (self.traffic_bytes as f64, base.traffic_bytes as f64);
        percent(own - other, other)
    }

    /// Returns the extra FLOPs over `base`, in percent.
    pub fn flops_overhead_pct(&self, base: &Score) -> f64 {
        percent(self.flops as f64 - base.flops as f64, base.flops as f64)
    }
}

/// Returns a part of a whole in percent; 0 of nothing.
pub fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 {
        100.0 * part / whole
    } else {
        0.0
    }
}

/// One computation of a storage, and how long it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The value that owns the storage.
    pub value: ValueIdx,
    /// Size of the storage.
    pub bytes: u64,
    /// The step that makes it; 0 for a placeholder.
    pub born: usize,
    /// The last step that needs it, or the number of steps if it is alive at the end; `None` for a placeholder that
    /// nothing has read.
    pub last: Option<usize>,
}

/// Evaluates a schedule of ops or steps. Linear in the operands of its steps.
///
/// # Errors
/// A step that reads a value before anything computed it, repeats an op that must not be, or names none; an output or an
/// op that is never computed.
pub fn evaluate<S: Copy + Into<Step>>(problem: &Problem, schedule: &[S]) -> Result<Score> {
    let timeline = Timeline::new(problem, schedule)?;
    let mut score = Score {
        static_bytes: problem.static_bytes(),
        steps: schedule.len(),
        ..Score::default()
    };
    for (at, step) in schedule.iter().enumerate() {
        let live = timeline.live_bytes[at];
        if live > score.peak_above_static_bytes {
            score.peak_above_static_bytes = live;
            score.at_step = Some(at);
        }
        let step: Step = (*step).into();
        let (flops, bytes) = match step {
            Step::Run(op) => (problem.ops[op].flops, problem.ops[op].bytes),
            Step::Offload(op) | Step::Fetch(op) => (0, problem.result_bytes(op)),
            Step::Release(_) => (0, 0),
        };
        score.cost += problem.cost(step);
        score.flops = score.flops.saturating_add(flops);
        score.traffic_bytes = score.traffic_bytes.saturating_add(bytes);
    }
    score.peak_bytes = score.static_bytes + score.peak_above_static_bytes;
    Ok(score)
}

/// What is alive above static at every step of a schedule.
pub struct Timeline {
    /// Temporaries of the step's op included.
    pub live_bytes: Vec<u64>,
    /// Placeholders first, then in the order they are made.
    pub instances: Vec<Instance>,
    /// The instance that each step writes its result over, if it does: it makes room as the step begins.
    pub written_over: Vec<Option<usize>>,
}

/// The instance of a static value or of a view of one.
const STATIC: usize = usize::MAX;

impl Timeline {
    /// # Errors
    /// See [`evaluate`].
    pub fn new<S: Copy + Into<Step>>(problem: &Problem, schedule: &[S]) -> Result<Timeline> {
        let values = &problem.values;
        let mut instances: Vec<Instance> = Vec::new();
        // The instance that a use of each value reads.
        let mut current: ByValue<Option<usize>> = problem.by_value(None);
        let mut runs = problem.by_op(0u32);
        let mut has_left = problem.by_op(false);
        // The slice of the results of an op that stays here.
        let mut slices = problem.by_op(None);
        for (v, value) in values.enumerated() {
            match value.kind {
                ValueKind::Static if value.producer.is_none() => current[v] = Some(STATIC),
                ValueKind::Placeholder => {
                    current[v] = Some(instances.len());
                    instances.push(Instance {
                        value: v,
                        bytes: value.bytes,
                        born: 0,
                        last: None,
                    });
                }
                _ => {}
            }
        }
        // Steps that may write over an operand, and its instance.
        let mut over: Vec<(usize, usize)> = Vec::new();
        // Steps whose result is written over a static value: the step, that value and the instance of the result.
        let mut renewals: Vec<(usize, ValueIdx, usize)> = Vec::new();
        let refuse = |text: String| Err(Error::usage("schedule", text));
        for (at, step) in schedule.iter().enumerate() {
            let step: Step = (*step).into();
            let o = step.op();
            let Some(op) = problem.ops.at(o) else {
                let ops = problem.ops.len();
                return refuse(format!("step {at} names op {o}; there are {ops}"));
            };
            let (reads, makes, is_again) = match step {
                Step::Run(_) => (&op.ins[..], &op.outs[..], runs[o] > 0),
                Step::Offload(_) | Step::Release(_) => (&op.outs[..], &[][..], false),
                Step::Fetch(_) => (&[][..], &op.outs[..], false),
            };
            if is_again && (!op.recomputable || has_left[o]) {
                return refuse(format!(
                    "step {at} repeats `{}`, which must not be",
                    op.name
                ));
            }
            match step {
                Step::Run(_) => runs[o] += 1,
                Step::Offload(_) => has_left[o] = true,
                Step::Release(_) | Step::Fetch(_) if has_left[o] => {}
                _ => {
                    return refuse(format!(
                        "step {at} moves results of `{}` that have not left",
                        op.name
                    ));
                }
            }
            for v in reads {
                match current[*v] {
                    None => {
                        return refuse(format!(
                            "step {at} (`{}`) reads value {v} before anything computed it",
                            op.name
                        ));
                    }
                    Some(STATIC) => {}
                    Some(i) => instances[i].last = Some(at),
                }
            }
            match (step, problem.slice_bytes(o), op.outs.first()) {
                (Step::Offload(_), bytes, Some(v)) if bytes > 0 => {
                    slices[o] = Some(instances.len());
                    instances.push(Instance {
                        value: *v,
                        bytes,
                        born: at,
                        last: Some(at),
                    });
                }
                (Step::Fetch(_), ..) => {
                    if let Some(slice) = slices[o] {
                        instances[slice].last = Some(at);
                    }
                }
                _ => {}
            }
            let written: &[ValueIdx] = match step {
                Step::Run(_) => &op.in_place_operands,
                _ => &[],
            };
            let instances_of = written.iter().filter_map(|v| current[*v]);
            over.extend(instances_of.filter(|i| *i != STATIC).map(|i| (at, i)));
            // All operands are looked up before any result replaces them.
            let places: Vec<usize> = makes
                .iter()
                .map(|v| match (values[*v].view_of, values[*v].kind) {
                    (Some(base), _) => current[base].unwrap_or(STATIC),
                    (None, ValueKind::Static) => STATIC,
                    (None, _) => {
                        instances.push(Instance {
                            value: *v,
                            bytes: values[*v].bytes,
                            born: at,
                            last: Some(at),
                        });
                        instances.len() - 1
                    }
                })
                .collect();
            let is_static = |v: &&ValueIdx| current[**v] == Some(STATIC);
            if let (Some(v), Some(place)) = (written.iter().find(is_static), places.first()) {
                renewals.push((at, *v, *place));
            }
            for (v, place) in makes.iter().zip(places) {
                current[*v] = Some(place);
            }
        }
        if let Some((o, _)) = runs.enumerated().find(|(_, n)| **n == 0) {
            return refuse(format!(
                "op {o} (`{}`) is never computed",
                problem.ops[o].name
            ));
        }
        let steps = schedule.len();
        for v in &problem.outputs {
            match current[*v] {
                None => return refuse(format!("output value {v} is never computed")),
                Some(STATIC) => {}
                Some(i) => instances[i].last = Some(steps),
            }
        }
        if !renewals.is_empty() {
            let roots = problem.roots();
            let mut last = problem.by_value(0);
            for (at, step) in schedule.iter().enumerate() {
                if let Step::Run(op) = (*step).into() {
                    let ins = problem.ops[op].ins.iter();
                    ins.for_each(|v| last[roots[*v]] = at);
                }
            }
            problem.outputs.iter().for_each(|v| last[roots[*v]] = steps);
            for (step, v, instance) in renewals {
                if last[roots[v]] > step
                    && let Some(instance) = instances.get_mut(instance)
                {
                    instance.bytes = values[roots[v]].bytes;
                }
            }
        }
        let mut births = vec![0u64; steps + 1];
        let mut deaths = vec![0u64; steps + 1];
        for instance in &instances {
            if let Some(last) = instance.last {
                births[instance.born] += instance.bytes;
                deaths[last] += instance.bytes;
            }
        }
        let mut written_over = vec![None; steps];
        for (step, i) in over {
            if instances[i].last == Some(step) {
                written_over[step] = Some(i);
            }
        }
        let mut live = 0;
        let mut live_bytes = Vec::with_capacity(steps);
        for (at, step) in schedule.iter().enumerate() {
            live += births[at];
            let taken: Option<usize> = written_over[at];
            let taken_bytes = taken.map_or(0, |i| instances[i].bytes);
            let temp_bytes = match (*step).into() {
                Step::Run(op) => problem.ops[op].temp_bytes,
                _ => 0,
            };
            live_bytes.push(live + temp_bytes - taken_bytes);
            live -= deaths[at];
        }
        Ok(Timeline {
            live_bytes,
            instances,
            written_over,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::OpIdx;
    use crate::problem::{Op, OpPhase, Value};
    use crate::steps::settled;
    use crate::testing::{Random, chain, problem, schedule};

    /// Judges a schedule as the benches do: no views, no temporaries; every allocation on a list.
    fn reference(p: &Problem, schedule: &[OpIdx]) -> Option<(u64, Option<usize>, f64)> {
        let mut current: std::collections::BTreeMap<ValueIdx, usize> = Default::default();
        let mut inst: Vec<(u64, i64, i64)> = Vec::new();
        for (j, v) in p.values.enumerated() {
            if v.kind == ValueKind::Placeholder {
                current.insert(j, inst.len());
                inst.push((v.bytes, 0, -1));
            }
        }
        let mut cost = 0.0;
        for (t, o) in schedule.iter().enumerate() {
            for j in &p.ops[*o].ins {
                if p.values[*j].kind != ValueKind::Static {
                    inst[*current.get(j)?].2 = t as i64;
                }
            }
            for j in &p.ops[*o].outs {
                current.insert(*j, inst.len());
                inst.push((p.values[*j].bytes, t as i64, t as i64));
            }
            cost += p.ops[*o].cost;
        }
        for j in &p.outputs {
            if p.values[*j].kind != ValueKind::Static {
                inst[*current.get(j)?].2 = schedule.len() as i64;
            }
        }
        let (mut peak, mut at) = (0, None);
        for t in 0..schedule.len() as i64 {
            let alive = |i: &&(u64, i64, i64)| i.2 >= 0 && i.1 <= t && t <= i.2;
            let live: u64 = inst.iter().filter(alive).map(|i| i.0).sum();
            if live > peak {
                (peak, at) = (live, Some(t as usize));
            }
        }
        Some((peak, at, cost))
    }

    fn random_problem(r: &mut Random) -> Problem {
        let mut p = Problem::default();
        for _ in 0..1 + r.below(3) {
            let kind = if r.below(2) == 0 {
                ValueKind::Static
            } else {
                ValueKind::Placeholder
            };
            let bytes = r.below(9) as u64;
            p.values.push(Value::new(bytes, kind, None));
        }
        for o in 0..2 + r.below(8) {
            let ins: Vec<usize> = (0..r.below(4)).map(|_| r.below(p.values.len())).collect();
            let outs: Vec<ValueIdx> = (0..1 + r.below(2))
                .map(|_| {
                    let bytes = r.below(9) as u64;
                    let out = Value::new(bytes, ValueKind::Activation, Some(OpIdx(o)));
                    p.values.push(out)
                })
                .collect();
            let cost = r.below(5) as f64;
            p.ops.push(Op {
                flops: 1,
                bytes: 1,
                ..Op::new(format!("op{o}"), ins, outs, OpPhase::Forward, cost)
            });
        }
        for _ in 0..r.below(3) {
            p.outputs.push(ValueIdx(r.below(p.values.len())));
        }
        p
    }

    #[test]
    fn agrees_with_the_benches_judge_on_random_schedules() {
        let mut r = Random(7);
        let mut repeated = 0;
        for _ in 0..3000 {
            let p = random_problem(&mut r);
            p.check().unwrap();
            let mut schedule = p.given_order();
            for _ in 0..r.below(6) {
                let op = OpIdx(r.below(p.ops.len()));
                let first = schedule.iter().position(|o| *o == op).unwrap();
                let at = first + 1 + r.below(schedule.len() - first);
                schedule.insert(at, op);
                repeated += 1;
            }
            let score = evaluate(&p, &schedule).unwrap();
            let (peak, at, cost) = reference(&p, &schedule).unwrap();
            assert_eq!(
                (score.peak_above_static_bytes, score.at_step, score.cost),
                (peak, at, cost)
            );
        }
        assert!(repeated > 1000);
    }

    #[test]
    fn a_view_keeps_the_storage_it_was_made_from() {
        // `v` is a view of what `a` makes.
        let ops: [(&str, &[usize], u64); 4] = [
            ("a", &[0], 10),
            ("v", &[1], 0),
            ("b", &[0], 5),
            ("c", &[2, 3], 1),
        ];
        let mut p = problem(&[100], &ops, &[4]);
        p.values[ValueIdx(2)].view_of = Some(ValueIdx(1));
        p.ops[OpIdx(2)].temp_bytes = 7;
        p.check().unwrap();
        let given = evaluate(&p, &p.given_order()).unwrap();
        assert_eq!((given.peak_above_static_bytes, given.peak_bytes), (22, 122));
        let peak = |ops: &[OpIdx]| evaluate(&p, ops).unwrap().peak_above_static_bytes;
        // Computing `a` again without its view changes nothing for c: the first storage stays.
        assert_eq!(peak(&schedule(&[0, 1, 2, 0, 3])), 25);
        // With the view recomputed the first storage is gone when `b` takes its temporaries.
        assert_eq!(peak(&schedule(&[0, 1, 2, 0, 1, 3])), 16);
        let (folded, ops) = p.fold();
        assert_eq!(ops, schedule(&[0, 2, 3]));
        folded.check().unwrap();
        // The first view has no reader: it would only keep the first storage.
        let unfolded = p.unfold(&ops, &[0, 1, 0, 2]);
        assert_eq!(unfolded, schedule(&[0, 2, 0, 1, 3]));
        assert_eq!(peak(&unfolded), 16);
    }

    #[test]
    fn invalid_schedules_are_refused() {
        let mut p = problem(&[], &[("rng", &[], 4), ("b", &[0], 4)], &[1]);
        p.ops[OpIdx(0)].recomputable = false;
        let text = |s: &[usize]| evaluate(&p, &schedule(s)).unwrap_err().to_string();
        assert!(text(&[1, 0]).contains("before anything computed it"));
        assert!(text(&[0, 0, 1]).contains("must not be"));
        assert!(text(&[0]).contains("never computed"));
        assert!(text(&[0, 2]).contains("names op 2"));
        assert!(evaluate(&p, &schedule(&[0, 1])).is_ok());
        assert!(evaluate(&p, &[Step::Fetch(OpIdx(0))]).is_err());
    }

    #[test]
    fn offloaded_results_take_memory_until_their_release_and_from_their_fetch_on() {
        let p = chain();
        p.check().unwrap();
        let plain = evaluate(&p, &p.given_order()).unwrap();
        assert_eq!(plain.peak_above_static_bytes, 4_000_004);
        let run = |ops: &[usize]| {
            ops.iter()
                .map(|op| Step::Run(OpIdx(*op)))
                .collect::<Vec<_>>()
        };
        let a = OpIdx(0);
        let steps = [
            run(&[0]),
            vec![Step::Offload(a), Step::Release(a)],
            run(&[1, 2, 3, 4]),
            vec![Step::Fetch(a)],
            run(&[5, 6]),
        ]
        .concat();
        let score = evaluate(&p, &steps).unwrap();
        assert_eq!(score.peak_above_static_bytes, 4_000_004);
        assert_eq!(score.cost, 7.0 * 100.0 + 2.0 * 41.0);
        assert_eq!(score.flops, plain.flops);
        let live = Timeline::new(&p, &steps).unwrap().live_bytes;
        assert_eq!(live[6], 3_000_004);
        assert_eq!(settled(&steps), steps);
        // A release waits where it is, but for no fetch, and happens once.
        let mut late = steps.clone();
        late.remove(2);
        late.insert(5, Step::Release(a));
        assert_eq!(settled(&late), late);
        let score = evaluate(&p, &late).unwrap();
        assert_eq!(score.peak_above_static_bytes, 4_000_004);
        let mut after = steps.clone();
        after.remove(2);
        after.insert(8, Step::Release(a));
        assert_eq!(settled(&after), steps);
        after.insert(2, Step::Release(a));
        assert_eq!(settled(&after), steps);
    }

    #[test]
    fn outputs_are_not_moved_and_gradients_not_between_the_passes() {
        let mut p = chain();
        let movable: Vec<bool> = p.movable().iter().copied().collect();
        assert_eq!(movable, [true, true, true, false, false, false, false]);
        let leaves: Vec<bool> = p.may_leave().iter().copied().collect();
        assert_eq!(leaves, [true, true, true, false, true, true, false]);
        let code = |p: &Problem, op: usize| p.check_movable(&[OpIdx(op)]).unwrap_err().code();
        assert_eq!(code(&p, 6), "offload");
        p.transfer = None;
        assert_eq!(code(&p, 0), "offload");
    }
}
