//! Finds other orders in which the ops of a problem may run once each, with smaller peaks.
//!
//! An order is written from the first step on or from the last one back. The next op is always the ready one that changes the
//! live bytes the least: any such op (greedy), or the next one of a known order unless another frees memory. No order made
//! this way is better for certain; [`evaluate`] decides. What an op frees is known exactly: readers of a storage are
//! counted, and the last one is the exclusive or of those that remain. O(n log n).
//!
//! Ops that must keep their order keep it. Where all forward ops come before all backward ones, they still do.

use crate::index::{OpIdx, ValueIdx};
use crate::problem::{OpPhase, Problem, ValueKind};
use crate::schedule::evaluate;
use std::collections::BTreeSet;

/// At most so many orders are worth a search each.
const MOST_ORDERS: usize = 2;

/// Returns the orders whose peak is below that of the given one, the lowest first, each a permutation of all ops.
pub fn lower(problem: &Problem) -> Vec<Vec<OpIdx>> {
    let given = problem.given_order();
    let peak = |order: &Vec<OpIdx>| evaluate(problem, order).ok().map(|s| s.peak_bytes);
    let Some(most) = peak(&given) else {
        return Vec::new();
    };
    let facts = Facts::new(problem);
    let early = facts.list(&given, Direction::Forth, false);
    let late = facts.list(&given, Direction::Back, false);
    let both = facts.list(&early, Direction::Back, false);
    let greedy = [Direction::Forth, Direction::Back].map(|way| facts.list(&given, way, true));
    let mut found: Vec<(u64, Vec<OpIdx>)> = Vec::new();
    for order in [both, early, late].into_iter().chain(greedy) {
        match peak(&order) {
            Some(bytes) if bytes < most && found.iter().all(|f| f.1 != order) => {
                found.push((bytes, order));
            }
            _ => {}
        }
    }
    found.sort_by_key(|f| f.0);
    found.truncate(MOST_ORDERS);
    found.into_iter().map(|f| f.1).collect()
}

/// From which end an order is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forth,
    Back,
}

/// What both directions need to know of a problem.
struct Facts {
    /// Ops that must run before each, and after each.
    before: Vec<Vec<u32>>,
    after: Vec<Vec<u32>>,
    /// Storages that each op reads or looks at, and makes; each once.
    reads: Vec<Vec<u32>>,
    makes: Vec<Vec<u32>>,
    /// Ops that read each storage.
    readers: Vec<Vec<u32>>,
    bytes: Vec<i64>,
    is_output: Vec<bool>,
    is_backward: Vec<bool>,
    /// Whether all forward ops come before all backward ones.
    is_divided: bool,
}

impl Facts {
    fn new(problem: &Problem) -> Facts {
        let (ops, roots) = (problem.ops.len(), problem.roots());
        let mut facts = Facts {
            before: vec![Vec::new(); ops],
            after: vec![Vec::new(); ops],
            reads: vec![Vec::new(); ops],
            makes: vec![Vec::new(); ops],
            readers: vec![Vec::new(); problem.values.len()],
            bytes: problem.values.iter().map(|v| v.bytes as i64).collect(),
            is_output: vec![false; problem.values.len()],
            is_backward: Vec::with_capacity(ops),
            is_divided: true,
        };
        for v in &problem.outputs {
            facts.is_output[roots[*v].0] = true;
        }
        let mut last_in_turn = None;
        for (o, op) in problem.ops.iter().enumerate() {
            let moves = |v: &ValueIdx| problem.values[roots[*v]].kind != ValueKind::Static;
            let made = |v: &&ValueIdx| problem.values[**v].producer.is_some();
            let makers = op.ins.iter().filter(made);
            let mut before: Vec<u32> = makers
                .filter_map(|v| problem.values[*v].producer)
                .map(|p| p.0 as u32)
                .collect();
            if op.ordered {
                before.extend(last_in_turn.replace(o as u32));
            }
            before.sort_unstable();
            before.dedup();
            for p in &before {
                facts.after[*p as usize].push(o as u32);
            }
            facts.before[o] = before;
            let owned = |v: &&ValueIdx| problem.values[**v].view_of.is_none();
            let own = op.outs.iter().filter(owned).copied().filter(moves);
            facts.makes[o] = own.map(|v| v.0 as u32).collect();
            let read = op.ins.iter().copied().filter(moves);
            let mut read: Vec<u32> = read.map(|v| roots[v].0 as u32).collect();
            read.sort_unstable();
            read.dedup();
            for root in &read {
                facts.readers[*root as usize].push(o as u32);
            }
            facts.reads[o] = read;
            let is_backward = op.phase == OpPhase::Backward;
            facts.is_divided &= is_backward || facts.is_backward.last() != Some(&true);
            facts.is_backward.push(is_backward);
        }
        facts
    }

    /// Returns an order of all ops that starts from `known`, which is one. Ties go to the op that `known` has first, or last
    /// where the list is written from the end.
    fn list(&self, known: &[OpIdx], way: Direction, is_greedy: bool) -> Vec<OpIdx> {
        let ops = known.len();
        let mut list = List {
            facts: self,
            way,
            is_greedy,
            rank: vec![0; ops],
            waits: Vec::with_capacity(ops),
            left: self.readers.iter().map(|r| r.len() as u32).collect(),
            others: vec![0; self.readers.len()],
            is_alive: self.is_output.clone(),
            ready: BTreeSet::new(),
            change: vec![None; ops],
        };
        for (place, o) in known.iter().enumerate() {
            list.rank[o.0] = match way {
                Direction::Forth => place as u32,
                Direction::Back => (ops - place) as u32,
            };
        }
        for (root, readers) in self.readers.iter().enumerate() {
            list.others[root] = readers.iter().fold(0, |all, o| all ^ o);
        }
        let (sources, is_second): (&[Vec<u32>], bool) = match way {
            Direction::Forth => (&self.before, true),
            Direction::Back => (&self.after, false),
        };
        // The half that comes second in this direction waits for the whole other half.
        let waits_for_half =
            |o: usize| u32::from(self.is_divided && self.is_backward[o] == is_second);
        let mut first_half = (0..ops).filter(|o| waits_for_half(*o) == 0).count();
        list.waits
            .extend((0..ops).map(|o| sources[o].len() as u32 + waits_for_half(o)));
        let mut order = Vec::with_capacity(ops);
        if first_half == 0 {
            list.waits.iter_mut().for_each(|n| *n -= 1);
        }
        for o in 0..ops {
            list.offer_if_free(o);
        }
        while let Some((_, _, o)) = list.ready.pop_first() {
            let o = o as usize;
            order.push(OpIdx(o));
            list.run(o);
            if waits_for_half(o) == 0 {
                first_half -= 1;
                if first_half == 0 {
                    for other in (0..ops).filter(|o| waits_for_half(*o) == 1) {
                        list.waits[other] -= 1;
                        list.offer_if_free(other);
                    }
                }
            }
        }
        if way == Direction::Back {
            order.reverse();
        }
        order
    }
}

/// A list being written.
struct List<'a> {
    facts: &'a Facts,
    way: Direction,
    is_greedy: bool,
    rank: Vec<u32>,
    /// What each op still waits for.
    waits: Vec<u32>,
    /// Readers of each storage that are not listed, and the exclusive or of them.
    left: Vec<u32>,
    others: Vec<u32>,
    /// From the end back: storages that something behind reads.
    is_alive: Vec<bool>,
    ready: BTreeSet<(i64, u32, u32)>,
    /// What a ready op is listed under.
    change: Vec<Option<i64>>,
}

impl List<'_> {
    fn offer_if_free(&mut self, o: usize) {
        if self.waits[o] == 0 && self.change[o].is_none() {
            self.offer(o);
        }
    }

    /// Puts an op that waits for nothing where it belongs.
    fn offer(&mut self, o: usize) {
        let bytes = self.change_bytes(o);
        let key = if self.is_greedy { bytes } else { bytes.min(0) };
        if let Some(old) = self.change[o].replace(key) {
            self.ready.remove(&(old, self.rank[o], o as u32));
        }
        self.ready.insert((key, self.rank[o], o as u32));
    }

    /// Returns by how many bytes the live set grows if this op is next.
    fn change_bytes(&self, o: usize) -> i64 {
        let facts = self.facts;
        let sum = |list: &[u32], counts: &dyn Fn(usize) -> bool| -> i64 {
            let counted = list.iter().map(|v| *v as usize).filter(|v| counts(*v));
            counted.map(|v| facts.bytes[v]).sum()
        };
        match self.way {
            Direction::Forth => {
                let stays = |v: usize| facts.is_output[v] || !facts.readers[v].is_empty();
                let dies = |v: usize| self.left[v] == 1 && !facts.is_output[v];
                sum(&facts.makes[o], &stays) - sum(&facts.reads[o], &dies)
            }
            Direction::Back => {
                let begins = |v: usize| !self.is_alive[v];
                let ends = |v: usize| self.is_alive[v];
                sum(&facts.reads[o], &begins) - sum(&facts.makes[o], &ends)
            }
        }
    }

    fn run(&mut self, o: usize) {
        let facts = self.facts;
        let mut touched: Vec<u32> = Vec::new();
        for v in &facts.reads[o] {
            let v = *v as usize;
            match self.way {
                Direction::Forth => {
                    self.left[v] -= 1;
                    self.others[v] ^= o as u32;
                    if self.left[v] == 1 {
                        touched.push(self.others[v]);
                    }
                }
                Direction::Back => {
                    if !std::mem::replace(&mut self.is_alive[v], true) {
                        touched.extend(&facts.readers[v]);
                    }
                }
            }
        }
        self.change[o] = Some(i64::MAX);
        let next = match self.way {
            Direction::Forth => &facts.after[o],
            Direction::Back => &facts.before[o],
        };
        for other in next {
            self.waits[*other as usize] -= 1;
            self.offer_if_free(*other as usize);
        }
        for other in touched {
            let is_listed = matches!(self.change[other as usize], Some(i64::MAX) | None);
            if !is_listed {
                self.offer(other as usize);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;
    use crate::testing::{Shape, random_dag};

    #[test]
    fn every_order_is_one_and_keeps_turns_and_halves() {
        let mut r = Random(41);
        let mut lowered = 0;
        for n in 0..400 {
            let shape = [Shape::Any, Shape::Training][n % 2];
            let mut p = random_dag(&mut r, 2 + n % 40, shape);
            for op in &mut p.ops {
                op.ordered = r.below(5) == 0;
            }
            let given = p.given_order();
            let facts = Facts::new(&p);
            for way in [Direction::Forth, Direction::Back] {
                for greedy in [false, true] {
                    let order = facts.list(&given, way, greedy);
                    let mut all = order.clone();
                    all.sort_unstable();
                    assert_eq!(all, given, "problem {n}");
                    evaluate(&p, &order).unwrap();
                    let turns: Vec<OpIdx> = order
                        .iter()
                        .copied()
                        .filter(|o| p.ops[*o].ordered)
                        .collect();
                    assert!(turns.is_sorted(), "problem {n}");
                    if facts.is_divided {
                        assert!(order.is_sorted_by_key(|o| p.ops[*o].phase == OpPhase::Backward));
                    }
                }
            }
            lowered += usize::from(!lower(&p).is_empty());
        }
        assert!(lowered > 40, "{lowered}");
    }
}
