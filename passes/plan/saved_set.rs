//! From "which forward results may stay" to a schedule.
//!
//! Forward ops run as given. Before a backward op that reads a forward result that was not kept, the missing results
//! are computed again, as late as possible: only what this op needs and nothing that is still alive, in the given
//! order. They die at their last use, because an instance always does. So a kept result that nothing reads costs
//! nothing, and no copy is without a consumer.
//!
//! Views are free: a view of a kept storage is read as it is, a view of a recomputed one is made again.

use super::problem::{Kind, Phase, Problem};

/// Why a result stays although the policy might have dropped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// A parameter or input: resident throughout.
    Static,
    /// Made by the backward part, or a gradient.
    Backward,
    /// Part of the answer.
    Output,
    /// Its op must not run twice.
    OnceOnly,
    /// An integer or boolean value of at most [`SMALL_BYTES`].
    Small,
}

/// Integer values up to this size are kept: shapes, axes, positions. Dropping them frees nothing and makes chains longer.
pub const SMALL_BYTES: u64 = 4096;

impl Pinned {
    pub fn reason(self) -> &'static str {
        match self {
            Pinned::Static => "resident throughout",
            Pinned::Backward => "made by the backward part",
            Pinned::Output => "a graph output",
            Pinned::OnceOnly => "its op must not run twice",
            Pinned::Small => "a small integer value",
        }
    }
}

/// For the owner of each storage, why it stays whatever a policy says; `None` where the policy decides.
pub fn pinned(problem: &Problem) -> Vec<Option<Pinned>> {
    let roots = problem.roots();
    let mut pins: Vec<Option<Pinned>> = problem
        .values
        .iter()
        .map(|value| {
            let op = match (value.kind, value.producer) {
                (Kind::Activation, Some(op)) => &problem.ops[op],
                _ => return Some(Pinned::Static),
            };
            if op.phase == Phase::Backward {
                Some(Pinned::Backward)
            } else if !op.recomputable {
                Some(Pinned::OnceOnly)
            } else if value.integral && value.view_of.is_none() && value.bytes <= SMALL_BYTES {
                Some(Pinned::Small)
            } else {
                None
            }
        })
        .collect();
    for output in &problem.outputs {
        pins[roots[*output]].get_or_insert(Pinned::Output);
    }
    // A view whose op must not run twice cannot be made again, so its storage stays.
    for op in problem.ops.iter().filter(|op| !op.recomputable) {
        for out in &op.outs {
            pins[roots[*out]].get_or_insert(Pinned::OnceOnly);
        }
    }
    pins
}

/// The schedule that keeps what `keep` says (by owner of storage; entries of views are not read) and what is pinned.
pub fn schedule(problem: &Problem, keep: &[bool]) -> Vec<usize> {
    let roots = problem.roots();
    let pins = pinned(problem);
    // Whether a backward op may read the value as it is.
    let mut ready: Vec<bool> = roots
        .iter()
        .map(|r| keep[*r] || pins[*r].is_some())
        .collect();
    let mut schedule = Vec::with_capacity(problem.ops.len());
    let mut listed = vec![false; problem.ops.len()];
    for (o, op) in problem.ops.iter().enumerate() {
        if op.phase == Phase::Backward {
            let mut missing = Vec::new();
            let mut stack: Vec<usize> = op.ins.clone();
            while let Some(v) = stack.pop() {
                let Some(producer) = problem.values[v].producer else {
                    continue;
                };
                if !ready[v] && !std::mem::replace(&mut listed[producer], true) {
                    missing.push(producer);
                    stack.extend(&problem.ops[producer].ins);
                }
            }
            missing.sort_unstable();
            for copy in &missing {
                listed[*copy] = false;
                for v in &problem.ops[*copy].outs {
                    ready[*v] = true;
                }
            }
            schedule.extend(missing);
        }
        schedule.push(o);
        if op.phase == Phase::Backward {
            // A backward view of a forward storage shows the computation that was just read.
            for v in &op.outs {
                ready[*v] = true;
            }
        }
    }
    schedule
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Device, MemoryProfile, Sizes};
    use crate::plan::evaluate;
    use crate::testing::{Random, random_graph};

    #[test]
    fn copies_have_consumers_and_nothing_alive_is_recomputed() {
        let mut r = Random(11);
        let (mut copies, mut lower) = (0, 0);
        for n in 0..400 {
            let g = random_graph(&mut r, 3 + n % 25);
            let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
            let m = MemoryProfile::new(&g, &sizes).unwrap();
            let (p, _) = Problem::of_graph(&g, &sizes, &m, &Device::default()).unwrap();
            let keep: Vec<bool> = p.values.iter().map(|_| r.below(2) == 0).collect();
            let s = schedule(&p, &keep);
            let (before, after) = (
                evaluate(&p, &p.given_order()).unwrap(),
                evaluate(&p, &s).unwrap(),
            );
            copies += s.len() - p.ops.len();
            lower += (after.peak_bytes < before.peak_bytes) as usize;
            // First computations come in the given order, and no op runs more than twice.
            let mut runs = vec![0; p.ops.len()];
            let mut firsts = Vec::new();
            for (t, o) in s.iter().enumerate() {
                runs[*o] += 1;
                if runs[*o] == 1 {
                    firsts.push(*o);
                    continue;
                }
                assert_eq!((runs[*o], p.ops[*o].phase), (2, Phase::Forward));
                // Something later, before any further computation of it, reads what it made.
                let outs = &p.ops[*o].outs;
                assert!(
                    s[t + 1..]
                        .iter()
                        .any(|x| p.ops[*x].ins.iter().any(|v| outs.contains(v)))
                );
            }
            assert_eq!(firsts, p.given_order());
            let all = vec![true; p.values.len()];
            assert_eq!(schedule(&p, &all), p.given_order());
        }
        assert!(copies > 500 && lower > 20, "{copies} {lower}");
    }
}
