//! Offloads results between their uses, as a compiler spills registers.
//!
//! Where the sequence goes through the model in chunks, keys and values and their gradients are read once for each later chunk. In
//! between they may be off the device: a result leaves once, right after its op, and comes back for each reader that is far from
//! the one before. Far means that ops make as many bytes in between as the result has.
//!
//! With more memory, results with short gaps stay on the device, because each gap costs one transfer and short gaps take memory for the
//! least time.

use super::index::{ByOp, OpIdx, ValueIdx};
use super::problem::Problem;
use super::range_max::RangeMax;
use super::schedule::{Timeline, evaluate};
use super::steps::{Step, settled};
use ckpt_error::Result;

/// The time between two steps that need the results of an op, the steps not included.
struct Gap {
    op: OpIdx,
    from: usize,
    to: usize,
    /// Bytes of the results that are needed at `to` or later.
    bytes: i64,
    /// Bytes of the other results of the op, which come back beside them.
    others: i64,
    /// Bytes that ops make in between.
    made: u64,
}

/// Returns runs as steps in which the results of the ops that `may` names are offloaded between their uses, where the
/// device's memory has no room for them up to `peak_bytes`. Ops that run again are left alone. The peak may exceed `peak_bytes` if
/// offloading everything is not enough.
///
/// # Errors
/// An invalid schedule.
pub fn spill(
    problem: &Problem,
    runs: &[OpIdx],
    may: &ByOp<bool>,
    peak_bytes: u64,
) -> Result<Vec<Step>> {
    if evaluate(problem, runs)?.peak_bytes <= peak_bytes {
        return Ok(runs.iter().map(Step::from).collect());
    }
    let (folded, ops) = problem.fold();
    let mut place = problem.by_op(None);
    for (at, op) in ops.iter().enumerate() {
        place[*op] = Some(OpIdx(at));
    }
    let runs: Vec<OpIdx> = runs.iter().filter_map(|op| place[*op]).collect();
    let may: ByOp<bool> = ops.iter().map(|op| may[*op]).collect();
    let spilling = Spilling::new(&folded, &runs, &may)?;
    let mut less_bytes = 0;
    while less_bytes < peak_bytes {
        let steps = spilling.within(peak_bytes - less_bytes).into_iter();
        let steps = problem.unfold_steps(&ops, steps);
        // Views, and results of an op that come back beside those that are read, may take a little more than was counted.
        match evaluate(problem, &steps)?
            .peak_bytes
            .saturating_sub(peak_bytes)
        {
            0 => return Ok(steps),
            over_bytes => less_bytes = 2 * less_bytes + over_bytes,
        }
    }
    Ok(problem.unfold_steps(&ops, spilling.within(0).into_iter()))
}

/// The runs of a folded problem, and all long gaps in them.
struct Spilling<'a> {
    problem: &'a Problem,
    runs: &'a [OpIdx],
    /// The shortest first.
    gaps: Vec<Gap>,
    /// The bytes that are alive at each step, above static, if all results leave for all gaps.
    live: RangeMax,
}

impl Spilling<'_> {
    fn new<'a>(problem: &'a Problem, runs: &'a [OpIdx], may: &ByOp<bool>) -> Result<Spilling<'a>> {
        let mut gaps = gaps(problem, runs, may);
        gaps.sort_by_key(|gap| gap.made);
        let live = Timeline::new(problem, runs)?.live_bytes;
        let live: Vec<i64> = live.into_iter().map(|bytes| bytes as i64).collect();
        let mut live = RangeMax::new(&live);
        for gap in &gaps {
            live.add(gap.from + 1..gap.to, -gap.bytes);
            live.add(gap.to..gap.to + 1, gap.others);
        }
        Ok(Spilling {
            problem,
            runs,
            gaps,
            live,
        })
    }

    /// Returns steps in which results stay on the device as long as about so many bytes are enough.
    fn within(&self, peak_bytes: u64) -> Vec<Step> {
        let problem = self.problem;
        let room = peak_bytes.saturating_sub(problem.static_bytes());
        let over = |bytes: i64| u64::try_from(bytes).is_ok_and(|bytes| bytes > room);
        let mut live = self.live.clone();
        let mut leaves = |gap: &Gap| {
            // Where a result leaves, another may be written over it.
            let takes = |v: &ValueIdx| problem.values[*v].producer == Some(gap.op);
            let taken = &problem.ops[self.runs[gap.from]].in_place_operands;
            let is_tight = taken.iter().any(takes) && over(live.largest_in(gap.from..gap.from + 1));
            let range = gap.from + 1..gap.to;
            let leaves = is_tight || over(live.largest_in(range.clone()) + gap.bytes);
            if !leaves {
                live.add(range, gap.bytes);
                live.add(gap.to..gap.to + 1, -gap.others);
            }
            leaves
        };
        let mut fetched = vec![Vec::new(); self.runs.len()];
        let mut has_left = problem.by_op(false);
        for gap in self.gaps.iter().filter(|gap| leaves(gap)) {
            fetched[gap.to].push(gap.op);
            has_left[gap.op] = true;
        }
        let mut steps = Vec::with_capacity(2 * self.runs.len());
        for (run, mut fetched) in self.runs.iter().zip(fetched) {
            fetched.sort_unstable();
            steps.extend(fetched.into_iter().map(Step::Fetch));
            steps.push(Step::Run(*run));
            if has_left[*run] {
                steps.push(Step::Offload(*run));
            }
        }
        settled(&steps)
    }
}

/// Returns the long gaps of the results of ops that run once and that `may` names.
fn gaps(problem: &Problem, runs: &[OpIdx], may: &ByOp<bool>) -> Vec<Gap> {
    let mut count = problem.by_op(0u32);
    runs.iter().for_each(|op| count[*op] += 1);
    let mut made = Vec::with_capacity(runs.len() + 1);
    let mut sum = 0u64;
    for run in runs {
        made.push(sum);
        sum += problem.result_bytes(*run);
    }
    // Results that may leave are never outputs, so their last reader is their last use.
    let mut last = problem.by_value(0);
    for (at, run) in runs.iter().enumerate() {
        problem.ops[*run].ins.iter().for_each(|v| last[*v] = at);
    }
    let mut used: ByOp<Option<usize>> = problem.by_op(None);
    let mut gaps = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let op = &problem.ops[*run];
        for maker in op.ins.iter().filter_map(|v| problem.values[*v].producer) {
            if !may[maker] || count[maker] != 1 {
                continue;
            }
            let Some(from) = used[maker].replace(at).filter(|from| *from < at) else {
                continue;
            };
            let made = made[at] - made[from + 1];
            if from + 1 == at || made < problem.result_bytes(maker) {
                continue;
            }
            let held = problem.ops[maker].outs.iter().filter(|v| last[**v] >= at);
            let bytes: u64 = held.map(|v| problem.values[*v].bytes).sum();
            if bytes == 0 {
                continue;
            }
            gaps.push(Gap {
                op: maker,
                from,
                to: at,
                bytes: bytes as i64,
                others: (problem.result_bytes(maker) - bytes) as i64,
                made,
            });
        }
        used[*run] = Some(at);
    }
    gaps
}

/// Returns the most bytes that are off the device at once, and the bytes transferred in both directions together.
pub fn outside_bytes(problem: &Problem, steps: &[Step]) -> (u64, u64) {
    let mut last = problem.by_op(None);
    for (at, step) in steps.iter().enumerate() {
        if let Step::Fetch(op) = step {
            last[*op] = Some(at);
        }
    }
    let (mut now, mut most, mut moved) = (0u64, 0u64, 0u64);
    for (at, step) in steps.iter().enumerate() {
        let bytes = problem.result_bytes(step.op());
        match step {
            Step::Run(_) | Step::Release(_) => continue,
            Step::Offload(op) if last[*op].is_some() => now += bytes,
            Step::Fetch(op) if last[*op] == Some(at) => now -= bytes,
            Step::Offload(_) | Step::Fetch(_) => {}
        }
        moved += bytes;
        most = most.max(now);
    }
    (most, moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, Shape, random_dag, random_schedule};

    #[test]
    fn what_waits_outside_frees_memory_as_far_as_that_is_needed() {
        let mut r = Random(5);
        let (mut moved, mut less, mut between, mut several) = (0, 0, 0, 0);
        for n in 0..600 {
            let p = random_dag(&mut r, 6 + n % 20, Shape::Training);
            let runs = random_schedule(&mut r, &p, 4);
            let Ok(plain) = evaluate(&p, &runs) else {
                continue;
            };
            let may = p.may_leave();
            let within = |peak_bytes: u64| {
                let steps = spill(&p, &runs, &may, peak_bytes).unwrap();
                (evaluate(&p, &steps).unwrap(), steps)
            };
            let (least, all) = within(0);
            let moves = |steps: &[Step]| steps.iter().filter(|s| s.is_move()).count();
            assert!(least.peak_bytes <= plain.peak_bytes, "graph {n}");
            // With the memory of the schedule itself nothing leaves.
            let (same, none) = within(plain.peak_bytes);
            assert_eq!((same.peak_bytes, moves(&none)), (plain.peak_bytes, 0));
            let middle = (least.peak_bytes + plain.peak_bytes) / 2;
            let (half, some) = within(middle);
            assert!(half.peak_bytes <= middle.max(least.peak_bytes), "graph {n}");
            assert!(moves(&some) <= moves(&all));
            // Every op runs as often as it did, and the outside is never below nothing.
            let runs_in = |steps: &[Step]| steps.iter().filter(|s| !s.is_move()).count();
            assert!(runs_in(&all) >= runs.len());
            assert!(outside_bytes(&p, &all).0 >= outside_bytes(&p, &some).0);
            moved += (moves(&all) > 0) as usize;
            less += (least.peak_bytes < plain.peak_bytes) as usize;
            between += (0 < moves(&some) && moves(&some) < moves(&all)) as usize;
            let fetches = |op: OpIdx| all.iter().filter(|s| **s == Step::Fetch(op)).count();
            several += p.ops.indices().any(|op| fetches(op) > 1) as usize;
        }
        assert!(
            moved > 100 && less > 50 && between > 20 && several > 20,
            "{moved} {less} {between} {several}"
        );
    }
}
