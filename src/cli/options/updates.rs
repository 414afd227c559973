//! Options of the optimizer in the graph.

use super::parse::by;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use clap::Args;

/// What updates the parameters in the graph, and how.
#[derive(Args)]
#[command(next_help_heading = "Optimizer")]
pub struct Updates {
    /// Update the parameters in the graph: sgd, adamw, adamw8bit, lion, adafactor or muon, perhaps with settings as in
    /// PyTorch (sgd:momentum=0.9,weight_decay=0.01; adamw:beta2=0.95). New inputs are lr, step and the state, new outputs
    /// <parameter>.updated and <state>.updated
    #[arg(long, value_name = "NAME[:SETTINGS]", value_parser = by(Optimizer::parse))]
    pub optimizer: Option<Optimizer>,
    /// Run each update as soon as its gradient is complete, so that gradients never all live at once. Gradients are no
    /// outputs then
    #[arg(long)]
    pub fuse_optimizer: bool,
    /// Leave parameters whose name matches out of weight decay (may be repeated)
    #[arg(long = "no-decay", value_name = "PATTERN")]
    pub no_decay: Vec<String>,
    /// Leave norms and biases out of weight decay: parameters of rank 0 and 1
    #[arg(long)]
    pub no_decay_vectors: bool,
    /// Scale gradients down so that the norm of all of them together is at most this, as
    /// torch.nn.utils.clip_grad_norm_ does. New output: grad_norm
    #[arg(long, value_name = "NORM", value_parser = by(UpdateOptions::parse_clip))]
    pub clip: Option<f32>,
    /// Update by the mean gradient of N micro-batches. New input: apply, true for the last of them; a state for each
    /// parameter holds the sum. Gradients are no outputs then
    #[arg(long, value_name = "N", value_parser = by(UpdateOptions::parse_accumulate))]
    pub accumulate: Option<u32>,
    /// Start the backward pass from the input loss_scale, and divide gradients by it before updates. A step whose
    /// gradients are not finite updates nothing. New output: found_inf
    #[arg(long)]
    pub loss_scale: bool,
    /// Keep a float32 master of each 16-bit parameter, and states in float32; the parameter is the rounded master
    #[arg(long)]
    pub master_weights: bool,
    /// Update bfloat16 parameters in float32, with states in float32, and round the result to one of its two neighbours
    /// by chance, so that the mean is right. The new input rng_seed decides the draws. Instead of --master-weights
    #[arg(long, conflicts_with = "master_weights")]
    pub stochastic_rounding: bool,
}

impl Updates {
    pub fn options(&self) -> UpdateOptions {
        UpdateOptions {
            optimizer: self.optimizer,
            fuse: self.fuse_optimizer,
            no_decay: self.no_decay.clone(),
            no_decay_vectors: self.no_decay_vectors,
            clip: self.clip,
            accumulate: self.accumulate,
            loss_scale: self.loss_scale,
            master_weights: self.master_weights,
            stochastic_rounding: self.stochastic_rounding,
        }
    }
}
