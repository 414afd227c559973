//! Measures the time of each node of a training graph, under the names that planning uses.
//!
//! A forward graph is differentiated as `plan` does and run without a plan. A training graph is run as it is. If the unplanned
//! step does not fit into memory, a planned file can be measured; its recompute nodes count as samples of their originals.
//! Times are medians over warm runs.

use super::{at_sizes, median};
use crate::attention::Attention;
use crate::comparison::ready;
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::place::Place;
use crate::planning::device::Profile;
use crate::rng::Rng;
use crate::runtime::device;
use crate::runtime::session::{self, Session};
use crate::tensors::feed::Feed;
use crate::tensors::{self, Tensors, random};
use ckpt_passes::compile::{self, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, NodeId};
use ckpt_passes::plan::Policy;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What to measure, and where.
#[derive(Clone, Debug)]
pub struct Request {
    /// The training step; its plan is ignored.
    pub step: compile::Request,
    /// A file of tensors; missing inputs are generated from the seed.
    pub inputs: Option<PathBuf>,
    /// Seed of the inputs that are generated.
    pub seed: u64,
    /// Threads that one kernel may use; `None` for all cores.
    pub threads: Option<u16>,
    /// The device that the nodes run on.
    pub place: Place,
    /// Runs per median, and warm-up runs before them.
    pub runs: u32,
    /// Runs before those that are measured.
    pub warm_up: u32,
    /// The kernels that attention nodes run.
    pub attention: Attention,
}

/// A profile and its summary.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The times by node, as `plan` reads them.
    pub profile: Profile,
    /// Microseconds of a whole step, recomputations included: the median of the sums.
    pub step_us: f64,
    /// Microseconds by op, largest first: the sums of the medians of its nodes.
    pub ops_us: Vec<(String, f64)>,
    /// Warnings from loading, compiling and filling in inputs.
    pub warnings: Vec<String>,
}

/// Measures a model; `given` completes what the file lacks.
///
/// # Errors
/// Those of compiling and running it.
pub fn profile(path: &Path, given: &Given, request: &Request) -> Result<Measured> {
    let mut model = load(path, given)?;
    let graph = &mut model.graph;
    let mut warnings = std::mem::take(&mut model.warnings);
    let is_planned = graph
        .order()
        .iter()
        .any(|id| graph.node(*id).recompute_of.is_some());
    if is_planned {
        ready(graph, path)?;
    } else {
        let unplanned = compile::Request {
            plan: Policy::NONE.into(),
            times: None,
            ..request.step.clone()
        };
        warnings.extend(compile(graph, &unplanned, &mut Watch::default())?.warnings);
    }
    let given = match &request.inputs {
        Some(path) => tensors::read(path)?,
        None => Tensors::new(),
    };
    let mut feed = Feed::new(graph, given)?;
    warnings.append(&mut feed.notes);
    let binding = random::fill(graph, &mut feed, &request.step.dims, request.seed)?;
    let mut session = Session::new(
        graph,
        &feed.weights,
        request.threads,
        request.place,
        Rng::default(),
    )?;
    session.attend_by(request.attention);
    let runs = session.time_nodes(&feed.inputs, request.warm_up, request.runs)?;
    let mut samples: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut by_op: BTreeMap<&str, f64> = BTreeMap::new();
    for (at, id) in graph.order().iter().enumerate() {
        let each = samples.entry(origin(graph, *id)).or_default();
        let before = each.len();
        for run in &runs {
            each.push(*run.get(at).ok_or_else(lost)?);
        }
        *by_op.entry(graph.node(*id).op.name).or_default() += median(each[before..].to_vec());
    }
    let mut ops_us: Vec<(String, f64)> = by_op.iter().map(|(n, t)| (n.to_string(), *t)).collect();
    ops_us.sort_by(|a, b| b.1.total_cmp(&a.1));
    let named = samples
        .into_iter()
        .map(|(name, s)| (name.to_string(), median(s)));
    let dims = binding.iter().filter(|(n, _)| !n.starts_with('?'));
    Ok(Measured {
        profile: Profile {
            device: device::of(request.place).name(),
            threads: session::threads(),
            steps: request.runs,
            dims: dims.map(|(n, size)| (n.to_string(), size)).collect(),
            nodes_us: named.collect(),
        },
        step_us: median(runs.iter().map(|r| r.iter().sum()).collect()),
        ops_us,
        warnings,
    })
}

fn lost() -> Box<Error> {
    Error::bug("profile", "a node was not timed")
}

/// Returns the name of a node; for a recompute node, that of its original.
fn origin(graph: &Graph, mut id: NodeId) -> &str {
    while let Some(of) = graph.node(id).recompute_of {
        id = of;
    }
    &graph.node(id).name
}

impl Measured {
    /// Formats a summary: the total, and the most expensive ops.
    pub fn human(&self) -> String {
        use std::fmt::Write;
        let p = &self.profile;
        let mut out = format!(
            "{} nodes on {}, threads {}, median of {} steps{}\n",
            p.nodes_us.len(),
            p.device,
            p.threads,
            p.steps,
            at_sizes(&p.dims)
        );
        let _ = writeln!(out, "step {:.3} ms\n", self.step_us / 1e3);
        let whole = self.ops_us.iter().map(|(_, t)| t).sum::<f64>().max(1e-9);
        for (op, time) in self.ops_us.iter().take(SHOWN_OPS) {
            let percent = 100.0 * time / whole;
            let _ = writeln!(out, "  {op:<32}{:>12.3} ms{percent:>8.1} %", time / 1e3);
        }
        if let Some((_, more)) = self.ops_us.split_at_checked(SHOWN_OPS)
            && !more.is_empty()
        {
            let time: f64 = more.iter().map(|(_, t)| t).sum();
            let _ = writeln!(
                out,
                "  {:<32}{:>12.3} ms{:>8.1} %",
                format!("{} other ops", more.len()),
                time / 1e3,
                100.0 * time / whole
            );
        }
        out
    }
}

const SHOWN_OPS: usize = 10;
