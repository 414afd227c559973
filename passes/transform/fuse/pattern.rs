//! What the searches of this pass share: a pattern, where it was found, and what replaces it.

use crate::error::Result;
use crate::ir::{Attrs, ValueId};
use crate::ops::concat::CONCAT;
use crate::ops::shape::RESHAPE;
use crate::ops::{Builder, EmitExt};

/// One op that stands for several.
pub(super) trait Pattern {
    /// Returns the values it reads, so that values that replaced them meanwhile can take their place.
    fn operands(&mut self) -> Vec<&mut ValueId>;
    /// Returns its name in the plural, for people.
    fn plural(&self) -> &'static str;
    /// Emits the op. Returns the value that takes the old one's place.
    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId>;
}

/// A pattern that a search found.
pub(super) struct Found {
    /// The value to compute in another way.
    pub output: ValueId,
    /// What computes it.
    pub pattern: Box<dyn Pattern>,
}

impl Found {
    /// Builds a finding.
    pub fn new(output: ValueId, pattern: impl Pattern + 'static) -> Found {
        Found {
            output,
            pattern: Box::new(pattern),
        }
    }
}

/// Reshapes `x` to the first `lead` axes of `like` and its own last `own` axes.
pub(super) fn with_lead(
    b: &mut Builder,
    x: ValueId,
    like: ValueId,
    lead: usize,
    own: usize,
) -> Result<ValueId> {
    let rank = b.rank(x);
    let dims = [b.sizes(like, 0..lead)?, b.sizes(x, rank - own..rank)?];
    let target = b.emit(&CONCAT, &dims, Attrs::new().with("axis", 0))?;
    b.emit(&RESHAPE, &[x, target], Attrs::new().with("allowzero", 1))
}
