//! Options of what shows a plan.

use super::planning::{Budgeting, Step};
use super::{Chosen, Report, policy};
use clap::Args;
use std::path::PathBuf;

pub const EXPLAIN_EXAMPLES: &str = "\
Examples:
  ckpt-opt explain model.onnx --dim batch=8 --effort first
  ckpt-opt explain model.onnx layer:1 --dim batch=8 --policy full
  ckpt-opt explain model.onnx '*mlp*' --dim batch=8 --policy selective --format json
  ckpt-opt explain train.onnx --dim batch=8
  ckpt-opt explain p.json";

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
    pub report: Report,
}
