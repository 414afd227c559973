//! Turns the set of forward results that are kept into a schedule.
//!
//! Forward ops run in the given order. A backward op may read a forward result that was not kept. Right before it the
//! schedule recomputes what this op needs and what is not alive, in the given order. Each copy is freed after its last use. So
//! a kept result without readers costs nothing, and every copy has a reader.
//!
//! Views are free: a view of a kept storage is read as it is, and a view of a recomputed storage is recomputed.
//!
//! Where the sequence goes through the model in chunks, one layer of one chunk is recomputed at a time. Of others that have to run
//! before it, only what leaves them stays.

use super::annotations::LayerChunk;
use super::index::{ByOp, ByValue, OpIdx, ValueIdx};
use super::problem::{Op, OpPhase, Problem, ValueKind};

/// Why a policy keeps a result whatever its rule says. Solvers follow [`Pinned::OnceOnly`] only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// A parameter or input: resident throughout.
    Static,
    /// A result of the backward pass.
    Backward,
    /// A graph output.
    Output,
    /// Its op must not run twice.
    OnceOnly,
    /// An integer or boolean value of at most [`SMALL_BYTES`].
    Small,
}

/// Integer values of at most this size are kept: shapes, axes, positions. To recompute them would free next to nothing and
/// lengthen chains of copies.
pub const SMALL_BYTES: u64 = 4096;

impl Pinned {
    /// Returns the reason as plans write it.
    pub fn reason(self) -> &'static str {
        match self {
            Pinned::Static => "resident throughout",
            Pinned::Backward => "made by the backward part",
            Pinned::Output => "a graph output",
            Pinned::OnceOnly => "its op must not run twice",
            Pinned::Small => "a small integer value",
        }
    }
}

/// Returns, for the owner of each storage, why a policy keeps it whatever its rule says. `None` where the rule decides.
pub fn pinned(problem: &Problem) -> ByValue<Option<Pinned>> {
    let roots = problem.roots();
    let mut pins: ByValue<Option<Pinned>> = problem
        .values
        .iter()
        .map(|value| {
            let op = match (value.kind, value.producer) {
                (ValueKind::Activation, Some(op)) => &problem.ops[op],
                _ => return Some(Pinned::Static),
            };
            if op.phase == OpPhase::Backward {
                Some(Pinned::Backward)
            } else if !op.recomputable {
                Some(Pinned::OnceOnly)
            } else if value.integral && value.view_of.is_none() && value.bytes <= SMALL_BYTES {
                Some(Pinned::Small)
            } else {
                None
            }
        })
        .collect();
    for output in &problem.outputs {
        pins[roots[*output]].get_or_insert(Pinned::Output);
    }
    // A view whose op must not run twice cannot be recomputed, so its storage is kept.
    for op in problem.ops.iter().filter(|op| !op.recomputable) {
        for out in &op.outs {
            pins[roots[*out]].get_or_insert(Pinned::OnceOnly);
        }
    }
    pins
}

/// Returns the schedule that keeps the pinned storages and those that `keep` names, by owner; entries of views are ignored.
pub fn schedule(problem: &Problem, keep: &ByValue<bool>) -> Vec<OpIdx> {
    chunked_schedule(problem, keep, &problem.by_op(None))
}

/// Returns such a schedule that recomputes one [`LayerChunk`] at a time; ops without one count as one.
pub fn chunked_schedule(
    problem: &Problem,
    keep: &ByValue<bool>,
    layer_chunk_of: &ByOp<Option<LayerChunk>>,
) -> Vec<OpIdx> {
    let roots = problem.roots();
    let leaves = leaving(problem, &roots, layer_chunk_of);
    let pins = pinned(problem);
    // Whether a backward op may read the value as it is.
    let mut ready: ByValue<bool> = roots
        .iter()
        .map(|r| keep[*r] || pins[*r].is_some())
        .collect();
    let mut schedule = Vec::with_capacity(problem.ops.len());
    let mut listed = problem.by_op(false);
    // Where the loss of a chunk is differentiated with it, backward ops run before the forward pass ends. What they read of it is
    // still alive.
    let last_chunk = layer_chunk_of
        .enumerated()
        .filter(|(o, place)| place.is_some() && problem.ops[*o].phase == OpPhase::Forward);
    let early = last_chunk.map(|(o, _)| o).next_back();
    for (o, op) in problem.ops.enumerated() {
        let is_late = early.is_none_or(|last| last < o);
        if op.phase == OpPhase::Backward && is_late {
            let maker = |v: &ValueIdx| problem.values[*v].producer.filter(|_| !ready[*v]);
            let read: Vec<Option<LayerChunk>> = op
                .ins
                .iter()
                .filter_map(|v| Some(layer_chunk_of[maker(v)?]))
                .collect();
            let mut missing = Vec::new();
            let mut stack: Vec<ValueIdx> = op.ins.clone();
            while let Some(producer) = stack.pop().map(|v| maker(&v)) {
                let Some(producer) = producer else {
                    continue;
                };
                if !std::mem::replace(&mut listed[producer], true) {
                    missing.push(producer);
                    stack.extend(&problem.ops[producer].ins);
                }
            }
            missing.sort_unstable();
            for copy in &missing {
                listed[*copy] = false;
                let is_read = read.contains(&layer_chunk_of[*copy]);
                for v in &problem.ops[*copy].outs {
                    ready[*v] = is_read || leaves[roots[*v]];
                }
            }
            schedule.extend(missing);
        }
        schedule.push(o);
        if op.phase == OpPhase::Backward {
            // A backward view of a forward storage shows the computation that was just read.
            for v in &op.outs {
                ready[*v] = true;
            }
        }
    }
    schedule
}

/// Returns the storages that a forward op of another layer or chunk reads, by owner.
fn leaving(
    problem: &Problem,
    roots: &ByValue<ValueIdx>,
    layer_chunk_of: &ByOp<Option<LayerChunk>>,
) -> ByValue<bool> {
    let mut leaves = problem.by_value(false);
    let is_forward = |(_, op): &(OpIdx, &Op)| op.phase == OpPhase::Forward;
    for (o, op) in problem.ops.enumerated().filter(is_forward) {
        for root in op.ins.iter().map(|v| roots[*v]) {
            let maker = problem.values[root].producer;
            leaves[root] |= maker.is_some_and(|maker| layer_chunk_of[maker] != layer_chunk_of[o]);
        }
    }
    leaves
}
