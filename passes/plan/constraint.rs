//! What the user settled about single ops before a policy or solver decides.
//!
//! [`Constraints`] is data over a [`Problem`]: at most one [`Constraint`] for each op. A policy follows it instead of its own
//! rule, a solver takes it as a hard constraint, and [`first_violation`] checks a schedule against it, so that all three
//! mean the same.
//!
//! A constraint has no effect where no schedule has a choice: on ops that must not run twice, on results without bytes, on
//! results that no backward op reads, and on ops that only make views. A view of a kept storage is read as it is, and a view
//! of a recomputed storage is recomputed. Policies have no choice about any pinned result; budgets do about graph outputs
//! and results of the backward pass.

use super::annotations::{OpAnnotations, OpRole};
use super::index::{ByOp, OpIdx};
use super::problem::{OpPhase, Problem};
use super::saved_set::pinned;
use ckpt_error::{Error, Result};

/// The constraint on one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// The op runs once, and what the backward pass reads of it is kept.
    Keep,
    /// Backward ops and copies among them read the results only from a later run than the first.
    Recompute,
}

/// A constraint and the option that it comes from (`--save-ops MatMul`), for reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forced {
    /// The constraint that the op must obey.
    pub constraint: Constraint,
    /// The option as text, or the planner's own reason for an op that must run once.
    pub by: String,
}

/// Whether a policy applies to an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyScope {
    /// It applies: the op is in this layer, or in this of the modules that take the place of layers.
    Layer(usize),
    /// The op is in no layer.
    NoLayer,
    /// `--layers`, `--scope`, `--every` or `--first` leave the op out.
    Excluded,
    /// No trained parameter flows into the op, nor into most of its layer.
    Frozen,
}

impl PolicyScope {
    /// Returns the layer.
    pub fn layer(self) -> Option<usize> {
        match self {
            PolicyScope::Layer(layer) => Some(layer),
            _ => None,
        }
    }

    /// Returns whether the user or the lack of training takes the op out of the policy's reach.
    pub fn is_exempt(self) -> bool {
        matches!(self, PolicyScope::Excluded | PolicyScope::Frozen)
    }
}

/// All constraints, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// The number of layers, or of modules that take their place. 0 where none were found and none were asked for.
    pub layers: usize,
    /// Whether the policy applies to each op.
    pub scope: ByOp<PolicyScope>,
    /// The constraint on each op; `None` leaves it to the policy or solver.
    pub forced: ByOp<Option<Forced>>,
}

impl Constraints {
    /// Returns the constraints without any override: layers without training are exempt, and ops that pick elements by
    /// size (the experts of a token) run once. A copy that picked other experts would send gradients to experts that did not
    /// run.
    pub fn none(annotations: &OpAnnotations) -> Constraints {
        let scope = |layer: &Option<usize>| layer.map_or(PolicyScope::NoLayer, PolicyScope::Layer);
        let mut constraints = Constraints {
            layers: annotations.layers,
            scope: annotations.layer_of.iter().map(scope).collect(),
            forced: annotations.role_of.iter().map(routing).collect(),
        };
        constraints.exempt_frozen(annotations);
        constraints
    }

    /// Exempts layers that no trained parameter flows into. In a layer that is mostly such, exempts those ops: where a
    /// frozen half of a model ends inside a layer, the layer is not recomputed for its last few values. Without
    /// layers, exempts such ops.
    pub fn exempt_frozen(&mut self, annotations: &OpAnnotations) {
        let mut trained = vec![0; self.layers];
        let mut all = vec![0; self.layers];
        for (scope, op) in self.scope.iter().zip(&annotations.trained) {
            if let PolicyScope::Layer(layer) = scope {
                trained[*layer] += usize::from(*op);
                all[*layer] += 1;
            }
        }
        for (scope, op) in self.scope.iter_mut().zip(&annotations.trained) {
            let is_frozen = match *scope {
                PolicyScope::Layer(layer) => !op && 2 * trained[layer] < all[layer],
                PolicyScope::NoLayer => self.layers == 0 && !op,
                PolicyScope::Excluded | PolicyScope::Frozen => false,
            };
            if is_frozen {
                *scope = PolicyScope::Frozen;
            }
        }
    }

    /// Returns the hard constraints of a solver, by op: forced ones, and exempt ops are kept.
    pub fn by_op(&self, problem: &Problem) -> ByOp<Option<Constraint>> {
        let constraint = |op: OpIdx| match &self.forced[op] {
            Some(forced) => Some(forced.constraint),
            None => self.scope[op].is_exempt().then_some(Constraint::Keep),
        };
        let decides = |op: OpIdx| problem.ops[op].phase == OpPhase::Forward && !problem.is_view(op);
        problem
            .ops
            .indices()
            .map(|op| constraint(op).filter(|_| decides(op)))
            .collect()
    }
}

fn routing(role: &OpRole) -> Option<Forced> {
    (*role == OpRole::TopK).then(|| Forced {
        constraint: Constraint::Keep,
        by: "a choice that must not change".into(),
    })
}

/// Checks that a schedule honours constraints by op.
///
/// # Errors
/// A bug that names the first op whose constraint is violated.
pub fn check_constraints(
    problem: &Problem,
    schedule: &[OpIdx],
    constraints: &ByOp<Option<Constraint>>,
) -> Result<()> {
    match first_violation(problem, schedule, constraints) {
        None => Ok(()),
        Some(op) => Err(Error::bug(
            "plan",
            format!(
                "the plan violates the constraint {:?} on op `{}`",
                constraints[op], problem.ops[op].name
            ),
        )),
    }
}

/// Returns the first op whose constraint a valid schedule violates. Linear in the operands of the steps.
pub fn first_violation(
    problem: &Problem,
    schedule: &[OpIdx],
    constraints: &ByOp<Option<Constraint>>,
) -> Option<OpIdx> {
    let roots = problem.roots();
    let pins = pinned(problem);
    let mut runs = problem.by_op(0u32);
    // Which run of the op that owns the storage each value shows.
    let mut shows = problem.by_value(0u32);
    let mut in_backward = false;
    for o in schedule {
        let op = &problem.ops[*o];
        runs[*o] += 1;
        let is_copy = runs[*o] > 1;
        in_backward |= op.phase == OpPhase::Backward;
        if is_copy && constraints[*o] == Some(Constraint::Keep) && !problem.is_view(*o) {
            return Some(*o);
        }
        if in_backward && (is_copy || op.phase == OpPhase::Backward) {
            for v in &op.ins {
                let root = roots[*v];
                if let Some(producer) = problem.values[root].producer
                    && constraints[producer] == Some(Constraint::Recompute)
                    && pins[root].is_none()
                    && problem.values[root].bytes > 0
                    && shows[*v] < 2
                {
                    return Some(producer);
                }
            }
        }
        for v in &op.outs {
            shows[*v] = problem.values[*v].view_of.map_or(runs[*o], |b| shows[b]);
        }
    }
    None
}
