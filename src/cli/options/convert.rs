//! Options of `convert`.

use super::model::Source;
use super::parse::by;
use crate::cli::output::Console;
use ckpt_opt::export::Target;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::optimizer::Optimizer;
use clap::Args;
use std::path::PathBuf;

pub const CONVERT_EXAMPLES: &str = "\
Examples:
  ckpt-opt convert model.onnx --to safetensors -o tuned.safetensors
  ckpt-opt convert model.onnx tuned.safetensors --to onnx -o tuned.onnx

WEIGHTS may be a folder that PEFT wrote: `convert model.onnx adapter/ --to onnx -o merged.onnx`. Adapters in a file of tensors need
--lora as in training: `--lora 'r=4,alpha=8,targets=*q_proj*' --to peft -o adapter/`.";

/// Options of `convert`.
#[derive(Args)]
pub struct ConvertArgs {
    /// The model that was trained, or for ort-training a training graph without an optimizer: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text
    pub model: PathBuf,
    /// What training left: a safetensors or npz file, under names of the framework or of initializers, a checkpoint folder, or a
    /// PEFT adapter [default: the model's own weights]
    pub weights: Option<PathBuf>,
    /// What to write: safetensors (all parameters, under the framework's names and in its layout), onnx (the model with new
    /// weights), peft (a folder with the adapters) or ort-training (of a training graph, the folder that ONNX Runtime's on-device
    /// training loads). The first two merge adapters
    #[arg(long, value_name = "FORM", value_parser = by(Target::parse))]
    pub to: Target,
    /// The file to write; for peft and ort-training, the folder
    #[arg(short, long, value_name = "OUT", help_heading = "Output")]
    pub output: PathBuf,
    /// How the adapters were added, as in training, where WEIGHTS does not tell
    #[arg(long, value_name = "KEY=VALUE,…", value_parser = by(Lora::parse))]
    pub lora: Option<Lora>,
    /// Settings of AdamW for ort-training [default: adamw]
    #[arg(long, value_name = "NAME[:SETTINGS]", value_parser = by(Optimizer::parse))]
    pub optimizer: Option<Optimizer>,
    #[command(flatten)]
    pub source: Source,
    #[command(flatten)]
    pub console: Console,
}
