//! The chunk counts of a loss and of chains of ops on tokens, and those that the planner tried.

use super::budget::Budget;
use super::plan::Plan;
use serde::Serialize;

/// The chunk counts of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunks {
    /// Chunks of the loss; `None` where it is whole. The most where several losses are cut.
    pub loss: Option<usize>,
    /// Chunks of each chain of ops on tokens, in the same way.
    pub mlp: Option<usize>,
    /// The chunk counts that the planner tried, where they were left to it.
    pub tried: Option<Tried>,
}

/// Chunk counts and the quick plan that was made for them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Chunks of the loss; 1 where it is whole.
    #[serde(rename = "parts")]
    pub loss_chunks: usize,
    /// Chunks of each chain of ops on tokens; 1 where they are whole.
    #[serde(rename = "mlp_parts")]
    pub mlp_chunks: usize,
    /// Whether a plan was found that fits the budget.
    pub fits: bool,
    /// The peak of that plan; without one, the smallest peak for which a plan is known.
    pub peak_bytes: u64,
    /// By the objective, in percent of the step with nothing cut and nothing recomputed; null where nothing fits.
    pub overhead_pct: Option<f64>,
    /// The lower bound that was proven for these chunk counts, in the same terms.
    pub lower_bound_pct: Option<f64>,
    /// Whether the planner took these chunk counts; where nothing fits, the counts with the smallest peak.
    pub chosen: bool,
}

impl Trial {
    /// Returns the chunk counts for people.
    pub fn words(&self) -> String {
        let loss = match self.loss_chunks {
            1 => "loss whole".to_string(),
            n => format!("loss in {n}"),
        };
        match self.mlp_chunks {
            1 => loss,
            n => format!("{loss}, MLPs in {n}"),
        }
    }
}

/// Chunk counts that were planned, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// One trial for each pair of chunk counts that was planned.
    pub trials: Vec<Trial>,
    /// The peak that all of them were planned for.
    pub budget_bytes: u64,
}

impl Tried {
    /// Returns the budget in bytes that every trial was given. Where no trial fits, returns `asked`: an automatic budget
    /// gives way then.
    pub fn budget(&self, asked: Budget) -> Budget {
        match self.trials.iter().any(|t| t.chosen && t.fits) {
            true => Budget::Bytes(self.budget_bytes),
            false => asked,
        }
    }

    /// Makes the certificate of a plan say which chunk counts it covers.
    pub fn qualify(&self, plan: &mut Plan) {
        let (Some(certificate), Some(own)) = (
            plan.certificate.as_mut(),
            self.trials.iter().find(|t| t.chosen),
        ) else {
            return;
        };
        let others = self.trials.iter().filter(|t| !t.chosen);
        let others: Vec<String> = others.map(Trial::words).collect();
        certificate.class.push_str(&format!(
            ", of parts: {}; planned too: {}; other numbers were not",
            own.words(),
            others.join("; ")
        ));
    }
}
