//! The other ranks of a training run, as the loop sees them: one rank leads and writes what all share.

use super::checkpoint::Manifest;
use crate::place::Place;
use crate::provenance::keys;
use crate::runtime::ranks::{self, Coordinates, DATA_PARALLEL, Group, RankOptions, Ranks};
use ckpt_passes::ir::Graph;
use ckpt_passes::transform::collectives::has_collectives;
use ckpt_passes::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The group of all ranks, where they are of several others.
const ALL: &str = "all";

/// The memory of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPeak {
    /// The number of the rank, from 0.
    pub rank: u64,
    /// The largest measured peak.
    pub peak_bytes: u64,
    /// The largest predicted one.
    pub predicted_peak_bytes: u64,
    /// Bytes of the buffers of exchanges, beside the peak.
    pub exchange_bytes: u64,
}

/// All ranks, this one included.
pub(super) struct Peers {
    pub ranks: Arc<Ranks>,
    /// The place of this rank.
    pub at: Coordinates,
    /// All ranks; made once they agree on what they run.
    group: Option<Group>,
}

impl Peers {
    /// Meets the others, which train the same graph.
    ///
    /// # Errors
    /// A graph that ranks do not share; a device without NCCL; ranks that do not come.
    pub fn join(options: &RankOptions, place: Place, graph: &Graph) -> Result<Peers> {
        // A model's own collectives are no gradients' sums.
        if !has_collectives(graph) || !graph.meta.contains_key(keys::MESH) {
            return Err(Error::usage(
                "ranks",
                "several ranks train, and the graph is for one process: each would train by itself",
            )
            .found(format!("{} ranks", options.ranks))
            .help("give the model, or write the training graph with --mesh"));
        }
        Ok(Peers {
            at: Coordinates::of(graph, (options.rank, options.ranks))?,
            ranks: Arc::new(Ranks::join(options, place)?),
            group: None,
        })
    }

    /// Whether this rank writes what all share.
    pub fn leads(&self) -> bool {
        self.ranks.rank == 0
    }

    /// Which of how many shares of a batch is this rank's.
    pub fn share(&self) -> (u64, u64) {
        (self.at.dp.0 as u64, self.at.dp.1 as u64)
    }

    /// Compares what all ranks must have in common, before any of them runs a step, and makes their group.
    ///
    /// # Errors
    /// A rank that has something else, or does not come in time.
    pub fn agree(&mut self, manifest: &Manifest) -> Result<()> {
        let facts = [
            ("version of ckpt-opt", &manifest.version),
            ("model", &manifest.model),
            ("plan", &manifest.plan),
            ("data", &manifest.data),
            ("settings", &manifest.settings),
            ("seed", &manifest.seed.to_string()),
            ("first step", &manifest.step.to_string()),
        ];
        // At once, because every exchange of texts takes milliseconds.
        let facts = facts.map(|(what, text)| (what, text.as_str()));
        self.ranks.agree_on("first facts", &facts)?;
        self.group = Some(match self.at.tp.1 {
            1 => self.ranks.open(DATA_PARALLEL)?,
            _ => {
                self.ranks.open_mesh(&self.at)?;
                self.ranks.open(ALL)?
            }
        });
        Ok(())
    }

    /// Returns the sum of a number of each share of a batch.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn sum(&self, number: u64) -> Result<u64> {
        Ok(self.all(number)? / self.at.tp.1 as u64)
    }

    /// Returns whether something is so on any rank.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn any(&self, is_so: bool) -> Result<bool> {
        Ok(self.all(is_so.into())? > 0)
    }

    /// Returns the sum of a number of each rank.
    fn all(&self, number: u64) -> Result<u64> {
        match &self.group {
            Some(group) => group.sum(number),
            None => Err(Error::bug("ranks", "the ranks have not agreed yet")),
        }
    }

    /// Waits until all ranks are done. Returns the memory that each of them took.
    ///
    /// # Errors
    /// Another rank is gone or too late.
    pub fn finish(&self, peak_bytes: u64, predicted_peak_bytes: u64) -> Result<Vec<RankPeak>> {
        let own = RankPeak {
            rank: self.ranks.rank as u64,
            peak_bytes,
            predicted_peak_bytes,
            exchange_bytes: ranks::exchange_bytes(),
        };
        let failed = |e: serde_json::Error| Error::bug("ranks", e.to_string());
        self.ranks
            .tell("peak", &serde_json::to_string(&own).map_err(failed)?)?;
        let all = (0..self.ranks.ranks).map(|rank| {
            let text = self.ranks.hear("peak", rank)?;
            serde_json::from_str(&text).map_err(failed)
        });
        let all = all.collect::<Result<_>>()?;
        self.ranks.agree("end of the run", "")?;
        Ok(all)
    }
}
