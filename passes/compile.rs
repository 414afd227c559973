//! The whole way from a forward graph to a checkpointed training graph, as one pipeline of the driver.
//!
//! A graph that has its backward already is planned as it is, after an earlier plan is taken back.

use crate::analysis::blocks::Blocks;
use crate::analysis::params::{Parameter, Selection};
use crate::analysis::sizes::Binding;
use crate::driver::{self, Cx, Options, Pipeline, Timings, Watch};
use crate::error::{Error, Result};
use crate::glob;
use crate::ir::{Graph, Phase, Role};
use crate::plan::{Plan, Policy};
use crate::transform::loss::Loss;

/// What to compile into.
#[derive(Clone, Debug)]
pub struct Request {
    pub loss: Loss,
    pub policy: Policy,
    pub selection: Selection,
    /// Numbers for named sizes, for planning only.
    pub dims: Vec<(String, i64)>,
    /// Patterns of forward outputs that the training graph need not have.
    pub drop_outputs: Vec<String>,
}

/// What came of it.
pub struct Compiled {
    pub plan: Plan,
    pub blocks: Blocks,
    pub parameters: Vec<Parameter>,
    /// The loss that was meant; `None` for a graph that had its backward.
    pub loss: Option<Loss>,
    pub binding: Binding,
    pub timings: Timings,
    pub warnings: Vec<String>,
}

/// From a forward graph, from a training graph, and from a planned one.
const FROM_FORWARD: &str = "infer,simplify,loss,autodiff,simplify,plan,remat";
const FROM_TRAINING: &str = "infer,strip,simplify,plan,remat";

/// Whether a graph holds a backward.
pub fn is_training(graph: &Graph) -> bool {
    graph.nodes().any(|(_, n)| n.role == Role::Backward)
}

/// Drops the forward outputs that a pattern names.
///
/// # Errors
/// A pattern that matches no output; no output left.
pub fn drop_outputs(graph: &mut Graph, patterns: &[String]) -> Result<()> {
    for pattern in patterns {
        let (dropped, kept): (Vec<_>, Vec<_>) = graph
            .outputs()
            .iter()
            .copied()
            .partition(|v| glob::matches(pattern, &graph.value(*v).name));
        let names = |ids: &[crate::ir::ValueId]| {
            ids.iter()
                .map(|v| graph.value(*v).name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        if dropped.is_empty() {
            return Err(Error::usage(
                "pattern",
                format!("--drop-output `{pattern}` matches no output"),
            )
            .found(format!("outputs {}", names(&kept))));
        }
        if kept.is_empty() {
            return Err(Error::usage(
                "pattern",
                format!("--drop-output `{pattern}` leaves no output"),
            ));
        }
        graph.set_outputs(kept);
    }
    Ok(())
}

/// Turns `graph` into its checkpointed training graph.
///
/// # Errors
/// What any pass refuses.
pub fn compile(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Compiled> {
    let forward = !is_training(graph);
    let options = Options {
        dims: request.dims.clone(),
        loss: request.loss.clone(),
        selection: request.selection.clone(),
        policy: request.policy,
    };
    let mut cx = Cx {
        options,
        ..Cx::default()
    };
    if forward {
        // A loss may be computed from an output that nobody wants to have.
        if graph.phase > Phase::Typed {
            return Err(Error::bug(
                "phase",
                "a graph without a backward is further than typed",
            ));
        }
    } else {
        graph.phase = graph.phase.max(Phase::Training);
    }
    let pipeline = Pipeline::parse(if forward { FROM_FORWARD } else { FROM_TRAINING })?;
    drop_outputs(graph, &request.drop_outputs)?;
    let timings = driver::run(&pipeline, graph, &mut cx, watch)?;
    let Some(made) = cx.made else {
        return Err(Error::usage(
            "pass",
            "the pipeline was stopped before there was a plan",
        ));
    };
    Ok(Compiled {
        plan: made.plan,
        blocks: made.subject.blocks,
        parameters: cx.parameters,
        loss: cx.loss,
        binding: made.binding,
        timings,
        warnings: cx.warnings,
    })
}
