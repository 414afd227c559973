//! Into how many parts a loss is cut, where that is left to the planner.
//!
//! More parts take less memory beside the scores of one part and read the head's weight more often, so the best number
//! depends on the budget. A plan takes a fraction of a second: the loss left whole, the number of a rule
//! ([`Tile::Auto`]) and that number doubled or halved are each planned quickly, for as long as doubling or halving pays.
//! This is a search: a bound that a plan comes with speaks of its own number of parts, and [`Tried`] says what was tried.

use super::budgeted::{Budgeted, overhead_pct};
use super::offload::{By, Offloading};
use super::solve::{Effort, Objective};
use super::{Basis, Budget, Choices, Plan, Score, Setting, Subject};
use crate::error::{Kind, Result};
use crate::ir::Graph;
use crate::transform::tile::Tile;
use serde::Serialize;

/// Doubling the number of parts pays if it makes the step cheaper by this share.
const WORTH: f64 = 0.0005;

/// Numbers of parts are at most so many times doubled or halved.
const FARTHEST: i32 = 4;

/// A number of parts, and the quick plan that was made for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// 1 where the loss is left whole; the most where several losses are cut.
    pub parts: usize,
    /// Whether a plan was found that fits the budget.
    pub fits: bool,
    /// Of that plan; where there is none, the smallest peak for which a plan is known.
    pub peak_bytes: u64,
    /// By the objective, in percent of the step with its loss whole and nothing computed again; null where nothing fits.
    pub overhead_pct: Option<f64>,
    /// What the plan is proven to be no worse than with this number of parts, in the same terms.
    pub lower_bound_pct: Option<f64>,
    pub chosen: bool,
    #[serde(skip)]
    tile: Tile,
    #[serde(skip)]
    cost: f64,
}

/// Numbers of parts that were planned, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    pub trials: Vec<Trial>,
    /// What all of them were planned for, on the peak.
    pub budget_bytes: u64,
}

impl Tried {
    /// What to cut the loss into.
    pub fn tile(&self) -> Tile {
        let chosen = self.trials.iter().find(|t| t.chosen);
        chosen.map_or(Tile::Auto, |t| t.tile)
    }

    /// The same budget, as the number that every trial was given. Where none of them fitted it stays as it is said: a
    /// wish gives way then.
    pub fn settled(&self, budgeted: &Budgeted) -> Budgeted {
        let fits = self.trials.iter().any(|t| t.chosen && t.fits);
        Budgeted {
            budget: match fits {
                true => Budget::Bytes(self.budget_bytes),
                false => budgeted.budget,
            },
            ..*budgeted
        }
    }

    /// Makes the certificate say what it does not cover.
    pub fn qualify(&self, plan: &mut Plan) {
        let (Some(certificate), Some(own)) = (
            plan.certificate.as_mut(),
            self.trials.iter().find(|t| t.chosen),
        ) else {
            return;
        };
        let others: Vec<String> = self
            .trials
            .iter()
            .filter(|t| !t.chosen)
            .map(|t| t.parts.to_string())
            .collect();
        certificate.class.push_str(&format!(
            ", with the loss in {} part{}; {} were planned too, other numbers were not",
            own.parts,
            if own.parts == 1 { "" } else { "s" },
            others.join(", ")
        ));
    }
}

/// What is cut and planned.
pub struct Question<'a> {
    /// Before it is tiled.
    pub graph: &'a Graph,
    pub budgeted: &'a Budgeted,
    pub offload: &'a Offloading,
    pub usable_bytes: Option<u64>,
    /// Cuts a copy of the graph; the numbers of parts that came of it.
    pub tiled: &'a dyn Fn(&mut Graph, Tile) -> Result<Vec<usize>>,
    /// A graph as a problem, with what the user settled.
    pub subject: &'a dyn Fn(&Graph) -> Result<(Subject, Choices)>,
}

/// Plans several numbers of parts. `None` where there is nothing to cut.
///
/// A share of memory is of the step cut by the rule, so that it means the same number of bytes for all of them.
///
/// # Errors
/// What the passes or the planner refuse, but for budgets that nothing fits into.
pub fn search(question: &Question) -> Result<Option<Tried>> {
    let mut whole = question.graph.clone();
    let mut ruled = question.graph.clone();
    let parts = (question.tiled)(&mut ruled, Tile::Auto)?;
    let Some(parts) = parts.into_iter().max() else {
        return Ok(None);
    };
    let (subject, choices) = (question.subject)(&ruled)?;
    let budget_bytes = question
        .budgeted
        .peak_bytes(&setting(question, &subject, &choices))?;
    (question.tiled)(&mut whole, Tile::Off)?;
    let (whole, whole_choices) = (question.subject)(&whole)?;
    let before = super::evaluate(&whole.problem, &whole.problem.given_order())?;
    let judge = Judge {
        question,
        budget_bytes,
        before,
    };
    let mut trials = vec![
        judge.trial(Tile::Off, 1, &whole, &whole_choices)?,
        judge.trial(Tile::Auto, parts, &subject, &choices)?,
    ];
    for step in [1, -1] {
        let mut best = 1;
        for doublings in 1..=FARTHEST {
            let tile = Tile::Doubled(step * doublings);
            let mut graph = question.graph.clone();
            let parts = (question.tiled)(&mut graph, tile)?.into_iter().max();
            let Some(parts) = parts.filter(|n| trials.iter().all(|t| t.parts != *n)) else {
                break;
            };
            let (subject, choices) = (question.subject)(&graph)?;
            trials.push(judge.trial(tile, parts, &subject, &choices)?);
            let last = trials.len() - 1;
            if !judge.is_better(&trials[last], &trials[best]) {
                break;
            }
            best = last;
        }
        if best != 1 {
            break;
        }
    }
    trials.sort_by_key(|t| t.parts);
    let best = (1..trials.len()).fold(0, |best, i| {
        match judge.is_better(&trials[i], &trials[best]) {
            true => i,
            false => best,
        }
    });
    trials[best].chosen = true;
    Ok(Some(Tried {
        trials,
        budget_bytes,
    }))
}

fn setting<'a>(question: &Question, subject: &'a Subject, choices: &'a Choices) -> Setting<'a> {
    Setting {
        problem: &subject.problem,
        structure: &subject.structure,
        choices,
        wishes: "",
        basis: Basis::Peak,
        usable_bytes: question.usable_bytes,
    }
}

struct Judge<'a> {
    question: &'a Question<'a>,
    budget_bytes: u64,
    /// Of the step with its loss whole.
    before: Score,
}

impl Judge<'_> {
    fn of(&self, score: &Score) -> f64 {
        match self.question.budgeted.objective {
            Objective::Cost => score.cost,
            Objective::Flops => score.flops as f64,
        }
    }

    /// Whether to prefer a trial of more parts, or of another number, to what is known: it fits where that does not, or
    /// it takes noticeably less.
    fn is_better(&self, own: &Trial, other: &Trial) -> bool {
        match (own.fits, other.fits) {
            (false, false) => own.peak_bytes < other.peak_bytes,
            (true, true) => {
                let least = WORTH * self.of(&self.before);
                match own.parts > other.parts {
                    true => own.cost < other.cost - least,
                    false => own.cost <= other.cost + least,
                }
            }
            (fits, _) => fits,
        }
    }

    fn trial(
        &self,
        tile: Tile,
        parts: usize,
        subject: &Subject,
        choices: &Choices,
    ) -> Result<Trial> {
        let quick = Budgeted {
            effort: Effort::First,
            budget: Budget::Bytes(self.budget_bytes),
            ..*self.question.budgeted
        };
        let setting = setting(self.question, subject, choices);
        let mut trial = Trial {
            parts,
            fits: false,
            peak_bytes: 0,
            overhead_pct: None,
            lower_bound_pct: None,
            chosen: false,
            tile,
            cost: f64::INFINITY,
        };
        match self.question.offload.plan(&setting, By::Budget(&quick)) {
            Ok(plan) => {
                let percent = |cost: f64| 100.0 * (cost / self.of(&self.before).max(1e-300) - 1.0);
                let objective = self.question.budgeted.objective;
                trial.fits = true;
                trial.peak_bytes = plan.after.peak_bytes;
                trial.cost = self.of(&plan.after);
                trial.overhead_pct = Some(overhead_pct(objective, &plan.after, &self.before));
                let least = plan.certificate.map(|c| c.lower_bound_pct);
                trial.lower_bound_pct =
                    least.map(|p| percent(self.of(&plan.before) * (1.0 + p / 100.0)));
                Ok(trial)
            }
            Err(error) if error.kind() == Kind::Budget => {
                let known = error.shortfall().map(|s| s.smallest_feasible_bytes);
                trial.peak_bytes = known.unwrap_or(u64::MAX);
                Ok(trial)
            }
            Err(error) => Err(error),
        }
    }
}
