//! Transfers that run beside other ops: how long a step takes with them, and where in it they begin and end.
//!
//! There is a lane out and a lane in. Each does one transfer after the other, in the order in which they begin, beside
//! whatever runs. A step waits at a release until what it frees is outside, and at the first reader of what was fetched
//! until that has arrived ([`elapsed_us`]); so a transfer that nothing can hide is paid for, and one lane never moves more
//! than its bandwidth allows up to any moment.
//!
//! Where results are freed and where fetches begin is settled last ([`spread`]): a release comes as late and a fetch as
//! early as the transfer needs to be hidden, while memory stays within what the plan may take anyway, no more than
//! `in_flight` ops have results that are leaving, and no more fetches begin ahead. Bytes are held from where a fetch begins and until a release, whatever
//! the speed of anything, so that the peak of the schedule is the peak of a run.

use super::schedule::{Timeline, evaluate};
use super::transfer_lowering::{ExpandedOp, ExpandedProblem};
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

/// Returns the time of a schedule of an expanded problem whose transfers run beside other ops.
pub fn elapsed_us(expanded: &ExpandedProblem, schedule: &[usize]) -> f64 {
    let problem = &expanded.problem;
    let (start_us, own_us) = parts(expanded);
    // When what each op moved out is outside, and when what was fetched of each value is there.
    let mut outside_us = vec![None::<f64>; problem.ops.len()];
    let mut arrives_us = vec![None::<f64>; problem.values.len()];
    let (mut now, mut out, mut back) = (0.0f64, 0.0f64, 0.0f64);
    for step in schedule {
        let op = &problem.ops[*step];
        if let ExpandedOp::Release(_) = expanded.expanded_ops[*step] {
            now = now.max(outside_us[step - 1].unwrap_or(0.0));
            continue;
        }
        for v in &op.ins {
            now = now.max(arrives_us[*v].take().unwrap_or(0.0));
        }
        if !matches!(expanded.expanded_ops[*step], ExpandedOp::Transfer(_)) {
            now += op.cost;
            continue;
        }
        // Beginning a transfer takes the step's own time, and so does what of it stops all else.
        let begun = now + start_us.min(op.cost);
        let moving_us = (op.cost - start_us).max(0.0);
        now += own_us(op.cost);
        match outside_us[*step] {
            None => {
                out = begun.max(out) + moving_us;
                outside_us[*step] = Some(out);
            }
            Some(there) => {
                back = begun.max(back).max(there) + moving_us;
                for v in &op.outs {
                    arrives_us[*v] = Some(back);
                }
            }
        }
    }
    // What is never released or read is waited for in the end.
    now.max(out).max(back)
}

/// Returns what beginning a transfer takes, and what of a transfer's cost nothing runs beside.
fn parts(expanded: &ExpandedProblem) -> (f64, impl Fn(f64) -> f64) {
    let transfer = expanded.problem.transfer;
    let own_us = move |cost: f64| transfer.map_or(cost, |t| t.own_us(cost));
    (transfer.map_or(0.0, |t| t.start_us), own_us)
}

/// Returns a settled schedule of an expanded problem, with releases and fetches moved to where they hide transfers; as it was where
/// that gains nothing.
///
/// # Errors
/// An invalid schedule; a bug where the result does not keep to `room`.
pub fn spread(expanded: &ExpandedProblem, schedule: &[usize], room: Room) -> Result<Vec<usize>> {
    let bare = late(expanded, schedule)?;
    let spread = Spread::new(expanded, &bare, room)?.made();
    let score = evaluate(&expanded.problem, &spread)?;
    if score.peak_bytes > room.peak_bytes {
        return Err(Error::bug(
            "offload",
            "hiding transfers takes more memory than there is",
        )
        .expected(format!("{} bytes", room.peak_bytes))
        .found(format!("{} bytes", score.peak_bytes)));
    }
    match elapsed_us(expanded, &spread) < elapsed_us(expanded, &bare) {
        true => Ok(spread),
        false => Ok(bare),
    }
}

/// Returns the schedule with every fetch right before its first reader, if that takes no more memory, and every release right after
/// moving out: nothing runs beside a transfer.
///
/// # Errors
/// An invalid schedule.
pub fn late(expanded: &ExpandedProblem, schedule: &[usize]) -> Result<Vec<usize>> {
    let problem = &expanded.problem;
    let mut moves = vec![0usize; problem.ops.len()];
    // The fetch that each value still waits for.
    let mut pending = vec![None::<(usize, usize)>; problem.values.len()];
    let mut late = Vec::with_capacity(schedule.len());
    for (at, step) in schedule.iter().enumerate() {
        match expanded.expanded_ops[*step] {
            ExpandedOp::Release(_) => continue,
            // Fetches keep their order.
            ExpandedOp::Transfer(_) => {
                moves[*step] += 1;
                if moves[*step] > 1 {
                    for v in &problem.ops[*step].outs {
                        pending[*v] = Some((at, *step));
                    }
                    continue;
                }
            }
            ExpandedOp::Run(_) => {}
        }
        let mut fetches: Vec<(usize, usize)> = Vec::new();
        for v in &problem.ops[*step].ins {
            if let Some(fetch) = pending[*v] {
                for v in &problem.ops[fetch.1].outs {
                    pending[*v] = None;
                }
                fetches.push(fetch);
            }
        }
        fetches.sort_unstable();
        late.extend(fetches.into_iter().map(|(_, fetch)| fetch));
        late.push(*step);
    }
    // What nothing reads any more need not come back.
    let late = expanded.settled(&late);
    // Without releases in between: what is held longer for one may have room.
    let is_release = |step: &usize| matches!(expanded.expanded_ops[*step], ExpandedOp::Release(_));
    let bare: Vec<usize> = schedule
        .iter()
        .copied()
        .filter(|s| !is_release(s))
        .collect();
    let bare = expanded.settled(&bare);
    let peak = |s: &[usize]| evaluate(problem, s).map(|score| score.peak_bytes);
    // An op with several results brings back those too that nobody reads there, and is better early then.
    match peak(&late)? <= peak(&bare)? {
        true => Ok(late),
        false => Ok(bare),
    }
}

/// A late schedule, and what goes where instead.
struct Spread<'a> {
    expanded: &'a ExpandedProblem,
    schedule: &'a [usize],
    /// What each step does.
    does: Vec<Does>,
    /// Above static, at each step, what is held longer included.
    live_bytes: Vec<u64>,
    cap_bytes: u64,
    in_flight: usize,
    /// When each step begins if nothing waits; one more for the end.
    start_us: Vec<f64>,
    /// Releases and then fetches that are put before each step, and before the end.
    before: Vec<Vec<usize>>,
    /// Steps that are put elsewhere.
    is_gone: Vec<bool>,
}

#[derive(Clone, Copy, PartialEq)]
enum Does {
    Run,
    Out,
    Release,
    Fetch,
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
    fn new(expanded: &'a ExpandedProblem, schedule: &'a [usize], room: Room) -> Result<Spread<'a>> {
        let problem = &expanded.problem;
        let (_, own_us) = parts(expanded);
        let mut start_us = Vec::with_capacity(schedule.len() + 1);
        let mut now = 0.0;
        let mut is_out = vec![false; problem.ops.len()];
        let mut does = Vec::with_capacity(schedule.len());
        for step in schedule {
            start_us.push(now);
            now += match expanded.expanded_ops[*step] {
                ExpandedOp::Transfer(_) => own_us(problem.ops[*step].cost),
                _ => problem.ops[*step].cost,
            };
            does.push(match expanded.expanded_ops[*step] {
                ExpandedOp::Run(_) => Does::Run,
                ExpandedOp::Release(_) => Does::Release,
                ExpandedOp::Transfer(_) if std::mem::replace(&mut is_out[*step], true) => {
                    Does::Fetch
                }
                ExpandedOp::Transfer(_) => Does::Out,
            });
        }
        start_us.push(now);
        let timeline = Timeline::new(problem, schedule)?;
        let mut spread = Spread {
            expanded,
            schedule,
            live_bytes: timeline.live_bytes.clone(),
            does,
            cap_bytes: room.peak_bytes.saturating_sub(problem.static_bytes()),
            in_flight: room.in_flight.max(1),
            start_us,
            before: vec![Vec::new(); schedule.len() + 1],
            is_gone: vec![false; schedule.len()],
        };
        let released_at = spread.release(&timeline);
        spread.fetch(&released_at);
        Ok(spread)
    }

    fn moving_us(&self, step: usize) -> f64 {
        let (begin_us, _) = parts(self.expanded);
        (self.expanded.problem.ops[step].cost - begin_us).max(0.0)
    }

    /// Returns whether a place is between an op and its moving out, or between that and the end of both.
    fn splits(&self, at: usize) -> bool {
        matches!(self.does.get(at), Some(Does::Out | Does::Release))
    }

    /// Puts the results of each offloaded op to where they are freed. Returns before which step that is, by op.
    fn release(&mut self, timeline: &Timeline) -> Vec<usize> {
        let (expanded, end) = (self.expanded, self.schedule.len());
        // What moves out, in order, and the first fetch of each.
        let mut outs = Vec::new();
        let mut back_at = vec![end; expanded.expanded_ops.len()];
        for (at, step) in self.schedule.iter().enumerate() {
            match self.does[at] {
                Does::Out => outs.push(at),
                Does::Fetch => back_at[*step] = back_at[*step].min(at),
                Does::Run | Does::Release => {}
            }
        }
        let mut held: BTreeMap<usize, Vec<Held>> = BTreeMap::new();
        for (i, instance) in timeline.instances.iter().enumerate() {
            let Some(last) = instance.last else { continue };
            if self.does.get(instance.born) == Some(&Does::Out) {
                held.entry(instance.born).or_default().push(Held {
                    bytes: instance.bytes,
                    last,
                    is_taken: timeline.written_over.get(last) == Some(&Some(i)),
                });
            }
        }
        let mut released_at = vec![0usize; expanded.expanded_ops.len()];
        let (begin_us, _) = parts(expanded);
        let mut lane_us = 0.0f64;
        for (n, from) in outs.iter().enumerate() {
            let step = self.schedule[*from];
            lane_us = lane_us.max(self.start_us[*from] + begin_us) + self.moving_us(step);
            // Before the op whose results would be one too many under way.
            let next = outs.get(n + self.in_flight).map_or(end, |next| next - 1);
            let limit = next.min(back_at[step]);
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
            self.before[to].push(step + 1);
            released_at[step] = to;
        }
        released_at
    }

    /// Puts each fetch to where it begins.
    fn fetch(&mut self, released_at: &[usize]) {
        let is_fetch = |at: &usize| self.does[*at] == Does::Fetch;
        let fetches: Vec<usize> = (0..self.schedule.len()).filter(is_fetch).collect();
        let readers = self.readers();
        // By when it and all before it have arrived.
        let mut arrived: Vec<usize> = Vec::with_capacity(fetches.len());
        for at in &fetches {
            arrived.push(readers[at].max(arrived.last().copied().unwrap_or(0)));
        }
        let problem = &self.expanded.problem;
        let mut lane_us = f64::INFINITY;
        for n in (0..fetches.len()).rev() {
            let at = fetches[n];
            let step = self.schedule[at];
            let outs = &problem.ops[step].outs;
            let bytes: u64 = outs.iter().map(|v| problem.values[*v].bytes).sum();
            lane_us = lane_us.min(self.start_us[readers[&at]]) - self.moving_us(step);
            // Not before enough of the others have arrived.
            let enough = n.checked_sub(self.in_flight).map_or(0, |n| arrived[n] + 1);
            let earliest = enough.max(released_at[step]);
            let touches = |at: usize| {
                let op = &problem.ops[self.schedule[at]];
                self.schedule[at] == step || op.ins.iter().any(|v| outs.contains(v))
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
                self.before[to].push(step);
                self.is_gone[at] = true;
            }
        }
    }

    /// Of each fetch, by position, the step that reads it first; the last one where none does.
    fn readers(&self) -> BTreeMap<usize, usize> {
        let problem = &self.expanded.problem;
        let end = self.schedule.len();
        let mut next = vec![end; problem.values.len()];
        let mut readers = BTreeMap::new();
        for (at, step) in self.schedule.iter().enumerate().rev() {
            let op = &problem.ops[*step];
            if self.does[at] == Does::Fetch {
                let reader = op
                    .outs
                    .iter()
                    .map(|v| std::mem::replace(&mut next[*v], end));
                readers.insert(at, reader.min().unwrap_or(end).min(end - 1));
            }
            for v in &op.ins {
                next[*v] = at;
            }
        }
        readers
    }

    fn made(self) -> Vec<usize> {
        let mut made = Vec::with_capacity(self.schedule.len());
        for (at, before) in self.before.iter().enumerate() {
            made.extend(before);
            match self.schedule.get(at) {
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
    use crate::problem::{Problem, Transfer};
    use crate::saved_set;
    use crate::solve::bound_moving;
    use crate::testing::Random;
    use crate::testing::{Shape, random_dag};
    use crate::transfer_lowering::{Price, movable, waits};

    /// Returns the most ops at any step whose results have begun to leave and are not released.
    fn most_in_flight(expanded: &ExpandedProblem, schedule: &[usize]) -> usize {
        let (mut out, mut most) = (0usize, 0usize);
        let mut is_out = vec![false; expanded.expanded_ops.len()];
        for step in schedule {
            match expanded.expanded_ops[*step] {
                ExpandedOp::Release(_) => out -= 1,
                ExpandedOp::Transfer(_) if !std::mem::replace(&mut is_out[*step], true) => out += 1,
                ExpandedOp::Transfer(_) | ExpandedOp::Run(_) => {}
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
            let may = movable(&p);
            let offloaded: Vec<usize> = (0..p.ops.len())
                .filter(|o| may[*o] && r.below(2) == 0)
                .collect();
            let brief = ExpandedProblem::brief(&p, &offloaded, Price::Whole).unwrap();
            // What is not kept comes back for the backward pass.
            let keep: Vec<bool> = brief
                .problem
                .values
                .iter()
                .map(|_| r.below(3) == 0)
                .collect();
            let kept = saved_set::schedule(&brief.problem, &keep);
            if evaluate(&brief.problem, &kept).is_err() {
                continue;
            }
            let expanded = ExpandedProblem::new(&p, &offloaded).unwrap();
            let schedule = expanded.translated(&brief, &kept);
            let late = late(&expanded, &schedule).unwrap();
            let serial = evaluate(&expanded.problem, &late).unwrap();
            let given = evaluate(&expanded.problem, &schedule).unwrap();
            assert!(serial.peak_bytes <= given.peak_bytes);
            assert!(elapsed_us(&expanded, &late) <= serial.cost + 1e-9);
            let in_flight = 1 + r.below(4);
            let room = Room {
                peak_bytes: serial.peak_bytes + [0, 3, 1000][r.below(3)],
                in_flight,
            };
            let spread = spread(&expanded, &schedule, room).unwrap();
            let score = evaluate(&expanded.problem, &spread).unwrap();
            assert!(score.peak_bytes <= room.peak_bytes);
            assert_eq!(expanded.settled(&spread), spread, "graph {n}");
            let took = elapsed_us(&expanded, &spread);
            assert!(took <= serial.cost + 1e-9);
            assert!(most_in_flight(&expanded, &spread) <= in_flight, "graph {n}");
            limited += (most_in_flight(&expanded, &spread) == in_flight && in_flight > 1) as usize;
            // No bandwidth is made up, and no op is skipped.
            let transfer = p.transfer.unwrap();
            let start_us = transfer.start_us;
            let (mut runs, mut out, mut back) = (0.0, 0.0, 0.0);
            let mut is_out = vec![false; expanded.expanded_ops.len()];
            for step in &spread {
                let cost = expanded.problem.ops[*step].cost;
                match expanded.expanded_ops[*step] {
                    ExpandedOp::Run(_) => runs += cost,
                    ExpandedOp::Release(_) => {}
                    ExpandedOp::Transfer(_) => {
                        runs += transfer.own_us(cost);
                        match std::mem::replace(&mut is_out[*step], true) {
                            true => back += cost - start_us,
                            false => out += cost - start_us,
                        }
                    }
                }
            }
            assert!(took + 1e-9 >= f64::max(runs, f64::max(out, back)));
            // Nor does any schedule take less than is proven of all within its memory.
            let lower = |has_lane: bool| {
                let waits = waits(&p, &transfer, has_lane);
                bound_moving(&p, score.peak_bytes, &[], &waits)
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
