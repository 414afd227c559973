//! Which output holds the scores of classes, where a model has several outputs of floating-point numbers.
//!
//! Scores come out of the head: a product with a parameter, after which nothing but the output reads the result. Hidden
//! states, keys and values (caches) are read by the rest of the model. Where several outputs come out of a product, their
//! shapes decide: scores have a row for each token of an integer input, or a column for each row of the tokens' table.

use crate::ir::op::{Indices, OpClass};
use crate::ir::{Def, Graph, Node, NodeId, SecondaryMap, ValueId};
use crate::ops::softmax::LOG_SOFTMAX;

/// What turned scores into probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalized {
    /// Probabilities, by a softmax.
    Softmax,
    /// Logarithms of probabilities, by a log-softmax.
    LogSoftmax,
}

/// Returns whether a value holds probabilities along its last axis, by way of ops that change layout or precision only.
pub fn normalized(graph: &Graph, value: ValueId) -> Option<Normalized> {
    let (id, node) = last_change(graph, value)?;
    let kind = match node.op {
        op if op.class == OpClass::Softmax => Normalized::Softmax,
        op if op == &LOG_SOFTMAX => Normalized::LogSoftmax,
        _ => return None,
    };
    let rank = graph.ty(graph.node(id).outs[0]).rank() as i64;
    let axis = node.attrs.opt_int("axis").unwrap_or(-1);
    [rank - 1, -1].contains(&axis).then_some(kind)
}

/// Returns the node that made the numbers of a value, before ops that change layout or precision only.
fn last_change(graph: &Graph, mut value: ValueId) -> Option<(NodeId, &Node)> {
    loop {
        let id = graph.def_node(value)?;
        let node = graph.node(id);
        if !node.op.is_layout() && node.op.class != OpClass::Cast {
            return Some((id, node));
        }
        value = node.operand(0)?;
    }
}

/// Returns the outputs among `candidates` that come out of a head; among several those whose shape says so, if it does of
/// some.
pub fn heads(graph: &Graph, candidates: &[ValueId]) -> Vec<ValueId> {
    let is_constant = constants(graph);
    let mut found = candidates.to_vec();
    found.retain(|v| is_head(graph, &is_constant, *v));
    // Probabilities beside the scores that they are made of.
    let from_other = |v: &ValueId| {
        let scores = last_change(graph, *v).filter(|_| normalized(graph, *v).is_some());
        let scores = scores.and_then(|(_, node)| node.operand(0));
        scores.is_some_and(|s| candidates.contains(&s))
    };
    found.retain(|v| !from_other(v));
    for fits in [has_row_for_each_token, has_column_for_each_token] {
        if found.len() > 1 && found.iter().any(|v| fits(graph, *v)) {
            found.retain(|v| fits(graph, *v));
        }
    }
    found
}

/// Returns true if other nodes of the model compute with a value, as they do with hidden states, keys and values.
pub fn is_read(graph: &Graph, value: ValueId) -> bool {
    graph.value(value).uses().iter().any(|used| {
        let outs = &graph.node(used.node).outs;
        let mut floats = outs.iter().filter(|v| graph.ty(**v).dtype.is_float());
        floats.any(|v| !graph.value(*v).uses().is_empty())
    })
}

/// Marks the values that no input changes.
fn constants(graph: &Graph) -> SecondaryMap<ValueId, bool> {
    let mut is_constant = SecondaryMap::new(graph.value_bound(), false);
    for (id, _) in graph.inits() {
        is_constant[id] = true;
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let all = node.operands().all(|v| is_constant[v]);
        for out in &node.outs {
            is_constant[*out] = all;
        }
    }
    is_constant
}

/// Follows a value back, as long as nothing else reads what is on the way, to a product with a constant.
fn is_head(graph: &Graph, is_constant: &SecondaryMap<ValueId, bool>, output: ValueId) -> bool {
    let mut value = output;
    if is_read(graph, value) {
        return false;
    }
    while let Some(id) = graph.def_node(value) {
        let node = graph.node(id);
        let floats = node.operands().filter(|v| graph.ty(*v).dtype.is_float());
        let (constant, computed): (Vec<ValueId>, Vec<ValueId>) =
            floats.partition(|v| is_constant[*v]);
        let is_product = matches!(
            node.op.class,
            OpClass::Product | OpClass::BiasedProduct | OpClass::Convolution
        );
        match computed[..] {
            [_] if is_product => return !constant.is_empty(),
            [from] => value = from,
            _ => return false,
        }
        let mut others = graph.value(value).uses().iter().filter(|u| u.node != id);
        let is_float = |v: &ValueId| graph.ty(*v).dtype.is_float();
        if others.any(|u| graph.node(u.node).outs.iter().any(is_float)) {
            return false;
        }
    }
    false
}

/// Returns true if the leading axes are those of an integer input.
fn has_row_for_each_token(graph: &Graph, value: ValueId) -> bool {
    let dims = &graph.ty(value).dims;
    let inputs = graph.inputs().iter().map(|v| graph.ty(*v));
    let mut tokens = inputs.filter(|ty| ty.dtype.is_int() && ty.rank() > 0);
    tokens.any(|ty| dims[..dims.len() - 1] == ty.dims[..])
}

/// Returns true if the last axis is as long as a table that an input selects rows of.
fn has_column_for_each_token(graph: &Graph, value: ValueId) -> bool {
    let Some(width) = graph.ty(value).dims.last() else {
        return false;
    };
    graph.nodes().any(|(_, node)| {
        let (Some(table), Some(rows)) = (node.operand(0), node.operand(1)) else {
            return false;
        };
        node.op.indices == Indices::OfAxis
            && graph.value(rows).def == Def::Input
            && graph.ty(table).dims.first() == Some(width)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attention in words: keys and values leave the graph, and so do a hidden state and the weights of a router.
    const MODEL: &str = "graph @g typed (%t: i64[b, s], %x: f32[b, s, 4]) -> (%hidden, %k, %v, %router, %probs, %logits) {
  init %embed : f32[7, 4] = splat 0.5
  init %wk : f32[4, 4] = splat 0.5
  init %wv : f32[4, 4] = splat 0.5
  init %wr : f32[4, 7] = splat 0.5
  init %flat : i64[2] = [-1, 7]
  init %head : f32[4, 7] = splat 0.5
  %e = Gather %embed, %t {axis = 0} : f32[b, s, 4]
  %h = Add %x, %e : f32[b, s, 4]
  %k = MatMul %h, %wk : f32[b, s, 4]
  %v = MatMul %h, %wv : f32[b, s, 4]
  %kv = Mul %k, %v : f32[b, s, 4]
  %hidden = Add %h, %kv : f32[b, s, 4]
  %r = MatMul %hidden, %wr : f32[b, s, 7]
  %router = Reshape %r, %flat : f32[b*s, 7]
  %scores = MatMul %hidden, %head : f32[b, s, 7]
  %logits = Cast %scores {to = f32} : f32[b, s, 7]
  %probs = Softmax %logits : f32[b, s, 7]
}
";

    #[test]
    fn scores_come_out_of_the_head_and_nothing_reads_them() {
        let graph = crate::text::parse(MODEL).unwrap();
        let found = heads(&graph, graph.outputs());
        let names: Vec<&str> = found
            .iter()
            .map(|v| graph.value(*v).name.as_str())
            .collect();
        assert_eq!(names, ["logits"]);
        let by_name = |name: &str| {
            let mut outputs = graph.outputs().iter();
            *outputs.find(|v| graph.value(**v).name == name).unwrap()
        };
        for (name, read) in [
            ("hidden", true),
            ("k", true),
            ("router", false),
            ("logits", false),
        ] {
            assert_eq!(is_read(&graph, by_name(name)), read, "{name}");
        }
        assert_eq!(
            normalized(&graph, by_name("probs")),
            Some(Normalized::Softmax)
        );
        assert_eq!(normalized(&graph, by_name("logits")), None);
    }
}
