//! Searches for a cheap schedule within a cap: makes first plans from several cuts, then removes stretches and rebuilds them.

use super::bound;
use super::compact::{Dag, NONE};
use super::evict::evict;
use super::exact::{Outcome, exact};
use super::incremental_liveness::prune;
use super::repair::{Foresight, Style, repair};
use super::simulate::{Simulation, drop_unread};
use super::work::{Random, WIDE_GAP, Work};
use super::writer::with_drops;
use rayon::prelude::*;
use std::collections::BTreeSet;

/// A search for a cheap schedule within a cap.
pub struct Search<'a> {
    dag: &'a Dag,
    cap: i64,
    work: &'a mut Work,
    random: Random,
    foresight: Foresight,
    /// How many random repairs weigh in the room that repeats need ([`Style::fit_repeats`]); with 0, no repair at all does.
    pub fitted: f64,
    /// Whether the search begins with repairs of the given order. Once these have failed at a cap, they would fail again.
    pub repairs_given: bool,
    /// Whether the answer is known to be the best.
    pub optimal: bool,
}

/// Distances of the first cuts; see [`super::cut::Bend`].
const DISTANCES: [f64; 3] = [0.02, 0.0, 0.3];

/// Further beginnings: distance, extensions, reverse, fullest; see [`Style`].
const OTHERS: [(f64, u32, bool, bool); 7] = [
    (0.02, 0, false, false),
    (0.02, 1000, false, false),
    (1.0, 2, false, false),
    (0.02, 2, true, false),
    (0.02, 2, false, true),
    (-0.3, 2, false, false),
    (0.3, 0, true, false),
];

/// The share of the whole cost above which a gap calls for them.
pub const FAR_GAP: f64 = 0.01;

/// How often a search begins again from the given order where the gap is that wide after half of the work, how many of these beginnings know the repeats
/// of the plan so far ([`Foresight`]), and how much these count at most.
const FAR_RESTARTS: f64 = 0.6;
const FORESEEN: f64 = 0.7;
const MOST_FORESIGHT: f64 = 1.5;

/// See [`Search::fitted`].
pub const FITTED: f64 = 0.8;

/// They take about one part in this many of the work.
const OTHERS_SHARE: u64 = 6;

/// Most rounds of annealing, where the gap stays that wide. Each starts from the best schedule so far.
const ANNEALING_ROUNDS: u64 = 20;

/// They end once a round saves less than this share of the whole cost.
const LEAST_ROUND: f64 = 1e-3;

/// The repairs that make a schedule fit: distance and noise; see [`Style`].
const FITS: [(f64, f64); 5] = [(0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.3, 0.5), (0.0, 0.5)];

/// The work is divided by this number to limit each of these repairs. Those that succeed need less.
const FIT_SHARE: u64 = 20;

/// The number of schedules that are repaired. Those with the lowest peaks are chosen; repairs of others hardly ever succeed.
const MOST_FITTED: usize = 8;

/// A repaired schedule is annealed if it adds at most this many times the cost that the known plan adds. Each annealing is limited to the
/// work divided by [`ANNEALED_SHARE`].
const NEAR: f64 = 1.2;
const ANNEALED_SHARE: u64 = 8;

/// Annealed searches in a round ([`Search::anneal`]). They run side by side.
const ANNEALED: u64 = 2;

/// The share of what a plan costs above running every op once that an annealed search may lose at first; it falls to nothing.
const HEAT: f64 = 0.04;

/// Up to how many times their weight the repeats that it takes out count while others are chosen.
const SHUNNED: f64 = 3.0;

/// Most neighbouring repeats that are taken out at once, in searches and in annealed ones.
const MOST_TORN: usize = 40;
const FEW_TORN: usize = 12;

/// A first plan may take this much work beyond the limit, for each op.
pub const FIRST_UNITS: u64 = 40_000;

/// The share of the whole cost up to which a gap is worth only one part in [`NARROW_SHARE`] of the work.
const NARROW_GAP: f64 = 1e-4;
const NARROW_SHARE: u64 = 16;

/// A search goes on for so many times what it took to its last improvement, and at least for this part of its work.
const PATIENCE: u64 = 4;
const LEAST_PATIENCE: u64 = 4;

/// A descent starts at this share above the cap, and takes so many steps ([`Search::descend`]).
const DESCENT: f64 = 0.1;
const DESCENT_STEPS: i64 = 8;

/// The repairs in each of its steps, as in [`FITS`]. Each is limited to the work divided by [`DESCENT_SHARE`].
const DESCENT_FITS: [(f64, f64); 3] = [(0.0, 0.0), (0.3, 0.0), (1.0, 0.0)];
const DESCENT_SHARE: u64 = 2;

/// Work of an exact search before it gives up.
pub const EXACT_UNITS: u64 = 20_000_000;

/// Returns the schedule with the lowest weight. Of equals it returns the first, so that the result does not depend on threads.
fn lightest(dag: &Dag, first: Vec<u32>, others: Vec<Vec<u32>>) -> Vec<u32> {
    others.into_iter().fold(first, |best, other| {
        match dag.weigh_schedule(&other) < dag.weigh_schedule(&best) {
            true => other,
            false => best,
        }
    })
}

/// Runs searches side by side, one from each start. Each has `units` of work and random numbers of its own, from seed `first` on.
fn side_by_side<S: Sync, T: Send>(
    (dag, cap): (&Dag, i64),
    starts: &[S],
    (first, units): (u64, u64),
    search_from: impl Fn(&mut Search, &S) -> T + Sync,
) -> Vec<T> {
    let seeded: Vec<(u64, &S)> = (first..).zip(starts).collect();
    let made = seeded.into_par_iter().map(|(seed, start)| {
        let mut work = Work::new(units);
        let mut search = Search::new(dag, cap, &mut work);
        search.random = Random::new(seed);
        search_from(&mut search, start)
    });
    made.collect()
}

/// Anneals a schedule in rounds, each with `units` of work, while this pays.
pub fn anneal_in_rounds(dag: &Dag, cap: i64, mut best: Vec<u32>, units: u64) -> Vec<u32> {
    if dag.turn != NONE {
        return best;
    }
    let total = dag.total_weight as f64;
    for round in 0..ANNEALING_ROUNDS {
        let weight = dag.weigh_schedule(&best);
        let starts = vec![best.clone(); ANNEALED as usize];
        let made = anneal_all(dag, cap, &starts, (1 + round * ANNEALED, units));
        best = lightest(dag, best, made);
        if ((weight - dag.weigh_schedule(&best)) as f64) < LEAST_ROUND * total {
            break;
        }
    }
    best
}

/// Anneals schedules side by side, each with `units` of work and random numbers from seed `first` on.
fn anneal_all(
    dag: &Dag,
    cap: i64,
    starts: &[Vec<u32>],
    (first, units): (u64, u64),
) -> Vec<Vec<u32>> {
    side_by_side((dag, cap), starts, (first, units), |search, start| {
        search.anneal(start.to_vec())
    })
}

/// Repairs a schedule that exceeds the cap in several ways and returns the lightest result; `None` if all fail. Each way is a distance and a
/// noise, as in [`FITS`], and may take `units` of work.
fn fit(dag: &Dag, cap: i64, schedule: &[u32], ways: &[(f64, f64)], units: u64) -> Option<Vec<u32>> {
    let made = side_by_side((dag, cap), ways, (1, units), |search, (distance, noise)| {
        let style = Style {
            noise: *noise,
            fit_repeats: true,
            rounds: 300,
            ..Style::plain(*distance)
        };
        let fits = search.repair(schedule, style, i64::MAX)?;
        Some(search.prune(fits))
    });
    let made = made.into_iter().flatten();
    made.min_by_key(|made| dag.weigh_schedule(made))
}

/// Repairs the schedules with the lowest peaks of those that exceed the cap, and anneals the results. After each annealing the lighter half
/// of them is annealed again ("successive halving"; Jamieson and Talwalkar, 2016). Returns the lightest schedule of all, including
/// `known`, which already fits. At the end, the best result is annealed in rounds, each with `units` of work.
pub fn fit_all(dag: &Dag, cap: i64, starts: &[Vec<u32>], known: Vec<u32>, units: u64) -> Vec<u32> {
    if dag.turn != NONE {
        return known;
    }
    let mut simulation = Simulation::default();
    let mut starts = starts.to_vec();
    starts.sort_by_cached_key(|start| {
        simulation.run(dag, start);
        simulation.peak
    });
    starts.truncate(MOST_FITTED);
    let fits = starts.par_iter();
    let fits = fits.filter_map(|start| fit(dag, cap, start, &FITS, units / FIT_SHARE));
    let above = |plan: &Vec<u32>| dag.weigh_schedule(plan) - dag.total_weight;
    let most = (above(&known) as f64 * NEAR) as i64;
    let mut fits: Vec<Vec<u32>> = fits.filter(|fits| above(fits) <= most).collect();
    fits.sort_by_key(above);
    fits.dedup();
    let mut first = 1;
    loop {
        fits = anneal_all(dag, cap, &fits, (first, units / ANNEALED_SHARE));
        fits.sort_by_key(above);
        if fits.len() <= 1 {
            break;
        }
        first += fits.len() as u64;
        fits.truncate(fits.len() / 2);
    }
    match fits.pop().filter(|fits| above(fits) < above(&known)) {
        Some(best) => anneal_in_rounds(dag, cap, best, units),
        None => known,
    }
}

impl<'a> Search<'a> {
    /// Builds a search for schedules that peak at `cap` bytes above static at most; it stops at the limit of `work`.
    pub fn new(dag: &'a Dag, cap: i64, work: &'a mut Work) -> Search<'a> {
        Search {
            dag,
            cap,
            work,
            random: Random::new(1),
            foresight: Foresight::default(),
            fitted: FITTED,
            repairs_given: true,
            optimal: false,
        }
    }

    fn fits(&self, schedule: &[u32]) -> bool {
        let mut simulation = Simulation::default();
        simulation.run(self.dag, schedule);
        simulation.peak <= self.cap
    }

    /// Returns the schedule with the smallest peak that a few repairs of `start` find when the cap rises wherever nothing fits. Each takes
    /// at most half of the work that is left.
    pub fn lowest(&mut self, start: &[u32]) -> Option<Vec<u32>> {
        let mut simulation = Simulation::default();
        let mut best: Option<(i64, Vec<u32>)> = None;
        let limit = self.work.limit;
        for (distance, extensions) in [(0.02, 2), (0.3, 2), (0.0, 0), (0.02, 1000)] {
            self.work.limit = self.work.done + limit.saturating_sub(self.work.done) / 2;
            let style = Style {
                rise: true,
                fit_repeats: self.fitted > 0.0,
                extensions,
                ..Style::plain(distance)
            };
            let Some(made) = self.repair(start, style, i64::MAX) else {
                continue;
            };
            simulation.run(self.dag, &made);
            if best.as_ref().is_none_or(|b| simulation.peak < b.0) {
                best = Some((simulation.peak, made));
            }
            if simulation.peak <= self.cap {
                break;
            }
        }
        self.work.limit = limit;
        best.map(|b| b.1)
    }

    /// Returns a schedule that is found by way of larger caps: the plan for one is repaired for the next smaller one. Near the smallest
    /// peak, repairs of the given order end where nothing fits, and the schedule with that peak is dear.
    pub fn descend(&mut self) -> Option<Vec<u32>> {
        let (dag, units) = (self.dag, self.work.limit);
        let mut now: Option<Vec<u32>> = None;
        for step in (0..=DESCENT_STEPS).rev() {
            let share = DESCENT * step as f64 / DESCENT_STEPS as f64;
            let cap = self.cap + (self.cap as f64 * share) as i64;
            let made = match &now {
                None => Search::new(dag, cap, &mut Work::new(units)).approximate(&[]),
                Some(plan) => fit(dag, cap, plan, &DESCENT_FITS, units / DESCENT_SHARE),
            };
            now = made.or(now);
        }
        now.filter(|plan| self.fits(plan))
    }

    /// Returns any schedule that fits.
    pub fn any(&mut self) -> Option<Vec<u32>> {
        let given = with_drops(self.dag)?;
        if self.fits(&given) {
            return Some(given);
        }
        self.lucky(&given)
    }

    /// Random repairs of the given order until one fits.
    fn lucky(&mut self, given: &[u32]) -> Option<Vec<u32>> {
        while !self.work.spent() {
            let style = self.random_style(600);
            if let Some(made) = self.repair(given, style, i64::MAX) {
                return Some(made);
            }
        }
        None
    }

    fn fits_repeats(&mut self) -> bool {
        self.fitted > 0.0 && self.random.unit() < self.fitted
    }

    fn random_style(&mut self, rounds: usize) -> Style {
        Style {
            distance: [0.0, 0.02, 0.3, 1.0, 3.0, -0.3][self.random.below(6)],
            noise: 1.5 * self.random.unit() * self.random.unit(),
            fullest: self.random.unit() < 0.2,
            reverse: self.random.unit() < 0.4,
            rise: false,
            fit_repeats: self.fits_repeats(),
            extensions: [0, 1, 2, 1000][self.random.below(4)],
            rounds,
        }
    }

    fn repair(&mut self, schedule: &[u32], style: Style, limit: i64) -> Option<Vec<u32>> {
        repair(
            self.dag,
            schedule,
            self.cap,
            (style, &self.foresight),
            limit,
            &mut self.random,
            self.work,
        )
    }

    /// Returns the best of both orders of pruning.
    fn prune(&mut self, schedule: Vec<u32>) -> Vec<u32> {
        let (mut a, mut b) = (schedule.clone(), schedule);
        let units =
            prune(self.dag, &mut a, self.cap, false) + prune(self.dag, &mut b, self.cap, true);
        self.work.spend(units);
        if self.dag.weigh_schedule(&b) < self.dag.weigh_schedule(&a) {
            b
        } else {
            a
        }
    }

    /// Returns the best schedule found; `None` if none fits.
    pub fn run(&mut self, seeds: &[Vec<u32>]) -> Option<Vec<u32>> {
        let given = with_drops(self.dag)?;
        if self.fits(&given) {
            self.optimal = self.dag.turn == NONE;
            return Some(given);
        }
        match exact(self.dag, self.cap, &mut Work::new(EXACT_UNITS)) {
            Outcome::Optimal(schedule) => {
                self.optimal = true;
                return Some(schedule);
            }
            Outcome::Infeasible => return None,
            Outcome::Unknown => {}
        }
        self.approximate(seeds)
    }

    /// Returns the best schedule that a search finds for a problem too large to be solved exactly; `None` if none fits.
    pub fn approximate(&mut self, seeds: &[Vec<u32>]) -> Option<Vec<u32>> {
        let given = with_drops(self.dag)?;
        if self.fits(&given) {
            return Some(given);
        }
        let lower = bound::one_position(self.dag, self.cap, &self.dag.weight, 3, self.work)?;
        let lower = self.dag.total_weight + lower;
        let mut best: Option<(i64, Vec<u32>)> = None;
        let offer = |best: &mut Option<(i64, Vec<u32>)>, dag: &Dag, made: Vec<u32>| {
            let weight = dag.weigh_schedule(&made);
            if best.as_ref().is_none_or(|b| weight < b.0) {
                *best = Some((weight, made));
            }
        };
        for seed in seeds {
            let mut seed = seed.clone();
            drop_unread(self.dag, &mut seed);
            if self.fits(&seed) {
                let seed = self.prune(seed);
                offer(&mut best, self.dag, seed);
            }
        }
        let limit = self.work.limit;
        for distance in DISTANCES {
            if !self.repairs_given || best.as_ref().is_some_and(|b| b.0 <= lower) {
                break;
            }
            self.work.limit = limit.max(self.work.done + FIRST_UNITS * self.dag.ops() as u64);
            let style = Style {
                fit_repeats: self.fitted > 0.0,
                ..Style::plain(distance)
            };
            if let Some(made) = self.repair(&given, style, i64::MAX) {
                let made = self.prune(made);
                offer(&mut best, self.dag, made);
            }
            self.work.limit = limit;
        }
        if best.is_none() {
            self.work.limit = self.work.stretched.max(self.work.limit);
        }
        if best.is_none()
            && let Some(made) = self.lucky(&given)
        {
            let made = self.prune(made);
            offer(&mut best, self.dag, made);
        }
        let mut first = best?;
        let far = |weight: i64| (weight - lower) as f64 > FAR_GAP * self.dag.total_weight as f64;
        // Far from the bound it pays to begin in other ways before one beginning is improved.
        let others =
            self.work.done + self.work.stretched.saturating_sub(self.work.done) / OTHERS_SHARE;
        let limit = self.work.limit;
        for (distance, extensions, reverse, fullest) in OTHERS {
            if !far(first.0) || self.work.done >= others {
                break;
            }
            self.work.limit = self.work.stretched;
            let style = Style {
                extensions,
                reverse,
                fullest,
                fit_repeats: self.fitted > 0.0,
                ..Style::plain(distance)
            };
            if let Some(made) = self.repair(&given, style, first.0 + (first.0 - lower) / 2) {
                let made = self.prune(made);
                let weight = self.dag.weigh_schedule(&made);
                if weight < first.0 {
                    first = (weight, made);
                }
            }
            self.work.limit = limit;
        }
        let (weight, start) = first;
        if weight <= lower {
            return Some(start);
        }
        Some(self.improve(start, &given, lower))
    }

    /// Takes out a few repeats of a schedule and drops other values in their place, until the work is spent or nothing runs again
    /// (simulated annealing; Kirkpatrick, Gelatt and Vecchi, 1983).
    fn anneal(&mut self, start: Vec<u32>) -> Vec<u32> {
        let (dag, total) = (self.dag, self.dag.total_weight);
        let mut best = start.clone();
        let mut best_weight = dag.weigh_schedule(&best);
        let (mut now, mut now_weight) = (start, best_weight);
        let (begun, limit) = (self.work.done, self.work.limit);
        while best_weight > total && !self.work.spent() {
            let left = (limit - self.work.done) as f64 / (limit - begun) as f64;
            let (torn, gone) = self.tear(&now, FEW_TORN);
            let noise = self.random.unit();
            let mut bent: Vec<f64> = dag.weight.iter().map(|w| *w as f64).collect();
            for weight in &mut bent {
                *weight *= 1.0 + noise * (self.random.unit() - 0.5);
            }
            let dearer = 1.0 + SHUNNED * self.random.unit();
            for o in gone {
                bent[o as usize] *= dearer;
            }
            let most = now_weight + (now_weight - total) / 2 + total / 50;
            let (random, work) = (&mut self.random, &mut *self.work);
            let Some(mut made) = evict(dag, torn, self.cap, &bent, most, random, work) else {
                continue;
            };
            let by_room = self.random.unit() < 0.5;
            let units = prune(dag, &mut made, self.cap, by_room);
            self.work.spend(units);
            let weight = dag.weigh_schedule(&made);
            let slack = (now_weight - total) as f64 * HEAT * left * self.random.unit();
            if weight < now_weight + slack as i64 {
                (now, now_weight) = (made, weight);
            }
            if now_weight < best_weight {
                best.clone_from(&now);
                best_weight = now_weight;
            }
            if now_weight > best_weight + (best_weight - total) / 10 {
                now.clone_from(&best);
                now_weight = best_weight;
            }
        }
        best
    }

    /// Tears up and rebuilds parts of a schedule until the work is spent or the bound is met.
    fn improve(&mut self, start: Vec<u32>, given: &[u32], lower: i64) -> Vec<u32> {
        let dag = self.dag;
        let total = dag.total_weight;
        let mut best = start.clone();
        let mut best_weight = dag.weigh_schedule(&best);
        let (mut now, mut now_weight) = (start, best_weight);
        let mut heat = 0.02;
        let (begun, mut improved) = (self.work.done, self.work.done);
        let narrow_units = self.work.limit.saturating_sub(begun) / NARROW_SHARE;
        while best_weight > lower {
            let is_narrow = ((best_weight - lower) as f64) <= NARROW_GAP * total as f64;
            if is_narrow && self.work.done - begun > narrow_units {
                break;
            }
            if self.work.done - begun
                > self.work.stretched / LEAST_PATIENCE + PATIENCE * (improved - begun)
            {
                break;
            }
            if self.work.spent() {
                let wide = (best_weight - lower) as f64 > WIDE_GAP * total as f64;
                if !wide || self.work.limit >= self.work.stretched {
                    break;
                }
                self.work.limit = self.work.stretched;
            }
            heat *= 0.999;
            let is_late = self.work.done > self.work.stretched / 2;
            let is_far = is_late && (best_weight - lower) as f64 > FAR_GAP * total as f64;
            let restart = match is_far {
                true => FAR_RESTARTS,
                false if dag.ops() < 400 => 0.1,
                false => 0.03,
            };
            let (made, allowed) = if self.random.unit() < restart {
                let style = self.random_style(300);
                if is_far && self.random.unit() < FORESEEN {
                    let share = MOST_FORESIGHT * self.random.unit();
                    self.foresight = Foresight::of(dag, &now, share);
                }
                let made = self.repair(given, style, best_weight + (best_weight - total));
                self.foresight = Foresight::default();
                (made, best_weight + (best_weight - total) / 20)
            } else {
                let (torn, _) = self.tear(&now, MOST_TORN);
                let noisy = self.random.unit() < 0.7;
                let style = Style {
                    noise: if noisy { self.random.unit() } else { 0.0 },
                    reverse: noisy && self.random.unit() < 0.4,
                    fit_repeats: self.fits_repeats(),
                    extensions: [2, 2, 2, 0, 1000][self.random.below(5)],
                    rounds: 60,
                    ..Style::plain([0.0, 0.3, 1.0, 4.0][self.random.below(4)])
                };
                let made = self.repair(
                    &torn,
                    style,
                    now_weight + (now_weight - total) / 2 + total / 50,
                );
                let slack = (now_weight - total) as f64 * heat * self.random.unit();
                (made, now_weight + slack as i64)
            };
            let Some(mut made) = made else { continue };
            let by_room = self.random.unit() < 0.5;
            let units = prune(dag, &mut made, self.cap, by_room);
            self.work.spend(units);
            let weight = dag.weigh_schedule(&made);
            if weight < allowed {
                (now, now_weight) = (made, weight);
                if weight < best_weight {
                    best.clone_from(&now);
                    best_weight = weight;
                    improved = self.work.done;
                }
            }
            if now_weight > best_weight + (best_weight - total) / 10 {
                now.clone_from(&best);
                now_weight = best_weight;
            }
        }
        best
    }

    /// Returns a schedule without some of its repeats, a run of at most `most` or a few heavy ones, and the ops of these.
    fn tear(&mut self, schedule: &[u32], most: usize) -> (Vec<u32>, BTreeSet<u32>) {
        let dag = self.dag;
        let mut runs = vec![0u32; dag.ops()];
        let repeats: Vec<usize> = (0..schedule.len())
            .filter(|t| {
                let o = schedule[*t];
                runs[o as usize] += 1;
                runs[o as usize] > 1 + u32::from(dag.must_repeat(o))
            })
            .collect();
        let mut gone = vec![false; schedule.len()];
        if repeats.is_empty() {
            return (schedule.to_vec(), BTreeSet::new());
        }
        if self.random.unit() < 0.5 {
            let from = self.random.below(repeats.len());
            let count = 1 + self.random.below((repeats.len() / 3).clamp(1, most));
            for t in repeats.iter().skip(from).take(count) {
                gone[*t] = true;
            }
        } else {
            for _ in 0..1 + self.random.below(4) {
                let mut pick = repeats[self.random.below(repeats.len())];
                for _ in 0..2 {
                    let other = repeats[self.random.below(repeats.len())];
                    if dag.weight[schedule[other] as usize] > dag.weight[schedule[pick] as usize] {
                        pick = other;
                    }
                }
                gone[pick] = true;
            }
        }
        let steps = schedule.iter().zip(&gone);
        let ops = steps.clone().filter(|(_, gone)| **gone).map(|(o, _)| *o);
        let (ops, rest) = (ops.collect(), steps.filter(|(_, gone)| !**gone));
        let mut torn: Vec<u32> = rest.map(|(o, _)| *o).collect();
        drop_unread(dag, &mut torn);
        (torn, ops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ByOp;
    use crate::objective::Objective;
    use crate::testing::{Shape, random_dag};

    #[test]
    fn what_is_made_fit_is_no_heavier_than_what_is_known() {
        let mut random = Random::new(11);
        let (mut tried, mut lighter) = (0, 0);
        for _ in 0..200 {
            let problem = random_dag(&mut random, 20, Shape::Training);
            let dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
            let given: Vec<u32> = (0..dag.ops() as u32).collect();
            let mut simulation = Simulation::default();
            simulation.run(&dag, &given);
            let cap = simulation.peak * 8 / 10;
            let mut work = Work::new(1_000_000);
            let Some(known) = Search::new(&dag, cap, &mut work).any() else {
                continue;
            };
            let weight = dag.weigh_schedule(&known);
            let starts = [given, known.clone()];
            let made = fit_all(&dag, cap, &starts, known, 200_000);
            simulation.run(&dag, &made);
            assert!(simulation.peak <= cap);
            assert!(dag.weigh_schedule(&made) <= weight);
            tried += 1;
            lighter += usize::from(dag.weigh_schedule(&made) < weight);
        }
        assert!(tried > 50 && lighter > 10, "{tried} {lighter}");
    }
}
