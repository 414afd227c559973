//! Makes a schedule fit: cuts at the first place that does not, and repeats until all do.
//!
//! The fullest step τ of the first stretch above the budget is cut. What the cut drops is recomputed as late as possible. Steps
//! before τ stay as they are, so the place moves to the right. The exception is a dead value that is kept longer: that is
//! allowed twice for one op, and then only where the steps before have room. An op that is dropped repeatedly gets dearer, so
//! that two steps do not trade the same bytes forever.
//!
//! A cut does not see that an op that runs again needs room then, beside what is kept. A sum over a large result that costs no
//! FLOPs looks free to drop, but making that result again may be impossible late in the backward pass. So repeats that would lack
//! room are found after each cut ([`Cut::crowded`]), and cut again with what the missing bytes cost on top.

use super::compact::Dag;
use super::cut::{Bend, Cut, Scene};
use super::simulate::{Simulation, drop_unread, first_runs};
use super::work::{Random, Work};
use super::writer::Writer;
use std::collections::BTreeSet;

/// How a repair is varied.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// See [`Bend::distance`].
    pub distance: f64,
    /// Random factors on sizes span 1 ± noise/2.
    pub noise: f64,
    /// Whether the fullest step of all is cut instead.
    pub fullest: bool,
    /// Whether operands are recomputed in the other order.
    pub reverse: bool,
    /// Whether the cap rises where nothing fits, to what fits there. Then the answer need not fit: it is the schedule
    /// with the smallest peak that was come by.
    pub rise: bool,
    /// Whether repeats that lack room beside what a cut keeps weigh more in it.
    pub fit_repeats: bool,
    /// How often an op may be cut at with values kept past full steps.
    pub extensions: u32,
    /// Cuts before the repair gives up.
    pub rounds: usize,
}

impl Style {
    /// Returns the plain repair of this module.
    pub fn plain(distance: f64) -> Style {
        Style {
            distance,
            noise: 0.0,
            fullest: false,
            reverse: false,
            rise: false,
            fit_repeats: false,
            extensions: 2,
            rounds: 3000,
        }
    }
}

/// The share of the whole cost that neighbours on the hull must differ by before what lies between is looked for.
const PACK_GAP: f64 = 5e-4;

/// What a cut with random factors may miss its hull by: less than the factors change.
const NOISY_SLACK: f64 = 2e-3;

/// A byte that a repeat lacks costs what a byte does at the cut, and at least this share of the whole cost over all bytes.
const LEAST_PRICE: f64 = 0.1;

/// Repeats of an earlier schedule. A cut pays each op once; one that ran again several times there is expected to do so again, and
/// weighs as much more.
#[derive(Clone, Debug, Default)]
pub struct Foresight {
    /// Op, and how many ops had run for the first time before it ran again.
    repeats: Vec<(u32, u32)>,
    /// How much each repeat beyond the first counts.
    share: f64,
}

impl Foresight {
    /// Returns the repeats of a schedule.
    pub fn of(dag: &Dag, schedule: &[u32], share: f64) -> Foresight {
        let mut stage = 0;
        let mut repeats = Vec::new();
        for (o, first) in schedule.iter().zip(first_runs(dag, schedule)) {
            match first {
                true => stage += 1,
                false => repeats.push((*o, stage)),
            }
        }
        Foresight { repeats, share }
    }

    /// Adds to `penalty` what is expected of each op after its last run up to a stage.
    fn add(&self, dag: &Dag, stage: u32, penalty: &mut [i64]) {
        let mut seen = vec![false; penalty.len()];
        for (o, at) in &self.repeats {
            let o = *o as usize;
            if *at >= stage && std::mem::replace(&mut seen[o], true) {
                penalty[o] += (dag.weight[o] as f64 * self.share) as i64;
            }
        }
    }
}

/// Repairs `schedule` to fit into `cap`; `None` if it cannot, if the work is spent, or if it gets heavier than `limit`.
/// See [`Style::rise`] for the other answer.
pub fn repair(
    dag: &Dag,
    schedule: &[u32],
    mut cap: i64,
    (style, foresight): (Style, &Foresight),
    limit: i64,
    random: &mut Random,
    work: &mut Work,
) -> Option<Vec<u32>> {
    let mut schedule = schedule.to_vec();
    let mut simulation = Simulation::default();
    let mut visits = vec![0u32; dag.ops()];
    let mut drops = vec![0i64; dag.ops()];
    let mut penalty = vec![0i64; dag.ops()];
    let mut jitter = Vec::new();
    let mut lowest: Option<(i64, Vec<u32>)> = None;
    for _ in 0..style.rounds {
        simulation.run(dag, &schedule);
        work.spend(3 * schedule.len() as u64);
        if simulation.peak <= cap {
            return Some(schedule);
        }
        if style.rise && lowest.as_ref().is_none_or(|l| simulation.peak < l.0) {
            lowest = Some((simulation.peak, schedule.clone()));
        }
        if work.spent() {
            break;
        }
        let live = &simulation.live;
        let (from, over) = if style.fullest {
            (0, live.len())
        } else {
            let from = live.iter().position(|bytes| *bytes > cap)?;
            (
                from,
                live[from..]
                    .iter()
                    .take_while(|bytes| **bytes > cap)
                    .count(),
            )
        };
        let step = (from..from + over).rev().max_by_key(|t| live[*t])?;
        if style.noise > 0.0 {
            jitter.clear();
            jitter.extend((0..dag.values()).map(|_| 1.0 + style.noise * (random.unit() - 0.5)));
        }
        let visited = &mut visits[schedule[step] as usize];
        *visited += 1;
        let mut expected = penalty.clone();
        if !foresight.repeats.is_empty() {
            let first = first_runs(dag, &schedule[..=step]);
            let stage = first.iter().filter(|first| **first).count();
            foresight.add(dag, stage as u32, &mut expected);
        }
        let scene = Scene::new(dag, &schedule, step);
        let mut crowded = BTreeSet::new();
        let (cut, point) = loop {
            let bend = Bend {
                distance: style.distance,
                extend: *visited <= style.extensions,
                penalty: &expected,
                jitter: &jitter,
                slack: if style.noise > 0.0 { NOISY_SLACK } else { 0.0 },
                elsewhere: &[],
            };
            let mut cut = Cut::new(dag, &scene, cap, &dag.weight, &bend, Some(live));
            let (low, mut point) = cut.around(work.price, &mut |_| {});
            if let (Some(low), Some(high)) = (&low, &point)
                && style.noise == 0.0
                && (high.weight - low.weight) as f64 > PACK_GAP * dag.total_weight as f64
            {
                point = cut.packed(low, high).or(point);
            }
            work.spend(cut.visits() + 4 * schedule.len() as u64);
            let known = crowded.len();
            if let Some(point) = point.as_ref().filter(|_| style.fit_repeats) {
                let price = point
                    .price
                    .max(LEAST_PRICE * dag.total_weight as f64 / cap as f64);
                for (o, lack) in cut.crowded(point, &scene, &schedule, cap) {
                    if crowded.insert(o) {
                        let more = (price * lack as f64) as i64;
                        expected[o as usize] += more.min(dag.total_weight);
                    }
                }
            }
            if crowded.len() == known || work.spent() {
                break (cut, point);
            }
        };
        let Some(point) = point else {
            if !style.rise || cut.missing_bytes == 0 {
                break;
            }
            cap += cut.missing_bytes;
            continue;
        };
        work.price = point.price;
        let mut writer = Writer::new(
            dag,
            schedule[..=step].to_vec(),
            cut.resident(&point, &scene),
        );
        writer.reverse = style.reverse;
        if !writer.steps(&schedule[step + 1..]) || !writer.outputs() {
            break;
        }
        let mut next = writer.schedule;
        for o in cut.repeated(&point) {
            let o = o as usize;
            drops[o] += 1;
            if drops[o] > 4 {
                penalty[o] += dag.total_weight / 5000 * (drops[o] - 4);
            }
        }
        drop_unread(dag, &mut next);
        schedule = next;
        if dag.weigh_schedule(&schedule) > limit {
            break;
        }
    }
    lowest.map(|l| l.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ByOp;
    use crate::index::OpIdx;
    use crate::objective::Objective;
    use crate::testing::{chain, problem};

    #[test]
    fn repeats_beyond_the_first_that_are_still_to_come_weigh_more() {
        let dag = Dag::new(&chain(), Objective::Cost, &ByOp::default()).unwrap();
        // The first op runs again at stage 4 and twice at stage 5, the second once.
        let schedule = [0, 1, 2, 3, 0, 4, 0, 1, 0, 5, 6];
        let foresight = Foresight::of(&dag, &schedule, 0.5);
        for (stage, times) in [(4, 2), (5, 1), (6, 0)] {
            let mut penalty = vec![0; dag.ops()];
            foresight.add(&dag, stage, &mut penalty);
            assert_eq!(penalty[0], times * (dag.weight[0] as f64 * 0.5) as i64);
            assert!(penalty[1..].iter().all(|more| *more == 0), "{stage}");
        }
    }

    /// A sum over a large result that is free to make looks free to drop, but there is no room to make that result again.
    #[test]
    fn what_cannot_be_made_again_beside_the_rest_is_not_dropped() {
        let ops: [(&str, &[usize], u64); 6] = [
            ("large", &[0], 90),
            ("sum", &[1], 5),
            ("early", &[0], 10),
            ("full", &[0], 88),
            ("end", &[3], 1),
            ("output", &[0], 80),
        ];
        let mut problem = problem(&[1], &ops, &[2, 5, 6]);
        for (op, cost) in [(0, 0.0), (1, 0.0), (3, 99.0), (5, 5.0)] {
            problem.ops[OpIdx(op)].cost = cost;
        }
        let dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
        let given: Vec<u32> = (0..6).collect();
        let repaired = |fit_repeats: bool| {
            let style = Style {
                fit_repeats,
                ..Style::plain(0.0)
            };
            let style = (style, &Foresight::default());
            let (mut random, mut work) = (Random::new(1), Work::new(1_000_000));
            repair(&dag, &given, 100, style, i64::MAX, &mut random, &mut work)
        };
        assert_eq!(repaired(true).unwrap(), [0, 1, 2, 3, 2, 4, 5]);
        assert_ne!(repaired(false), repaired(true));
    }
}
