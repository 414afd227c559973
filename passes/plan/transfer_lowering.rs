//! A problem in which the results of some ops wait outside the device's memory.
//!
//! An offloaded op `p` becomes three. The first computes: it needs what `p` needs, its results count as temporaries, and
//! what it leaves takes no memory here. The second, of kind `Transfer`, makes the results of `p` from that. Its first
//! run, right after the first op's, stands for moving out; every later run is a fetch. The third only reads the results:
//! by then they are outside, and until then they are held. Moving in and out cost the same, so memory and order of
//! the staged problem are those of the real thing, and every solver, policy and judge works on it as on any problem; the
//! sum of its costs is the time if nothing runs beside a transfer, and [`overlap`](super::overlap) says what it is if
//! something does. What it cannot say is computing `p` again: an offloaded op runs once.
//!
//! Solvers get the problem without the third ops ([`Staged::brief`]): right after a transfer they change nothing, and
//! where else they go is settled when all else is.

use super::input::{OpAnnotations, Part};
use super::problem::{Kind, Op, Phase, Problem, Value};
#[cfg(test)]
use super::problem::{Transfer, Wait};
use crate::error::{Error, Result};

/// What an op of a staged problem stands for; ops are those of the problem it was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Running an op.
    Run(usize),
    /// Moving the results of an op: out the first time, in after that.
    Move(usize),
    /// They have arrived outside and may go here.
    Release(usize),
}

impl Stage {
    pub fn op(self) -> usize {
        match self {
            Stage::Run(op) | Stage::Move(op) | Stage::Release(op) => op,
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

/// The staged problem, and the way back.
#[derive(Clone, Debug)]
pub struct Staged {
    pub problem: Problem,
    /// Of each op of the staged problem. Values keep their numbers; what is outside comes after them.
    pub stages: Vec<Stage>,
    /// Ops whose results wait outside, in order.
    pub offloaded: Vec<usize>,
    /// Ops that each of them has become.
    ops_each: usize,
}

/// Whether the results of each op may wait outside: storages of the forward part that the op owns, all of them read,
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
        value.kind == Kind::Activation && value.view_of.is_none() && read[*v] && !is_output[*v]
    };
    let movable =
        |op: &Op| op.phase == Phase::Forward && !op.outs.is_empty() && op.outs.iter().all(&moves);
    problem.ops.iter().map(movable).collect()
}

/// Bytes of the results of an op.
pub fn result_bytes(problem: &Problem, op: usize) -> u64 {
    let outs = problem.ops[op].outs.iter();
    outs.map(|v| problem.values[*v].bytes).sum()
}

/// What each op would wait for if its results moved, for a bound; without a lane nobody waits for it.
#[cfg(test)]
pub fn waits(problem: &Problem, transfer: &Transfer, has_lane: bool) -> Vec<Option<Wait>> {
    let wait = |(o, may): (usize, &bool)| {
        let wait = transfer.wait(result_bytes(problem, o), true);
        let lane_us = if has_lane { wait.lane_us } else { 0.0 };
        may.then_some(Wait { lane_us, ..wait })
    };
    movable(problem).iter().enumerate().map(wait).collect()
}

impl Staged {
    /// `offloaded` are ops, in any order.
    ///
    /// # Errors
    /// An op whose results cannot be moved, or a problem that does not say what transfers cost.
    pub fn new(problem: &Problem, offloaded: &[usize]) -> Result<Staged> {
        Staged::of(problem, offloaded, Price::Whole, 3)
    }

    /// The same without releases, for a solver.
    ///
    /// # Errors
    /// As [`Staged::new`].
    pub fn brief(problem: &Problem, offloaded: &[usize], price: Price) -> Result<Staged> {
        Staged::of(problem, offloaded, price, 2)
    }

    fn of(problem: &Problem, offloaded: &[usize], price: Price, ops_each: usize) -> Result<Staged> {
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
        let mut staged = Staged {
            problem: Problem {
                ops: Vec::with_capacity(ops),
                values: problem.values.clone(),
                outputs: problem.outputs.clone(),
                transfer: problem.transfer,
            },
            stages: Vec::with_capacity(ops),
            offloaded,
            ops_each,
        };
        let mut moved = vec![false; problem.ops.len()];
        for op in &staged.offloaded {
            moved[*op] = true;
        }
        for (o, op) in problem.ops.iter().enumerate() {
            if moved[o] {
                let whole = transfer.cost(result_bytes(problem, o));
                let cost = match price {
                    Price::Whole => whole,
                    Price::Hidden => transfer.own_us(whole),
                };
                staged.push_moved(op, o, cost);
            } else {
                staged.push(op.clone(), Stage::Run(o));
            }
        }
        Ok(staged)
    }

    fn push(&mut self, op: Op, stage: Stage) {
        for v in &op.outs {
            self.problem.values[*v].producer = Some(self.problem.ops.len());
        }
        self.problem.ops.push(op);
        self.stages.push(stage);
    }

    fn push_moved(&mut self, op: &Op, o: usize, cost: f64) {
        let bytes: u64 = op.outs.iter().map(|v| self.problem.values[*v].bytes).sum();
        let outside = self.problem.values.len();
        self.problem.values.push(Value {
            bytes: 0,
            kind: Kind::Activation,
            producer: None,
            view_of: None,
            integral: false,
        });
        let run = Op {
            outs: vec![outside],
            temp_bytes: op.temp_bytes + bytes,
            recomputable: false,
            ..op.clone()
        };
        self.push(run, Stage::Run(o));
        let fetch = Op {
            name: format!("{}/fetch", op.name),
            kind: "Transfer".into(),
            ins: vec![outside],
            outs: op.outs.clone(),
            phase: op.phase,
            cost,
            flops: 0,
            bytes,
            temp_bytes: 0,
            in_place_operands: Vec::new(),
            recomputable: true,
            ordered: false,
        };
        let release = Op {
            name: format!("{}/release", op.name),
            ins: op.outs.clone(),
            outs: Vec::new(),
            cost: 0.0,
            bytes: 0,
            recomputable: false,
            ..fetch.clone()
        };
        self.push(fetch, Stage::Move(o));
        if self.ops_each == 3 {
            self.push(release, Stage::Release(o));
        }
    }

    /// What is known of the ops, for the staged ones.
    pub fn structure(&self, structure: &OpAnnotations) -> OpAnnotations {
        let part = |stage: &Stage| match stage {
            Stage::Run(op) => structure.part_of[*op],
            Stage::Move(_) | Stage::Release(_) => Part::Other,
        };
        OpAnnotations {
            blocks: structure.blocks,
            block_of: self.each(&structure.block_of),
            part_of: self.stages.iter().map(part).collect(),
            submodules: structure.submodules.clone(),
            submodule_of: self.each(&structure.submodule_of),
            core_of: self.each(&structure.core_of),
            trained: self.each(&structure.trained),
            opens_layer: self.each(&structure.opens_layer),
            feeds_scores: self.each(&structure.feeds_scores),
        }
    }

    /// Something by op, for the staged ops.
    pub fn each<T: Clone>(&self, by_op: &[T]) -> Vec<T> {
        self.stages.iter().map(|s| by_op[s.op()].clone()).collect()
    }

    /// The op of the staged problem that a stage is; `None` for a stage that is not there.
    pub fn index(&self, stage: Stage) -> Option<usize> {
        // Every offloaded op puts so many more behind it.
        let before = self.offloaded.partition_point(|op| *op < stage.op());
        let run = stage.op() + (self.ops_each - 1) * before;
        let index = match stage {
            Stage::Run(_) => run,
            Stage::Move(_) => run + 1,
            Stage::Release(_) => run + 2,
        };
        (self.stages.get(index) == Some(&stage)).then_some(index)
    }

    /// How often each offloaded op's results are fetched.
    pub fn fetches(&self, schedule: &[usize]) -> Vec<(usize, usize)> {
        let mut runs = vec![0usize; self.stages.len()];
        for step in schedule {
            runs[*step] += 1;
        }
        let moves = self.stages.iter().zip(runs);
        moves
            .filter_map(|(stage, n)| match stage {
                Stage::Move(op) => Some((*op, n.saturating_sub(1))),
                Stage::Run(_) | Stage::Release(_) => None,
            })
            .collect()
    }

    /// The schedule with every moving out right after its op, and every release once, between that and the first fetch:
    /// where the schedule has it, else right after moving out.
    pub fn settled(&self, schedule: &[usize]) -> Vec<usize> {
        let mut moves = vec![0usize; self.stages.len()];
        let mut released = vec![false; self.stages.len()];
        // Whether a release comes in time where it is.
        let mut is_there = vec![false; self.stages.len()];
        for step in schedule {
            match self.stages[*step] {
                Stage::Move(_) => moves[*step] += 1,
                Stage::Release(_) => is_there[*step] |= moves[step - 1] <= 1,
                Stage::Run(_) => {}
            }
        }
        moves.fill(0);
        let mut settled = Vec::with_capacity(schedule.len());
        for step in schedule {
            match self.stages[*step] {
                Stage::Run(op) if self.stages.get(step + 1) == Some(&Stage::Move(op)) => {
                    settled.extend([*step, step + 1]);
                    if self.ops_each == 3 && !is_there[step + 2] {
                        released[step + 2] = true;
                        settled.push(step + 2);
                    }
                }
                Stage::Move(_) => {
                    moves[*step] += 1;
                    if moves[*step] > 1 {
                        settled.push(*step);
                    }
                }
                Stage::Release(_) if std::mem::replace(&mut released[*step], true) => {}
                Stage::Run(_) | Stage::Release(_) => settled.push(*step),
            }
        }
        settled
    }

    /// A schedule of another staging of the same ops, here.
    pub fn translated(&self, from: &Staged, schedule: &[usize]) -> Vec<usize> {
        let here = |step: &usize| self.index(from.stages[*step]);
        self.settled(&schedule.iter().filter_map(here).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::{Timeline, evaluate};

    /// x → a → b → c → loss, and back through all of them: each backward op reads what its forward op read.
    fn chain() -> Problem {
        let value = |bytes, producer: Option<usize>| Value {
            bytes,
            kind: match producer {
                Some(_) => Kind::Activation,
                None => Kind::Static,
            },
            producer,
            view_of: None,
            integral: false,
        };
        let op = |name: &str, ins: &[usize], out: usize, phase| Op {
            name: name.into(),
            kind: String::new(),
            ins: ins.into(),
            outs: vec![out],
            phase,
            cost: 100.0,
            flops: 10,
            bytes: 10,
            temp_bytes: 0,
            in_place_operands: Vec::new(),
            recomputable: true,
            ordered: false,
        };
        use Phase::{Backward, Forward};
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
        let staged = Staged::new(&p, &[0]).unwrap();
        staged.problem.check().unwrap();
        let given = staged.problem.given_order();
        assert_eq!(staged.settled(&given), given);
        let brief = Staged::brief(&p, &[0], Price::Whole).unwrap();
        let without = brief.problem.given_order();
        assert_eq!(staged.translated(&brief, &without), given);
        assert_eq!(
            evaluate(&brief.problem, &without).unwrap().cost,
            plain.cost + 41.0
        );
        let score = evaluate(&staged.problem, &given).unwrap();
        assert_eq!(score.peak_bytes, plain.peak_bytes);
        assert_eq!(score.cost, plain.cost + 41.0);
        assert_eq!(staged.fetches(&given), [(0, 0)]);
        let live = |p: &Problem| Timeline::new(p, &p.given_order()).unwrap().live_bytes;
        assert_eq!(live(&staged.problem)[0], live(&p)[0]);
    }

    #[test]
    fn what_is_fetched_is_not_there_between() {
        let p = chain();
        let staged = Staged::new(&p, &[0]).unwrap();
        // a, move, release, b, c, loss, dc, fetch, db, da.
        let schedule = [0, 1, 2, 3, 4, 5, 6, 1, 7, 8];
        let score = evaluate(&staged.problem, &schedule).unwrap();
        assert_eq!(score.peak_above_static_bytes, 4_000_004);
        let live = Timeline::new(&staged.problem, &schedule)
            .unwrap()
            .live_bytes;
        assert_eq!(live[6], 3_000_004);
        assert_eq!(score.cost, 7.0 * 100.0 + 2.0 * 41.0);
        assert_eq!(staged.fetches(&schedule), [(0, 1)]);
        // Released later, it is held until then; never after it was fetched, and never twice.
        let late = [0, 1, 3, 4, 5, 2, 6, 1, 7, 8];
        assert_eq!(staged.settled(&late), late);
        assert_eq!(
            evaluate(&staged.problem, &late)
                .unwrap()
                .peak_above_static_bytes,
            4_000_004
        );
        let after = [0, 1, 3, 4, 5, 6, 1, 2, 7, 8];
        assert_eq!(staged.settled(&after), schedule);
        assert_eq!(staged.settled(&[0, 1, 2, 3, 4, 5, 2, 6, 1, 7, 8]), schedule);
    }

    #[test]
    fn a_plan_knows_the_ops_of_its_steps() {
        let p = chain();
        let staged = Staged::new(&p, &[0, 2]).unwrap();
        for (index, stage) in staged.stages.iter().enumerate() {
            assert_eq!(staged.index(*stage), Some(index));
        }
        assert_eq!(staged.index(Stage::Move(1)), None);
        let plan = crate::plan::Plan {
            offloaded: staged.offloaded.clone(),
            ..crate::plan::Plan::bare(Vec::new())
        };
        for (step, stage) in staged.stages.iter().enumerate() {
            assert_eq!(plan.op_of(step), stage.op());
        }
    }

    #[test]
    fn outputs_and_gradients_are_not_moved() {
        let p = chain();
        assert_eq!(movable(&p), [true, true, true, false, false, false, false]);
        assert_eq!(Staged::new(&p, &[4]).unwrap_err().code(), "offload");
        let mut unknown = p.clone();
        unknown.transfer = None;
        assert!(Staged::new(&unknown, &[0]).is_err());
    }
}
