//! What the indices of a schedule refer to: a problem with the names and layers of its ops.

use crate::planning::labels::Labels;
use ckpt_passes::plan::{OpAnnotations, Problem};

/// A problem with the names and layers of its ops.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// The ops and values that a schedule refers to by index.
    pub problem: &'a Problem,
    /// Layers, sub-blocks and roles, by op of the problem.
    pub annotations: &'a OpAnnotations,
    /// Names, types and modules of the ops and values of the problem.
    pub labels: &'a Labels,
}
