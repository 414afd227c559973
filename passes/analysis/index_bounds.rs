//! Sizes that a model cannot take, because it would look up rows that a table does not have.
//!
//! A model with 64 learned positions reads row `i` of their table for position `i`. At a sequence of 128 the run fails,
//! though every shape fits. Where the index is a known function of sizes ([`Elements`]), the largest index is known before
//! anything runs. Indices that the data decides (tokens) are not bounded here.

use super::residual_stream::Flow;
use super::symbolic_elements::{Elements, axis_of};
use crate::error::Result;
use crate::ir::op::OpClass;
use crate::ir::{Atom, Def, Dim, Graph, NodeId};
use crate::ops::index::GATHER;

/// A lookup in a table of known length whose largest index is a function of named sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexBound {
    /// The lookup, or the node that joins a slice of the table.
    pub node: NodeId,
    /// The largest index read, over named sizes only.
    pub largest: Dim,
    /// The length of the table.
    pub rows: i64,
}

impl IndexBound {
    /// Returns the largest index at these sizes if it is beyond the table.
    pub fn exceeded(&self, size_of: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
        self.largest.eval(size_of).filter(|i| *i >= self.rows)
    }

    /// Returns the named sizes that it depends on, sorted, each once.
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

/// Returns the bounds that a typed graph proves, in schedule order.
///
/// # Errors
/// A graph without types.
pub fn index_bounds(graph: &Graph) -> Result<Vec<IndexBound>> {
    let forward = || graph.order().iter().copied();
    let forward = || forward().filter(|id| graph.node(*id).is_forward());
    let mut bounds: Vec<IndexBound> = forward().filter_map(|id| joined_slice(graph, id)).collect();
    let lookups: Vec<_> = forward().filter_map(|id| lookup(graph, id)).collect();
    if lookups.is_empty() {
        return Ok(bounds);
    }
    let flow = Flow::new(graph)?;
    let mut elements = Elements::new(graph, &flow);
    for (node, indices, rows) in lookups {
        let space = graph.ty(indices).dims.clone();
        let Some(index) = elements.ask(indices, &space).int() else {
            continue;
        };
        let bound = IndexBound {
            node,
            largest: elements.largest(&index),
            rows,
        };
        if bound.largest.is_over_names() && !bound.names().is_empty() {
            bounds.push(bound);
        }
    }
    Ok(bounds)
}

/// Returns node, computed indices and table length of a `Gather` from a table of known length.
fn lookup(graph: &Graph, id: NodeId) -> Option<(NodeId, crate::ir::ValueId, i64)> {
    let node = graph.node(id);
    let (table, indices) = (node.operand(0)?, node.operand(1)?);
    if node.op != &GATHER || !matches!(graph.value(indices).def, Def::Node { .. }) {
        return None;
    }
    let dims = &graph.ty(table).dims;
    let axis = axis_of(node.attrs.int("axis"), dims.len())?;
    Some((id, indices, dims[axis].as_const()?))
}

/// Returns the bound of an elementwise node that joins an axis of some size with a slice of a table of the same length:
/// beyond the length of the table, the slice is shorter than the axis.
fn joined_slice(graph: &Graph, id: NodeId) -> Option<IndexBound> {
    let node = graph.node(id);
    if node.op.class != OpClass::Elementwise {
        return None;
    }
    let (a, b) = (node.operand(0)?, node.operand(1)?);
    let (a, b) = (&graph.ty(a).dims, &graph.ty(b).dims);
    let pairs = a.iter().rev().zip(b.iter().rev());
    let mut both = pairs.flat_map(|(a, b)| [(a, b), (b, a)]);
    both.find_map(|(slice, whole)| {
        let Some(Atom::Min(x, y)) = slice.as_atom() else {
            return None;
        };
        let rows = match (x.as_const(), y.as_const()) {
            (Some(rows), None) if y == whole => rows,
            (None, Some(rows)) if x == whole => rows,
            _ => return None,
        };
        // A slice of one row would be broadcast.
        (rows > 1 && whole.is_over_names()).then(|| IndexBound {
            node: id,
            largest: whole.sub(&Dim::ONE),
            rows,
        })
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
    fn positions_are_bounded_by_their_table() {
        let graph = text::parse(POSITIONS).unwrap();
        let found = index_bounds(&graph).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].names(), ["seq"]);
        let at = |n: i64| found[0].exceeded(&|_| Some(n));
        assert_eq!((at(5), at(6), at(128)), (None, Some(6), Some(128)));
    }

    #[test]
    fn positions_are_bounded_by_a_slice_of_their_table() {
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
        let found = index_bounds(&graph).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        let at = |n: i64| found[0].exceeded(&|_| Some(n));
        assert_eq!((at(6), at(7)), (None, Some(6)));
    }

    #[test]
    fn defaults_respect_the_bound_and_sizes_beyond_it_are_refused() {
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
