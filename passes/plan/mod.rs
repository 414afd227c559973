//! Decides what to compute again. A planner sees a [`Problem`] and answers with a schedule; nothing here sees a graph
//! except [`problem`] and [`subject`], which make one from it, and [`refine`], which settles what a user's [`wish`]es
//! mean in it.
//!
//! [`schedule`] holds the only judge, [`schedule::evaluate`]; every policy and solver is measured by it. [`policy`] has
//! the rules people know, [`parts`] words for parts of layers, [`choice`] what the user settled beforehand, [`keep`]
//! turns "what may stay" into a schedule, [`fold`] takes views away and back, [`staged`] lets results wait outside the
//! device, [`offload`] says which and [`overlap`] what runs beside transfers, [`tiling`] into how many parts a loss is
//! cut, [`decision`] is the plan as data. [`solve`] plans for a [`budget`], and
//! [`budgeted`] asks it. Measured [`times`] may take the place of modelled ones.

#[cfg(any(test, feature = "testing"))]
pub mod brute;
pub mod budget;
pub mod budgeted;
pub mod choice;
pub mod decision;
mod fold;
pub mod keep;
pub mod offload;
pub mod overlap;
pub mod parts;
pub mod policy;
pub mod problem;
pub mod refine;
pub mod schedule;
pub mod solve;
pub mod staged;
pub mod subject;
pub mod tiling;
pub mod times;
pub mod wish;

pub use budget::{Basis, Budget};
pub use budgeted::{Budgeted, Setting};
pub use choice::{Choice, Choices};
pub use decision::{Certificate, Decision, Plan, Segment};
pub use offload::Offloading;
pub use policy::Policy;
pub use problem::{Kind, Op, Phase, Problem, Value};
pub use schedule::{Score, evaluate};
pub use solve::{Effort, Objective};
pub use subject::{Structure, Subject};
pub use tiling::{Trial, Tried};
pub use times::Times;
pub use wish::Wishes;
