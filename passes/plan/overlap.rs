//! Transfers that run beside other ops: the time of a step with them, and where in it they begin and end.
//!
//! One queue moves results off the device and one moves them back. Each runs its transfers one after another, beside the ops.
//! The step waits at a release until the results have left the device, and before the first reader of fetched results until
//! they have arrived ([`elapsed_us`]). A transfer that no op overlaps therefore costs time, and a queue never exceeds its
//! bandwidth.
//!
//! Where results are freed and where fetches begin is decided last ([`spread`]). A release goes as late and a fetch as early as
//! the transfer needs to be hidden, within the memory that the plan may take. At most `in_flight` ops have results that are
//! leaving, and as many fetches begin ahead. Results take memory until their release and from the start of their fetch,
//! whatever the speed of anything. So the peak of the schedule is the peak of a run.

use super::index::{ByOp, OpIdx, ValueIdx};
use super::problem::{Problem, Transfer};
use super::schedule::{Timeline, evaluate};
use super::steps::{Step, settled};
use ckpt_error::{Error, Result};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// What a spread schedule may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Of memory, static bytes included.
    pub peak_bytes: u64,
    /// Transfers under way in one lane.
    pub in_flight: usize,
}

/// Returns the time of a schedule whose transfers run beside other ops.
pub fn elapsed_us(problem: &Problem, steps: &[Step]) -> f64 {
    let costs = TransferCosts::new(problem);
    // By op: when its results have left. By value: when what was fetched arrives.
    let mut left_us = problem.by_op(0.0f64);
    let mut arrives_us = problem.by_value(0.0f64);
    let (mut now, mut out, mut back) = (0.0f64, 0.0f64, 0.0f64);
    for step in steps {
        match *step {
            Step::Run(o) => {
                let op = &problem.ops[o];
                for v in &op.ins {
                    now = now.max(std::mem::take(&mut arrives_us[*v]));
                }
                now += op.cost;
            }
            Step::Release(op) => now = now.max(left_us[op]),
            Step::Offload(op) | Step::Fetch(op) => {
                // Beginning a transfer takes the step's own time, and so does its share that stops all else.
                let cost = problem.cost(*step);
                let begun = now + costs.start_us.min(cost);
                now += costs.own_us(cost);
                let moving_us = costs.moving_us(cost);
                if let Step::Offload(_) = step {
                    out = begun.max(out) + moving_us;
                    left_us[op] = out;
                    continue;
                }
                back = begun.max(back).max(left_us[op]) + moving_us;
                for v in &problem.ops[op].outs {
                    arrives_us[*v] = back;
                }
            }
        }
    }
    // The step ends when the last transfer does.
    now.max(out).max(back)
}

/// What transfers cost a step.
#[derive(Clone, Copy)]
struct TransferCosts {
    transfer: Option<Transfer>,
    /// What beginning one takes.
    start_us: f64,
}

impl TransferCosts {
    fn new(problem: &Problem) -> TransferCosts {
        TransferCosts {
            transfer: problem.transfer,
            start_us: problem.transfer.map_or(0.0, |t| t.start_us),
        }
    }

    /// Returns the part of a transfer's cost that nothing runs beside.
    fn own_us(self, cost: f64) -> f64 {
        self.transfer.map_or(cost, |t| t.own_us(cost))
    }

    /// Returns the part of a transfer's cost that its lane is taken for.
    fn moving_us(self, cost: f64) -> f64 {
        (cost - self.start_us).max(0.0)
    }
}

/// Returns a settled schedule with releases and fetches moved to where they hide transfers; as it was where that gains
/// nothing.
///
/// # Errors
/// An invalid schedule; a bug where the result does not keep to `room`.
pub fn spread(problem: &Problem, steps: &[Step], room: Room) -> Result<Vec<Step>> {
    let bare = late(problem, steps)?;
    let spread = Spread::new(problem, &bare, room)?.made();
    let score = evaluate(problem, &spread)?;
    if score.peak_bytes > room.peak_bytes {
        return Err(Error::bug(
            "offload",
            "hiding transfers takes more memory than there is",
        )
        .expected(format!("{} bytes", room.peak_bytes))
        .found(format!("{} bytes", score.peak_bytes)));
    }
    match elapsed_us(problem, &spread) < elapsed_us(problem, &bare) {
        true => Ok(spread),
        false => Ok(bare),
    }
}

/// Returns the schedule with every fetch right before its first reader, if that takes no more memory, and every release right
/// after the `Offload`: nothing runs beside a transfer.
///
/// # Errors
/// An invalid schedule.
pub fn late(problem: &Problem, steps: &[Step]) -> Result<Vec<Step>> {
    // The fetch that each value waits for: its place and its op.
    let mut pending = problem.by_value(None::<(usize, OpIdx)>);
    let mut late = Vec::with_capacity(steps.len());
    for (at, step) in steps.iter().enumerate() {
        match *step {
            Step::Release(_) => {}
            Step::Fetch(op) => {
                for v in &problem.ops[op].outs {
                    pending[*v] = Some((at, op));
                }
            }
            Step::Offload(_) => late.push(*step),
            Step::Run(op) => {
                let mut fetches: Vec<(usize, OpIdx)> = Vec::new();
                for v in &problem.ops[op].ins {
                    if let Some(fetch) = pending[*v] {
                        for v in &problem.ops[fetch.1].outs {
                            pending[*v] = None;
                        }
                        fetches.push(fetch);
                    }
                }
                // Fetches keep their order.
                fetches.sort_unstable();
                late.extend(fetches.into_iter().map(|(_, op)| Step::Fetch(op)));
                late.push(*step);
            }
        }
    }
    // Fetches without readers are gone.
    let late = settled(&late);
    let is_release = |step: &&Step| matches!(step, Step::Release(_));
    let bare: Vec<Step> = steps.iter().filter(|s| !is_release(s)).copied().collect();
    let bare = settled(&bare);
    let peak = |s: &[Step]| evaluate(problem, s).map(|score| score.peak_bytes);
    // A fetch brings back all results of an op, also those that nothing reads there; such a fetch may be better early.
    match peak(&late)? <= peak(&bare)? {
        true => Ok(late),
        false => Ok(bare),
    }
}

/// A late schedule, and what goes where instead.
struct Spread<'a> {
    problem: &'a Problem,
    costs: TransferCosts,
    steps: &'a [Step],
    /// Above static, at each step, what is held longer included.
    live_bytes: Vec<u64>,
    cap_bytes: u64,
    in_flight: usize,
    /// When each step begins if nothing waits; one more for the end.
    start_us: Vec<f64>,
    /// Releases and then fetches that are put before each step, and before the end.
    before: Vec<Vec<Step>>,
    /// Steps that are put elsewhere.
    is_gone: Vec<bool>,
}

/// A result that was moved out: its bytes, the last step at which it is alive if nothing holds it longer, and whether
/// something is written over it there.
struct Held {
    bytes: u64,
    last: usize,
    is_taken: bool,
}

impl Held {
    /// Returns what holding it past a step takes there.
    fn past(&self, at: usize) -> u64 {
        match at.cmp(&self.last) {
            Ordering::Less => 0,
            Ordering::Equal => self.bytes * u64::from(self.is_taken),
            Ordering::Greater => self.bytes,
        }
    }
}

impl<'a> Spread<'a> {
    fn new(problem: &'a Problem, steps: &'a [Step], room: Room) -> Result<Spread<'a>> {
        let costs = TransferCosts::new(problem);
        let mut start_us = Vec::with_capacity(steps.len() + 1);
        let mut now = 0.0;
        for step in steps {
            start_us.push(now);
            now += match step {
                Step::Offload(_) | Step::Fetch(_) => costs.own_us(problem.cost(*step)),
                Step::Run(_) | Step::Release(_) => problem.cost(*step),
            };
        }
        start_us.push(now);
        let timeline = Timeline::new(problem, steps)?;
        let mut spread = Spread {
            problem,
            costs,
            steps,
            live_bytes: timeline.live_bytes.clone(),
            cap_bytes: room.peak_bytes.saturating_sub(problem.static_bytes()),
            in_flight: room.in_flight.max(1),
            start_us,
            before: vec![Vec::new(); steps.len() + 1],
            is_gone: vec![false; steps.len()],
        };
        let released_at = spread.release(&timeline);
        spread.fetch(&released_at);
        Ok(spread)
    }

    fn moving_us(&self, step: Step) -> f64 {
        self.costs.moving_us(self.problem.cost(step))
    }

    /// Returns whether a place is between an op and its `Offload`, or between that and its `Release`.
    fn splits(&self, at: usize) -> bool {
        matches!(
            self.steps.get(at),
            Some(Step::Offload(_) | Step::Release(_))
        )
    }

    /// Puts the results of each offloaded op to where they are freed. Returns before which step that is, by op.
    fn release(&mut self, timeline: &Timeline) -> ByOp<usize> {
        let end = self.steps.len();
        // What leaves, in order, and the first fetch of each.
        let mut outs: Vec<(usize, OpIdx)> = Vec::new();
        let mut back_at = self.problem.by_op(end);
        for (at, step) in self.steps.iter().enumerate() {
            match *step {
                Step::Offload(op) => outs.push((at, op)),
                Step::Fetch(op) => back_at[op] = back_at[op].min(at),
                Step::Run(_) | Step::Release(_) => {}
            }
        }
        let mut held: BTreeMap<usize, Vec<Held>> = BTreeMap::new();
        for (i, instance) in timeline.instances.iter().enumerate() {
            let Some(last) = instance.last else { continue };
            // An op and its `Offload` are neighbours.
            let from = instance.born + 1;
            let maker = self.problem.values[instance.value].producer;
            if maker.is_some_and(|op| self.steps.get(from) == Some(&Step::Offload(op))) {
                held.entry(from).or_default().push(Held {
                    bytes: instance.bytes,
                    last,
                    is_taken: timeline.written_over.get(last) == Some(&Some(i)),
                });
            }
        }
        let mut released_at = self.problem.by_op(0usize);
        let mut lane_us = 0.0f64;
        for (n, (from, op)) in outs.iter().enumerate() {
            let begun_us = self.start_us[*from] + self.costs.start_us;
            lane_us = lane_us.max(begun_us) + self.moving_us(Step::Offload(*op));
            // Before the op whose results would be one too many under way.
            let next = outs.get(n + self.in_flight).map_or(end, |next| next.0 - 1);
            let limit = next.min(back_at[*op]);
            let held = held.get(from).map_or(&[][..], Vec::as_slice);
            let more_bytes = |at: usize| held.iter().map(|h| h.past(at)).sum::<u64>();
            let (least, mut to) = (from + 2, from + 2);
            while to < limit
                && self.start_us[to] < lane_us
                && self.live_bytes[to] + more_bytes(to) <= self.cap_bytes
            {
                to += 1;
            }
            while to > least && self.splits(to) {
                to -= 1;
            }
            for at in least..to {
                self.live_bytes[at] += more_bytes(at);
            }
            self.is_gone[from + 1] = true;
            self.before[to].push(Step::Release(*op));
            released_at[*op] = to;
        }
        released_at
    }

    /// Puts each fetch to where it begins.
    fn fetch(&mut self, released_at: &ByOp<usize>) {
        let fetch = |(at, step): (usize, &Step)| match step {
            Step::Fetch(op) => Some((at, *op)),
            _ => None,
        };
        let fetches: Vec<(usize, OpIdx)> =
            self.steps.iter().enumerate().filter_map(fetch).collect();
        let readers = self.readers();
        // By when it and all before it have arrived.
        let mut arrived: Vec<usize> = Vec::with_capacity(fetches.len());
        for (at, _) in &fetches {
            arrived.push(readers[at].max(arrived.last().copied().unwrap_or(0)));
        }
        let problem = self.problem;
        let mut lane_us = f64::INFINITY;
        for n in (0..fetches.len()).rev() {
            let (at, op) = fetches[n];
            let outs: &[ValueIdx] = &problem.ops[op].outs;
            let bytes = problem.result_bytes(op);
            lane_us = lane_us.min(self.start_us[readers[&at]]) - self.moving_us(Step::Fetch(op));
            // Not before enough of the others have arrived.
            let enough = n.checked_sub(self.in_flight).map_or(0, |n| arrived[n] + 1);
            let earliest = enough.max(released_at[op]);
            let touches = |at: usize| match self.steps[at] {
                Step::Run(other) => problem.ops[other].ins.iter().any(|v| outs.contains(v)),
                moved => moved.op() == op,
            };
            let mut to = at;
            while to > earliest
                && self.start_us[to] > lane_us
                && self.live_bytes[to - 1] + bytes <= self.cap_bytes
                && !touches(to - 1)
            {
                to -= 1;
            }
            while to < at && self.splits(to) {
                to += 1;
            }
            if to < at {
                self.live_bytes[to..at].iter_mut().for_each(|b| *b += bytes);
                self.before[to].push(Step::Fetch(op));
                self.is_gone[at] = true;
            }
        }
    }

    /// Of each fetch, by position, the step that reads it first; the last one where none does.
    fn readers(&self) -> BTreeMap<usize, usize> {
        let end = self.steps.len();
        let mut next = self.problem.by_value(end);
        let mut readers = BTreeMap::new();
        for (at, step) in self.steps.iter().enumerate().rev() {
            let op = &self.problem.ops[step.op()];
            match step {
                Step::Run(_) => op.ins.iter().for_each(|v| next[*v] = at),
                Step::Fetch(_) => {
                    let outs = op.outs.iter();
                    let reader = outs.map(|v| std::mem::replace(&mut next[*v], end)).min();
                    readers.insert(at, reader.unwrap_or(end).min(end - 1));
                }
                Step::Offload(_) | Step::Release(_) => {}
            }
        }
        readers
    }

    fn made(self) -> Vec<Step> {
        let mut made = Vec::with_capacity(self.steps.len());
        for (at, before) in self.before.iter().enumerate() {
            made.extend(before);
            match self.steps.get(at) {
                Some(step) if !self.is_gone[at] => made.push(*step),
                _ => {}
            }
        }
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved_set;
    use crate::solve::bound_moving;
    use crate::solve::expanded::{ExpandedProblem, Price};
    use crate::testing::{Random, Shape, random_dag, waits};

    /// Returns the most ops at any step whose results have begun to leave and are not released.
    fn most_in_flight(steps: &[Step]) -> usize {
        let (mut out, mut most) = (0usize, 0usize);
        for step in steps {
            match step {
                Step::Release(_) => out -= 1,
                Step::Offload(_) => out += 1,
                Step::Run(_) | Step::Fetch(_) => {}
            }
            most = most.max(out);
        }
        most
    }

    fn transfer(r: &mut Random) -> Transfer {
        Transfer {
            us_per_megabyte: [0.0, 1e5, 4e5, 3e6][r.below(4)],
            start_us: [0.0, 0.25][r.below(2)],
            busy_share: [0.0, 0.0, 0.5, 1.0][r.below(4)],
        }
    }

    #[test]
    fn spreading_takes_no_more_memory_than_allowed_and_never_longer() {
        let mut r = Random(41);
        let (mut faster, mut hidden, mut limited, mut proven) = (0, 0, 0, 0);
        for n in 0..600 {
            let mut p: Problem = random_dag(&mut r, 6 + n % 12, Shape::Training);
            p.transfer = Some(transfer(&mut r));
            let may = p.movable();
            let chosen = may.indices().filter(|o| may[*o] && r.below(2) == 0);
            let offloaded: Vec<OpIdx> = chosen.collect();
            let expanded = ExpandedProblem::new(&p, &offloaded, Price::Whole).unwrap();
            // What is not kept comes back for the backward pass.
            let values = expanded.problem.values.iter();
            let keep = values.map(|_| r.below(3) == 0).collect();
            let kept = saved_set::schedule(&expanded.problem, &keep);
            if evaluate(&expanded.problem, &kept).is_err() {
                continue;
            }
            let steps = expanded.steps(kept.iter().copied());
            let late = late(&p, &steps).unwrap();
            let serial = evaluate(&p, &late).unwrap();
            let given = evaluate(&p, &steps).unwrap();
            // The expanded problem takes the same memory and time.
            let solved = evaluate(&expanded.problem, &kept).unwrap();
            assert_eq!(solved.peak_bytes, given.peak_bytes, "graph {n}");
            assert!((solved.cost - given.cost).abs() < 1e-6, "graph {n}");
            assert!(serial.peak_bytes <= given.peak_bytes);
            assert!(elapsed_us(&p, &late) <= serial.cost + 1e-9);
            let in_flight = 1 + r.below(4);
            let room = Room {
                peak_bytes: serial.peak_bytes + [0, 3, 1000][r.below(3)],
                in_flight,
            };
            let spread = spread(&p, &steps, room).unwrap();
            let score = evaluate(&p, &spread).unwrap();
            assert!(score.peak_bytes <= room.peak_bytes);
            assert_eq!(settled(&spread), spread, "graph {n}");
            let took = elapsed_us(&p, &spread);
            assert!(took <= serial.cost + 1e-9);
            assert!(most_in_flight(&spread) <= in_flight, "graph {n}");
            limited += (most_in_flight(&spread) == in_flight && in_flight > 1) as usize;
            // No bandwidth is made up, and no op is skipped.
            let transfer = p.transfer.unwrap();
            let (mut runs, mut out, mut back) = (0.0, 0.0, 0.0);
            for step in &spread {
                let cost = p.cost(*step);
                match step {
                    Step::Run(_) => runs += cost,
                    Step::Release(_) => {}
                    Step::Offload(_) => out += cost - transfer.start_us,
                    Step::Fetch(_) => back += cost - transfer.start_us,
                }
                if matches!(step, Step::Offload(_) | Step::Fetch(_)) {
                    runs += transfer.own_us(cost);
                }
            }
            assert!(took + 1e-9 >= f64::max(runs, f64::max(out, back)));
            // Nor does any schedule take less than is proven of all within its memory.
            let lower = |has_lane: bool| {
                let waits = waits(&p, &transfer, has_lane);
                bound_moving(&p, score.peak_bytes, &ByOp::default(), &waits)
                    .unwrap()
                    .unwrap()
            };
            let (free, laned) = (lower(false), lower(true));
            assert!(
                free <= laned && laned <= took * (1.0 + 1e-9),
                "graph {n}: {laned} {took}"
            );
            proven += (laned > free * (1.0 + 1e-6)) as usize;
            faster += (took + 1e-9 < serial.cost) as usize;
            hidden += (out + back > 0.0 && took < runs + 1e-9) as usize;
        }
        assert!(
            faster > 50 && hidden > 10 && limited > 10 && proven > 0,
            "{faster} {hidden} {limited} {proven}"
        );
    }
}
