//! `--maximize DIM`: the largest size that still fits.
//!
//! What a single op must hold at once, or the outputs together, is a bound that needs no planner: where it alone is over
//! the budget nothing fits. As long as no value shrinks while the dim grows (checked at every doubling) the bound never
//! falls, so the first size at which it is over the budget ends the search.
//!
//! Where that leaves at most [`EXHAUSTIVE`] sizes, the planner is tried from the top down, one size after the other, because
//! neither what a planner finds nor overhead need be monotone. The first size that works is the largest. Where there are
//! more sizes, quick plans find one that works by bisection. Plans of the effort that is asked for then try a few sizes above
//! it, [`PARTS`] apart. The result says which it was.

use super::step::TrainingStep;
use ckpt_passes::analysis::ranges;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::{
    Budget, Effort, Failure, PlanOutcome, PlanRequest, Policy, ValueIdx, ValueKind, plan,
};
use ckpt_passes::transform::sequence::Chunked;
use ckpt_passes::{Error, Kind, Result};
use serde::Serialize;

/// So many sizes are tried one by one.
pub const EXHAUSTIVE: i64 = 256;

/// Among more sizes, those that are tried lie this part of a size apart.
const PARTS: i64 = 64;

/// How many of them are tried above the size that quick plans find.
const TOPS: i64 = 4;

/// Larger sizes are not looked for.
const MAX_SIZE: i64 = 1 << 31;

/// The size to maximize. The budget is the request's.
pub struct Goal<'a> {
    /// Name of the dim to maximize.
    pub dim: &'a str,
    /// By the objective, in percent.
    pub max_overhead_pct: Option<f64>,
}

/// The largest size, and how far that is proven.
#[derive(Clone, Debug, Serialize)]
pub struct Maximized {
    /// Name of the dim that was maximized.
    pub dim: String,
    /// Largest size that was found to have a plan within budget and overhead limit.
    pub size: i64,
    /// From this size on it is proven that nothing fits; null where no such size was found.
    pub impossible_from: Option<i64>,
    /// Whether every size between was tried.
    pub is_exhaustive: bool,
    /// Sizes planned.
    pub tried: usize,
    /// The goal's overhead limit, by the objective, in percent; null without a limit.
    pub max_overhead_pct: Option<f64>,
}

impl Maximized {
    /// Returns one line for people: the size, how far it is proven, and the sizes planned.
    pub fn human(&self) -> String {
        let proof = match (self.impossible_from, self.is_exhaustive) {
            (Some(n), true) if n == self.size + 1 => "one more is impossible".into(),
            (Some(n), true) => format!("all sizes up to {} were tried, {n} is impossible", n - 1),
            (Some(n), false) => format!("found by bisection; {n} is impossible"),
            (None, _) => "nothing larger was looked for".into(),
        };
        format!(
            "largest {}: {} ({proof}; {} sizes planned)",
            self.dim, self.size, self.tried
        )
    }
}

/// Finds the largest size of a dim at which `graph` has a plan within the budget of `request`, and that plan. `request` binds
/// the other dims; its number for the wanted one is not used.
///
/// # Errors
/// `error[budget]` where not even the smallest size fits; a dim that the model does not have; what any pass refuses.
pub fn maximize(
    graph: &Graph,
    request: &Request,
    goal: &Goal,
) -> Result<(TrainingStep, PlanOutcome, Maximized)> {
    let budget = request.plan.budget().unwrap_or(Budget::Auto);
    let is_absolute = match budget {
        Budget::Bytes(_) => true,
        Budget::Percent(_) => false,
        Budget::Auto => request.device.usable_bytes().is_some(),
    };
    if !is_absolute {
        return Err(Error::usage(
            "maximize",
            "a share of what the model takes fits at any size",
        )
        .help("give a budget in bytes, --budget 8GiB, or a --device-profile with memory"));
    }
    let mut training = graph.clone();
    let mut smallest = Request {
        // A chunk count that is best at the smallest size says nothing about others: the rule decides it.
        plan: PlanRequest {
            offload: request.plan.offload,
            ..Policy::NONE.into()
        },
        ..request.clone()
    };
    smallest.dims.retain(|(name, _)| name != goal.dim);
    let mut from = ranges::of(graph)?.get(goal.dim).map_or(1, |range| range.0);
    smallest.dims.push((goal.dim.into(), from));
    let mut least = TrainingStep::of_graph(&mut training, &smallest);
    let chunks = request.sequence_chunks as i64;
    if least.as_ref().is_err_and(|e| e.code() == "dim") && chunks > from {
        // Each chunk of a sequence has a token.
        (training, from) = (graph.clone(), chunks);
        if let Some(last) = smallest.dims.last_mut() {
            last.1 = from;
        }
        least = TrainingStep::of_graph(&mut training, &smallest);
    }
    let least = least?;
    let search = Search {
        training: &training,
        sequence: least.sequence.as_ref(),
        request: &smallest,
        plan: request.plan.with_budget(budget),
        goal,
        from,
    };
    let Some((impossible_from, grows)) = search.impossible_from(&least)? else {
        return Err(Error::usage(
            "maximize",
            format!(
                "`{}` hardly changes what the model takes: {MAX_SIZE} fits too",
                goal.dim
            ),
        ));
    };
    let is_exhaustive = impossible_from <= EXHAUSTIVE + from;
    let (good, tried) = match is_exhaustive {
        true => search.first_of((from..impossible_from).rev())?,
        false => search.by_bisection(impossible_from)?,
    };
    let Some((size, step, outcome)) = good else {
        // The reason why the smallest size does not work.
        return match plan(&least.input, &search.plan) {
            Ok(_) => Err(Error::budget(format!(
                "no size of `{}` is within {} % overhead",
                goal.dim,
                goal.max_overhead_pct.unwrap_or(0.0)
            ))),
            Err(failure) => Err(failure.into()),
        };
    };
    let found = Maximized {
        dim: goal.dim.into(),
        size,
        impossible_from: Some(impossible_from),
        is_exhaustive: is_exhaustive && grows,
        tried,
        max_overhead_pct: goal.max_overhead_pct,
    };
    Ok((step, outcome, found))
}

struct Search<'a> {
    training: &'a Graph,
    /// How its sequence was cut.
    sequence: Option<&'a Chunked>,
    /// Its last dim is the wanted one.
    request: &'a Request,
    plan: PlanRequest,
    goal: &'a Goal<'a>,
    /// The smallest size that the model works at.
    from: i64,
}

/// A size that works, with its step and plan.
type Fitting = (i64, TrainingStep, PlanOutcome);

impl Search<'_> {
    /// Returns the first of these sizes that works, and the number of sizes tried.
    fn first_of(&self, sizes: impl Iterator<Item = i64>) -> Result<(Option<Fitting>, usize)> {
        let mut tried = 0;
        for size in sizes {
            tried += 1;
            if let Some((step, outcome)) = self.attempt(size, &self.plan)? {
                return Ok((Some((size, step, outcome)), tried));
            }
        }
        Ok((None, tried))
    }

    /// Returns the largest size below `end` that bisection finds, and the number of sizes tried.
    fn by_bisection(&self, end: i64) -> Result<(Option<Fitting>, usize)> {
        let quick = PlanRequest {
            effort: Effort::First,
            ..self.plan.clone()
        };
        let (mut good, mut tried): (Option<Fitting>, usize) = (None, 0);
        let (mut low, mut high) = (self.from - 1, end);
        while high - low > 1 && (high - low) * PARTS > low {
            let middle = low + (high - low) / 2;
            tried += 1;
            match self.attempt(middle, &quick)? {
                Some((step, outcome)) => {
                    good = Some((middle, step, outcome));
                    low = middle;
                }
                None => high = middle,
            }
        }
        // With more effort larger sizes may work, also above one that does not: from the top down, as often as the top works.
        let mut low = low.max(self.from);
        loop {
            let step = (low / PARTS).max(1);
            let tops = (0..=TOPS).rev().map(|steps| low + steps * step);
            let (found, more) = self.first_of(tops.filter(|size| *size < end))?;
            tried += more;
            let top = low + TOPS * step;
            let is_top = found.as_ref().is_some_and(|(size, ..)| *size == top);
            good = found.or(good);
            match is_top {
                true => low = top,
                false => return Ok((good, tried)),
            }
        }
    }

    /// Returns the step at that size; `None` where the model itself does not work at it, or would read beyond a table.
    fn step(&self, size: i64) -> Result<Option<TrainingStep>> {
        let mut request = self.request.clone();
        if let Some(last) = request.dims.last_mut() {
            last.1 = size;
        }
        match TrainingStep::of_training(self.training, &request, self.sequence) {
            Ok(step) => Ok(Some(step)),
            Err(e) if e.kind() == Kind::Model || e.code() == "dim" => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns a plan at that size; `None` where there is none, or only with too much overhead.
    fn attempt(
        &self,
        size: i64,
        request: &PlanRequest,
    ) -> Result<Option<(TrainingStep, PlanOutcome)>> {
        let Some(step) = self.step(size)? else {
            return Ok(None);
        };
        if self.is_impossible(&step)? {
            return Ok(None);
        }
        let outcome = match plan(&step.input, request) {
            Ok(outcome) => outcome,
            Err(failure) if failure.is_infeasible() => return Ok(None),
            // The host has no room for so much.
            Err(Failure::Invalid(error))
                if (error.kind(), error.code()) == (Kind::Usage, "offload")
                    && request.offload.host_bytes.is_some() =>
            {
                return Ok(None);
            }
            Err(failure) => return Err(failure.into()),
        };
        let (before, after) = (&outcome.plan.before, &outcome.plan.after);
        let overhead = self.plan.objective.overhead_pct(after, before);
        let fits = self
            .goal
            .max_overhead_pct
            .is_none_or(|most| overhead <= most);
        Ok(fits.then_some((step, outcome)))
    }

    /// Returns whether what must be held at once is over the budget.
    fn is_impossible(&self, step: &TrainingStep) -> Result<bool> {
        let budget = self.plan.budget().unwrap_or(Budget::Auto);
        let budget_bytes = step.input.peak_bytes(budget)?;
        Ok(held_at_once_bytes(step) > budget_bytes)
    }

    /// The smallest size that is proven impossible, by doubling and halving, and whether every value grew on the way;
    /// `None` where there is none.
    fn impossible_from(&self, least: &TrainingStep) -> Result<Option<(i64, bool)>> {
        if self.is_impossible(least)? {
            return Ok(Some((self.from, true)));
        }
        let bytes = |step: &TrainingStep| -> Vec<u64> {
            step.input.problem.values.iter().map(|v| v.bytes).collect()
        };
        let (mut before, mut grows) = (bytes(least), true);
        let (mut possible, mut over) = (self.from, 2 * self.from);
        loop {
            if over > MAX_SIZE {
                return Ok(None);
            }
            let Some(step) = self.step(over)? else { break };
            let now = bytes(&step);
            grows &= before.iter().zip(&now).all(|(a, b)| a <= b);
            before = now;
            if self.is_impossible(&step)? {
                break;
            }
            (possible, over) = (over, over * 2);
        }
        while possible + 1 < over {
            let middle = possible + (over - possible) / 2;
            let is_over = match self.step(middle)? {
                Some(step) => self.is_impossible(&step)?,
                None => true,
            };
            if is_over {
                over = middle;
            } else {
                possible = middle;
            }
        }
        Ok(Some((over, grows)))
    }
}

/// Static bytes and the most that a single step must hold, or that the outputs take together. Every schedule has all of
/// it at some moment.
fn held_at_once_bytes(step: &TrainingStep) -> u64 {
    let problem = &step.input.problem;
    let roots = problem.roots();
    let mut seen = problem.by_value(usize::MAX);
    let mut sum = |values: &mut dyn Iterator<Item = ValueIdx>, mark: usize| {
        let mut bytes = 0u64;
        for v in values {
            let root = roots[v];
            let counts = problem.values[root].kind != ValueKind::Static;
            if counts && std::mem::replace(&mut seen[root], mark) != mark {
                bytes = bytes.saturating_add(problem.values[root].bytes);
            }
        }
        bytes
    };
    let mut most = 0;
    for (o, op) in problem.ops.iter().enumerate() {
        let held = sum(&mut op.ins.iter().chain(&op.outs).copied(), o);
        let over = op
            .in_place_operands
            .first()
            .map_or(0, |v| problem.values[roots[*v]].bytes);
        most = most.max(held.saturating_add(op.temp_bytes) - over);
    }
    most = most.max(sum(&mut problem.outputs.iter().copied(), problem.ops.len()));
    step.before.static_bytes.saturating_add(most)
}
