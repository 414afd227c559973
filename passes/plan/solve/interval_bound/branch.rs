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

/// How much a number of repeats of one op counts beside that of all ops of its weight.
const OP_SHARE: f64 = 0.5;

/// Ops of one weight.
struct Group {
    /// How much a fractional number of runs counts when the group to branch on is chosen.
    score: f64,
    /// The variables of all runs.
    runs: Vec<u32>,
}

/// A part of all schedules.
struct Branch {
    /// Bounds on the number of repeats of a group: lower ones (`true`) and upper ones.
    limits: Vec<(usize, bool, f64)>,
    /// Rows of the program when it was solved; those of the limits follow.
    rows: usize,
    made: Bounded,
    bound: f64,
}

impl Branch {
    /// Returns the branch in which one more limit holds, for a program of so many rows.
    fn with(&self, limit: (usize, bool, f64), rows: usize) -> Branch {
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

    /// Returns a bound, `enough` at most; `made` is the last solution of the program.
    pub(super) fn branch(&mut self, cap: i64, made: Bounded, enough: f64, work: &mut Work) -> f64 {
        let groups = self.groups();
        let least_score = LEAST_SCORE * self.dag.total_price as f64;
        let mut open = vec![Branch {
            limits: Vec::new(),
            rows: made.last.len(),
            bound: made.bound,
            made,
        }];
        loop {
            let lowest = (0..open.len()).min_by(|a, b| open[*a].bound.total_cmp(&open[*b].bound));
            let Some(at) = lowest else { return enough };
            let bound = open[at].bound.min(enough);
            if work.spent() {
                return bound;
            }
            let count = |group: &Group| -> f64 {
                let point = &open[at].made.point;
                group.runs.iter().map(|run| point[*run as usize]).sum()
            };
            let score = |group: &Group| {
                let over = count(group).fract();
                over.min(1.0 - over) * group.score
            };
            let scores = groups.iter().map(score).enumerate();
            let best = scores.max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((group, _)) = best.filter(|best| best.1 > least_score) else {
                return bound;
            };
            let number = count(&groups[group]).floor();
            let parent = open.swap_remove(at);
            let rows = self.program.rows();
            let mut branches = [(true, number + 1.0), (false, number)]
                .map(|(is_least, number)| parent.with((group, is_least, number), rows));
            let units = BRANCH_UNITS.min(work.limit - work.done);
            let solved = branches.par_iter_mut().map(|branch| {
                let mut program = self.program.clone();
                for (group, is_least, number) in &branch.limits {
                    let sign = if *is_least { 1.0 } else { -1.0 };
                    let runs = groups[*group].runs.iter().map(|run| (*run, sign));
                    program.at_least(sign * number, runs);
                }
                let mut work = Work::new(units);
                branch.made = program.lower_bound(enough, &branch.made, &mut work);
                branch.bound = branch.bound.max(branch.made.bound);
                work.done
            });
            work.spend(solved.max().unwrap_or(0));
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
    use crate::solve::interval_bound::positions;
    use crate::solve::simulate::Simulation;
    use crate::solve::work::Random;
    use crate::testing::{Shape, random_dag};

    #[test]
    fn no_schedule_costs_less_than_branches_say() {
        let mut r = Random::new(8);
        let (mut raised, mut met) = (0, 0);
        for n in 0..200 {
            let problem = random_dag(&mut r, 9, Shape::Training);
            let dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
            let mut simulation = Simulation::default();
            simulation.run(&dag, &(0..dag.ops() as u32).collect::<Vec<_>>());
            let cap = simulation.peak * (60 + r.below(40) as i64) / 100;
            let Outcome::Optimal(best) = exact(&dag, cap, &mut Work::new(10_000_000)) else {
                continue;
            };
            let best = (dag.weigh_schedule(&best) - dag.total_weight) as f64;
            let positions = positions(&dag, cap);
            // No plan limits the bound, so that one above the best shows.
            let far = 3.0 * dag.total_weight as f64;
            let mut program = Program::joined(&dag, cap, &dag.weight, &positions);
            let mut work = Work::new(200_000);
            let made = program
                .program
                .lower_bound(far, &Bounded::default(), &mut work);
            let before = made.bound;
            let bound = program.branch(cap, made, far, &mut Work::new(400_000));
            assert!(bound <= best + 1.0, "{n}: {bound} {best}");
            raised += usize::from(bound > before + 0.01 * best);
            met += usize::from(best > 0.0 && bound > 0.999 * best);
        }
        assert!(raised > 10 && met > 50, "{raised} {met}");
    }
}
