//! The form in which solvers see offloading: the results of some ops are computed, moved and fetched by ops of their own.
//!
//! An offloaded op becomes two. The first computes: it needs what the op needs, its results count as temporaries, and what it
//! leaves takes no memory on the device, or that of a rank's slice. The second, of kind `Transfer`, makes the results from that. Its first run, right
//! after the first op's, stands for moving out. Every later run is a fetch. Moving out and fetching cost the same. So memory and
//! order of the expanded problem are those of the steps, and solvers and policies work on it as on any problem. It cannot
//! express a second run of an offloaded op, which is therefore not allowed.
//!
//! Releases are left out: right after a transfer they change nothing, and where else they go is decided when the rest is.

use crate::annotations::{OpAnnotations, OpRole};
use crate::constraint::{Constraint, Constraints, Forced};
use crate::index::{ByOp, OpIdx, ValueIdx};
use crate::input::PlanInput;
use crate::problem::{Op, Problem, Value, ValueKind};
use crate::steps::{Step, settled};
use ckpt_error::Result;

/// An op of an expanded problem, by the op that it was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpandedOp {
    /// Runs the op.
    Run(OpIdx),
    /// Moves the results of the op: out the first time, back after that.
    Transfer(OpIdx),
}

impl ExpandedOp {
    fn op(self) -> OpIdx {
        let (ExpandedOp::Run(op) | ExpandedOp::Transfer(op)) = self;
        op
    }
}

/// What a transfer costs a step, as a solver is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Price {
    /// All of it: nothing runs beside.
    Whole,
    /// Its start: all else runs beside. No schedule takes less.
    Hidden,
}

/// An expanded problem, and the way back.
#[derive(Clone, Debug)]
pub struct ExpandedProblem {
    /// Values keep their indices. What is off the device comes after them.
    pub problem: Problem,
    ops: ByOp<ExpandedOp>,
    /// Ops whose results are offloaded, in order.
    pub offloaded: Vec<OpIdx>,
}

impl ExpandedProblem {
    /// Expands a problem for ops in any order.
    ///
    /// # Errors
    /// An op whose results cannot be moved, or a problem that does not say what transfers cost.
    pub fn new(problem: &Problem, offloaded: &[OpIdx], price: Price) -> Result<ExpandedProblem> {
        problem.check_movable(offloaded)?;
        let mut is_offloaded = problem.by_op(false);
        for op in offloaded {
            is_offloaded[*op] = true;
        }
        let mut expanded = ExpandedProblem {
            problem: Problem {
                ops: ByOp::default(),
                slices: Default::default(),
                ..problem.clone()
            },
            ops: ByOp::default(),
            offloaded: is_offloaded
                .indices()
                .filter(|op| is_offloaded[*op])
                .collect(),
        };
        for (o, op) in problem.ops.enumerated() {
            if is_offloaded[o] {
                let whole = problem.cost(Step::Fetch(o));
                let own_us = problem.transfer.map_or(whole, |t| t.own_us(whole));
                let cost = match price {
                    Price::Whole => whole,
                    Price::Hidden => own_us,
                };
                let bytes = (problem.result_bytes(o), problem.slice_bytes(o));
                expanded.push_moved(op, o, bytes, cost);
            } else {
                expanded.push(op.clone(), ExpandedOp::Run(o));
            }
        }
        Ok(expanded)
    }

    fn push(&mut self, op: Op, stage: ExpandedOp) {
        for v in &op.outs {
            self.problem.values[*v].producer = Some(OpIdx(self.problem.ops.len()));
        }
        self.problem.ops.push(op);
        self.ops.push(stage);
    }

    fn push_moved(&mut self, op: &Op, o: OpIdx, (bytes, stay): (u64, u64), cost: f64) {
        let outside = Value::new(stay, ValueKind::Activation, None);
        let outside: ValueIdx = self.problem.values.push(outside);
        let run = Op {
            outs: vec![outside],
            temp_bytes: op.temp_bytes + bytes,
            recomputable: false,
            ..op.clone()
        };
        let name = format!("{}/fetch", op.name);
        let transfer = Op {
            kind: "Transfer".into(),
            bytes,
            ..Op::new(name, [outside], op.outs.clone(), op.phase, cost)
        };
        self.push(run, ExpandedOp::Run(o));
        self.push(transfer, ExpandedOp::Transfer(o));
    }

    /// Returns the input of the expanded problem, with a constraint on all transfers.
    pub fn input(&self, input: &PlanInput, fixed: Option<Constraint>) -> PlanInput {
        let mut constraints = Constraints {
            layers: input.constraints.layers,
            scope: self.each(&input.constraints.scope),
            forced: self.each(&input.constraints.forced),
        };
        if let Some(constraint) = fixed {
            for (forced, stage) in constraints.forced.iter_mut().zip(&self.ops) {
                if matches!(stage, ExpandedOp::Transfer(_)) {
                    let by = "--offload".into();
                    *forced = Some(Forced { constraint, by });
                }
            }
        }
        PlanInput {
            problem: self.problem.clone(),
            annotations: self.annotations(&input.annotations),
            constraints,
            overrides: input.overrides.clone(),
            chunks: Default::default(),
            ..*input
        }
    }

    fn annotations(&self, annotations: &OpAnnotations) -> OpAnnotations {
        let role = |stage: &ExpandedOp| match stage {
            ExpandedOp::Run(op) => annotations.role_of[*op],
            ExpandedOp::Transfer(_) => OpRole::Other,
        };
        OpAnnotations {
            layers: annotations.layers,
            layer_of: self.each(&annotations.layer_of),
            role_of: self.ops.iter().map(role).collect(),
            sub_blocks: annotations.sub_blocks.clone(),
            sub_block_of: self.each(&annotations.sub_block_of),
            core_of: self.each(&annotations.core_of),
            trained: self.each(&annotations.trained),
            opens_layer: self.each(&annotations.opens_layer),
            feeds_scores: self.each(&annotations.feeds_scores),
            layer_chunk_of: self.each(&annotations.layer_chunk_of),
        }
    }

    /// Returns a table by op, for the expanded ops.
    fn each<T: Clone>(&self, by_op: &ByOp<T>) -> ByOp<T> {
        let entry = |stage: &ExpandedOp| by_op[stage.op()].clone();
        self.ops.iter().map(entry).collect()
    }

    /// Returns the steps of a schedule of the expanded problem, [settled].
    pub fn steps(&self, schedule: impl Iterator<Item = OpIdx>) -> Vec<Step> {
        let mut has_left = ByOp::filled(false, self.ops.len());
        let step = |op: OpIdx| match self.ops[op] {
            ExpandedOp::Run(op) => Step::Run(op),
            ExpandedOp::Transfer(of) => match std::mem::replace(&mut has_left[op], true) {
                true => Step::Fetch(of),
                false => Step::Offload(of),
            },
        };
        settled(&schedule.map(step).collect::<Vec<_>>())
    }
}
