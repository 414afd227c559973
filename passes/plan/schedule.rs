//! Schedules and the only judge of them.
//!
//! A schedule is a list of ops; repeats are recomputation. A use reads the most recent computation of its value; an
//! instance is freed right after its last use; while an op runs, its operands, results and temporaries are all alive.
//! These are the rules of the planner benches' judge, with views, temporaries and results written over operands added:
//! an instance of a view keeps the instance of the storage it was made from, and a result takes no bytes while it is made
//! if an operand that it may be written over is read there for the last time. A result that is written over a static value
//! takes none at all unless that is read later or is an output: then it takes as many as that one. On problems without them the two give the
//! same numbers.

use super::problem::{Problem, ValueKind};
use ckpt_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a schedule costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub peak_bytes: u64,
    pub static_bytes: u64,
    pub peak_above_static_bytes: u64,
    /// The first step at which the peak is reached.
    pub at_step: Option<usize>,
    pub cost: f64,
    pub flops: u64,
    /// Bytes read and written.
    pub traffic_bytes: u64,
    pub steps: usize,
}

impl Score {
    /// Returns the extra cost over `base`, in percent.
    pub fn overhead_pct(&self, base: &Score) -> f64 {
        percent(self.cost, base.cost)
    }

    /// Returns the extra FLOPs over `base`, in percent.
    pub fn flops_overhead_pct(&self, base: &Score) -> f64 {
        percent(self.flops as f64, base.flops as f64)
    }
}

fn percent(value: f64, base: f64) -> f64 {
    if base == 0.0 {
        0.0
    } else {
        100.0 * (value - base) / base
    }
}

/// One computation of a storage, and how long it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The value that owns the storage.
    pub value: usize,
    pub bytes: u64,
    /// The step that makes it; 0 for a placeholder.
    pub born: usize,
    /// The last step that needs it, or the number of steps if it is alive at the end; `None` for a placeholder that
    /// nothing has read.
    pub last: Option<usize>,
}

/// Judges a schedule. Linear in the operands of its steps.
///
/// # Errors
/// A step that reads a value before anything computed it, repeats an op that must not be, or names none; an output or an
/// op that is never computed.
pub fn evaluate(problem: &Problem, schedule: &[usize]) -> Result<Score> {
    let timeline = Timeline::new(problem, schedule)?;
    let mut score = Score {
        static_bytes: problem.static_bytes(),
        steps: schedule.len(),
        ..Score::default()
    };
    for (step, op) in schedule.iter().enumerate() {
        let live = timeline.live_bytes[step];
        if live > score.peak_above_static_bytes {
            score.peak_above_static_bytes = live;
            score.at_step = Some(step);
        }
        let op = &problem.ops[*op];
        score.cost += op.cost;
        score.flops = score.flops.saturating_add(op.flops);
        score.traffic_bytes = score.traffic_bytes.saturating_add(op.bytes);
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

impl Timeline {
    /// # Errors
    /// See [`evaluate`].
    pub fn new(problem: &Problem, schedule: &[usize]) -> Result<Timeline> {
        let values = &problem.values;
        let mut instances: Vec<Instance> = Vec::new();
        // The instance a use of each value reads; for a static value or a view of one, `STATIC`.
        let mut current: Vec<Option<usize>> = vec![None; values.len()];
        const STATIC: usize = usize::MAX;
        let mut runs = vec![0u32; problem.ops.len()];
        for (v, value) in values.iter().enumerate() {
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
        let mut renewals: Vec<(usize, usize, usize)> = Vec::new();
        let refuse = |text: String| Err(Error::usage("schedule", text));
        for (step, o) in schedule.iter().enumerate() {
            let Some(op) = problem.ops.get(*o) else {
                return refuse(format!(
                    "step {step} names op {o}; there are {}",
                    problem.ops.len()
                ));
            };
            runs[*o] += 1;
            if runs[*o] > 1 && !op.recomputable {
                return refuse(format!(
                    "step {step} repeats `{}`, which must not be",
                    op.name
                ));
            }
            for v in &op.ins {
                match current[*v] {
                    None => {
                        return refuse(format!(
                            "step {step} (`{}`) reads value {v} before anything computed it",
                            op.name
                        ));
                    }
                    Some(STATIC) => {}
                    Some(i) => instances[i].last = Some(step),
                }
            }
            let instance = |v: &usize| current[*v].filter(|i| *i != STATIC);
            over.extend(
                op.in_place_operands
                    .iter()
                    .filter_map(instance)
                    .map(|i| (step, i)),
            );
            // All operands are looked up before any result replaces them.
            let places: Vec<usize> = op
                .outs
                .iter()
                .map(|v| match (values[*v].view_of, values[*v].kind) {
                    (Some(base), _) => current[base].unwrap_or(STATIC),
                    (None, ValueKind::Static) => STATIC,
                    (None, _) => {
                        instances.push(Instance {
                            value: *v,
                            bytes: values[*v].bytes,
                            born: step,
                            last: Some(step),
                        });
                        instances.len() - 1
                    }
                })
                .collect();
            let renewed = |v: &&usize| current[**v] == Some(STATIC);
            if let (Some(v), Some(place)) =
                (op.in_place_operands.iter().find(renewed), places.first())
            {
                renewals.push((step, *v, *place));
            }
            for (v, place) in op.outs.iter().zip(places) {
                current[*v] = Some(place);
            }
        }
        if let Some(o) = runs.iter().position(|n| *n == 0) {
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
            let mut last = vec![0; values.len()];
            for (step, o) in schedule.iter().enumerate() {
                problem.ops[*o]
                    .ins
                    .iter()
                    .for_each(|v| last[roots[*v]] = step);
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
        for (step, o) in schedule.iter().enumerate() {
            live += births[step];
            let taken: Option<usize> = written_over[step];
            let taken_bytes = taken.map_or(0, |i| instances[i].bytes);
            live_bytes.push(live + problem.ops[*o].temp_bytes - taken_bytes);
            live -= deaths[step];
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
    use crate::problem::{Op, OpPhase, Value};
    use crate::testing::Random;

    /// Judges a schedule as the benches do: no views, no temporaries; every allocation on a list.
    fn reference(p: &Problem, schedule: &[usize]) -> Option<(u64, Option<usize>, f64)> {
        let mut current: std::collections::BTreeMap<usize, usize> = Default::default();
        let mut inst: Vec<(u64, i64, i64)> = Vec::new();
        for (j, v) in p.values.iter().enumerate() {
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
            let outs: Vec<usize> = (0..1 + r.below(2))
                .map(|_| {
                    let bytes = r.below(9) as u64;
                    p.values
                        .push(Value::new(bytes, ValueKind::Activation, Some(o)));
                    p.values.len() - 1
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
            p.outputs.push(r.below(p.values.len()));
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
                let op = r.below(p.ops.len());
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

    fn value(bytes: u64, producer: Option<usize>, view_of: Option<usize>) -> Value {
        let kind = match producer {
            Some(_) => ValueKind::Activation,
            None => ValueKind::Static,
        };
        Value {
            view_of,
            ..Value::new(bytes, kind, producer)
        }
    }

    fn op(name: &str, ins: &[usize], outs: &[usize], temp_bytes: u64) -> Op {
        Op {
            temp_bytes,
            recomputable: name != "rng",
            ..Op::new(name, ins, outs, OpPhase::Forward, 1.0)
        }
    }

    #[test]
    fn a_view_keeps_the_storage_it_was_made_from() {
        // x -> a (10 bytes) -> view v; b reads x (5 bytes); c reads v.
        let p = Problem {
            ops: vec![
                op("a", &[0], &[1], 0),
                op("v", &[1], &[2], 0),
                op("b", &[0], &[3], 7),
                op("c", &[2, 3], &[4], 0),
            ],
            values: vec![
                value(100, None, None),
                value(10, Some(0), None),
                value(0, Some(1), Some(1)),
                value(5, Some(2), None),
                value(1, Some(3), None),
            ],
            outputs: vec![4],
            transfer: None,
        };
        p.check().unwrap();
        let given = evaluate(&p, &p.given_order()).unwrap();
        assert_eq!((given.peak_above_static_bytes, given.peak_bytes), (22, 122));
        // Computing `a` again without its view changes nothing for c: the first storage stays.
        assert_eq!(
            evaluate(&p, &[0, 1, 2, 0, 3])
                .unwrap()
                .peak_above_static_bytes,
            25
        );
        // With the view recomputed the first storage is gone when `b` takes its temporaries.
        assert_eq!(
            evaluate(&p, &[0, 1, 2, 0, 1, 3])
                .unwrap()
                .peak_above_static_bytes,
            16
        );
        let (folded, ops) = p.fold();
        assert_eq!(ops, [0, 2, 3]);
        folded.check().unwrap();
        // The first view is made for nobody: it would only keep the first storage.
        let schedule = p.unfold(&ops, &[0, 1, 0, 2]);
        assert_eq!(schedule, [0, 2, 0, 1, 3]);
        let score = evaluate(&p, &schedule).unwrap();
        assert_eq!(score.peak_above_static_bytes, 16);
    }

    #[test]
    fn invalid_schedules_are_refused() {
        let p = Problem {
            ops: vec![op("rng", &[], &[0], 0), op("b", &[0], &[1], 0)],
            values: vec![value(4, Some(0), None), value(4, Some(1), None)],
            outputs: vec![1],
            transfer: None,
        };
        let text = |s: &[usize]| evaluate(&p, s).unwrap_err().to_string();
        assert!(text(&[1, 0]).contains("before anything computed it"));
        assert!(text(&[0, 0, 1]).contains("must not be"));
        assert!(text(&[0]).contains("never computed"));
        assert!(text(&[0, 2]).contains("names op 2"));
        assert!(evaluate(&p, &[0, 1]).is_ok());
    }
}
