//! What a plan within a budget minimises.

use super::schedule::Score;
use ckpt_error::{Error, Result};

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// The sum of op costs.
    #[default]
    Cost,
    /// FLOPs; between plans with equal FLOPs, bytes read and written (their total weighs 1e-4 of all FLOPs). A problem
    /// without FLOPs is planned by cost.
    Flops,
}

impl Objective {
    /// Returns the objective's word.
    pub fn word(self) -> &'static str {
        match self {
            Objective::Cost => "cost",
            Objective::Flops => "flops",
        }
    }

    /// Reads an objective.
    ///
    /// # Errors
    /// `error[objective]` for any other word.
    pub fn parse(text: &str) -> Result<Objective> {
        let all = [Objective::Cost, Objective::Flops];
        all.into_iter().find(|o| o.word() == text).ok_or_else(|| {
            Error::usage("objective", format!("there is no objective `{text}`"))
                .expected("cost or flops")
        })
    }

    /// Returns what a schedule with this score costs, in the objective's unit.
    pub fn of(self, score: &Score) -> f64 {
        match self {
            Objective::Cost => score.cost,
            Objective::Flops => score.flops as f64,
        }
    }

    /// Returns what a score costs more than another, in percent of the other.
    pub fn overhead_pct(self, score: &Score, before: &Score) -> f64 {
        match self {
            Objective::Cost => score.overhead_pct(before),
            Objective::Flops => score.flops_overhead_pct(before),
        }
    }

    /// Returns whether the first of two scores is better: by the objective, then by traffic.
    pub fn prefers(self, own: &Score, other: &Score) -> bool {
        let (cost, others) = (self.of(own), self.of(other));
        cost < others || cost == others && own.traffic_bytes < other.traffic_bytes
    }
}
