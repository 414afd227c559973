//! Measures what each node of a training graph takes, by the names that planning knows.
//!
//! A forward graph is differentiated as `plan` would and run without a plan. A graph that has its backward is run as it
//! is: where the unplanned step does not fit into memory, a planned file can be measured instead, whose copies count as
//! samples of what they copy. Times are medians over warm runs.

use super::median;
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

/// What to measure, and on what.
#[derive(Clone, Debug)]
pub struct Request {
    /// The training step; what it says about plans is left aside.
    pub step: compile::Request,
    /// A file of tensors; what it lacks is made from the seed.
    pub inputs: Option<PathBuf>,
    pub seed: u64,
    pub threads: Option<u16>,
    pub place: Place,
    /// Runs that a median is of, and runs before them.
    pub runs: u32,
    pub warm_up: u32,
    pub attention: Attention,
}

/// A profile with what a reader wants to see of it.
#[derive(Clone, Debug)]
pub struct Measured {
    pub profile: Profile,
    /// Microseconds of a whole step, copies of a planned file included: the median of the sums.
    pub step_us: f64,
    /// Microseconds by op, largest first, of all nodes that are one: medians summed.
    pub ops_us: Vec<(String, f64)>,
    pub warnings: Vec<String>,
}

/// Measures a model; `given` says what the file does not.
///
/// # Errors
/// What compiling or running it refuses.
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

/// The name of a node; of a copy, that of what it copies.
fn origin(graph: &Graph, mut id: NodeId) -> &str {
    while let Some(of) = graph.node(id).recompute_of {
        id = of;
    }
    &graph.node(id).name
}

impl Measured {
    /// A few lines for people: where the time goes.
    pub fn human(&self) -> String {
        use std::fmt::Write;
        let p = &self.profile;
        let dims: Vec<String> = p.dims.iter().map(|(n, s)| format!("{n}={s}")).collect();
        let mut out = format!(
            "{} nodes on {}, threads {}, median of {} steps{}{}\n",
            p.nodes_us.len(),
            p.device,
            p.threads,
            p.steps,
            if dims.is_empty() { "" } else { " at " },
            dims.join(", ")
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
