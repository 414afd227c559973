//! The whole way from a forward graph to a checkpointed training graph, as one pipeline of the driver.
//!
//! A graph that has its backward already is planned as it is, after an earlier plan is taken back, unless a loss is named
//! among its outputs: then it is differentiated once more.

use crate::analysis::Device;
use crate::analysis::gradients;
use crate::analysis::params::{Parameter, Selection};
use crate::analysis::tied_weights;
use crate::driver::{self, Cx, Made, Options, Pipeline, Timings, Watch};
use crate::error::{Error, Result};
use crate::ir::{Graph, Phase};
use crate::plan::{BudgetGoal, Offloading, Plan, Policy, PolicyOverrides, Times, Tried};
use crate::transform::fuse::Fused;
use crate::transform::joint;
use crate::transform::loss::Loss;
use crate::transform::optimizer::{Optimizer, Updates};
use crate::transform::remat::strip_again;
use crate::transform::rng_streams::{self, RngStream};
use crate::transform::tile::Tiles;

/// What to compile into.
#[derive(Clone, Debug)]
pub struct Request {
    pub loss: Loss,
    pub policy: Policy,
    /// Where the policy applies, and the ops that it has no say about.
    pub overrides: PolicyOverrides,
    /// Takes the place of the policy.
    pub budget: Option<BudgetGoal>,
    /// Takes the place of both: a plan that was made before.
    pub stored: Option<Plan>,
    pub device: Device,
    /// Measured times of nodes: they take the place of the model's.
    pub times: Option<Times>,
    pub selection: Selection,
    /// Numbers for named sizes, for planning only.
    pub dims: Vec<(String, i64)>,
    /// Patterns of forward outputs that the training graph need not have.
    pub drop_outputs: Vec<String>,
    /// Random nodes that draw by a seed of their own.
    pub rng_streams: Vec<RngStream>,
    /// Put one op in the place of several where that saves memory or time; results may be rounded otherwise. The
    /// command line asks for it unless told not to.
    pub fuse: bool,
    /// Compute the head and the loss part by part, so that scores never exist whole; results may be rounded otherwise. The
    /// same for chains of ops on tokens. With a budget, numbers that are left open are the planner's.
    pub tile: Tiles,
    /// What waits outside the device's memory between its uses.
    pub offload: Offloading,
    /// What updates the parameters, in the graph.
    pub optimizer: Option<Optimizer>,
    /// Each update as soon as its gradient is complete; gradients are no outputs then.
    pub fuse_optimizer: bool,
    /// Names of passes to run instead of the usual ones.
    pub passes: Option<String>,
    /// The pass after which to stop: `simplify` is the first of that name, `simplify:2` the second.
    pub stop_after: Option<String>,
}

impl Default for Request {
    fn default() -> Request {
        Request {
            loss: Loss::Auto,
            policy: Policy::Selective,
            overrides: PolicyOverrides::default(),
            budget: None,
            stored: None,
            device: Device::default(),
            times: None,
            selection: Selection::default(),
            dims: Vec::new(),
            drop_outputs: Vec::new(),
            rng_streams: Vec::new(),
            fuse: false,
            tile: Tiles::default(),
            offload: Offloading::default(),
            optimizer: None,
            fuse_optimizer: false,
            passes: None,
            stop_after: None,
        }
    }
}

/// What came of it.
pub struct Compiled {
    /// The plan; `None` where the pipeline had none, or was stopped before it.
    pub made: Option<Made>,
    pub parameters: Vec<Parameter>,
    /// The loss that was meant; `None` for a graph that had its backward.
    pub loss: Option<Loss>,
    /// What was fused, and how often; empty where nothing was, or it was not asked for.
    pub fused: Fused,
    /// What was tiled: the node that makes the scores, and the number of parts.
    pub tiled: Vec<(String, usize)>,
    /// The same for chains in the middle of the model, by their first nodes.
    pub tiled_mlps: Vec<(String, usize)>,
    /// Numbers of parts that were planned, where that was left to the planner.
    pub tried: Option<Tried>,
    /// What the optimizer updates; nothing where none was asked for.
    pub updates: Updates,
    pub timings: Timings,
    pub warnings: Vec<String>,
}

/// From a forward graph with and without fusion, and from a training graph, planned or not.
const FROM_FORWARD: &str = "infer,simplify,fuse,loss,autodiff,simplify,tile,optimizer,plan,remat";
const UNFUSED: &str = "infer,simplify,loss,autodiff,simplify,tile,optimizer,plan,remat";
const FROM_TRAINING: &str = "infer,strip,simplify,tile,optimizer,plan,remat";

/// Turns `graph` into its checkpointed training graph.
///
/// # Errors
/// What any pass refuses.
pub fn compile(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Compiled> {
    let mut loss = request.loss.clone();
    if gradients::has_backward(graph) && matches!(loss, Loss::Output(_)) {
        loss = joint::forward_again(graph, &loss)?;
    }
    let forward = !gradients::has_backward(graph);
    if forward && graph.phase > Phase::Typed {
        return Err(Error::model(
            "phase",
            "a graph without a backward says that it has been differentiated",
        ));
    }
    let usual = match (forward, request.fuse) {
        (true, true) => FROM_FORWARD,
        (true, false) => UNFUSED,
        (false, _) => FROM_TRAINING,
    };
    let pipeline = Pipeline::parse(request.passes.as_deref().unwrap_or(usual))?;
    if let Some(name) = &request.stop_after {
        watch.stop_after = Some(stop(&pipeline, name)?);
    }
    if forward {
        // Copies in a forward graph are an earlier plan for inference; training plans anew.
        strip_again(graph);
    } else {
        joint::joint(graph)?;
        drop_outputs(graph, &request.drop_outputs)?;
    }
    rng_streams::divide(graph, &request.rng_streams)?;
    let options = Options {
        dims: request.dims.clone(),
        loss,
        selection: request.selection.clone(),
        drop_outputs: request.drop_outputs.clone(),
        policy: request.policy,
        overrides: request.overrides.clone(),
        budget: request.budget,
        stored: request.stored.clone(),
        device: request.device.clone(),
        times: request.times.clone(),
        tile: request.tile,
        offload: request.offload,
        optimizer: request.optimizer,
        fuse_optimizer: request.fuse_optimizer,
    };
    let mut cx = Cx {
        options,
        ..Cx::default()
    };
    let timings = driver::run(&pipeline, graph, &mut cx, watch)?;
    cx.warnings
        .extend(tied_weights::warnings(graph, &cx.parameters));
    Ok(Compiled {
        made: cx.made,
        parameters: cx.parameters,
        loss: cx.loss,
        fused: cx.fused,
        tiled: cx.tiled,
        tiled_mlps: cx.tiled_mlps,
        tried: cx.tried,
        updates: cx.updates,
        timings,
        warnings: cx.warnings,
    })
}

/// How many passes run when the pipeline stops after the one of that name.
fn stop(pipeline: &Pipeline, wish: &str) -> Result<usize> {
    let (name, count) = match wish.split_once(':') {
        Some((name, count)) => (name, count.parse().unwrap_or(0)),
        None => (wish, 1),
    };
    let mut at = pipeline
        .names()
        .enumerate()
        .filter(|(_, n)| *n == name)
        .map(|(i, _)| i + 1);
    match count {
        0 => None,
        n => at.nth(n - 1),
    }
    .ok_or_else(|| {
        let names: Vec<&str> = pipeline.names().collect();
        Error::usage("pass", format!("there is no pass `{wish}` to stop after"))
            .found(names.join(","))
    })
}

/// Drops the outputs that a pattern names.
///
/// # Errors
/// A pattern that matches no output; no output left.
pub fn drop_outputs(graph: &mut Graph, patterns: &[String]) -> Result<()> {
    let dropped = joint::matching_outputs(graph, patterns)?;
    let kept: Vec<_> = graph
        .outputs()
        .iter()
        .copied()
        .filter(|v| !dropped.contains(v))
        .collect();
    if kept.is_empty() && !dropped.is_empty() {
        return Err(Error::usage("pattern", "--drop-output leaves no output"));
    }
    graph.set_outputs(kept);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    const MODEL: &str = "graph @g imported (%x: f32[n, 4]) -> (%y, %z) {
  init %w : f32[4, 3] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
  %y = MatMul %x, %w
  %z = Tanh %y
}
";

    fn request(loss: Loss, drop: &[&str]) -> Request {
        let drop_outputs = drop.iter().map(|s| s.to_string()).collect();
        Request {
            loss,
            policy: Policy::None,
            drop_outputs,
            ..Request::default()
        }
    }

    fn outputs(request: &Request) -> Result<Vec<String>> {
        let mut g = text::parse(MODEL)?;
        compile(&mut g, request, &mut Watch::default())?;
        Ok(g.outputs()
            .iter()
            .map(|v| g.value(*v).name.clone())
            .collect())
    }

    #[test]
    fn a_dropped_output_may_still_feed_the_loss() {
        let two = outputs(&request(Loss::Mse, &[])).unwrap_err();
        assert_eq!((two.code(), two.exit_code()), ("loss", 2));
        assert_eq!(
            outputs(&request(Loss::Mse, &["y"])).unwrap(),
            ["loss", "z", "w.grad"]
        );
        assert_eq!(
            outputs(&request(Loss::Vjp, &["y"])).unwrap(),
            ["z", "w.grad"]
        );
        assert_eq!(outputs(&request(Loss::Vjp, &["*"])).unwrap(), ["w.grad"]);
        assert!(outputs(&request(Loss::Vjp, &["q*"])).is_err());
    }

    #[test]
    fn stops_after_the_pass_that_is_named() {
        let mut g = text::parse(MODEL).unwrap();
        let stop = |name: &str| Request {
            stop_after: Some(name.into()),
            ..request(Loss::Vjp, &[])
        };
        let done = compile(&mut g, &stop("simplify:2"), &mut Watch::default()).unwrap();
        assert_eq!(done.timings.0.len(), 5);
        assert!(done.made.is_none() && g.phase == Phase::Training);
        for wrong in ["simplify:3", "simplify:0", "nothing"] {
            let mut g = text::parse(MODEL).unwrap();
            let e = compile(&mut g, &stop(wrong), &mut Watch::default())
                .err()
                .unwrap();
            assert_eq!(e.exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn a_planned_graph_is_planned_anew() {
        let mut g = text::parse(MODEL).unwrap();
        let request = request(Loss::Vjp, &[]);
        compile(&mut g, &request, &mut Watch::default()).unwrap();
        let first = text::print(&g);
        compile(&mut g, &request, &mut Watch::default()).unwrap();
        assert_eq!(text::print(&g), first);
    }
}
