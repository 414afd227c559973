//! Removes the views of a problem, and restores them in its schedules.

use super::index::{ByValue, OpIdx, ValueIdx};
use super::problem::{Op, Problem, ValueKind};
use super::steps::Step;
use std::ops::Range;

impl Problem {
    /// Returns the same step with every view replaced by the value that owns its storage, and ops that only make views left
    /// out: the form the benches judge. The second result gives, for each op of the folded problem, its op here.
    ///
    /// What a view op reads beside its storage (a target shape) is not a use in the folded form; such values are a few
    /// bytes. [`Problem::unfold`] takes a schedule back, and [`super::evaluate`] on that is exact. Ops have no names there.
    pub fn fold(&self) -> (Problem, Vec<OpIdx>) {
        let roots = self.roots();
        let ops: Vec<OpIdx> = self.ops.indices().filter(|o| !self.is_view(*o)).collect();
        let mut new_index = self.by_op(None);
        for (new, old) in ops.iter().enumerate() {
            new_index[*old] = Some(OpIdx(new));
        }
        let mut folded = Problem {
            ops: Vec::with_capacity(ops.len()).into(),
            values: self.values.clone(),
            outputs: self.outputs.iter().map(|v| roots[*v]).collect(),
            transfer: self.transfer,
            slices: self.slices.clone(),
            is_bound: self.is_bound,
        };
        folded.outputs.sort_unstable();
        folded.outputs.dedup();
        for old in &ops {
            let op = &self.ops[*old];
            let of = |list: &[ValueIdx]| list.iter().map(|v| roots[*v]).collect();
            let owned = |v: &&ValueIdx| self.values[**v].view_of.is_none();
            folded.ops.push(Op {
                // Names are many, and the folded form needs none.
                name: String::new(),
                kind: String::new(),
                ins: of(&op.ins),
                outs: op.outs.iter().filter(owned).copied().collect(),
                phase: op.phase,
                cost: op.cost,
                flops: op.flops,
                bytes: op.bytes,
                temp_bytes: op.temp_bytes,
                link_bytes: op.link_bytes,
                in_place_operands: of(&op.in_place_operands),
                recomputable: op.recomputable,
                must_recompute: op.must_recompute,
                ordered: op.ordered,
                layer: op.layer,
            });
        }
        for value in &mut folded.values {
            value.producer = match value.view_of.take() {
                Some(_) => None,
                None => value.producer.and_then(|p| new_index[p]),
            };
            if value.producer.is_none() && value.kind == ValueKind::Activation {
                // What was a view has no bytes and no readers here.
                value.kind = ValueKind::Static;
            }
        }
        (folded, ops)
    }

    /// Returns a schedule of [`Problem::fold`]'s problem as one of this problem: first computations of view ops stay where the
    /// given order has them unless nothing reads them there, and a view is recomputed wherever its storage was and it is
    /// read after that.
    pub fn unfold(&self, folded_ops: &[OpIdx], schedule: &[u32]) -> Vec<OpIdx> {
        let runs = schedule.iter().map(|op| Step::Run(OpIdx(*op as usize)));
        let steps = self.unfold_steps(folded_ops, runs);
        steps.into_iter().map(Step::op).collect()
    }

    /// Returns steps of [`Problem::fold`]'s problem as steps of this one, as [`Problem::unfold`] does. What is fetched is a new
    /// storage, as what is recomputed is.
    pub fn unfold_steps(
        &self,
        folded_ops: &[OpIdx],
        steps: impl ExactSizeIterator<Item = Step>,
    ) -> Vec<Step> {
        let mut unfolding = Unfolding {
            problem: self,
            roots: self.roots(),
            version: self.by_value(0),
            shows: self.by_value(0),
            out: Vec::with_capacity(steps.len() + self.ops.len() - folded_ops.len()),
        };
        let mut next = 0;
        for step in steps {
            let op = folded_ops[step.op().0];
            match step {
                Step::Run(_) => {
                    unfolding.views(next..op.0);
                    next = next.max(op.0 + 1);
                    unfolding.step(op);
                    unfolding.renew(op);
                }
                Step::Offload(_) => unfolding.out.push(Step::Offload(op)),
                Step::Release(_) => unfolding.out.push(Step::Release(op)),
                Step::Fetch(_) => {
                    unfolding.out.push(Step::Fetch(op));
                    unfolding.renew(op);
                }
            }
        }
        unfolding.views(next..self.ops.len());
        unfolding.refresh(&self.outputs);
        self.without_unread_views(unfolding.out)
    }

    /// Returns the schedule without runs of view ops that nothing reads before the view is recomputed: a storage that is made
    /// again just after would live on for them.
    fn without_unread_views(&self, steps: Vec<Step>) -> Vec<Step> {
        let mut is_read = self.by_value(false);
        for v in &self.outputs {
            is_read[*v] = true;
        }
        let mut runs_later = self.by_op(false);
        let mut kept: Vec<Step> = Vec::with_capacity(steps.len());
        for step in steps.into_iter().rev() {
            let o = step.op();
            let op = &self.ops[o];
            match step {
                Step::Run(_) => {
                    if runs_later[o] && self.is_view(o) && op.outs.iter().all(|v| !is_read[*v]) {
                        continue;
                    }
                    runs_later[o] = true;
                    op.outs.iter().for_each(|v| is_read[*v] = false);
                    op.ins.iter().for_each(|v| is_read[*v] = true);
                }
                Step::Fetch(_) => op.outs.iter().for_each(|v| is_read[*v] = false),
                Step::Offload(_) | Step::Release(_) => {
                    op.outs.iter().for_each(|v| is_read[*v] = true);
                }
            }
            kept.push(step);
        }
        kept.reverse();
        kept
    }
}

/// A schedule that is being taken back to a problem with views.
struct Unfolding<'a> {
    problem: &'a Problem,
    roots: ByValue<ValueIdx>,
    /// How often the storage of each root was computed so far.
    version: ByValue<u32>,
    /// Which computation of its storage each value shows.
    shows: ByValue<u32>,
    out: Vec<Step>,
}

impl Unfolding<'_> {
    /// Appends the view ops among `ops`.
    fn views(&mut self, ops: Range<usize>) {
        for op in ops.map(OpIdx) {
            if self.problem.is_view(op) {
                self.step(op);
            }
        }
    }

    /// Makes stale views that `op` reads again, then appends `op`.
    fn step(&mut self, op: OpIdx) {
        self.refresh(&self.problem.ops[op].ins);
        self.run(op);
    }

    /// Marks views of the storages that `op` owns as stale: the storages were computed anew.
    fn renew(&mut self, op: OpIdx) {
        for v in &self.problem.ops[op].outs {
            if self.problem.values[*v].view_of.is_none() {
                self.version[*v] += 1;
                self.shows[*v] = self.version[*v];
            }
        }
    }

    /// Makes those of `values` that are stale views again, and the stale views they were made from.
    fn refresh(&mut self, values: &[ValueIdx]) {
        let mut needed = Vec::new();
        let mut stack = values.to_vec();
        while let Some(v) = stack.pop() {
            let value = &self.problem.values[v];
            let (Some(base), Some(producer)) = (value.view_of, value.producer) else {
                continue;
            };
            if self.shows[v] != self.version[self.roots[v]] && !needed.contains(&producer) {
                needed.push(producer);
                stack.push(base);
            }
        }
        needed.sort_unstable();
        for op in needed {
            self.run(op);
        }
    }

    fn run(&mut self, op: OpIdx) {
        self.out.push(Step::Run(op));
        for v in &self.problem.ops[op].outs {
            if self.problem.values[*v].view_of.is_some() {
                self.shows[*v] = self.version[self.roots[*v]];
            }
        }
    }
}
