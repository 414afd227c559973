//! What the user wants planned: a goal, and how to reach it.

use super::budget::Budget;
use super::objective::Objective;
use super::plan::{OffloadTarget, Plan};
use super::policy::Policy;
use super::solve::work::Effort;
use ckpt_error::{Error, Result};
use std::fmt;

/// What decides a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Goal {
    /// Recompute what a policy says.
    Policy(Policy),
    /// Stay within a memory budget, at the least overhead by the objective.
    Budget(Budget),
    /// A plan that was made before, judged again.
    Stored(Box<Plan>),
}

/// A request to the planner.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRequest {
    /// A policy, a budget or a stored plan.
    pub goal: Goal,
    /// What a plan within a budget minimizes: cost or FLOPs.
    pub objective: Objective,
    /// The work that the search for a plan may take.
    pub effort: Effort,
    /// Whether first runs of ops may follow another order than the graph's.
    pub reorder: bool,
    /// Which results are offloaded, and how; by default none.
    pub offload: Offload,
    /// Whether the smallest feasible peak is searched for beside the plan. Most plans take less time than this search.
    pub wants_min_peak: bool,
    /// Whether work ends with the search for a plan. A wide gap to the lower bound then stays wide.
    pub skips_proof: bool,
}

impl Default for PlanRequest {
    fn default() -> PlanRequest {
        PlanRequest::from(Policy::SELECTIVE)
    }
}

impl From<Goal> for PlanRequest {
    fn from(goal: Goal) -> PlanRequest {
        PlanRequest {
            goal,
            objective: Objective::default(),
            effort: Effort::default(),
            reorder: false,
            offload: Offload::default(),
            wants_min_peak: true,
            skips_proof: false,
        }
    }
}

impl From<Policy> for PlanRequest {
    fn from(policy: Policy) -> PlanRequest {
        Goal::Policy(policy).into()
    }
}

impl From<Budget> for PlanRequest {
    fn from(budget: Budget) -> PlanRequest {
        Goal::Budget(budget).into()
    }
}

impl PlanRequest {
    /// Returns the request with another budget as its goal.
    #[must_use]
    pub fn with_budget(&self, budget: Budget) -> PlanRequest {
        PlanRequest {
            goal: Goal::Budget(budget),
            ..*self
        }
    }

    /// Returns the budget, if that is the goal.
    pub fn budget(&self) -> Option<Budget> {
        match self.goal {
            Goal::Budget(budget) => Some(budget),
            Goal::Policy(_) | Goal::Stored(_) => None,
        }
    }
}

/// Which results are offloaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffloadSet {
    /// Offloading is off.
    #[default]
    Nothing,
    /// The results that the planner finds worth it.
    Auto,
    /// Every result that may be.
    All,
    /// The residual stream that each layer reads.
    LayerInputs,
}

/// Options of offloading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// The results to offload.
    pub set: OffloadSet,
    /// Where offloaded results are kept: in the host's memory or on disk.
    pub to: OffloadTarget,
    /// Results of an op with fewer bytes together stay on the device.
    pub min_bytes: u64,
    /// The most bytes that may be off the device at once.
    pub host_bytes: Option<u64>,
    /// Whether transfers run beside other ops.
    pub streams: bool,
    /// The most transfers under way in either direction, at least 1. The results of as many ops are held on the device
    /// only until they have left it.
    pub in_flight: usize,
}

/// The number of transfers under way in TRL's activation offloading.
pub const IN_FLIGHT: usize = 5;

/// The smallest result that PyTorch's and TRL's activation offloading move.
pub const MIN_BYTES: u64 = 1024;

impl Default for Offload {
    fn default() -> Offload {
        Offload {
            set: OffloadSet::Nothing,
            to: OffloadTarget::Host,
            min_bytes: MIN_BYTES,
            host_bytes: None,
            streams: true,
            in_flight: IN_FLIGHT,
        }
    }
}

/// The words of `--offload`.
const OFFLOAD_WORDS: [(&str, OffloadSet, OffloadTarget); 6] = [
    ("none", OffloadSet::Nothing, OffloadTarget::Host),
    ("auto", OffloadSet::Auto, OffloadTarget::Host),
    ("cpu", OffloadSet::All, OffloadTarget::Host),
    ("disk", OffloadSet::All, OffloadTarget::Disk),
    ("ranks", OffloadSet::All, OffloadTarget::Ranks),
    ("block-inputs", OffloadSet::LayerInputs, OffloadTarget::Host),
];

impl Offload {
    /// Reads the value of `--offload`.
    ///
    /// # Errors
    /// `error[offload]` for another word.
    pub fn parse(text: &str) -> Result<(OffloadSet, OffloadTarget)> {
        let found = OFFLOAD_WORDS.iter().find(|(word, ..)| *word == text);
        found.map(|(_, set, to)| (*set, *to)).ok_or_else(|| {
            Error::usage("offload", format!("values cannot be offloaded to `{text}`"))
                .expected("none, auto, cpu, disk, ranks or block-inputs")
        })
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_meant = |row: &&(&str, OffloadSet, OffloadTarget)| {
            row.1 == self.set && (row.2 == self.to || self.set != OffloadSet::All)
        };
        let row = OFFLOAD_WORDS.iter().find(is_meant);
        f.write_str(row.map_or("none", |row| row.0))
    }
}
