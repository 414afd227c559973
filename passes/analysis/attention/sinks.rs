//! Attention sinks: one more score for each query, which enters the softmax but has no value vector.
//!
//! `Concat(scores, sink) → x − max(x) → Softmax → Slice → MatMul(p, v)`, as in GPT-OSS (Xiao et al. 2023, arXiv 2309.17453).

use super::mask_saturation::may_hide;
use crate::analysis::matcher::Matcher;
use crate::analysis::symbolic_elements::index_variable;
use crate::ir::{DType, Dim, Graph, Node, NodeId, Ty, ValueId};
use crate::ops::rule::compute_type;
use crate::ops::{arith, concat, slice};

/// The column that is joined to the scores.
#[derive(Clone, Copy, Debug)]
pub struct Sink {
    /// [.., heads, queries, 1].
    pub value: ValueId,
    /// It comes before the scores.
    pub is_first: bool,
}

impl Matcher<'_> {
    /// Returns `x` if a value is `x − m`, where `m` has one element for each row and is computed from `x` alone, such as the
    /// largest. Such a shift does not change a softmax.
    pub(super) fn unshifted(&self, v: ValueId) -> Option<ValueId> {
        let graph = self.graph;
        let (id, node) = self.producer(v).filter(|(_, n)| n.op == &arith::SUB)?;
        let (x, shift) = (node.ins[0]?, node.ins[1]?);
        let (wide, one) = (&graph.ty(x).dims, &graph.ty(shift).dims);
        if graph.ty(v).dims != *wide || one.len() != wide.len() || !one.last()?.is_one() {
            return None;
        }
        let readers = self.uses(x).into_iter().map(|u| u.node);
        let makers: Vec<NodeId> = readers.filter(|reader| *reader != id).collect();
        let is_made = |v: ValueId| graph.def_node(v).is_some_and(|n| makers.contains(&n));
        let is_maker = |n: NodeId| {
            let node = graph.node(n);
            let reads_no_other = |v| v == x || is_made(v) || !self.flow.active[v];
            let mut readers = node.outs.iter().flat_map(|out| self.uses(*out));
            node.operands().all(reads_no_other)
                && !node.outs.iter().any(|out| self.is_output(*out))
                && readers.all(|u| u.node == id || makers.contains(&u.node))
        };
        let fits = is_made(shift) && makers.iter().all(|n| is_maker(*n)) && !self.is_output(x);
        fits.then_some(x)
    }

    /// Returns the scores and the sink that a node joins along the last axis.
    pub(super) fn joined(&self, node: &Node) -> Option<(ValueId, Sink)> {
        let [Some(a), Some(b)] = node.ins[..] else {
            return None;
        };
        let dims = |v: ValueId| &self.graph.ty(v).dims;
        let rank = dims(a).len() as i64;
        let axis = (node.op == &concat::CONCAT).then(|| node.attrs.int("axis"))?;
        let is_column = |v: ValueId| is_column(self.graph, v);
        if axis != -1 && axis != rank - 1 {
            return None;
        }
        [(a, b, false), (b, a, true)]
            .into_iter()
            .find(|(scores, value, _)| is_column(*value) && self.leads_to_product(*scores))
            .map(|(scores, value, is_first)| (scores, Sink { value, is_first }))
    }

    /// Returns true if a node leaves out the sink's column and nothing else.
    pub(super) fn drops(&mut self, id: NodeId, sink: Sink) -> bool {
        let node = self.graph.node(id);
        let (Some(x), out) = (node.ins[0], &self.graph.ty(node.outs[0]).dims) else {
            return false;
        };
        let wide = &self.graph.ty(x).dims;
        if node.op != &slice::SLICE || wide.len() != out.len() || out.is_empty() {
            return false;
        }
        let last = out.len() - 1;
        if wide[last] != out[last].add(&Dim::ONE) || wide[..last] != out[..last] {
            return false;
        }
        let mut wanted: Vec<Dim> = (0..out.len()).map(index_variable).collect();
        self.elements.enter(out);
        let found = self.elements.source(id, 0, &wanted);
        if sink.is_first {
            wanted[last] = wanted[last].add(&Dim::ONE);
        }
        found == Some((x, wanted))
    }

    /// Returns what is wrong with a sink for scores of this type.
    pub(super) fn sink_obstacle(&mut self, sink: Sink, scores: &Ty) -> Option<&'static str> {
        let ty = self.graph.ty(sink.value);
        let last = scores.rank() - 1;
        let bytes = |dtype: DType| compute_type(dtype).size_bytes();
        if ty.rank() != scores.rank() || ty.dims[..last] != scores.dims[..last] {
            return Some("the sink has another shape than the scores");
        }
        if bytes(ty.dtype) > bytes(scores.dtype) {
            return Some("the sink is wider than the scores");
        }
        may_hide(self.graph, self.flow, &mut self.elements, sink.value)
            .then_some("the sink may be as low as what hides a key")
    }
}

/// Returns true if a value has one element for each row.
pub(super) fn is_column(graph: &Graph, v: ValueId) -> bool {
    graph.ty(v).dims.last().is_some_and(Dim::is_one)
}
