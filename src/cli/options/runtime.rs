//! Options of the commands that execute graphs.

use super::model::Training;
use super::parse::{by, bytes_in, count, dim, not_negative, rank, switch};
use crate::cli::output::Console;
use ckpt_opt::attention::Attention;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use clap::{ArgAction, Args};
use std::path::PathBuf;

/// Where graphs run.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub struct On {
    /// Where to run: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = by(Place::parse))]
    pub device: Place,
    /// Threads that one kernel may use [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

/// Which kernels run attention.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub struct Kernels {
    /// Kernels of attention: auto (on a CUDA device PyTorch's fused kernels where they compute the same, chosen once for the
    /// sizes of the inputs and checked against ours; tiles elsewhere) or tiles
    #[arg(long, value_name = "WORD", default_value = "auto", value_parser = by(Attention::parse))]
    pub attention: Attention,
}

/// What a graph runs on and how.
#[derive(Args)]
#[command(next_help_heading = "Execution")]
pub struct Execution {
    #[command(flatten)]
    pub on: On,
    /// Source of random numbers: counter (the hash in the written graph: the same bits everywhere), native (libtorch's
    /// generator, seeded for each node) or eager (seeded once and drawn from in turn, as a PyTorch model does)
    #[arg(long, value_name = "WORD", default_value = "counter", value_parser = by(Rng::parse))]
    pub rng: Rng,
    #[command(flatten)]
    pub kernels: Kernels,
    /// On a CUDA device, compute elementwise ops, rotary positions and RMS norms with generated kernels, one for each chain of
    /// such ops: on or off. Needs NVRTC. No effect on the CPU. Not yet run on a device
    #[arg(long, value_name = "WORD", default_value = "off", value_parser = switch, action = ArgAction::Set)]
    pub fused_kernels: bool,
    /// Number for a named size, for inputs made from a seed [default: the size that the graph was planned for, else 1 for
    /// batches and 128 for sequences, or less where a table of the model is shorter]
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim, help_heading = "Inputs")]
    pub dims: Vec<(String, i64)>,
    /// Tensors (npz or safetensors) under input names, `in.NAME`, or `cot.NAME` for the cotangent of an output; an
    /// initializer's name replaces that weight
    #[arg(long, value_name = "FILE", help_heading = "Inputs")]
    pub inputs: Option<PathBuf>,
}

pub const RUN_EXAMPLES: &str = "\
Examples:
  ckpt-opt run train.onnx --inputs case.npz --outputs grads.npz
  ckpt-opt run train.onnx --inputs case.npz --threads 1 --format json";

/// Options of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// The graph to execute
    pub model: PathBuf,
    /// Make inputs that no file gives from this seed
    #[arg(long, value_name = "N", help_heading = "Inputs")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub execution: Execution,
    /// How often to run; the reported time is the median. A graph with an optimizer trains: each step starts from what the
    /// last one left, and `step` goes up by one
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..),
          help_heading = "Execution")]
    pub steps: u32,
    /// Play one rank of a graph for N, numbered from 0: what it would receive from others is what it sends. The memory is that
    /// among others, the values are not
    #[arg(long, value_name = "RANK/N", value_parser = rank, help_heading = "Execution")]
    pub rank: Option<(usize, usize)>,
    /// Steps before those, which are not timed and leave no state: the first one has costs of its own
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        help_heading = "Execution"
    )]
    pub warm_up: u32,
    /// End with exit code 4 at the first step whose loss or gradients hold NaN or an infinity (all outputs, for a graph
    /// without a backward pass). Without it there is a warning
    #[arg(long, help_heading = "Execution")]
    pub check_finite: bool,
    /// Place tensors at planned offsets of one block: on or off (each tensor comes from malloc)
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set,
          help_heading = "Execution")]
    pub arena: bool,
    /// Send a step to a CUDA device as one graph, captured once for inputs of given sizes and then replayed: on or off. Where
    /// a step cannot be captured there is a warning, and it runs node by node. This has not been run on a device yet
    #[arg(long, value_name = "WORD", default_value = "off", value_parser = switch, action = ArgAction::Set,
          help_heading = "Execution")]
    pub cuda_graphs: bool,
    /// Directory for offloaded tensors [default: the system's for temporary files]
    #[arg(long, value_name = "DIR", help_heading = "Offloading")]
    pub offload_dir: Option<PathBuf>,
    /// Run transfers beside the nodes that follow, where the graph has room for it: on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set,
          help_heading = "Offloading")]
    pub async_transfers: bool,
    /// Lock the host's memory that offloaded tensors of a device go to, so that transfers are fast and run beside other nodes:
    /// on or off. Where it cannot be locked there is a warning. A run on the CPU locks nothing
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set,
          help_heading = "Offloading")]
    pub pin_memory: bool,
    /// Write all graph outputs to this file (npz; safetensors if the name ends so)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub outputs: Option<PathBuf>,
    /// Write gradients, updated weights and optimizer states under the framework's names of the parameters and in its
    /// layout: fc.weight.grad, not val_39.grad, which is transposed
    #[arg(long, requires = "outputs", help_heading = "Output")]
    pub framework_names: bool,
    /// Write a trace of one more step, for chrome://tracing or Perfetto: each node's times, and the bytes alive
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub console: Console,
}

/// Two graphs to compare, and how they run.
#[derive(Args)]
pub struct PairArgs {
    /// The reference: a forward graph, or a training graph without a plan
    pub a: PathBuf,
    /// The graph to compare with it; if only it has a backward, A is differentiated as B's record says
    pub b: PathBuf,
    /// Seed of the inputs that no file gives
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Inputs")]
    pub seed: u64,
    #[command(flatten)]
    pub execution: Execution,
}

#[cfg(feature = "torch")]
impl PairArgs {
    pub fn request(&self) -> ckpt_opt::comparison::PairRequest {
        let run = &self.execution;
        ckpt_opt::comparison::PairRequest {
            a: self.a.clone(),
            b: self.b.clone(),
            inputs: run.inputs.clone(),
            seed: self.seed,
            dims: run.dims.clone(),
            threads: run.on.threads,
            place: run.on.device,
            rng: run.rng,
            attention: run.kernels.attention,
            fused_kernels: run.fused_kernels,
        }
    }
}

pub const VERIFY_EXAMPLES: &str = "\
Examples:
  ckpt-opt verify model.onnx train.onnx
  ckpt-opt verify model.onnx train.onnx --inputs case.npz --certificate proof.json";

/// Options of `verify`.
#[derive(Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Relative tolerance [default: every bit must be equal; where one of two training graphs is fused, all but rounding]
    #[arg(long, value_name = "X", value_parser = not_negative)]
    pub rtol: Option<f64>,
    /// Absolute tolerance [default: as --rtol]
    #[arg(long, value_name = "X", value_parser = not_negative)]
    pub atol: Option<f64>,
    /// Write what was compared, and the result, as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub certificate: Option<PathBuf>,
    #[command(flatten)]
    pub console: Console,
}

/// How to measure.
#[derive(Args)]
pub struct Measuring {
    #[command(flatten)]
    pub on: On,
    /// How often to measure; times are medians
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..),
          help_heading = "Execution")]
    pub runs: u32,
}

pub const CALIBRATE_EXAMPLES: &str = "\
Examples:
  ckpt-opt calibrate -o device.json --max-rows 512 --vector-bytes 4194304
  ckpt-opt plan model.onnx --dim batch=4 --policy full --device-profile device.json

The file is a device profile: edit it, or write one by hand.";

/// Options of `calibrate`.
#[derive(Args)]
pub struct CalibrateArgs {
    #[command(flatten)]
    pub measuring: Measuring,
    /// Name of the device [default: its own]
    #[arg(long)]
    pub name: Option<String>,
    /// Time products of matrices of at most so many rows
    #[arg(long, value_name = "N", default_value = "8192", value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub max_rows: u64,
    /// Bytes of the vector whose sum shows the bandwidth, such as 64MiB; three of them should be more than any cache holds
    #[arg(long, value_name = "B", default_value = "64MiB", value_parser = bytes_in(4..=1 << 36))]
    pub vector_bytes: u64,
    /// Measure the link between N processes on this machine as well: latency and bandwidth of each collective. Under torchrun the
    /// processes are there already
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Several devices")]
    pub ranks: Option<usize>,
    /// Write the device profile, as --device-profile reads it
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: PathBuf,
    #[command(flatten)]
    pub console: Console,
}

pub const PROFILE_EXAMPLES: &str = "\
Examples:
  ckpt-opt profile model.onnx --dim batch=4 -o times.json
  ckpt-opt plan model.onnx --dim batch=4 --policy full --profile times.json

Times are valid for the sizes they were measured at; planning with others is refused. A planned training graph is measured
with its copies: use one where the unplanned step does not fit into memory.";

/// Options of `profile`.
#[derive(Args)]
pub struct ProfileArgs {
    /// The model (ONNX, TorchScript, torch.export or .ckir), with or without its backward
    pub model: PathBuf,
    #[command(flatten)]
    pub training: Training,
    #[command(flatten)]
    pub measuring: Measuring,
    #[command(flatten)]
    pub kernels: Kernels,
    /// Runs before the first that counts
    #[arg(
        long,
        value_name = "N",
        default_value = "2",
        help_heading = "Execution"
    )]
    pub warm_up: u32,
    /// Seed of the inputs that --inputs does not give
    #[arg(
        long,
        value_name = "N",
        default_value = "0",
        help_heading = "Execution"
    )]
    pub seed: u64,
    /// Write the times, as --profile reads them
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub console: Console,
}

pub const OVERHEAD_EXAMPLES: &str = "\
Examples:
  ckpt-opt overhead model.onnx train.onnx --dim batch=2 --dim seq=16 --seconds 1

Both graphs are in memory at once. Where the machine does other work too, measure for longer: the interval shows how well
the overhead is known. `plan` prints the predicted overhead.";

/// Options of `overhead`.
#[derive(Args)]
pub struct OverheadArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Start no more pairs of steps after so many seconds; at least six pairs are measured
    #[arg(long, value_name = "S", default_value = "60")]
    pub seconds: u32,
    #[command(flatten)]
    pub console: Console,
}
