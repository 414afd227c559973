//! Plans models and cost graphs without writing a model.
//!
//! [`read`] reads cost graphs and plans from untrusted files. [`step`] turns either source into one training step, whose
//! ops and values [`labels`] name. [`trials`] lists the chunk counts that were planned, [`report`] is what `plan` prints,
//! [`maximize`] finds the largest size that fits, and [`device`] reads device profiles and measured times.

pub mod device;
pub mod labels;
pub mod maximize;
pub mod read;
pub mod report;
pub mod step;
pub mod trials;

use ckpt_passes::Result;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::PlanOutcome;
use step::TrainingStep;

/// Plans the training step of a graph without rewriting it. A graph without a backward is differentiated in place as the
/// request says, and is the unplanned training graph afterwards. Bytes are of the whole step at the sizes that the
/// request binds; times are microseconds by the request's device, or as measured.
///
/// # Errors
/// What a pass refuses; `error[budget]`, with the smallest budget that has a plan, where none fits.
///
/// ```
/// use ckpt_opt::passes::{compile::Request, plan::Policy};
/// use ckpt_opt::{frontend::given::Given, load, plan};
///
/// # fn main() -> ckpt_opt::passes::Result<()> {
/// let mut model = load("fixtures/bert/model.onnx".as_ref(), &Given::default())?;
/// let request = Request { plan: Policy::FULL.into(), ..Request::default() };
/// let (step, outcome) = plan(&mut model.graph, &request)?;
/// assert_eq!(step.input.annotations.layers, 2);
/// assert!(outcome.plan.recompute_flops() > 0);
/// # Ok(())
/// # }
/// ```
pub fn plan(graph: &mut Graph, request: &Request) -> Result<(TrainingStep, PlanOutcome)> {
    let step = TrainingStep::of_graph(graph, request)?;
    let outcome = step.plan(request)?;
    Ok((step, outcome))
}
