//! Decides what to compute again. A planner sees a [`Problem`] and answers with a schedule; nothing here sees a graph
//! except [`problem`], which makes one from it.
//!
//! [`schedule`] holds the only judge, [`schedule::evaluate`]; every policy and solver is measured by it.

pub mod decision;
pub mod keep;
pub mod problem;
pub mod schedule;

pub use decision::{Decision, Plan, Segment};
pub use problem::{Kind, Op, Phase, Problem, Value};
pub use schedule::{Score, evaluate};
