//! A pass as a row, and the context that passes share.

use crate::analysis::params::Parameter;
use crate::analysis::sizes::Binding;
use crate::error::Result;
use crate::ir::{Graph, Phase};
use crate::plan::chunks::Tried;
use crate::plan::planner::PlanOutcome;
use crate::planning::bound_graph::BoundGraph;
use crate::request::Request;
use crate::transform::fuse::Fused;
use crate::transform::lora::Adapters;
use crate::transform::loss::{Loss, Seed};
use crate::transform::optimizer::Updates;
use crate::transform::sequence::Chunked;

/// What running a pass did, by its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The pass may have changed the graph.
    Yes,
    /// The graph is the same as before; the driver checks this.
    No,
}

impl From<bool> for Changed {
    fn from(changed: bool) -> Changed {
        if changed { Changed::Yes } else { Changed::No }
    }
}

/// The phase a pass leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The phase that the graph had before.
    Same,
    /// This phase, or the one before the pass where that is later.
    AtLeast(Phase),
    /// This phase, whatever the one before.
    Exactly(Phase),
}

/// One pass: a name, the phases it goes between, and the function.
pub struct Pass {
    /// Word for the pass in pipelines, dumps and timings.
    pub name: &'static str,
    /// Phases it takes.
    pub from: &'static [Phase],
    /// Phase it leaves; the driver checks this after the run.
    pub to: After,
    /// The passes of which one must come right before it, because it reads what that one left in the [`Cx`]; none: any.
    pub follows: &'static [&'static str],
    /// A second run changes nothing.
    pub idempotent: bool,
    /// Runs the pass on a graph of one of the phases in `from`.
    pub run: fn(&mut Graph, &mut Cx) -> Result<Changed>,
}

impl Pass {
    /// Returns the phase that the pass leaves a graph of phase `before` in.
    pub fn leaves(&self, before: Phase) -> Phase {
        match self.to {
            After::Same => before,
            After::AtLeast(phase) => phase.max(before),
            After::Exactly(phase) => phase,
        }
    }
}

/// A plan with the graph that it was made for.
pub struct Planned {
    /// The plan, and what planning took.
    pub outcome: PlanOutcome,
    /// The graph at the sizes of `binding`, with the problem that was planned.
    pub bound: BoundGraph,
    /// The sizes at which the graph was planned.
    pub binding: Binding,
}

/// The context of passes: the request, and what one pass leaves for the next.
#[derive(Default)]
pub struct Cx {
    /// What the user asked for; passes only read it.
    pub request: Request,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// The initializers that `tie` replaced: the one that stays, and its copy.
    pub tied: Vec<(String, String)>,
    /// The adapters that `lora` added.
    pub adapters: Adapters,
    /// The ops that `fuse` added, and how often.
    pub fused: Fused,
    /// What `tile` cut: the node that makes the scores, and the chunk count.
    pub tiled: Vec<(String, usize)>,
    /// Chains of ops on tokens that `tile` cut: the first node, and the chunk count.
    pub tiled_mlps: Vec<(String, usize)>,
    /// Whether rewrites before autodiff prepared the loss for chunks.
    pub settled: bool,
    /// How `sequence` cut the positions; `None` where it did not.
    pub sequence: Option<Chunked>,
    /// The chunk counts that the planner tried, where they were left to it.
    pub tried: Option<Tried>,
    /// The updates that `optimizer` added.
    pub updates: Updates,
    /// The gradients that `loss` left for `autodiff` to start from.
    pub seeds: Vec<Seed>,
    /// The loss that `loss` took.
    pub loss: Option<Loss>,
    /// The parameters that `autodiff` found.
    pub parameters: Vec<Parameter>,
    /// The plan that `plan` left for `remat`.
    pub planned: Option<Planned>,
}
