//! A problem reduced to what the search needs: folded, with dense indices and whole numbers as costs.
//!
//! Static values, values without bytes and views are left out, because they never change a decision. Every value that remains
//! takes memory and has at most one maker. Costs become integers that add up to about [`SCALE`]. So sums are exact, equal
//! costs compare equal, and flows are integral. A `weight` is at least 1, so that no plan repeats an op for nothing. A
//! `price` is rounded down and never above the true cost, so that a bound made of prices is a bound.

use crate::constraint::{Constraint, droppable};
use crate::index::{ByOp, OpIdx, ValueIdx};
use crate::objective::Objective;
use crate::problem::{Op, OpPhase, Problem, ValueKind};
use ckpt_error::{Error, Result};

/// What all ops together weigh, about.
pub const SCALE: f64 = 1e12;

/// No index.
pub const NONE: u32 = u32::MAX;

/// Lists of indices, one after the other.
#[derive(Clone, Debug, Default)]
struct Lists {
    start: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    fn push(&mut self, list: impl Iterator<Item = u32>) {
        if self.start.is_empty() {
            self.start.push(0);
        }
        let from = self.items.len();
        self.items.extend(list);
        self.items[from..].sort_unstable();
        let mut kept = from;
        for at in from..self.items.len() {
            if at == from || self.items[at] != self.items[kept - 1] {
                self.items[kept] = self.items[at];
                kept += 1;
            }
        }
        self.items.truncate(kept);
        self.start.push(kept as u32);
    }

    fn of(&self, i: u32) -> &[u32] {
        &self.items[self.start[i as usize] as usize..self.start[i as usize + 1] as usize]
    }
}

/// A reduced problem.
pub struct Dag {
    ins: Lists,
    outs: Lists,
    in_place_operands: Lists,
    /// What the search adds up, by op.
    pub weight: Vec<i64>,
    /// At most the true cost, in the same scale, by op.
    pub price: Vec<i64>,
    /// Temporaries while an op runs.
    pub temp_bytes: Vec<i64>,
    /// Whether an op may run again.
    pub repeatable: Vec<bool>,
    /// Values that must not stay from the forward to the backward pass.
    pub dropped: Vec<bool>,
    /// The first op of the backward pass; [`NONE`] without one, and where nothing is dropped.
    pub turn: u32,
    /// Bytes of each value; always positive.
    pub size: Vec<i64>,
    /// The op that makes a value, [`NONE`] for a placeholder.
    pub maker: Vec<u32>,
    /// Values that exist from the start and are freed after their last use.
    pub placeholders: Vec<u32>,
    /// Values that must be alive at the end, each once.
    pub outputs: Vec<u32>,
    /// Whether each value is in `outputs`.
    pub is_output: Vec<bool>,
    /// Of all ops once.
    pub total_weight: i64,
    /// The sum of `price` over all ops.
    pub total_price: i64,
    /// Objective units for one unit of weight.
    pub unit: f64,
    /// The index of each value in the problem.
    pub value_in_problem: Vec<ValueIdx>,
    /// The op of the unfolded problem.
    pub op_in_problem: Vec<OpIdx>,
}

impl Dag {
    /// # Errors
    /// A value that two ops make; sizes whose sum does not fit 63 bits.
    pub fn new(
        problem: &Problem,
        objective: Objective,
        constraints: &ByOp<Option<Constraint>>,
    ) -> Result<Dag> {
        let (folded, op_in_problem) = problem.fold();
        let mut sum = 0u64;
        for bytes in folded
            .values
            .iter()
            .map(|v| v.bytes)
            .chain(folded.ops.iter().map(|op| op.temp_bytes))
        {
            sum = sum
                .checked_add(bytes)
                .filter(|s| *s < i64::MAX as u64 / 4)
                .ok_or_else(|| {
                    Error::model("cost-graph", "sizes add up to more than 2^61 bytes")
                })?;
        }
        let mut index = folded.by_value(NONE);
        let mut dag = Dag {
            ins: Lists::default(),
            outs: Lists::default(),
            in_place_operands: Lists::default(),
            weight: Vec::new(),
            price: Vec::new(),
            temp_bytes: folded.ops.iter().map(|op| op.temp_bytes as i64).collect(),
            repeatable: folded.ops.iter().map(|op| op.recomputable).collect(),
            dropped: Vec::new(),
            turn: NONE,
            size: Vec::new(),
            maker: Vec::new(),
            placeholders: Vec::new(),
            outputs: Vec::new(),
            is_output: Vec::new(),
            total_weight: 0,
            total_price: 0,
            unit: 1.0,
            value_in_problem: Vec::new(),
            op_in_problem,
        };
        for (v, value) in folded.values.enumerated() {
            if value.kind != ValueKind::Static && value.bytes > 0 {
                index[v] = dag.size.len() as u32;
                if value.kind == ValueKind::Placeholder {
                    dag.placeholders.push(index[v]);
                }
                dag.size.push(value.bytes as i64);
                dag.value_in_problem.push(v);
            }
        }
        dag.maker = vec![NONE; dag.size.len()];
        dag.dropped = vec![false; dag.size.len()];
        for (o, op) in folded.ops.iter().enumerate() {
            let known = |v: &ValueIdx| Some(index[*v]).filter(|i| *i != NONE);
            dag.ins.push(op.ins.iter().filter_map(known));
            dag.outs.push(op.outs.iter().filter_map(known));
            dag.in_place_operands
                .push(op.in_place_operands.iter().filter_map(known));
            for v in dag.outs.of(o as u32) {
                if std::mem::replace(&mut dag.maker[*v as usize], o as u32) != NONE {
                    return Err(Error::model(
                        "cost-graph",
                        format!(
                            "value {} is made by two ops",
                            dag.value_in_problem[*v as usize]
                        ),
                    ));
                }
            }
        }
        for v in &dag.placeholders {
            if dag.maker[*v as usize] != NONE {
                return Err(Error::model(
                    "cost-graph",
                    format!(
                        "value {} is there from the start, and an op makes it",
                        dag.value_in_problem[*v as usize]
                    ),
                ));
            }
        }
        dag.is_output = vec![false; dag.size.len()];
        for v in &folded.outputs {
            if index[*v] != NONE && !std::mem::replace(&mut dag.is_output[index[*v] as usize], true)
            {
                dag.outputs.push(index[*v]);
            }
        }
        dag.constrain(problem, constraints);
        dag.weigh(&folded, objective);
        Ok(dag)
    }

    fn constrain(&mut self, problem: &Problem, constraints: &ByOp<Option<Constraint>>) {
        if constraints.is_empty() {
            return;
        }
        let may_go = droppable(problem);
        let backward = |o: &OpIdx| problem.ops[*o].phase == OpPhase::Backward;
        let turn = self.op_in_problem.iter().position(backward);
        // What is first made in the backward pass is not kept for it.
        let is_early = |o: usize| turn.is_none_or(|turn| o < turn);
        for (o, op) in self.op_in_problem.iter().enumerate() {
            match constraints.at(*op) {
                Some(Some(Constraint::Keep)) => self.repeatable[o] = false,
                Some(Some(Constraint::Recompute)) if is_early(o) => {
                    for v in self.outs.of(o as u32) {
                        self.dropped[*v as usize] = may_go[self.value_in_problem[*v as usize]];
                    }
                }
                _ => {}
            }
        }
        if self.dropped.contains(&true) {
            self.turn = turn.map_or(NONE, |o| o as u32);
        }
    }

    fn weigh(&mut self, folded: &Problem, objective: Objective) {
        let total = |f: &dyn Fn(&Op) -> f64| folded.ops.iter().map(f).sum::<f64>();
        let (cost, flops, bytes) = (
            total(&|op| op.cost),
            total(&|op| op.flops as f64),
            total(&|op| op.bytes as f64),
        );
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let by_flops = objective == Objective::Flops && flops > 0.0;
        for op in &folded.ops {
            let (exact, tie) = if by_flops {
                let tie = 1e-4 * share(op.bytes as f64, bytes);
                (share(op.flops as f64, flops), tie)
            } else {
                (share(op.cost, cost), 0.0)
            };
            self.weight.push(((exact + tie) * SCALE) as i64 + 1);
            self.price.push((exact * SCALE * (1.0 - 1e-12)) as i64);
        }
        self.total_weight = self.weight.iter().sum();
        self.total_price = self.price.iter().sum();
        let whole = if by_flops { flops } else { cost };
        self.unit = whole / SCALE;
    }

    /// Returns whether the second run of an op is demanded.
    pub fn must_repeat(&self, op: u32) -> bool {
        self.turn != NONE && self.outs(op).iter().any(|v| self.dropped[*v as usize])
    }

    /// Returns the number of ops, those of the folded problem.
    pub fn ops(&self) -> usize {
        self.weight.len()
    }

    /// Returns the number of values, those that take memory.
    pub fn values(&self) -> usize {
        self.size.len()
    }

    /// Values that an op reads, ascending, each once.
    pub fn ins(&self, op: u32) -> &[u32] {
        self.ins.of(op)
    }

    /// Values that an op makes, ascending, each once.
    pub fn outs(&self, op: u32) -> &[u32] {
        self.outs.of(op)
    }

    /// Returns the op that can recompute a value.
    pub fn remaker(&self, value: u32) -> Option<u32> {
        let op = self.maker[value as usize];
        (op != NONE && self.repeatable[op as usize]).then_some(op)
    }

    /// Operands that an op writes its first result over, if they are not read again; all of one size.
    pub fn in_place_operands(&self, op: u32) -> &[u32] {
        self.in_place_operands.of(op)
    }

    /// Returns what an op saves where it writes over an operand; 0 where it cannot.
    pub fn over_bytes(&self, op: u32) -> i64 {
        self.in_place_operands(op)
            .first()
            .map_or(0, |v| self.size[*v as usize])
    }

    /// Returns the least that an op takes while it runs with nothing else around, whatever is read later.
    pub fn least_bytes(&self, op: u32) -> i64 {
        self.working_set_bytes(op) - self.over_bytes(op)
    }

    /// Returns the bytes while an op runs with nothing else around and all its operands are read again: operands, results,
    /// temporaries.
    pub fn working_set_bytes(&self, op: u32) -> i64 {
        let (ins, outs) = (self.ins(op), self.outs(op));
        let sum = |list: &[u32]| list.iter().map(|v| self.size[*v as usize]).sum::<i64>();
        sum(ins) + sum(outs) + self.temp_bytes[op as usize]
    }

    /// Returns what a schedule weighs.
    pub fn weigh_schedule(&self, schedule: &[u32]) -> i64 {
        schedule.iter().map(|o| self.weight[*o as usize]).sum()
    }

    /// Returns a schedule of the unfolded problem as one of this one: steps that only make views fall away.
    pub fn from_problem(&self, schedule: &[OpIdx]) -> Vec<u32> {
        let end = self.op_in_problem.last().map_or(0, |last| last.0 + 1);
        let mut index = ByOp::filled(NONE, end);
        for (o, op) in self.op_in_problem.iter().enumerate() {
            index[*op] = o as u32;
        }
        let known = |op: &OpIdx| index.at(*op).copied().filter(|i| *i != NONE);
        schedule.iter().filter_map(known).collect()
    }
}
