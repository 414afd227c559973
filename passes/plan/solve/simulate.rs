//! Computes live bytes at every step of a schedule of a [`Dag`], and removes repeats that nothing reads.
//!
//! The rules are those of [`evaluate`](crate::schedule::evaluate): a use reads the most recent computation, an instance is
//! freed right after its last use, a placeholder lives from the start. Linear in the operands of the steps; buffers are
//! kept between runs, because the search simulates thousands of schedules.

use super::compact::{Dag, NONE};

/// The result of one run, and its buffers.
#[derive(Clone, Default)]
pub struct Simulation {
    /// Bytes above static while each step runs.
    pub live: Vec<i64>,
    /// The largest number in `live`.
    pub peak: i64,
    /// Bytes that are released after each step, while simulating.
    death: Vec<i64>,
    /// The last use of the present instance of each value; [`NONE`] before there is one.
    last: Vec<u32>,
    /// Whether each step writes over an operand.
    pub(super) taken: Vec<bool>,
}

impl Simulation {
    /// Simulates a valid schedule. `end` after the last step keeps outputs alive.
    pub fn run(&mut self, dag: &Dag, schedule: &[u32]) {
        let steps = schedule.len();
        self.live.clear();
        self.live.resize(steps, 0);
        self.death.clear();
        self.death.resize(steps + 1, 0);
        self.last.clear();
        self.last.resize(dag.values(), NONE);
        self.taken.clear();
        self.taken.resize(steps, false);
        let (live, death, last) = (&mut self.live, &mut self.death, &mut self.last);
        let taken = &mut self.taken;
        let mut take = |v: usize, t: u32| {
            if let Some(o) = schedule.get(t as usize)
                && dag.in_place_operands(*o).contains(&(v as u32))
            {
                taken[t as usize] = true;
            }
        };
        for (t, o) in schedule.iter().enumerate() {
            for v in dag.ins(*o) {
                last[*v as usize] = t as u32;
            }
            for v in dag.outs(*o) {
                let v = *v as usize;
                if last[v] != NONE {
                    death[last[v] as usize] += dag.size[v];
                    take(v, last[v]);
                }
                live[t] += dag.size[v];
                last[v] = t as u32;
            }
        }
        for v in &dag.outputs {
            last[*v as usize] = steps as u32;
        }
        let mut now = 0;
        for v in &dag.placeholders {
            if last[*v as usize] != NONE {
                now += dag.size[*v as usize];
            }
        }
        for v in 0..dag.values() {
            if last[v] != NONE {
                death[last[v] as usize] += dag.size[v];
                take(v, last[v]);
            }
        }
        self.peak = 0;
        for (t, o) in schedule.iter().enumerate() {
            now += live[t];
            live[t] = now + dag.temp_bytes[*o as usize];
            if self.taken[t] {
                live[t] -= dag.over_bytes(*o);
            }
            self.peak = self.peak.max(live[t]);
            now -= death[t];
        }
    }
}

/// Returns whether each step computes its op for the first time.
pub fn first_runs(dag: &Dag, schedule: &[u32]) -> Vec<bool> {
    let mut seen = vec![false; dag.ops()];
    schedule
        .iter()
        .map(|o| !std::mem::replace(&mut seen[*o as usize], true))
        .collect()
}

/// Takes out repeats none of whose results is read before it is recomputed; what they alone read goes with them.
pub fn drop_unread(dag: &Dag, schedule: &mut Vec<u32>) {
    let first = first_runs(dag, schedule);
    let mut wanted = dag.is_output.clone();
    let mut keep = vec![true; schedule.len()];
    for t in (0..schedule.len()).rev() {
        let o = schedule[t];
        if !first[t] && !dag.outs(o).iter().any(|v| wanted[*v as usize]) {
            keep[t] = false;
            continue;
        }
        for v in dag.outs(o) {
            wanted[*v as usize] = false;
        }
        for v in dag.ins(o) {
            wanted[*v as usize] = true;
        }
    }
    let mut t = 0;
    schedule.retain(|_| {
        t += 1;
        keep[t - 1]
    });
}
