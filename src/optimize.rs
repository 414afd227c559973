//! Compiles a loaded model into its checkpointed training graph, and reports what that costs.
//!
//! The graph records what was asked for (see [`provenance`](crate::provenance)), so that `verify` can differentiate the
//! original in the same way and compare.

use crate::emit::file::{refuse_overwrite, write_whole};
use crate::emit::save::{INSIDE_LIMIT_BYTES, Saving, WeightOptions, save};
use crate::planning::step::TrainingStep;
use crate::provenance::{derivative_order, record};
use crate::report::account::Account;
use crate::report::advice::advice;
use crate::report::summary::Summary;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Timings, Watch};
use ckpt_passes::ir::{Data, Graph, Phase};
use ckpt_passes::plan::PlanOutcome;
use ckpt_passes::transform::remat::strip_plan;
use ckpt_passes::{Result, text};
use std::collections::BTreeSet;
use std::path::Path;

/// Writes `graph`, which was read from `source`, to `output`: text if its name ends in `.ckir`, else ONNX. Returns what
/// the user should know.
///
/// # Errors
/// See [`save`].
pub fn write(
    graph: &Graph,
    source: &Path,
    output: &Path,
    weights: WeightOptions,
) -> Result<Vec<String>> {
    if output.extension().is_some_and(|e| e == "ckir") {
        refuse_overwrite(output, &[source.to_path_buf()])?;
        write_whole(output, text::print_full(graph).as_bytes())?;
        return Ok(Vec::new());
    }
    let how = Saving {
        input: Some(source),
        weights,
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    };
    save(graph, output, &how)?;
    let absent: BTreeSet<&str> = graph
        .inits()
        .filter_map(|(_, v)| match v.tensor().map(|t| &t.data) {
            Some(Data::Absent(place)) => Some(place.location.as_ref()),
            _ => None,
        })
        .collect();
    let warn = |file: &str| {
        format!("the weights file `{file}` is absent: the output needs it beside itself to run")
    };
    Ok(absent.into_iter().map(warn).collect())
}

/// The result of an optimization.
pub struct Outcome {
    /// `None` where the pipeline was stopped before it planned, or planned without rewriting.
    pub summary: Option<Summary>,
    /// The step and its plan, for reports; `None` where the pipeline was stopped before it planned.
    pub planned: Option<(TrainingStep, PlanOutcome)>,
    /// Time of each pass and of its verification.
    pub timings: Timings,
    /// Warnings of the passes, in the order they were found.
    pub warnings: Vec<String>,
}

/// Turns `graph` into its checkpointed training graph and reports on it.
///
/// # Errors
/// What any pass refuses.
pub fn optimize(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Outcome> {
    let earlier = derivative_order(graph)?;
    let mut compiled = compile(graph, request, watch)?;
    record(graph, request, &compiled, earlier);
    let mut outcome = Outcome {
        summary: None,
        planned: None,
        timings: std::mem::take(&mut compiled.timings),
        warnings: compiled.warnings.clone(),
    };
    let Some(found) = compiled.planned.take() else {
        return Ok(outcome);
    };
    let mut unplanned = graph.clone();
    strip_plan(&mut unplanned);
    let step = TrainingStep {
        loss: compiled.loss.as_ref().map(|l| l.to_string()),
        is_measured: request.times.is_some(),
        warnings: compiled.warnings.clone(),
        ..TrainingStep::of_bound(&unplanned, found.bound, &found.binding)?
    };
    if graph.phase == Phase::Rewritten {
        let account = Account::new(&step, &found.outcome)?;
        let shown = (&found.outcome, &account);
        let summary = Summary::new(graph, &unplanned, &compiled, &found.binding, shown)?;
        outcome.summary = Some(summary);
        outcome.warnings.extend(advice(&step, &found.outcome)?);
    }
    outcome.planned = Some((step, found.outcome));
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::read;

    #[test]
    fn text_out_and_in_keeps_weights() {
        let source = "graph @g typed (%x: f32[2]) -> (%y) {
  init %w : f32[2] = [1, 2]
  %y = Add %x, %w : f32[2]
}
";
        let graph = text::parse(source).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("g.ckir");
        write(
            &graph,
            Path::new("none.onnx"),
            &path,
            WeightOptions::default(),
        )
        .unwrap();
        let back = read(&path).unwrap().graph;
        assert_eq!(text::print_full(&back), text::print_full(&graph));
        let again = write(&graph, &path, &path, WeightOptions::default()).unwrap_err();
        assert_eq!((again.code(), again.exit_code()), ("output", 2));
    }
}
