//! `diff`: the differences between two plans for the same graph.

use crate::units::{at_most, bytes};
use ckpt_passes::plan::{OpIdx, Plan};
use ckpt_passes::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The differences of plan B from plan A.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Policy of plan A, or `budget`, with the options that constrain it.
    pub policy_a: String,
    /// Policy of plan B, in the same form.
    pub policy_b: String,
    /// Peak of plan A, static bytes included.
    pub peak_a_bytes: u64,
    /// Peak of plan B, static bytes included.
    pub peak_b_bytes: u64,
    /// Whether the peaks of A and B are upper bounds, for data decides some sizes.
    pub peak_is_bound: [bool; 2],
    /// Cost of plan A, recomputation included: microseconds, unless the maker of a cost graph says otherwise.
    pub cost_a: f64,
    /// Cost of plan B, in the unit of `cost_a`.
    pub cost_b: f64,
    /// FLOPs of plan A, recomputation included.
    pub flops_a: u64,
    /// FLOPs of plan B, recomputation included.
    pub flops_b: u64,
    /// Steps of plan A: runs of ops and moves.
    pub steps_a: usize,
    /// Steps of plan B: runs of ops and moves.
    pub steps_b: usize,
    /// Ops that run more or less often in B, in the model's order.
    pub changed: Vec<Change>,
    /// True if the schedules are equal, step by step.
    pub is_same: bool,
}

/// One op that runs more or less often in B.
#[derive(Clone, Debug, Serialize)]
pub struct Change {
    /// Index of the op in the problem that both plans are for.
    pub op: OpIdx,
    /// The name from a decision about it.
    pub name: Option<String>,
    /// Bytes of the value of that decision; `None` where no decision is about the op.
    pub bytes: Option<u64>,
    /// Steps of plan A that run the op or move its results.
    pub runs_a: usize,
    /// Steps of plan B that run the op or move its results.
    pub runs_b: usize,
}

fn runs(plan: &Plan) -> BTreeMap<OpIdx, usize> {
    let mut runs = BTreeMap::new();
    for step in &plan.schedule.steps {
        *runs.entry(step.op()).or_insert(0) += 1;
    }
    runs
}

impl Difference {
    /// Compares two plans.
    ///
    /// # Errors
    /// `error[plan]` where the plans are for different graphs.
    pub fn new(a: &Plan, b: &Plan) -> Result<Difference> {
        let known = !a.fingerprint.is_empty() && !b.fingerprint.is_empty();
        if known && a.fingerprint != b.fingerprint {
            return Err(
                Error::usage("plan", "the plans were made for different graphs")
                    .expected(format!("fingerprint {}", a.fingerprint))
                    .found(b.fingerprint.clone()),
            );
        }
        let named: BTreeMap<OpIdx, (&str, u64)> = a
            .decisions
            .iter()
            .chain(&b.decisions)
            .map(|d| (d.op, (d.name.as_str(), d.bytes)))
            .collect();
        let (runs_a, runs_b) = (runs(a), runs(b));
        let mut ops: Vec<OpIdx> = runs_a.keys().chain(runs_b.keys()).copied().collect();
        ops.sort_unstable();
        ops.dedup();
        let count = |runs: &BTreeMap<OpIdx, usize>, op| runs.get(op).copied().unwrap_or(0);
        let changed = ops
            .iter()
            .filter(|op| count(&runs_a, op) != count(&runs_b, op));
        Ok(Difference {
            policy_a: a.policy.clone(),
            policy_b: b.policy.clone(),
            peak_a_bytes: a.after.peak_bytes,
            peak_b_bytes: b.after.peak_bytes,
            peak_is_bound: [a.peak_is_bound, b.peak_is_bound],
            cost_a: a.after.cost,
            cost_b: b.after.cost,
            flops_a: a.after.flops,
            flops_b: b.after.flops,
            steps_a: a.schedule.steps.len(),
            steps_b: b.schedule.steps.len(),
            changed: changed
                .map(|op| Change {
                    op: *op,
                    name: named.get(op).map(|n| n.0.to_string()),
                    bytes: named.get(op).map(|n| n.1),
                    runs_a: count(&runs_a, op),
                    runs_b: count(&runs_b, op),
                })
                .collect(),
            is_same: a.schedule == b.schedule,
        })
    }

    /// Returns the text for people.
    pub fn human(&self) -> String {
        if self.is_same {
            return "the plans are the same\n".into();
        }
        let mut out = String::new();
        let most = |is_bound, size| format!("{}{}", at_most(is_bound), bytes(size));
        let rows = [
            ["".into(), "A".into(), "B".into()],
            [
                "policy".into(),
                self.policy_a.clone(),
                self.policy_b.clone(),
            ],
            [
                "peak".into(),
                most(self.peak_is_bound[0], self.peak_a_bytes),
                most(self.peak_is_bound[1], self.peak_b_bytes),
            ],
            [
                "cost".into(),
                format!("{:.1}", self.cost_a),
                format!("{:.1}", self.cost_b),
            ],
            [
                "FLOPs".into(),
                self.flops_a.to_string(),
                self.flops_b.to_string(),
            ],
            [
                "steps".into(),
                self.steps_a.to_string(),
                self.steps_b.to_string(),
            ],
        ];
        let width = |column: usize| {
            let cells = rows
                .iter()
                .map(|row: &[String; 3]| row[column].chars().count());
            cells.max().unwrap_or(0).max(18)
        };
        let (a, b) = (width(1), width(2));
        for [what, left, right] in &rows {
            let _ = writeln!(out, "  {what:<10}  {left:>a$}  {right:>b$}");
        }
        if self.changed.is_empty() {
            out.push_str("\n  the same ops run the same number of times, in another order\n");
        } else {
            out.push('\n');
        }
        for c in &self.changed {
            let what = match (c.runs_a, c.runs_b) {
                (1, n) => format!("computed {n} times only in B"),
                (n, 1) => format!("computed {n} times only in A"),
                (a, b) => format!("computed {a} times in A, {b} in B"),
            };
            let name = c.name.clone().unwrap_or_else(|| format!("op {}", c.op));
            let size = c
                .bytes
                .map_or(String::new(), |n| format!(" ({})", bytes(n)));
            let _ = writeln!(out, "  {name}{size}: {what}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stay_apart() {
        let policy = "selective --save-ops aten.mm,aten.addmm --layers 0-3";
        let difference = Difference {
            policy_a: policy.into(),
            policy_b: policy.into(),
            peak_a_bytes: 1 << 20,
            peak_b_bytes: 1 << 10,
            peak_is_bound: [false, true],
            cost_a: 1e30,
            cost_b: 1.0,
            flops_a: u64::MAX,
            flops_b: u64::MAX,
            steps_a: 1,
            steps_b: 2,
            changed: Vec::new(),
            is_same: false,
        };
        let text = difference.human();
        let rows: Vec<&str> = text.lines().take(6).collect();
        let width = rows[0].chars().count();
        for row in &rows {
            assert_eq!(row.chars().count(), width, "{text}");
        }
        assert!(rows[1].contains(&format!("  {policy}  {policy}")), "{text}");
        assert!(rows[4].contains(&format!("  {}  ", u64::MAX)), "{text}");
    }
}
