//! The whole way from a forward graph to a checkpointed training graph, as one pipeline of the driver.
//!
//! A graph that has its backward already is planned as it is, after an earlier plan is taken back, unless a loss is named
//! among its outputs: then it is differentiated once more.

use crate::analysis::gradients;
use crate::analysis::tied_weights;
use crate::driver::{self, Cx, Pipeline, Watch};
use crate::error::{Error, Result};
use crate::ir::{Graph, Phase};
use crate::transform::joint;
use crate::transform::loss::Loss;
use crate::transform::remat::strip_plan;
use crate::transform::rng_streams;
use crate::transform::stop_gradient::stop_gradients;

pub use crate::driver::Compiled;
pub use crate::request::Request;

/// From a forward graph with and without fusion, and from a training graph, planned or not.
const FROM_FORWARD: &str = "infer,tie,simplify,lora,fuse,loss,sequence,autodiff,simplify,attention,tile,collectives,optimizer,gather,overlap,plan,remat";
const UNFUSED: &str = "infer,tie,simplify,lora,loss,sequence,autodiff,simplify,attention,tile,collectives,optimizer,gather,overlap,plan,remat";
const FROM_TRAINING: &str =
    "infer,strip,simplify,attention,tile,collectives,optimizer,gather,overlap,plan,remat";

/// The last pass before `plan`: what it leaves is what a planner sees.
pub const BEFORE_PLAN: &str = "overlap";

/// Turns `graph` into its checkpointed training graph.
///
/// # Errors
/// What any pass refuses.
pub fn compile(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Compiled> {
    let mut loss = request.loss.clone();
    if gradients::has_backward(graph) && matches!(loss, Loss::Output(_)) {
        loss = joint::as_forward(graph, &loss)?;
    }
    let forward = !gradients::has_backward(graph);
    if forward && graph.phase > Phase::Typed {
        return Err(Error::model(
            "phase",
            "a graph without a backward says that it has been differentiated",
        ));
    }
    for (asked, code, what) in [
        (request.lora.is_some(), "lora", "adapters cannot be added"),
        (
            !request.stop_gradients.is_empty(),
            "pattern",
            "no gradient can be stopped",
        ),
        (
            request.sequence_chunks > 1,
            "tile",
            "its sequence cannot be cut",
        ),
    ] {
        if !forward && asked {
            return Err(Error::usage(
                code,
                format!("the graph holds its backward already: {what}"),
            )
            .help("give the model that it was made from"));
        }
    }
    if !forward && request.mesh.is_some() {
        return Err(Error::usage(
            "mesh",
            "the graph holds its backward already: ranks cannot share it",
        )
        .help("give the model that it was made from"));
    }
    if let Some(mesh) = &request.mesh {
        mesh.check()?;
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
        strip_plan(graph);
        stop_gradients(graph, &request.stop_gradients)?;
    } else {
        joint::joint(graph)?;
        drop_outputs(graph, &request.drop_outputs)?;
    }
    rng_streams::divide(graph, &request.rng_streams)?;
    let mut cx = Cx {
        request: Request {
            loss,
            ..request.clone()
        },
        ..Cx::default()
    };
    driver::run(&pipeline, graph, &mut cx, watch)?;
    let of_ties = tied_weights::warnings(graph, &cx.done.parameters);
    cx.done.warnings.extend(of_ties);
    Ok(cx.done)
}

/// Returns how many passes run when the pipeline stops after the one of that name.
fn stop(pipeline: &Pipeline, asked: &str) -> Result<usize> {
    let (name, count) = match asked.split_once(':') {
        Some((name, count)) => (name, count.parse().unwrap_or(0)),
        None => (asked, 1),
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
        Error::usage("pass", format!("there is no pass `{asked}` to stop after"))
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
mod policy_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::policy::Policy;
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
            plan: Policy::NONE.into(),
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
        assert_eq!(done.timings.0.len(), 8);
        assert!(done.planned.is_none() && g.phase == Phase::Training);
        for wrong in ["simplify:3", "simplify:0", "nothing"] {
            let mut g = text::parse(MODEL).unwrap();
            let e = compile(&mut g, &stop(wrong), &mut Watch::default())
                .err()
                .unwrap();
            assert_eq!(e.exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn nothing_runs_between_the_last_pass_and_the_plan() {
        for passes in [FROM_FORWARD, UNFUSED, FROM_TRAINING] {
            assert!(
                passes.contains(&format!(",{BEFORE_PLAN},plan,")),
                "{passes}"
            );
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
