//! Options that say what the model is and what its training step computes.

use super::overrides::Overrides;
use super::parse::{by, dim, switch};
use super::ranks::Sharing;
use super::updates::Updates;
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::tensors::{self, feed};
use ckpt_passes::Result;
use ckpt_passes::analysis::params::Selection;
use ckpt_passes::analysis::tied_weights::TieRequest;
use ckpt_passes::compile::Request;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::rng_streams::RngStream;
use ckpt_passes::transform::sequence::parse_chunks;
use ckpt_passes::transform::tile::{Tile, Tiles};
use clap::{ArgAction, Args};
use std::path::PathBuf;

/// What a model's file does not say about its inputs and outputs.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct Source {
    /// Type of an input, where the file has none or another is wanted: x:f32[batch,3,224]
    #[arg(long = "input", value_name = "NAME:DTYPE[DIMS]", value_parser = by(InputType::parse))]
    pub types: Vec<InputType>,
    /// Example inputs (npz or safetensors, under input names or `in.NAME`). An input that has no type in the file and no
    /// --input takes the type of its example
    #[arg(long = "inputs", value_name = "FILE")]
    pub examples: Option<PathBuf>,
    /// Names of all outputs in order, where the file has none [default: output_0,output_1,…]
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    pub output_names: Vec<String>,
}

impl Source {
    /// # Errors
    /// A file of examples that cannot be read.
    pub fn given(&self) -> Result<Given> {
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

/// Which parameters are trained.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct Trained {
    /// Train only parameters whose name matches (`*` and `?` are wildcards; may be repeated)
    #[arg(long, value_name = "PATTERN")]
    pub trainable: Vec<String>,
    /// Do not train parameters whose name matches; wins over --trainable
    #[arg(long, value_name = "PATTERN")]
    pub freeze: Vec<String>,
    /// Add low-rank adapters to the linear layers that patterns name, and train only these, with what --trainable names:
    /// r=16,alpha=32,targets=*q_proj*,*v_proj*. Further settings: dropout=P, rslora=true, dtype=f32, seed=N
    #[arg(long, value_name = "KEY=VALUE,…", value_parser = by(Lora::parse))]
    pub lora: Option<Lora>,
    /// Train two initializers as one weight. They must hold the same values, or one the transpose of the other. Copies that
    /// an exporter wrote of a tied weight are found without this
    #[arg(long = "tie", value_name = "KEPT=COPY", value_parser = by(TieRequest::parse_pair))]
    pub pairs: Vec<(String, String)>,
    /// Train each copy of a tied weight by itself
    #[arg(long)]
    pub no_tie: bool,
}

impl Trained {
    pub fn selection(&self) -> Selection {
        Selection {
            trainable: self.trainable.clone(),
            freeze: self.freeze.clone(),
        }
    }

    pub fn ties(&self) -> TieRequest {
        TieRequest {
            leave: self.no_tie,
            pairs: self.pairs.clone(),
        }
    }
}

/// The training step of a model.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct Training {
    #[command(flatten)]
    pub source: Source,
    /// Number for a named size, for planning only; a written graph stays as dynamic as the model, and records the number
    /// as the default for `run` and `verify`
    #[arg(long = "dim", value_name = "NAME=N", value_parser = dim)]
    pub dims: Vec<(String, i64)>,
    /// causal-lm, cross-entropy, nll (of log-probabilities), mse, the NAME of a scalar output (output:NAME where it is one
    /// of these words) or vjp [default: the backward that the file has, else its only scalar output, else vjp]
    #[arg(long, value_parser = by(Loss::parse))]
    pub loss: Option<Loss>,
    #[command(flatten)]
    pub trained: Trained,
    /// Leave out forward outputs whose name matches, such as caches or logits
    #[arg(long = "drop-output", value_name = "PATTERN")]
    pub drop_outputs: Vec<String>,
    /// Take no gradient through the values, nodes or operands (NODE#K) that match, as `detach` does, which ONNX exports
    /// lose (may be repeated)
    #[arg(long = "stop-gradient", value_name = "PATTERN")]
    pub stop_gradients: Vec<String>,
    /// Give the random nodes that a pattern names (of nodes or modules) a seed of their own, the input rng_seed.NAME
    #[arg(long = "rng-stream", value_name = "NAME=PATTERN,…", value_parser = by(RngStream::parse))]
    pub rng_streams: Vec<RngStream>,
    /// Replace the ops of attentions, norms and activations by one op each: on or off
    #[arg(long, value_name = "WORD", default_value = "on", value_parser = switch, action = ArgAction::Set)]
    pub fuse: bool,
    /// Compute in chunks of tokens whatever pays off, the loss and chains of ops inside the model: auto or off, short for
    /// both options below
    #[arg(long, value_name = "WORD", default_value = "off", value_parser = ["off", "auto"], help_heading = "Chunking")]
    pub tile: String,
    /// Compute the head and the loss in chunks of tokens, so that logits never exist whole: off, auto (as many chunks as
    /// pay off within the budget; a fixed rule without one), required (auto, and an error where logits have to stay whole) or a
    /// number. Logits must not be an output (--drop-output) [default: that of --tile]
    #[arg(long, value_name = "N", value_parser = by(Tile::parse_loss), help_heading = "Chunking")]
    pub tile_loss: Option<(Tile, bool)>,
    /// Compute MLPs and other chains of ops on tokens in chunks of tokens, in the forward and the backward pass: off, auto
    /// (as many chunks as pay off within the budget; a fixed rule without one) or a number [default: that of --tile]
    #[arg(long, value_name = "N", value_parser = by(Tile::parse), help_heading = "Chunking")]
    pub tile_mlp: Option<Tile>,
    /// Run a causal model on N chunks of the sequence one after the other, each through all layers, so that only keys and
    /// values of all tokens exist at once: off or a number
    #[arg(long, value_name = "N", default_value = "off", value_parser = by(parse_chunks), help_heading = "Chunking")]
    pub tile_sequence: usize,
    #[command(flatten)]
    pub updates: Updates,
    #[command(flatten)]
    pub sharing: Sharing,
}

impl Training {
    pub fn request(&self) -> Request {
        let both = match self.tile.as_str() {
            "auto" => Tile::Auto,
            _ => Tile::Off,
        };
        let (loss, tile_required) = self.tile_loss.unwrap_or((both, false));
        Request {
            loss: self.loss.clone().unwrap_or_default(),
            selection: self.trained.selection(),
            ties: self.trained.ties(),
            lora: self.trained.lora.clone(),
            dims: self.dims.clone(),
            drop_outputs: self.drop_outputs.clone(),
            stop_gradients: self.stop_gradients.clone(),
            rng_streams: self.rng_streams.clone(),
            fuse: self.fuse,
            tile: Tiles {
                loss,
                mlp: self.tile_mlp.unwrap_or(both),
            },
            sequence_chunks: self.tile_sequence,
            tile_required,
            updates: self.updates.options(),
            mesh: self.sharing.mesh(),
            ..Request::default()
        }
    }
}

/// The training step of a model, and overrides of its plan.
#[derive(Args)]
pub struct Step {
    #[command(flatten)]
    pub training: Training,
    #[command(flatten)]
    pub overrides: Overrides,
}

impl Step {
    pub fn request(&self) -> Request {
        Request {
            overrides: self.overrides.0.clone(),
            ..self.training.request()
        }
    }
}
