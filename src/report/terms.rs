//! What the indices of a schedule refer to: a problem with the names and layers of its ops.

use crate::planning::labels::Labels;
use ckpt_passes::plan::{OpAnnotations, Problem};

/// A problem with the names and layers of its ops.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    pub problem: &'a Problem,
    pub annotations: &'a OpAnnotations,
    pub labels: &'a Labels,
}
