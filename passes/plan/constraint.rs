//! What the user settled about single ops before a policy or solver decides.
//!
//! [`Constraints`] is data over a [`Problem`]: at most one [`Constraint`] for each op. A policy follows it instead of its own
//! rule, a solver takes it as a hard constraint, and [`first_violation`] checks a schedule against it, so that all three
//! mean the same.
//!
//! A constraint has no effect where no schedule has a choice: on ops that must not run twice, on results without bytes, on
//! results that no backward op reads, and on ops that only make views. A view of a kept storage is read as it is, and a view
//! of a recomputed storage is recomputed. Policies keep every pinned result. Solvers may recompute graph outputs, which then
//! leave the graph from a later run than the first, and results of the backward pass.

use super::annotations::{OpAnnotations, OpRole};
use super::index::{ByOp, ByValue, OpIdx};
use super::problem::{OpPhase, Problem};
use super::saved_set::{Pinned, pinned};
use ckpt_error::{Error, Result};
use std::collections::BTreeMap;

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

    /// Returns why an op in this scope that no policy rebuilds is kept.
    pub fn reason(self) -> &'static str {
        match self {
            PolicyScope::Layer(_) => "this layer is left alone",
            PolicyScope::NoLayer => "outside the layers",
            PolicyScope::Excluded => "outside what was asked for",
            PolicyScope::Frozen => "nothing trained flows into it",
        }
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
    /// Returns the constraints without any override: those of [`Constraints::none`], and of ops that must be recomputed.
    pub fn of(problem: &Problem, annotations: &OpAnnotations) -> Constraints {
        let mut constraints = Constraints::none(annotations);
        for (op, forced) in problem.ops.iter().zip(constraints.forced.iter_mut()) {
            if op.must_recompute && forced.is_none() {
                *forced = Some(Forced {
                    constraint: Constraint::Recompute,
                    by: "the graph asks for it".into(),
                });
            }
        }
        constraints
    }

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
    /// layers, exempts such ops. Where the sequence goes through the model in chunks it exempts nothing: what is made of a chunk
    /// must not stay for the length of the sequence.
    pub fn exempt_frozen(&mut self, annotations: &OpAnnotations) {
        if annotations.has_chunks() {
            return;
        }
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

    /// Returns the constraint on an op with the reason for it: a forced one, or an exempt op is kept.
    fn on(&self, problem: &Problem, op: OpIdx) -> Option<(Constraint, &str)> {
        let decides = problem.ops[op].phase == OpPhase::Forward && !problem.is_view(op);
        let constraint = match &self.forced[op] {
            Some(forced) => Some((forced.constraint, forced.by.as_str())),
            None => {
                let scope = self.scope[op];
                let keep = (Constraint::Keep, scope.reason());
                scope.is_exempt().then_some(keep)
            }
        };
        constraint.filter(|_| decides)
    }

    /// Returns why `constraint` holds for an op, if it does.
    pub fn reason(&self, problem: &Problem, op: OpIdx, constraint: Constraint) -> Option<&str> {
        let found = self.on(problem, op);
        found
            .filter(|found| found.0 == constraint)
            .map(|found| found.1)
    }

    /// Returns the hard constraints of a solver, by op: forced ones, and exempt ops are kept.
    pub fn by_op(&self, problem: &Problem) -> ByOp<Option<Constraint>> {
        let ops = problem.ops.indices();
        ops.map(|op| Some(self.on(problem, op)?.0)).collect()
    }

    /// Returns the constraints that a policy can follow, by op. A policy keeps graph outputs, so it recomputes none.
    ///
    /// # Errors
    /// `error[selection]` for an override that demands the recomputation of outputs alone.
    pub fn of_policy(&self, problem: &Problem) -> Result<ByOp<Option<Constraint>>> {
        let pins = pinned(problem);
        let mut by_op = self.by_op(problem);
        // Each override that demands a recomputation, and whether a policy can honour it somewhere.
        let mut demands: BTreeMap<&str, bool> = BTreeMap::new();
        for (op, constraint) in by_op.iter_mut().enumerate() {
            let op = OpIdx(op);
            let Some((Constraint::Recompute, by)) = self.on(problem, op) else {
                continue;
            };
            let outs = &problem.ops[op].outs;
            let is_free = outs.iter().any(|v| pins[*v].is_none());
            let is_output = outs.iter().any(|v| pins[*v] == Some(Pinned::Output));
            if is_free || is_output {
                *demands.entry(by).or_default() |= is_free;
            }
            if is_output {
                *constraint = None;
            }
        }
        match demands.iter().find(|(_, is_free)| !**is_free) {
            None => Ok(by_op),
            Some((by, _)) => Err(Error::usage(
                "selection",
                format!("{by} matches only graph outputs, which policies keep"),
            )
            .help("with --budget in place of --policy they are recomputed")),
        }
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
    let must_go = droppable(problem);
    let mut runs = problem.by_op(0u32);
    // Which run of the op that owns the storage each value shows; a first run in the backward pass counts as a second one.
    let mut shows = problem.by_value(0u32);
    let mut in_backward = false;
    for o in schedule {
        let op = &problem.ops[*o];
        runs[*o] += 1;
        let is_copy = runs[*o] > 1;
        in_backward |= op.phase == OpPhase::Backward;
        if in_backward {
            runs[*o] = runs[*o].max(2);
        }
        if is_copy && constraints[*o] == Some(Constraint::Keep) && !problem.is_view(*o) {
            return Some(*o);
        }
        if in_backward && (is_copy || op.phase == OpPhase::Backward) {
            for v in &op.ins {
                let root = roots[*v];
                if let Some(producer) = problem.values[root].producer
                    && constraints[producer] == Some(Constraint::Recompute)
                    && must_go[root]
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
    let outputs = problem.outputs.iter().filter(|_| in_backward);
    let early = outputs.filter(|v| must_go[roots[**v]] && shows[**v] < 2);
    let mut makers = early.filter_map(|v| problem.values[roots[*v]].producer);
    makers.find(|op| constraints[*op] == Some(Constraint::Recompute))
}

/// Returns, for the owner of each storage, whether a solver can be asked to recompute it.
pub fn droppable(problem: &Problem) -> ByValue<bool> {
    let is_free = |pin: &Option<Pinned>| pin.is_none_or(|pin| pin == Pinned::Output);
    let pins = pinned(problem);
    let values = pins.iter().zip(problem.values.iter());
    values
        .map(|(pin, value)| is_free(pin) && value.bytes > 0)
        .collect()
}
