//! Conditions on indices: what an element of a boolean tensor is.
//!
//! A condition is made of inequalities between polynomials in sizes and index variables, and of booleans that only the
//! data decides. Negation goes down to the leaves, so only conjunction and disjunction have inner nodes.

use crate::ir::{Dim, ValueId};

/// Conditions with more leaves than this are not followed.
const MAX_LEAVES: usize = 48;

/// Whether an element is true, as a function of its indices.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    Is(bool),
    /// The polynomial is not negative.
    AtLeast0(Dim),
    /// The element of a value that is not followed further is `holds`.
    Data {
        value: ValueId,
        at: Vec<Dim>,
        holds: bool,
    },
    All(Vec<Condition>),
    Any(Vec<Condition>),
}

impl Condition {
    /// The conjunction; `None` where it is too large to follow.
    pub fn and(self, other: Condition) -> Option<Condition> {
        Condition::join(self, other, true)
    }

    /// The disjunction; `None` where it is too large to follow.
    pub fn or(self, other: Condition) -> Option<Condition> {
        Condition::join(self, other, false)
    }

    fn join(a: Condition, b: Condition, all: bool) -> Option<Condition> {
        let mut parts: Vec<Condition> = Vec::new();
        for side in [a, b] {
            match (side, all) {
                // Neutral, and deciding.
                (Condition::Is(x), _) if x == all => {}
                (Condition::Is(x), _) => return Some(Condition::Is(x)),
                (Condition::All(list), true) | (Condition::Any(list), false) => {
                    for part in list {
                        push_new(&mut parts, part);
                    }
                }
                (part, _) => push_new(&mut parts, part),
            }
        }
        if parts.iter().map(Condition::leaves).sum::<usize>() > MAX_LEAVES {
            return None;
        }
        Some(match (parts.len(), all) {
            (0, _) => Condition::Is(all),
            (1, _) => parts.swap_remove(0),
            (_, true) => Condition::All(parts),
            (_, false) => Condition::Any(parts),
        })
    }

    fn leaves(&self) -> usize {
        match self {
            Condition::All(list) | Condition::Any(list) => list.iter().map(Self::leaves).sum(),
            _ => 1,
        }
    }

    pub fn not(self) -> Condition {
        match self {
            Condition::Is(x) => Condition::Is(!x),
            // Integers: not (d >= 0) is -d - 1 >= 0.
            Condition::AtLeast0(d) => Condition::AtLeast0(Dim::from(-1).sub(&d)),
            Condition::Data { value, at, holds } => Condition::Data {
                value,
                at,
                holds: !holds,
            },
            Condition::All(list) => Condition::Any(list.into_iter().map(Self::not).collect()),
            Condition::Any(list) => Condition::All(list.into_iter().map(Self::not).collect()),
        }
    }

    /// The conditions that must all hold.
    pub fn conjuncts(&self) -> &[Condition] {
        match self {
            Condition::All(list) => list,
            Condition::Is(true) => &[],
            one => std::slice::from_ref(one),
        }
    }
}

fn push_new(parts: &mut Vec<Condition>, part: Condition) {
    if !parts.contains(&part) {
        parts.push(part);
    }
}
