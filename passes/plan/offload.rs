//! Which results are offloaded, and plans that count it.
//!
//! The user may fix the set (`cpu`, `disk`, `block-inputs`). That is a constraint: such a result is never in the device's
//! memory from its last use in the forward pass to its first use in the backward pass. A policy or solver decides all else, on
//! a problem in which transfers are ops (`solve::expanded`).
//!
//! With `auto` the planner chooses the set, and the bound covers any choice. To move a byte costs the same for every
//! result, while to recompute it costs more for some ops than for others. So in the order of that price there is one place to
//! cut: cheap bytes are recomputed, dear bytes are moved. The search tries a few cuts along that order, then others around the
//! best of them, and the inputs of layers. It plans each quickly and keeps the cheapest. To move nothing is one of them, so
//! `auto` is never predicted to be slower than `none`. The search ends where the bound says that little is left to gain.
//!
//! If the sequence goes through the model in chunks, activations and gradients are offloaded between all their uses
//! ([`super::spill`]).
//!
//! Where ranks share the layers, results that all of them have may be kept in slices instead (`ranks`). Then an `Offload` leaves a rank's
//! slice here, and a `Fetch` gathers the others while nothing else runs.
//!
//! Transfers run beside other ops, so the cost of a plan is known only once they are placed ([`overlap`]). Plans are
//! made twice, with transfers at their whole price and at none, and the better one is kept. The lower bound is proven at no
//! price; for `auto` it also counts the time of the outgoing transfers before a moment and of the incoming ones after it.

use super::budget::Budget;
use super::constraint::Constraint;
use super::index::{ByOp, ByValue, OpIdx};
use super::infeasible::{Failure, Infeasible};
use super::input::PlanInput;
use super::objective::Objective;
use super::on_device;
use super::overlap::{self, Room};
use super::plan::{Certificate, OffloadTarget, Plan};
use super::policy::Policy;
use super::problem::Problem;
use super::request::{Goal, Offload, OffloadSet, PlanRequest};
use super::saved_set::SMALL_BYTES;
use super::schedule::{Timeline, evaluate, percent};
use super::solve::bound::{CLASS, CLASS_MOVING, class};
use super::solve::bound_moving;
use super::solve::expanded::{ExpandedProblem, Price};
use super::solve::min_peak::MinPeak;
use super::solve::work::Effort;
use super::spill::{outside_bytes, spill};
use super::steps::Step;
use ckpt_error::{Error, Result};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Plans, with offloading where the request asks for it.
///
/// # Errors
/// Those of [`on_device::plan`]; `auto` without a budget in time; more bytes off the device than allowed.
pub fn plan(input: &PlanInput, request: &PlanRequest) -> Result<Plan, Failure> {
    let offload = &request.offload;
    if offload.set == OffloadSet::Nothing || matches!(request.goal, Goal::Stored(_)) {
        return on_device::plan(input, request);
    }
    // Ranks exchange while nothing else runs.
    let offload = Offload {
        streams: offload.streams && offload.to != OffloadTarget::Ranks,
        ..*offload
    };
    let request = &PlanRequest {
        offload,
        ..request.clone()
    };
    let offloading = Offloading { input, request };
    if offload.to == OffloadTarget::Ranks {
        return offloading.sliced();
    }
    let is_between_uses = offloading.is_between_uses();
    match (offload.set, request.budget()) {
        (OffloadSet::LayerInputs, _) if is_between_uses => Err(Error::usage(
            "offload",
            "layers have no inputs of their own where the sequence goes through the model in chunks",
        )
        .expected("--offload cpu, disk or auto")
        .into()),
        (OffloadSet::Auto, Some(_)) if request.objective == Objective::Cost => {
            match is_between_uses {
                true => offloading.between_uses(),
                false => offloading.chosen(),
            }
        }
        (OffloadSet::Auto, _) => Err(Error::usage(
            "offload",
            "--offload auto weighs the time of transfers against that of recomputation",
        )
        .expected("--budget with --objective cost")
        .into()),
        _ if is_between_uses => offloading.between_uses(),
        _ => {
            let fixed = Some(Constraint::Recompute);
            let mut plan = offloading.moved(&offloading.candidates(), fixed)?;
            let offloaded = plan.schedule.offloaded.iter();
            let bytes = offloaded.map(|op| input.problem.result_bytes(*op)).sum();
            offloading.check_room(bytes)?;
            plan.offload_to = offload.to;
            Ok(plan)
        }
    }
}

/// Returns the smallest peak for which a plan is known, of the kind that [`plan`] makes.
///
/// # Errors
/// A problem that does not run in its own order.
pub fn smallest_peak(input: &PlanInput, request: &PlanRequest) -> Result<u64> {
    let offloading = Offloading { input, request };
    let spilled_bytes = match offloading.is_between_uses() {
        true => {
            let runs: Vec<OpIdx> = Policy::CHUNKS.plan(input)?.runs().collect();
            let steps = offloading.spilled(&runs, 0)?;
            evaluate(&input.problem, &steps)?.peak_bytes
        }
        false => u64::MAX,
    };
    match spilled_bytes < u64::MAX && input.problem.ops.len() > SEARCHED_OPS {
        true => Ok(spilled_bytes),
        false => {
            let reached_bytes = on_device::smallest_peak(input, request)?.reached_bytes;
            Ok(reached_bytes.min(spilled_bytes))
        }
    }
}

/// Returns a warning where the ops that feed class scores are unknown: their results would stay on the device.
pub fn warning(input: &PlanInput, request: &PlanRequest) -> Option<String> {
    let is_wanted = request.offload.set != OffloadSet::Nothing;
    (is_wanted && !input.annotations.feeds_scores.contains(&true)).then(|| {
        "no head over classes was found: what it reads may be offloaded like any other result"
            .into()
    })
}

/// An input and a request that offloads.
struct Offloading<'a> {
    input: &'a PlanInput,
    request: &'a PlanRequest,
}

impl Offloading<'_> {
    /// Returns the ops whose results may be moved between the passes and are asked for, in order.
    fn candidates(&self) -> Vec<OpIdx> {
        self.wanted(&self.input.problem.movable())
    }

    /// Returns those of the movable ops whose results are asked for, in order.
    fn wanted(&self, movable: &ByOp<bool>) -> Vec<OpIdx> {
        let (offload, problem) = (&self.request.offload, &self.input.problem);
        let (annotations, constraints) = (&self.input.annotations, &self.input.constraints);
        let is_wanted = |op: &OpIdx| {
            let bytes = problem.result_bytes(*op);
            let outs = &problem.ops[*op].outs;
            let is_small = outs.iter().all(|v| problem.values[*v].integral) && bytes <= SMALL_BYTES;
            let is_settled =
                constraints.forced[*op].is_some() || constraints.scope[*op].is_exempt();
            movable[*op]
                && bytes >= offload.min_bytes
                && !is_small
                && !is_settled
                && !annotations.feeds_scores[*op]
                && (offload.set != OffloadSet::LayerInputs || annotations.opens_layer[*op])
        };
        problem.ops.indices().filter(is_wanted).collect()
    }

    /// Plans with slices of results on the ranks that share the layers. A policy says what is kept, and that is kept in slices. With
    /// a budget the planner chooses: what it takes back is gathered, at the price of the link, and all else stays whole.
    fn sliced(&self) -> Result<Plan, Failure> {
        let (input, mut request) = (self.input, self.request.clone());
        if let Some(budget) = request.budget() {
            // Both are planned for the same peak.
            let peak_bytes = input.peak_bytes(budget)?;
            request = request.with_budget(Budget::Bytes(input.shown(peak_bytes)));
        }
        let request = &request;
        let settled = Offloading { input, request };
        let mut candidates = self.candidates();
        let rests = input.problem.rests();
        candidates.retain(|op| rests[*op]);
        let plain = on_device::plan(input, request);
        let plan = match (request.budget(), plain) {
            (Some(_), Ok(plain)) => match settled.moved(&candidates, None) {
                Ok(found) if found.after.cost < plain.after.cost => found,
                _ => plain,
            },
            (Some(_), Err(failure)) if failure.is_infeasible() => {
                settled.moved(&candidates, None).map_err(|_| failure)?
            }
            (None, Ok(plain)) => {
                let kept = plain.decisions.iter().filter(|d| d.kept).map(|d| d.op);
                let kept: BTreeSet<OpIdx> = kept.collect();
                candidates.retain(|op| kept.contains(op));
                match candidates.is_empty() {
                    true => plain,
                    false => settled.moved(&candidates, Some(Constraint::Recompute))?,
                }
            }
            (_, Err(failure)) => return Err(failure),
        };
        Ok(Plan {
            offload_to: match plan.schedule.offloaded.is_empty() {
                true => OffloadTarget::Host,
                false => OffloadTarget::Ranks,
            },
            ..plan
        })
    }

    /// Returns whether results are offloaded between all their uses.
    fn is_between_uses(&self) -> bool {
        let Offload { set, to, .. } = self.request.offload;
        let is_wanted = set != OffloadSet::Nothing && to != OffloadTarget::Ranks;
        is_wanted && self.input.annotations.has_chunks()
    }

    /// Returns runs as steps that offload what is asked for between its uses.
    fn spilled(&self, runs: &[OpIdx], peak_bytes: u64) -> Result<Vec<Step>> {
        let problem = &self.input.problem;
        let mut may = problem.by_op(false);
        for op in self.wanted(&problem.may_leave()) {
            may[op] = true;
        }
        spill(problem, runs, &may, peak_bytes)
    }

    /// Plans a sequence in chunks. Without a budget, results of the policy's plan are offloaded between their uses.
    ///
    /// Within a budget, the plan of the policy of chunks offloads what has no room. It is compared with one that offloads nothing,
    /// unless the step is so large that the search for that takes minutes. Where the policy fits as it is, nothing is offloaded.
    fn between_uses(&self) -> Result<Plan, Failure> {
        let (input, request) = (self.input, self.request);
        let Some(budget) = request.budget() else {
            let plain = on_device::plan(input, request)?;
            let runs: Vec<OpIdx> = plain.runs().collect();
            // As little is offloaded as about the smallest peak needs.
            let least = evaluate(&input.problem, &self.spilled(&runs, 0)?)?;
            let peak_bytes = least.peak_bytes + least.peak_above_static_bytes / SHARE;
            let steps = self.spilled(&runs, peak_bytes)?;
            return Ok(self.of_spilled(plain, &steps, peak_bytes)?);
        };
        let budget_bytes = input.peak_bytes(budget)?;
        let chunks = Policy::CHUNKS.plan(input)?;
        if chunks.after.peak_bytes <= budget_bytes {
            return on_device::plan(input, request);
        }
        let is_searched = input.problem.ops.len() <= SEARCHED_OPS;
        let plain = match is_searched {
            true => on_device::plan(input, request).ok(),
            false => None,
        };
        let runs: Vec<OpIdx> = chunks.runs().collect();
        let steps = self.spilled(&runs, budget_bytes)?;
        let spilled = match evaluate(&input.problem, &steps)?.peak_bytes <= budget_bytes {
            true => self
                .of_spilled(chunks, &steps, budget_bytes)
                .map_err(Failure::from),
            false => Err(self.too_little(budget_bytes, &steps)?),
        };
        let mut plan = match (plain, spilled) {
            (Some(plain), Ok(spilled)) if plain.after.cost > spilled.after.cost => spilled,
            (Some(plain), _) => return Ok(plain),
            (None, spilled) => spilled?,
        };
        // Every plan runs every op.
        let overhead_pct = request.objective.overhead_pct(&plan.after, &plan.before);
        plan.certify(Certificate {
            objective: request.objective.word().into(),
            budget_bytes,
            lower_bound_pct: 0.0,
            gap_pct: overhead_pct.max(0.0),
            class: class(CLASS, !input.overrides.is_empty()) + CLASS_MOVING,
        })?;
        Ok(plan)
    }

    /// Returns a plan on the device with these steps instead, whose transfers overlap with other ops within `peak_bytes`.
    fn of_spilled(&self, plain: Plan, steps: &[Step], peak_bytes: u64) -> Result<Plan> {
        let (problem, offload) = (&self.input.problem, &self.request.offload);
        self.check_room(outside_bytes(problem, steps).0)?;
        let room = Room {
            peak_bytes,
            in_flight: offload.in_flight,
        };
        let plan = match offload.streams {
            true => self.replanned(plain, &overlap::spread(problem, steps, room)?, None)?,
            false => self.replanned(plain, steps, None)?,
        };
        Ok(Plan {
            offload_to: match plan.schedule.offloaded.is_empty() {
                true => OffloadTarget::Host,
                false => offload.to,
            },
            ..plan
        })
    }

    /// Returns the refusal of a budget that these steps do not fit into.
    fn too_little(&self, budget_bytes: u64, steps: &[Step]) -> Result<Failure> {
        let problem = &self.input.problem;
        let score = evaluate(problem, steps)?;
        let at = score.at_step.unwrap_or(0);
        let instances = Timeline::new(problem, steps)?.instances;
        let alive = instances.iter().filter(|i| {
            let is_needed = i.last.is_some_and(|last| at <= last);
            i.bytes > 0 && i.born <= at && is_needed
        });
        let mut tensors: Vec<_> = alive.map(|i| (i.value, i.bytes)).collect();
        tensors.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let why = MinPeak {
            least_bytes: 0,
            reached_bytes: score.peak_bytes,
            schedule: Vec::new(),
            static_bytes: score.static_bytes,
            op: steps.get(at).map(|step| step.op()),
            tensors,
        };
        let why = Infeasible::new(self.input, budget_bytes, &why);
        Ok(Failure::Infeasible(Box::new(why)))
    }

    /// Checks what the host may hold against the bytes that are to be offloaded at once.
    fn check_room(&self, bytes: u64) -> Result<()> {
        match self.request.offload.host_bytes {
            Some(room) if bytes > room => Err(Error::usage(
                "offload",
                "what is to be offloaded is more than the host may hold",
            )
            .expected(format!("{room} bytes or less"))
            .found(format!("{bytes} bytes"))
            .help("raise --host-budget, --min-offload-bytes or the budget, or use --offload auto")),
            _ => Ok(()),
        }
    }

    /// Returns the cheapest plan of several sets.
    fn chosen(&self) -> Result<Plan, Failure> {
        let (input, request) = (self.input, self.request);
        let asked = request.budget().unwrap_or(Budget::Auto);
        let peak_bytes = input.peak_bytes(asked)?;
        // All sets are planned for the same peak.
        let settled = request.with_budget(Budget::Bytes(input.shown(peak_bytes)));
        let quick = PlanRequest {
            effort: Effort::First,
            ..settled.clone()
        };
        let plain = match on_device::plan(input, &quick) {
            Err(failure) if !failure.is_infeasible() => return Err(failure),
            plain => plain,
        };
        let candidates = self.candidates();
        let lower = self.lower(&candidates, peak_bytes)?;
        let order = self.dearest_first(plain.as_ref().ok(), candidates);
        let try_quickly = Offloading {
            input,
            request: &quick,
        };
        let tried = |trials: Vec<Trial>| -> Vec<(Trial, Plan)> {
            let plan = |trial: Trial| {
                let plan = try_quickly.moved(&trial.offloaded, trial.fixed);
                Some((trial, plan.ok()?))
            };
            trials.into_par_iter().filter_map(plan).collect()
        };
        let cut = |share: usize| Trial {
            share: Some(share),
            fixed: None,
            offloaded: order[..(order.len() * share).div_ceil(CUTS)].to_vec(),
        };
        // What layers read is worth more together than one by one: with all of it outside, layers are rebuilt from there.
        let opens_layer = |op: &&OpIdx| input.annotations.opens_layer[**op];
        let streams: Vec<OpIdx> = order.iter().filter(opens_layer).copied().collect();
        let of_streams = |fixed| Trial {
            share: None,
            fixed,
            offloaded: streams.clone(),
        };
        let mut best: Option<(Trial, Plan)> = None;
        let cost = |best: &Option<(Trial, Plan)>| match (best, &plain) {
            (Some((_, plan)), Ok(plain)) => plan.after.cost.min(plain.after.cost),
            (Some((_, plan)), Err(_)) => plan.after.cost,
            (None, Ok(plain)) => plain.after.cost,
            (None, Err(_)) => f64::INFINITY,
        };
        let mut trials = vec![of_streams(Some(Constraint::Recompute)), of_streams(None)];
        let mut cuts: BTreeMap<usize, f64> = BTreeMap::new();
        let mut shares = vec![CUTS / 4, CUTS / 2, CUTS];
        // Where little is left to gain nothing is tried.
        while lower.is_some_and(|lower| cost(&best) > lower * ENOUGH) {
            cuts.extend(shares.iter().map(|share| (*share, f64::INFINITY)));
            trials.extend(shares.drain(..).map(cut));
            trials.retain(|trial| !trial.offloaded.is_empty());
            if trials.is_empty() {
                break;
            }
            for (trial, plan) in tried(std::mem::take(&mut trials)) {
                if let Some(share) = trial.share {
                    cuts.insert(share, plan.after.cost);
                }
                if plan.after.cost < cost(&best) {
                    best = Some((trial, plan));
                }
            }
            // The next shares lie half way from the best cut to those beside it.
            let least = cuts.iter().min_by(|a, b| a.1.total_cmp(b.1));
            let Some((share, _)) = least.filter(|(_, cost)| cost.is_finite()) else {
                break;
            };
            let below = cuts.range(..share).next_back().map_or(0, |(s, _)| *s);
            let above = cuts.range(share + 1..).next().map_or(*share, |(s, _)| *s);
            shares = vec![(below + share) / 2, (share + above) / 2];
            shares.retain(|s| *s > 0 && !cuts.contains_key(s));
        }
        let with_effort = Offloading {
            input,
            request: &settled,
        };
        let is_quick = request.effort == Effort::First;
        let plan = match best.filter(|(_, plan)| !plan.schedule.offloaded.is_empty()) {
            Some((_, found)) if is_quick => found,
            Some((trial, found)) => {
                let (plain, found) = rayon::join(
                    || on_device::plan(input, &settled),
                    || with_effort.moved(&found.schedule.offloaded, trial.fixed),
                );
                // More work may find that recomputation is cheaper after all.
                match (plain, found) {
                    (Ok(plain), Ok(found)) if plain.after.cost > found.after.cost => found,
                    (Ok(plain), _) => plain,
                    (Err(_), found) => found?,
                }
            }
            // The refusal of a budget that nothing fits into speaks of plans that move nothing.
            None if is_quick && plain.is_ok() => plain?,
            None => on_device::plan(input, request)?,
        };
        Ok(self.covered(lower, plan)?)
    }

    /// Returns a lower bound on the cost of every plan within the budget, whatever it moves; `None` if none fits.
    fn lower(&self, candidates: &[OpIdx], peak_bytes: u64) -> Result<Option<f64>> {
        let problem = &self.input.problem;
        let Some(transfer) = problem.transfer else {
            return Ok(None);
        };
        let mut elsewhere = problem.by_op(None);
        for op in candidates {
            let streams = self.request.offload.streams;
            elsewhere[*op] = Some(transfer.wait(problem.result_bytes(*op), streams));
        }
        let constraints = self.input.hard_constraints();
        bound_moving(problem, peak_bytes, &constraints, &elsewhere)
    }

    /// Returns a plan with the bound on all plans, whatever they move.
    fn covered(&self, lower: Option<f64>, mut plan: Plan) -> Result<Plan> {
        let (Some(certificate), Some(_)) = (&mut plan.certificate, self.input.problem.transfer)
        else {
            return Ok(plan);
        };
        let Some(lower) = lower else {
            return Err(Error::bug(
                "offload",
                "a plan fits where nothing was proven to fit",
            ));
        };
        let (own, before) = (plan.after.cost, plan.before.cost);
        certificate.lower_bound_pct = percent(lower.min(own) - before, before);
        certificate.gap_pct = percent((own - lower).max(0.0), before);
        let is_overridden = !self.input.overrides.is_empty();
        certificate.class = class(CLASS, is_overridden) + CLASS_MOVING;
        Ok(plan)
    }

    /// Returns candidates by the cost of recomputing a byte, highest first, as far as the host has room for them.
    ///
    /// An op that `plan` recomputes costs what it does there, including ops that run again only for it. Another op costs its
    /// own cost.
    fn dearest_first(&self, plan: Option<&Plan>, mut candidates: Vec<OpIdx>) -> Vec<OpIdx> {
        let problem = &self.input.problem;
        let recompute_costs = plan.map_or_else(
            || problem.by_op(0.0),
            |plan| repeat_costs(problem, &plan.runs().collect::<Vec<_>>()),
        );
        let price = |op: &OpIdx| {
            let cost = problem.ops[*op].cost.max(recompute_costs[*op]);
            cost / problem.result_bytes(*op).max(1) as f64
        };
        candidates.sort_by(|a, b| price(b).total_cmp(&price(a)).then(a.cmp(b)));
        let mut left = self.request.offload.host_bytes.unwrap_or(u64::MAX);
        candidates.retain(|op| match left.checked_sub(problem.result_bytes(*op)) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        candidates
    }

    /// Plans with results of these ops moved, or free to be: `fixed` is a constraint on their transfers. Results
    /// that gain nothing by it stay.
    fn moved(&self, offloaded: &[OpIdx], fixed: Option<Constraint>) -> Result<Plan, Failure> {
        let whole = self.at_price(offloaded, fixed, Price::Whole)?;
        let busy_share = self.input.problem.transfer.map_or(0.0, |t| t.busy_share);
        if !self.request.offload.streams || whole.schedule.offloaded.is_empty() || busy_share == 1.0
        {
            return Ok(whole);
        }
        // What fits at one price fits at the other.
        let hidden = self.at_price(offloaded, fixed, Price::Hidden)?;
        let objective = match self.request.goal {
            Goal::Budget(_) => self.request.objective,
            _ => Objective::Cost,
        };
        let taken = |plan: &Plan| (objective.of(&plan.after), plan.after.cost);
        let (mut best, other) = match taken(&hidden) < taken(&whole) {
            true => (hidden, whole),
            false => (whole, hidden),
        };
        // For the same set of results both bounds hold.
        if let (Some(own), Some(proven)) = (&mut best.certificate, other.certificate)
            && best.schedule.offloaded == other.schedule.offloaded
            && own.lower_bound_pct < proven.lower_bound_pct
        {
            own.lower_bound_pct = proven.lower_bound_pct;
            let overhead_pct = objective.overhead_pct(&best.after, &best.before);
            own.gap_pct = (overhead_pct - own.lower_bound_pct).max(0.0);
        }
        Ok(best)
    }

    fn at_price(
        &self,
        offloaded: &[OpIdx],
        fixed: Option<Constraint>,
        price: Price,
    ) -> Result<Plan, Failure> {
        let (input, offload) = (self.input, &self.request.offload);
        let mut offloaded = offloaded.to_vec();
        // The certificate of the first plan for these results, and how much less is asked for because plans were over it.
        let (mut proven, mut less_bytes) = (None::<Certificate>, 0);
        let (mut shrinks, mut retries) = (0, 0);
        loop {
            let expanded = ExpandedProblem::new(&input.problem, &offloaded, price)?;
            let goal = match (&self.request.goal, &proven) {
                (Goal::Budget(_), Some(proven)) => {
                    let peak_bytes = proven.budget_bytes.saturating_sub(less_bytes);
                    Goal::Budget(Budget::Bytes(input.shown(peak_bytes)))
                }
                (goal, _) => goal.clone(),
            };
            let request = PlanRequest {
                goal,
                ..*self.request
            };
            let mut plan = on_device::plan(&expanded.input(input, fixed), &request)?;
            let steps = expanded.steps(plan.runs());
            let fetched = steps.iter().filter(|step| matches!(step, Step::Fetch(_)));
            let used: BTreeSet<OpIdx> = fetched.map(|step| step.op()).collect();
            let is_used = used.len() == expanded.offloaded.len();
            if !is_used && shrinks < SHRINKS {
                // Without the others the problem is smaller, and what is proven of it is proven of this plan.
                (offloaded, proven, less_bytes) = (used.into_iter().collect(), None, 0);
                (shrinks, retries) = (shrinks + 1, 0);
                continue;
            }
            if proven.is_some() {
                plan.certificate = proven.clone();
            }
            let steps = overlap::late(&input.problem, &steps)?;
            // A solver may recompute something between an op and its transfer, while the results are held after all.
            let peak_bytes = evaluate(&input.problem, &steps)?.peak_bytes;
            let budget_bytes = plan.certificate.as_ref().map(|c| c.budget_bytes);
            match budget_bytes.and_then(|budget| peak_bytes.checked_sub(budget)) {
                Some(over_bytes) if over_bytes > 0 && retries < RETRIES => {
                    less_bytes += over_bytes;
                    proven = plan.certificate;
                    retries += 1;
                }
                Some(1..) => break,
                _ => {
                    let room = Room {
                        peak_bytes: budget_bytes.unwrap_or(peak_bytes),
                        in_flight: offload.in_flight,
                    };
                    let steps = match offload.streams {
                        true => overlap::spread(&input.problem, &steps, room)?,
                        false => steps,
                    };
                    let problem = &expanded.problem;
                    let base = evaluate(problem, &problem.given_order())?.cost;
                    // The expanded problem prices a slice as a whole gather.
                    let is_proven = is_used
                        && (!offload.streams || price == Price::Hidden)
                        && offload.to != OffloadTarget::Ranks;
                    let proves = is_proven.then_some(base);
                    return Ok(self.replanned(plan, &steps, proves)?);
                }
            }
        }
        Err(
            Error::budget("no plan was found in which these results are offloaded")
                .help("raise the budget, or use --offload auto")
                .into(),
        )
    }

    /// Returns a plan for the expanded problem as one for the problem itself, with these steps. The bound of the former is a
    /// share of the cost of the expanded problem in its own order, given by `proves`; `None` where it proves nothing
    /// about time. Without streams the cost is that of one transfer after the other.
    fn replanned(&self, plan: Plan, steps: &[Step], proves: Option<f64>) -> Result<Plan> {
        let problem = &self.input.problem;
        let reasons = plan.reasons(problem);
        let layer_of = &self.input.annotations.layer_of;
        let mut whole = Plan::new(&plan.policy, problem, steps, layer_of, &reasons)?;
        if !self.request.offload.streams {
            whole.after.cost = evaluate(problem, steps)?.cost;
        }
        let Some(mut certificate) = plan.certificate else {
            return Ok(whole);
        };
        if certificate.objective == Objective::Cost.word() {
            // Percentages are of the step that moves nothing.
            let unplanned = whole.before.cost;
            let lower_pct = match proves {
                Some(base) if unplanned > 0.0 => {
                    let scale = base / unplanned;
                    100.0 * (scale - 1.0) + scale * certificate.lower_bound_pct
                }
                _ => 0.0,
            };
            certificate.lower_bound_pct = lower_pct;
            let overhead_pct = whole.after.overhead_pct(&whole.before);
            certificate.gap_pct = (overhead_pct - lower_pct).max(0.0);
        }
        if !whole.schedule.offloaded.is_empty() {
            certificate.class.push_str(", with these results offloaded");
        }
        whole.certify(certificate)?;
        Ok(whole)
    }
}

/// How often a plan is asked for again that was over its budget once its transfers were placed.
const RETRIES: usize = 8;

/// How often the results that a plan leaves on the device are taken from the set, and the rest is planned anew.
const SHRINKS: usize = 4;

/// The number of equal shares into which `auto` divides the order of candidates.
const CUTS: usize = 8;

/// A plan is good enough if it costs at most this many times the lower bound.
const ENOUGH: f64 = 1.0005;

/// Without a budget, a plan may take this part more than its smallest peak above static, so that less is offloaded.
const SHARE: u64 = 256;

/// For a sequence in chunks with more ops than this, no plan is searched that offloads nothing.
const SEARCHED_OPS: usize = 20_000;

/// A set of ops that `auto` tries to offload.
struct Trial {
    /// How many of the [`CUTS`] shares it takes.
    share: Option<usize>,
    /// The constraint on their transfers; without one the solver may leave results where they are.
    fixed: Option<Constraint>,
    offloaded: Vec<OpIdx>,
}

/// Returns the cost of the repeats of each op in a schedule, with their share of the ops that run again only for them.
fn repeat_costs(problem: &Problem, schedule: &[OpIdx]) -> ByOp<f64> {
    // Which step made the value that each step reads.
    let mut made_at: ByValue<Option<usize>> = problem.by_value(None);
    let mut ran = problem.by_op(false);
    let mut is_repeat = Vec::with_capacity(schedule.len());
    let mut reads: Vec<Vec<usize>> = Vec::with_capacity(schedule.len());
    let mut readers = vec![0usize; schedule.len()];
    for (step, o) in schedule.iter().enumerate() {
        let op = &problem.ops[*o];
        is_repeat.push(std::mem::replace(&mut ran[*o], true));
        let mut makers: Vec<usize> = op.ins.iter().filter_map(|v| made_at[*v]).collect();
        makers.retain(|maker| is_repeat[*maker]);
        makers.iter().for_each(|maker| readers[*maker] += 1);
        reads.push(makers);
        for v in &op.outs {
            made_at[*v] = Some(step);
        }
    }
    let mut through = vec![0.0; schedule.len()];
    let mut cost = problem.by_op(0.0);
    // The readers of a repeat share its cost; first runs bear none.
    for step in 0..schedule.len() {
        if !is_repeat[step] {
            continue;
        }
        through[step] += problem.ops[schedule[step]].cost;
        for maker in &reads[step] {
            through[step] += through[*maker] / readers[*maker] as f64;
        }
        cost[schedule[step]] += through[step];
    }
    cost
}

#[cfg(test)]
mod tests;
