//! Sizes that a model cannot take, because it would look up rows that a table does not have.
//!
//! A model with 64 learned positions reads row `i` of their table for position `i`. At a sequence of 128 the run fails,
//! though every shape fits. Where the index is a known function of sizes ([`Elements`]), the largest index is known before
//! anything runs. Positions that are counted along a mask depend on data, and have a largest index too: the one where the
//! mask leaves nothing out ([`Spans`]). Indices that are data themselves (tokens) are not bounded here.

use super::index_spans::Spans;
use super::residual_stream::Flow;
use super::symbolic_elements::{Elements, axis_of, index_variable};
use crate::error::Result;
use crate::ir::op::{BatchAxes, Indices, OpClass};
use crate::ir::{Atom, Def, Dim, Graph, NodeId, ValueId};

/// A lookup in a table of known length whose largest index is a function of named sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexBound {
    /// The lookup, or the node that joins a slice of the table.
    pub node: NodeId,
    /// The initializer that holds the table, where the table is one.
    pub table: Option<ValueId>,
    /// The largest index read, over named sizes only.
    pub largest: Dim,
    /// The length of the table.
    pub rows: i64,
    /// Whether every run at these sizes reads that index. If not, data decides, and may read smaller ones only.
    pub is_certain: bool,
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

    /// Returns the largest number of the size `name` within the table, where it depends on this size alone.
    pub fn largest_size(&self, name: &str) -> Option<i64> {
        if self.names() != [name] {
            return None;
        }
        let fits = |n: i64| self.exceeded(&|_| Some(n)).is_none();
        // Bisection is right where a larger size reads further.
        let mut beyond = 2;
        while fits(beyond) {
            beyond = beyond.checked_mul(2).filter(|n| *n <= 1 << 40)?;
        }
        let mut largest = beyond / 2;
        while beyond - largest > 1 {
            let middle = largest + (beyond - largest) / 2;
            match fits(middle) {
                true => largest = middle,
                false => beyond = middle,
            }
        }
        fits(largest).then_some(largest)
    }

    /// Describes the table.
    pub fn describe(&self, graph: &Graph) -> String {
        match self.table {
            Some(table) => format!(
                "`{}`, a table of {} rows",
                graph.value(table).name,
                self.rows
            ),
            None => format!("a table of {} rows", self.rows),
        }
    }
}

/// Returns the bounds that a typed graph proves, in schedule order; first those of slices.
///
/// # Errors
/// A graph without types.
pub fn index_bounds(graph: &Graph) -> Result<Vec<IndexBound>> {
    let forward = || graph.order().iter().copied();
    let forward = || forward().filter(|id| graph.node(*id).is_forward());
    let mut bounds: Vec<IndexBound> = forward().filter_map(|id| joined_slice(graph, id)).collect();
    let lookups: Vec<_> = forward().flat_map(|id| lookups(graph, id)).collect();
    if lookups.is_empty() {
        return Ok(bounds);
    }
    let flow = Flow::new(graph)?;
    let mut elements = Elements::new(graph, &flow);
    for lookup in lookups {
        let space = &graph.ty(lookup.indices).dims;
        elements.enter(space);
        let mut at: Vec<Dim> = (0..space.len()).map(index_variable).collect();
        if let (Some(component), Some(last)) = (lookup.component, at.last_mut()) {
            *last = Dim::from(component);
        }
        let known = elements.at(lookup.indices, &at).int();
        let is_certain = known.is_some();
        let largest = match known {
            Some(index) => Some(elements.largest(&index)),
            None => Spans::new(graph, &mut elements).largest(lookup.indices),
        };
        let Some(largest) = largest else { continue };
        let bound = IndexBound {
            node: lookup.node,
            table: initializer(graph, lookup.table),
            largest,
            rows: lookup.rows,
            is_certain,
        };
        if bound.largest.is_over_names() && !bound.names().is_empty() {
            bounds.push(bound);
        }
    }
    Ok(bounds)
}

/// A read or write of rows that computed indices select.
struct Lookup {
    node: NodeId,
    table: ValueId,
    indices: ValueId,
    /// The component of index tuples, along their last axis.
    component: Option<i64>,
    rows: i64,
}

/// Returns the axes of known length that computed indices of a node select from.
fn lookups(graph: &Graph, id: NodeId) -> Vec<Lookup> {
    let node = graph.node(id);
    let (Some(table), Some(indices)) = (node.operand(0), node.operand(1)) else {
        return Vec::new();
    };
    if !matches!(graph.value(indices).def, Def::Node { .. }) {
        return Vec::new();
    }
    let dims = &graph.ty(table).dims;
    let along = |axis: usize, component: Option<i64>| {
        Some(Lookup {
            node: id,
            table,
            indices,
            component,
            rows: dims.get(axis)?.as_const()?,
        })
    };
    match node.op.indices {
        Indices::OfAxis => {
            let axis = axis_of(node.attrs.opt_int("axis").unwrap_or(0), dims.len());
            axis.and_then(|axis| along(axis, None))
                .into_iter()
                .collect()
        }
        Indices::Tuples => {
            let components = graph.ty(indices).dims.last().and_then(Dim::as_const);
            let batch = usize::try_from(node.attrs.opt_int("batch_dims").unwrap_or(0));
            let (Some(components), Ok(batch)) = (components, batch) else {
                return Vec::new();
            };
            let components = 0..components.min(dims.len() as i64);
            components
                .filter_map(|k| along(batch + k as usize, Some(k)))
                .collect()
        }
        Indices::None | Indices::PassedOn | Indices::Classes | Indices::Depth | Indices::OfSize => {
            Vec::new()
        }
    }
}

/// Returns the initializer that a value shows, by way of ops that change layout or precision only.
pub fn initializer(graph: &Graph, mut value: ValueId) -> Option<ValueId> {
    loop {
        match &graph.value(value).def {
            Def::Init(_) => return Some(value),
            Def::Input => return None,
            Def::Node { node, .. } => {
                let node = graph.node(*node);
                let passes = node.op.is_layout() || node.op.class == OpClass::Cast;
                value = node.operand(0).filter(|_| passes)?;
            }
        }
    }
}

/// Returns the bound of an elementwise node, or of one that broadcasts, which joins an axis of some size with a slice of a
/// table of the same length: beyond the length of the table, the slice is shorter than the axis.
fn joined_slice(graph: &Graph, id: NodeId) -> Option<IndexBound> {
    let node = graph.node(id);
    if node.op.class != OpClass::Elementwise && node.op.axes != BatchAxes::Broadcast {
        return None;
    }
    let values = || node.operands().chain(node.outs.first().copied());
    let shape = |value: ValueId| graph.ty(value).dims.iter().rev();
    node.operands().find_map(|table| {
        values().filter(|other| *other != table).find_map(|other| {
            let mut pairs = shape(table).zip(shape(other));
            let (beyond, limit) = pairs.find_map(|(slice, whole)| cut_short(slice, whole))?;
            let table = initializer(graph, table);
            // A slice of one row would be broadcast.
            (limit > 1).then(|| IndexBound {
                node: id,
                table,
                largest: beyond.add(&Dim::from(limit - 1)),
                rows: limit,
                is_certain: true,
            })
        })
    })
}

/// Returns by how much a slice that is cut short at the end of a table is shorter than an axis, at most 0 where it is not,
/// and the length of the table, if the slice is as long as the axis wherever it is not cut.
fn cut_short(slice: &Dim, whole: &Dim) -> Option<(Dim, i64)> {
    if !whole.is_over_names() || whole.as_const().is_some() {
        return None;
    }
    let atoms = slice.terms().into_iter().flat_map(|(monomial, _)| monomial);
    atoms.into_iter().find_map(|atom| {
        let (a, b, is_min) = match &atom {
            Atom::Min(a, b) => (a, b, true),
            Atom::Max(a, b) => (a, b, false),
            _ => return None,
        };
        [(a, b), (b, a)].into_iter().find_map(|(limit, free)| {
            let uncut = slice.substitute(&|part| (*part == atom).then(|| free.clone()));
            if uncut != *whole {
                return None;
            }
            match (is_min, limit.as_const()) {
                (true, Some(rows)) => Some((free.sub(limit), rows)),
                // From `max(0, rows - size)` to the end.
                (false, Some(0)) => {
                    let rows = free.add(whole).as_const()?;
                    Some((whole.sub(&Dim::from(rows)), rows))
                }
                _ => None,
            }
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
        assert_eq!(graph.value(found[0].table.unwrap()).name, "table");
    }

    /// The bound of a graph with one, and the largest size within it.
    fn only(source: &str) -> (IndexBound, Option<i64>) {
        let mut graph = text::parse(source).unwrap();
        crate::transform::infer::infer(&mut graph).unwrap();
        let found = index_bounds(&graph).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        let largest = found[0].largest_size("seq");
        let bound = found.into_iter().next().unwrap();
        (bound, largest)
    }

    #[test]
    fn a_slice_may_begin_anywhere() {
        for (from, to, largest) in [
            ("%n0", "%s", 6),
            ("%n2", "%two", 4),
            ("%n1", "%one", 5),
            ("%end", "%n6", 6),
        ] {
            let source = format!(
                "graph @g imported (%x: f32[batch, seq, 2]) -> (%y) {{
  init %table : f32[6, 2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
  init %n0 : i64[1] = [0]
  init %n1 : i64[1] = [1]
  init %n2 : i64[1] = [2]
  init %n6 : i64[1] = [6]
  %s = Shape %x {{start = 1, end = 2}}
  %one = Add %s, %n1
  %two = Add %s, %n2
  %end = Neg %s
  %p = Slice %table, {from}, {to}, %n0, %n1
  %q = Unsqueeze %p, %n0
  %y = Mul %x, %q
}}
"
            );
            let (bound, found) = only(&source);
            assert_eq!(found, Some(largest), "{from} {to}: {bound:?}");
        }
    }

    #[test]
    fn every_op_with_indices_is_bounded() {
        for (spread, lookup) in [
            ("Expand %row, %both", "%p = Gather %table, %at {axis = 0}"),
            ("Tile %row, %times", "%p = Gather %table, %at {axis = 0}"),
            (
                "Tile %row, %times",
                "%tuples = Unsqueeze %at, %last\n  %p = GatherND %table, %tuples",
            ),
        ] {
            let source = format!(
                "graph @g imported (%x: f32[batch, seq, 2]) -> (%y) {{
  init %table : f32[6, 2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %two : i64[] = 2
  init %first : i64[1] = [0]
  init %last : i64[1] = [-1]
  init %count : i64[1] = [1]
  %s = Shape %x {{start = 1, end = 2}}
  %b = Shape %x {{start = 0, end = 1}}
  %n = Squeeze %s
  %i = Range %zero, %n, %one
  %row = Unsqueeze %i, %first
  %both = Concat %b, %s {{axis = 0}}
  %times = Concat %b, %count {{axis = 0}}
  %all = {spread}
  %at = Add %all, %two
  {lookup}
  %y = Add %x, %p
}}
"
            );
            let (bound, found) = only(&source);
            assert_eq!(
                (found, bound.is_certain),
                (Some(4), true),
                "{spread} {lookup}"
            );
        }
    }

    /// Positions as RoBERTa counts them (of a token input) and as OPT does (of a mask input).
    #[test]
    fn positions_that_are_counted_along_a_mask_are_bounded_where_it_hides_nothing() {
        for (mask, largest) in [
            (
                "%real = Equal %t, %one\n  %not = Not %real\n  %m = Cast %not {to = i32}",
                4,
            ),
            ("%m = Cast %t {to = i32}", 4),
        ] {
            let source = format!(
                "graph @g imported (%t: i64[batch, seq], %x: f32[batch, seq, 2]) -> (%y) {{
  init %table : f32[6, 2] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
  init %one : i64[] = 1
  init %axis : i64[] = 1
  {mask}
  %sum = CumSum %m, %axis
  %count = Mul %sum, %m
  %wide = Cast %count {{to = i64}}
  %at = Add %wide, %one
  %p = Gather %table, %at {{axis = 0}}
  %y = Add %x, %p
}}
"
            );
            let (bound, found) = only(&source);
            assert_eq!((found, bound.is_certain), (Some(largest), false), "{mask}");
            let mut graph = text::parse(&source).unwrap();
            crate::transform::infer::infer(&mut graph).unwrap();
            assert_eq!(Binding::new(&graph, &[]).unwrap().get("seq"), Some(4));
            let beyond = [("seq".to_string(), 5)];
            let refused = Binding::new(&graph, &beyond).unwrap_err();
            assert_eq!(refused.code(), "dim");
            // A run has its data, which may hide enough.
            assert_eq!(
                Binding::of_run(&graph, &beyond).unwrap().get("seq"),
                Some(5)
            );
        }
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
        for part in ["`table`", "6 rows", "row 6", "--dim seq=5"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
