//! The ranges that an exported program declares for its named sizes. Nobody traced the program outside of them.
//!
//! Ranges are part of what a file says about its sizes, and hold for every graph that is made from it. They travel in the
//! metadata of the graph (`ckpt.ranges`, `name=least..most,…`) and of the written file.

use crate::ir::{Atom, Dim, Graph};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// The metadata key.
pub const KEY: &str = "ckpt.ranges";

/// The least and the largest number of each named size, both included.
pub type Ranges = BTreeMap<String, (i64, i64)>;

/// Writes ranges into the metadata of a graph. Leaves out ranges that allow any size from 1.
///
/// # Errors
/// A name with other characters than letters, digits and `_`.
pub fn record(graph: &mut Graph, ranges: &Ranges) -> Result<()> {
    let mut all = Vec::new();
    for (name, (least, most)) in ranges {
        if *least <= 1 && *most == i64::MAX {
            continue;
        }
        if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
            return Err(Error::model("size", "the name of a size is no word").found(name.as_str()));
        }
        all.push(format!("{name}={least}..{most}"));
    }
    if !all.is_empty() {
        graph.meta.insert(KEY.into(), all.join(","));
    }
    Ok(())
}

/// Narrows the recorded range of a named size. Returns false, and changes nothing, if fewer than two sizes would be left.
///
/// # Errors
/// As [`record`] and [`of`].
pub fn narrow(graph: &mut Graph, name: &str, (least, most): (i64, i64)) -> Result<bool> {
    let mut all = of(graph)?;
    let range = all.entry(name.to_string()).or_insert((1, i64::MAX));
    *range = (range.0.max(least), range.1.min(most));
    if range.0 >= range.1 {
        return Ok(false);
    }
    record(graph, &all)?;
    Ok(true)
}

/// Returns an expression in which each name counts from the least size of its range, so that the name's 1 stands for that size.
/// What is proven of the result holds for the expression at all sizes within the ranges.
pub fn from_least(dim: &Dim, ranges: &Ranges) -> Dim {
    dim.substitute(&|atom| {
        let Atom::Sym(name) = atom else {
            return None;
        };
        let (least, _) = ranges.get(name.as_ref())?;
        Some(Dim::from_atom(atom.clone()).add(&Dim::from(least.max(&1) - 1)))
    })
}

/// Returns the one named size of an expression and a range of it in which the expression is not negative; nothing for
/// expressions over several sizes, or over none.
pub fn of_natural(dim: &Dim) -> Option<(String, (i64, i64))> {
    let mut leaves = BTreeSet::new();
    dim.for_each_leaf(&mut |leaf| {
        leaves.insert(leaf.clone());
    });
    let mut leaves = leaves.into_iter();
    let (Some(Atom::Sym(name)), None) = (leaves.next(), leaves.next()) else {
        return None;
    };
    let is_natural = |n: &i64| dim.eval(&|_| Some(*n)).is_some_and(|at| at >= 0);
    let least = (1..=MAX_TRIED).find(is_natural)?;
    let most = (least..=MAX_TRIED).take_while(is_natural).last()?;
    // Beyond what was tried it needs a proof.
    let range = Ranges::from([(name.to_string(), (least, most))]);
    let is_open = from_least(dim, &range).bounds().0.is_some_and(|n| n >= 0);
    Some((
        name.to_string(),
        (least, if is_open { i64::MAX } else { most }),
    ))
}

/// The largest size that [`of_natural`] tries.
const MAX_TRIED: i64 = 1 << 16;

/// Returns the ranges that a graph records.
///
/// # Errors
/// Metadata that [`record`] did not write.
pub fn of(graph: &Graph) -> Result<Ranges> {
    let Some(text) = graph.meta.get(KEY) else {
        return Ok(Ranges::new());
    };
    let range = |entry: &str| {
        let (name, range) = entry.split_once('=')?;
        let (least, most) = range.split_once("..")?;
        Some((name.to_string(), (least.parse().ok()?, most.parse().ok()?)))
    };
    text.split(',')
        .map(range)
        .collect::<Option<Ranges>>()
        .ok_or_else(|| {
            Error::model("metadata", format!("`{KEY}` is damaged"))
                .expected("name=least..most,…")
                .found(text.as_str())
        })
}

/// Builds the error for a size outside of its range.
pub fn outside(name: &str, (least, most): (i64, i64), found: i64) -> Box<Error> {
    Error::usage(
        "dim",
        format!("`{name}` is outside the range that the program was exported for"),
    )
    .expected(match most {
        i64::MAX => format!("{least} or more"),
        most => format!("{least} to {most}"),
    })
    .found(found.to_string())
    .help("export the program with a larger range (dynamic_shapes), or choose a size inside")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::sizes::Binding;

    fn ranged() -> Graph {
        let text =
            "graph @g typed (%x: f32[rows, seq]) -> (%y) {\n  %y = Tanh %x : f32[rows, seq]\n}\n";
        let mut graph = crate::text::parse(text).unwrap();
        let ranges = [
            ("rows", (3, i64::MAX)),
            ("seq", (1, 40)),
            ("free", (1, i64::MAX)),
        ];
        let ranges = ranges.map(|(name, range)| (name.to_string(), range));
        record(&mut graph, &ranges.into_iter().collect()).unwrap();
        graph
    }

    #[test]
    fn they_are_read_as_they_were_written() {
        let graph = ranged();
        assert_eq!(graph.meta[KEY], format!("rows=3..{},seq=1..40", i64::MAX));
        assert_eq!(of(&graph).unwrap()["seq"], (1, 40));
        assert!(of(&Graph::new("g")).unwrap().is_empty());
    }

    #[test]
    fn they_are_narrowed() {
        let mut graph = ranged();
        assert!(narrow(&mut graph, "seq", (4, i64::MAX)).unwrap());
        assert!(narrow(&mut graph, "free", (1, 9)).unwrap());
        assert!(!narrow(&mut graph, "seq", (40, 50)).unwrap());
        let found = of(&graph).unwrap();
        assert_eq!((found["seq"], found["free"]), ((4, 40), (1, 9)));
    }

    #[test]
    fn sizes_at_which_an_expression_is_not_negative() {
        let (s, n) = (Dim::symbol("s"), |n: i64| Dim::from(n));
        let of = |dim: &Dim| of_natural(dim).map(|(_, range)| range);
        assert_eq!(of(&n(64).sub(&s)), Some((1, 64)));
        assert_eq!(of(&s.smaller(&n(8)).sub(&n(4))), Some((4, i64::MAX)));
        assert_eq!(of(&s.div(&n(2)).sub(&n(3))), Some((6, i64::MAX)));
        assert_eq!(of(&n(-1).sub(&s)), None);
        assert_eq!(of(&s.sub(&Dim::symbol("t"))), None);
        assert_eq!(of(&s.sub(&Dim::data("d"))), None);
    }

    #[test]
    fn damaged_ones_are_refused() {
        for text in ["", "seq", "seq=1", "seq=1..", "seq=a..b", "seq=1..40,"] {
            let mut graph = ranged();
            graph.meta.insert(KEY.into(), text.into());
            assert_eq!(of(&graph).unwrap_err().code(), "metadata", "{text}");
        }
        let odd = [("a,b=1".to_string(), (2, 3))].into_iter().collect();
        assert_eq!(record(&mut ranged(), &odd).unwrap_err().code(), "size");
    }

    #[test]
    fn sizes_outside_are_refused_and_assumed_ones_moved_inside() {
        let graph = ranged();
        let at = |name: &str, size: i64| Binding::new(&graph, &[(name.to_string(), size)]);
        assert_eq!(at("seq", 41).unwrap_err().code(), "dim");
        assert_eq!(at("rows", 2).unwrap_err().code(), "dim");
        let binding = at("seq", 40).unwrap();
        assert_eq!(
            (binding.get("rows"), binding.get("seq")),
            (Some(3), Some(40))
        );
        assert_eq!(at("rows", 7).unwrap().get("seq"), Some(40));
    }
}
