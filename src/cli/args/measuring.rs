//! Options of the verbs that measure: what plans are priced with, and what a plan costs.

use super::planning::Training;
use super::{PairArgs, Report, attention, place};
use ckpt_opt::attention::Attention;
use ckpt_opt::place::Place;
use clap::Args;
use std::path::PathBuf;

pub const CALIBRATE_EXAMPLES: &str = "\
Examples:
  ckpt-opt calibrate -o device.json --max-rows 512 --vector-bytes 4194304
  ckpt-opt plan model.onnx --dim batch=4 --policy full --device-profile device.json

The file is a device profile: edit it, or write one by hand.";

pub const PROFILE_EXAMPLES: &str = "\
Examples:
  ckpt-opt profile model.onnx --dim batch=4 -o times.json
  ckpt-opt plan model.onnx --dim batch=4 --policy full --profile times.json

Times are good for the sizes they were measured at; planning with others is refused. A file that was written under a plan
is measured with its copies: use one where the unplanned step does not fit into memory.";

pub const OVERHEAD_EXAMPLES: &str = "\
Examples:
  ckpt-opt overhead model.onnx train.onnx --dim batch=2 --dim seq=16 --seconds 1

Both graphs are in memory at once. Where the machine does other work too, measure for longer: the interval says how well
the overhead is known. `plan` says what was predicted.";

/// Where and how to measure.
#[derive(Args)]
pub struct Measuring {
    /// Where to measure: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = place)]
    pub device: Place,
    /// Threads that one kernel may use [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// How often to measure; times are medians
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
}

#[derive(Args)]
pub struct CalibrateArgs {
    /// Write the device profile, as --device-profile reads it
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    #[command(flatten)]
    pub measuring: Measuring,
    /// What to call the device [default: what it calls itself]
    #[arg(long)]
    pub name: Option<String>,
    /// Time products of matrices of at most so many rows
    #[arg(long, value_name = "N", default_value = "8192", value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub max_rows: u64,
    /// Bytes of a vector whose sum shows the bandwidth; three of them should be more than any cache holds
    #[arg(long, value_name = "N", default_value = "67108864", value_parser = clap::value_parser!(u64).range(4..=1 << 36))]
    pub vector_bytes: u64,
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct ProfileArgs {
    /// The model (ONNX, .ckir), with or without its backward
    pub model: PathBuf,
    /// Write the times, as --profile reads them
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub measuring: Measuring,
    /// Runs before the first that counts
    #[arg(long, value_name = "N", default_value = "2")]
    pub warm_up: u32,
    /// Seed of the inputs that --inputs does not give
    #[arg(long, value_name = "N", default_value = "0")]
    pub seed: u64,
    /// Kernels of attention, as for `run`: auto or tiles
    #[arg(long, value_name = "WORD", default_value = "auto", value_parser = attention)]
    pub attention: Attention,
    #[command(flatten)]
    pub training: Training,
    #[command(flatten)]
    pub report: Report,
}

#[derive(Args)]
pub struct OverheadArgs {
    #[command(flatten)]
    pub pair: PairArgs,
    /// Begin no more pairs of steps after so many seconds; six pairs are measured at least
    #[arg(long, value_name = "S", default_value = "60")]
    pub seconds: u32,
    #[command(flatten)]
    pub report: Report,
}
