//! Sizes that a model cannot take, because it would look up rows that a table does not have.
//!
//! A model with 64 learned positions reads row `i` of their table for position `i`: at a sequence of 128 it fails as it
//! runs, though every shape fits. Where the index is a known function of sizes ([`Elements`]), the largest one that is
//! read is known before anything runs. What follows from data (tokens) is not limited here.

use super::residual_stream::Flow;
use super::symbolic_elements::Elements;
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Atom, Def, Dim, Graph, NodeId, Role};
use crate::ops::index::GATHER;

/// A lookup in a table of known length whose largest index is a function of named sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    pub node: NodeId,
    /// The largest index read, over named sizes only.
    pub largest: Dim,
    pub rows: i64,
}

impl Limit {
    /// The largest index at these sizes, if it is beyond the table.
    pub fn exceeded(&self, size_of: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
        self.largest.eval(size_of).filter(|i| *i >= self.rows)
    }

    /// The named sizes that it speaks of, each once, in the order of their names.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.largest.for_each_leaf(&mut |atom| {
            if let Atom::Sym(name) = atom {
                names.push(name.to_string());
            }
        });
        names.sort();
        names.dedup();
        names
    }
}

/// The limits that a typed graph proves, in the order of its schedule.
///
/// # Errors
/// A graph without types.
pub fn limits(graph: &Graph) -> Result<Vec<Limit>> {
    let mut candidates = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        if node.op != &GATHER || node.role != Role::Forward || node.recompute_of.is_some() {
            continue;
        }
        let (Some(Some(table)), Some(Some(indices))) = (node.ins.first(), node.ins.get(1)) else {
            continue;
        };
        if !matches!(graph.value(*indices).def, Def::Node { .. }) {
            continue;
        }
        let dims = &graph.ty(*table).dims;
        let axis = node.attrs.int("axis");
        let axis = if axis < 0 {
            axis + dims.len() as i64
        } else {
            axis
        };
        let length = usize::try_from(axis).ok().and_then(|a| dims.get(a));
        if let Some(rows) = length.and_then(Dim::as_const) {
            candidates.push((*id, *indices, rows));
        }
    }
    let mut limits: Vec<Limit> = graph
        .order()
        .iter()
        .filter_map(|id| cut_short(graph, *id))
        .collect();
    if candidates.is_empty() {
        return Ok(limits);
    }
    let flow = Flow::new(graph)?;
    let mut elements = Elements::new(graph, &flow);
    for (node, indices, rows) in candidates {
        let space = graph.ty(indices).dims.clone();
        let Some(index) = elements.ask(indices, &space).int() else {
            continue;
        };
        let limit = Limit {
            node,
            largest: elements.largest(&index),
            rows,
        };
        let mut is_known = true;
        limit
            .largest
            .for_each_leaf(&mut |atom| is_known &= matches!(atom, Atom::Sym(_)));
        if is_known && !limit.names().is_empty() {
            limits.push(limit);
        }
    }
    Ok(limits)
}

/// The limit of a node that joins, index by index, an axis of some size with the same part of a table: where the size is
/// larger than the table, the part is shorter than the axis.
fn cut_short(graph: &Graph, id: NodeId) -> Option<Limit> {
    let node = graph.node(id);
    if node.op.class != OpClass::Elementwise
        || node.role != Role::Forward
        || node.recompute_of.is_some()
    {
        return None;
    }
    let dims = |slot: usize| Some(&graph.ty((*node.ins.get(slot)?)?).dims);
    let (a, b) = (dims(0)?, dims(1)?);
    let pairs = a.iter().rev().zip(b.iter().rev());
    let mut both = pairs.flat_map(|(a, b)| [(a, b), (b, a)]);
    both.find_map(|(part, whole)| {
        let Some(Atom::Min(x, y)) = part.as_atom() else {
            return None;
        };
        let rows = match (x.as_const(), y.as_const()) {
            (Some(rows), None) if y == whole => rows,
            (None, Some(rows)) if x == whole => rows,
            _ => return None,
        };
        let limit = Limit {
            node: id,
            largest: whole.sub(&Dim::ONE),
            rows,
        };
        // One row would be broadcast.
        let mut is_known = rows > 1;
        whole.for_each_leaf(&mut |atom| is_known &= matches!(atom, Atom::Sym(_)));
        is_known.then_some(limit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Binding;
    use crate::text;

    const POSITIONS: &str =
        "graph @g typed (%x: f32[batch, seq, 2], %t: i64[batch, seq]) -> (%y, %z) {
  init %table : f32[6, 2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %last : i64[1] = [1]
  %s = Shape %x {start = 1, end = 2} : i64[1]
  %n = Squeeze %s : i64[]
  %i = Range %zero, %n, %one : i64[seq]
  %j = Add %i, %last : i64[seq]
  %p = Gather %table, %j {axis = 0} : f32[seq, 2]
  %q = Gather %table, %t {axis = 0} : f32[batch, seq, 2]
  %y = Add %x, %p : f32[batch, seq, 2]
  %z = Add %y, %q : f32[batch, seq, 2]
}
";

    #[test]
    fn positions_are_limited_by_their_table() {
        let graph = text::parse(POSITIONS).unwrap();
        let found = limits(&graph).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].names(), ["seq"]);
        let at = |n: i64| found[0].exceeded(&|_| Some(n));
        assert_eq!((at(5), at(6), at(128)), (None, Some(6), Some(128)));
    }

    #[test]
    fn positions_are_limited_by_a_part_of_their_table() {
        let graph = text::parse(
            "graph @g typed (%x: f32[batch, seq, 2]) -> (%y) {
  init %table : f32[1, 6, 2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
  init %zero : i64[1] = [0]
  init %one : i64[1] = [1]
  %s = Shape %x {start = 1, end = 2} : i64[1]
  %p = Slice %table, %zero, %s, %one, %one : f32[1, min(6, seq), 2]
  %y = Add %x, %p : f32[batch, seq, 2]
}
",
        )
        .unwrap();
        let found = limits(&graph).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        let at = |n: i64| found[0].exceeded(&|_| Some(n));
        assert_eq!((at(6), at(7)), (None, Some(6)));
    }

    #[test]
    fn defaults_respect_the_limit_and_wishes_beyond_it_are_refused() {
        let graph = text::parse(POSITIONS).unwrap();
        let assumed = Binding::new(&graph, &[]).unwrap();
        assert_eq!(
            (assumed.get("batch"), assumed.get("seq")),
            (Some(1), Some(5))
        );
        let given = |n: i64| Binding::new(&graph, &[("seq".into(), n)]);
        assert_eq!(given(5).unwrap().get("seq"), Some(5));
        let e = given(6).unwrap_err();
        assert_eq!((e.code(), e.exit_code()), ("dim", 2));
        let text = e.to_string();
        for part in ["6 rows", "row 6", "--dim seq=5"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
