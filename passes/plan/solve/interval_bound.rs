//! A lower bound that counts an op once for each time that it must run again.
//!
//! [`super::multi_cut_bound`] pays an op once, however often it runs again. Here positions p₁ < p₂ < … of the given order divide a
//! schedule into windows. `A_k(v)` means that value v stays at p_k, and `R_kl(o)` that op o, which has run by p_k, runs
//! again between p_k and p_l. For each pair k < l, and for the end of the schedule as l:
//!
//! - an operand that a first run between p_k and p_l reads was resident at p_k, or its maker runs again between them;
//! - so was what stays at p_l, and what an op reads that runs again between them;
//! - `R_kl(o)` is at most the sum of the `R_j,j+1(o)` of the windows between p_k and p_l, and these are paid.
//!
//! What stays at p_k fits beside the op that runs there. The limit is also stated in a rounded form, which holds because a value
//! stays whole or not at all ([`round`]). A linear program with all variables between 0 and 1 bounds the cost.
//! Without pairs that span several windows, half a recomputation in each of two windows would pass for a whole one.
//!
//! Where the gap stays wide, positions whose bytes are worth nothing are left out, and two things follow that need whole
//! decisions: limits on bytes are rounded anew where they cut off the last solution ([`rounding`](super::rounding)), and the
//! number of repeats of an op, or of all ops of one weight, is fixed from below and above (`branch`). Then a
//! schedule is built from the last solution. If some first runs in it exceed the budget, the one that needs the most memory
//! becomes a position too, and all of this is repeated.

mod branch;

use super::compact::{Dag, NONE};
use super::linear_program::{Bounded, LinearProgram};
use super::local_search::FAR_GAP;
use super::rounding::Packing;
use super::simulate::{Simulation, first_runs};
use super::work::Work;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Limits of the number of stretches of full steps. Each gives up to two candidate positions. Their number times that of ops stays
/// near [`CANDIDATE_OPS`]: with more candidates, the linear program is not solved within its work limit.
const LEAST_STRETCHES: usize = 12;
const MOST_STRETCHES: usize = 40;
const CANDIDATE_OPS: usize = 14_000;

/// Most positions whose pairs all count.
const MOST_POSITIONS: usize = 8;

/// Most ops at all positions together; large graphs get fewer positions.
const MOST_OPS: usize = 6_000;

/// Most units in which the bytes at a position are rounded.
const MOST_UNITS: usize = 6;

/// A value that stays for more than this above what demands it is not counted by that demand.
const LOOSE: f64 = 1e-2;

/// Cuts go on while a round raises the bound by this share of the whole cost; each takes this share of the work.
const LEAST_GAIN: f64 = 1e-3;
const CUT_SHARE: u64 = 3;

/// Branching starts if the gap is below the first share of the whole cost, and stops once it is below the second.
const BRANCH_GAP: f64 = 0.12;
const CLOSE_GAP: f64 = 0.9 * FAR_GAP;

/// Branching and adding positions may take this many times the work of the first bound, but no more than the units below, which
/// take about half a minute.
const BRANCH_SHARE: u64 = 20;
const MOST_BRANCH_UNITS: u64 = 8_000_000_000;

/// The exact bound never falls when a position is added. If the computed one falls below this share of the last, the program has
/// become too large to be solved with the work allowed, and no more positions are added.
const SOLVED: f64 = 0.95;

/// Positions whose bytes are worth a smaller share of the whole cost are left out.
const LEAST_PRICE: f64 = 1e-5;

/// The share of the work that finds which positions matter.
const CHOICE_SHARE: u64 = 3;

/// What the program says of a value at a position.
#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Not made yet.
    Absent,
    /// Operand or result of the op at the position.
    Pinned,
    /// The variable of its residency.
    Choice(u32),
}

struct Program<'a> {
    dag: &'a Dag,
    weight: &'a [i64],
    program: LinearProgram,
    positions: &'a [usize],
    states: Vec<Vec<State>>,
    /// The rows that limit the bytes at each position.
    bytes: Vec<Range<usize>>,
    /// For each window, the variable of each op that may run again there; [`NONE`] without one.
    windows: Vec<Vec<u32>>,
    /// For each variable of a residency: what makes the value again, and what needs it, if not all schedules do.
    demands: FxHashMap<u32, Vec<(Option<u32>, Option<u32>)>>,
}

impl<'a> Program<'a> {
    /// `positions` ascend.
    fn new(dag: &'a Dag, cap: i64, weight: &'a [i64], positions: &'a [usize]) -> Program<'a> {
        let mut program = LinearProgram::default();
        let (mut states, mut bytes) = (Vec::new(), Vec::new());
        for step in positions {
            let op = *step as u32;
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
            let first = program.rows();
            program.at_least(share(dag.least_bytes(op)) - 1.0, terms);
            round(dag, cap, op, &at, &mut program);
            bytes.push(first..program.rows());
            states.push(at);
        }
        let mut program = Program {
            dag,
            weight,
            program,
            positions,
            states,
            bytes,
            windows: Vec::new(),
            demands: FxHashMap::default(),
        };
        for k in 0..positions.len() {
            let window = program.between(k, k + 1, true);
            program.windows.push(window);
        }
        program
    }

    /// Returns the program in which all pairs count.
    fn joined(dag: &'a Dag, cap: i64, weight: &'a [i64], positions: &'a [usize]) -> Program<'a> {
        let mut program = Program::new(dag, cap, weight, positions);
        for k in 0..positions.len() {
            for l in k + 2..=positions.len() {
                program.join(k, l);
            }
        }
        program
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
            let windows = self.windows[k..l].iter().map(|w| w[o]);
            let paid = windows.filter(|x| *x != NONE).map(|x| (x, 1.0));
            self.program
                .at_least(0.0, paid.chain([(*run, -1.0)]).collect::<Vec<_>>());
        }
    }

    /// Returns what the bytes at each position are worth.
    fn prices(&self, made: &Bounded) -> Vec<f64> {
        let price = |rows: &Range<usize>| made.duals[rows.clone()].iter().sum::<f64>();
        self.bytes.iter().map(price).collect()
    }

    /// Builds a schedule from a solution: at the positions it keeps the values that `point` keeps, and it recomputes missing values
    /// just before they are read. Returns the op whose first run needs the most memory there, if that exceeds `cap` and the op is
    /// not a position yet.
    fn fullest(&self, cap: i64, point: &[f64]) -> Option<usize> {
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
                State::Choice(x) => point[*x as usize] > 0.5,
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
        let mut simulation = Simulation::default();
        simulation.run(dag, &schedule);
        let firsts = first_runs(dag, &schedule);
        let is_new = |t: usize| firsts[t] && !self.positions.contains(&(schedule[t] as usize));
        let full = (0..schedule.len()).filter(|t| is_new(*t) && simulation.live[*t] > cap);
        let fullest = full.max_by_key(|t| (simulation.live[*t], *t));
        fullest.map(|t| schedule[t] as usize)
    }

    /// Adds rounded limits on bytes that cut `point` off; returns how many.
    fn cut(&mut self, cap: i64, point: &[f64]) -> usize {
        let at = |x: u32| point[x as usize];
        let mut made = Vec::new();
        for (step, states) in self.positions.iter().zip(&self.states) {
            let room = cap - self.dag.least_bytes(*step as u32);
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

/// Adds the limit on bytes at a position in units of some sizes, rounded: values stay whole or not at all (mixed-integer
/// rounding; Nemhauser and Wolsey, 1990).
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

/// Returns a bound in weight over the cost of running every op once; `above` is what a known plan weighs over that. At least 0.
pub fn intervals(dag: &Dag, cap: i64, weight: &[i64], above: i64, work: &mut Work) -> i64 {
    let mut positions = positions(dag, cap);
    let most = (MOST_OPS / dag.ops().max(1)).clamp(2, MOST_POSITIONS);
    if positions.is_empty() {
        return 0;
    }
    let (start, limit) = (work.done, work.limit);
    let (above, total) = (above as f64, dag.total_price as f64);
    let mut best = 0.0f64;
    if positions.len() > most {
        // Those that matter most where each is joined with the end of the schedule.
        let mut program = Program::new(dag, cap, weight, &positions);
        for k in 0..positions.len() - 1 {
            program.join(k, positions.len());
        }
        work.limit = start + (limit - start) / CHOICE_SHARE;
        let made = program
            .program
            .lower_bound(above, &Bounded::default(), work);
        best = best.max(made.bound);
        let prices = program.prices(&made);
        let mut order: Vec<usize> = (0..positions.len()).collect();
        order.sort_by(|a, b| prices[*b].total_cmp(&prices[*a]).then(a.cmp(b)));
        order.truncate(most);
        order.sort_unstable();
        positions = order.into_iter().map(|k| positions[k]).collect();
    }
    work.limit = limit;
    let mut program = Program::joined(dag, cap, weight, &positions);
    let mut made = program
        .program
        .lower_bound(above, &Bounded::default(), work);
    best = best.max(made.bound);
    let is_far = |bound: f64| above - bound > FAR_GAP * total;
    // Without the positions that prove nothing, the program is much smaller.
    let prices = program.prices(&made);
    let priced: Vec<usize> = (positions.iter().zip(&prices))
        .filter(|(_, price)| **price > LEAST_PRICE * total)
        .map(|(position, _)| *position)
        .collect();
    if is_far(best) && (1..positions.len()).contains(&priced.len()) {
        positions = priced;
        program = Program::joined(dag, cap, weight, &positions);
        made = Bounded::default();
    }
    let branch_units = BRANCH_SHARE.saturating_mul(limit - start);
    let branch_limit = work.done + branch_units.min(MOST_BRANCH_UNITS);
    // What the positions proved before the last one was added.
    let mut last = 0.0;
    loop {
        while is_far(best) && (made.point.is_empty() || program.cut(cap, &made.point) > 0) {
            let before = made.bound;
            work.limit = work.done + (limit - start) / CUT_SHARE;
            made = program.program.lower_bound(above, &made, work);
            best = best.max(made.bound);
            if made.bound < before + LEAST_GAIN * total {
                break;
            }
        }
        work.limit = branch_limit;
        if !is_far(best) || work.spent() || made.bound < SOLVED * last {
            break;
        }
        last = made.bound;
        if above - best < BRANCH_GAP * total {
            let enough = above - CLOSE_GAP * total;
            made = program.branch(cap, made, enough, work);
            best = best.max(made.bound);
        }
        if !is_far(best) || work.spent() {
            break;
        }
        let Some(step) = program.fullest(cap, &made.point) else {
            break;
        };
        positions.push(step);
        positions.sort_unstable();
        program = Program::joined(dag, cap, weight, &positions);
        made = Bounded::default();
    }
    (best.min(above) as i64 - 1).max(0)
}

/// Returns positions, ascending: of every stretch of full steps the one with the most resident and the one that takes the most by
/// itself.
fn positions(dag: &Dag, cap: i64) -> Vec<usize> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let mut simulation = Simulation::default();
    simulation.run(dag, &given);
    let live = &simulation.live;
    let full: Vec<usize> = (0..live.len()).filter(|t| live[*t] > cap).collect();
    let stretches = (CANDIDATE_OPS / dag.ops().max(1)).clamp(LEAST_STRETCHES, MOST_STRETCHES);
    let mut positions = Vec::new();
    for stretch in full.chunks(full.len().div_ceil(stretches).max(1)) {
        positions.extend(stretch.iter().max_by_key(|t| (live[**t], **t)));
        positions.extend(
            stretch
                .iter()
                .max_by_key(|t| (dag.least_bytes(**t as u32), **t)),
        );
    }
    positions.sort_unstable();
    positions.dedup();
    positions
}
