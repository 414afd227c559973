//! Branch and bound on how often ops run again: that number is whole, for an op and for all ops of one weight together. It is fixed
//! from above in one branch and from below in the other, where the bound is lowest. All schedules are in some branch, so the
//! smallest bound of those left holds for all.

use super::{Bounded, NONE, Program};
use crate::solve::work::Work;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Most work on the program of a branch.
const BRANCH_UNITS: u64 = 60_000_000;

/// A number nearer to a whole one than this share of the whole cost counts as whole.
const LEAST_SCORE: f64 = 1e-5;

/// The search gives up if one part in [`PATIENCE_SHARE`] of its work raises the bound by less than this share of the gap.
const LEAST_RISE: f64 = 0.01;
const PATIENCE_SHARE: u64 = 5;

/// How much a number of repeats of one op counts beside that of all ops of its weight.
const OP_SHARE: f64 = 0.5;

/// Ops of one weight.
struct Group {
    /// How much a fractional number of runs counts when the group to branch on is chosen.
    score: f64,
    /// The variables of all runs.
    runs: Vec<u32>,
}

/// On which side a limit bounds a number.
#[derive(Clone, Copy)]
enum Limit {
    Least,
    Most,
}

/// How much limits on the numbers of repeats raised bounds so far ("pseudo-costs"; Bénichou et al., "Experiments in mixed-integer
/// linear programming", 1971).
struct Gains<'a> {
    groups: &'a [Group],
    /// For each group and each side of a limit: the total gain, and the total distance by which limits moved the number.
    sums: Vec<[(f64, f64); 2]>,
    /// The same totals over all groups, where each distance is multiplied by the score of its group.
    all: (f64, f64),
}

impl Gains<'_> {
    fn new(groups: &[Group]) -> Gains<'_> {
        Gains {
            groups,
            sums: vec![[(0.0, 0.0); 2]; groups.len()],
            all: (1.0, 1.0),
        }
    }

    fn learn(&mut self, group: usize, limit: Limit, distance: f64, gain: f64) {
        let sums = &mut self.sums[group][limit as usize];
        *sums = (sums.0 + gain, sums.1 + distance);
        self.all.0 += gain;
        self.all.1 += distance * self.groups[group].score;
    }

    /// Returns the product of the gains that both limits are expected to bring; each counts as at least `least`. `over` is the
    /// fractional part of the group's number.
    fn expected(&self, group: usize, over: f64, least: f64) -> f64 {
        let of_unknown = self.groups[group].score * self.all.0 / self.all.1;
        let gain = |limit: Limit, distance: f64| {
            let (sum, of) = self.sums[group][limit as usize];
            let each = if of > 0.0 { sum / of } else { of_unknown };
            (each * distance).max(least)
        };
        gain(Limit::Least, 1.0 - over) * gain(Limit::Most, over)
    }
}

/// A part of all schedules.
struct Branch {
    /// Bounds on the numbers of repeats of groups.
    limits: Vec<(usize, Limit, f64)>,
    /// Rows of the program when it was solved; those of the limits follow.
    rows: usize,
    made: Bounded,
    bound: f64,
}

impl Branch {
    /// Returns the branch in which one more limit holds, for a program of so many rows.
    fn with(&self, limit: (usize, Limit, f64), rows: usize) -> Branch {
        let mut made = self.made.clone();
        let of_limits = made.last.split_off(self.rows);
        made.last.resize(rows, 0.0);
        made.last.extend(of_limits);
        made.last.push(0.0);
        let limits = self.limits.iter().copied().chain([limit]).collect();
        Branch {
            limits,
            rows,
            made,
            bound: self.bound,
        }
    }
}

impl Program<'_> {
    fn groups(&self) -> Vec<Group> {
        let mut of_weight: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        let runs = |o: usize| {
            let windows = self.windows.iter().map(move |w| w[o]);
            windows.filter(|run| *run != NONE)
        };
        for (o, weight) in self.weight.iter().enumerate() {
            if *weight > 0 && runs(o).next().is_some() {
                of_weight.entry(*weight).or_default().push(o);
            }
        }
        let mut groups = Vec::new();
        for (weight, ops) in of_weight {
            let group = |share: f64, ops: &[usize]| Group {
                score: weight as f64 * share,
                runs: ops.iter().flat_map(|o| runs(*o)).collect(),
            };
            groups.push(group(1.0, &ops));
            groups.extend(ops.iter().map(|o| group(OP_SHARE, &[*o])));
        }
        groups
    }

    /// Returns a bound, at most `enough`, and the solution of the branch with the lowest bound. Starts from `made`, the last solution
    /// of the program.
    pub(super) fn branch(
        &mut self,
        cap: i64,
        made: Bounded,
        enough: f64,
        work: &mut Work,
    ) -> Bounded {
        let groups = self.groups();
        let least_score = LEAST_SCORE * self.dag.total_price as f64;
        let (first, patience) = (made.bound, (work.limit - work.done) / PATIENCE_SHARE);
        let mut risen = (first, work.done);
        let mut gains = Gains::new(&groups);
        let mut open = vec![Branch {
            limits: Vec::new(),
            rows: made.last.len(),
            bound: made.bound,
            made,
        }];
        loop {
            let lowest = (0..open.len()).min_by(|a, b| open[*a].bound.total_cmp(&open[*b].bound));
            let Some(at) = lowest else {
                let mut closed = Bounded::default();
                closed.bound = enough;
                return closed;
            };
            let bound = open[at].bound.min(enough);
            if bound > risen.0 + LEAST_RISE * (enough - first) {
                risen = (bound, work.done);
            }
            let count = |group: &Group| -> f64 {
                let point = &open[at].made.point;
                group.runs.iter().map(|run| point[*run as usize]).sum()
            };
            let scores = groups.iter().enumerate().filter_map(|(g, group)| {
                let over = count(group).fract();
                let is_whole = over.min(1.0 - over) * group.score <= least_score;
                (!is_whole).then(|| (g, gains.expected(g, over, least_score)))
            });
            let best = scores.max_by(|a, b| a.1.total_cmp(&b.1));
            let is_over = work.spent() || work.done > risen.1 + patience;
            let Some((group, _)) = best.filter(|_| !is_over) else {
                let mut made = open.swap_remove(at).made;
                made.bound = bound;
                return made;
            };
            let number = count(&groups[group]).floor();
            let over = count(&groups[group]) - number;
            let parent = open.swap_remove(at);
            let rows = self.program.rows();
            let mut branches = [(Limit::Least, number + 1.0), (Limit::Most, number)]
                .map(|(limit, number)| parent.with((group, limit, number), rows));
            let units = BRANCH_UNITS.min(work.limit - work.done);
            let solved = branches.par_iter_mut().map(|branch| {
                let mut program = self.program.clone();
                for (group, limit, number) in &branch.limits {
                    let sign = match limit {
                        Limit::Least => 1.0,
                        Limit::Most => -1.0,
                    };
                    let runs = groups[*group].runs.iter().map(|run| (*run, sign));
                    program.at_least(sign * number, runs);
                }
                let mut work = Work::new(units);
                branch.made = program.lower_bound(enough, &branch.made, &mut work);
                branch.bound = branch.bound.max(branch.made.bound);
                work.done
            });
            work.spend(solved.max().unwrap_or(0));
            let [least, most] = [0, 1].map(|n: usize| branches[n].bound.min(enough) - parent.bound);
            gains.learn(group, Limit::Least, 1.0 - over, least);
            gains.learn(group, Limit::Most, over, most);
            for branch in branches.into_iter().filter(|branch| branch.bound < enough) {
                self.cut(cap, &branch.made.point);
                open.push(branch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ByOp;
    use crate::objective::Objective;
    use crate::solve::compact::Dag;
    use crate::solve::exact::{Outcome, exact};
    use crate::solve::interval_bound::{intervals, positions};
    use crate::solve::simulate::Simulation;
    use crate::solve::work::Random;
    use crate::testing::{Shape, random_dag};

    /// A random problem, a budget, and what the best schedule weighs over running every op once, if one fits.
    fn solved(r: &mut Random) -> Option<(Dag, i64, f64)> {
        let problem = random_dag(r, 9, Shape::Training);
        let dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
        let mut simulation = Simulation::default();
        simulation.run(&dag, &(0..dag.ops() as u32).collect::<Vec<_>>());
        let cap = simulation.peak * (60 + r.below(40) as i64) / 100;
        let Outcome::Optimal(best) = exact(&dag, cap, &mut Work::new(10_000_000)) else {
            return None;
        };
        let best = (dag.weigh_schedule(&best) - dag.total_weight) as f64;
        Some((dag, cap, best))
    }

    #[test]
    fn no_schedule_costs_less_than_branches_say() {
        let mut r = Random::new(8);
        let (mut raised, mut met) = (0, 0);
        for n in 0..200 {
            let Some((dag, cap, best)) = solved(&mut r) else {
                continue;
            };
            let positions = positions(&dag, cap);
            // No plan limits the bound, so that one above the best shows.
            let far = 3.0 * dag.total_weight as f64;
            let mut program = Program::joined(&dag, cap, &dag.weight, &positions);
            let mut work = Work::new(200_000);
            let made = program
                .program
                .lower_bound(far, &Bounded::default(), &mut work);
            let before = made.bound;
            let bound = program
                .branch(cap, made, far, &mut Work::new(400_000))
                .bound;
            assert!(bound <= best + 1.0, "{n}: {bound} {best}");
            raised += usize::from(bound > before + 0.01 * best);
            met += usize::from(best > 0.0 && bound > 0.999 * best);
        }
        assert!(raised > 10 && met > 50, "{raised} {met}");
    }

    /// Adding positions raises the bound, but never above the cost of the best schedule.
    #[test]
    fn further_positions_prove_more_and_never_too_much() {
        let mut r = Random::new(9);
        let (mut added, mut raised, mut closed) = (0, 0, 0);
        for n in 0..100 {
            let Some((dag, cap, best)) = solved(&mut r) else {
                continue;
            };
            for share in [1.0, 1.02, 1.05, 1.5] {
                let above = (best * share) as i64;
                let bound = intervals(&dag, cap, &dag.weight, above, &mut Work::new(100_000));
                assert!(bound as f64 <= best, "{n}: {bound} {best}");
                closed += usize::from(share < 1.1 && bound as f64 > 0.99 * best);
            }
            let far = 3.0 * dag.total_weight as f64;
            let mut chosen: Vec<usize> = positions(&dag, cap).into_iter().take(1).collect();
            let mut before = f64::INFINITY;
            while !chosen.is_empty() {
                let mut program = Program::joined(&dag, cap, &dag.weight, &chosen);
                let known = Bounded::default();
                let made = program
                    .program
                    .lower_bound(far, &known, &mut Work::new(400_000));
                let made = program.branch(cap, made, far, &mut Work::new(400_000));
                assert!(made.bound <= best + 1.0, "{n}: {} {best}", made.bound);
                raised += usize::from(made.bound > before + 0.01 * best);
                before = made.bound;
                let Some(step) = program.fullest(cap, &made.point) else {
                    break;
                };
                assert!(!chosen.contains(&step));
                chosen.push(step);
                chosen.sort_unstable();
                added += 1;
            }
        }
        assert!(
            added > 20 && raised > 10 && closed > 50,
            "{added} {raised} {closed}"
        );
    }
}
