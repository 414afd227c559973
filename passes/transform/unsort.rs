//! Takes the sort by expert out of a mixture of experts, so that each of its tokens is computed where it lies.
//!
//! In and out: `Typed`. Exporters write a mixture as PyTorch runs it: sort the tokens by expert, multiply each group of rows by its
//! matrix, and put the results back. A sort mixes all tokens, so no part of a sequence or of a batch could be
//! computed by itself. If all ops between the sort and its inverse treat rows alike, they give the same results in the original
//! order, because `GroupedMatMul` takes the expert of each row as an operand. Where nothing is cut, the sort stays: it lets the
//! product read rows in place.

use super::dce::dce;
use super::order::order_by_reads;
use crate::error::Result;
use crate::ir::typing::Contents;
use crate::ir::{Dim, Graph, NodeId, Same, ValueId};
use crate::ops::Builder;
use crate::ops::arith::{DIV, MOD, SUB};
use crate::ops::attention::repeated;
use crate::ops::batch_axes::{Fit, FitCx, Rows, fit};
use crate::ops::fill::RANGE;
use crate::ops::grouped::GROUPED_MATMUL;
use crate::ops::index::GATHER;
use crate::ops::scatter::SCATTER_ND;
use crate::ops::select::TOP_K;
use crate::ops::shape::{SHAPE, SIZE, UNSQUEEZE};
use rustc_hash::FxHashSet;

/// A sort of rows that changes nothing but their order until they are put back.
struct Sorting {
    /// Sorted values, each with the value whose rows were sorted, and how often each row was repeated first.
    taken: Vec<(ValueId, ValueId, i64)>,
    /// Values whose old order was restored, each with the sorted value.
    back: Vec<(ValueId, ValueId)>,
}

/// Removes sorts by expert whose order nothing else reads.
///
/// # Errors
/// Only internal errors: new nodes have the types of those that they replace.
pub fn unsort(graph: &mut Graph) -> Result<()> {
    if !has_groups(graph) {
        return Ok(());
    }
    dce(graph);
    let old = graph.order().to_vec();
    let mut contents = Contents::known(graph)?;
    // One at a time: a sort may read a value whose order an earlier one restored.
    for id in &old {
        let Some(sort) = Search::of(graph, &contents, *id).and_then(|search| search.follow())
        else {
            continue;
        };
        let mut b = Builder::resume(graph, contents);
        for (value, sorted) in &sort.back {
            b.graph.replace_uses(*value, *sorted);
        }
        for (value, of, times) in &sort.taken {
            if let Some(node) = b.graph.def_node(*value).map(|id| b.graph.node(id)) {
                (b.loc, b.role, b.prefix) = (node.loc.clone(), node.role, node.name.clone());
            }
            // This sort itself may have restored its order.
            let back = sort.back.iter().find(|(back, _)| back == of);
            let of = back.map_or(*of, |(_, sorted)| *sorted);
            let new = repeated(&mut b, of, 0, *times)?;
            b.graph.replace_uses(*value, new);
        }
        contents = b.contents;
    }
    order_by_reads(graph, &old)?;
    dce(graph);
    Ok(())
}

/// Returns whether a graph has products by groups.
pub fn has_groups(graph: &Graph) -> bool {
    let mut nodes = graph.order().iter().map(|id| graph.node(*id));
    nodes.any(|node| node.op == &GROUPED_MATMUL)
}

/// The search for what a sort does to rows.
struct Search<'a> {
    graph: &'a Graph,
    contents: &'a Contents,
    sort: NodeId,
    rows: Dim,
}

impl<'a> Search<'a> {
    /// Starts at an ascending sort of all elements of a vector of integers.
    fn of(graph: &'a Graph, contents: &'a Contents, sort: NodeId) -> Option<Search<'a>> {
        let node = graph.node(sort);
        let x = node.operand(0)?;
        let dims = &graph.ty(x).dims;
        let is_sort = node.op == &TOP_K && node.attrs.int("largest") == 0 && node.outs.len() == 2;
        if !is_sort || dims.len() != 1 || !graph.ty(x).dtype.is_int() {
            return None;
        }
        let search = Search {
            graph,
            contents,
            sort,
            rows: dims[0].clone(),
        };
        search.is_row_count(node.outs[0]).then_some(search)
    }

    fn is_row_count(&self, v: ValueId) -> bool {
        let rows = self.graph.ty(v).dims.first();
        rows.is_some_and(|n| n.same(&self.rows) == Same::Yes)
    }

    /// The nodes that read the elements of a value, with the slots; `None` if the graph returns it.
    fn readers(&self, v: ValueId) -> Option<Vec<(NodeId, usize)>> {
        let graph = self.graph;
        let uses = graph.value(v).uses().iter().map(|u| (u.node, u.slot));
        let reads = |id: &NodeId| graph.node(*id).op != &SHAPE && graph.node(*id).op != &SIZE;
        let readers = uses.filter(|(id, _)| reads(id)).collect();
        (!graph.is_output(v)).then_some(readers)
    }

    /// Returns the only element of a number.
    fn number(&self, v: Option<ValueId>) -> Option<i64> {
        let v = v.filter(|v| self.graph.ty(*v).rank() == 0)?;
        self.contents.get(v)?.first()?.as_const()
    }

    /// Follows the rows until all are put back.
    fn follow(&self) -> Option<Sorting> {
        let node = self.graph.node(self.sort);
        let (sorted, order) = (node.outs[0], node.outs[1]);
        let mut found = Sorting {
            taken: vec![(sorted, node.operand(0)?, 1)],
            back: Vec::new(),
        };
        // Values in the order of the sort.
        let mut rows = FxHashSet::from_iter([sorted]);
        let mut open = vec![sorted];
        let mut back = Vec::new();
        self.follow_order(order, 1, &mut |of, lookup| match of {
            Lookup::Taken(x, times) => {
                found.taken.push((lookup, x, times));
                rows.insert(lookup);
                open.push(lookup);
            }
            Lookup::Back => back.push(lookup),
        })?;
        while let Some(v) = open.pop() {
            for (reader, slot) in self.readers(v)? {
                let node = self.graph.node(reader);
                let is_axis_0 = node.op == &GATHER && node.attrs.int("axis") == 0;
                if is_axis_0 && slot == 0 && back.contains(&node.operand(1)?) {
                    // An output has to stay what it is.
                    self.readers(node.outs[0])?;
                    if !self.is_row_count(v) {
                        return None;
                    }
                    found.back.push((node.outs[0], v));
                    continue;
                }
                self.fitted(reader, &rows)?;
                for out in &node.outs {
                    if rows.insert(*out) {
                        open.push(*out);
                    }
                }
            }
        }
        // A value that is read beside sorted ones has to be sorted, too; all are known only now.
        let is_taken = |v: &ValueId| found.taken.iter().any(|(taken, ..)| taken == v);
        let made = rows.iter().filter(|v| !is_taken(v));
        let mut nodes = made.filter_map(|v| self.graph.def_node(*v));
        nodes.all(|id| self.has_rows(id, &rows)).then_some(found)
    }

    /// Follows the places in the old order, divided by `times`: what is looked up there, and what puts rows back.
    fn follow_order(
        &self,
        order: ValueId,
        times: i64,
        found: &mut dyn FnMut(Lookup, ValueId),
    ) -> Option<()> {
        for (reader, slot) in self.readers(order)? {
            let node = self.graph.node(reader);
            let out = node.outs[0];
            if self.graph.ty(order).rank() != 1 {
                return None;
            } else if node.op == &GATHER && slot == 1 && node.attrs.int("axis") == 0 {
                let x = node.operand(0)?;
                let held = self.graph.ty(x).dims.first()?.mul(&times.into());
                if held.same(&self.rows) != Same::Yes {
                    return None;
                }
                found(Lookup::Taken(x, times), out);
            } else if times == 1 && node.op == &MOD && slot == 0 {
                let step = self.number(node.operand(1)).filter(|n| *n > 0)?;
                for (rest, _) in self.readers(out)? {
                    let rest = self.graph.node(rest);
                    let [(quotient, _)] = self.readers(rest.outs[0])?[..] else {
                        return None;
                    };
                    let quotient = self.graph.node(quotient);
                    let is_rest = rest.op == &SUB && rest.ins == [Some(order), Some(out)];
                    let is_whole = quotient.op == &DIV
                        && quotient.operand(0) == Some(rest.outs[0])
                        && self.number(quotient.operand(1)) == Some(step);
                    if !is_rest || !is_whole {
                        return None;
                    }
                    self.follow_order(quotient.outs[0], step, found)?;
                }
            } else if times == 1 && node.op == &SUB && slot == 0 {
                // Part of a division, which is followed from its other operand.
                let other = self.graph.def_node(node.operand(1)?)?;
                let other = self.graph.node(other);
                if other.op != &MOD || other.operand(0) != Some(order) {
                    return None;
                }
            } else if times == 1 && node.op == &UNSQUEEZE && slot == 0 {
                for (scatter, slot) in self.readers(out)? {
                    let scatter = self.graph.node(scatter);
                    let is_back = scatter.op == &SCATTER_ND
                        && slot == 1
                        && scatter.attrs.str("reduction") == "none"
                        && self.graph.ty(out).rank() == 2
                        && self.is_row_count(scatter.outs[0])
                        && self.counts_up(scatter.operand(2)?);
                    if !is_back {
                        return None;
                    }
                    found(Lookup::Back, scatter.outs[0]);
                }
            } else {
                return None;
            }
        }
        Some(())
    }

    /// Returns whether a value is 0, 1, 2, …
    fn counts_up(&self, v: ValueId) -> bool {
        let node = self.graph.def_node(v).map(|id| self.graph.node(id));
        let is_from = |slot: usize, n: i64| {
            node.is_some_and(|node| self.number(node.operand(slot)) == Some(n))
        };
        node.is_some_and(|node| node.op == &RANGE) && is_from(0, 0) && is_from(2, 1)
    }

    /// Returns where a node's operands and results hold the rows, if the node treats all rows alike. `sorted` are the values whose
    /// rows are sorted.
    fn fitted(&self, id: NodeId, sorted: &FxHashSet<ValueId>) -> Option<Fit> {
        let cx = FitCx {
            graph: self.graph,
            contents: self.contents,
            rows: &self.rows,
            known: &|v| sorted.contains(&v).then_some(Rows::Lead(1)),
        };
        let found = fit(&cx, id).ok()?;
        let is_lead = |rows: &Rows| *rows == Rows::Lead(1);
        let mut ins = found.ins.iter().flatten();
        (ins.all(is_lead) && found.outs.iter().all(is_lead)).then_some(found)
    }

    /// Returns whether all operands with rows of a node that makes a sorted value are sorted.
    fn has_rows(&self, id: NodeId, rows: &FxHashSet<ValueId>) -> bool {
        self.fitted(id, rows).is_some_and(|found| {
            let mut parts = self.graph.node(id).ins.iter().zip(&found.ins);
            parts.all(|(v, part)| match (v, part) {
                (Some(v), part) => rows.contains(v) == part.is_some(),
                (None, part) => part.is_none(),
            })
        })
    }
}

/// What is read at the places of the old order.
enum Lookup {
    /// Rows of a value, each of which stands for so many.
    Taken(ValueId, i64),
    /// The numbers of the sorted rows, by which rows are put back.
    Back,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::mixture_of_experts;
    use crate::transform::infer::infer;

    fn sorts_left(between: &str, change: impl FnOnce(&mut Graph)) -> usize {
        let mut graph = mixture_of_experts(between);
        infer(&mut graph).unwrap();
        change(&mut graph);
        unsort(&mut graph).unwrap();
        infer(&mut graph).unwrap();
        crate::ir::verify::verify(&graph).unwrap();
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        nodes
            .filter(|n| n.op == &TOP_K && n.attrs.int("axis") == 0)
            .count()
    }

    #[test]
    fn a_sort_goes_if_all_between_treats_rows_alike() {
        assert_eq!(sorts_left("  %z = Tanh %y", |_| {}), 0);
        let biased = "  %bias = Gather %biases, %sorted
  %z = Add %y, %bias";
        assert_eq!(sorts_left(biased, |_| {}), 0);
        let halves = "  %p, %g = Split %y {axis=1, num_outputs=2}
  %s = Sigmoid %g
  %t = Mul %p, %s
  %z = Concat %t, %t {axis=1}";
        assert_eq!(sorts_left(halves, |_| {}), 0);
    }

    /// The second sort reads a value whose order the first one, or itself, restored.
    #[test]
    fn sorts_follow_each_other() {
        let twice = "  %made_once = GroupedMatMul %y, %down, %sorted {transB=1}
  %early = Gather %made_once, %early_back
  %taken_again = Gather %early, %order
  %z = GroupedMatMul %taken_again, %up, %sorted";
        let between = format!(
            "  %early_n = Squeeze %count, %axis_0
  %early_numbers = Range %zero, %early_n, %one
  %early_places = Unsqueeze %order, %all
  %early_empty = Expand %zero, %count
  %early_back = ScatterND %early_empty, %early_places, %early_numbers
{twice}"
        );
        assert_eq!(sorts_left(&between, |_| {}), 0);
        let mut graph = mixture_of_experts(&between);
        infer(&mut graph).unwrap();
        unsort(&mut graph).unwrap();
        // Only tokens are still looked up.
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        let lookups = nodes.filter(|n| n.op == &GATHER).count();
        assert_eq!(lookups, 1);
    }

    #[test]
    fn a_sort_stays_if_something_reads_its_order() {
        for between in [
            "  %z = CumSum %y, %zero",
            "  %z = Softmax %y {axis=0}",
            "  %f = Cast %order {to=f32}
  %c = Unsqueeze %f, %axis_1
  %z = Add %y, %c",
            "  %m = ReduceMax %y, %axis_0 {keepdims=1}
  %z = Add %y, %m",
            // Sorted values as indices along another axis.
            "  %g = Gather %y, %sorted {axis=1}
  %d = CumSum %g, %one
  %m = ReduceMax %d, %axis_1 {keepdims=1}
  %z = Add %y, %m",
            // Rows in their old order beside sorted ones.
            "  %c = Unsqueeze %share, %axis_1
  %z = Mul %y, %c",
            "  %f = Cast %numbers {to=f32}
  %c = Unsqueeze %f, %axis_1
  %z = Mul %y, %c",
        ] {
            let between = match between.contains("%numbers") {
                true => between.replace("%numbers", "%upto"),
                false => between.to_string(),
            };
            let between = format!(
                "  %length = Squeeze %count, %axis_0
  %upto = Range %zero, %length, %one
{between}"
            );
            assert_eq!(sorts_left(&between, |_| {}), 1, "{between}");
        }
        for output in ["y", "sorted", "taken", "again"] {
            let returned = |graph: &mut Graph| {
                let sorted = graph.find_value(output).unwrap();
                let outputs = [graph.outputs(), &[sorted]].concat();
                graph.set_outputs(outputs);
            };
            assert_eq!(sorts_left("  %z = Tanh %y", returned), 1, "{output}");
        }
    }
}
