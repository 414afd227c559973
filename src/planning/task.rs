//! One thing to plan, from a model or a cost graph.

use super::read::{cost_graph, is_cost_graph};
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::planning::labels::Labels;
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::analysis::{Binding, Device};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::offload::By;
use ckpt_passes::plan::{
    Basis, BudgetGoal, Constraints, Offloading, OpAnnotations, Plan, PlanContext, PlanInput,
    Policy, Problem, Score, Tried, evaluate, refine::refine,
};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// What is planned, and everything its plans are judged by.
pub struct Task {
    pub problem: Problem,
    pub structure: OpAnnotations,
    pub choices: Constraints,
    /// How the choices were said.
    pub overrides: String,
    pub basis: Basis,
    pub device: Device,
    /// What waits outside the device's memory.
    pub offload: Offloading,
    /// Into how many parts the loss was cut.
    pub loss_parts: Option<usize>,
    /// Into how many parts chains of ops on tokens were cut.
    pub mlp_parts: Option<usize>,
    /// Numbers of parts that were planned, where that was left to the planner.
    pub tried: Option<Tried>,
    /// The score of the given order.
    pub before: Score,
    /// Sizes that the figures are for; none for a cost graph.
    pub dims: BTreeMap<String, i64>,
    pub assumed_dims: Vec<String>,
    pub kv_sharing: Vec<KvSharing>,
    pub labels: Labels,
    /// The loss that was differentiated, where that was done here.
    pub loss: Option<String>,
    /// Whether times of nodes were measured.
    pub is_measured: bool,
    pub warnings: Vec<String>,
}

/// What decides a plan.
pub enum Goal {
    Policy(Policy),
    Budget(BudgetGoal),
    /// A plan from a file, judged again.
    Stored(Plan),
}

impl Goal {
    /// A stored plan, else a budget, else the policy.
    pub fn of(request: &Request) -> Goal {
        match (&request.stored, request.budget) {
            (Some(stored), _) => Goal::Stored(stored.clone()),
            (None, Some(budgeted)) => Goal::Budget(budgeted),
            (None, None) => Goal::Policy(request.policy),
        }
    }
}

/// A plan with what making it took and what is possible at all.
pub struct Planned {
    pub plan: Plan,
    pub seconds: f64,
    /// The smallest peak for which a plan is known; for a budget only, and not for the quickest plan.
    pub smallest_bytes: Option<u64>,
}

impl Task {
    /// Reads a model or a cost graph, by the file's name.
    ///
    /// # Errors
    /// See [`Task::of_graph`] and [`cost_graph`].
    pub fn read(path: &Path, given: &Given, request: &Request) -> Result<Task> {
        if !is_cost_graph(path) {
            let mut model = load(path, given)?;
            let mut task = Task::of_graph(&mut model.graph, request)?;
            task.warnings.splice(0..0, model.warnings);
            return Ok(task);
        }
        let asked = [
            (!request.dims.is_empty(), "--dim"),
            (!given.inputs.is_empty(), "--input"),
            (!request.drop_outputs.is_empty(), "--drop-output"),
            (!request.rng_streams.is_empty(), "--rng-stream"),
            (
                request.selection != Default::default(),
                "--trainable and --freeze",
            ),
            (request.loss != Default::default(), "--loss"),
            (request.optimizer.is_some(), "--optimizer"),
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
        let before = evaluate(&problem, &problem.given_order())?;
        let structure = OpAnnotations::unknown(problem.ops.len());
        warnings.extend(request.offload.warning(&structure));
        Ok(Task {
            choices: Constraints::none(&structure),
            overrides: String::new(),
            structure,
            basis: Basis::AboveStatic,
            device: request.device.clone(),
            offload: request.offload,
            loss_parts: None,
            mlp_parts: None,
            tried: None,
            before,
            labels: Labels::unknown(&problem),
            problem,
            dims: BTreeMap::new(),
            assumed_dims: Vec::new(),
            kv_sharing: Vec::new(),
            loss: None,
            is_measured: request.times.is_some(),
            warnings,
        })
    }

    /// The training step of a graph: `graph` is differentiated if it has no backward yet. What the request says about
    /// plans matters only where the number of parts of a loss is left to the planner.
    ///
    /// # Errors
    /// What any pass before the plan refuses.
    pub fn of_graph(graph: &mut Graph, request: &Request) -> Result<Task> {
        let before_plan = Request {
            stop_after: Some("optimizer".into()),
            ..request.clone()
        };
        let compiled = compile(graph, &before_plan, &mut Watch::default())?;
        let mut task = Task::of_training(graph, request)?;
        task.warnings.splice(0..0, compiled.warnings);
        task.loss = compiled.loss.map(|l| l.to_string());
        task.loss_parts = compiled.tiled.iter().map(|(_, parts)| *parts).max();
        task.mlp_parts = compiled.tiled_mlps.iter().map(|(_, parts)| *parts).max();
        task.tried = compiled.tried;
        Ok(task)
    }

    /// A training graph at other sizes: what [`Task::of_graph`] made of a graph, without going through the passes again.
    ///
    /// # Errors
    /// Sizes that the model does not work at.
    pub fn of_training(graph: &Graph, request: &Request) -> Result<Task> {
        let binding = Binding::new(graph, &request.dims)?;
        let mut subject = PlanInput::new(graph, &binding, &request.device)?;
        let mut warnings = Vec::new();
        if let Some(times) = &request.times {
            times.check_dims(binding.iter())?;
            warnings.extend(times.price(&mut subject.problem)?);
        }
        warnings.extend(request.offload.warning(&subject.structure));
        let choices = (
            refine(&request.overrides, graph, &subject)?,
            request.overrides.to_string(),
        );
        Ok(Task {
            is_measured: request.times.is_some(),
            offload: request.offload,
            ..Task::made(graph, subject, choices, &binding, warnings)?
        })
    }

    /// What was planned of a training graph without copies, from what its plan was made of.
    ///
    /// # Errors
    /// A graph whose own order is not a schedule.
    pub fn made(
        graph: &Graph,
        subject: PlanInput,
        (choices, overrides): (Constraints, String),
        binding: &Binding,
        warnings: Vec<String>,
    ) -> Result<Task> {
        Ok(Task {
            before: evaluate(&subject.problem, &subject.problem.given_order())?,
            labels: Labels::of_graph(graph, &subject),
            problem: subject.problem,
            choices,
            overrides,
            loss: None,
            is_measured: false,
            kv_sharing: subject.blocks.kv_sharing.clone(),
            structure: subject.structure,
            basis: Basis::Peak,
            device: subject.device,
            offload: Offloading::default(),
            loss_parts: None,
            mlp_parts: None,
            tried: None,
            dims: binding
                .iter()
                .map(|(n, size)| (n.to_string(), size))
                .collect(),
            assumed_dims: binding.assumed().map(|(n, ..)| n.to_string()).collect(),
            warnings,
        })
    }

    /// What solvers are given.
    pub fn setting(&self) -> PlanContext<'_> {
        PlanContext {
            problem: &self.problem,
            structure: &self.structure,
            choices: &self.choices,
            overrides: &self.overrides,
            basis: self.basis,
            usable_bytes: self.device.usable_bytes(),
        }
    }

    /// Plans.
    ///
    /// # Errors
    /// `error[budget]` where nothing fits; a policy that does not apply; a stored plan that is not one for this.
    pub fn plan(&self, goal: Goal) -> Result<Planned> {
        let started = Instant::now();
        let budget = match (&goal, &self.tried) {
            (Goal::Budget(budgeted), Some(tried)) => Some(tried.settled(budgeted)),
            (Goal::Budget(budgeted), None) => Some(*budgeted),
            _ => None,
        };
        let mut plan = match (goal, &budget) {
            (Goal::Stored(plan), _) => plan.replay(&self.problem, &self.structure.block_of)?,
            (Goal::Policy(policy), None) => {
                self.offload.plan(&self.setting(), By::Policy(policy))?
            }
            (_, Some(budgeted)) => self.offload.plan(&self.setting(), By::Budget(budgeted))?,
            (Goal::Budget(_), None) => return Err(Error::bug("plan", "a budget went missing")),
        };
        (plan.loss_parts, plan.mlp_parts) = (self.loss_parts, self.mlp_parts);
        if let Some(tried) = &self.tried {
            tried.qualify(&mut plan);
        }
        let seconds = started.elapsed().as_secs_f64();
        let smallest_bytes = match budget {
            Some(budgeted) => budgeted.smallest_bytes(&self.setting(), &plan)?,
            None => None,
        };
        Ok(Planned {
            plan,
            seconds,
            smallest_bytes,
        })
    }

    /// A peak in the terms of this task's budgets.
    pub fn shown(&self, peak_bytes: u64) -> u64 {
        self.basis.shown(peak_bytes, self.before.static_bytes)
    }
}
