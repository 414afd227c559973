//! Decides what to recompute and what to offload: a [`PlanInput`] in, a [`Plan`] out. This crate knows no graph.
//!
//! [`plan()`] makes every plan. It takes a [`PlanInput`] and a [`PlanRequest`], whose goal is a policy, a budget or a stored plan.
//! [`schedule::evaluate`] measures every schedule. From the bottom up:
//!
//! - [`problem`] is a training step as ops and values, [`index`] types their indices, [`fold`] removes views and restores them;
//! - [`steps`] are schedules, [`schedule`] evaluates them;
//! - [`annotations`] give the layers, [`sub_blocks`] and roles of ops, [`constraint`] what the user settled beforehand;
//! - [`saved_set`] turns the set of kept results into a schedule, [`policy`] is the table of policies;
//! - [`overlap`] places transfers beside other ops, [`spill`] makes them where results wait for long;
//! - [`mod@plan`] is a plan as data, [`request`] what the user wants, [`budget`] and [`objective`] are its words;
//! - [`solve`] is the solver, [`on_device`] plans without offloading, [`offload`] with it, and [`planner`] is the entry.

pub mod annotations;
#[cfg(any(test, feature = "testing"))]
pub mod brute;
pub mod budget;
pub mod chunks;
pub mod constraint;
pub mod fold;
pub mod index;
pub mod infeasible;
pub mod input;
pub mod objective;
pub mod offload;
pub mod on_device;
pub mod overlap;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod prefetch;
pub mod problem;
mod range_max;
pub mod request;
pub mod saved_set;
pub mod schedule;
pub mod solve;
pub mod spill;
pub mod steps;
pub mod sub_blocks;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod times;

pub use annotations::{OpAnnotations, OpRole};
pub use budget::{Basis, Budget};
pub use chunks::{Chunks, Trial, Tried};
pub use constraint::{Constraint, Constraints};
pub use index::{ByOp, ByValue, OpIdx, ValueIdx};
pub use infeasible::{Failure, Infeasible};
pub use input::PlanInput;
pub use objective::Objective;
pub use plan::{Certificate, Decision, OffloadTarget, Plan, Segment};
pub use planner::{PlanOutcome, plan};
pub use policy::Policy;
pub use problem::{Op, OpPhase, Problem, Value, ValueKind};
pub use request::{Goal, Offload, OffloadSet, PlanRequest};
pub use schedule::{Score, evaluate};
pub use solve::work::Effort;
pub use steps::{Schedule, Step};
pub use times::Times;
