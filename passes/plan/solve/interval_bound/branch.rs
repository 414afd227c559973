//! Branch and bound. How often ops run again is a whole number, for an op and for all ops of one weight together, and a value stays at
//! a position or it does not. Each branch is divided at such a number: one part limits it from above, the other from below. The
//! branches with the lowest bounds are divided first. Each schedule is in some branch, so the lowest bound of all open branches holds. If
//! nothing is left to decide in a branch, or the bound no longer rises, a position is added.

use super::position::Rule;
use super::program::Program;
use crate::solve::compact::NONE;
use crate::solve::linear_program::Bounded;
use crate::solve::work::Work;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most work on the program of a branch.
const BRANCH_UNITS: u64 = 1_000_000_000;

/// Solutions are not exact. A number counts as whole if its distance to a whole number costs less than this share of the whole cost.
const LEAST_SCORE: f64 = 1e-4;

/// A position is added if one part in [`PATIENCE_SHARE`] of the work raised the bound by less than this share of the gap.
const LEAST_RISE: f64 = 0.01;
const PATIENCE_SHARE: u64 = 12;

/// Most work on each part of a group that is tried, and how many groups are tried or branches are divided at a time.
const PROBE_UNITS: u64 = 10_000_000;
const TOGETHER: usize = 4;

/// Groups that are tried without finding a better one before the best is taken.
const LOOKAHEAD: usize = 8;

/// How much a number of repeats of one op counts beside that of all ops of its weight.
const OP_SHARE: f64 = 0.5;

/// What is a whole number in every schedule.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Number {
    /// How often all ops of one weight run again.
    RepeatsOfWeight(i64),
    /// How often one op runs again.
    Repeats(usize),
    /// 1 if a value stays at a position, else 0; the variable that says so.
    Stays(u32),
}

/// The variables whose sum is a [`Number`].
struct Group {
    number: Number,
    /// How much a fractional number of runs counts when the group to branch on is chosen.
    score: f64,
    /// The variables of all runs, or of a residency.
    runs: Arc<[u32]>,
}

/// On which side a limit bounds a number.
#[derive(Clone, Copy)]
enum Side {
    Least,
    Most,
}

/// A bound on a number of repeats.
#[derive(Clone)]
struct Limit {
    runs: Arc<[u32]>,
    side: Side,
    number: f64,
}

/// How much limits on the numbers of repeats raised bounds so far ("pseudo-costs"; Bénichou et al., "Experiments in mixed-integer
/// linear programming", 1971).
struct Gains {
    /// For each group and side, two sums: of the gains, and of the distances by which the limits moved the number.
    sums: FxHashMap<Number, [(f64, f64); 2]>,
    /// The same totals over all groups, where each distance is multiplied by the score of its group.
    all: (f64, f64),
}

impl Gains {
    fn learn(&mut self, group: &Group, side: Side, distance: f64, gain: f64) {
        let sums = &mut self.sums.entry(group.number).or_default()[side as usize];
        *sums = (sums.0 + gain, sums.1 + distance);
        self.all.0 += gain;
        self.all.1 += distance * group.score;
    }

    /// Returns whether a limit on the group was tried.
    fn knows(&self, group: &Group) -> bool {
        self.sums.contains_key(&group.number)
    }

    /// Returns the product of the gains that both limits are expected to bring; each counts as at least `least`. `over` is the
    /// fractional part of the group's number.
    fn expected(&self, group: &Group, over: f64, least: f64) -> f64 {
        let of_unknown = group.score * self.all.0 / self.all.1;
        let known = self.sums.get(&group.number).copied().unwrap_or_default();
        let gain = |side: Side, distance: f64| {
            let (sum, of) = known[side as usize];
            let each = if of > 0.0 { sum / of } else { of_unknown };
            (each * distance).max(least)
        };
        gain(Side::Least, 1.0 - over) * gain(Side::Most, over)
    }
}

/// A part of all schedules.
struct Branch {
    limits: Vec<Limit>,
    /// Rows of the program when the branch was solved; those of the limits follow.
    rows: usize,
    /// [`Program::settled`] then. If it is another now, what was fixed no longer holds.
    settled: usize,
    /// The last solution. Its bound never falls.
    made: Bounded,
    /// Variables of the program that are the same in all schedules of this part that still matter.
    fixed: Vec<Option<bool>>,
}

impl Branch {
    /// Returns the part in which one more limit holds, or the same, with the rows that the program has now.
    fn with(&self, limit: Option<&Limit>, program: &Program) -> Branch {
        let mut made = self.made.clone();
        let duals = made.duals.split_off(self.rows);
        let slacks = made.basis.slacks.split_off(self.rows);
        let is_in = made.is_in.split_off(self.rows);
        program.extend(&mut made);
        made.is_in.extend(is_in);
        made.duals.extend(duals);
        made.basis.slacks.extend(slacks);
        let mut fixed = self.fixed.clone();
        if self.settled != program.settled {
            fixed.clear();
        }
        // For variables that are new, what is fixed for all.
        fixed.extend(&program.program.fixed[fixed.len()..]);
        Branch {
            limits: self.limits.iter().chain(limit).cloned().collect(),
            rows: program.program.rows(),
            settled: program.settled,
            made,
            fixed,
        }
    }

    /// Returns the limits that round the count of a group up and down, each with what it moves the count by.
    fn sides(&self, group: &Group) -> [(Limit, f64); 2] {
        let count = self.count(group);
        let (number, over) = (count.floor(), count.fract());
        let limit = |side: Side, number: f64| Limit {
            runs: group.runs.clone(),
            side,
            number,
        };
        [
            (limit(Side::Least, number + 1.0), 1.0 - over),
            (limit(Side::Most, number), over),
        ]
    }

    /// Returns how often the ops of a group run again.
    fn count(&self, group: &Group) -> f64 {
        let point = &self.made.point;
        group
            .runs
            .iter()
            .filter_map(|run| point.get(*run as usize))
            .sum()
    }

    /// Solves the program of this part.
    fn solve(&mut self, program: &Program, enough: f64, work: &mut Work) {
        if self.made.bound >= enough {
            return;
        }
        let mut program = program.program.clone();
        program.fixed.clone_from(&self.fixed);
        for limit in &self.limits {
            let sign = match limit.side {
                Side::Least => 1.0,
                Side::Most => -1.0,
            };
            program.at_least(
                sign * limit.number,
                limit.runs.iter().map(|run| (*run, sign)),
            );
        }
        let before = self.made.bound;
        if program.fix(&self.made.duals, enough, work) {
            self.made = program.bound_and_fix(enough, &self.made, work);
            self.made.bound = self.made.bound.max(before);
        } else {
            self.made.bound = enough;
        }
        self.fixed = program.fixed;
    }
}

/// A group that a branch can be divided by.
struct Division<'g> {
    group: &'g Group,
    /// The fractional part of the group's number.
    over: f64,
    /// What the division is expected to bring; infinite once a part of it is known to need no further look.
    score: f64,
    /// The two parts, if the division was tried.
    parts: Option<[Branch; 2]>,
}

impl Division<'_> {
    fn is_better(&self, best: &Option<Division>) -> bool {
        best.as_ref().is_none_or(|best| self.score > best.score)
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
            let group = |number: Number, share: f64, ops: &[usize]| Group {
                number,
                score: weight as f64 * share,
                runs: ops.iter().flat_map(|o| runs(*o)).collect(),
            };
            groups.push(group(Number::RepeatsOfWeight(weight), 1.0, &ops));
            let of_op = |o: &usize| group(Number::Repeats(*o), OP_SHARE, &[*o]);
            groups.extend(ops.iter().map(of_op));
        }
        groups
    }

    /// Returns the groups of one variable each: a value that stays at one position. They score by their bytes.
    fn single_stays(&self) -> Vec<Group> {
        let worth = self.dag.total_price as f64 / self.cap.max(1) as f64;
        let group = |(v, stays): (usize, u32)| Group {
            number: Number::Stays(stays),
            score: self.dag.size[v] as f64 * worth,
            runs: [stays].into(),
        };
        self.residencies().map(group).collect()
    }

    /// Solves the programs of branches in parallel, each with at most `units` of work. Counts the work as two cores do it.
    fn solve_branches(&self, branches: &mut [Branch], units: u64, enough: f64, work: &mut Work) {
        let units = units.min(work.limit.saturating_sub(work.done));
        let solved = branches.par_iter_mut().map(|branch| {
            let mut work = Work::new(units);
            branch.solve(self, enough, &mut work);
            work.done
        });
        work.spend(solved.sum::<u64>() / 2);
    }

    /// Divides a branch in two at the fractional count of each group: one part rounds the count up, the other rounds it down.
    fn divide(
        &self,
        parent: &Branch,
        divisions: &mut [Division],
        enough: f64,
        gains: &mut Gains,
        work: &mut Work,
    ) {
        let sides = divisions.iter().flat_map(|d| parent.sides(d.group));
        let (limits, distances): (Vec<Limit>, Vec<f64>) = sides.unzip();
        let parts = limits.iter().map(|limit| parent.with(Some(limit), self));
        let mut parts: Vec<Branch> = parts.collect();
        self.solve_branches(&mut parts, PROBE_UNITS, enough, work);
        for (i, part) in parts.iter().enumerate() {
            let gain = part.made.bound - parent.made.bound;
            gains.learn(divisions[i / 2].group, limits[i].side, distances[i], gain);
        }
        let mut parts = parts.into_iter();
        for division in divisions {
            let two = parts.next().zip(parts.next()).map(|(a, b)| [a, b]);
            let is_closed = |part: &Branch| part.made.bound >= enough;
            division.score = match two.iter().flatten().any(is_closed) {
                true => f64::INFINITY,
                false => gains.expected(division.group, division.over, self.least_score()),
            };
            division.parts = two;
        }
    }

    fn least_score(&self) -> f64 {
        LEAST_SCORE * self.dag.total_price as f64
    }

    /// Returns the groups by which a branch can be divided, in descending order of what they are expected to bring.
    fn fractional<'g>(
        &self,
        parent: &Branch,
        groups: &'g [Group],
        gains: &Gains,
    ) -> Vec<Division<'g>> {
        let least = self.least_score();
        let divisions = groups.iter().filter_map(|group| {
            let over = parent.count(group).fract();
            let is_whole = over.min(1.0 - over) * group.score <= least;
            (!is_whole).then(|| Division {
                group,
                over,
                score: gains.expected(group, over, least),
                parts: None,
            })
        });
        let mut divisions: Vec<Division> = divisions.collect();
        divisions.sort_by(|a, b| b.score.total_cmp(&a.score));
        divisions
    }

    /// Divides a branch by the group for which this raises the bound most. Where this is not known, it is tried, until the last
    /// [`LOOKAHEAD`] groups of a kind were no better ("reliability branching"; Achterberg, Koch and Martin, "Branching rules revisited",
    /// 2005). The programs of the two parts may not be solved to the end. Returns `None` if all numbers are whole.
    fn divide_best(
        &self,
        parent: &Branch,
        kinds: &[Vec<Group>],
        enough: f64,
        gains: &mut Gains,
        work: &mut Work,
    ) -> Option<[Branch; 2]> {
        let mut best: Option<Division> = None;
        for groups in kinds {
            let fractional = self.fractional(parent, groups, gains);
            let (known, mut unknown): (Vec<_>, Vec<_>) =
                fractional.into_iter().partition(|d| gains.knows(d.group));
            let known = known.into_iter().next();
            best = known.filter(|known| known.is_better(&best)).or(best);
            let mut idle = 0;
            for tried in unknown.chunks_mut(TOGETHER) {
                let is_closed = best
                    .as_ref()
                    .is_some_and(|best| best.score == f64::INFINITY);
                if is_closed || idle >= LOOKAHEAD || work.spent() {
                    break;
                }
                idle += tried.len();
                self.divide(parent, tried, enough, gains, work);
                for division in tried {
                    if division.is_better(&best) {
                        let parts = division.parts.take();
                        best = Some(Division { parts, ..*division });
                        idle = 0;
                    }
                }
            }
        }
        let mut best = best?;
        if best.parts.is_none() {
            let chosen = std::slice::from_mut(&mut best);
            self.divide(parent, chosen, enough, gains, work);
        }
        best.parts
    }

    /// Returns a bound, at most `enough`. Starts from `made`, the last solution of the program.
    pub(super) fn branch(&mut self, made: Bounded, enough: f64, work: &mut Work) -> f64 {
        let mut kinds = [self.groups(), self.single_stays()];
        let units = work.limit.saturating_sub(work.done);
        let (first, patience) = (made.bound, units / PATIENCE_SHARE);
        let mut risen = (first, work.done);
        let mut gains = Gains {
            sums: FxHashMap::default(),
            all: (1.0, 1.0),
        };
        let mut open = vec![Branch {
            limits: Vec::new(),
            rows: made.duals.len(),
            settled: self.settled,
            made,
            fixed: self.program.fixed.clone(),
        }];
        loop {
            open.sort_by(|a, b| a.made.bound.total_cmp(&b.made.bound));
            let Some(lowest) = open.first() else {
                return enough;
            };
            let bound = lowest.made.bound;
            if work.spent() {
                return bound;
            }
            if bound > risen.0 + LEAST_RISE * (enough - first) {
                risen = (bound, work.done);
            }
            let is_stuck = work.done > risen.1 + patience;
            let (mut parts, mut undivided) = (Vec::new(), Vec::new());
            for parent in open.drain(..open.len().min(TOGETHER)) {
                let divided = match is_stuck {
                    true => None,
                    false => self.divide_best(&parent, &kinds, enough, &mut gains, work),
                };
                match divided {
                    Some(two) => parts.extend(two),
                    None => undivided.push(parent),
                }
            }
            self.solve_branches(&mut parts, BRANCH_UNITS, enough, work);
            let is_current = |branch: &Branch| branch.made.point.len() == self.program.columns();
            if undivided.iter().any(is_current) {
                let mut all = undivided.iter().chain(&parts).chain(&open);
                let next = all
                    .find_map(|branch| self.next_position(&branch.made.point, Rule::Dearest, work));
                let Some(step) = next else {
                    return bound;
                };
                self.add(step);
                kinds = [self.groups(), self.single_stays()];
                risen = (bound, work.done);
            }
            let mut same: Vec<Branch> = undivided.iter().map(|b| b.with(None, self)).collect();
            self.solve_branches(&mut same, BRANCH_UNITS, enough, work);
            for branch in parts.into_iter().chain(same) {
                if branch.made.bound < enough {
                    self.tighten(&branch.made.point);
                    open.push(branch);
                }
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
    use crate::solve::interval_bound::Intervals;
    use crate::solve::local_search::FAR_GAP;
    use crate::solve::simulate::Simulation;
    use crate::solve::work::Random;
    use crate::testing::{Shape, random_dag};

    /// A random problem, a budget, and what the best schedule weighs over running every op once, if one fits.
    fn solved(r: &mut Random) -> Option<(Dag, i64, f64)> {
        let problem = random_dag(r, 9, Shape::Training);
        let mut dag = Dag::new(&problem, Objective::Cost, &ByOp::default()).unwrap();
        for weight in &mut dag.weight {
            *weight *= i64::from(r.below(3) > 0);
        }
        dag.total_weight = dag.weight.iter().sum();
        let mut simulation = Simulation::default();
        simulation.run(&dag, &(0..dag.ops() as u32).collect::<Vec<_>>());
        let cap = simulation.peak * (60 + r.below(40) as i64) / 100;
        let Outcome::Optimal(best) = exact(&dag, cap, &mut Work::new(10_000_000)) else {
            return None;
        };
        let best = (dag.weigh_schedule(&best) - dag.total_weight) as f64;
        Some((dag, cap, best))
    }

    /// The ops that exceed a budget when every op runs once, in the given order.
    fn full(dag: &Dag, cap: i64) -> Vec<usize> {
        let mut simulation = Simulation::default();
        simulation.run(dag, &(0..dag.ops() as u32).collect::<Vec<_>>());
        let live = &simulation.live;
        (0..live.len()).filter(|t| live[*t] > cap).collect()
    }

    #[test]
    fn no_schedule_costs_less_than_branches_say() {
        let mut r = Random::new(8);
        let (mut raised, mut met) = (0, 0);
        for n in 0..400 {
            let Some((dag, cap, best)) = solved(&mut r) else {
                continue;
            };
            let positions = full(&dag, cap);
            // No plan limits the bound, so that one above the best shows; then one that costs little more.
            let far = 3.0 * dag.total_weight as f64;
            for enough in [far, 1.1 * best + 2.0] {
                let mut program = Program::new(&dag, cap, &dag.weight, &positions);
                let known = Bounded::default();
                let made = program.solve_fixing(enough, &known, &mut Work::new(200_000));
                let before = made.bound;
                let bound = program.branch(made, enough, &mut Work::new(400_000));
                assert!(bound <= best + 1.0, "{n}: {bound} {best}");
                raised += usize::from(bound > before + 0.01 * best);
                met += usize::from(best > 0.0 && bound > 0.999 * best);
            }
        }
        assert!(raised > 10 && met > 50, "{raised} {met}");
    }

    /// Adding positions raises the bound, but never above the cost of the best schedule.
    #[test]
    fn further_positions_prove_more_and_never_too_much() {
        let mut r = Random::new(9);
        let (mut added, mut raised, mut closed) = (0, 0, 0);
        for n in 0..200 {
            let Some((dag, cap, best)) = solved(&mut r) else {
                continue;
            };
            for share in [1.0, 1.02, 1.05, 1.5] {
                let above = (best * share) as i64;
                let mut work = Work::new(100_000);
                let Some(mut made) = Intervals::new(&dag, cap, &dag.weight, above, &mut work)
                else {
                    continue;
                };
                let first = made.bound(above, &mut work);
                made.choose_again(above, &mut Work::new(100_000));
                let bound = made.bound(above, &mut Work::new(100_000));
                assert!(bound >= first, "{n}: {bound} {first}");
                assert!(bound as f64 <= best, "{n}: {bound} {best}");
                let gap = (above - bound) as f64 / dag.total_price as f64;
                closed += usize::from(share < 1.1 && gap <= FAR_GAP);
            }
            let enough = 1.1 * best + 2.0;
            let chosen: Vec<usize> = full(&dag, cap).into_iter().take(1).collect();
            let mut program = Program::new(&dag, cap, &dag.weight, &chosen);
            let mut work = Work::new(400_000);
            let mut made = program.solve_fixing(enough, &Bounded::default(), &mut work);
            let rules = [Rule::Dearest, Rule::Fullest, Rule::Neediest];
            while !chosen.is_empty() {
                let Some(step) = program.next_position(&made.point, rules[added % 3], &mut work)
                else {
                    break;
                };
                let before = made.bound;
                assert!(!program.positions.contains(&step));
                program.add(step);
                added += 1;
                program.extend(&mut made);
                made = program.solve_fixing(enough, &made, &mut Work::new(400_000));
                program.tighten(&made.point);
                made = program.solve_fixing(enough, &made, &mut Work::new(400_000));
                assert!(made.bound <= best + 1.0, "{n}: {} {best}", made.bound);
                assert!(
                    made.bound >= 0.999 * before.min(enough),
                    "{n}: {} {before}",
                    made.bound
                );
                raised += usize::from(made.bound > before + 0.01 * best);
            }
        }
        assert!(
            added > 20 && raised > 10 && closed > 50,
            "{added} {raised} {closed}"
        );
    }
}
