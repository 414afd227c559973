//! What the user has settled about single ops before any policy or solver decides.
//!
//! [`Constraints`] is data over a [`Problem`]: one optional [`Constraint`] an op. A policy lets it override its own rule, a
//! solver takes it as a hard constraint, and [`broken_by`] judges whether a schedule honours it, so that both
//! mean the same by it. What no schedule can change is no choice: results that are pinned (graph outputs, ops that must
//! not run twice) and results that no backward op reads honour either wish, and so do ops that only make views: a view
//! is read as it is where its storage stays, and made again where its storage is.

use super::input::{OpAnnotations, Part};
use super::problem::{Phase, Problem};
use super::saved_set::pinned;
use crate::error::{Error, Result};

/// The wish for one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// It runs once: what the backward part reads of it stays.
    Keep,
    /// Backward ops, and copies among them, read its results only from a later run than the first.
    Recompute,
}

/// A wish and the option that it comes from, for reasons: `--save-ops MatMul`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forced {
    pub choice: Constraint,
    pub by: String,
}

/// Where an op stands to the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this unit: a layer, or a module that was asked for.
    Unit(usize),
    /// In no layer.
    NoLayer,
    /// Outside what `--layers`, `--scope`, `--every` or `--first` left.
    Elsewhere,
    /// No trained parameter flows into it, nor into most of its layer.
    Frozen,
}

impl Place {
    pub fn unit(self) -> Option<usize> {
        match self {
            Place::Unit(unit) => Some(unit),
            _ => None,
        }
    }
}

/// All overrides, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// How many units policies of whole layers work in. 0 where no layers were found and none were asked for.
    pub units: usize,
    pub place: Vec<Place>,
    pub forced: Vec<Option<Forced>>,
}

impl Constraints {
    /// No overrides: the units are the layers, but for those that nothing trained flows into. What picks elements by size
    /// (the experts of a token) runs once unless an override says otherwise: a copy that picked differently would send
    /// gradients to experts that were never asked.
    pub fn none(structure: &OpAnnotations) -> Constraints {
        let unit = |block: &Option<usize>| block.map_or(Place::NoLayer, Place::Unit);
        let mut choices = Constraints {
            units: structure.blocks,
            place: structure.block_of.iter().map(unit).collect(),
            forced: structure.part_of.iter().map(routing).collect(),
        };
        choices.leave_frozen(structure);
        choices
    }

    /// Leaves units alone that no trained parameter flows into, and of units that are mostly such, those ops: where a
    /// frozen part of a model ends inside a layer, the layer is not computed again for its last few values. Without units,
    /// such ops are left alone.
    pub(super) fn leave_frozen(&mut self, structure: &OpAnnotations) {
        let mut trained = vec![0; self.units];
        let mut all = vec![0; self.units];
        for (place, op) in self.place.iter().zip(&structure.trained) {
            if let Place::Unit(unit) = place {
                trained[*unit] += usize::from(*op);
                all[*unit] += 1;
            }
        }
        for (place, op) in self.place.iter_mut().zip(&structure.trained) {
            let frozen = match *place {
                Place::Unit(unit) => !op && 2 * trained[unit] < all[unit],
                Place::NoLayer => self.units == 0 && !op,
                Place::Elsewhere | Place::Frozen => false,
            };
            if frozen {
                *place = Place::Frozen;
            }
        }
    }

    /// Hard constraints for a solver, by op: forced choices, and what lies elsewhere or is frozen stays.
    pub fn constraints(&self, problem: &Problem) -> Vec<Option<Constraint>> {
        let wish = |op: usize| match (&self.forced[op], self.place[op]) {
            (Some(forced), _) => Some(forced.choice),
            (None, Place::Elsewhere | Place::Frozen) => Some(Constraint::Keep),
            (None, Place::Unit(_) | Place::NoLayer) => None,
        };
        let decides = |op: usize| problem.ops[op].phase == Phase::Forward && !problem.is_view(op);
        (0..problem.ops.len())
            .map(|op| wish(op).filter(|_| decides(op)))
            .collect()
    }
}

fn routing(part: &Part) -> Option<Forced> {
    (*part == Part::Choice).then(|| Forced {
        choice: Constraint::Keep,
        by: "a choice that must not change".into(),
    })
}

/// Checks that a schedule honours constraints.
///
/// # Errors
/// A bug that names the first op whose constraint is broken.
pub fn honours(
    problem: &Problem,
    schedule: &[usize],
    overrides: &[Option<Constraint>],
) -> Result<()> {
    match broken_by(problem, schedule, overrides) {
        None => Ok(()),
        Some(op) => Err(Error::bug(
            "plan",
            format!(
                "the plan breaks the wish {:?} for op `{}`",
                overrides[op], problem.ops[op].name
            ),
        )),
    }
}

/// The first op whose wish a valid schedule does not honour. Linear.
pub fn broken_by(
    problem: &Problem,
    schedule: &[usize],
    overrides: &[Option<Constraint>],
) -> Option<usize> {
    let roots = problem.roots();
    let pins = pinned(problem);
    let mut runs = vec![0u32; problem.ops.len()];
    // Which run of the op that owns the storage each value shows.
    let mut shows = vec![0u32; problem.values.len()];
    let mut in_backward = false;
    for o in schedule {
        let op = &problem.ops[*o];
        runs[*o] += 1;
        let is_copy = runs[*o] > 1;
        in_backward |= op.phase == Phase::Backward;
        if is_copy && overrides[*o] == Some(Constraint::Keep) && !problem.is_view(*o) {
            return Some(*o);
        }
        if in_backward && (is_copy || op.phase == Phase::Backward) {
            for v in &op.ins {
                let root = roots[*v];
                if let Some(maker) = problem.values[root].producer
                    && overrides[maker] == Some(Constraint::Recompute)
                    && pins[root].is_none()
                    && shows[*v] < 2
                {
                    return Some(maker);
                }
            }
        }
        for v in &op.outs {
            shows[*v] = problem.values[*v].view_of.map_or(runs[*o], |b| shows[b]);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Device, MemoryProfile, Sizes};
    use crate::plan::saved_set::schedule;
    use crate::testing::{Random, random_graph};

    /// A schedule made from the overrides honours them; for every wish that it could break there is one that does.
    #[test]
    fn schedules_made_from_wishes_honour_them() {
        let mut r = Random(5);
        let (mut refused_keep, mut refused_recompute) = (0, 0);
        for n in 0..300 {
            let g = random_graph(&mut r, 3 + n % 25);
            let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
            let m = MemoryProfile::new(&g, &sizes).unwrap();
            let (p, _) = Problem::of_graph(&g, &sizes, &m, &Device::default()).unwrap();
            let overrides: Vec<Option<Constraint>> = (0..p.ops.len())
                .map(|o| match r.below(3) {
                    _ if p.ops[o].phase == Phase::Backward => None,
                    0 => None,
                    1 => Some(Constraint::Keep),
                    _ => Some(Constraint::Recompute),
                })
                .collect();
            let keep_all = |dropped: Constraint| -> Vec<bool> {
                let wish = |v: &super::super::problem::Value| v.producer.and_then(|o| overrides[o]);
                p.values.iter().map(|v| wish(v) != Some(dropped)).collect()
            };
            let good = schedule(&p, &keep_all(Constraint::Recompute));
            assert!(honours(&p, &good, &overrides).is_ok(), "graph {n}");
            // Keeping nothing runs ops again that were to run once.
            let none = schedule(&p, &keep_all(Constraint::Keep));
            let mut runs = vec![0; p.ops.len()];
            none.iter().for_each(|o| runs[*o] += 1);
            let twice =
                |o: usize| runs[o] > 1 && overrides[o] == Some(Constraint::Keep) && !p.is_view(o);
            if (0..p.ops.len()).any(twice) {
                refused_keep += 1;
                assert!(broken_by(&p, &none, &overrides).is_some(), "graph {n}");
            }
            // Running nothing again breaks the other wish wherever the backward part reads what was to be made again.
            if good != p.given_order() {
                refused_recompute += 1;
                assert!(
                    broken_by(&p, &p.given_order(), &overrides).is_some(),
                    "graph {n}"
                );
            }
        }
        assert!(
            refused_keep > 50 && refused_recompute > 50,
            "{refused_keep} {refused_recompute}"
        );
    }
}
