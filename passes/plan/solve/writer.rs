//! Writes a schedule in which every step finds its operands: missing ones are recomputed right before it. Values that must not
//! stay for the backward pass are dropped when it begins.

use super::compact::{Dag, NONE};

/// A schedule so far, and what is present after it.
pub struct Writer<'a> {
    dag: &'a Dag,
    /// Ops in the order in which they run, repeats included.
    pub schedule: Vec<u32>,
    /// By value: whether it is present after the schedule.
    pub present: Vec<bool>,
    stack: Vec<(u32, usize)>,
    /// Whether missing operands are made last first.
    pub reverse: bool,
    /// Whether the backward pass has begun, or nothing changes when it does.
    turned: bool,
}

impl<'a> Writer<'a> {
    /// Returns a writer that continues `schedule`, after which the values of `present` are there.
    pub fn new(dag: &'a Dag, schedule: Vec<u32>, present: Vec<bool>) -> Writer<'a> {
        Writer {
            turned: dag.turn == NONE || schedule.contains(&dag.turn),
            dag,
            schedule,
            present,
            stack: Vec::new(),
            reverse: false,
        }
    }

    /// Recomputes a value unless it is present, operands first; `false` if something cannot be recomputed.
    pub fn ensure(&mut self, v: u32) -> bool {
        if self.present[v as usize] {
            return true;
        }
        let Some(o) = self.dag.remaker(v) else {
            return false;
        };
        self.stack.push((o, 0));
        while let Some((o, from)) = self.stack.pop() {
            if from == 0 && self.dag.outs(o).iter().all(|v| self.present[*v as usize]) {
                continue;
            }
            let ins = self.dag.ins(o);
            let missing =
                (from..ins.len()).find(|i| !self.present[ins[self.place(*i, ins.len())] as usize]);
            match missing {
                Some(i) => {
                    let Some(maker) = self.dag.remaker(ins[self.place(i, ins.len())]) else {
                        self.stack.clear();
                        return false;
                    };
                    self.stack.push((o, i + 1));
                    self.stack.push((maker, 0));
                }
                None => self.push(o),
            }
        }
        true
    }

    fn place(&self, i: usize, len: usize) -> usize {
        if self.reverse { len - 1 - i } else { i }
    }

    /// Appends a step whose operands are there.
    pub fn push(&mut self, o: u32) {
        self.schedule.push(o);
        for v in self.dag.outs(o) {
            self.present[*v as usize] = true;
        }
    }

    /// Appends steps, each with what it is missing.
    pub fn steps(&mut self, steps: &[u32]) -> bool {
        steps.iter().all(|o| {
            if !self.turned && *o == self.dag.turn {
                self.turned = true;
                for (present, dropped) in self.present.iter_mut().zip(&self.dag.dropped) {
                    *present &= !dropped;
                }
            }
            let ins = self.dag.ins(*o);
            let ready = (0..ins.len()).all(|i| self.ensure(ins[self.place(i, ins.len())]));
            self.push(*o);
            ready
        })
    }

    /// Makes the outputs that are missing.
    pub fn outputs(&mut self) -> bool {
        self.dag.outputs.iter().all(|v| self.ensure(*v))
    }
}

/// Returns the given order, in which every value that must not be kept is recomputed for the first backward op that reads
/// it; `None` where that is impossible.
pub fn with_drops(dag: &Dag) -> Option<Vec<u32>> {
    let schedule = Vec::with_capacity(dag.ops());
    let mut writer = Writer::new(dag, schedule, vec![true; dag.values()]);
    let given: Vec<u32> = (0..dag.ops() as u32).collect();
    (writer.steps(&given) && writer.outputs()).then_some(writer.schedule)
}
