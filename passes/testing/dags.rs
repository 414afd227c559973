//! Random planning problems that are small enough to try every schedule of: what solvers are compared with brute force
//! on.

use super::Random;
use crate::plan::problem::{Op, OpPhase, Problem, Value, ValueKind};

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
    let mut stack: Vec<usize> = Vec::new();
    for o in 0..ops {
        let backward = o >= forward;
        let known = p.values.len();
        let mut ins = Vec::new();
        if shape == Shape::Training && known > 0 {
            ins.push(known - 1);
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
            ins.push(known - 1 - r.below(reach));
        }
        let outs: Vec<usize> = (0..[1, 1, 1, 2, 3][r.below(5)])
            .map(|_| value(r, &mut p, ValueKind::Activation, Some(o), largest))
            .collect();
        // Every third op could write over what it reads.
        let mut over = Vec::new();
        for v in &ins {
            if r.below(3) == 0 && p.values[*v].kind != ValueKind::Static {
                p.values[outs[0]].bytes = p.values[*v].bytes;
                over = vec![*v];
            }
        }
        let alike = |v: &&usize| {
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
        p.outputs.push(p.values.len() - 1);
    }
    for _ in 0..r.below(3) {
        if !p.values.is_empty() {
            p.outputs.push(r.below(p.values.len()));
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
    producer: Option<usize>,
    largest: usize,
) -> usize {
    p.values
        .push(Value::new(r.below(largest + 1) as u64, kind, producer));
    p.values.len() - 1
}
