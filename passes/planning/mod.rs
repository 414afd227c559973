//! Makes the input of a planner from a graph: its problem, what the ops are, and what the user's options mean in it.
//!
//! [`problem`] is the graph as ops and values, [`bound_graph`] adds layers and roles, [`overrides`] parses the
//! options that refine a policy, [`resolve`] turns them into constraints on ops, [`chunk_search`] tries chunk counts.

pub mod bound_graph;
pub mod chunk_search;
pub mod overrides;
pub mod problem;
pub mod resolve;
pub mod shared_values;

pub use bound_graph::BoundGraph;
pub use overrides::PolicyOverrides;
pub use problem::GraphProblem;
