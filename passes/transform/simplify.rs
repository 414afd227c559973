//! Computes shapes from the inputs' shapes, never from activations.
//!
//! In and out: `Typed` or `Training`. Exporters and gradient rules ask for `Shape(x)` of some activation `x`, which
//! would keep `x` alive for its shape alone. Every small integer value whose contents are known is therefore replaced:
//! by a constant where the contents are numbers, else by one shared computation from `Shape` of a graph input. The
//! graph stays as dynamic as it was. A second run changes nothing.
//!
//! Lookups that pick all elements in order become layout ops first (`lookups.rs`).
//!
//! Ops whose result is their operand, such as a cast to the same type, are left out. Besides their cost, ONNX Runtime's
//! default optimizer corrupts a graph that has one before a dropout (1.31: `DivMulFusion` reads the result it removed).

use super::dce::dce;
use super::lookups::straighten;
use super::sizes::Sizes;
use crate::analysis::gradients::trained;
use crate::analysis::params::{Selection, parameters};
use crate::error::Result;
use crate::ir::op::{Domain, Effect};
use crate::ir::typing::Contents;
use crate::ir::{DType, Def, Dim, Graph, NodeId, Phase, SecondaryMap, Tensor, ValueId};
use crate::ops;
use crate::ops::Builder;
use crate::transform::infer::infer;
use std::collections::{BTreeMap, BTreeSet};

/// Type, shape and contents. Two small integer values with the same key are the same.
type Key = (DType, Vec<i64>, Vec<Dim>);

/// Replaces known integer values and leaves out ops that change nothing. Returns whether anything changed.
///
/// # Errors
/// See [`infer`].
pub fn simplify(graph: &mut Graph) -> Result<bool> {
    let mut contents = infer(graph)?;
    let straightened = graph.phase == Phase::Typed && straighten(graph)?;
    if straightened {
        contents = infer(graph)?;
    }
    let trained: BTreeSet<ValueId> = parameters(graph, &Selection::default())?
        .into_iter()
        .filter(|p| p.trainable)
        .map(|p| p.value)
        .chain(trained(graph).into_keys())
        .collect();
    let bypassed = bypass(graph, &contents, &trained);
    Ok(replace_known(graph, &contents)? || bypassed || straightened)
}

/// Makes the readers of every result that equals the first operand read that operand. Returns whether there were any. A
/// graph output keeps its node, because its name belongs to it, and so does a trained operand that changes nothing yet.
fn bypass(graph: &mut Graph, contents: &Contents, trained: &BTreeSet<ValueId>) -> bool {
    let equal: Vec<(NodeId, ValueId)> = graph
        .order()
        .iter()
        .filter_map(|id| {
            let node = graph.node(*id);
            let (Some(x), [y]) = (node.operand(0), node.outs.as_slice()) else {
                return None;
            };
            let fixed = node.recompute_of.is_some()
                || graph.is_output(*y)
                || node.operands().skip(1).any(|v| trained.contains(&v));
            let same = graph.ty(x) == graph.ty(*y) && ops::keeps_elements(graph, *id, contents);
            (same && !fixed).then_some((*id, *y))
        })
        .collect();
    let mut changed = false;
    for (node, y) in equal {
        changed |= !graph.value(y).uses().is_empty();
        // In schedule order, the operand has been replaced already if it is such a result itself.
        if let Some(x) = graph.node(node).operand(0) {
            graph.replace_uses(y, x);
        }
    }
    changed && {
        dce(graph);
        true
    }
}

/// Replaces known integer values. Returns whether anything changed.
fn replace_known(graph: &mut Graph, contents: &Contents) -> Result<bool> {
    let mut known: Vec<(ValueId, Key)> = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        if node.recompute_of.is_some()
            || node.op.effect != Effect::Pure
            || node.op.domain == Domain::Opaque
        {
            continue;
        }
        for out in &node.outs {
            if let (Some(ints), Some(dims)) = (contents.get(*out), graph.ty(*out).static_dims()) {
                known.push((*out, (graph.ty(*out).dtype, dims, ints.to_vec())));
            }
        }
    }
    if known.is_empty() {
        return Ok(false);
    }
    let hoisted = hoist(graph, &known);
    let mut found: BTreeMap<Key, ValueId> = BTreeMap::new();
    for (id, key) in &known {
        if hoisted.from_inputs[*id] {
            found.entry(key.clone()).or_insert(*id);
        }
    }
    let mut sizes = Sizes::of_inputs(graph);
    let first_new = graph.order().len();
    let mut changed = hoisted.changed;
    let mut builder = Builder::new(graph);
    builder.prefix = "shape".into();
    for (id, key) in known {
        let is_output = builder.graph.is_output(id);
        if builder.graph.value(id).uses().is_empty() && !is_output {
            continue;
        }
        let (dtype, dims, contents) = &key;
        let numbers: Option<Vec<i64>> = contents.iter().map(Dim::as_const).collect();
        let new = match (numbers, found.get(&key)) {
            (Some(numbers), _) => Some(constant(&mut builder, *dtype, dims, &numbers)),
            (None, Some(same)) => Some(*same),
            (None, None) if *dtype == DType::I64 && dims.len() <= 1 => {
                let built = sizes.build(&mut builder, dims.is_empty(), contents)?;
                found.extend(built.map(|built| (key, built)));
                built
            }
            (None, None) => None,
        };
        if let Some(new) = new.filter(|new| *new != id && !is_output) {
            builder.graph.replace_uses(id, new);
            changed = true;
        }
    }
    let order = graph.order();
    if order.len() > first_new {
        let (old, new) = order.split_at(first_new);
        // New nodes read graph inputs and hoisted nodes: they go behind these, before all others.
        let (front, rest) = old.split_at(hoisted.count);
        graph.set_order([front, new, rest].concat());
    }
    Ok(dce(graph) || changed)
}

/// The outcome of [`hoist`].
struct Hoisted {
    from_inputs: SecondaryMap<ValueId, bool>,
    count: usize,
    changed: bool,
}

/// Moves known values that only depend on the shapes of graph inputs to the front of the order.
fn hoist(graph: &mut Graph, known: &[(ValueId, Key)]) -> Hoisted {
    let mut is_known: SecondaryMap<ValueId, bool> = SecondaryMap::new(graph.value_bound(), false);
    for (id, _) in known {
        is_known[*id] = true;
    }
    let mut from_inputs: SecondaryMap<ValueId, bool> =
        SecondaryMap::new(graph.value_bound(), false);
    for (id, _) in graph.inits() {
        from_inputs[id] = true;
    }
    let (mut front, mut rest): (Vec<NodeId>, Vec<NodeId>) = Default::default();
    for id in graph.order() {
        let node = graph.node(*id);
        let of_input = node.op == &ops::shape::SHAPE
            && node.operands().all(|v| graph.value(v).def == Def::Input);
        let is_derived = node.operands().all(|v| from_inputs[v]);
        if node.outs.iter().all(|v| is_known[*v]) && (of_input || is_derived) {
            for out in &node.outs {
                from_inputs[*out] = true;
            }
            front.push(*id);
        } else {
            rest.push(*id);
        }
    }
    let count = front.len();
    front.extend(rest);
    let changed = front != graph.order();
    graph.set_order(front);
    Hoisted {
        from_inputs,
        count,
        changed,
    }
}

fn constant(b: &mut Builder, dtype: DType, dims: &[i64], numbers: &[i64]) -> ValueId {
    let tensors = numbers.iter().map(|n| Tensor::scalar_int(dtype, *n));
    let bytes: Vec<u8> = tensors
        .filter_map(|t| Some(t.bytes()?.to_vec()))
        .flatten()
        .collect();
    let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
    let text: Vec<String> = numbers.iter().map(i64::to_string).collect();
    let name = format!("const.{dtype}.[{}]", text.join("_"));
    b.constant(&name, Tensor::new(dtype, dims, bytes))
}
