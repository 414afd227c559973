//! Which op becomes a position next.

use super::program::{Program, State};
use crate::solve::compact::NONE;
use crate::solve::simulate::{Simulation, first_runs};
use crate::solve::work::Work;
use std::ops::Range;

/// A value is there if this fraction of it is.
const WHOLE: f64 = 0.999;

/// Units of work for each pair of a value and an op, when the op with the highest cost is looked for.
const VALUE_UNITS: u64 = 2;

/// How the next position is chosen.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    /// The op at which it costs most to free the memory that the solution uses above the budget. If it is free at every op, as
    /// [`Rule::Fullest`].
    Dearest,
    /// The op at which a schedule made from the solution exceeds the budget most.
    Fullest,
    /// Of the ops at which that schedule exceeds the budget, the one with the largest working set: it leaves the least room for other
    /// values.
    Neediest,
}

/// The window between two neighbouring positions, before the first, or after the last, and what a solution keeps in it.
struct Window {
    /// The ops between the two positions.
    ops: Range<usize>,
    /// For each value, the last op up to the end of the window that reads it in its first run; 0 if none does.
    last_read: Vec<usize>,
    /// For each value, the fraction that is needed at the end of the window.
    at_end: Vec<f64>,
    /// For each value, the fraction of it that is made again in the window.
    again: Vec<f64>,
}

impl Window {
    /// Returns the fraction of a value that must be there when an op runs.
    fn needs(&self, value: usize, op: usize) -> f64 {
        let needed = match self.last_read[value] > op {
            true => 1.0,
            false => self.at_end[value],
        };
        (needed - self.again[value]).max(0.0)
    }
}

impl Program<'_> {
    /// Returns the op that becomes a position next by a rule, of those that are none; `None` if no op seems to need one.
    pub(super) fn next_position(
        &self,
        point: &[f64],
        rule: Rule,
        work: &mut Work,
    ) -> Option<usize> {
        match rule {
            Rule::Dearest => {
                let dearest = self.dearest(point, work);
                dearest.or_else(|| self.fullest(point, false))
            }
            Rule::Fullest => self.fullest(point, false),
            Rule::Neediest => self.fullest(point, true),
        }
    }

    /// Returns the op at which it costs most to free the memory that the solution uses above the budget; `None` if it is free at every op.
    fn dearest(&self, point: &[f64], work: &mut Work) -> Option<usize> {
        work.spend(VALUE_UNITS * (self.dag.ops() * self.dag.values()) as u64);
        let windows = (0..=self.positions.len()).map(|k| self.window(k, point));
        let costs = windows.flat_map(|window| {
            let costs = window
                .ops
                .clone()
                .map(|op| (self.excess_cost(&window, op), op));
            costs.collect::<Vec<_>>()
        });
        let dearest = costs.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (dearest.0 > 0.0).then_some(dearest.1)
    }

    /// Returns the window that ends at position `k`, or the last one, where `k` is the number of positions.
    fn window(&self, k: usize, point: &[f64]) -> Window {
        let dag = self.dag;
        let at = |x: u32| point.get(x as usize).copied().unwrap_or(0.0);
        let begin = k.checked_sub(1);
        let end = self.positions.get(k).copied();
        let first = begin.map_or(0, |begin| self.positions[begin] + 1);
        let mut last_read = vec![0; dag.values()];
        for op in first..end.map_or(dag.ops(), |end| end + 1) {
            for v in dag.ins(op as u32) {
                last_read[*v as usize] = op;
            }
        }
        let is_output = |v: usize| f64::from(u8::from(dag.is_output[v]));
        let at_end = |v: usize| match self.states.get(k).map(|states| states[v]) {
            None => is_output(v),
            Some(State::Absent) => 0.0,
            Some(State::Pinned) => 1.0,
            Some(State::Choice(stays)) => at(stays),
        };
        let again = |v: usize| {
            let run = dag.remaker(v as u32).zip(begin);
            let run = run.map(|(op, begin)| self.windows[begin][op as usize]);
            run.filter(|run| *run != NONE).map_or(0.0, at)
        };
        Window {
            ops: first..end.unwrap_or(dag.ops()),
            last_read,
            at_end: (0..dag.values()).map(at_end).collect(),
            again: (0..dag.values()).map(again).collect(),
        }
    }

    /// Estimates what it costs to make values again after an op, so that what the solution needs when the op runs fits in the budget.
    /// Makes parts of values again, those that cost least for their bytes first.
    fn excess_cost(&self, window: &Window, op: usize) -> f64 {
        let dag = self.dag;
        let over = dag.in_place_operands(op as u32);
        let needed = (0..dag.values() as u32).filter_map(|v| {
            let maker = dag.maker[v as usize];
            let is_made = maker == NONE || (maker as usize) < op;
            let is_counted = over != [v] && dag.ins(op as u32).contains(&v);
            let bytes = dag.size[v as usize] as f64 * window.needs(v as usize, op);
            (is_made && !is_counted && bytes > 0.0).then_some((v, bytes))
        });
        let needed: Vec<(u32, f64)> = needed.collect();
        let room = (self.cap - dag.least_bytes(op as u32)) as f64;
        let mut excess = needed.iter().map(|(_, bytes)| bytes).sum::<f64>() - room;
        if excess <= 0.0 {
            return 0.0;
        }
        let costs = self.remake_costs(window, op);
        let droppable = needed.iter().filter_map(|(v, bytes)| {
            let cost = dag.remaker(*v).map(|_| costs[*v as usize])?;
            let each = cost / dag.size[*v as usize] as f64;
            each.is_finite().then_some((each, *bytes))
        });
        let mut droppable: Vec<(f64, f64)> = droppable.collect();
        droppable.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut cost = 0.0;
        for (each, bytes) in droppable {
            let dropped = bytes.min(excess);
            excess -= dropped;
            cost += each * dropped;
        }
        cost
    }

    /// Returns what it costs to make each value again after an op, with the fractions of its operands that the solution does not have
    /// there; infinite where an input is gone.
    fn remake_costs(&self, window: &Window, op: usize) -> Vec<f64> {
        let dag = self.dag;
        let there = |v: usize| window.needs(v, op).max(window.again[v]);
        let mut costs = vec![0.0; dag.values()];
        for v in &dag.placeholders {
            if there(*v as usize) == 0.0 {
                costs[*v as usize] = f64::INFINITY;
            }
        }
        for o in 0..=op as u32 {
            let operands = dag.ins(o).iter().map(|v| *v as usize);
            let missing = operands.filter(|v| there(*v) < WHOLE);
            let missing = missing.map(|v| (1.0 - there(v)) * costs[v]).sum::<f64>();
            for v in dag.outs(o) {
                costs[*v as usize] = missing + self.weight[o as usize] as f64;
            }
        }
        costs
    }

    /// Returns an op whose first run exceeds the budget in a schedule made from the solution: the one that needs most by itself, or the
    /// one at which the most is there. `None` if none exceeds it.
    fn fullest(&self, point: &[f64], by_itself: bool) -> Option<usize> {
        let schedule = self.schedule(point, 0.5);
        let mut simulation = Simulation::default();
        simulation.run(self.dag, &schedule);
        let firsts = first_runs(self.dag, &schedule);
        let is_new = |t: usize| firsts[t] && !self.positions.contains(&(schedule[t] as usize));
        let full = (0..schedule.len()).filter(|t| is_new(*t) && simulation.live[*t] > self.cap);
        let own = |t: usize| match by_itself {
            true => self.dag.least_bytes(schedule[t]),
            false => 0,
        };
        let fullest = full.max_by_key(|t| (own(*t), simulation.live[*t], *t));
        fullest.map(|t| schedule[t] as usize)
    }
}
