//! Solves small problems exactly: finds the cheapest path through states (first runs done, values resident).
//!
//! A step runs the next op of the given order, or any earlier one again. Its operands are resident. Values are dropped
//! only when a step has no room, and then as few as make room: any set that does and has no superfluous member. Until then
//! keeping a useless value costs nothing. In Dijkstra's order the first arrival at the end is optimal over all schedules whose
//! first runs follow the given order.

use super::compact::{Dag, NONE};
use super::work::Work;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The outcome of an exact search.
pub enum Outcome {
    /// The cheapest schedule: ops in the order in which they run.
    Optimal(Vec<u32>),
    /// No schedule of the class fits.
    Infeasible,
    /// Too large, or the work is spent.
    Unknown,
}

/// Ops and values that the search takes on.
pub const MOST_OPS: usize = 16;
const MOST_VALUES: usize = 64;

type State = (u32, u64);

/// Returns the cheapest schedule within `cap`.
pub fn exact(dag: &Dag, cap: i64, work: &mut Work) -> Outcome {
    let ops = dag.ops();
    if ops > MOST_OPS || dag.values() > MOST_VALUES || dag.turn != NONE {
        return Outcome::Unknown;
    }
    let mask = |list: &[u32]| list.iter().fold(0u64, |m, v| m | 1 << v);
    let ins: Vec<u64> = (0..ops as u32).map(|o| mask(dag.ins(o))).collect();
    let outs: Vec<u64> = (0..ops as u32).map(|o| mask(dag.outs(o))).collect();
    let wanted = mask(&dag.outputs);
    // What anything that may still run reads, once the first k ops have run.
    let again = (0..ops)
        .filter(|o| dag.repeatable[*o])
        .fold(0, |m, o| m | ins[o]);
    let mut useful = vec![wanted | again; ops + 1];
    for k in (0..ops).rev() {
        useful[k] = useful[k + 1] | ins[k];
    }
    let bytes = |set: u64| {
        let mut set = set;
        let mut sum = 0;
        while set != 0 {
            sum += dag.size[set.trailing_zeros() as usize];
            set &= set - 1;
        }
        sum
    };
    let start: State = (0, mask(&dag.placeholders) & useful[0]);
    let mut best: FxHashMap<State, (i64, State, u32)> = FxHashMap::default();
    let mut queue = BinaryHeap::new();
    best.insert(start, (0, start, u32::MAX));
    queue.push(Reverse((0i64, start)));
    while let Some(Reverse((weight, state))) = queue.pop() {
        if best.get(&state).is_some_and(|b| b.0 < weight) {
            continue;
        }
        let (k, resident) = state;
        if k as usize == ops && wanted & !resident == 0 {
            return Outcome::Optimal(trace(&best, start, state));
        }
        for o in 0..ops.min(k as usize + 1) {
            let first = o == k as usize;
            if ins[o] & !resident != 0
                || (!first && (!dag.repeatable[o] || outs[o] & !resident == 0))
            {
                continue;
            }
            work.spend(16);
            if work.spent() {
                return Outcome::Unknown;
            }
            let full = resident | outs[o];
            let excess = bytes(full) + dag.temp_bytes[o] - cap;
            let next = k + first as u32;
            let mut arrive = |set: u64| {
                let to = (next, set & useful[next as usize]);
                let weight = weight + dag.weight[o];
                if best.get(&to).is_none_or(|b| weight < b.0) {
                    best.insert(to, (weight, state, o as u32));
                    queue.push(Reverse((weight, to)));
                }
            };
            if excess <= 0 {
                arrive(full);
                continue;
            }
            let spare: Vec<usize> = (0..dag.values())
                .filter(|v| resident & !(ins[o] | outs[o]) & (1 << v) != 0)
                .collect();
            // The operand that the op writes over, if any.
            let over = dag.in_place_operands(o as u32).iter().map(|v| 1u64 << v);
            for taken in over.chain([0]) {
                let left = full & !taken;
                let excess = excess - bytes(taken);
                if excess <= 0 {
                    arrive(left);
                } else if !drops(dag, &spare, excess, work, &mut |set| arrive(left & !set)) {
                    return Outcome::Unknown;
                }
            }
        }
    }
    Outcome::Infeasible
}

/// Calls `each` with every set of `spare` that frees `excess` bytes and has no superfluous member; `false` if the work
/// is spent.
fn drops(
    dag: &Dag,
    spare: &[usize],
    excess: i64,
    work: &mut Work,
    each: &mut dyn FnMut(u64),
) -> bool {
    // Largest first: what comes later is the smallest member so far, and the only one that can be superfluous.
    let mut spare = spare.to_vec();
    spare.sort_by_key(|v| (Reverse(dag.size[*v]), *v));
    let mut stack: Vec<(usize, u64, i64)> = vec![(0, 0, 0)];
    while let Some((from, set, freed)) = stack.pop() {
        work.spend(2);
        if work.spent() {
            return false;
        }
        for (i, v) in spare.iter().enumerate().skip(from) {
            let with = set | 1 << v;
            let sum = freed + dag.size[*v];
            if sum >= excess {
                each(with);
            } else {
                stack.push((i + 1, with, sum));
            }
        }
    }
    true
}

fn trace(best: &FxHashMap<State, (i64, State, u32)>, start: State, end: State) -> Vec<u32> {
    let mut schedule = Vec::new();
    let mut state = end;
    while state != start {
        let (_, from, op) = best[&state];
        schedule.push(op);
        state = from;
    }
    schedule.reverse();
    schedule
}
