//! Options that share a training step among processes.

use super::parse::by;
use ckpt_passes::plan::budget::parse_bytes;
use ckpt_passes::transform::collectives::{BUCKET, Mesh, Shard};
use clap::Args;

/// How processes ("ranks") share a training step.
#[derive(Args)]
#[command(next_help_heading = "Several devices")]
pub struct Sharing {
    /// Share the step among ranks: N that train on different examples (dp=N), N that each have a part of the attentions and
    /// MLPs (tp=N), or both (dp=N,tp=M). A size such as --dim batch=B is that of the examples of one rank
    #[arg(long, value_name = "MESH", value_parser = by(Mesh::parse))]
    pub mesh: Option<Mesh>,
    /// With tp=N, have each rank compute its share of the tokens between the attentions and MLPs as well: results there take 1/N of
    /// the memory, and as many bytes are exchanged
    #[arg(long, requires = "mesh")]
    pub sequence_parallel: bool,
    /// What each rank keeps a slice of, instead of the whole: none, optimizer (its states), grads (gradients as well), params
    /// (parameters as well)
    #[arg(long, value_name = "WORD", default_value = "none", value_parser = by(Shard::parse))]
    pub shard: Shard,
    /// Bytes of gradients that are exchanged together while the backward pass goes on: about two buckets of them are alive at
    /// once. 0 sums each gradient before the next node runs
    #[arg(long, value_name = "BYTES", default_value = BUCKET, value_parser = by(parse_bytes))]
    pub bucket: u64,
}

impl Sharing {
    /// Returns the ranks that share a step; `None` for one process.
    pub fn mesh(&self) -> Option<Mesh> {
        let slices = self.shard != Shard::None;
        match self.mesh {
            Some(mesh) => self.of(mesh),
            // [`Mesh::check`] refuses slices without ranks.
            None => slices.then_some(Mesh {
                shard: self.shard,
                ..Mesh::default()
            }),
        }
    }

    /// As [`Sharing::mesh`], for the ranks of a mesh.
    pub fn of(&self, mesh: Mesh) -> Option<Mesh> {
        // One rank shares nothing; [`Mesh::check`] refuses that.
        (mesh.ranks() > 1 || self.sequence_parallel).then_some(Mesh {
            shares_rows: self.sequence_parallel,
            shard: self.shard,
            bucket_bytes: self.bucket,
            ..mesh
        })
    }
}
