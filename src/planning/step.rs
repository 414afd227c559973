//! A training step to plan, from a model or a cost graph.

use super::labels::Labels;
use super::read::{cost_graph, is_cost_graph};
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::provenance::most_chunks;
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::analysis::{Binding, Device};
use ckpt_passes::compile::{BEFORE_PLAN, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::{
    Basis, Chunks, OpAnnotations, PlanInput, PlanOutcome, Score, evaluate, offload, plan,
};
use ckpt_passes::planning::BoundGraph;
use ckpt_passes::transform::sequence::Chunked;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// What is planned, and the facts that reports show beside its plan.
pub struct TrainingStep {
    /// The problem with its annotations and constraints.
    pub input: PlanInput,
    /// The device whose rates price the ops.
    pub device: Device,
    /// The score of the given order.
    pub before: Score,
    /// The sizes that the figures are for; none for a cost graph.
    pub dims: BTreeMap<String, i64>,
    /// Names of the sizes in `dims` that nobody gave; none for a cost graph.
    pub assumed_dims: Vec<String>,
    /// Layers whose keys or values other layers read; none for a cost graph.
    pub kv_sharing: Vec<KvSharing>,
    /// Names, types and modules of the ops and values of the problem.
    pub labels: Labels,
    /// The loss that was differentiated, where that was done here.
    pub loss: Option<String>,
    /// How the sequence was cut, where that was done here.
    pub sequence: Option<Chunked>,
    /// Whether times of nodes were measured.
    pub is_measured: bool,
    /// Warnings from before planning, which reports show.
    pub warnings: Vec<String>,
}

impl TrainingStep {
    /// Reads a model or a cost graph, by the file's name.
    ///
    /// # Errors
    /// See [`TrainingStep::of_graph`] and [`cost_graph`].
    pub fn read(path: &Path, given: &Given, request: &Request) -> Result<TrainingStep> {
        if !is_cost_graph(path) {
            let mut model = load(path, given)?;
            let mut step = TrainingStep::of_graph(&mut model.graph, request)?;
            step.warnings.splice(0..0, model.warnings);
            return Ok(step);
        }
        let asked = [
            (!request.dims.is_empty(), "--dim"),
            (!given.inputs.is_empty(), "--input"),
            (!request.drop_outputs.is_empty(), "--drop-output"),
            (!request.stop_gradients.is_empty(), "--stop-gradient"),
            (!request.rng_streams.is_empty(), "--rng-stream"),
            (
                request.selection != Default::default(),
                "--trainable and --freeze",
            ),
            (request.lora.is_some(), "--lora"),
            (request.loss != Default::default(), "--loss"),
            (request.updates.optimizer.is_some(), "--optimizer"),
            (!request.overrides.is_empty(), "a choice of layers or ops"),
        ];
        if let Some((_, option)) = asked.iter().find(|(given, _)| *given) {
            return Err(Error::usage(
                "cost-graph",
                format!("{option} means nothing for a cost graph: its sizes and ops are fixed"),
            ));
        }
        let mut problem = cost_graph(path)?;
        let mut warnings = Vec::new();
        if let Some(times) = &request.times {
            warnings.extend(times.price(&mut problem)?);
        }
        let annotations = OpAnnotations::of_cost_graph(&problem);
        let input = PlanInput {
            basis: Basis::AboveStatic,
            usable_bytes: request.device.usable_bytes(),
            ..PlanInput::new(problem, annotations)
        };
        warnings.extend(offload::warning(&input, &request.plan));
        Ok(TrainingStep {
            before: evaluate(&input.problem, &input.problem.given_order())?,
            labels: Labels::unknown(&input.problem),
            input,
            device: request.device.clone(),
            dims: BTreeMap::new(),
            assumed_dims: Vec::new(),
            kv_sharing: Vec::new(),
            loss: None,
            sequence: None,
            is_measured: request.times.is_some(),
            warnings,
        })
    }

    /// Returns the training step of a graph. `graph` is differentiated if it has no backward yet. The goal of the request
    /// matters only where chunk counts are left to the planner.
    ///
    /// # Errors
    /// What any pass before the plan refuses.
    pub fn of_graph(graph: &mut Graph, request: &Request) -> Result<TrainingStep> {
        let before_plan = Request {
            stop_after: Some(BEFORE_PLAN.into()),
            ..request.clone()
        };
        let compiled = compile(graph, &before_plan, &mut Watch::default())?;
        let mut step = TrainingStep::of_training(graph, request, compiled.sequence.as_ref())?;
        step.warnings.splice(0..0, compiled.warnings);
        step.loss = compiled.loss.map(|l| l.to_string());
        step.sequence = compiled.sequence;
        step.input.chunks = Chunks {
            loss: most_chunks(&compiled.tiled),
            mlp: most_chunks(&compiled.tiled_mlps),
            tried: compiled.tried,
        };
        Ok(step)
    }

    /// Returns the step of a training graph, perhaps at other sizes than [`TrainingStep::of_graph`] took, without going
    /// through the passes again.
    ///
    /// # Errors
    /// Sizes that the model does not work at.
    pub fn of_training(
        graph: &Graph,
        request: &Request,
        sequence: Option<&Chunked>,
    ) -> Result<TrainingStep> {
        let binding = Binding::new(graph, &request.dims)?;
        let mut bound = BoundGraph::new(graph, &binding, request.planning_options(sequence))?;
        let mut warnings = std::mem::take(&mut bound.warnings);
        warnings.extend(offload::warning(&bound.input, &request.plan));
        Ok(TrainingStep {
            is_measured: request.times.is_some(),
            warnings,
            ..TrainingStep::of_bound(graph, bound, &binding)?
        })
    }

    /// Returns the step of a training graph without copies, at known sizes.
    ///
    /// # Errors
    /// A graph that does not run in its own order.
    pub fn of_bound(graph: &Graph, bound: BoundGraph, binding: &Binding) -> Result<TrainingStep> {
        let problem = &bound.input.problem;
        Ok(TrainingStep {
            before: evaluate(problem, &problem.given_order())?,
            labels: Labels::of_graph(graph, &bound),
            kv_sharing: bound.layers.kv_sharing,
            input: bound.input,
            device: bound.device,
            dims: binding
                .iter()
                .map(|(n, size)| (n.to_string(), size))
                .collect(),
            assumed_dims: binding.assumed().map(|(n, ..)| n.to_string()).collect(),
            loss: None,
            sequence: None,
            is_measured: false,
            warnings: Vec::new(),
        })
    }

    /// Plans as the request says.
    ///
    /// # Errors
    /// `error[budget]` where nothing fits; a policy that does not apply; a stored plan for another step.
    pub fn plan(&self, request: &Request) -> Result<PlanOutcome> {
        Ok(plan(&self.input, &request.plan)?)
    }

    /// Returns a peak in the terms of budgets.
    pub fn shown(&self, peak_bytes: u64) -> u64 {
        self.input.shown(peak_bytes)
    }
}
