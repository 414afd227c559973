//! What the user wants compiled: a training step and its plan.

use crate::analysis::Device;
use crate::analysis::params::Selection;
use crate::analysis::tied_weights::TieRequest;
use crate::plan::plan::OffloadTarget;
use crate::plan::request::{Goal, OffloadSet, PlanRequest};
use crate::plan::times::Times;
use crate::planning::bound_graph::PlanningOptions;
use crate::planning::overrides::PolicyOverrides;
use crate::transform::collectives::Mesh;
use crate::transform::lora::Lora;
use crate::transform::loss::Loss;
use crate::transform::optimizer::UpdateOptions;
use crate::transform::rng_streams::RngStream;
use crate::transform::sequence::Chunked;
use crate::transform::tile::Tiles;

/// A request to compile a graph.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// What is differentiated.
    pub loss: Loss,
    /// Which parameters are trained.
    pub selection: Selection,
    /// Which copies of a weight are trained as one.
    pub ties: TieRequest,
    /// Adapters that linear layers get. Then only they are trained, with what `selection.trainable` names.
    pub lora: Option<Lora>,
    /// Numbers for named sizes, for planning only.
    pub dims: Vec<(String, i64)>,
    /// Patterns of forward outputs that the training graph leaves out.
    pub drop_outputs: Vec<String>,
    /// Patterns of values, nodes and operands through which no gradient flows.
    pub stop_gradients: Vec<String>,
    /// Random nodes that draw by a seed of their own.
    pub rng_streams: Vec<RngStream>,
    /// Whether one op replaces several where that saves memory or time; results may be rounded otherwise. The command line
    /// fuses unless told not to.
    pub fuse: bool,
    /// Whether the head and the loss, and chains of ops on tokens, are computed in chunks, so that wide values never exist
    /// whole; results may be rounded otherwise. With a budget the planner chooses chunk counts that are left open.
    pub tile: Tiles,
    /// How many chunks of the sequence go through the model one after the other; 0 and 1 leave it whole.
    pub sequence_chunks: usize,
    /// Whether it is an error if scores of a loss cannot be cut.
    pub tile_required: bool,
    /// What updates the parameters in the graph, and how.
    pub updates: UpdateOptions,
    /// The ranks that share the step; `None` for one process.
    pub mesh: Option<Mesh>,
    /// Device whose rates and memory the cost model and automatic budgets use.
    pub device: Device,
    /// Measured times of nodes, instead of the cost model's.
    pub times: Option<Times>,
    /// Where the policy applies, and the ops that it has no say about.
    pub overrides: PolicyOverrides,
    /// Policy or budget to plan by, with objective, effort and offloading.
    pub plan: PlanRequest,
    /// Names of passes to run instead of the usual ones.
    pub passes: Option<String>,
    /// The pass after which to stop: `simplify` is the first of that name, `simplify:2` the second.
    pub stop_after: Option<String>,
}

impl Request {
    /// Returns what turns a graph into a planning input. `sequence` is how its sequence was cut.
    pub fn planning_options<'a>(&'a self, sequence: Option<&'a Chunked>) -> PlanningOptions<'a> {
        PlanningOptions {
            device: &self.device,
            times: self.times.as_ref(),
            overrides: &self.overrides,
            sequence,
            keeps_slices: match &self.plan.goal {
                Goal::Stored(plan) => plan.offload_to == OffloadTarget::Ranks,
                _ => {
                    let offload = &self.plan.offload;
                    offload.set != OffloadSet::Nothing && offload.to == OffloadTarget::Ranks
                }
            },
        }
    }
}
