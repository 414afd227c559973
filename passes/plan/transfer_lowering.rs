//! The expanded form of a problem, in which the results of some ops are offloaded.
//!
//! An offloaded op `p` becomes three. The first computes: it needs what `p` needs, its results count as temporaries, and
//! what it leaves takes no memory here. The second, of kind `Transfer`, makes the results of `p` from that. Its first
//! run, right after the first op's, stands for moving out; every later run is a fetch. The third only reads the results:
//! by then they are outside, and until then they are held. Moving in and out cost the same, so memory and order of
//! the expanded problem are those of the real thing, and every solver, policy and judge works on it as on any problem; the
//! sum of its costs is the time if nothing runs beside a transfer, and [`overlap`](super::overlap) says what it is if
//! something does. What it cannot say is computing `p` again: an offloaded op runs once.
//!
//! Solvers get the problem without the third ops ([`ExpandedProblem::brief`]): right after a transfer they change nothing, and
//! where else they go is settled when all else is.

use super::annotations::{OpAnnotations, OpRole};
use super::problem::{Op, OpPhase, Problem, Value, ValueKind};
#[cfg(test)]
use super::problem::{Transfer, Wait};
use ckpt_error::{Error, Result};

/// What an op of an expanded problem stands for; ops are those of the problem it was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpandedOp {
    /// Running an op.
    Run(usize),
    /// Moving the results of an op: out the first time, in after that.
    Transfer(usize),
    /// They have arrived outside and may go here.
    Release(usize),
}

impl ExpandedOp {
    pub fn op(self) -> usize {
        match self {
            ExpandedOp::Run(op) | ExpandedOp::Transfer(op) | ExpandedOp::Release(op) => op,
        }
    }
}

/// What a transfer costs a step, as a solver is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Price {
    /// All of it: nothing runs beside.
    Whole,
    /// Its start: all else runs beside. No schedule takes less.
    Hidden,
}

/// The expanded problem, and the way back.
#[derive(Clone, Debug)]
pub struct ExpandedProblem {
    pub problem: Problem,
    /// Of each op of the expanded problem. Values keep their numbers; what is outside comes after them.
    pub expanded_ops: Vec<ExpandedOp>,
    /// Ops whose results are offloaded, in order.
    pub offloaded: Vec<usize>,
    /// Ops that each of them has become.
    ops_each: usize,
}

/// Returns whether the results of each op may be offloaded: storages of the forward pass that the op owns, all of them read,
/// none a graph output.
pub fn movable(problem: &Problem) -> Vec<bool> {
    let mut read = vec![false; problem.values.len()];
    for op in &problem.ops {
        for v in &op.ins {
            read[*v] = true;
        }
    }
    let roots = problem.roots();
    let mut is_output = vec![false; problem.values.len()];
    for v in &problem.outputs {
        is_output[roots[*v]] = true;
    }
    let moves = |v: &usize| {
        let value = &problem.values[*v];
        value.kind == ValueKind::Activation && value.view_of.is_none() && read[*v] && !is_output[*v]
    };
    let movable =
        |op: &Op| op.phase == OpPhase::Forward && !op.outs.is_empty() && op.outs.iter().all(&moves);
    problem.ops.iter().map(movable).collect()
}

/// Returns the bytes of the results of an op.
pub fn result_bytes(problem: &Problem, op: usize) -> u64 {
    let outs = problem.ops[op].outs.iter();
    outs.map(|v| problem.values[*v].bytes).sum()
}

/// Returns what each op would wait for if its results moved, for a bound; without a lane nobody waits for it.
#[cfg(test)]
pub fn waits(problem: &Problem, transfer: &Transfer, has_lane: bool) -> Vec<Option<Wait>> {
    let wait = |(o, may): (usize, &bool)| {
        let wait = transfer.wait(result_bytes(problem, o), true);
        let lane_us = if has_lane { wait.lane_us } else { 0.0 };
        may.then_some(Wait { lane_us, ..wait })
    };
    movable(problem).iter().enumerate().map(wait).collect()
}

impl ExpandedProblem {
    /// `offloaded` are ops, in any order.
    ///
    /// # Errors
    /// An op whose results cannot be moved, or a problem that does not say what transfers cost.
    pub fn new(problem: &Problem, offloaded: &[usize]) -> Result<ExpandedProblem> {
        ExpandedProblem::of(problem, offloaded, Price::Whole, 3)
    }

    /// Expands a problem without releases, for a solver.
    ///
    /// # Errors
    /// As [`ExpandedProblem::new`].
    pub fn brief(problem: &Problem, offloaded: &[usize], price: Price) -> Result<ExpandedProblem> {
        ExpandedProblem::of(problem, offloaded, price, 2)
    }

    fn of(
        problem: &Problem,
        offloaded: &[usize],
        price: Price,
        ops_each: usize,
    ) -> Result<ExpandedProblem> {
        let mut offloaded = offloaded.to_vec();
        offloaded.sort_unstable();
        offloaded.dedup();
        let movable = movable(problem);
        if let Some(op) = offloaded.iter().find(|op| movable.get(**op) != Some(&true)) {
            let name = problem.ops.get(*op).map_or("?", |o| o.name.as_str());
            return Err(Error::usage(
                "offload",
                format!("the results of op {op} (`{name}`) cannot be moved"),
            )
            .expected(
                "activations of the forward part that something reads and that are no outputs",
            ));
        }
        let Some(transfer) = problem.transfer else {
            return Err(Error::usage(
                "offload",
                "this problem does not say what moving values costs",
            )
            .expected("`transfer`: {us_per_megabyte, start_us}"));
        };
        let ops = problem.ops.len() + (ops_each - 1) * offloaded.len();
        let mut expanded = ExpandedProblem {
            problem: Problem {
                ops: Vec::with_capacity(ops),
                values: problem.values.clone(),
                outputs: problem.outputs.clone(),
                transfer: problem.transfer,
            },
            expanded_ops: Vec::with_capacity(ops),
            offloaded,
            ops_each,
        };
        let mut moved = vec![false; problem.ops.len()];
        for op in &expanded.offloaded {
            moved[*op] = true;
        }
        for (o, op) in problem.ops.iter().enumerate() {
            if moved[o] {
                let whole = transfer.cost(result_bytes(problem, o));
                let cost = match price {
                    Price::Whole => whole,
                    Price::Hidden => transfer.own_us(whole),
                };
                expanded.push_moved(op, o, cost);
            } else {
                expanded.push(op.clone(), ExpandedOp::Run(o));
            }
        }
        Ok(expanded)
    }

    fn push(&mut self, op: Op, stage: ExpandedOp) {
        for v in &op.outs {
            self.problem.values[*v].producer = Some(self.problem.ops.len());
        }
        self.problem.ops.push(op);
        self.expanded_ops.push(stage);
    }

    fn push_moved(&mut self, op: &Op, o: usize, cost: f64) {
        let bytes: u64 = op.outs.iter().map(|v| self.problem.values[*v].bytes).sum();
        let outside = self.problem.values.len();
        self.problem
            .values
            .push(Value::new(0, ValueKind::Activation, None));
        let run = Op {
            outs: vec![outside],
            temp_bytes: op.temp_bytes + bytes,
            recomputable: false,
            ..op.clone()
        };
        self.push(run, ExpandedOp::Run(o));
        let fetch = Op {
            kind: "Transfer".into(),
            bytes,
            ..Op::new(
                format!("{}/fetch", op.name),
                [outside],
                op.outs.clone(),
                op.phase,
                cost,
            )
        };
        let release = Op {
            kind: "Transfer".into(),
            recomputable: false,
            ..Op::new(
                format!("{}/release", op.name),
                op.outs.clone(),
                [],
                op.phase,
                0.0,
            )
        };
        self.push(fetch, ExpandedOp::Transfer(o));
        if self.ops_each == 3 {
            self.push(release, ExpandedOp::Release(o));
        }
    }

    /// Returns the annotations of the expanded ops.
    pub fn annotations(&self, annotations: &OpAnnotations) -> OpAnnotations {
        let role = |stage: &ExpandedOp| match stage {
            ExpandedOp::Run(op) => annotations.role_of[*op],
            ExpandedOp::Transfer(_) | ExpandedOp::Release(_) => OpRole::Other,
        };
        OpAnnotations {
            layers: annotations.layers,
            layer_of: self.each(&annotations.layer_of),
            role_of: self.expanded_ops.iter().map(role).collect(),
            sub_blocks: annotations.sub_blocks.clone(),
            sub_block_of: self.each(&annotations.sub_block_of),
            core_of: self.each(&annotations.core_of),
            trained: self.each(&annotations.trained),
            opens_layer: self.each(&annotations.opens_layer),
            feeds_scores: self.each(&annotations.feeds_scores),
        }
    }

    /// Returns a table by op, for the expanded ops.
    pub fn each<T: Clone>(&self, by_op: &[T]) -> Vec<T> {
        self.expanded_ops
            .iter()
            .map(|s| by_op[s.op()].clone())
            .collect()
    }

    /// Returns the op of the expanded problem that a stage is; `None` for a stage that is not there.
    pub fn index(&self, stage: ExpandedOp) -> Option<usize> {
        // Every offloaded op puts so many more behind it.
        let before = self.offloaded.partition_point(|op| *op < stage.op());
        let run = stage.op() + (self.ops_each - 1) * before;
        let index = match stage {
            ExpandedOp::Run(_) => run,
            ExpandedOp::Transfer(_) => run + 1,
            ExpandedOp::Release(_) => run + 2,
        };
        (self.expanded_ops.get(index) == Some(&stage)).then_some(index)
    }

    /// Returns how often each offloaded op's results are fetched.
    pub fn fetches(&self, schedule: &[usize]) -> Vec<(usize, usize)> {
        let mut runs = vec![0usize; self.expanded_ops.len()];
        for step in schedule {
            runs[*step] += 1;
        }
        let moves = self.expanded_ops.iter().zip(runs);
        moves
            .filter_map(|(stage, n)| match stage {
                ExpandedOp::Transfer(op) => Some((*op, n.saturating_sub(1))),
                ExpandedOp::Run(_) | ExpandedOp::Release(_) => None,
            })
            .collect()
    }

    /// Returns the schedule with every moving out right after its op, and every release once, between that and the first fetch:
    /// where the schedule has it, else right after moving out.
    pub fn settled(&self, schedule: &[usize]) -> Vec<usize> {
        let mut moves = vec![0usize; self.expanded_ops.len()];
        let mut released = vec![false; self.expanded_ops.len()];
        // Whether a release comes in time where it is.
        let mut is_there = vec![false; self.expanded_ops.len()];
        for step in schedule {
            match self.expanded_ops[*step] {
                ExpandedOp::Transfer(_) => moves[*step] += 1,
                ExpandedOp::Release(_) => is_there[*step] |= moves[step - 1] <= 1,
                ExpandedOp::Run(_) => {}
            }
        }
        moves.fill(0);
        let mut settled = Vec::with_capacity(schedule.len());
        for step in schedule {
            match self.expanded_ops[*step] {
                ExpandedOp::Run(op)
                    if self.expanded_ops.get(step + 1) == Some(&ExpandedOp::Transfer(op)) =>
                {
                    settled.extend([*step, step + 1]);
                    if self.ops_each == 3 && !is_there[step + 2] {
                        released[step + 2] = true;
                        settled.push(step + 2);
                    }
                }
                ExpandedOp::Transfer(_) => {
                    moves[*step] += 1;
                    if moves[*step] > 1 {
                        settled.push(*step);
                    }
                }
                ExpandedOp::Release(_) if std::mem::replace(&mut released[*step], true) => {}
                ExpandedOp::Run(_) | ExpandedOp::Release(_) => settled.push(*step),
            }
        }
        settled
    }

    /// Returns a schedule of another staging of the same ops, here.
    pub fn translated(&self, from: &ExpandedProblem, schedule: &[usize]) -> Vec<usize> {
        let here = |step: &usize| self.index(from.expanded_ops[*step]);
        self.settled(&schedule.iter().filter_map(here).collect::<Vec<_>>())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::schedule::{Timeline, evaluate};

    /// Returns x → a → b → c → loss, and back through all of them: each backward op reads what its forward op read.
    pub fn chain() -> Problem {
        let value = |bytes, producer: Option<usize>| {
            let kind = match producer {
                Some(_) => ValueKind::Activation,
                None => ValueKind::Static,
            };
            Value::new(bytes, kind, producer)
        };
        let op = |name: &str, ins: &[usize], out: usize, phase| Op {
            flops: 10,
            bytes: 10,
            ..Op::new(name, ins, [out], phase, 100.0)
        };
        use OpPhase::{Backward, Forward};
        Problem {
            ops: vec![
                op("a", &[0], 1, Forward),
                op("b", &[1], 2, Forward),
                op("c", &[2], 3, Forward),
                op("loss", &[3], 4, Forward),
                op("dc", &[2, 3, 4], 5, Backward),
                op("db", &[1, 2, 5], 6, Backward),
                op("da", &[1, 6], 7, Backward),
            ],
            values: vec![
                value(5, None),
                value(1_000_000, Some(0)),
                value(1_000_000, Some(1)),
                value(1_000_000, Some(2)),
                value(4, Some(3)),
                value(1_000_000, Some(4)),
                value(1_000_000, Some(5)),
                value(5, Some(6)),
            ],
            outputs: vec![4, 7],
            transfer: Some(Transfer {
                us_per_megabyte: 40.0,
                start_us: 1.0,
                busy_share: 0.0,
            }),
        }
    }

    #[test]
    fn staging_changes_neither_memory_nor_order_until_something_is_fetched() {
        let p = chain();
        p.check().unwrap();
        let plain = evaluate(&p, &p.given_order()).unwrap();
        assert_eq!(plain.peak_above_static_bytes, 4_000_004);
        let expanded = ExpandedProblem::new(&p, &[0]).unwrap();
        expanded.problem.check().unwrap();
        let given = expanded.problem.given_order();
        assert_eq!(expanded.settled(&given), given);
        let brief = ExpandedProblem::brief(&p, &[0], Price::Whole).unwrap();
        let without = brief.problem.given_order();
        assert_eq!(expanded.translated(&brief, &without), given);
        assert_eq!(
            evaluate(&brief.problem, &without).unwrap().cost,
            plain.cost + 41.0
        );
        let score = evaluate(&expanded.problem, &given).unwrap();
        assert_eq!(score.peak_bytes, plain.peak_bytes);
        assert_eq!(score.cost, plain.cost + 41.0);
        assert_eq!(expanded.fetches(&given), [(0, 0)]);
        let live = |p: &Problem| Timeline::new(p, &p.given_order()).unwrap().live_bytes;
        assert_eq!(live(&expanded.problem)[0], live(&p)[0]);
    }

    #[test]
    fn what_is_fetched_is_not_there_between() {
        let p = chain();
        let expanded = ExpandedProblem::new(&p, &[0]).unwrap();
        // a, move, release, b, c, loss, dc, fetch, db, da.
        let schedule = [0, 1, 2, 3, 4, 5, 6, 1, 7, 8];
        let score = evaluate(&expanded.problem, &schedule).unwrap();
        assert_eq!(score.peak_above_static_bytes, 4_000_004);
        let live = Timeline::new(&expanded.problem, &schedule)
            .unwrap()
            .live_bytes;
        assert_eq!(live[6], 3_000_004);
        assert_eq!(score.cost, 7.0 * 100.0 + 2.0 * 41.0);
        assert_eq!(expanded.fetches(&schedule), [(0, 1)]);
        // Released later, it is held until then; never after it was fetched, and never twice.
        let late = [0, 1, 3, 4, 5, 2, 6, 1, 7, 8];
        assert_eq!(expanded.settled(&late), late);
        assert_eq!(
            evaluate(&expanded.problem, &late)
                .unwrap()
                .peak_above_static_bytes,
            4_000_004
        );
        let after = [0, 1, 3, 4, 5, 6, 1, 2, 7, 8];
        assert_eq!(expanded.settled(&after), schedule);
        assert_eq!(
            expanded.settled(&[0, 1, 2, 3, 4, 5, 2, 6, 1, 7, 8]),
            schedule
        );
    }

    #[test]
    fn outputs_and_gradients_are_not_moved() {
        let p = chain();
        assert_eq!(movable(&p), [true, true, true, false, false, false, false]);
        assert_eq!(
            ExpandedProblem::new(&p, &[4]).unwrap_err().code(),
            "offload"
        );
        let mut unknown = p.clone();
        unknown.transfer = None;
        assert!(ExpandedProblem::new(&unknown, &[0]).is_err());
    }
}
