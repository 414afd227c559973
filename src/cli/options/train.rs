//! Options of `train`.

use super::model::Step;
use super::parse::{by, count, not_negative, switch};
use super::plan::Goal;
use super::runtime::{Kernels, On};
use crate::cli::output::Console;
use ckpt_opt::train::schedule::{Shape, Span};
#[cfg(feature = "torch")]
use ckpt_passes::compile::Request;
#[cfg(feature = "torch")]
use ckpt_passes::transform::collectives::Mesh;
#[cfg(feature = "torch")]
use ckpt_passes::transform::optimizer::Optimizer;
#[cfg(feature = "torch")]
use ckpt_passes::{Error, Result};
use clap::{ArgAction, Args};
use std::path::PathBuf;

pub const TRAIN_EXAMPLES: &str = "\
Examples:
  ckpt-opt train model.onnx --loss causal-lm --data tokens.bin --budget 80% --out tuned
  ckpt-opt train model.onnx --loss causal-lm --data tokens.bin --budget 80% --out tuned --resume
  ckpt-opt train model.onnx --loss causal-lm --data tokens.bin --policy full --lr 1e-3 --out other

DIR gets model.safetensors (the weights under the framework's names), metrics.jsonl (one object for each step), report.html,
the event file of TensorBoard, and checkpoints/step-N. SIGINT and SIGTERM finish the step, save and exit with code 130;
a second one ends at once. Options of `plan` say what the step is and what it may take.";

/// Options of `train`.
#[derive(Args)]
#[command(next_help_heading = "Training")]
pub struct TrainArgs {
    /// The model: ONNX, TorchScript, `torch.export` (.pt2), or .ckir text; or a training graph with an optimizer
    pub model: PathBuf,
    /// Data: files or folders of shards. Text (.jsonl, .txt, .parquet) with --tokenizer, tokens (.bin, .npy), or tensors under
    /// input names (.npz, .safetensors, .arrow, .parquet). `-` reads JSON lines from stdin
    #[arg(long, value_name = "PATH", required = true, num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// The tokenizer.json for text
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// The learning rate, which the schedule multiplies
    #[arg(long, value_name = "X", default_value = "1e-4", value_parser = not_negative)]
    pub lr: f64,
    /// The folder of the run: weights, metrics and checkpoints
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Train for so many steps
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = count)]
    pub steps: Option<usize>,
    /// Train so many times on all data [default: 1]
    #[arg(long, value_name = "N", value_parser = count)]
    pub epochs: Option<usize>,
    /// Go on from the newest checkpoint of DIR, with the same bits as a run that was not interrupted
    #[arg(long)]
    pub resume: bool,
    /// The seed of the order of the data and of random ops
    #[arg(long, value_name = "N", default_value = "0")]
    pub seed: u64,
    /// The learning rate after the warm-up: constant, linear, cosine or wsd (warm-up, stable, decay), perhaps with settings:
    /// cosine:min=0.1, wsd:decay=10%,min=0
    #[arg(long, value_name = "NAME[:SETTINGS]", default_value = "constant", value_parser = by(Shape::parse))]
    pub schedule: Shape,
    /// Steps in which the learning rate rises from 0, or a share of all steps: 100, 5%
    #[arg(long, value_name = "N", default_value = "0", value_parser = by(Span::parse))]
    pub warmup: Span,
    /// The weight decay of the optimizer, instead of its default
    #[arg(long, value_name = "X", value_parser = not_negative)]
    pub weight_decay: Option<f64>,
    /// Data to evaluate on: loss and perplexity
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub eval_data: Vec<PathBuf>,
    /// Evaluate after each N steps [default: at the end]
    #[arg(long, value_name = "N", value_parser = count, requires = "eval_data")]
    pub eval_every: Option<usize>,
    /// Save a checkpoint after each N steps [default: a tenth of all]
    #[arg(long, value_name = "N", value_parser = count)]
    pub save_every: Option<usize>,
    /// Keep the newest N checkpoints
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    pub keep: usize,
    /// A Jinja template for chats, or a tokenizer_config.json with one [default: the one beside the tokenizer]
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub chat_template: Option<PathBuf>,
    /// Type of the tokens in a .bin file: u16 or u32
    #[arg(long, value_name = "TYPE", default_value = "u16", value_parser = ["u16", "u32"], help_heading = "Data")]
    pub token_type: String,
    /// How documents become examples: pack (one after the other) or pad (each by itself)
    #[arg(long, value_name = "WORD", default_value = "pack", value_parser = ["pack", "pad"], help_heading = "Data")]
    pub packing: String,
    /// The field or column that holds text
    #[arg(
        long,
        value_name = "NAME",
        default_value = "text",
        help_heading = "Data"
    )]
    pub text_column: String,
    /// Read examples in another order in each epoch: on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set,
          help_heading = "Data")]
    pub shuffle: bool,
    /// Leave out the last batch of an epoch if it is short
    #[arg(long, help_heading = "Data")]
    pub drop_last: bool,
    /// Start N processes on this machine that train together, each on its share of every batch. Under torchrun the processes
    /// are there already
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Several devices")]
    pub ranks: Option<usize>,
    /// How long to wait for another rank before this one gives up, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = not_negative, help_heading = "Several devices")]
    pub rank_timeout: f64,
    /// Write a trace of the run, for chrome://tracing or Perfetto: what each step waited for
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    /// Write to DIR/ort-training, too, what ONNX Runtime's on-device training loads. The optimizer must be AdamW
    #[arg(long, value_name = "FORM", value_parser = ["ort-training"], help_heading = "Output")]
    pub export: Option<String>,
    #[command(flatten)]
    pub goal: Goal,
    #[command(flatten)]
    pub step: Step,
    #[command(flatten)]
    pub on: On,
    #[command(flatten)]
    pub kernels: Kernels,
    /// Directory for offloaded tensors [default: the system's for temporary files]
    #[arg(long, value_name = "DIR", help_heading = "Offloading")]
    pub offload_dir: Option<PathBuf>,
    #[command(flatten)]
    pub console: Console,
}

#[cfg(feature = "torch")]
impl TrainArgs {
    /// Returns what to compile, for a number of ranks, with the weight decay that is given.
    ///
    /// # Errors
    /// See [`Goal::apply`]; a mesh of another number of ranks; a weight decay that the optimizer does not take.
    pub fn request(&self, ranks: u32) -> Result<Request> {
        let mut request = self.step.request();
        let sharing = &self.step.training.sharing;
        if let Some(meant) = sharing
            .mesh
            .map(|mesh| mesh.ranks())
            .filter(|n| *n != ranks)
        {
            return Err(Error::usage(
                "mesh",
                "the mesh is of another number of ranks than those that run",
            )
            .expected(format!("{meant} ranks"))
            .found(format!("{ranks}"))
            .help(format!("start them with --ranks {meant} or torchrun")));
        }
        request.mesh = sharing.of(sharing.mesh.unwrap_or(Mesh {
            dp: ranks,
            ..Mesh::default()
        }));
        self.goal.apply(&mut request)?;
        if let Some(decay) = self.weight_decay {
            let optimizer = request.updates.optimizer.get_or_insert(Optimizer::ADAMW);
            *optimizer = with_weight_decay(optimizer, decay)?;
        }
        Ok(request)
    }
}

/// Returns an optimizer with another weight decay.
#[cfg(feature = "torch")]
fn with_weight_decay(optimizer: &Optimizer, decay: f64) -> Result<Optimizer> {
    const KEY: &str = "weight_decay=";
    let text = optimizer.to_string();
    let (name, settings) = text.split_once(':').unwrap_or((&text, ""));
    let other = settings
        .split(',')
        .filter(|s| !s.is_empty() && !s.starts_with(KEY));
    let own = format!("{KEY}{decay}");
    let settings: Vec<&str> = other.chain([own.as_str()]).collect();
    let parsed = Optimizer::parse(&format!("{name}:{}", settings.join(",")));
    parsed.map_err(|e| Error::usage("weight-decay", e.message()))
}

#[cfg(all(test, feature = "torch"))]
mod tests {
    use super::*;

    #[test]
    fn the_weight_decay_is_set() {
        for (optimizer, wanted) in [
            ("adamw", "adamw:weight_decay=0.5"),
            (
                "sgd:weight_decay=0.1,momentum=0.9",
                "sgd:momentum=0.9,weight_decay=0.5",
            ),
        ] {
            let optimizer = Optimizer::parse(optimizer).unwrap();
            let found = with_weight_decay(&optimizer, 0.5).unwrap();
            assert_eq!(found, Optimizer::parse(wanted).unwrap());
        }
    }
}
