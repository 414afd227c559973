//! Conditions on indices: an element of a boolean tensor as a function of its indices.
//!
//! A condition consists of inequalities between polynomials in sizes and index variables, of comparisons of two elements of
//! one value, and of booleans that only the data decides. Negation is pushed down to the leaves, so inner nodes are conjunctions
//! and disjunctions only.

use crate::ir::{Dim, ValueId};

/// Larger conditions, by leaves, are not followed.
const MAX_LEAVES: usize = 48;

/// Whether an element is true, as a function of its indices.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// The same for all indices.
    Is(bool),
    /// The polynomial is not negative.
    AtLeast0(Dim),
    /// The element of a value that is not followed further equals `holds`.
    Data {
        /// The value.
        value: ValueId,
        /// The index of its element.
        at: Vec<Dim>,
        /// What the element has to be.
        holds: bool,
    },
    /// The element of an integer value at the first index, less that at the second, is at least `least`. Integers are taken
    /// not to wrap around.
    Difference {
        /// The value.
        value: ValueId,
        /// The indices of its two elements.
        at: [Vec<Dim>; 2],
        /// The smallest difference.
        least: i64,
    },
    /// The conjunction.
    All(Vec<Condition>),
    /// The disjunction.
    Any(Vec<Condition>),
}

impl Condition {
    /// Returns the conjunction; `None` where it is too large to follow.
    pub fn and(self, other: Condition) -> Option<Condition> {
        Condition::join(self, other, true)
    }

    /// Returns the disjunction; `None` where it is too large to follow.
    pub fn or(self, other: Condition) -> Option<Condition> {
        Condition::join(self, other, false)
    }

    /// Returns the condition that both are equal; `None` where it is too large to follow.
    pub fn same(self, other: Condition) -> Option<Condition> {
        let both = self.clone().and(other.clone())?;
        both.or(self.negated().and(other.negated())?)
    }

    fn join(a: Condition, b: Condition, all: bool) -> Option<Condition> {
        let mut terms: Vec<Condition> = Vec::new();
        for side in [a, b] {
            let new = match (side, all) {
                // The neutral element, then the one that decides.
                (Condition::Is(x), _) if x == all => continue,
                (Condition::Is(x), _) => return Some(Condition::Is(x)),
                (Condition::All(list), true) | (Condition::Any(list), false) => list,
                (term, _) => vec![term],
            };
            for term in new {
                if !terms.contains(&term) {
                    terms.push(term);
                }
            }
        }
        if terms.iter().map(Condition::leaves).sum::<usize>() > MAX_LEAVES {
            return None;
        }
        Some(match (terms.len(), all) {
            (0, _) => Condition::Is(all),
            (1, _) => terms.swap_remove(0),
            (_, true) => Condition::All(terms),
            (_, false) => Condition::Any(terms),
        })
    }

    fn leaves(&self) -> usize {
        match self {
            Condition::All(list) | Condition::Any(list) => list.iter().map(Self::leaves).sum(),
            _ => 1,
        }
    }

    /// Returns the negation.
    pub fn negated(self) -> Condition {
        match self {
            Condition::Is(x) => Condition::Is(!x),
            // Integers: not (d >= 0) is -d - 1 >= 0.
            Condition::AtLeast0(d) => Condition::AtLeast0(Dim::from(-1).sub(&d)),
            Condition::Data { value, at, holds } => Condition::Data {
                value,
                at,
                holds: !holds,
            },
            Condition::Difference {
                value,
                at: [a, b],
                least,
            } => Condition::Difference {
                value,
                at: [b, a],
                least: 1 - least,
            },
            Condition::All(list) => Condition::Any(list.into_iter().map(Self::negated).collect()),
            Condition::Any(list) => Condition::All(list.into_iter().map(Self::negated).collect()),
        }
    }

    /// Returns the conditions that must all hold.
    pub fn conjuncts(&self) -> &[Condition] {
        match self {
            Condition::All(list) => list,
            Condition::Is(true) => &[],
            one => std::slice::from_ref(one),
        }
    }
}
