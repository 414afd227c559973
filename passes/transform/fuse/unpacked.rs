//! Fuses what unpacks codes of four bits: bytes shifted and masked, put side by side, and looked up in a table (NF4) or cast.
//!
//! A shift, a mask and a cast to int64 make up to 21 times the bytes of the codes; one op makes the numbers alone.

use super::pattern::{Found, Pattern};
use crate::analysis::matcher::Matcher;
use crate::error::Result;
use crate::ir::{Attrs, DType, Graph, Node, NodeId, ValueId};
use crate::ops::quantised::{BITS, DEQUANTIZE, HIGH_FIRST, SHAPE};
use crate::ops::{Builder, EmitExt, arith, bits, cast, concat, index, shape};

/// Numbers that codes in an initializer stand for.
struct Unpacked {
    codes: ValueId,
    table: Option<ValueId>,
    shape: Vec<i64>,
    dtype: DType,
    high_first: bool,
}

impl Pattern for Unpacked {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        [&mut self.codes]
            .into_iter()
            .chain(&mut self.table)
            .collect()
    }

    fn plural(&self) -> &'static str {
        "unpacked weights"
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
        let one = b.scalar(self.dtype, 1.0);
        let attrs = Attrs::new()
            .with(BITS, 4)
            .with(SHAPE, self.shape)
            .with(HIGH_FIRST, i64::from(self.high_first));
        let mut ins = vec![Some(self.codes), Some(one)];
        if let Some(table) = self.table {
            ins.extend([None, Some(table)]);
        }
        Ok(b.emit_n(&DEQUANTIZE, ins, attrs, 1)?[0])
    }
}

/// Returns the codes that a lookup or a cast turns into numbers.
pub(super) fn find(m: &mut Matcher, id: NodeId) -> Option<Found> {
    let graph = m.graph;
    let node = graph.node(id);
    let y = node.outs[0];
    let ty = graph.ty(y);
    let (places, table) = match node.op {
        op if op == &cast::CAST && ty.dtype.is_float() => (node.operand(0)?, None),
        op if op == &index::GATHER => (node.operand(1)?, node.operand(0)),
        _ => return None,
    };
    if table.is_some_and(|v| graph.ty(v).static_dims().is_none_or(|dims| dims != [16])) {
        return None;
    }
    let (codes, high_first) = pairs(graph, places)?;
    let shape = ty.static_dims().filter(|dims| !dims.is_empty())?;
    let pattern = Unpacked {
        codes,
        table,
        shape,
        dtype: ty.dtype,
        high_first,
    };
    Some(Found::new(y, pattern))
}

/// Returns the bytes of which a value holds both halves side by side, and whether the high half comes first.
fn pairs(graph: &Graph, value: ValueId) -> Option<(ValueId, bool)> {
    let node = graph.node(graph.def_node(behind(graph, value))?);
    let [Some(a), Some(b)] = node.ins[..] else {
        return None;
    };
    let dims = &graph.ty(a).dims;
    let axis = node
        .attrs
        .opt_int("axis")
        .filter(|_| node.op == &concat::CONCAT)?;
    let is_last = axis == -1 || axis == dims.len() as i64 - 1;
    if !is_last || !dims.last()?.is_one() {
        return None;
    }
    let (first, is_high) = half(graph, a)?;
    let (second, other) = half(graph, b)?;
    (first == second && is_high != other).then_some((first, is_high))
}

/// Returns the initializer of bytes whose high or low halves a value holds, and which halves.
fn half(graph: &Graph, value: ValueId) -> Option<(ValueId, bool)> {
    let node = graph.node(graph.def_node(behind(graph, value))?);
    let by = |n: i64| {
        let tensor = node.operand(1).and_then(|v| graph.value(v).tensor());
        tensor.is_some_and(|t| t.elements() == 1 && t.get_i64(0) == Some(n))
    };
    let is_high = match node.op {
        op if op == &bits::BIT_SHIFT => by(4) && node.attrs.str("direction") == "RIGHT",
        op if op == &arith::DIV => by(16),
        _ => false,
    };
    let is_low = match node.op {
        op if op == &bits::BITWISE_AND => by(15),
        op if op == &arith::MOD => by(16),
        _ => false,
    };
    let codes = behind(graph, node.operand(0)?);
    let tensor = graph.value(codes).tensor()?;
    (tensor.dtype == DType::U8 && is_high != is_low).then_some((codes, is_high))
}

/// Returns what a value shows through ops that keep numbers and their order.
fn behind(graph: &Graph, mut value: ValueId) -> ValueId {
    let keeps = |n: &Node| {
        let is_whole = |v| {
            let ty = graph.ty(v);
            // Every one of these types holds all codes, bytes included, but int8.
            ty.dtype.is_int() && ty.dtype != DType::I8
        };
        let is_layout = n.op == &shape::RESHAPE
            || n.op == &shape::UNSQUEEZE
            || n.op == &shape::SQUEEZE
            || n.op == &shape::IDENTITY;
        n.operand(0).is_some_and(is_whole)
            && is_whole(n.outs[0])
            && (is_layout || n.op == &cast::CAST)
    };
    while let Some(node) = graph
        .def_node(value)
        .map(|id| graph.node(id))
        .filter(|n| keeps(n))
    {
        value = node.operand(0).unwrap_or(value);
    }
    value
}
