//! The linear program behind the bound.
//!
//! `A_k(v)` means that value v stays at position p_k, and `R_kl(o)` that op o, which has run by p_k, runs again between p_k and p_l.
//! For each pair of positions k < l, where l may also stand for the end of the schedule:
//!
//! - an operand that a first run between p_k and p_l reads was resident at p_k, or its maker runs again between them;
//! - so was what stays at p_l, and what an op reads that runs again between them;
//! - `R_kl(o)` is at most the sum of the `R_j,j+1(o)` of the windows between p_k and p_l, and these are paid.
//!
//! What stays at p_k fits beside the op that runs there. The limit is also stated in a rounded form, which holds because a value
//! stays whole or not at all ([`round`]), and rounded anew where it cuts off the last solution
//! ([`rounding`](crate::solve::rounding)).
//! Without pairs that span several windows, half a recomputation in each of two windows would pass for a whole one. Pairs of
//! neighbours, and of each position with the end, are in the program from the beginning. Others are added when a solution violates
//! them.

use crate::solve::compact::{Dag, NONE};
use crate::solve::linear_program::{Bounded, LinearProgram};
use crate::solve::rounding::Packing;
use crate::solve::work::Work;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// Most units in which the bytes at a position are rounded.
const MOST_UNITS: usize = 6;

/// A value that stays for more than this above what demands it is not counted by that demand.
const LOOSE: f64 = 1e-2;

/// A pair is added if it demands repeats that cost more than this share of the whole cost above those paid.
const LEAST_LACK: f64 = 1e-3;

/// What the program says of a value at a position.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum State {
    /// Not made yet.
    Absent,
    /// Operand or result of the op at the position.
    Pinned,
    /// The variable of its residency.
    Choice(u32),
}

/// A row that says that what runs again in a divided window does so in one of its parts.
#[derive(Clone)]
struct Split {
    row: usize,
    /// What the op weighs: the dual that the row begins with.
    weight: f64,
    /// The variable of the second part; [`NONE`] if the op cannot run again there.
    part: u32,
}

/// Positions and what must hold at and between them.
#[derive(Clone)]
pub(super) struct Program<'a> {
    pub(super) dag: &'a Dag,
    pub(super) cap: i64,
    pub(super) weight: &'a [i64],
    pub(super) program: LinearProgram,
    /// Ascending.
    pub(super) positions: Vec<usize>,
    pub(super) states: Vec<Vec<State>>,
    /// For each window and op, the variable that says that the op runs again there; [`NONE`] if it cannot.
    pub(super) windows: Vec<Vec<u32>>,
    /// For each variable of a residency, who demands it: the variable of the op that could make the value again, and the variable of
    /// what needs the value; `None` if every schedule needs it.
    demands: FxHashMap<u32, Vec<(Option<u32>, Option<u32>)>>,
    /// The rows that join a divided window to its parts.
    splits: Vec<Split>,
    /// The values that need not stay, each with the position from which they may have to ([`Program::settle`]).
    needless: Vec<(usize, usize)>,
    /// How often `needless` changed.
    pub(super) settled: usize,
    /// The pairs in the program, beside neighbours and those with the end.
    pairs: FxHashSet<(usize, usize)>,
}

impl<'a> Program<'a> {
    /// Returns the program for positions, which ascend.
    pub(super) fn new(
        dag: &'a Dag,
        cap: i64,
        weight: &'a [i64],
        positions: &[usize],
    ) -> Program<'a> {
        let mut program = Program {
            dag,
            cap,
            weight,
            program: LinearProgram::default(),
            positions: positions.to_vec(),
            states: Vec::new(),
            windows: Vec::new(),
            demands: FxHashMap::default(),
            splits: Vec::new(),
            needless: Vec::new(),
            settled: 0,
            pairs: FxHashSet::default(),
        };
        for (k, step) in positions.iter().enumerate() {
            program.limit(k, *step as u32);
        }
        for k in 0..positions.len() {
            let window = program.between(k, k + 1, true);
            program.windows.push(window);
        }
        for k in 0..positions.len().saturating_sub(1) {
            program.join(k, positions.len());
        }
        program.settle();
        program
    }

    /// Adds a position. The window that it divides becomes a pair, joined to its two parts.
    pub(super) fn add(&mut self, step: usize) {
        let k = self.positions.partition_point(|p| *p < step);
        self.positions.insert(k, step);
        self.limit(k, step as u32);
        let window = self.between(k, k + 1, true);
        self.windows.insert(k, window.clone());
        if k > 0 {
            let before = self.between(k - 1, k, true);
            let old = std::mem::replace(&mut self.windows[k - 1], before);
            for (o, run) in old.iter().enumerate().filter(|(_, run)| **run != NONE) {
                self.program.set_free(*run);
                self.splits.push(Split {
                    row: self.program.rows(),
                    weight: self.weight[o] as f64,
                    part: window[o],
                });
                self.pay(o, *run, k - 1..k + 1);
            }
            if let Some(after) = self.positions.get(k + 1) {
                self.pairs.insert((self.positions[k - 1], *after));
            }
        }
        if k + 1 < self.positions.len() {
            self.join(k, self.positions.len());
        }
        self.settle();
    }

    /// Extends a solution to the rows and variables that were added since, so that it proves the same bound as before: a window that
    /// was divided is paid by the part that takes its place.
    pub(super) fn extend(&self, made: &mut Bounded) {
        let from = made.duals.len();
        made.duals.resize(self.program.rows(), 0.0);
        made.is_in.resize(self.program.rows(), false);
        made.basis
            .extend(self.program.columns(), self.program.rows());
        for split in self.splits.iter().filter(|split| split.row >= from) {
            made.duals[split.row] = split.weight;
            if split.part != NONE {
                made.basis.slacks[split.row] = 0.0;
                made.basis.variables[split.part as usize] = 1.0;
            }
        }
    }

    /// Returns the values that may stay at positions, and the variables that say so.
    pub(super) fn residencies(&self) -> impl Iterator<Item = (usize, u32)> {
        let states = self
            .states
            .iter()
            .flat_map(|states| states.iter().enumerate());
        states.filter_map(|(v, state)| match state {
            State::Choice(stays) => Some((v, *stays)),
            _ => None,
        })
    }

    /// Limits the bytes at position `k`, where op `op` runs.
    fn limit(&mut self, k: usize, op: u32) {
        let (dag, cap, program) = (self.dag, self.cap, &mut self.program);
        let made = |v: u32| dag.maker[v as usize] == NONE || dag.maker[v as usize] <= op;
        let mut at: Vec<State> = (0..dag.values() as u32)
            .map(|v| match made(v) {
                true => State::Choice(program.variable(0.0)),
                false => State::Absent,
            })
            .collect();
        // A sole operand that the op can write over stays only if there is room for it beside the result.
        let over = dag.in_place_operands(op);
        for v in dag.ins(op).iter().chain(dag.outs(op)) {
            if over != [*v] {
                at[*v as usize] = State::Pinned;
            }
        }
        let share = |bytes: i64| bytes as f64 / cap.max(1) as f64;
        let terms = at.iter().zip(&dag.size).filter_map(|(state, size)| {
            let State::Choice(x) = state else { return None };
            Some((*x, -share(*size)))
        });
        program.at_least(share(dag.least_bytes(op)) - 1.0, terms);
        round(dag, cap, op, &at, program);
        self.states.insert(k, at);
    }

    /// Fixes the residencies of values that need not stay. If a free op makes a value, and its operands together are no larger, the
    /// operands can stay instead. This holds before the first position whose op uses the value. If a new position uses it earlier,
    /// all that was fixed is forgotten.
    fn settle(&mut self) {
        let dag = self.dag;
        let needless = (0..dag.values()).filter_map(|v| {
            let o = dag.remaker(v as u32)?;
            let ins = dag.ins(o).iter().map(|u| dag.size[*u as usize]);
            let is_needless = self.weight[o as usize] == 0 && ins.sum::<i64>() <= dag.size[v];
            let mut uses = self.positions.iter().zip(&self.states);
            let first = uses.find(|(_, states)| states[v] == State::Pinned);
            is_needless.then(|| (v, first.map_or(dag.ops(), |(step, _)| *step)))
        });
        let needless: Vec<(usize, usize)> = needless.collect();
        if needless != self.needless {
            self.program.fixed.fill(None);
            self.needless = needless;
            self.settled += 1;
        }
        for (v, until) in &self.needless {
            for (step, states) in self.positions.iter().zip(&self.states) {
                if let State::Choice(x) = states[*v]
                    && step < until
                {
                    self.program.fixed[x as usize] = Some(false);
                }
            }
        }
    }

    /// Adds what position `k` and a later one, or the end, demand of each other. Returns the variables of ops that run again.
    fn between(&mut self, k: usize, l: usize, is_paid: bool) -> Vec<u32> {
        let dag = self.dag;
        let mut runs = vec![NONE; dag.ops()];
        let mut stack = Vec::new();
        let from = self.positions[k];
        let to = self.positions.get(l).copied();
        let mut read = vec![false; dag.values()];
        for o in from + 1..to.map_or(dag.ops(), |to| to + 1) {
            for v in dag.ins(o as u32) {
                read[*v as usize] = true;
            }
        }
        for v in dag.outputs.iter().filter(|_| to.is_none()) {
            read[*v as usize] = true;
        }
        for v in 0..dag.values() as u32 {
            if read[v as usize] {
                self.demand(k, v, None, is_paid, &mut runs, &mut stack);
            } else if to.is_some()
                && let State::Choice(x) = self.states[l][v as usize]
            {
                self.demand(k, v, Some(x), is_paid, &mut runs, &mut stack);
            }
        }
        while let Some(o) = stack.pop() {
            for v in dag.ins(o) {
                let by = Some(runs[o as usize]);
                self.demand(k, *v, by, is_paid, &mut runs, &mut stack);
            }
        }
        runs
    }

    /// Demands that a value is resident at position `k` or made again after it; where `by` holds, if it is given.
    fn demand(
        &mut self,
        k: usize,
        v: u32,
        by: Option<u32>,
        is_paid: bool,
        runs: &mut [u32],
        stack: &mut Vec<u32>,
    ) {
        let State::Choice(stays) = self.states[k][v as usize] else {
            return;
        };
        let again = self.dag.remaker(v).map(|o| {
            let run = &mut runs[o as usize];
            if *run == NONE {
                let weight = self.weight[o as usize] as f64;
                *run = self.program.variable(if is_paid { weight } else { 0.0 });
                stack.push(o);
            }
            *run
        });
        self.demands.entry(stays).or_default().push((again, by));
        let terms = [(Some(stays), 1.0), (again, 1.0), (by, -1.0)];
        let terms = terms.into_iter().filter_map(|(x, c)| Some((x?, c)));
        self.program
            .at_least(f64::from(u8::from(by.is_none())), terms);
    }

    /// Adds the demands of a pair that spans several windows.
    fn join(&mut self, k: usize, l: usize) {
        let runs = self.between(k, l, false);
        for (o, run) in runs.iter().enumerate().filter(|(_, run)| **run != NONE) {
            self.pay(o, *run, k..l);
        }
    }

    /// Adds the pairs that `point` violates; returns how many.
    pub(super) fn join_pairs(&mut self, point: &[f64]) -> usize {
        let most = LEAST_LACK * self.dag.total_price as f64;
        let mut pairs = Vec::new();
        for k in 0..self.positions.len() {
            for l in k + 2..self.positions.len() {
                let pair = (self.positions[k], self.positions[l]);
                if !self.pairs.contains(&pair) && self.lack(k, l, point) > most {
                    pairs.push((k, l));
                    self.pairs.insert(pair);
                }
            }
        }
        pairs.iter().for_each(|(k, l)| self.join(*k, *l));
        pairs.len()
    }

    /// Returns by how much the repeats that positions `k` and `l` demand cost more than those paid between them.
    fn lack(&self, k: usize, l: usize, point: &[f64]) -> f64 {
        let dag = self.dag;
        let at = |x: u32| point.get(x as usize).copied().unwrap_or(0.0);
        let choice = |state: &State, other: f64| match state {
            State::Choice(x) => at(*x),
            _ => other,
        };
        // How much of each value is needed.
        let mut need: Vec<f64> = self.states[l].iter().map(|s| choice(s, 0.0)).collect();
        for o in self.positions[k] + 1..=self.positions[l] {
            for v in dag.ins(o as u32) {
                need[*v as usize] = 1.0;
            }
        }
        let mut lack = 0.0;
        for o in (0..=self.positions[k] as u32).rev() {
            let outs = dag.outs(o).iter().map(|v| *v as usize);
            let made = outs.filter(|v| dag.remaker(*v as u32) == Some(o));
            let missing = made.map(|v| need[v] - choice(&self.states[k][v], 1.0));
            let run = missing.fold(0.0, f64::max);
            for v in dag.ins(o) {
                need[*v as usize] = need[*v as usize].max(run);
            }
            let windows = self.windows[k..l].iter().map(|w| w[o as usize]);
            let paid: f64 = windows.filter(|x| *x != NONE).map(at).sum();
            lack += (run - paid).max(0.0) * self.weight[o as usize] as f64;
        }
        lack
    }

    /// Demands that an op runs again in some of these windows if `run` holds.
    fn pay(&mut self, o: usize, run: u32, windows: Range<usize>) {
        let windows = self.windows[windows].iter().map(|w| w[o]);
        let paid = windows.filter(|x| *x != NONE).map(|x| (x, 1.0));
        let terms: Vec<(u32, f64)> = paid.chain([(run, -1.0)]).collect();
        self.program.at_least(0.0, terms);
    }

    /// Builds a schedule that keeps, at each position, the values whose fraction in `point` exceeds `share`. Other values are recomputed
    /// just before they are read. The schedule may exceed the budget.
    pub(super) fn schedule(&self, point: &[f64], share: f64) -> Vec<u32> {
        let dag = self.dag;
        let mut there = vec![false; dag.values()];
        for v in &dag.placeholders {
            there[*v as usize] = true;
        }
        let mut schedule = Vec::new();
        for o in 0..dag.ops() as u32 {
            for v in dag.ins(o) {
                make(dag, *v, &mut there, &mut schedule);
            }
            let position = self.positions.binary_search(&(o as usize));
            let states = position.ok().map(|k| &self.states[k]);
            let stays = |state: &State| match state {
                State::Absent => false,
                State::Pinned => true,
                State::Choice(x) => point.get(*x as usize).is_some_and(|x| *x > share),
            };
            for (v, state) in states.into_iter().flatten().enumerate() {
                if stays(state) && dag.maker[v] != o {
                    make(dag, v as u32, &mut there, &mut schedule);
                }
            }
            schedule.push(o);
            for v in dag.outs(o) {
                there[*v as usize] = true;
            }
            if let Some(states) = states {
                there = states.iter().map(stays).collect();
            }
        }
        schedule
    }

    /// Returns a lower bound on the cost, at most `enough`; also fixes the decisions on which all schedules that cost less than that
    /// agree ([`LinearProgram::bound_and_fix`]).
    pub(super) fn solve_fixing(
        &mut self,
        enough: f64,
        known: &Bounded,
        work: &mut Work,
    ) -> Bounded {
        self.program.bound_and_fix(enough, known, work)
    }

    /// Adds the pairs and the rounded limits on bytes that `point` violates; returns how many.
    pub(super) fn tighten(&mut self, point: &[f64]) -> usize {
        let pairs = self.join_pairs(point);
        // Variables that are newer than the point are 0.
        let mut point = point.to_vec();
        point.resize(self.program.columns(), 0.0);
        pairs + self.cut(&point)
    }

    /// Adds the rounded limits on bytes that `point` violates; returns how many.
    fn cut(&mut self, point: &[f64]) -> usize {
        let at = |x: u32| point[x as usize];
        let mut made = Vec::new();
        for (step, states) in self.positions.iter().zip(&self.states) {
            let room = self.cap - self.dag.least_bytes(*step as u32);
            let choices = states
                .iter()
                .zip(&self.dag.size)
                .filter_map(|(state, size)| {
                    let State::Choice(x) = state else { return None };
                    Some((*x, *size))
                });
            // Of what stays at the position.
            let stays = Packing {
                terms: choices.collect(),
                most: room,
            };
            // The same, where a value stays because it is not made again.
            let mut again: FxHashMap<u32, i64> = FxHashMap::default();
            let mut most = room;
            for (x, size) in &stays.terms {
                let need = |(again, by): &(Option<u32>, Option<u32>)| {
                    by.map_or(1.0, at) - again.map_or(0.0, at)
                };
                let demands = self.demands.get(x).into_iter().flatten();
                let tightest = demands
                    .map(|d| (need(d), d.1.is_none(), d))
                    .max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                match tightest {
                    Some((need, _, (run, by))) if need > at(*x) - LOOSE => {
                        run.iter()
                            .for_each(|run| *again.entry(*run).or_default() -= size);
                        by.iter()
                            .for_each(|by| *again.entry(*by).or_default() += size);
                        most -= if by.is_none() { *size } else { 0 };
                    }
                    _ => *again.entry(*x).or_default() += size,
                }
            }
            let mut terms: Vec<(u32, i64)> = again.into_iter().filter(|t| t.1 != 0).collect();
            terms.sort_unstable();
            let again = Packing { terms, most };
            made.extend(stays.round(point));
            made.extend(again.round(point));
        }
        for row in &made {
            let scale = row.terms.iter().map(|t| t.1.abs()).fold(0.0, f64::max);
            let terms = row.terms.iter().map(|(x, part)| (*x, -part / scale));
            self.program.at_least(-row.most / scale, terms);
        }
        made.len()
    }
}

/// Appends to a schedule the ops that recompute a value, unless it is there.
fn make(dag: &Dag, v: u32, there: &mut [bool], schedule: &mut Vec<u32>) {
    let mut stack = vec![v];
    while let Some(v) = stack.last().copied() {
        let maker = dag.remaker(v).filter(|_| !there[v as usize]);
        let known = stack.len();
        if let Some(o) = maker {
            stack.extend(dag.ins(o).iter().filter(|v| !there[**v as usize]));
            if stack.len() > known {
                continue;
            }
            schedule.push(o);
            for v in dag.outs(o) {
                there[*v as usize] = true;
            }
        }
        there[v as usize] = true;
        stack.pop();
    }
}

/// Adds the limit on bytes at a position once more for each of a few units, rounded to whole units. This is allowed because a value
/// stays whole or not at all (mixed-integer rounding; Nemhauser and Wolsey, 1990).
fn round(dag: &Dag, cap: i64, op: u32, at: &[State], program: &mut LinearProgram) {
    let mut room = cap - dag.least_bytes(op);
    let mut is_read = dag.is_output.clone();
    for o in op + 1..dag.ops() as u32 {
        for v in dag.ins(o) {
            is_read[*v as usize] = true;
        }
    }
    let mut choices = Vec::new();
    for (v, state) in at.iter().enumerate() {
        let State::Choice(x) = state else { continue };
        match is_read[v] && dag.remaker(v as u32).is_none() {
            true => room -= dag.size[v],
            false => choices.push((*x, dag.size[v])),
        }
    }
    let mut units: Vec<i64> = choices
        .iter()
        .map(|c| c.1)
        .filter(|size| *size <= room)
        .collect();
    units.sort_unstable();
    units.dedup();
    for unit in units.into_iter().rev().take(MOST_UNITS) {
        let (whole, rest) = (room / unit, room % unit);
        let terms = choices.iter().filter_map(|(x, size)| {
            let over = (size % unit - rest).max(0) as f64 / (unit - rest) as f64;
            let part = (size / unit) as f64 + over;
            (part > 0.0).then(|| (*x, -part / whole as f64))
        });
        program.at_least(-1.0, terms);
    }
}
