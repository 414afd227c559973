//! Finds the cheapest schedule of a small problem by trying all of them. Tests compare the solvers with it.
//!
//! The class of schedules is that of the solvers: every op runs at least once, first runs follow the given order, and
//! everything that was computed may be recomputed at any time and any number of times. A state is the number of ops that
//! have run for the first time and the set of values that are alive. Values are freed only where the next step would not fit
//! otherwise, and then as few as possible. Whatever a schedule holds alive at its steps, some path of states holds too, so
//! none is missed. Dijkstra's algorithm over these states finds an optimum. Without a path no schedule of the class fits.
//! Exponential in the number of values.
//!
//! Where results may be offloaded, a state also says whose are. An op whose results may leave has them offloaded at its first
//! run or not. If it has, it does not run again, and all its results are fetched together, any number of times.
//!
//! A result that is written over a static value takes no bytes unless something reads that value later. Both cases of an
//! update are tried: one in which the result takes bytes, and one that forbids all later readers of the value.
//!
//! This module shares no code with the solvers. Only the last check of its tests uses the evaluation.

use super::index::{ByOp, OpIdx, ValueIdx};
use super::problem::{Problem, ValueKind};
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An optimal schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// The ops to compute, in order; an op that occurs again is a recomputation.
    pub schedule: Vec<OpIdx>,
    /// Sum of the prices of all steps and transfers.
    pub price: f64,
    /// Ops whose results are moved, in the order of moving out. A fetch is not a step of the schedule.
    pub moved: Vec<OpIdx>,
}

/// What moving the results of an op costs, each way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// The price of the transfer out of device memory.
    pub out: f64,
    /// The price of one fetch.
    pub back: f64,
}

/// First computations done, the values alive, the ops whose results are offloaded, and the static values that were written
/// over, one bit each.
type State = (usize, u64, u64, u64);

/// What leads from one state to the next.
#[derive(Clone, Copy)]
enum Does {
    Run(OpIdx),
    RunAndMove(OpIdx),
    Fetch,
}

/// A float that the heap can order; prices are finite.
#[derive(Clone, Copy, PartialEq)]
struct Price(f64);

impl Eq for Price {}

impl PartialOrd for Price {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Price {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A problem in bits: one for each value that takes memory only while it is alive.
struct Bits {
    bytes: Vec<u64>,
    without_bytes: u64,
    ins: ByOp<u64>,
    outs: ByOp<u64>,
    in_place_operands: ByOp<u64>,
    temp_bytes: ByOp<u64>,
    start: u64,
    outputs: u64,
    /// Read by some op, or an output: the rest dies at once.
    useful: u64,
    /// Of each op: the static value that its first result is written over.
    renews: ByOp<Option<Renewal>>,
    /// Of each op, and of the outputs: the static values among what is read that some op writes over.
    reads: ByOp<u64>,
    shown: u64,
}

/// A result that may be written over a static value.
#[derive(Clone, Copy)]
struct Renewal {
    /// Among the static values that are written over.
    in_place_operands: u64,
    /// The result without bytes.
    free: u64,
    /// The same in memory of its own.
    paid: u64,
}

impl Bits {
    /// # Panics
    /// For a problem with views, or with more than 64 values that are not static: a test that asks for the impossible.
    fn new(problem: &Problem) -> Bits {
        let mut bit_of = problem.by_value(None);
        let mut bits = Bits {
            bytes: Vec::new(),
            without_bytes: 0,
            ins: ByOp::default(),
            outs: ByOp::default(),
            in_place_operands: ByOp::default(),
            temp_bytes: ByOp::default(),
            start: 0,
            outputs: 0,
            useful: 0,
            renews: ByOp::default(),
            reads: ByOp::default(),
            shown: 0,
        };
        for (v, value) in problem.values.enumerated() {
            assert!(value.view_of.is_none(), "fold the problem first");
            if value.kind == ValueKind::Static {
                continue;
            }
            assert!(bits.bytes.len() < 64, "too large to try everything");
            bit_of[v] = Some(bits.bytes.len());
            if value.kind == ValueKind::Placeholder {
                bits.start |= 1 << bits.bytes.len();
            }
            bits.bytes.push(value.bytes);
        }
        let mask = |list: &[ValueIdx]| {
            let known = list.iter().filter_map(|v| bit_of[*v]);
            known.fold(0u64, |mask, bit| mask | 1 << bit)
        };
        bits.outputs = mask(&problem.outputs);
        bits.useful = bits.outputs;
        for op in &problem.ops {
            bits.ins.push(mask(&op.ins));
            bits.outs.push(mask(&op.outs));
            bits.in_place_operands.push(mask(&op.in_place_operands));
            bits.temp_bytes.push(op.temp_bytes);
            bits.useful |= mask(&op.ins);
        }
        let is_static = |v: &&ValueIdx| {
            let value = &problem.values[**v];
            value.kind == ValueKind::Static && value.producer.is_none()
        };
        let mut renewed: Vec<ValueIdx> = Vec::new();
        for op in &problem.ops {
            renewed.extend(op.in_place_operands.iter().find(is_static));
        }
        renewed.sort_unstable();
        renewed.dedup();
        let among = |list: &[ValueIdx]| {
            let known = list.iter().filter_map(|v| renewed.binary_search(v).ok());
            known.fold(0u64, |mask, at| mask | 1 << at)
        };
        bits.shown = among(&problem.outputs);
        for op in &problem.ops {
            bits.reads.push(among(&op.ins));
            let over = op.in_place_operands.iter().find(is_static);
            let result = op.outs.first().and_then(|v| bit_of[*v]);
            bits.renews.push(over.zip(result).map(|(over, result)| {
                assert!(bits.bytes.len() < 64, "too large to try everything");
                let (free, paid) = (1 << result, 1 << bits.bytes.len());
                bits.bytes.push(problem.values[*over].bytes);
                if bits.useful & free != 0 {
                    bits.useful |= paid;
                }
                Renewal {
                    in_place_operands: among(&[*over]),
                    free,
                    paid,
                }
            }));
        }
        bits.start &= bits.useful;
        for (bit, bytes) in bits.bytes.iter().enumerate() {
            bits.without_bytes |= u64::from(*bytes == 0) << bit;
        }
        bits
    }

    /// Returns `wanted` values, with each result that has memory of its own in the place of the free one.
    fn actual(&self, wanted: u64, alive: u64) -> u64 {
        let own = self.renews.iter().flatten();
        own.filter(|r| wanted & r.free != 0 && alive & r.paid != 0)
            .fold(wanted, |mask, r| mask & !r.free | r.paid)
    }

    fn sum(&self, mut mask: u64) -> u64 {
        let mut sum = 0;
        while mask != 0 {
            sum += self.bytes[mask.trailing_zeros() as usize];
            mask &= mask - 1;
        }
        sum
    }

    /// Returns what may be alive besides what is `needed` while an op runs that takes `temp_bytes` and writes over `taken`: every
    /// subset of `alive` that fits and to which nothing can be added.
    fn fitting(
        &self,
        (needed, temp_bytes): (u64, u64),
        alive: u64,
        taken: u64,
        budget_bytes: u64,
    ) -> Vec<u64> {
        let own_bytes = self.sum(needed & !taken) + temp_bytes;
        let Some(room) = budget_bytes.checked_sub(own_bytes) else {
            return Vec::new();
        };
        let optional = alive & !needed;
        if self.sum(optional) <= room {
            return vec![optional];
        }
        let mut found = Vec::new();
        // What takes nothing always fits.
        let free = self.without_bytes & optional;
        let sized = optional & !free;
        // All subsets of `sized`, the whole of it first.
        let mut subset = sized;
        loop {
            let sum = self.sum(subset);
            let maximal = || {
                let mut rest = sized & !subset;
                while rest != 0 {
                    if sum + self.bytes[rest.trailing_zeros() as usize] <= room {
                        return false;
                    }
                    rest &= rest - 1;
                }
                true
            };
            if sum <= room && maximal() {
                found.push(subset | free);
            }
            if subset == 0 {
                return found;
            }
            subset = (subset - 1) & sized;
        }
    }
}

/// Returns the cheapest schedule whose peak above static is at most `budget_bytes`, by the price of each op; `None` where no
/// schedule of the class fits.
///
/// # Panics
/// See [`Bits::new`]; one price for each op is expected.
pub fn cheapest(problem: &Problem, budget_bytes: u64, prices: &ByOp<f64>) -> Option<Best> {
    cheapest_moving(problem, budget_bytes, prices, &problem.by_op(None))
}

/// Returns the cheapest schedule where the results of some ops may be offloaded.
///
/// # Panics
/// See [`cheapest`]; one entry of `moves` for each op is expected, and at most 64 ops.
pub fn cheapest_moving(
    problem: &Problem,
    budget_bytes: u64,
    prices: &ByOp<f64>,
    moves: &ByOp<Option<Move>>,
) -> Option<Best> {
    assert_eq!(
        (prices.len(), moves.len()),
        (problem.ops.len(), problem.ops.len())
    );
    assert!(problem.ops.len() <= 64, "too large to try everything");
    let bits = Bits::new(problem);
    let ops = problem.ops.len();
    let mut known: FxHashMap<State, (Price, Option<(State, Does)>)> = FxHashMap::default();
    let mut heap = BinaryHeap::new();
    let start = (0, bits.start, 0, 0);
    known.insert(start, (Price(0.0), None));
    heap.push(Reverse((Price(0.0), start)));
    while let Some(Reverse((price, state))) = heap.pop() {
        if known[&state].0 != price {
            continue;
        }
        let (next, alive, outside, renewed) = state;
        if next == ops && bits.actual(bits.outputs, alive) & !alive == 0 {
            let (mut schedule, mut moved) = (Vec::new(), Vec::new());
            let mut at = state;
            while let Some((before, does)) = known[&at].1 {
                match does {
                    Does::Run(op) => schedule.push(op),
                    Does::RunAndMove(op) => {
                        schedule.push(op);
                        moved.push(op);
                    }
                    Does::Fetch => {}
                }
                at = before;
            }
            schedule.reverse();
            moved.reverse();
            let first: f64 = prices.iter().sum();
            return Some(Best {
                schedule,
                price: first + price.0,
                moved,
            });
        }
        let mut reach = |reached: State, then: Price, does: Does| {
            if known.get(&reached).is_none_or(|(old, _)| then < *old) {
                known.insert(reached, (then, Some((state, does))));
                heap.push(Reverse((then, reached)));
            }
        };
        for op in (0..ops.min(next + 1)).map(OpIdx) {
            let first = op.0 == next;
            if let (false, Some(way)) = (outside & 1 << op.0 == 0, moves[op]) {
                let then = Price(price.0 + way.back);
                for others in bits.fitting((bits.outs[op], 0), alive, 0, budget_bytes) {
                    let alive = (others | bits.outs[op]) & bits.useful;
                    reach((next, alive, outside, renewed), then, Does::Fetch);
                }
                continue;
            }
            let ins = bits.actual(bits.ins[op], alive);
            let may_run = first || problem.ops[op].recomputable;
            if ins & !alive != 0 || bits.reads[op] & renewed != 0 || !may_run {
                continue;
            }
            // First computations cost every schedule the same.
            let then = Price(price.0 + if first { 0.0 } else { prices[op] });
            // Results, and what they are written over: nothing, or a static value.
            let mut ways = vec![(bits.outs[op], 0)];
            if let Some(r) = bits.renews[op] {
                ways = vec![(bits.outs[op] & !r.free | r.paid, 0)];
                if r.in_place_operands & bits.shown == 0 {
                    ways.push((bits.outs[op], r.in_place_operands));
                }
            }
            for (outs, over) in ways {
                let renewed = renewed | over;
                let needed = (ins | outs, bits.temp_bytes[op]);
                let mut taken = bits.in_place_operands[op];
                loop {
                    // One operand that is written over and gone, or none.
                    let one = taken & taken.wrapping_neg();
                    for others in bits.fitting(needed, alive, one, budget_bytes) {
                        let alive = (others | (ins & !one) | outs) & bits.useful;
                        let next = next + first as usize;
                        reach((next, alive, outside, renewed), then, Does::Run(op));
                        if let (true, Some(way)) = (first, moves[op]) {
                            let then = Price(then.0 + way.out);
                            let left = outside | 1 << op.0;
                            reach((next, alive, left, renewed), then, Does::RunAndMove(op));
                        }
                    }
                    if one == 0 {
                        break;
                    }
                    taken &= !one;
                }
            }
        }
    }
    None
}

/// Returns the smallest peak above static that any schedule of the class has.
///
/// # Panics
/// See [`Bits::new`].
pub fn smallest_peak(problem: &Problem) -> u64 {
    let free = problem.by_op(0.0);
    // Everything kept: fits for sure.
    let bits = Bits::new(problem);
    let temp_bytes = bits.temp_bytes.iter().max().copied().unwrap_or(0);
    let (mut below, mut fits) = (None::<u64>, bits.bytes.iter().sum::<u64>() + temp_bytes);
    while below.map_or(fits > 0, |b| b + 1 < fits) {
        let middle = below.map_or(0, |b| b + (fits - b) / 2);
        match cheapest(problem, middle, &free) {
            Some(_) => fits = middle,
            None => below = Some(middle),
        }
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::evaluate;
    use crate::testing::Random;
    use crate::testing::{Shape, random_dag};

    fn costs(p: &Problem) -> ByOp<f64> {
        p.ops.iter().map(|op| op.cost).collect()
    }

    /// Visits all schedules of at most `extra` repeats, one by one.
    fn every_schedule(p: &Problem, extra: usize, visit: &mut dyn FnMut(&[OpIdx])) {
        fn go(
            p: &Problem,
            next: usize,
            extra: usize,
            s: &mut Vec<OpIdx>,
            visit: &mut dyn FnMut(&[OpIdx]),
        ) {
            if next == p.ops.len() {
                visit(s);
            }
            for op in p.ops.indices().take(next + 1) {
                let first = op.0 == next;
                if first || (extra > 0 && p.ops[op].recomputable) {
                    s.push(op);
                    go(p, next + first as usize, extra - !first as usize, s, visit);
                    s.pop();
                }
            }
        }
        go(p, 0, extra, &mut Vec::new(), visit);
    }

    /// The judge's own rules decide here: every schedule is listed and evaluated.
    #[test]
    fn nothing_that_the_evaluator_allows_is_cheaper() {
        let mut r = Random(5);
        let (mut repeats, mut impossible) = (0, 0);
        for n in 0..300 {
            let shape = [Shape::Any, Shape::Training][n % 2];
            let p = random_dag(&mut r, 1 + n % 5, shape);
            let mut best: std::collections::BTreeMap<u64, f64> = Default::default();
            every_schedule(&p, 3, &mut |s| {
                let score = evaluate(&p, s).unwrap();
                let known = best
                    .entry(score.peak_above_static_bytes)
                    .or_insert(f64::INFINITY);
                *known = known.min(score.cost);
            });
            let smallest = smallest_peak(&p);
            // More repeats than were listed may go lower, never higher.
            assert!(smallest <= *best.keys().next().unwrap());
            let mut cheapest_so_far = f64::INFINITY;
            for (peak, cost) in &best {
                cheapest_so_far = cost.min(cheapest_so_far);
                let found = cheapest(&p, *peak, &costs(&p)).unwrap();
                let score = evaluate(&p, &found.schedule).unwrap();
                assert!(score.peak_above_static_bytes <= *peak);
                assert!((score.cost - found.price).abs() < 1e-9);
                let few = found.schedule.len() <= p.ops.len() + 3;
                assert!(found.price <= cheapest_so_far + 1e-9);
                if few {
                    assert!((found.price - cheapest_so_far).abs() < 1e-9);
                }
                repeats += found.schedule.len() - p.ops.len();
            }
            if let Some(below) = smallest.checked_sub(1) {
                assert_eq!(cheapest(&p, below, &costs(&p)), None);
                impossible += 1;
            }
        }
        assert!(repeats > 100 && impossible > 200, "{repeats} {impossible}");
    }

    #[test]
    fn with_room_for_all_nothing_is_repeated() {
        let mut r = Random(6);
        for _ in 0..100 {
            let p = random_dag(&mut r, 9, Shape::Any);
            let given = evaluate(&p, &p.given_order()).unwrap();
            let best = cheapest(&p, given.peak_above_static_bytes, &costs(&p)).unwrap();
            assert!((best.price - given.cost).abs() < 1e-9);
        }
    }
}
