//! Random planning problems that are small enough to try every schedule. Solvers are compared with brute force on them.

pub use crate::solve::work::Random;

use crate::index::{ByOp, OpIdx, ValueIdx};
use crate::problem::{Op, OpPhase, Problem, Transfer, Value, ValueKind, Wait};

/// What a random problem looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Ops read any few values made before, and any values are outputs.
    Any,
    /// A forward part, then a backward part that reads it in rough reverse: what rematerialisation is for.
    Training,
}

/// A folded problem of exactly `ops` ops: multi-output ops, static values and placeholders, sizes and costs that tie and
/// that are zero, operands that are read twice, results that nothing reads. Every fourth has temporaries and ops that
/// must not run twice as well.
pub fn random_dag(r: &mut Random, ops: usize, shape: Shape) -> Problem {
    let mut p = Problem::default();
    let extras = r.below(4) == 0;
    let largest = [3, 10, 40][r.below(3)];
    let start = r.below(4);
    for _ in 0..start {
        let kind = [ValueKind::Static, ValueKind::Placeholder][r.below(2)];
        value(r, &mut p, kind, None, largest);
    }
    let forward = match shape {
        Shape::Any => r.below(ops + 1),
        Shape::Training => ops.div_ceil(2),
    };
    // Forward results that the backward part has not reached yet.
    let mut stack: Vec<ValueIdx> = Vec::new();
    for o in 0..ops {
        let backward = o >= forward;
        let known = p.values.len();
        let mut ins = Vec::new();
        if shape == Shape::Training && known > 0 {
            ins.push(ValueIdx(known - 1));
            if backward && let Some(v) = stack.pop() {
                ins.push(v);
            }
        }
        let wanted = if shape == Shape::Training {
            r.below(2)
        } else {
            r.below(4)
        };
        for _ in 0..wanted.min(known) {
            // Mostly what was made last.
            let reach = if r.below(2) == 0 { known.min(4) } else { known };
            ins.push(ValueIdx(known - 1 - r.below(reach)));
        }
        let outs: Vec<ValueIdx> = (0..[1, 1, 1, 2, 3][r.below(5)])
            .map(|_| value(r, &mut p, ValueKind::Activation, Some(OpIdx(o)), largest))
            .collect();
        // Every third op could write over what it reads.
        let mut over = Vec::new();
        for v in &ins {
            if r.below(3) == 0 && p.values[*v].kind != ValueKind::Static {
                p.values[outs[0]].bytes = p.values[*v].bytes;
                over = vec![*v];
            }
        }
        let alike = |v: &&ValueIdx| {
            p.values[**v].bytes == p.values[outs[0]].bytes
                && p.values[**v].kind != ValueKind::Static
        };
        if !over.is_empty() && r.below(2) == 0 {
            over = ins.iter().filter(alike).copied().collect();
        }
        if !backward {
            stack.push(outs[r.below(outs.len())]);
        }
        let phase = match backward {
            true => OpPhase::Backward,
            false => OpPhase::Forward,
        };
        let cost = [0.0, 1.0, 2.5, 7.0][r.below(4)] + r.below(3) as f64;
        p.ops.push(Op {
            in_place_operands: over,
            flops: r.below(50) as u64,
            bytes: r.below(50) as u64,
            temp_bytes: match extras && r.below(3) == 0 {
                true => r.below(largest) as u64,
                false => 0,
            },
            recomputable: !(extras && r.below(5) == 0),
            ..Op::new(format!("op{o}"), ins, outs, phase, cost)
        });
    }
    if !p.values.is_empty() && r.below(8) > 0 {
        p.outputs.push(ValueIdx(p.values.len() - 1));
    }
    for _ in 0..r.below(3) {
        if !p.values.is_empty() {
            p.outputs.push(ValueIdx(r.below(p.values.len())));
        }
    }
    p.outputs.sort_unstable();
    p.outputs.dedup();
    p
}

fn value(
    r: &mut Random,
    p: &mut Problem,
    kind: ValueKind,
    producer: Option<OpIdx>,
    largest: usize,
) -> ValueIdx {
    p.values
        .push(Value::new(r.below(largest + 1) as u64, kind, producer))
}

/// Returns a problem in which every op makes one value, from static values and ops: name, operands and bytes of the result. Ops
/// run forward at a cost of 1.
pub fn problem(statics: &[u64], ops: &[(&str, &[usize], u64)], outputs: &[usize]) -> Problem {
    let mut p = Problem::default();
    for bytes in statics {
        p.values.push(Value::new(*bytes, ValueKind::Static, None));
    }
    for (name, ins, bytes) in ops {
        let producer = Some(OpIdx(p.ops.len()));
        let out = Value::new(*bytes, ValueKind::Activation, producer);
        let out = p.values.push(out);
        let ins = ins.iter().copied();
        p.ops
            .push(Op::new(*name, ins, [out], OpPhase::Forward, 1.0));
    }
    p.outputs = outputs.iter().copied().map(ValueIdx).collect();
    p
}

/// Returns x → a → b → c → loss, and back through all of them: each backward op reads what its forward op read.
pub fn chain() -> Problem {
    const LARGE: u64 = 1_000_000;
    let ops: [(&str, &[usize], u64); 7] = [
        ("a", &[0], LARGE),
        ("b", &[1], LARGE),
        ("c", &[2], LARGE),
        ("loss", &[3], 4),
        ("dc", &[2, 3, 4], LARGE),
        ("db", &[1, 2, 5], LARGE),
        ("da", &[1, 6], 5),
    ];
    let mut p = problem(&[5], &ops, &[4, 7]);
    train(&mut p, 4);
    p
}

/// Makes a training step of a problem: all ops from `backward` on are the backward pass, every op costs 100 µs, and a transfer
/// takes 1 µs and 40 µs a megabyte.
pub fn train(p: &mut Problem, backward: usize) {
    for (o, op) in p.ops.iter_mut().enumerate() {
        (op.cost, op.flops) = (100.0, 10);
        if o >= backward {
            op.phase = OpPhase::Backward;
        }
    }
    p.transfer = Some(Transfer {
        us_per_megabyte: 40.0,
        start_us: 1.0,
        busy_share: 0.0,
    });
}

/// Returns what each op would wait for if its results moved, for a bound. Without a lane nothing waits for it.
pub fn waits(problem: &Problem, transfer: &Transfer, has_lane: bool) -> ByOp<Option<Wait>> {
    let movable = problem.movable();
    let wait = |(o, may): (OpIdx, &bool)| {
        let wait = transfer.wait(problem.result_bytes(o), true);
        let lane_us = if has_lane { wait.lane_us } else { 0.0 };
        may.then_some(Wait { lane_us, ..wait })
    };
    movable.enumerated().map(wait).collect()
}

/// Returns a valid schedule: the given order, in which fewer than `most` ops run again at any place after their first run.
pub fn random_schedule(r: &mut Random, p: &Problem, most: usize) -> Vec<OpIdx> {
    let mut schedule = p.given_order();
    for _ in 0..r.below(most) {
        let op = OpIdx(r.below(p.ops.len()));
        if p.ops[op].recomputable {
            let first = schedule.iter().position(|o| *o == op).unwrap_or(0);
            schedule.insert(first + 1 + r.below(schedule.len() - first), op);
        }
    }
    schedule
}

/// Returns a schedule of ops.
pub fn schedule(ops: &[usize]) -> Vec<OpIdx> {
    ops.iter().copied().map(OpIdx).collect()
}
