//! A lower bound from several positions at once.
//!
//! [`super::bound`] looks at one moment. Here are several, p₁ < p₂ < …, the moments at which these ops of the given order
//! first run. For each k, `N_k(v)`: value v is there when it is needed after p_k, and `R_k(o)`: op o, made by then, runs
//! again after p_k. Each position alone demands what it demands in the bound of one position, with its own price λ_k of a
//! byte. What joins them: an op that runs again after p_k+1 runs again after p_k, so the weight of an op is paid once, by
//! the first position after its first run, and an unlimited arc `R_k+1(o) → R_k(o)` says the rest. So all positions
//! together are one minimum cut; its value minus Σ λ_k · room_k is a lower bound for every λ ≥ 0. The λ are improved by
//! subgradient steps of Polyak's length ("Minimization of unsmooth functionals", 1969), which the weight of a known
//! plan sets.
//!
//! An op that must run again more than once is still paid once; the bound does not see that.

use super::bound::single;
use super::cut::Scene;
use super::dag::{Dag, NONE};
use super::flow::{Builder, Network, UNLIMITED};
use super::simulate::Simulation;
use super::work::Work;

/// Steps of the ascent.
const STEPS: usize = 60;

/// Most positions; graphs of many ops get fewer, so that all networks together stay of this many ops.
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

struct Joint {
    network: Network,
    /// Without any flow.
    fresh: Vec<i64>,
    keeps: Vec<Keep>,
    /// Nodes of ops with what running them again weighs.
    pays: Vec<(u32, i64)>,
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
            let scene = Scene::new(dag, given, *step);
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
                        builder.arc(node, SINK, weight[o as usize]);
                        pays.push((node, weight[o as usize]));
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

    /// The bound at these prices, and the bytes that each position keeps at them.
    fn value(&mut self, prices: &[f64]) -> (f64, Vec<i64>) {
        let capacity =
            |keep: &Keep| (prices[keep.position] * keep.bytes as f64).min(MOST_CAPACITY) as i64;
        self.network.restore(&self.fresh);
        for keep in &self.keeps {
            self.network.grow(keep.arc, capacity(keep));
        }
        self.network.push(SOURCE, SINK);
        let side = self.network.side(SOURCE);
        let mut kept = vec![0; self.room.len()];
        let mut worth = 0;
        for keep in &self.keeps {
            if side[keep.node as usize] && (keep.maker == NONE || !side[keep.maker as usize]) {
                kept[keep.position] += keep.bytes;
                worth += capacity(keep);
            }
        }
        for (node, weight) in &self.pays {
            worth += weight * i64::from(side[*node as usize]);
        }
        let paid: f64 = (prices.iter().zip(&self.room))
            .map(|(price, room)| price * *room as f64)
            .sum();
        (worth as f64 - paid, kept)
    }
}

/// A bound in weight over the cost of running every op once, from several positions; `above` is what a known plan weighs
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
    for window in full.chunks(full.len().div_ceil(most).max(1)) {
        let mut best: Option<(usize, f64, f64)> = None;
        let by_live = window.iter().rev().max_by_key(|t| simulation.live[**t]);
        let by_need = window
            .iter()
            .rev()
            .max_by_key(|t| dag.working_set_bytes(**t as u32));
        for step in by_live.into_iter().chain(by_need) {
            if best.is_some_and(|b| b.0 == *step) || work.spent() {
                continue;
            }
            let (value, price) = single(dag, cap, weight, &given, *step, work)?;
            if best.is_none_or(|b| value > b.1) {
                best = Some((*step, value, price));
            }
        }
        chosen.extend(best.filter(|b| b.1 > 0.0));
    }
    let first = (0..chosen.len()).max_by(|a, b| chosen[*a].1.total_cmp(&chosen[*b].1))?;
    let positions: Vec<usize> = chosen.iter().map(|c| c.0).collect();
    let mut joint = Joint::new(dag, cap, weight, &given, &positions);
    if joint.room.iter().any(|room| *room < 0) {
        return None;
    }
    let mut best = chosen[first].1;
    let mut prices = vec![0.0; positions.len()];
    prices[first] = chosen[first].2;
    let mut best_prices = prices.clone();
    let (mut length, mut idle) = (1.0, 0);
    for _ in 0..STEPS {
        let visits = joint.network.visits;
        let (value, kept) = joint.value(&prices);
        work.spend(joint.network.visits - visits + joint.fresh.len() as u64);
        idle += 1;
        if value > best {
            (best, idle) = (value, 0);
            best_prices.clone_from(&prices);
        } else if idle % 6 == 0 {
            length *= 0.5;
            prices.clone_from(&best_prices);
        }
        if best >= above as f64 * (1.0 - 1e-9) || work.spent() {
            break;
        }
        // In units of a whole room, so that positions of all sizes weigh the same.
        let lack: Vec<f64> = (0..prices.len())
            .map(|k| kept[k] as f64 / joint.room[k].max(1) as f64 - 1.0)
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
        let step = length * (above as f64 - value) / norm;
        for (k, price) in prices.iter_mut().enumerate() {
            *price = (*price + step * lack[k] / joint.room[k].max(1) as f64).max(0.0);
        }
    }
    // Sums of products of prices and sizes may be off in their last places.
    Some(((best * (1.0 - 1e-9)) as i64 - 1).max(0))
}
