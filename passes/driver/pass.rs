//! A pass as a row, and the context that passes share.

use crate::analysis::params::Parameter;
use crate::analysis::sizes::Binding;
use crate::error::Result;
use crate::ir::{Graph, Phase};
use crate::plan::chunks::Tried;
use crate::plan::planner::PlanOutcome;
use crate::planning::bound_graph::BoundGraph;
use crate::request::Request;
use crate::transform::fuse::Fused;
use crate::transform::lora::Adapters;
use crate::transform::loss::{Loss, Seed};
use crate::transform::optimizer::Updates;
use crate::transform::sequence::Chunked;
use std::fmt;

/// What running a pass did, by its own account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The pass may have changed the graph.
    Yes,
    /// The graph is the same as before; the driver checks this.
    No,
}

impl From<bool> for Changed {
    fn from(changed: bool) -> Changed {
        if changed { Changed::Yes } else { Changed::No }
    }
}

/// The phase a pass leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The phase that the graph had before.
    Same,
    /// This phase, or the one before the pass where that is later.
    AtLeast(Phase),
    /// This phase, whatever the one before.
    Exactly(Phase),
}

/// One pass: a name, the phases it goes between, and the function.
pub struct Pass {
    /// Word for the pass in pipelines, dumps and timings.
    pub name: &'static str,
    /// Phases it takes.
    pub from: &'static [Phase],
    /// Phase it leaves; the driver checks this after the run.
    pub to: After,
    /// The passes of which one must come right before it, because it reads what that one left in the [`Cx`]; none: any.
    pub follows: &'static [&'static str],
    /// A second run changes nothing.
    pub idempotent: bool,
    /// Runs the pass on a graph of one of the phases in `from`.
    pub run: fn(&mut Graph, &mut Cx) -> Result<Changed>,
}

impl Pass {
    /// Returns the phase that the pass leaves a graph of phase `before` in.
    pub fn leaves(&self, before: Phase) -> Phase {
        match self.to {
            After::Same => before,
            After::AtLeast(phase) => phase.max(before),
            After::Exactly(phase) => phase,
        }
    }
}

/// A plan with the graph that it was made for.
pub struct Planned {
    /// The plan, and what planning took.
    pub outcome: PlanOutcome,
    /// The graph at the sizes of `binding`, with the problem that was planned.
    pub bound: BoundGraph,
    /// The sizes at which the graph was planned.
    pub binding: Binding,
}

/// One line of the timing table.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Name of the pass, as pipelines write it.
    pub pass: &'static str,
    /// Whether the text of the graph differs after the pass.
    pub changed: bool,
    /// Nodes in the graph after the pass.
    pub nodes: usize,
    /// Time of the pass itself, in microseconds.
    pub run_us: f64,
    /// Time of the checks after the pass, in microseconds.
    pub verify_us: f64,
}

/// The timing table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings(pub Vec<Timing>);

impl fmt::Display for Timings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>8} {:>8} {:>12} {:>12}",
            "pass", "changed", "nodes", "run ms", "verify ms"
        )?;
        for t in &self.0 {
            writeln!(
                f,
                "{:<12} {:>8} {:>8} {:>12.3} {:>12.3}",
                t.pass,
                if t.changed { "yes" } else { "no" },
                t.nodes,
                t.run_us / 1e3,
                t.verify_us / 1e3
            )?;
        }
        Ok(())
    }
}

/// The result of a compilation: what its passes made and found.
#[derive(Default)]
pub struct Compiled {
    /// The plan; `None` if `plan` did not run.
    pub planned: Option<Planned>,
    /// The parameters that `autodiff` found; empty if it did not run.
    pub parameters: Vec<Parameter>,
    /// The loss that was differentiated; `None` if the graph came with its backward pass.
    pub loss: Option<Loss>,
    /// The initializers that were tied: the one that stayed, and its copy.
    pub tied: Vec<(String, String)>,
    /// The fused ops, each with how often it was made; empty without fusion.
    pub fused: Fused,
    /// The losses that were tiled: the node that makes the scores, and the chunk count.
    pub tiled: Vec<(String, usize)>,
    /// Chains of ops on tokens that were tiled: the first node, and the chunk count.
    pub tiled_mlps: Vec<(String, usize)>,
    /// Whether the loss was rewritten for chunks before autodiff. The rewritten loss rounds differently.
    pub settled: bool,
    /// How the sequence was cut into chunks; `None` if it was not.
    pub sequence: Option<Chunked>,
    /// The chunk counts that the planner tried; `None` if it did not choose them.
    pub tried: Option<Tried>,
    /// What the optimizer updates; empty without an optimizer.
    pub updates: Updates,
    /// Time and effect of each pass that ran, in order.
    pub timings: Timings,
    /// Warnings of the passes, and those about tied weights.
    pub warnings: Vec<String>,
}

/// The context of passes: the request, and what one pass leaves for the next.
#[derive(Default)]
pub struct Cx {
    /// What the user asked for; passes only read it.
    pub request: Request,
    /// What passes made and found so far.
    pub done: Compiled,
    /// The adapters that `lora` added.
    pub adapters: Adapters,
    /// The gradients that `loss` left for `autodiff` to start from.
    pub seeds: Vec<Seed>,
}
