//! What a plan does with every value, the cost of the alternative, and the reason.
//!
//! Costs come from the plan's own cost model, and change one decision only. Keeping costs bytes, over the steps at which
//! the value would be held and now is not. Recomputing costs time: that of every op that would run again because its
//! operands are freed by then.

use super::memory::{Highest, Memory};
use super::terms::Terms;
use super::words::words;
use crate::planning::labels::Role;
use crate::units::{bytes, micros};
use ckpt_passes::plan::on_device::is_price;
use ckpt_passes::plan::plan::made_again;
use ckpt_passes::plan::{
    ByOp, ByValue, Constraint, Constraints, OpAnnotations, OpIdx, OpPhase, Plan, Problem, Step,
    ValueIdx, ValueKind,
};
use rustc_hash::FxHashSet;
use serde::Serialize;

/// Longer chains of ops get no cost.
const MAX_CHAIN: usize = 2000;

words! {
    /// What a plan does with a value.
    pub enum Fate {
        /// Held from the forward pass until the backward pass has read it.
        Kept = "kept",
        /// Freed, and recomputed when it is needed.
        Recomputed = "recomputed",
        /// Moved out of the device's memory, and fetched when it is needed.
        Offloaded = "offloaded",
        /// Freed after the forward pass has read it: the backward pass does not need it.
        Freed = "freed",
        /// An output of the graph.
        Output = "output",
        /// A view: it has no memory of its own.
        View = "view",
        /// Computed by the backward pass.
        Backward = "backward",
    }
}

/// The cost of the alternative.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "choice", rename_all = "snake_case")]
pub enum Alternative {
    /// For a kept value: the time and the number of ops to recompute.
    Recompute {
        /// Time of the ops that would run again or be fetched, in µs.
        us: f64,
        /// Number of those ops.
        ops: usize,
    },
    /// For a recomputed or offloaded value: the bytes of its node's results held longer, the peak with them, and the time
    /// saved.
    Keep {
        /// Bytes of all such results of the node, for as long as they would be held.
        bytes: u64,
        /// Peak of the plan if they were kept; at least the present peak.
        peak_bytes: u64,
        /// Time of the recomputations or transfers that would be saved, in µs.
        saved_us: f64,
    },
}

/// What becomes of one value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The value's name.
    pub name: String,
    /// Element type and sizes; empty where only bytes are known.
    #[serde(rename = "type")]
    pub ty: String,
    /// The node that computes it.
    pub node: String,
    /// The node's op: its name in the op table, or a cost graph's own word.
    pub op: String,
    /// Index of the layer that its node is in; `None` outside the layers.
    pub layer: Option<usize>,
    /// The part of the layer: `norm`, `attention`, `mlp`, …
    pub part: Option<String>,
    /// The innermost module, where the file names it.
    pub module: Option<String>,
    /// What the plan does with it.
    pub fate: Fate,
    /// Of its storage; 0 for a view.
    pub bytes: u64,
    /// Time of one run of its node, by the cost model or as measured.
    pub us: f64,
    /// How often its node runs.
    pub runs: usize,
    /// How often it is moved, out and in.
    #[serde(skip_serializing_if = "is_zero")]
    pub moves: usize,
    /// Steps at which it is held, over all its computations.
    pub held_steps: usize,
    /// Cost of the other choice, with all else unchanged; `None` where there is no choice or it has no cost.
    pub alternative: Option<Alternative>,
    /// Why, in a phrase for people.
    pub reason: String,
    /// The value and the op that makes it.
    #[serde(skip)]
    pub value: ValueIdx,
    /// The op that computes it.
    #[serde(skip)]
    pub at: OpIdx,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

struct Looker<'a> {
    terms: &'a Terms<'a>,
    problem: &'a Problem,
    memory: &'a Memory<'a>,
    constraints: &'a Constraints,
    roots: ByValue<ValueIdx>,
    /// The first step it is held and the one after the last, for each computation.
    held: ByValue<Vec<(usize, usize)>>,
    runs: ByOp<usize>,
    /// Whether a later computation than the first is used.
    made_again: ByValue<bool>,
    /// How often the results of each op are moved, out and in, and the last step that does.
    moves: ByOp<usize>,
    last_move: ByOp<usize>,
    /// The first step that reads it from the backward pass or in order to recompute something.
    needed: ByValue<Option<usize>>,
}

impl Looker<'_> {
    /// Returns time and number of ops of computing `value` at a step, where it is not held; `None` where that is impossible.
    fn chain(&self, value: ValueIdx, step: usize) -> Option<(f64, usize)> {
        let mut seen: FxHashSet<OpIdx> = FxHashSet::default();
        let mut open = vec![self.problem.values[value].producer?];
        seen.insert(open[0]);
        let mut us = 0.0;
        while let Some(o) = open.pop() {
            let op = &self.problem.ops[o];
            let is_outside = self.moves[o] > 0 && step <= self.last_move[o];
            let may_run = op.recomputable && self.moves[o] == 0;
            if !(is_outside || may_run) || seen.len() > MAX_CHAIN {
                return None;
            }
            if is_outside {
                us += self.problem.cost(Step::Fetch(o));
                continue;
            }
            us += op.cost;
            for v in &op.ins {
                let root = self.roots[*v];
                let is_there = self.problem.values[root].kind == ValueKind::Static
                    || self.held[root].iter().any(|(a, b)| *a <= step && step < *b);
                if is_there {
                    continue;
                }
                let made = self.problem.values[*v].producer?;
                if seen.insert(made) {
                    open.push(made);
                }
            }
        }
        Some((us, seen.len()))
    }
}

/// What becomes of every value that an op makes, in the given order.
pub fn verdicts(plan: &Plan, memory: &Memory, constraints: &Constraints) -> Vec<Verdict> {
    let terms = &memory.terms;
    let (problem, annotations, labels) = (terms.problem, terms.annotations, terms.labels);
    let mut looker = Looker {
        terms,
        problem,
        memory,
        constraints,
        roots: problem.roots(),
        held: problem.by_value(Vec::new()),
        runs: problem.by_op(0),
        made_again: made_again(problem, &memory.schedule.steps),
        moves: problem.by_op(0),
        last_move: problem.by_op(0),
        needed: problem.by_value(None),
    };
    for t in &memory.tenants {
        looker.held[t.value].push((t.from, t.until));
    }
    for (at, step) in memory.schedule.steps.iter().enumerate() {
        match *step {
            Step::Run(o) => {
                looker.runs[o] += 1;
                let op = &problem.ops[o];
                if memory.is_recompute[at] || op.phase == OpPhase::Backward {
                    for v in &op.ins {
                        looker.needed[looker.roots[*v]].get_or_insert(at);
                    }
                }
            }
            Step::Offload(op) | Step::Fetch(op) => {
                looker.moves[op] += 1;
                looker.last_move[op] = at;
            }
            Step::Release(_) => {}
        }
    }
    let mut planned: ByValue<&str> = problem.by_value("");
    for decision in &plan.decisions {
        planned[decision.value] = &decision.reason;
    }
    let highest = Highest::new(&memory.live_bytes);
    let mut all = Vec::new();
    for (o, op) in problem.ops.enumerated() {
        for v in &op.outs {
            let value = &problem.values[*v];
            let role = labels.roles[*v];
            let fate = if value.view_of.is_some() || value.kind == ValueKind::Static {
                Fate::View
            } else if looker.moves[o] > 1 {
                Fate::Offloaded
            } else if looker.made_again[*v] {
                Fate::Recomputed
            } else if matches!(role, Role::Output | Role::Gradient) {
                Fate::Output
            } else if op.phase == OpPhase::Backward {
                Fate::Backward
            } else if looker.needed[*v].is_some() {
                Fate::Kept
            } else {
                Fate::Freed
            };
            let alternative = match fate {
                Fate::Kept => looker.needed[*v]
                    .and_then(|step| looker.chain(*v, step))
                    .map(|(us, ops)| Alternative::Recompute { us, ops }),
                Fate::Recomputed | Fate::Offloaded => Some(looker.kept(&highest, o)),
                _ => None,
            };
            all.push(Verdict {
                name: labels.names[*v].clone(),
                ty: labels.types[*v].clone(),
                node: op.name.clone(),
                op: op.kind.clone(),
                layer: annotations.layer_of[o],
                part: part(annotations, o),
                module: labels.modules[o].clone(),
                fate,
                bytes: value.bytes,
                us: op.cost,
                runs: looker.runs[o],
                moves: looker.moves[o],
                held_steps: looker.held[*v].iter().map(|(a, b)| b - a).sum(),
                alternative,
                reason: planned[*v].into(),
                value: *v,
                at: o,
            });
        }
    }
    let dearest = dearest(&all);
    for verdict in &mut all {
        verdict.reason = looker.reason(verdict, dearest);
    }
    all
}

fn part(annotations: &OpAnnotations, op: OpIdx) -> Option<String> {
    let core = annotations.core_of[op].clone();
    let part = annotations.sub_block_of[op].map(|s| annotations.sub_blocks[s].clone());
    core.or(part)
}

/// Time for a mebibyte.
fn rate(us: f64, bytes: u64) -> f64 {
    us * (1 << 20) as f64 / (bytes.max(1)) as f64
}

/// The highest price, in µs for a mebibyte, at which the plan recomputes what owns memory.
fn dearest(all: &[Verdict]) -> f64 {
    let again = all
        .iter()
        .filter(|v| v.fate == Fate::Recomputed && v.bytes > 0);
    again.map(|v| rate(v.us, v.bytes)).fold(0.0, f64::max)
}

impl Looker<'_> {
    /// Keeping what an op makes: all its results that are recomputed, or it would run again all the same.
    fn kept(&self, highest: &Highest, op: OpIdx) -> Alternative {
        // When each result is not there between its computations, and its bytes.
        let mut gaps: Vec<(usize, usize, u64)> = Vec::new();
        let mut held_bytes = 0;
        let outs = self.problem.ops[op].outs.iter();
        for v in outs.filter(|v| self.made_again[**v]) {
            let bytes = self.problem.values[*v].bytes;
            held_bytes += bytes;
            let between = self.held[*v].windows(2).map(|w| (w[0].1, w[1].0));
            gaps.extend(between.map(|(from, to)| (from, to.max(from), bytes)));
        }
        let mut bounds: Vec<usize> = gaps.iter().flat_map(|g| [g.0, g.1]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let stretches = bounds.windows(2).map(|w| {
            let over = gaps.iter().filter(|g| g.0 <= w[0] && w[1] <= g.1);
            highest.of(w[0], w[1]) + over.map(|g| g.2).sum::<u64>()
        });
        Alternative::Keep {
            bytes: held_bytes,
            peak_bytes: stretches.fold(self.memory.peak_bytes, u64::max),
            saved_us: match self.moves[op] {
                0 => self.problem.ops[op].cost * (self.runs[op] - 1) as f64,
                moves => self.problem.cost(Step::Offload(op)) * moves as f64,
            },
        }
    }

    fn reason(&self, v: &Verdict, dearest: f64) -> String {
        match v.fate {
            Fate::View => match self.problem.values[v.value].view_of {
                Some(base) => format!(
                    "a view of {}: it has no memory of its own",
                    self.terms.labels.names[self.roots[base]]
                ),
                None => "there from the start".into(),
            },
            Fate::Backward => "part of the backward".into(),
            Fate::Output => "an output of the graph: it stays to the end".into(),
            Fate::Freed => "the backward does not read it".into(),
            Fate::Kept if v.runs > 1 => {
                let outs = self.problem.ops[v.at].outs.iter();
                let others = outs.filter(|o| self.made_again[**o]);
                let names = &self.terms.labels.names;
                let others: Vec<&str> = others.map(|o| names[*o].as_str()).collect();
                format!(
                    "{}; its node runs again for {}",
                    self.choice(v, dearest),
                    others.join(", ")
                )
            }
            _ => self.choice(v, dearest),
        }
    }

    /// Returns why a value that the planner decides about is kept or is not: a rule, what was settled beforehand, or a
    /// budget's prices.
    fn choice(&self, v: &Verdict, dearest: f64) -> String {
        let rule = !v.reason.is_empty() && !is_price(&v.reason);
        let constraint = match v.fate {
            Fate::Recomputed => Constraint::Recompute,
            _ => Constraint::Keep,
        };
        let settled = self.constraints.reason(self.problem, v.at, constraint);
        let settled = settled.filter(|_| v.moves == 0);
        match (v.fate, &v.alternative) {
            _ if rule => v.reason.clone(),
            _ if settled.is_some() => settled.unwrap_or_default().into(),
            (Fate::Recomputed, _) if v.bytes > 0 => format!(
                "gives {} back for {} ({:.3} µs a MiB)",
                bytes(v.bytes),
                micros(v.us * (v.runs - 1) as f64),
                rate(v.us, v.bytes) * (v.runs - 1) as f64
            ),
            (Fate::Offloaded, Some(Alternative::Keep { saved_us, .. })) => format!(
                "gives {} back for {} of moving ({:.3} µs a MiB)",
                bytes(v.bytes),
                micros(*saved_us),
                rate(*saved_us, v.bytes)
            ),
            (Fate::Kept, Some(Alternative::Recompute { us, ops }))
                if rate(*us, v.bytes) > dearest =>
            {
                let others = match ops.saturating_sub(1) {
                    0 => String::new(),
                    1 => ", with 1 other op".into(),
                    n => format!(", with {n} other ops"),
                };
                format!(
                    "computing it again is dearer ({:.3} µs a MiB{others}) than anything that this plan recomputes",
                    rate(*us, v.bytes)
                )
            }
            (Fate::Kept, Some(_)) => "the cheapest plan found within the budget keeps it".into(),
            (Fate::Kept, None) if !self.problem.ops[v.at].recomputable => {
                "its node must not run twice".into()
            }
            _ => v.reason.clone(),
        }
    }
}
