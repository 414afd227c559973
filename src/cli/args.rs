//! The command line: options, help and examples. What they mean is in one place only, here.

pub mod measuring;
pub mod planning;
pub mod showing;

use ckpt_opt::attention::Attention;
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::tensors::{self, feed};
use ckpt_passes::analysis::params::Selection;
use ckpt_passes::compile::Request;
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::loss::Loss;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Names of all verbs; a first word that is none of them is a model to optimize.
pub const VERBS: &[&str] = &[
    "optimize",
    "inspect",
    "plan",
    "frontier",
    "explain",
    "diff",
    "run",
    "verify",
    "calibrate",
    "profile",
    "overhead",
    "doctor",
    "completions",
    "man",
    "help",
];

const TOP_EXAMPLES: &str = "\
`ckpt-opt MODEL -o OUT` is short for `ckpt-opt optimize MODEL -o OUT`.

`--config FILE` gives options that the command line does not: {\"budget\": \"60%\", \"dim\": [\"batch=8\"]}, long names without
dashes; an option that the command does not have is for another.

Examples:
  ckpt-opt model.onnx -o train.onnx --loss causal-lm --dim batch=8 --dim seq=128
  ckpt-opt inspect model.onnx
  ckpt-opt verify model.onnx train.onnx

Exit codes: 0 good, 1 a bug in ckpt-opt, 2 wrong usage or a bad model, 3 no plan fits, 4 verification failed,
5 the environment (no memory, no disk, no libtorch).";

const OPTIMIZE_EXAMPLES: &str = "\
Examples:
  ckpt-opt model.onnx -o train.onnx
  ckpt-opt traced.pt -o train.onnx --input 'tokens:i64[batch,seq]' --output-names logits
  ckpt-opt model.onnx -o train.onnx --budget 60% --effort first --dim batch=8
  ckpt-opt model.onnx -o train.onnx --policy full --loss causal-lm --dim batch=8 --dim seq=128
  ckpt-opt model.onnx -o train.onnx --policy full --optimizer adamw --fuse-optimizer
  ckpt-opt model.onnx -o train.onnx --freeze '*wpe*' --drop-output logits --loss causal-lm
  ckpt-opt model.onnx -o train.onnx --policy full --layers GPT2Block --every 2 --save-ops aten.addmm
  ckpt-opt model.onnx -o train.onnx --policy none --recompute 'transformer.h.*.mlp.act'";

const INSPECT_EXAMPLES: &str = "\
Examples:
  ckpt-opt inspect model.onnx
  ckpt-opt inspect traced.pt --input 'tokens:i64[2,7]'
  ckpt-opt inspect model.onnx --format json";

const RUN_EXAMPLES: &str = "\
Examples:
  ckpt-opt run train.onnx --inputs case.npz --outputs grads.npz
  ckpt-opt run train.onnx --inputs case.npz --threads 1 --format json";

const VERIFY_EXAMPLES: &str = "\
Examples:
  ckpt-opt verify model.onnx train.onnx
  ckpt-opt verify model.onnx train.onnx --inputs case.npz --certificate proof.json";

/// Turns an exported model into the training step that fits in memory.
#[derive(Parser)]
#[command(name = "ckpt-opt", version, after_help = TOP_EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Subcommand)]
pub enum Verb {
    /// Differentiate a model, decide what to compute again, write the training graph
    #[command(after_help = OPTIMIZE_EXAMPLES)]
    Optimize(OptimizeArgs),
    /// Show what a model is: inputs, parameters, layers, ops
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Decide what to compute again within a memory budget, for a model or a cost graph, without writing a model
    #[command(after_help = planning::PLAN_EXAMPLES)]
    Plan(planning::PlanArgs),
    /// Plan at many budgets: what memory costs, with proven bounds and the policies people know
    #[command(after_help = planning::FRONTIER_EXAMPLES)]
    Frontier(planning::FrontierArgs),
    /// Say what a plan does with every value, what the other choice would cost, and why
    #[command(after_help = showing::EXPLAIN_EXAMPLES)]
    Explain(showing::ExplainArgs),
    /// Compare two plans, or the plans that are in two training graphs
    #[command(after_help = planning::DIFF_EXAMPLES)]
    Diff(planning::DiffArgs),
    /// Execute a graph and compare the memory it takes with what was predicted
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArgs),
    /// Prove that two graphs compute the same values, or that a training graph has the right gradients
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(VerifyArgs),
    /// Measure this machine: the device profile that plans are priced with
    #[command(after_help = measuring::CALIBRATE_EXAMPLES)]
    Calibrate(measuring::CalibrateArgs),
    /// Measure what each node of a training step takes, for plans that are priced with it
    #[command(after_help = measuring::PROFILE_EXAMPLES)]
    Profile(measuring::ProfileArgs),
    /// Measure what a plan costs in time: planned and unplanned steps in turns
    #[command(after_help = measuring::OVERHEAD_EXAMPLES)]
    Overhead(measuring::OverheadArgs),
    /// Look at this machine: what ckpt-opt finds here, and what to do where something is missing
    Doctor(DoctorArgs),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    /// Print the manual page, of one command if it is named: ckpt-opt man plan | man -l -
    Man { command: Option<String> },
}

impl Verb {
    /// How the verb reports.
    pub fn report(&self) -> Option<&Report> {
        let report = match self {
            Verb::Optimize(args) => &args.report,
            Verb::Inspect(args) => &args.report,
            Verb::Plan(args) => &args.report,
            Verb::Frontier(args) => &args.report,
            Verb::Explain(args) => &args.report,
            Verb::Diff(args) => &args.report,
            Verb::Run(args) => &args.report,
            Verb::Verify(args) => &args.report,
            Verb::Calibrate(args) => &args.report,
            Verb::Profile(args) => &args.report,
            Verb::Overhead(args) => &args.report,
            Verb::Doctor(args) => &args.report,
            Verb::Completions { .. } | Verb::Man { .. } => return None,
        };
        Some(report)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Human,
    Json,
}

/// Options of every verb that reports.
#[derive(Args)]
pub struct Report {
    /// How to report on stdout
    #[arg(long, value_enum, default_value = "human")]
    pub format: Format,
    /// Say more on stderr, such as the time of each pass
    #[arg(short, long, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Say nothing on stderr but errors, and print no table where a file is what was asked for
    #[arg(short, long)]
    pub quiet: bool,
}

/// What a model's file does not say.
#[derive(Args)]
pub struct Source {
    /// Type of an input, where the file has none or another is wanted: x:f32[batch,3,224]
    #[arg(long = "input", value_name = "NAME:DTYPE[DIMS]", value_parser = input)]
    pub types: Vec<InputType>,
    /// Example inputs (npz or safetensors, under input names or `in.NAME`): where file and --input have no type of an
    /// input, it has that of its example
    #[arg(long = "inputs", value_name = "FILE")]
    pub examples: Option<PathBuf>,
    /// Names of all outputs in order, where the file has none [default: output_0,output_1,…]
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    pub output_names: Vec<String>,
}

impl Source {
    /// # Errors
    /// A file of examples that cannot be read.
    pub fn given(&self) -> ckpt_passes::Result<Given> {
        let examples = match &self.examples {
            Some(path) => feed::input_types(&tensors::read(path)?),
            None => Default::default(),
        };
        Ok(Given {
            inputs: self.types.clone(),
            examples,
            output_names: self.output_names.clone(),
        })
    }
}

#[derive(Args)]
pub struct Trained {
    /// Train only parameters whose name matches (`*` and `?` are wildcards; may be repeated)
    #[arg(long, value_name = "PATTERN")]
    pub trainable: Vec<String>,
    /// Do not train parameters whose name matches; wins over --trainable
    #[arg(long, value_name = "PATTERN")]
    pub freeze: Vec<String>,
}

impl Trained {
    pub fn selection(&self) -> Selection {
        Selection {
            trainable: self.trainable.clone(),
            freeze: self.freeze.clone(),
        }
    }
}

#[derive(Args)]
pub struct OptimizeArgs {
    /// The model: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text
    pub model: PathBuf,
    /// Where to write the training graph; a name that ends in .ckir gets text
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// none, full, selective, submodule, every:N, first:N or group:N (layers), or parts:WORD,… (parts of layers, as
    /// core-attn, mlp-act, norm), instead of a budget; or budget
    #[arg(long, value_parser = policy)]
    pub policy: Option<Chosen>,
    #[command(flatten)]
    pub budgeting: planning::Budgeting,
    #[command(flatten)]
    pub step: planning::Step,
    /// Refer to the model's external weight files instead of copying them; OUT must be in the same folder
    #[arg(long)]
    pub link_weights: bool,
    /// Run these passes instead of the usual ones
    #[arg(long, value_name = "PASS,PASS,…")]
    pub passes: Option<String>,
    /// Write the graph as text after every pass, into this folder
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    /// Stop after this pass (`simplify:2` is the second of that name); without -o the graph is printed as text
    #[arg(long, value_name = "PASS")]
    pub stop_after: Option<String>,
    #[command(flatten)]
    pub show: showing::Show,
    #[command(flatten)]
    pub report: Report,
}

impl OptimizeArgs {
    /// # Errors
    /// A plan, device or profile that cannot be read or is none.
    pub fn request(&self) -> ckpt_passes::Result<Request> {
        let mut request = Request {
            passes: self.passes.clone(),
            stop_after: self.stop_after.clone(),
            ..self.step.request()
        };
        self.budgeting.apply(self.policy, &mut request)?;
        Ok(request)
    }
}

#[derive(Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct InspectArgs {
    /// The model: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text
    pub model: PathBuf,
    #[command(flatten)]
    pub trained: Trained,
    #[command(flatten)]
    pub source: Source,
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct RunArgs {
    /// The graph to execute
    pub model: PathBuf,
    /// Tensors (npz or safetensors) under input names, `in.NAME`, or `cot.NAME` for the cotangent of an output; an
    /// initializer's name replaces that weight
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// Write all graph outputs here (npz; safetensors if the name ends so)
    #[arg(long, value_name = "FILE")]
    pub outputs: Option<PathBuf>,
    /// Where to run: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = place)]
    pub device: Place,
    /// What random ops draw from: counter (the hash in the written graph: the same bits everywhere), native (libtorch's
    /// generator, seeded for each node) or eager (seeded once and drawn from in turn, as a PyTorch model does)
    #[arg(long, value_name = "WORD", default_value = "counter", value_parser = rng)]
    pub rng: Rng,
    /// Kernels of attention: auto (on a CUDA device PyTorch's fused ones for the nodes whose meaning they have, chosen once
    /// for the sizes of the inputs and checked against ours; tiles elsewhere) or tiles
    #[arg(long, value_name = "WORD", default_value = "auto", value_parser = attention)]
    pub attention: Attention,
    /// Threads that one kernel may use [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// The folder for files of results that wait outside the device's memory [default: the system's for temporary files]
    #[arg(long, value_name = "DIR")]
    pub offload_dir: Option<PathBuf>,
    /// Whether transfers run beside what follows them, where the graph has room for it: on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = planning::switch, action = ArgAction::Set)]
    pub offload_streams: bool,
    /// Whether the host's memory in which results of a device wait is locked there, so that transfers are fast and run
    /// beside other nodes: on or off. Where it cannot be there is a warning. A run on the CPU has none
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = planning::switch, action = ArgAction::Set)]
    pub pin_memory: bool,
    /// Whether a CUDA device is sent a step as one graph, captured once for inputs of given sizes and then replayed: on or
    /// off. Where a step cannot be captured there is a warning, and it runs node by node. This has not been run on a device yet
    #[arg(long, value_name = "WORD", default_value = "off", value_parser = planning::switch, action = ArgAction::Set)]
    pub cuda_graphs: bool,
    /// How often to run; the reported time is the median. A graph with an optimizer trains: each step starts from what the
    /// last one left, and `step` goes up by one
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// Write a trace of one more step here, for chrome://tracing or Perfetto: each node's times, and the bytes alive
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Leave where each tensor lies to malloc
    #[arg(long)]
    pub no_arena: bool,
    /// Make inputs that no file gives from this seed
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Number for a named size, for inputs made from a seed
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim)]
    pub dims: Vec<(String, i64)>,
    #[command(flatten)]
    pub report: Report,
}

/// Two graphs, and on what they run.
#[derive(Args)]
pub struct PairArgs {
    /// What B is held against, right by definition: a forward graph, or a training graph without a plan
    pub a: PathBuf,
    /// The graph to look at; if only it has a backward, A is differentiated as B says it was
    pub b: PathBuf,
    /// Tensors to run on, as for `run` [default: random ones from --seed]
    #[arg(long, value_name = "FILE")]
    pub inputs: Option<PathBuf>,
    /// Seed of the inputs that no file gives
    #[arg(long, value_name = "N", default_value = "0")]
    pub seed: u64,
    /// Number for a named size of the random inputs
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim)]
    pub dims: Vec<(String, i64)>,
    /// Threads that one kernel may use [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Where to run: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = place)]
    pub device: Place,
    /// What random ops draw from: counter (the hash in the written graph: the same bits everywhere), native (libtorch's
    /// generator, seeded for each node) or eager (seeded once and drawn from in turn, as a PyTorch model does)
    #[arg(long, value_name = "WORD", default_value = "counter", value_parser = rng)]
    pub rng: Rng,
    /// Kernels of attention: auto (on a CUDA device PyTorch's fused ones for the nodes whose meaning they have, chosen once
    /// for the sizes of the inputs and checked against ours; tiles elsewhere) or tiles
    #[arg(long, value_name = "WORD", default_value = "auto", value_parser = attention)]
    pub attention: Attention,
}

#[cfg(feature = "torch")]
impl PairArgs {
    pub fn setting(&self) -> ckpt_opt::comparison::Setting {
        ckpt_opt::comparison::Setting {
            a: self.a.clone(),
            b: self.b.clone(),
            inputs: self.inputs.clone(),
            seed: self.seed,
            dims: self.dims.clone(),
            threads: self.threads,
            place: self.device,
            rng: self.rng,
            attention: self.attention,
        }
    }
}

#[derive(Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Relative tolerance [default: every bit must be equal, or all but rounding where one of two training graphs is fused]
    #[arg(long, value_name = "X", value_parser = tolerance)]
    pub rtol: Option<f64>,
    /// Absolute tolerance [default: as --rtol]
    #[arg(long, value_name = "X", value_parser = tolerance)]
    pub atol: Option<f64>,
    /// Write what was compared, and how it came out, as JSON
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    #[command(flatten)]
    pub report: Report,
}

/// An error of ours as one that the option parser can show.
pub(super) fn shown(e: Box<ckpt_passes::Error>) -> String {
    let mut text = e.message().to_string();
    for (label, note) in e.notes() {
        text.push_str(&format!("; {label}: {note}"));
    }
    text
}

fn input(text: &str) -> Result<InputType, String> {
    InputType::parse(text).map_err(shown)
}

fn loss(text: &str) -> Result<Loss, String> {
    Loss::parse(text).map_err(shown)
}

fn place(text: &str) -> Result<Place, String> {
    Place::parse(text).map_err(shown)
}

fn attention(text: &str) -> Result<Attention, String> {
    Attention::parse(text).map_err(shown)
}

fn rng(text: &str) -> Result<Rng, String> {
    Rng::parse(text).map_err(shown)
}

/// What decides: a rule, or a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Rule(Policy),
    /// The same as no policy: what --budget says.
    Budget,
}

fn policy(text: &str) -> Result<Chosen, String> {
    match text.trim().to_lowercase().as_str() {
        "budget" => Ok(Chosen::Budget),
        _ => Policy::parse(text)
            .map(Chosen::Rule)
            .map_err(|e| shown(e) + ", budget (see --budget)"),
    }
}

fn dim(text: &str) -> Result<(String, i64), String> {
    let (name, size) = text
        .split_once('=')
        .ok_or("expected NAME=N, such as batch=8")?;
    let size = size
        .trim()
        .parse()
        .map_err(|_| format!("`{size}` is not a whole number"))?;
    match name.trim() {
        "" => Err("the size has no name".into()),
        name => Ok((name.to_string(), size)),
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok(x),
        _ => Err("expected a number that is not negative".into()),
    }
}

/// Puts the verb in where it is left out: `ckpt-opt MODEL -o OUT`.
pub fn with_verb(mut args: Vec<std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let Some(first) = args.get(1) else {
        return args;
    };
    let word = first.to_string_lossy();
    let about_us = matches!(word.as_ref(), "-h" | "--help" | "-V" | "--version");
    if !about_us && !VERBS.contains(&word.as_ref()) {
        args.insert(1, "optimize".into());
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        let verbs: Vec<&str> = VERBS.iter().copied().filter(|v| *v != "help").collect();
        let listed: Vec<String> = Cli::command()
            .get_subcommands()
            .map(|c| c.get_name().to_string())
            .collect();
        assert_eq!(listed, verbs);
    }

    #[test]
    fn the_verb_may_be_left_out() {
        let fill = |words: &[&str]| {
            let args = std::iter::once("ckpt-opt")
                .chain(words.iter().copied())
                .map(Into::into)
                .collect();
            with_verb(args)
                .into_iter()
                .skip(1)
                .map(|w| w.into_string().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(fill(&["m.onnx", "-o", "t.onnx"])[0], "optimize");
        assert_eq!(fill(&["--policy", "full", "m.onnx"])[0], "optimize");
        assert_eq!(fill(&["inspect", "m.onnx"])[0], "inspect");
        assert_eq!(fill(&["--help"]), ["--help"]);
        assert!(fill(&[]).is_empty());
    }

    #[test]
    fn a_policy_or_a_budget() {
        assert_eq!(policy("Budget").unwrap(), Chosen::Budget);
        assert_eq!(policy("FULL").unwrap(), Chosen::Rule(Policy::Full));
        assert!(policy("ful").unwrap_err().contains(", budget (see"));
    }

    #[test]
    fn sizes_and_tolerances() {
        assert_eq!(dim("batch=8").unwrap(), ("batch".into(), 8));
        for wrong in ["batch", "=3", "batch=x", "batch=1.5"] {
            assert!(dim(wrong).is_err(), "{wrong}");
        }
        assert!(tolerance("-1").is_err() && tolerance("nan").is_err() && tolerance("1e-5").is_ok());
    }
}
