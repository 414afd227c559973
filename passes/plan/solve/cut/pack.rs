//! Fills the room at a step better than the hull does.
//!
//! Points of the hull differ in whole groups of ops: all layers flip at one price, or one large result does. The room may end
//! inside such a group. Between the last point that keeps too much and the first that fits, a cheaper choice may lie: the
//! former, with a few small repeats of a worse price. Ops that dearer points repeat besides, split into connected parts,
//! are tried for that.

use super::{Cut, Point, SOURCE};
use crate::solve::compact::{Dag, NONE};

/// Prices of the dearer points, as multiples of the price at which the first point fits.
const DEARER: [f64; 7] = [1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 9.0];

/// Parts in all; those of the best prices are found first.
const MOST_PARTS: usize = 400;

/// Ops that may be repeated beside those of a point.
struct Part {
    ops: Vec<u32>,
    /// Bytes that are not kept if they are.
    gain: i64,
    weight: i64,
}

impl Cut<'_> {
    /// Returns a choice that fits and weighs less than `high`, if one is found; `low` is the point before it on the hull.
    pub fn packed(&mut self, low: &Point, high: &Point) -> Option<Point> {
        self.network.restore(&low.state);
        self.price = low.price;
        let mut runs = vec![false; self.dag.ops()];
        for o in self.repeated(low) {
            runs[o as usize] = true;
        }
        let parts = self.parts(low, high.price, &runs);
        let mut best: Option<Point> = None;
        let limit = |best: &Option<Point>| best.as_ref().map_or(high.weight, |b| b.weight);
        // The parts of the best prices in order, and at each step the lightest one that is enough.
        let mut now = self.chosen(&runs, low.price);
        for at in 0..parts.len() {
            let excess = now.kept - self.room;
            if excess <= 0 || now.weight >= limit(&best) {
                break;
            }
            let enough = parts[at..].iter().filter(|part| part.gain >= excess);
            if let Some(last) = enough.min_by_key(|part| part.weight) {
                let with = self.chosen(&joined(&runs, last), low.price);
                if with.kept <= self.room && with.weight < limit(&best) {
                    best = Some(with);
                }
            }
            // One that is as heavy as what is known ends the room, and others might fill it.
            if now.weight + parts[at].weight < limit(&best) {
                runs = joined(&runs, &parts[at]);
                now = self.chosen(&runs, low.price);
            }
        }
        if now.kept <= self.room && now.weight < limit(&best) {
            best = Some(now);
        }
        best
    }

    /// Returns what dearer points repeat besides `low`, in connected parts, those of the best price of a byte first.
    fn parts(&mut self, low: &Point, price: f64, runs: &[bool]) -> Vec<Part> {
        let mut seen = runs.to_vec();
        let mut parts: Vec<Part> = Vec::new();
        for times in DEARER {
            let dearer = times * price;
            if dearer <= self.price || parts.len() >= MOST_PARTS {
                continue;
            }
            let point = self.solve(dearer);
            let all = self.repeated(&point);
            let new: Vec<u32> = all.filter(|o| !seen[*o as usize]).collect();
            for o in &new {
                seen[*o as usize] = true;
            }
            for ops in connected(self.dag, &new) {
                let mut part = Part {
                    ops,
                    gain: 0,
                    weight: 0,
                };
                let with = self.chosen(&joined(runs, &part), low.price);
                (part.gain, part.weight) = (low.kept - with.kept, with.weight - low.weight);
                if part.gain > 0 && parts.len() < MOST_PARTS {
                    parts.push(part);
                }
            }
        }
        let each = |part: &Part| part.weight as f64 / part.gain as f64;
        parts.sort_by(|a, b| each(a).total_cmp(&each(b)).then(a.ops.cmp(&b.ops)));
        parts
    }

    /// Returns the choice that repeats these ops, as far as they are needed, and keeps all else that is.
    fn chosen(&mut self, runs: &[bool], price: f64) -> Point {
        let dag = self.dag;
        let mut side = vec![false; self.network.nodes()];
        side[SOURCE as usize] = true;
        let needed = |v: &u32| self.value_node[*v as usize] == SOURCE;
        let mut stack: Vec<u32> = (0..dag.values() as u32).filter(needed).collect();
        let mut keeps = vec![false; dag.values()];
        for keep in &self.keeps {
            keeps[keep.value as usize] = true;
        }
        while let Some(v) = stack.pop() {
            let Some(o) = dag.remaker(v) else { continue };
            let node = self.op_node[o as usize] as usize;
            if side[node] || (keeps[v as usize] && !runs[o as usize]) {
                continue;
            }
            side[node] = true;
            for u in dag.ins(o) {
                let node = self.value_node[*u as usize];
                if node != NONE && !std::mem::replace(&mut side[node as usize], true) {
                    stack.push(*u);
                }
            }
        }
        self.network.visits += 4 * dag.values() as u64;
        self.point(price, side)
    }
}

fn joined(runs: &[bool], part: &Part) -> Vec<bool> {
    let mut runs = runs.to_vec();
    for o in &part.ops {
        runs[*o as usize] = true;
    }
    runs
}

/// Returns ops in groups that read each other's results, each in order.
fn connected(dag: &Dag, ops: &[u32]) -> Vec<Vec<u32>> {
    let mut ops = ops.to_vec();
    ops.sort_unstable();
    let mut group: Vec<usize> = (0..ops.len()).collect();
    for (at, o) in ops.iter().enumerate() {
        for u in dag.ins(*o) {
            let maker = dag.maker[*u as usize];
            if let Ok(other) = ops.binary_search(&maker) {
                let (from, to) = (group[at], group[other]);
                if from != to {
                    group
                        .iter_mut()
                        .for_each(|g| *g = if *g == from { to } else { *g });
                }
            }
        }
    }
    let mut groups: Vec<Vec<u32>> = vec![Vec::new(); ops.len()];
    for (at, o) in ops.iter().enumerate() {
        groups[group[at]].push(*o);
    }
    groups.retain(|g| !g.is_empty());
    groups
}
