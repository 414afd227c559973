//! Options that share a training step among processes.

use super::parse::by;
use ckpt_passes::transform::collectives::{Mesh, Shard};
use clap::Args;

/// How processes ("ranks") share a training step.
#[derive(Args)]
#[command(next_help_heading = "Several devices")]
pub struct Sharing {
    /// Share the step among N ranks that train on different examples: dp=N. The graph sums gradients and the loss over
    /// them, and a size such as --dim batch=B is that of one rank
    #[arg(long, value_name = "dp=N", value_parser = by(Mesh::parse))]
    pub mesh: Option<u32>,
    /// What each rank keeps a slice of, instead of the whole: none, optimizer (its states), grads (gradients as well)
    #[arg(long, value_name = "WORD", default_value = "none", value_parser = by(Shard::parse))]
    pub shard: Shard,
}

impl Sharing {
    /// Returns the ranks that share a step; `None` for one process.
    pub fn mesh(&self) -> Option<Mesh> {
        self.of(self.mesh?)
    }

    /// As [`Sharing::mesh`], for a number of ranks.
    pub fn of(&self, ranks: u32) -> Option<Mesh> {
        let shard = self.shard;
        (ranks > 1).then_some(Mesh { ranks, shard })
    }
}
