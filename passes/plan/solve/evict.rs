//! Makes a schedule fit by dropping one value at a time: much less work than the cuts of [`super::repair`], which see more.
//!
//! At the fullest step a value is dropped that is next read later. The op that makes it runs again right before that read, and
//! before it the makers of those operands that have no room to stay until then. The value is chosen that costs least for each
//! byte that it frees there; random factors vary the choice.

use super::compact::{Dag, NONE};
use super::incremental_liveness::Events;
use super::simulate::Simulation;
use super::work::{Random, Work};
use crate::range_max::MaxTable;

/// Drops before the schedule counts as one that cannot be made to fit.
const MOST_DROPS: usize = 60;

/// Work of a drop, for each step of the schedule.
const UNITS_A_STEP: u64 = 20;

/// The bytes that a value frees count for at least this share of themselves.
const LEAST_SHARE: f64 = 0.6;

/// A schedule that does not fit, and the repeats that one drop calls for.
struct Drop<'a> {
    dag: &'a Dag,
    cap: i64,
    /// What each op counts for.
    weight: &'a [f64],
    events: Events,
    live: MaxTable,
    /// By op, the last value for whose sake it was looked at.
    seen: Vec<u32>,
    stack: Vec<(u32, usize)>,
    /// The ops that run again, in order, and what they count for.
    repeats: Vec<u32>,
    cost: f64,
}

impl Drop<'_> {
    /// Returns whether a value is there at a slot, or has room to stay until then.
    fn stays(&self, v: u32, slot: u32) -> bool {
        let events = self.events.of(v);
        let at = events.partition_point(|e| e.slot < slot);
        if events.get(at).is_some_and(|e| !e.made) {
            return true;
        }
        let from = at.checked_sub(1).map_or(0, |at| events[at].slot + 1);
        let bytes = self.dag.size[v as usize];
        from >= slot || self.live.largest_in(from as usize..slot as usize) + bytes <= self.cap
    }

    /// Finds what runs again before `slot` so that a value is there; `false` if that is impossible or counts for `most`.
    fn find(&mut self, v: u32, slot: u32, most: f64) -> bool {
        let dag = self.dag;
        self.repeats.clear();
        self.stack.clear();
        self.cost = 0.0;
        self.stack.extend(dag.remaker(v).map(|o| (o, 0)));
        while let Some((o, from)) = self.stack.pop() {
            if from == 0 {
                self.seen[o as usize] = v;
                self.cost += self.weight[o as usize];
            }
            if self.cost >= most {
                return false;
            }
            let ins = dag.ins(o);
            let missing = (from..ins.len()).find(|i| {
                let is_seen = |o: u32| self.seen[o as usize] == v;
                !self.stays(ins[*i], slot) && !dag.remaker(ins[*i]).is_some_and(is_seen)
            });
            match missing.map(|i| (i, dag.remaker(ins[i]))) {
                None => self.repeats.push(o),
                Some((_, None)) => return false,
                Some((i, Some(maker))) => self.stack.extend([(o, i + 1), (maker, 0)]),
            }
        }
        !self.repeats.is_empty()
    }
}

/// Makes `schedule` fit into `cap`; `None` if it cannot, if the work is spent, or if it gets heavier than `limit`. In the
/// choice each op counts for its `weight`.
pub fn evict(
    dag: &Dag,
    mut schedule: Vec<u32>,
    cap: i64,
    weight: &[f64],
    limit: i64,
    random: &mut Random,
    work: &mut Work,
) -> Option<Vec<u32>> {
    let mut simulation = Simulation::default();
    for _ in 0..MOST_DROPS {
        simulation.run(dag, &schedule);
        work.spend(UNITS_A_STEP * schedule.len() as u64);
        if simulation.peak <= cap {
            return Some(schedule);
        }
        if work.spent() || dag.weigh_schedule(&schedule) > limit {
            return None;
        }
        let live = &simulation.live;
        let step = (0..live.len()).max_by_key(|t| live[*t])?;
        let mut drop = Drop {
            dag,
            cap,
            weight,
            events: Events::new(dag, &schedule),
            live: MaxTable::new(live),
            seen: vec![NONE; dag.ops()],
            stack: Vec::new(),
            repeats: Vec::new(),
            cost: 0.0,
        };
        let mut best: Option<(f64, u32, Vec<u32>)> = None;
        for v in 0..dag.values() as u32 {
            let events = drop.events.of(v);
            let at = events.partition_point(|e| (e.slot as usize) < step);
            let next = events.get(at).filter(|e| !e.made && e.slot as usize > step);
            let Some(slot) = next.map(|e| e.slot) else {
                continue;
            };
            let noise = LEAST_SHARE + (1.0 - LEAST_SHARE) * random.unit();
            let bytes = dag.size[v as usize].min(live[step] - cap) as f64 * noise;
            let most = best.as_ref().map_or(f64::INFINITY, |best| best.0) * bytes;
            // A value whose first run is still to come has no event before the step.
            if at > 0 && bytes > 0.0 && drop.find(v, slot, most) {
                best = Some((drop.cost / bytes, slot, drop.repeats.clone()));
            }
        }
        let (_, slot, repeats) = best?;
        schedule.splice(slot as usize..slot as usize, repeats);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ByOp;
    use crate::objective::Objective;
    use crate::schedule::evaluate;
    use crate::testing::{Shape, random_dag};

    #[test]
    fn what_is_returned_runs_and_fits() {
        let mut random = Random::new(5);
        let mut fit = 0;
        for _ in 0..300 {
            let problem = random_dag(&mut random, 14, Shape::Training);
            let dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
            let given: Vec<u32> = (0..dag.ops() as u32).collect();
            let mut simulation = Simulation::default();
            simulation.run(&dag, &given);
            let cap = simulation.peak * 9 / 10;
            let weight: Vec<f64> = dag.weight.iter().map(|w| *w as f64).collect();
            let mut work = Work::new(1_000_000);
            let made = evict(&dag, given, cap, &weight, i64::MAX, &mut random, &mut work);
            let Some(made) = made else { continue };
            simulation.run(&dag, &made);
            assert!(simulation.peak <= cap);
            evaluate(&problem, &problem.unfold(&dag.op_in_problem, &made)).unwrap();
            fit += usize::from(made.len() > dag.ops());
        }
        assert!(fit > 50, "{fit}");
    }
}
