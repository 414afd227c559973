//! Decides what to compute again. A planner sees a [`Problem`] and answers with a schedule; nothing here sees a graph
//! except [`problem`] and [`input`], which make one from it, and [`refine`], which settles what a user's [`overrides`]es
//! mean in it.
//!
//! [`schedule`] holds the only judge, [`schedule::evaluate`]; every policy and solver is measured by it. [`policy`] has
//! the rules people know, [`sub_blocks`] words for parts of layers, [`constraint`] what the user settled beforehand, [`saved_set`]
//! turns "what may stay" into a schedule, [`fold`] takes views away and back, [`transfer_lowering`] lets results wait outside the
//! device, [`offload`] says which and [`overlap`] what runs beside transfers, [`tiling`] into how many parts a loss is
//! cut, [`plan`] is the plan as data. [`solve`] plans for a [`budget`], and
//! [`budgeted`] asks it. Measured [`times`] may take the place of modelled ones.

#[cfg(any(test, feature = "testing"))]
pub mod brute;
pub mod budget;
pub mod budgeted;
pub mod constraint;
mod fold;
pub mod input;
pub mod offload;
pub mod overlap;
pub mod overrides;
pub mod plan;
pub mod policy;
pub mod problem;
pub mod refine;
pub mod saved_set;
pub mod schedule;
pub mod solve;
pub mod sub_blocks;
pub mod tiling;
pub mod times;
pub mod transfer_lowering;

pub use budget::{Basis, Budget};
pub use budgeted::{BudgetGoal, PlanContext};
pub use constraint::{Constraint, Constraints};
pub use input::{OpAnnotations, PlanInput};
pub use offload::Offloading;
pub use overrides::PolicyOverrides;
pub use plan::{Certificate, Decision, Plan, Segment};
pub use policy::Policy;
pub use problem::{Kind, Op, Phase, Problem, Value};
pub use schedule::{Score, evaluate};
pub use solve::{Effort, Objective};
pub use tiling::{Trial, Tried};
pub use times::Times;
