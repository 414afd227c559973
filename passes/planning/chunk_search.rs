//! Chooses chunk counts for a loss and for chains of ops on tokens, where that is left to the planner.
//!
//! More chunks take less memory beside what one chunk holds, and read weights more often. So the best count depends on the
//! budget. A plan takes a fraction of a second, so several counts are planned quickly: nothing cut, the count of the rule
//! ([`Tile::Auto`]), and that count doubled or halved for as long as it pays.
//! This is a search: the bound of a plan speaks of its own counts only, and [`Tried`] says which counts were planned.

use crate::error::Result;
use crate::ir::Graph;
use crate::plan::budget::Budget;
use crate::plan::chunks::{Trial, Tried};
use crate::plan::input::PlanInput;
use crate::plan::planner::plan;
use crate::plan::request::PlanRequest;
use crate::plan::schedule::{Score, evaluate};
use crate::plan::solve::work::Effort;
use crate::transform::tile::{Tile, Tiles};

/// Twice as many chunks pay if they make the step cheaper by this share.
const WORTH: f64 = 0.0005;

/// Counts are doubled or halved at most this many times.
const FARTHEST: i32 = 8;

/// What is cut and planned.
pub struct Question<'a> {
    /// The graph before it is cut.
    pub graph: &'a Graph,
    /// What was asked for; the search decides what is [`Tile::Auto`].
    pub tiles: Tiles,
    /// The budget of every trial; a percentage is of the step cut by the rules.
    pub budget: Budget,
    /// How each trial is planned; its objective ranks the trials.
    pub request: &'a PlanRequest,
    /// Cuts a graph; returns the largest chunk counts of a loss and of a chain.
    pub cut: &'a dyn Fn(&mut Graph, Tiles) -> Result<(usize, usize)>,
    /// Returns the planning input of a graph.
    pub input: &'a dyn Fn(&Graph) -> Result<PlanInput>,
}

/// Plans several chunk counts: first of the loss, then of chains. If chains are cut, it tries the loss again. Returns what to cut and
/// the trials; `None` where there is nothing to cut.
///
/// A budget in percent is of the step cut as the rules have it, so that it means the same bytes for all counts.
///
/// # Errors
/// What the passes or the planner refuse, but for budgets that nothing fits into.
pub fn search(question: &Question) -> Result<Option<(Tiles, Tried)>> {
    let mut ruled = question.graph.clone();
    if (question.cut)(&mut ruled, question.tiles)? == (1, 1) {
        return Ok(None);
    }
    let budget_bytes = (question.input)(&ruled)?.peak_bytes(question.budget)?;
    let mut whole = question.graph.clone();
    (question.cut)(&mut whole, Tiles::default())?;
    let whole = (question.input)(&whole)?.problem;
    let mut judge = Judge {
        question,
        budget_bytes,
        before: evaluate(&whole, &whole.given_order())?,
        candidates: Vec::new(),
    };
    let fixed = |asked: Tile| match asked {
        Tile::Auto => Tile::Off,
        given => given,
    };
    judge.plan(Tiles {
        loss: fixed(question.tiles.loss),
        mlp: fixed(question.tiles.mlp),
    })?;
    if question.tiles.loss == Tile::Auto {
        judge.look(|loss, tiles| Tiles { loss, ..tiles })?;
    }
    if question.tiles.mlp == Tile::Auto {
        judge.look(|mlp, tiles| Tiles { mlp, ..tiles })?;
        // Where whole chains set the peak, the count of the loss made no difference before.
        let are_cut = judge.candidates[judge.best()].trial.mlp_chunks > 1;
        if are_cut && question.tiles.loss == Tile::Auto {
            judge.look(|loss, tiles| Tiles { loss, ..tiles })?;
        }
    }
    let best = judge.best();
    judge.candidates[best].trial.chosen = true;
    let tiles = judge.candidates[best].tiles;
    let mut trials: Vec<Trial> = judge.candidates.into_iter().map(|c| c.trial).collect();
    trials.sort_by_key(|t| (t.loss_chunks, t.mlp_chunks));
    let tried = Tried {
        trials,
        budget_bytes,
    };
    Ok(Some((tiles, tried)))
}

/// Chunk counts that were planned.
struct Candidate {
    trial: Trial,
    tiles: Tiles,
    /// The cost of the plan by the objective; infinite where nothing fits.
    cost: f64,
}

struct Judge<'a> {
    question: &'a Question<'a>,
    budget_bytes: u64,
    /// The score of the step with nothing cut.
    before: Score,
    candidates: Vec<Candidate>,
}

impl Judge<'_> {
    fn cost(&self, score: &Score) -> f64 {
        self.question.request.objective.of(score)
    }

    /// Returns whether a candidate is better than another: it fits where that does not, or it takes noticeably less.
    fn is_better(&self, own: &Candidate, other: &Candidate) -> bool {
        let chunks = |c: &Candidate| c.trial.loss_chunks * c.trial.mlp_chunks;
        match (own.trial.fits, other.trial.fits) {
            (false, false) => own.trial.peak_bytes < other.trial.peak_bytes,
            (true, true) => {
                let least = WORTH * self.cost(&self.before);
                match chunks(own) > chunks(other) {
                    true => own.cost < other.cost - least,
                    false => own.cost <= other.cost + least,
                }
            }
            (fits, _) => fits,
        }
    }

    fn best(&self) -> usize {
        let better = |best: usize, i: usize| {
            let is_better = self.is_better(&self.candidates[i], &self.candidates[best]);
            if is_better { i } else { best }
        };
        (1..self.candidates.len()).fold(0, better)
    }

    /// Tries counts of one kind, with the best of the other kind so far: the rule's, then twice and half as
    /// many for as long as that is better.
    fn look(&mut self, with: impl Fn(Tile, Tiles) -> Tiles) -> Result<()> {
        let base = self.candidates[self.best()].tiles;
        let rule = self.plan(with(Tile::Auto, base))?;
        for step in [1, -1] {
            let mut best = rule;
            for doublings in 1..=FARTHEST {
                let last = self.plan(with(Tile::Doubled(step * doublings), base))?;
                let is_better = self.is_better(&self.candidates[last], &self.candidates[best]);
                if last == best || !is_better {
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

    /// Cuts and plans, unless these counts have been tried. Returns the candidate's index.
    fn plan(&mut self, tiles: Tiles) -> Result<usize> {
        let mut graph = self.question.graph.clone();
        let (loss_chunks, mlp_chunks) = (self.question.cut)(&mut graph, tiles)?;
        let counts = |c: &Candidate| (c.trial.loss_chunks, c.trial.mlp_chunks);
        let mut known = self.candidates.iter().map(counts);
        if let Some(index) = known.position(|known| known == (loss_chunks, mlp_chunks)) {
            return Ok(index);
        }
        let quick = PlanRequest {
            effort: Effort::First,
            ..self
                .question
                .request
                .with_budget(Budget::Bytes(self.budget_bytes))
        };
        let mut candidate = Candidate {
            trial: Trial {
                loss_chunks,
                mlp_chunks,
                fits: false,
                peak_bytes: 0,
                overhead_pct: None,
                lower_bound_pct: None,
                chosen: false,
            },
            tiles,
            cost: f64::INFINITY,
        };
        let trial = &mut candidate.trial;
        match plan(&(self.question.input)(&graph)?, &quick) {
            Ok(outcome) => {
                let plan = outcome.plan;
                let percent =
                    |cost: f64| 100.0 * (cost / self.cost(&self.before).max(1e-300) - 1.0);
                let objective = self.question.request.objective;
                candidate.cost = self.cost(&plan.after);
                trial.fits = true;
                trial.peak_bytes = plan.after.peak_bytes;
                trial.overhead_pct = Some(objective.overhead_pct(&plan.after, &self.before));
                let lower_pct = plan.certificate.map(|c| c.lower_bound_pct);
                let before = self.cost(&plan.before);
                trial.lower_bound_pct = lower_pct.map(|p| percent(before * (1.0 + p / 100.0)));
            }
            Err(failure) if failure.is_infeasible() => {
                trial.peak_bytes = failure.min_budget_bytes().unwrap_or(u64::MAX);
            }
            Err(failure) => return Err(failure.into()),
        }
        self.candidates.push(candidate);
        Ok(self.candidates.len() - 1)
    }
}
