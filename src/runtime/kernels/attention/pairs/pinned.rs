//! Which pair each node of a graph takes, settled once for the sizes of its inputs.

use super::{Available, Facts, Pair, check, scratch};
use crate::place::Place;
use crate::runtime::device;
use ckpt_passes::analysis::{MemoryProfile, Sizes};
use ckpt_passes::ir::op::Sized;
use ckpt_passes::ir::{Graph, Node};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD};
use serde::Serialize;
use std::collections::BTreeSet;

/// How many nodes take which kernels, gradients and copies included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Taken {
    pub flash: u64,
    pub efficient: u64,
    pub tiles: u64,
}

impl Taken {
    fn count(&mut self, pair: Option<Pair>) {
        *match pair {
            Some(Pair::Flash | Pair::Cpu) => &mut self.flash,
            Some(Pair::Efficient) => &mut self.efficient,
            None => &mut self.tiles,
        } += 1;
    }
}

/// The choices of a program.
#[derive(Default)]
pub struct Pinned {
    /// One a node, in order.
    pub pairs: Vec<Option<Pair>>,
    pub taken: Taken,
    /// What pairs take beside results, by position.
    pub temporaries: Vec<(usize, u64)>,
    /// Why pairs are not taken that could be.
    pub refused: BTreeSet<String>,
}

impl Pinned {
    /// `memory` says how operands lie. Where sizes depend on data nothing is known beforehand: tiles.
    pub fn new(
        graph: &Graph,
        sizes: &Sizes,
        memory: &MemoryProfile,
        place: Place,
        available: &Available,
    ) -> Pinned {
        let mut pinned = Pinned {
            refused: available.refused.iter().cloned().collect(),
            ..Pinned::default()
        };
        for (at, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            let is_attention = node.op == &ATTENTION || node.op == &ATTENTION_GRAD;
            let mut pair = None;
            if is_attention && sizes.bounded.is_empty() && !available.pairs.is_empty() {
                pair = pinned.choose(at, node, (sizes, memory), place, available);
            }
            if is_attention {
                pinned.taken.count(pair);
            }
            pinned.pairs.push(pair);
        }
        pinned
    }

    fn choose(
        &mut self,
        at: usize,
        node: &Node,
        (sizes, memory): (&Sizes, &MemoryProfile),
        place: Place,
        available: &Available,
    ) -> Option<Pair> {
        let mut ins: Vec<Option<Sized>> = node
            .ins
            .iter()
            .map(|value| {
                value.map(|value| Sized {
                    strides: memory.layout(value).strides.clone(),
                    ..sizes.of(value).clone()
                })
            })
            .collect();
        let dy = match node.op == &ATTENTION_GRAD {
            true => Some(ins.remove(0)?),
            false => None,
        };
        let facts = Facts::of(&node.attrs, &ins)?;
        let pair = available.choose(&facts)?;
        if let Err(why) = check::admitted(pair, &facts, device::torch(place)) {
            self.refused.insert(why);
            return None;
        }
        let [Some(q), Some(k), Some(v)] = ins.get(..3)? else {
            return None;
        };
        let shape = scratch::Node {
            facts: &facts,
            q,
            k,
            v,
            dy: dy.as_ref(),
            wants: node.attrs.opt_ints("wants").unwrap_or_default(),
            wants_lse: dy.is_none() && node.outs.len() > 1,
        };
        let granularity_bytes = place.granularity_bytes();
        let bytes = scratch::bytes(pair, available, &shape, granularity_bytes)?;
        self.temporaries.push((at, bytes));
        Some(pair)
    }
}
