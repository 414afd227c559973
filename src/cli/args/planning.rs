//! Options of the verbs that plan, and of plans in `optimize`.

use super::super::refinement::Refinement;
use super::showing::Show;
use super::{Chosen, Report, Source, Trained, dim, loss, policy, shown};
use ckpt_opt::planning::device::{device, times};
use ckpt_opt::planning::read;
use ckpt_passes::compile::Request;
use ckpt_passes::plan::offload::{IN_FLIGHT, MIN_BYTES, To, What};
use ckpt_passes::plan::{Budget, BudgetGoal, Effort, Objective, Offloading, budgeted};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::transform::rng_streams::Stream;
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Result};
use clap::{ArgAction, Args};
use std::path::PathBuf;

pub const PLAN_EXAMPLES: &str = "\
Examples:
  ckpt-opt plan model.onnx --dim batch=8 --budget 60% --effort first --compare
  ckpt-opt plan model.onnx --dim batch=8 --budget 12MiB --effort first --plan-out p.json
  ckpt-opt plan model.onnx --dim batch=8 --budget 60% --effort first --reorder
  ckpt-opt plan model.onnx --dim batch=8 --plan-in p.json --plan-out q.json
  ckpt-opt plan model.onnx --dim seq=32 --maximize batch --budget 1MiB --effort first
  ckpt-opt plan graph.json.gz --budget 60% --objective flops -o schedule.json --format json

A cost graph (.json, .json.gz) lists ops in an order in which they can run, and values with their bytes; budgets in
bytes are then on the peak above static. Exit code 3: nothing fits, and the smallest budget that does is named.";

pub const FRONTIER_EXAMPLES: &str = "\
Examples:
  ckpt-opt frontier model.onnx --dim batch=8 --points 6 --effort first --svg f.svg
  ckpt-opt frontier graph.json.gz --budgets 80%,60%,50%";

pub const DIFF_EXAMPLES: &str = "\
Examples:
  ckpt-opt diff p.json q.json
  ckpt-opt diff train.onnx train.onnx";

/// Which plan: a budget, and what it is priced with.
#[derive(Args)]
#[command(next_help_heading = "Plan")]
pub struct Budgeting {
    /// The most memory at any moment: 8GiB, 750MB, plain bytes, 60% (of what the unplanned step takes above parameters
    /// and inputs), or auto (what the device has; 60% where none is known) [default: auto]
    #[arg(long, value_name = "B", value_parser = budget, conflicts_with = "plan_in")]
    pub budget: Option<Budget>,
    /// What a plan within the budget keeps small: cost (time by the cost model) or flops
    #[arg(long, default_value = "cost", value_parser = objective)]
    pub objective: Objective,
    /// How long to look for a better plan: first, normal or thorough
    #[arg(long, default_value = "normal", value_parser = effort)]
    pub effort: Effort,
    /// Let ops run in another order than the model's where that makes plans within the budget cheaper; no value changes
    #[arg(long, conflicts_with = "plan_in")]
    pub reorder: bool,
    /// Use this plan, which may have been edited; it is judged again
    #[arg(long, value_name = "FILE", conflicts_with = "policy")]
    pub plan_in: Option<PathBuf>,
    /// Write the plan as JSON
    #[arg(long, value_name = "FILE")]
    pub plan_out: Option<PathBuf>,
    #[command(flatten)]
    pub offloading: Offloads,
    #[command(flatten)]
    pub prices: Prices,
}

/// What leaves the device's memory between its uses.
#[derive(Args)]
pub struct Offloads {
    /// Let results wait outside the device's memory: none, auto (what pays, with --budget), cpu (all of them, in the
    /// host's memory), disk (all, in a file) or block-inputs (what layers read). A run on the CPU uses a file for all of these
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = offload)]
    pub offload: (What, To),
    /// Results of a node that are fewer bytes together stay
    #[arg(long, value_name = "BYTES", default_value_t = MIN_BYTES)]
    pub min_offload_bytes: u64,
    /// The most bytes that may wait outside at once: 16GiB, 750MB, plain bytes
    #[arg(long, value_name = "B", value_parser = plain_bytes)]
    pub host_budget: Option<u64>,
    /// Let transfers run beside other nodes: results are held a little longer and fetched a little earlier where memory
    /// allows it. on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set)]
    pub offload_streams: bool,
    /// Results of at most so many nodes are held only because they are not outside yet; as many are fetched ahead
    #[arg(long, value_name = "N", default_value_t = IN_FLIGHT, value_parser = at_least_one)]
    pub max_forward_stash: usize,
}

impl Offloads {
    fn wish(&self) -> Offloading {
        let (what, to) = self.offload;
        Offloading {
            what,
            to,
            min_bytes: self.min_offload_bytes,
            outside_bytes: self.host_budget,
            streams: self.offload_streams,
            in_flight: self.max_forward_stash,
        }
    }
}

/// What the cost model rests on.
#[derive(Args)]
pub struct Prices {
    /// The device that times, memory and rounding are of: a100, h100, h200, l4, rtx4090, laptop-cpu, or a file of
    /// the same form [default: none in particular]
    #[arg(long, value_name = "NAME|FILE")]
    pub device_profile: Option<String>,
    /// Measured times of nodes (JSON: device, threads, steps, dims, nodes_us), instead of those of the cost model
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

impl Prices {
    /// Fills in the device and the times of a request.
    ///
    /// # Errors
    /// A file that cannot be read or is none.
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

impl Budgeting {
    pub fn budgeted(&self) -> BudgetGoal {
        BudgetGoal {
            budget: self.budget.unwrap_or(Budget::Auto),
            objective: self.objective,
            effort: self.effort,
            reorder: self.reorder,
        }
    }

    /// Fills in everything about plans; a budget where there is no policy.
    ///
    /// # Errors
    /// A file that cannot be read or is none; a rule and a budget.
    pub fn apply(&self, policy: Option<Chosen>, request: &mut Request) -> Result<()> {
        self.prices.apply(request)?;
        request.offload = self.offloading.wish();
        if self.reorder && request.offload.what != What::Nothing {
            let text = "--reorder and --offload exclude each other";
            return Err(Error::usage("reorder", text).help("leave one of them out"));
        }
        match (&self.plan_in, policy) {
            (Some(path), _) => request.stored = Some(read::plan(path)?),
            (None, Some(Chosen::Rule(policy))) if self.budget.is_some() => {
                return Err(Error::usage(
                    "policy",
                    format!("--policy {policy} and --budget exclude each other"),
                )
                .help("leave one of them out"));
            }
            (None, Some(Chosen::Rule(policy))) if self.reorder => {
                return Err(Error::usage(
                    "policy",
                    format!("--policy {policy} and --reorder exclude each other: a policy keeps the order of the model"),
                )
                .help("--reorder goes with --budget"));
            }
            (None, Some(Chosen::Rule(policy))) => request.policy = policy,
            (None, Some(Chosen::Budget) | None) => request.budget = Some(self.budgeted()),
        }
        Ok(())
    }
}

/// What the training step of a model is.
#[derive(Args)]
#[command(next_help_heading = "Training step, for models")]
pub struct Training {
    /// causal-lm, cross-entropy, mse, output:NAME or vjp [default: the backward that the file has, else its only
    /// scalar output, else vjp]
    #[arg(long, value_parser = loss)]
    pub loss: Option<Loss>,
    /// Number for a named size, for planning only; a written graph stays as dynamic as the model
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim)]
    pub dims: Vec<(String, i64)>,
    #[command(flatten)]
    pub trained: Trained,
    /// Leave out forward outputs whose name matches, such as caches or logits
    #[arg(long = "drop-output", value_name = "PATTERN")]
    pub drop_outputs: Vec<String>,
    /// Give the random nodes that a pattern names (of nodes or modules) a seed of their own, the input rng_seed.NAME
    #[arg(long = "rng-stream", value_name = "NAME=PATTERN,…", value_parser = stream)]
    pub rng_streams: Vec<Stream>,
    /// Leave attentions, norms and activations as the model has them, instead of one op for each
    #[arg(long)]
    pub no_fuse: bool,
    /// Compute the head and the loss part by part along the tokens, so that logits never exist whole: off, auto (as many
    /// parts as pay within the budget, by rule without one) or a number. Logits must not be an output (--drop-output)
    #[arg(long, value_name = "N", default_value = "off", value_parser = tile)]
    pub tile_loss: Tile,
    /// Compute MLPs, and other chains of ops on tokens, part by part along the tokens, forward and backward, so that what
    /// lies inside never exists whole: off, auto (as many parts as pay within the budget, by rule without one) or a number
    #[arg(long, value_name = "N", default_value = "off", value_parser = tile)]
    pub tile_mlp: Tile,
    /// Update the parameters in the graph: sgd or adamw, perhaps with settings as in PyTorch
    /// (sgd:momentum=0.9,weight_decay=0.01; adamw:beta2=0.95). New inputs are lr, step and the state, new outputs
    /// <parameter>.updated and <state>.updated
    #[arg(long, value_name = "NAME[:SETTINGS]", value_parser = optimizer)]
    pub optimizer: Option<Optimizer>,
    /// Run each update as soon as its gradient is complete, so that gradients never all live at once; they are no outputs
    #[arg(long, requires = "optimizer")]
    pub fuse_optimizer: bool,
    #[command(flatten)]
    pub source: Source,
}

impl Training {
    pub fn request(&self) -> Request {
        Request {
            loss: self.loss.clone().unwrap_or_default(),
            selection: self.trained.selection(),
            dims: self.dims.clone(),
            drop_outputs: self.drop_outputs.clone(),
            rng_streams: self.rng_streams.clone(),
            fuse: !self.no_fuse,
            tile: Tiles {
                loss: self.tile_loss,
                mlp: self.tile_mlp,
            },
            optimizer: self.optimizer,
            fuse_optimizer: self.fuse_optimizer,
            ..Request::default()
        }
    }
}

/// The training step of a model, and what of it is settled before it is planned.
#[derive(Args)]
#[command(next_help_heading = "Training step, for models")]
pub struct Step {
    #[command(flatten)]
    pub training: Training,
    #[command(flatten)]
    pub refinement: Refinement,
}

impl Step {
    pub fn request(&self) -> Request {
        Request {
            overrides: self.refinement.overrides(),
            ..self.training.request()
        }
    }
}

#[derive(Args)]
pub struct PlanArgs {
    /// The model (ONNX, .ckir) or cost graph (.json, .json.gz)
    pub source: PathBuf,
    /// Write the schedule, and all else about the plan, as JSON
    #[arg(short, long, value_name = "SCHEDULE")]
    pub output: Option<PathBuf>,
    /// none, full, selective, submodule, every:N, first:N or group:N (layers), instead of a budget
    #[arg(long, value_parser = policy)]
    pub policy: Option<Chosen>,
    #[command(flatten)]
    pub budgeting: Budgeting,
    /// Show the policies beside budgeted plans that take as much memory
    #[arg(long)]
    pub compare: bool,
    /// Find the largest number for this named size at which a plan fits into the budget
    #[arg(long, value_name = "DIM", conflicts_with_all = ["policy", "plan_in"])]
    pub maximize: Option<String>,
    /// With --maximize: at most so much overhead, in percent
    #[arg(long, value_name = "P", requires = "maximize", value_parser = percent)]
    pub max_overhead: Option<f64>,
    #[command(flatten)]
    pub step: Step,
    #[command(flatten)]
    pub show: Show,
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct FrontierArgs {
    /// The model (ONNX, .ckir) or cost graph (.json, .json.gz)
    pub source: PathBuf,
    /// How many budgets, in equal steps from the smallest feasible one to the unplanned peak
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u16).range(2..=1000))]
    pub points: u16,
    /// Plan at these budgets instead
    #[arg(long, value_name = "B,B,…", value_delimiter = ',', value_parser = budget)]
    pub budgets: Vec<Budget>,
    /// What plans keep small: cost (time by the cost model) or flops
    #[arg(long, default_value = "cost", value_parser = objective)]
    pub objective: Objective,
    /// How long to look for better plans: first, normal or thorough
    #[arg(long, default_value = "normal", value_parser = effort)]
    pub effort: Effort,
    /// Let ops run in another order than the model's where that makes plans cheaper
    #[arg(long)]
    pub reorder: bool,
    /// Show beside it what computing again, parts (--tile-loss, --tile-mlp), moving and fused updates do alone and together
    #[arg(long)]
    pub levers: bool,
    /// Draw the curve
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    #[command(flatten)]
    pub prices: Prices,
    #[command(flatten)]
    pub step: Step,
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct DiffArgs {
    /// A plan, as --plan-out or -o writes it, or a training graph, planned or not
    pub a: PathBuf,
    /// Another for the same model
    pub b: PathBuf,
    /// Number for a named size of training graphs
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim)]
    pub dims: Vec<(String, i64)>,
    #[command(flatten)]
    pub report: Report,
}

fn budget(text: &str) -> Result<Budget, String> {
    Budget::parse(text).map_err(shown)
}

/// Reads `on` or `off`.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".into()),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n >= 1 => Ok(n),
        _ => Err("a number, at least 1".into()),
    }
}

fn offload(text: &str) -> Result<(What, To), String> {
    Offloading::parse(text).map_err(shown)
}

fn plain_bytes(text: &str) -> Result<u64, String> {
    match Budget::parse(text).map_err(shown)? {
        Budget::Bytes(bytes) => Ok(bytes),
        _ => Err("expected a number of bytes, such as 16GiB".into()),
    }
}

fn stream(text: &str) -> Result<Stream, String> {
    Stream::parse(text).map_err(shown)
}

fn objective(text: &str) -> Result<Objective, String> {
    budgeted::objective(text).map_err(shown)
}

fn optimizer(text: &str) -> Result<Optimizer, String> {
    Optimizer::parse(text).map_err(shown)
}

fn tile(text: &str) -> Result<Tile, String> {
    Tile::parse(text).map_err(shown)
}

fn effort(text: &str) -> Result<Effort, String> {
    match text {
        "first" => Ok(Effort::First),
        "normal" => Ok(Effort::Normal),
        "thorough" => Ok(Effort::Thorough),
        _ => Err("expected first, normal or thorough".into()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok(x),
        _ => Err("expected a percentage that is not negative".into()),
    }
}
