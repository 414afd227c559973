//! Measured times of nodes, which take the place of the cost model's.
//!
//! A measurement is good for the sizes it was made at and for no others: what a product takes does not follow from what
//! it took at half the batch. So the sizes travel with the times, and planning at others is refused.

use super::problem::Problem;
use ckpt_error::{Error, Result};
use std::collections::BTreeMap;

/// Times of nodes, and the sizes they were measured at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Named sizes; empty where the graph had none, or nobody says.
    pub dims: BTreeMap<String, i64>,
    /// Microseconds, by the name of the node.
    pub nodes_us: BTreeMap<String, f64>,
}

impl Times {
    /// Holds the sizes of the measurement against those that are planned for. Sizes that only data decides (`?name`)
    /// are not sizes of the request.
    ///
    /// # Errors
    /// `error[profile]` where a size differs, or only one of the two has it.
    pub fn check_dims<'a>(&self, planned: impl Iterator<Item = (&'a str, i64)>) -> Result<()> {
        let planned: BTreeMap<&str, i64> = planned.filter(|(n, _)| !n.starts_with('?')).collect();
        let measured: BTreeMap<&str, i64> = self
            .dims
            .iter()
            .map(|(n, size)| (n.as_str(), *size))
            .collect();
        if measured == planned {
            return Ok(());
        }
        let list = |dims: &BTreeMap<&str, i64>| match dims.is_empty() {
            true => "no named size".to_string(),
            false => {
                let each: Vec<String> = dims.iter().map(|(n, s)| format!("{n}={s}")).collect();
                each.join(", ")
            }
        };
        let options: Vec<String> = planned
            .iter()
            .map(|(n, s)| format!("--dim {n}={s}"))
            .collect();
        Err(Error::usage(
            "profile",
            "the profile was measured at other sizes than are planned for",
        )
        .expected(list(&planned))
        .found(list(&measured))
        .help(
            format!(
                "measure again: ckpt-opt profile MODEL {}",
                options.join(" ")
            )
            .trim_end(),
        ))
    }

    /// Makes the times the costs of a problem's ops, by name. Ops that the measurement does not name keep theirs; the
    /// result says so.
    ///
    /// # Errors
    /// `error[profile]`: a measurement that names none of the ops, or a time that is not one.
    pub fn price(&self, problem: &mut Problem) -> Result<Option<String>> {
        let is_wrong = |t: &f64| !t.is_finite() || *t < 0.0;
        if let Some((name, time)) = self.nodes_us.iter().find(|(_, t)| is_wrong(t)) {
            return Err(Error::usage(
                "profile",
                format!("`{name}` takes {time} microseconds"),
            ));
        }
        let total = problem.ops.len();
        let mut missing = 0;
        for op in &mut problem.ops {
            match self.nodes_us.get(&op.name) {
                Some(time) => op.cost = *time,
                None => missing += 1,
            }
        }
        if missing == total && missing > 0 {
            return Err(
                Error::usage("profile", "the profile names none of the graph's nodes")
                    .help("measure the same model with the same loss"),
            );
        }
        let warning = || {
            format!(
                "the profile does not know {missing} of {total} nodes: they are priced by the device"
            )
        };
        Ok((missing > 0).then(warning))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::OpIdx;

    fn times(dims: &[(&str, i64)], nodes_us: &[(&str, f64)]) -> Times {
        Times {
            dims: dims.iter().map(|(n, s)| (n.to_string(), *s)).collect(),
            nodes_us: nodes_us.iter().map(|(n, t)| (n.to_string(), *t)).collect(),
        }
    }

    #[test]
    fn sizes_must_be_those_of_the_measurement() {
        let t = times(&[("b", 2)], &[]);
        let check = |dims: &[(&'static str, i64)]| t.check_dims(dims.iter().copied());
        check(&[("b", 2), ("?n", 7)]).unwrap();
        for dims in [&[("b", 3)][..], &[], &[("b", 2), ("s", 1)], &[("s", 2)]] {
            let e = check(dims).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("profile", 2), "{dims:?}");
        }
        let e = check(&[("b", 3)]).unwrap_err().to_string();
        assert!(e.contains("found: b=2") && e.contains("--dim b=3"), "{e}");
    }

    #[test]
    fn prices_go_by_name() {
        let text = r#"{"ops": [{"name": "a", "phase": "fwd", "cost": 1.0, "ins": [], "outs": [0]},
            {"name": "b", "phase": "fwd", "cost": 1.0, "ins": [0], "outs": [1]}],
            "values": [{"bytes": 4, "kind": "act", "producer": 0}, {"bytes": 4, "kind": "act", "producer": 1}],
            "outputs": [1]}"#;
        let problem: Problem = serde_json::from_str(text).unwrap();
        let mut p = problem.clone();
        let warning = times(&[], &[("b", 7.5), ("c", 1.0)]).price(&mut p).unwrap();
        assert_eq!((p.ops[OpIdx(0)].cost, p.ops[OpIdx(1)].cost), (1.0, 7.5));
        assert!(warning.unwrap().contains("1 of 2 nodes"));
        let all = times(&[], &[("a", 0.0), ("b", 2.0)]);
        assert_eq!(all.price(&mut p).unwrap(), None);
        for wrong in [&[("c", 1.0)], &[("a", -1.0)], &[("a", f64::NAN)]] {
            let e = times(&[], wrong).price(&mut p).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("profile", 2));
        }
    }
}
