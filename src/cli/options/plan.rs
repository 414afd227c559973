//! Options of the commands that plan.

use super::model::{Source, Step, Trained};
use super::parse::{by, bytes, count, dim, effort, not_negative, policy, switch};
use crate::cli::output::{Console, Views};
use ckpt_opt::planning::device::{device, times};
use ckpt_opt::planning::read;
use ckpt_passes::compile::Request;
use ckpt_passes::plan::request::{IN_FLIGHT, MIN_BYTES};
use ckpt_passes::plan::{
    self, Budget, Effort, Objective, Offload, OffloadSet, OffloadTarget, PlanRequest, Policy,
};
use ckpt_passes::{Error, Result};
use clap::{ArgAction, Args};
use std::path::PathBuf;

/// What a plan is to reach.
#[derive(Args)]
#[command(next_help_heading = "Goal")]
pub struct Goal {
    /// The largest peak of memory: 8GiB, 750MB, plain bytes, 60% (of what the unplanned step takes above parameters and
    /// inputs), or auto (the memory of the device; 60% where none is known) [default: auto]
    #[arg(long, value_name = "B", value_parser = by(Budget::parse), conflicts_with_all = ["policy", "plan_in"])]
    pub budget: Option<Budget>,
    #[arg(long, value_parser = policy, conflicts_with = "reorder",
          help = format!("Plan by a rule instead of a budget: {}", Policy::help()))]
    pub policy: Option<Policy>,
    /// Use this stored plan, which may have been edited; it is judged again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["policy", "reorder"])]
    pub plan_in: Option<PathBuf>,
    #[command(flatten)]
    pub search: Search,
    #[command(flatten)]
    pub offloads: Offloads,
    #[command(flatten)]
    pub prices: Prices,
}

/// How a plan within a budget is searched for.
#[derive(Args)]
#[command(next_help_heading = "Goal")]
pub struct Search {
    /// What a plan within the budget minimizes: cost (time by the cost model) or flops
    #[arg(long, default_value = "cost", value_parser = by(Objective::parse))]
    pub objective: Objective,
    /// How long to search for a better plan: first, normal or thorough
    #[arg(long, default_value = "normal", value_parser = effort)]
    pub effort: Effort,
    /// Let ops run in another order than the model's where that makes plans within the budget cheaper; no value changes
    #[arg(long)]
    pub reorder: bool,
}

/// What leaves the device's memory between its uses.
#[derive(Args)]
#[command(next_help_heading = "Offloading")]
pub struct Offloads {
    /// Offload results: none, auto (what pays off, with --budget), cpu (all of them, to the host's memory), disk (all, to a
    /// file), block-inputs (what layers read) or ranks (of what is kept and the ranks of --mesh tp=N have alike, each keeps a
    /// slice and gathers the others). A run on the CPU uses a file, but for ranks
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = by(Offload::parse))]
    pub offload: (OffloadSet, OffloadTarget),
    /// Keep the results of a node that take fewer bytes together: 1KiB, 700k, plain bytes
    #[arg(long, value_name = "B", default_value_t = MIN_BYTES, value_parser = bytes)]
    pub min_offload_bytes: u64,
    /// The most bytes that may be offloaded at once: 16GiB, 750MB, plain bytes
    #[arg(long, value_name = "B", value_parser = bytes)]
    pub host_budget: Option<u64>,
    /// Let transfers overlap with other nodes: a plan holds results a little longer and fetches them a little earlier
    /// where memory allows it, and parameters that ranks gather too. on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set)]
    pub overlap_transfers: bool,
    /// At most so many nodes' results are held while they are on their way out; as many are fetched or gathered ahead
    #[arg(long, value_name = "N", default_value_t = IN_FLIGHT, value_parser = count)]
    pub max_forward_stash: usize,
}

impl Offloads {
    fn offload(&self) -> Offload {
        let (set, to) = self.offload;
        Offload {
            set,
            to,
            min_bytes: self.min_offload_bytes,
            host_bytes: self.host_budget,
            streams: self.overlap_transfers,
            in_flight: self.max_forward_stash,
        }
    }
}

/// What the cost model rests on.
#[derive(Args)]
#[command(next_help_heading = "Cost model")]
pub struct Prices {
    /// Device whose speed, memory and rounding to plan for: a100, h100, h200, l4, rtx4090, laptop-cpu, or a file of the
    /// same form [default: a generic device]
    #[arg(long, value_name = "NAME|FILE")]
    pub device_profile: Option<String>,
    /// Measured times of nodes (JSON: device, threads, steps, dims, nodes_us), instead of the cost model's
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

impl Prices {
    /// Fills in the device and the times of a request.
    ///
    /// # Errors
    /// A file that cannot be read or holds neither.
    pub fn apply(&self, request: &mut Request) -> Result<()> {
        if let Some(word) = &self.device_profile {
            request.device = device(word)?;
        }
        if let Some(path) = &self.profile {
            request.times = Some(times(path)?);
        }
        Ok(())
    }
}

impl Search {
    /// Returns a request with this goal, without offloading.
    pub fn request(&self, goal: plan::Goal) -> PlanRequest {
        PlanRequest {
            objective: self.objective,
            effort: self.effort,
            reorder: self.reorder,
            ..goal.into()
        }
    }
}

impl Goal {
    /// Returns true where the user gave a goal.
    pub fn is_given(&self) -> bool {
        self.budget.is_some() || self.policy.is_some() || self.plan_in.is_some()
    }

    /// Fills in everything about plans; a budget where there is no policy.
    ///
    /// # Errors
    /// A file that cannot be read or is no plan, device or profile; options that exclude each other.
    pub fn apply(&self, request: &mut Request) -> Result<()> {
        self.prices.apply(request)?;
        let offload = self.offloads.offload();
        if self.search.reorder && offload.set != OffloadSet::Nothing {
            let text = "--reorder and --offload exclude each other";
            return Err(Error::usage("reorder", text).help("leave one of them out"));
        }
        let goal = match (&self.plan_in, self.policy) {
            (Some(path), _) => plan::Goal::Stored(Box::new(read::plan(path)?)),
            (None, Some(policy)) => plan::Goal::Policy(policy),
            (None, None) => plan::Goal::Budget(self.budget.unwrap_or(Budget::Auto)),
        };
        request.plan = PlanRequest {
            offload,
            ..self.search.request(goal)
        };
        Ok(())
    }
}

pub const OPTIMIZE_EXAMPLES: &str = "\
Examples:
  ckpt-opt model.onnx -o train.onnx
  ckpt-opt traced.pt -o train.onnx --input 'tokens:i64[batch,seq]' --output-names logits
  ckpt-opt model.onnx -o train.onnx --budget 60% --effort first --dim batch=8
  ckpt-opt model.onnx -o train.onnx --policy full --loss causal-lm --dim batch=8 --dim seq=128
  ckpt-opt model.onnx -o train.onnx --policy full --optimizer adamw --fuse-optimizer
  ckpt-opt model.onnx -o train.onnx --freeze '*wpe*' --drop-output logits --loss causal-lm
  ckpt-opt model.onnx -o train.onnx --policy none --lora 'r=16,alpha=32,targets=c_attn,*c_fc*'
  ckpt-opt model.onnx -o train.onnx --policy full --layers GPT2Block --every 2 --save-ops aten.addmm
  ckpt-opt model.onnx -o train.onnx --policy none --recompute 'transformer.h.*.mlp.act'";

/// Options of `optimize`.
#[derive(Args)]
pub struct OptimizeArgs {
    /// The model: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text
    pub model: PathBuf,
    #[command(flatten)]
    pub goal: Goal,
    #[command(flatten)]
    pub step: Step,
    /// Write the training graph to this file; a name that ends in .ckir gets text
    #[arg(short, long, value_name = "OUT", help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Refer to the model's external weight files instead of copying them; OUT must be in the same folder
    #[arg(long, requires = "output", help_heading = "Output")]
    pub link_weights: bool,
    /// List trained weights among the inputs of OUT, so that a training loop in ONNX Runtime can feed updated ones
    #[arg(long, requires = "output", help_heading = "Output")]
    pub weights_as_inputs: bool,
    /// Write exchanges between ranks as ops of ckpt-opt or of onnxruntime (builds with NCCL)
    #[arg(long, value_name = "WORD", default_value = "ckpt-opt", value_parser = ["ckpt-opt", "onnxruntime"], requires_if("onnxruntime", "output"), help_heading = "Output")]
    pub collectives: String,
    /// Write the plan as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub plan_out: Option<PathBuf>,
    #[command(flatten)]
    pub views: Views,
    #[command(flatten)]
    pub console: Console,
    /// Run these passes instead of the usual ones
    #[arg(long, value_name = "PASS,PASS,…", help_heading = "Passes")]
    pub passes: Option<String>,
    /// Write the graph as text after every pass, into this folder
    #[arg(long, value_name = "DIR", help_heading = "Passes")]
    pub dump: Option<PathBuf>,
    /// Stop after this pass (`simplify:2` is the second of that name); without -o the graph is printed as text
    #[arg(long, value_name = "PASS", help_heading = "Passes")]
    pub stop_after: Option<String>,
}

impl OptimizeArgs {
    /// # Errors
    /// See [`Goal::apply`].
    pub fn request(&self) -> Result<Request> {
        let mut request = Request {
            passes: self.passes.clone(),
            stop_after: self.stop_after.clone(),
            ..self.step.request()
        };
        self.goal.apply(&mut request)?;
        Ok(request)
    }
}

pub const INSPECT_EXAMPLES: &str = "\
Examples:
  ckpt-opt inspect model.onnx
  ckpt-opt inspect traced.pt --input 'tokens:i64[2,7]'
  ckpt-opt inspect model.onnx --lora 'r=16,alpha=32,targets=c_attn,*c_fc*'
  ckpt-opt inspect model.onnx --format json";

/// Options of `inspect`.
#[derive(Args)]
pub struct InspectArgs {
    /// The model: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text
    pub model: PathBuf,
    #[command(flatten)]
    pub source: Source,
    #[command(flatten)]
    pub trained: Trained,
    #[command(flatten)]
    pub console: Console,
}

pub const PLAN_EXAMPLES: &str = "\
Examples:
  ckpt-opt plan model.onnx --dim batch=8 --budget 60% --effort first --compare
  ckpt-opt plan model.onnx --dim batch=8 --budget 12MiB --effort first --plan-out p.json
  ckpt-opt plan model.onnx --dim batch=8 --budget 60% --effort first --reorder
  ckpt-opt plan model.onnx --dim batch=8 --plan-in p.json --plan-out q.json
  ckpt-opt plan model.onnx --dim seq=32 --maximize batch --budget 1MiB --effort first
  ckpt-opt plan graph.json.gz --budget 60% --objective flops --plan-out schedule.json --format json

A cost graph (.json, .json.gz) lists ops in an order in which they can run, and values with their bytes; budgets in
bytes are then on the peak above static. Exit code 3: no plan fits, and the error names the smallest feasible budget.";

/// Options of `plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// The model (ONNX, TorchScript, torch.export or .ckir) or cost graph (.json, .json.gz)
    pub source: PathBuf,
    #[command(flatten)]
    pub goal: Goal,
    /// Find the largest number for this named size at which a plan fits into the budget
    #[arg(long, value_name = "DIM", conflicts_with_all = ["policy", "plan_in"], help_heading = "Goal")]
    pub maximize: Option<String>,
    /// With --maximize: at most so much overhead, in percent
    #[arg(long, value_name = "P", requires = "maximize", value_parser = not_negative, help_heading = "Goal")]
    pub max_overhead: Option<f64>,
    #[command(flatten)]
    pub step: Step,
    /// Write the plan as JSON: the schedule, and why each value is kept or recomputed
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub plan_out: Option<PathBuf>,
    /// Show the policies beside budgeted plans that take as much memory
    #[arg(long, help_heading = "Output")]
    pub compare: bool,
    /// Leave out the smallest feasible budget: the search for it takes longer than most plans
    #[arg(long, help_heading = "Output")]
    pub no_smallest: bool,
    /// Leave out the proof of how good the plan is: near the smallest budget it takes longer, but may lead to a better plan
    #[arg(long, help_heading = "Output")]
    pub no_proof: bool,
    #[command(flatten)]
    pub views: Views,
    #[command(flatten)]
    pub console: Console,
}

pub const FRONTIER_EXAMPLES: &str = "\
Examples:
  ckpt-opt frontier model.onnx --dim batch=8 --points 6 --effort first --svg f.svg
  ckpt-opt frontier graph.json.gz --budgets 80%,60%,50%";

/// Options of `frontier`.
#[derive(Args)]
pub struct FrontierArgs {
    /// The model (ONNX, TorchScript, torch.export or .ckir) or cost graph (.json, .json.gz)
    pub source: PathBuf,
    /// How many budgets, in equal steps from the smallest feasible one to the unplanned peak
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u16).range(2..=1000),
          help_heading = "Goal")]
    pub points: u16,
    /// Plan at these budgets instead
    #[arg(long, value_name = "B,B,…", value_delimiter = ',', value_parser = by(Budget::parse), help_heading = "Goal")]
    pub budgets: Vec<Budget>,
    #[command(flatten)]
    pub search: Search,
    #[command(flatten)]
    pub prices: Prices,
    #[command(flatten)]
    pub step: Step,
    /// Plan with each technique alone and with all together: recompute, chunks (--tile-loss, --tile-mlp), offload, fused
    /// optimizer
    #[arg(long, help_heading = "Output")]
    pub ablation: bool,
    /// Draw the curve
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub svg: Option<PathBuf>,
    #[command(flatten)]
    pub console: Console,
}

pub const EXPLAIN_EXAMPLES: &str = "\
Examples:
  ckpt-opt explain model.onnx --dim batch=8 --effort first
  ckpt-opt explain model.onnx layer:1 --dim batch=8 --policy full
  ckpt-opt explain model.onnx '*mlp*' --dim batch=8 --policy selective --format json
  ckpt-opt explain train.onnx --dim batch=8
  ckpt-opt explain model.onnx --policy full --dim batch=8 --report plan.html
  ckpt-opt explain model.onnx --policy full --dim batch=8 --report plan.trace.json
  ckpt-opt explain p.json";

/// Options of `explain`.
#[derive(Args)]
pub struct ExplainArgs {
    /// A model (planned as the options say), a planned training graph (explained as it is), a cost graph, or a plan that
    /// --plan-out wrote
    pub source: PathBuf,
    /// What to explain: `layer:N`, a value, a node, a module's path, or a pattern of these [default: everything]
    pub name: Option<String>,
    #[command(flatten)]
    pub goal: Goal,
    #[command(flatten)]
    pub step: Step,
    #[command(flatten)]
    pub views: Views,
    #[command(flatten)]
    pub console: Console,
}

pub const DIFF_EXAMPLES: &str = "\
Examples:
  ckpt-opt diff p.json q.json
  ckpt-opt diff train.onnx train.onnx";

/// Options of `diff`.
#[derive(Args)]
pub struct DiffArgs {
    /// A plan, as --plan-out writes it, or a training graph, planned or not
    pub a: PathBuf,
    /// Another for the same model
    pub b: PathBuf,
    /// Number for a named size of training graphs
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim, help_heading = "Model")]
    pub dims: Vec<(String, i64)>,
    #[command(flatten)]
    pub console: Console,
}
