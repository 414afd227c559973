//! Compiles a loaded model into its checkpointed training graph, and reports what that costs.
//!
//! The graph records what was asked for (see [`provenance`](crate::provenance)), so that `verify` can differentiate the
//! original in the same way and compare.

use crate::emit::file::{refuse_overwrite, write_whole};
use crate::emit::save::{INSIDE_LIMIT_BYTES, Saving, save};
use crate::planning::task::{Planned, Task};
use crate::provenance::{derivative_order, most_chunks, record};
use crate::report::account::Account;
use crate::report::summary::{Measured, Summary};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Timings, Watch};
use ckpt_passes::ir::{Data, Graph};
use ckpt_passes::transform::remat::strip_again;
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
    link_weights: bool,
) -> Result<Vec<String>> {
    if output.extension().is_some_and(|e| e == "ckir") {
        refuse_overwrite(output, &[source.to_path_buf()])?;
        write_whole(output, text::print_full(graph).as_bytes())?;
        return Ok(Vec::new());
    }
    let how = Saving {
        input: Some(source),
        link_weights,
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

/// What came of an optimisation.
pub struct Outcome {
    /// `None` where the pipeline was stopped before it planned, or planned without rewriting.
    pub summary: Option<Summary>,
    /// What was planned, and the plan, to be shown; `None` where the pipeline was stopped before it planned.
    pub planned: Option<(Task, Planned)>,
    pub timings: Timings,
    pub warnings: Vec<String>,
}

/// Turns `graph` into its checkpointed training graph and reports on it.
///
/// # Errors
/// What any pass refuses.
pub fn optimize(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Outcome> {
    let earlier = derivative_order(graph)?;
    let compiled = compile(graph, request, watch)?;
    record(graph, request, &compiled, earlier);
    let mut unplanned = graph.clone();
    strip_again(&mut unplanned);
    let mut summary = None;
    if let Some(made) = &compiled.made
        && graph.phase == ckpt_passes::ir::Phase::Rewritten
    {
        let before = Measured::new(&unplanned, &made.binding, &made.subject.device)?;
        summary = Some(Summary::new(graph, &compiled, made, &before.rows)?);
    }
    let mut planned = None;
    if let Some(made) = compiled.made {
        let choices = (made.choices, request.overrides.to_string());
        let warnings = compiled.warnings.clone();
        let task = Task {
            loss: compiled.loss.map(|l| l.to_string()),
            is_measured: request.times.is_some(),
            loss_parts: most_chunks(&compiled.tiled),
            mlp_parts: most_chunks(&compiled.tiled_mlps),
            tried: compiled.tried,
            ..Task::made(&unplanned, made.subject, choices, &made.binding, warnings)?
        };
        let plan = Planned {
            plan: made.plan,
            seconds: made.seconds,
            smallest_bytes: made.smallest_bytes,
        };
        if let Some(short) = summary.take() {
            summary = Some(short.with(&Account::new(&task, &plan)?));
        }
        planned = Some((task, plan));
    }
    Ok(Outcome {
        summary,
        planned,
        timings: compiled.timings,
        warnings: compiled.warnings,
    })
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
        write(&graph, Path::new("none.onnx"), &path, false).unwrap();
        let back = read(&path).unwrap().graph;
        assert_eq!(text::print_full(&back), text::print_full(&graph));
        let again = write(&graph, &path, &path, false).unwrap_err();
        assert_eq!((again.code(), again.exit_code()), ("output", 2));
    }
}
