//! The ops that the steps of a schedule refer to, with names, layers and sub-blocks.
//!
//! The schedule of a plan that offloads belongs to the expanded problem (see [`ckpt_passes::plan::transfer_lowering`]). There
//! an offloaded op is three ops: one runs, one moves its results, one releases them. All three have the op's name here.

use crate::planning::labels::{Labels, Role};
use ckpt_passes::Result;
use ckpt_passes::plan::transfer_lowering::{ExpandedOp, ExpandedProblem};
use ckpt_passes::plan::{Op, OpAnnotations, Plan, Problem};
use std::borrow::Cow;

/// A problem with the names and layers of its ops.
#[derive(Clone)]
pub struct Terms<'a> {
    pub problem: Cow<'a, Problem>,
    pub annotations: Cow<'a, OpAnnotations>,
    pub labels: Cow<'a, Labels>,
    /// By op of a lowered problem; empty for any other.
    expanded_ops: Vec<ExpandedOp>,
    /// Number of values before lowering.
    values: usize,
}

impl<'a> Terms<'a> {
    /// Returns the terms of schedules without transfers.
    pub fn plain(
        problem: &'a Problem,
        annotations: &'a OpAnnotations,
        labels: &'a Labels,
    ) -> Terms<'a> {
        Terms {
            problem: Cow::Borrowed(problem),
            annotations: Cow::Borrowed(annotations),
            labels: Cow::Borrowed(labels),
            expanded_ops: Vec::new(),
            values: problem.values.len(),
        }
    }

    /// Returns the terms of a plan for the problem of `self`.
    ///
    /// # Errors
    /// A plan that does not fit the problem.
    pub fn of(&self, plan: &Plan) -> Result<Terms<'a>> {
        if plan.offloaded.is_empty() {
            return Ok(self.clone());
        }
        let expanded = ExpandedProblem::new(&self.problem, &plan.offloaded)?;
        let mut labels = self.labels.clone().into_owned();
        for _ in self.problem.values.len()..expanded.problem.values.len() {
            labels.names.push(String::new());
            labels.types.push(String::new());
            labels.roles.push(Role::Inner);
        }
        labels.modules = expanded.each(&labels.modules);
        let annotations = expanded.annotations(&self.annotations);
        Ok(Terms {
            annotations: Cow::Owned(annotations),
            labels: Cow::Owned(labels),
            problem: Cow::Owned(expanded.problem),
            expanded_ops: expanded.expanded_ops,
            values: self.values,
        })
    }

    /// Returns true for a value that stands for offloaded bytes.
    pub fn is_outside(&self, value: usize) -> bool {
        value >= self.values
    }

    /// Returns the index here of an op of the problem before lowering.
    pub fn op(&self, op: usize) -> usize {
        match self.expanded_ops.binary_search_by_key(&op, |s| s.op()) {
            // The search may end at any of the three ops.
            Ok(at) => self.computes(at),
            Err(_) => op,
        }
    }

    /// Returns true for an op that moves or releases the results of another.
    pub fn is_move(&self, op: usize) -> bool {
        matches!(
            self.expanded_ops.get(op),
            Some(ExpandedOp::Transfer(_) | ExpandedOp::Release(_))
        )
    }

    /// Returns the op that computes the results of an op, which may only move them.
    pub fn computes(&self, op: usize) -> usize {
        // The three ops are adjacent: run, move, release.
        match self.expanded_ops.get(op) {
            Some(ExpandedOp::Transfer(_)) => op - 1,
            Some(ExpandedOp::Release(_)) => op - 2,
            Some(ExpandedOp::Run(_)) | None => op,
        }
    }

    /// Returns the node of an op: transfers have that of the op whose results they move.
    pub fn node(&self, op: usize) -> &Op {
        &self.problem.ops[self.computes(op)]
    }
}
