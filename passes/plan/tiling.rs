//! Into how many parts a loss and chains of ops on tokens are cut, where that is left to the planner.
//!
//! More parts take less memory beside what one part holds and read weights more often, so the best number depends on the
//! budget. A plan takes a fraction of a second: nothing cut, the number of a rule ([`Tile::Auto`]) and that number
//! doubled or halved are each planned quickly, for as long as doubling or halving pays.
//! This is a search: a bound that a plan comes with speaks of its own number of parts, and [`Tried`] says what was tried.

use super::budgeted::{BudgetGoal, overhead_pct};
use super::offload::{By, Offloading};
use super::solve::{Effort, Objective};
use super::{Budget, Constraints, Plan, PlanContext, PlanInput, Score};
use crate::error::{Kind, Result};
use crate::ir::Graph;
use crate::transform::tile::{Tile, Tiles};
use serde::Serialize;

/// Doubling the number of parts pays if it makes the step cheaper by this share.
const WORTH: f64 = 0.0005;

/// Numbers of parts are at most so many times doubled or halved.
const FARTHEST: i32 = 8;

/// Numbers of parts, and the quick plan that was made for them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Of the loss: 1 where it is left whole; the most where several losses are cut.
    pub parts: usize,
    /// Of each chain of ops on tokens, in the same way.
    pub mlp_parts: usize,
    /// Whether a plan was found that fits the budget.
    pub fits: bool,
    /// Of that plan; where there is none, the smallest peak for which a plan is known.
    pub peak_bytes: u64,
    /// By the objective, in percent of the step with nothing cut and nothing computed again; null where nothing fits.
    pub overhead_pct: Option<f64>,
    /// What the plan is proven to be no worse than with these numbers of parts, in the same terms.
    pub lower_bound_pct: Option<f64>,
    pub chosen: bool,
    #[serde(skip)]
    tiles: Tiles,
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

impl Trial {
    /// Its numbers, for people.
    pub fn words(&self) -> String {
        let loss = match self.parts {
            1 => "loss whole".to_string(),
            n => format!("loss in {n}"),
        };
        match self.mlp_parts {
            1 => loss,
            n => format!("{loss}, MLPs in {n}"),
        }
    }
}

impl Tried {
    /// What to cut.
    pub fn tiles(&self) -> Tiles {
        let chosen = self.trials.iter().find(|t| t.chosen);
        chosen.map_or(Tiles::default(), |t| t.tiles)
    }

    /// The same budget, as the number that every trial was given. Where none of them fitted it stays as it is said: a
    /// wish gives way then.
    pub fn settled(&self, budgeted: &BudgetGoal) -> BudgetGoal {
        let fits = self.trials.iter().any(|t| t.chosen && t.fits);
        BudgetGoal {
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
        let others = self.trials.iter().filter(|t| !t.chosen);
        let others: Vec<String> = others.map(Trial::words).collect();
        certificate.class.push_str(&format!(
            ", of parts: {}; planned too: {}; other numbers were not",
            own.words(),
            others.join("; ")
        ));
    }
}

/// What is cut and planned.
pub struct Question<'a> {
    /// Before it is tiled.
    pub graph: &'a Graph,
    /// What was asked for: what is [`Tile::Auto`] is looked for.
    pub tiles: Tiles,
    pub budgeted: &'a BudgetGoal,
    pub offload: &'a Offloading,
    pub usable_bytes: Option<u64>,
    /// Cuts a copy of the graph; the most parts of a loss and of a chain that came of it.
    pub tiled: &'a dyn Fn(&mut Graph, Tiles) -> Result<(usize, usize)>,
    /// A graph as a problem, with what the user settled.
    pub subject: &'a dyn Fn(&Graph) -> Result<(PlanInput, Constraints)>,
}

/// Plans several numbers of parts: those of the loss first, then those of chains. `None` where there is nothing to cut.
///
/// A share of memory is of the step cut as the rules have it, so that it means the same number of bytes for all of them.
///
/// # Errors
/// What the passes or the planner refuse, but for budgets that nothing fits into.
pub fn search(question: &Question) -> Result<Option<Tried>> {
    let mut ruled = question.graph.clone();
    if (question.tiled)(&mut ruled, question.tiles)? == (1, 1) {
        return Ok(None);
    }
    let (subject, choices) = (question.subject)(&ruled)?;
    let own = setting(question, &subject, &choices);
    let budget_bytes = question.budgeted.peak_bytes(&own)?;
    let mut whole = question.graph.clone();
    (question.tiled)(&mut whole, Tiles::default())?;
    let (whole, _) = (question.subject)(&whole)?;
    let before = super::evaluate(&whole.problem, &whole.problem.given_order())?;
    let mut judge = Judge {
        question,
        budget_bytes,
        before,
        trials: Vec::new(),
    };
    let fixed = |wish: Tile| match wish {
        Tile::Auto => Tile::Off,
        given => given,
    };
    let base = Tiles {
        loss: fixed(question.tiles.loss),
        mlp: fixed(question.tiles.mlp),
    };
    judge.trial(base)?;
    if question.tiles.loss == Tile::Auto {
        judge.look(|loss, tiles| Tiles { loss, ..tiles })?;
    }
    if question.tiles.mlp == Tile::Auto {
        judge.look(|mlp, tiles| Tiles { mlp, ..tiles })?;
    }
    let best = judge.best();
    judge.trials[best].chosen = true;
    judge.trials.sort_by_key(|t| (t.parts, t.mlp_parts));
    Ok(Some(Tried {
        trials: judge.trials,
        budget_bytes,
    }))
}

fn setting<'a>(
    question: &Question,
    subject: &'a PlanInput,
    choices: &'a Constraints,
) -> PlanContext<'a> {
    PlanContext {
        usable_bytes: question.usable_bytes,
        ..PlanContext::plain(&subject.problem, &subject.structure, choices)
    }
}

struct Judge<'a> {
    question: &'a Question<'a>,
    budget_bytes: u64,
    /// Of the step with nothing cut.
    before: Score,
    trials: Vec<Trial>,
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
                match own.parts * own.mlp_parts > other.parts * other.mlp_parts {
                    true => own.cost < other.cost - least,
                    false => own.cost <= other.cost + least,
                }
            }
            (fits, _) => fits,
        }
    }

    fn best(&self) -> usize {
        let better =
            |best: usize, i: usize| match self.is_better(&self.trials[i], &self.trials[best]) {
                true => i,
                false => best,
            };
        (1..self.trials.len()).fold(0, better)
    }

    /// Tries numbers of parts of one kind, with the others as they are best so far: the rule's, then twice and half as
    /// many for as long as that is better.
    fn look(&mut self, with: impl Fn(Tile, Tiles) -> Tiles) -> Result<()> {
        let base = self.trials[self.best()].tiles;
        let Some(rule) = self.trial(with(Tile::Auto, base))? else {
            return Ok(());
        };
        for step in [1, -1] {
            let mut best = rule;
            for doublings in 1..=FARTHEST {
                let Some(last) = self.trial(with(Tile::Doubled(step * doublings), base))? else {
                    break;
                };
                if !self.is_better(&self.trials[last], &self.trials[best]) {
                    break;
                }
                best = last;
            }
            if best != rule {
                break;
            }
        }
        Ok(())
    }

    /// Cuts and plans; `None` where those numbers have been tried.
    fn trial(&mut self, tiles: Tiles) -> Result<Option<usize>> {
        let mut graph = self.question.graph.clone();
        let (parts, mlp_parts) = (self.question.tiled)(&mut graph, tiles)?;
        let same = |t: &Trial| (t.parts, t.mlp_parts) == (parts, mlp_parts);
        if self.trials.iter().any(same) {
            return Ok(None);
        }
        let (subject, choices) = (self.question.subject)(&graph)?;
        let quick = BudgetGoal {
            effort: Effort::First,
            budget: Budget::Bytes(self.budget_bytes),
            ..*self.question.budgeted
        };
        let setting = setting(self.question, &subject, &choices);
        let mut trial = Trial {
            parts,
            mlp_parts,
            fits: false,
            peak_bytes: 0,
            overhead_pct: None,
            lower_bound_pct: None,
            chosen: false,
            tiles,
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
            }
            Err(error) if error.kind() == Kind::Budget => {
                let known = error.shortfall().map(|s| s.smallest_feasible_bytes);
                trial.peak_bytes = known.unwrap_or(u64::MAX);
            }
            Err(error) => return Err(error),
        }
        self.trials.push(trial);
        Ok(Some(self.trials.len() - 1))
    }
}
