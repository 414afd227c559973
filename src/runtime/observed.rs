//! Events of a step that its caller reports.

use ckpt_passes::ir::NodeId;
use std::collections::BTreeSet;

/// What happened in one step.
#[derive(Clone, Debug, Default)]
pub(super) struct Observed {
    /// Ops for which the device has no deterministic kernel.
    pub nondeterministic: BTreeSet<&'static str>,
    /// Nodes that chose among equal elements, where PyTorch leaves the choice open.
    pub ties: BTreeSet<NodeId>,
}
