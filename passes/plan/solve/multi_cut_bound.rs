//! A lower bound from several positions at once.
//!
//! [`super::bound`] looks at one moment. Here there are several, p₁ < p₂ < …: the moments at which these ops of the given order
//! first run. For each k, `N_k(v)` means that value v is there when it is needed after p_k, and `R_k(o)` that op o, which has
//! run by then, runs again after p_k. Each position demands what it demands in the bound of one position, with its own price
//! λ_k of a byte. Positions are joined by one fact: an op that runs again after p_k+1 runs again after p_k. So the weight of an
//! op is paid once, at the first position after its first run, and an unlimited arc `R_k+1(o) → R_k(o)` states the fact. All
//! positions together are one minimum cut. Its value minus Σ λ_k · room_k is a lower bound for every λ ≥ 0. The λ are
//! improved by subgradient steps of Polyak's length ("Minimization of unsmooth functionals", 1969), which the weight of a
//! known plan sets.
//!
//! Prices allow half a recomputation: two halves may cost less than the one that is needed. So the least decided op is fixed
//! both ways, the ascent goes on in each, and the smaller of the two values is a bound. This repeats where the bound is lowest,
//! while the work lasts (branch and bound).
//!
//! An op that must run again more than once is still paid once, so the bound can be too low there.

use super::bound::single;
use super::compact::{Dag, NONE};
use super::cut::Scene;
use super::flow::{Builder, Network, UNLIMITED};
use super::simulate::Simulation;
use super::work::Work;
use std::cmp::Reverse;

/// Steps of the ascent.
const STEPS: usize = 60;

/// Most stretches, and most of the tightest steps, that give a position each; graphs of many ops get fewer, so that all networks together stay of this many ops.
const MOST_POSITIONS: usize = 12;
const NETWORK_OPS: usize = 20_000;

/// No arc that stands for bytes takes more than this: a cut is only less worth for it.
const MOST_CAPACITY: f64 = 1e15;

const SOURCE: u32 = 0;
const SINK: u32 = 1;

/// A value that may stay at a position for a price.
struct Keep {
    arc: usize,
    position: usize,
    node: u32,
    maker: u32,
    bytes: i64,
}

/// An op that may run again.
struct Pay {
    node: u32,
    weight: i64,
    /// Unlimited where it is settled that the op runs again.
    must: usize,
    /// To the sink; unlimited where it is settled that it does not.
    arc: usize,
}

/// What is settled about an op: its place among those that pay, and whether it runs again.
type Settled = (u32, bool);

struct Joint {
    network: Network,
    /// Without any flow.
    fresh: Vec<i64>,
    keeps: Vec<Keep>,
    pays: Vec<Pay>,
    /// Bytes that each position has for what is decided.
    room: Vec<i64>,
}

impl Joint {
    /// `positions` ascend.
    fn new(dag: &Dag, cap: i64, weight: &[i64], given: &[u32], positions: &[usize]) -> Joint {
        let mut builder = Builder::default();
        let mut nodes = 2u32;
        let (mut keeps, mut pays) = (Vec::new(), Vec::new());
        let mut room = vec![0; positions.len()];
        // Op nodes of the position after.
        let mut after: Vec<(u32, u32)> = Vec::new();
        for (k, step) in positions.iter().enumerate().rev() {
            let scene = Scene::of_bound(dag, given, *step);
            let mut value_node = vec![NONE; dag.values()];
            let mut op_node = vec![NONE; dag.ops()];
            let mut here: Vec<(u32, u32)> = Vec::new();
            let mut stack: Vec<u32> = Vec::new();
            room[k] = cap - scene.own_bytes;
            for v in 0..dag.values() as u32 {
                if !scene.is_wanted(v) {
                    continue;
                }
                if dag.remaker(v).is_none() {
                    room[k] -= dag.size[v as usize];
                } else {
                    value_node[v as usize] = SOURCE;
                    stack.push(v);
                }
            }
            // Ops in the order in which their nodes are made: their operands are looked at below.
            let mut fresh_ops: Vec<u32> = Vec::new();
            let add = |o: u32, op_node: &mut Vec<u32>, nodes: &mut u32| -> bool {
                let is_new = op_node[o as usize] == NONE;
                if is_new {
                    op_node[o as usize] = *nodes;
                    *nodes += 1;
                }
                is_new
            };
            for (o, node) in after.iter().filter(|(o, _)| *o as usize <= *step) {
                if add(*o, &mut op_node, &mut nodes) {
                    fresh_ops.push(*o);
                }
                builder.arc(*node, op_node[*o as usize], UNLIMITED);
            }
            loop {
                while let Some(o) = fresh_ops.pop() {
                    let node = op_node[o as usize];
                    here.push((o, node));
                    if k == 0 || positions[k - 1] < o as usize {
                        pays.push(Pay {
                            node,
                            weight: weight[o as usize],
                            must: builder.arc(SOURCE, node, 0),
                            arc: builder.arc(node, SINK, weight[o as usize]),
                        });
                    }
                    for u in dag.ins(o) {
                        let i = *u as usize;
                        if value_node[i] == SOURCE || scene.is_free(dag, *u) {
                            continue;
                        }
                        if value_node[i] == NONE {
                            value_node[i] = nodes;
                            nodes += 1;
                            stack.push(*u);
                        }
                        builder.arc(node, value_node[i], UNLIMITED);
                    }
                }
                let Some(v) = stack.pop() else { break };
                let maker = match dag.remaker(v) {
                    None => NONE,
                    Some(o) => {
                        if add(o, &mut op_node, &mut nodes) {
                            fresh_ops.push(o);
                        }
                        op_node[o as usize]
                    }
                };
                let node = value_node[v as usize];
                let target = if maker == NONE { SINK } else { maker };
                keeps.push(Keep {
                    arc: builder.arc(node, target, 0),
                    position: k,
                    node,
                    maker,
                    bytes: dag.size[v as usize],
                });
            }
            after = here;
        }
        let network = builder.finish(nodes as usize);
        Joint {
            fresh: network.state(),
            network,
            keeps,
            pays,
            room,
        }
    }

    /// Returns the bound at these prices; the bytes that each position keeps and the ops that run again are left in `kept` and
    /// `side`.
    fn value(&mut self, prices: &[f64], settled: &[Settled], kept: &mut [i64]) -> (f64, Vec<bool>) {
        let capacity =
            |keep: &Keep| (prices[keep.position] * keep.bytes as f64).min(MOST_CAPACITY) as i64;
        self.network.restore(&self.fresh);
        for keep in &self.keeps {
            self.network.grow(keep.arc, capacity(keep));
        }
        for (at, runs) in settled {
            let pay = &self.pays[*at as usize];
            let arc = if *runs { pay.must } else { pay.arc };
            self.network.grow(arc, UNLIMITED);
        }
        self.network.push(SOURCE, SINK);
        let side = self.network.side(SOURCE);
        kept.fill(0);
        let mut worth = 0;
        for keep in &self.keeps {
            if side[keep.node as usize] && (keep.maker == NONE || !side[keep.maker as usize]) {
                kept[keep.position] += keep.bytes;
                worth += capacity(keep);
            }
        }
        for pay in &self.pays {
            worth += pay.weight * i64::from(side[pay.node as usize]);
        }
        let paid: f64 = (prices.iter().zip(&self.room))
            .map(|(price, room)| price * *room as f64)
            .sum();
        (worth as f64 - paid, side)
    }

    /// Improves the prices of a branch.
    fn ascend(&mut self, branch: &mut Branch, steps: usize, above: f64, work: &mut Work) {
        let mut prices = branch.prices.clone();
        let mut kept = vec![0; prices.len()];
        let (mut length, mut idle) = (1.0, 0);
        for step in 0..steps {
            let visits = self.network.visits;
            let (value, side) = self.value(&prices, &branch.settled, &mut kept);
            work.spend(self.network.visits - visits + self.fresh.len() as u64);
            let share = if step == 0 { 1.0 } else { AVERAGE };
            for (runs, pay) in branch.runs.iter_mut().zip(&self.pays) {
                *runs += share * (f64::from(u8::from(side[pay.node as usize])) - *runs);
            }
            idle += 1;
            if value > branch.bound {
                (branch.bound, idle) = (value, 0);
                branch.prices.clone_from(&prices);
            } else if idle % 6 == 0 {
                length *= 0.5;
                prices.clone_from(&branch.prices);
            }
            if branch.bound >= above || work.spent() {
                break;
            }
            // In units of a whole room, so that positions of all sizes weigh the same.
            let lack: Vec<f64> = (0..prices.len())
                .map(|k| kept[k] as f64 / self.room[k].max(1) as f64 - 1.0)
                .map(|lack| lack.clamp(-10.0, 10.0))
                .collect();
            let moves = |k: &usize| prices[*k] > 0.0 || lack[*k] > 0.0;
            let norm: f64 = (0..prices.len())
                .filter(moves)
                .map(|k| lack[k] * lack[k])
                .sum();
            if norm <= 1e-18 {
                break;
            }
            let step = length * (above - value) / norm;
            for (k, price) in prices.iter_mut().enumerate() {
                *price = (*price + step * lack[k] / self.room[k].max(1) as f64).max(0.0);
            }
        }
    }

    /// Returns the op whose part in the last cuts was least clear, heavy ones first; `None` if all are settled.
    fn undecided(&self, branch: &Branch) -> Option<u32> {
        let worth = |at: &u32| {
            let runs = branch.runs[*at as usize];
            self.pays[*at as usize].weight as f64 * (runs.min(1.0 - runs) + 1e-3)
        };
        (0..self.pays.len() as u32)
            .filter(|at| branch.settled.iter().all(|s| s.0 != *at))
            .max_by(|a, b| worth(a).total_cmp(&worth(b)).then(b.cmp(a)))
    }
}

/// How much the last cut counts in what is known of an op.
const AVERAGE: f64 = 0.2;

/// A part of all schedules: those in which what is settled holds.
#[derive(Clone)]
struct Branch {
    settled: Vec<Settled>,
    prices: Vec<f64>,
    bound: f64,
    /// How often each op that pays ran again in the last cuts.
    runs: Vec<f64>,
}

/// Returns a bound in weight over the cost of running every op once, from several positions; `above` is what a known plan weighs
/// over that. At least 0. `None` if no schedule of the class fits.
pub fn several_positions(
    dag: &Dag,
    cap: i64,
    weight: &[i64],
    above: i64,
    work: &mut Work,
) -> Option<i64> {
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    let mut simulation = Simulation::default();
    simulation.run(dag, &given);
    let full: Vec<usize> = (0..given.len())
        .filter(|t| simulation.live[*t] > cap)
        .collect();
    let most = (NETWORK_OPS / given.len().max(1)).clamp(2, MOST_POSITIONS);
    let mut chosen: Vec<(usize, f64, f64)> = Vec::new();
    for candidates in candidates(dag, &simulation.live, &full, most) {
        let mut best: Option<(usize, f64, f64)> = None;
        for step in candidates {
            let is_known = best.iter().chain(&chosen).any(|c| c.0 == step);
            if is_known || work.spent() {
                continue;
            }
            let (value, price) = single(dag, cap, weight, &given, step, work)?;
            if best.is_none_or(|b| value > b.1) {
                best = Some((step, value, price));
            }
        }
        chosen.extend(best.filter(|b| b.1 > 0.0));
    }
    chosen.sort_by_key(|c| c.0);
    let first = (0..chosen.len()).max_by(|a, b| chosen[*a].1.total_cmp(&chosen[*b].1))?;
    let positions: Vec<usize> = chosen.iter().map(|c| c.0).collect();
    let mut joint = Joint::new(dag, cap, weight, &given, &positions);
    if joint.room.iter().any(|room| *room < 0) {
        return None;
    }
    let above = above as f64 * (1.0 - 1e-9);
    let mut whole = Branch {
        settled: Vec::new(),
        prices: vec![0.0; positions.len()],
        bound: chosen[first].1,
        runs: vec![0.0; joint.pays.len()],
    };
    whole.prices[first] = chosen[first].2;
    joint.ascend(&mut whole, STEPS, above, work);
    // Positions without a price prove nothing: branches are cheaper without them.
    let priced: Vec<usize> = (0..positions.len())
        .filter(|k| whole.prices[*k] > 0.0)
        .collect();
    if priced.len() < positions.len() {
        let positions: Vec<usize> = priced.iter().map(|k| positions[*k]).collect();
        joint = Joint::new(dag, cap, weight, &given, &positions);
        whole.prices = priced.iter().map(|k| whole.prices[*k]).collect();
        whole.runs = vec![0.0; joint.pays.len()];
        joint.ascend(&mut whole, BRANCH_STEPS, above, work);
    }
    // Open branches; together they hold every schedule that weighs less than `above`.
    let mut open = vec![whole];
    let lowest = loop {
        let at = (0..open.len()).min_by(|a, b| open[*a].bound.total_cmp(&open[*b].bound));
        let Some(at) = at else { break above };
        if work.spent() || open.len() >= MOST_BRANCHES {
            break open[at].bound.min(above);
        }
        let Some(op) = joint.undecided(&open[at]) else {
            break open[at].bound.min(above);
        };
        let parent = open.swap_remove(at);
        for runs in [true, false] {
            let mut child = parent.clone();
            child.settled.push((op, runs));
            joint.ascend(&mut child, BRANCH_STEPS, above, work);
            if child.bound < above {
                open.push(child);
            }
        }
    };
    // Sums of products of prices and sizes may be off in their last places.
    Some(((lowest * (1.0 - 1e-9)) as i64 - 1).max(0))
}

/// Returns lists of positions, of each of which the best is to be taken: for every stretch of `full` steps the one with the most
/// resident and the one that takes the most by itself, and alone each of the steps that leave least room for anything else.
fn candidates(dag: &Dag, live: &[i64], full: &[usize], most: usize) -> Vec<Vec<usize>> {
    let need = |t: usize| dag.least_bytes(t as u32);
    let stretches = full.chunks(full.len().div_ceil(most).max(1));
    let mut lists: Vec<Vec<usize>> = stretches
        .map(|stretch| {
            let by_live = stretch.iter().rev().max_by_key(|t| live[**t]);
            let by_need = stretch.iter().rev().max_by_key(|t| need(**t));
            by_live.into_iter().chain(by_need).copied().collect()
        })
        .collect();
    let is_top = |t: &usize| {
        let beside = [t.wrapping_sub(1), t + 1];
        beside
            .iter()
            .all(|b| *b >= live.len() || need(*b) <= need(*t))
    };
    let mut tight: Vec<usize> = full.iter().copied().filter(is_top).collect();
    tight.sort_by_key(|t| (Reverse(need(*t)), Reverse(live[*t]), *t));
    lists.extend(tight.into_iter().take(most).map(|t| vec![t]));
    lists
}

/// Steps of the ascent in a branch.
const BRANCH_STEPS: usize = 12;

/// Open branches at which the search ends.
const MOST_BRANCHES: usize = 4000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::ByOp;
    use crate::objective::Objective;
    use crate::testing::problem;

    /// One stretch holds both of the steps that leave least room, and gives one position.
    #[test]
    fn the_tightest_steps_are_candidates_wherever_they_are() {
        let ops: [(&str, &[usize], u64); 8] = [
            ("a", &[0], 9),
            ("b", &[0], 1),
            ("c", &[0], 8),
            ("d", &[0], 1),
            ("e", &[0], 1),
            ("f", &[0], 2),
            ("g", &[0], 1),
            ("h", &[0], 1),
        ];
        let p = problem(&[5], &ops, &[]);
        let dag = Dag::new(&p, Objective::Cost, &ByOp::default()).unwrap();
        let full: Vec<usize> = (0..8).collect();
        let lists = candidates(&dag, &[10; 8], &full, 2);
        assert_eq!(lists, [vec![0, 0], vec![4, 5], vec![0], vec![2]]);
    }
}
