//! Options of what shows a plan.

use super::planning::{Budgeting, Step};
use super::{Chosen, Report, policy};
use ckpt_opt::report::files::Target;
use clap::Args;
use std::path::PathBuf;

pub const EXPLAIN_EXAMPLES: &str = "\
Examples:
  ckpt-opt explain model.onnx --dim batch=8 --effort first
  ckpt-opt explain model.onnx layer:1 --dim batch=8 --policy full
  ckpt-opt explain model.onnx '*mlp*' --dim batch=8 --policy selective --format json
  ckpt-opt explain train.onnx --dim batch=8
  ckpt-opt explain model.onnx --policy full --dim batch=8 --report plan.html
  ckpt-opt explain model.onnx --policy full --dim batch=8 --report plan.trace.json
  ckpt-opt explain p.json";

/// Files that show a plan.
#[derive(Args)]
pub struct Show {
    /// Show the plan in a file; its name says for whom: .html (one page for a browser), .trace.json (Perfetto), .pickle
    /// (torch.cuda._memory_viz), .overlay.json (Model Explorer), .dot (Graphviz, layers) or .json. May be repeated
    #[arg(long = "report", value_name = "FILE")]
    pub files: Vec<Target>,
}

#[derive(Args)]
pub struct ExplainArgs {
    /// A model (planned as the options say), a planned training graph (explained as it is), a cost graph, or a plan that
    /// --plan-out wrote
    pub source: PathBuf,
    /// What to explain: `layer:N`, a value, a node, a module's path, or a pattern of these [default: everything]
    pub name: Option<String>,
    /// none, full, selective, submodule, every:N, first:N or group:N (layers), instead of a budget
    #[arg(long, value_parser = policy)]
    pub policy: Option<Chosen>,
    #[command(flatten)]
    pub budgeting: Budgeting,
    #[command(flatten)]
    pub step: Step,
    #[command(flatten)]
    pub show: Show,
    #[command(flatten)]
    pub report: Report,
}
