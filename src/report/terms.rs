//! What the steps of a schedule are about: ops with names, layers and parts.
//!
//! A schedule of a plan that offloads is one of the staged problem (see [`ckpt_passes::plan::transfer_lowering`]), in which an op whose
//! results wait outside is three: the one that runs, the one that moves, and the one that lets go. Here all are called by
//! the op's own name.

use crate::planning::labels::{Labels, Role};
use ckpt_passes::Result;
use ckpt_passes::plan::transfer_lowering::{Stage, Staged};
use ckpt_passes::plan::{Op, OpAnnotations, Plan, Problem};
use std::borrow::Cow;

/// See the module.
#[derive(Clone)]
pub struct Terms<'a> {
    pub problem: Cow<'a, Problem>,
    pub structure: Cow<'a, OpAnnotations>,
    pub labels: Cow<'a, Labels>,
    /// Of each op, where the problem is staged; else none.
    stages: Vec<Stage>,
    /// Values that the problem has when it is not staged.
    values: usize,
}

impl<'a> Terms<'a> {
    /// Of schedules that move nothing.
    pub fn plain(
        problem: &'a Problem,
        structure: &'a OpAnnotations,
        labels: &'a Labels,
    ) -> Terms<'a> {
        Terms {
            problem: Cow::Borrowed(problem),
            structure: Cow::Borrowed(structure),
            labels: Cow::Borrowed(labels),
            stages: Vec::new(),
            values: problem.values.len(),
        }
    }

    /// Of the schedule of a plan that was made for the problem of `self`.
    ///
    /// # Errors
    /// A plan that is none for the problem.
    pub fn of(&self, plan: &Plan) -> Result<Terms<'a>> {
        if plan.offloaded.is_empty() {
            return Ok(self.clone());
        }
        let staged = Staged::new(&self.problem, &plan.offloaded)?;
        let mut labels = self.labels.clone().into_owned();
        for _ in self.problem.values.len()..staged.problem.values.len() {
            labels.names.push(String::new());
            labels.types.push(String::new());
            labels.roles.push(Role::Inner);
        }
        labels.modules = staged.each(&labels.modules);
        let structure = staged.structure(&self.structure);
        Ok(Terms {
            structure: Cow::Owned(structure),
            labels: Cow::Owned(labels),
            problem: Cow::Owned(staged.problem),
            stages: staged.stages,
            values: self.values,
        })
    }

    /// Whether a value only stands for what waits outside.
    pub fn is_outside(&self, value: usize) -> bool {
        value >= self.values
    }

    /// The op of an unstaged problem, here.
    pub fn op(&self, op: usize) -> usize {
        match self.stages.binary_search_by_key(&op, |s| s.op()) {
            // An op that is three is found at any of them.
            Ok(at) => self.computes(at),
            Err(_) => op,
        }
    }

    /// Whether an op stands for moving the results of another, or letting them go.
    pub fn is_move(&self, op: usize) -> bool {
        matches!(
            self.stages.get(op),
            Some(Stage::Move(_) | Stage::Release(_))
        )
    }

    /// The op that computes what an op makes: another one where that only moves it.
    pub fn computes(&self, op: usize) -> usize {
        // An op that moves comes right after the one whose results it moves, the one that lets go after that.
        match self.stages.get(op) {
            Some(Stage::Move(_)) => op - 1,
            Some(Stage::Release(_)) => op - 2,
            Some(Stage::Run(_)) | None => op,
        }
    }

    /// The node behind an op: its name, op and whatever else no move has of its own.
    pub fn node(&self, op: usize) -> &Op {
        &self.problem.ops[self.computes(op)]
    }
}
