//! Computes shapes from the inputs' shapes, never from activations.
//!
//! In and out: `Typed` or `Training`. Exporters and gradient rules ask for `Shape(x)` of some activation `x`, which
//! would keep `x` alive for its shape alone. Every small integer value whose contents are known is therefore replaced:
//! by a constant where the contents are numbers, else by one shared computation from `Shape` of a graph input. The
//! graph stays as dynamic as it was. A second run changes nothing.

use super::dce::dce;
use super::sizes::Sizes;
use crate::error::Result;
use crate::ir::op::{Domain, Effect};
use crate::ir::{Builder, DType, Def, Dim, Graph, NodeId, SecondaryMap, Tensor, ValueId};
use crate::ops;
use crate::transform::infer::infer;
use std::collections::BTreeMap;

/// Type, shape and contents: what makes two small integer values the same.
type Key = (DType, Vec<i64>, Vec<Dim>);

/// Returns whether anything changed.
pub fn simplify(graph: &mut Graph) -> Result<bool> {
    let contents = infer(graph)?;
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
    let moved = hoist(graph, &known);
    let mut found: BTreeMap<Key, ValueId> = BTreeMap::new();
    for (id, key) in &known {
        if moved.from_inputs[*id] {
            found.entry(key.clone()).or_insert(*id);
        }
    }
    let mut sizes = Sizes::of_inputs(graph);
    let first_new = graph.order().len();
    let mut changed = moved.changed;
    let mut builder = Builder::new(graph);
    builder.prefix = "shape".into();
    for (id, key) in known {
        if builder.graph.value(id).uses().is_empty() && !builder.graph.is_output(id) {
            continue;
        }
        let replacement = match key
            .2
            .iter()
            .map(Dim::as_const)
            .collect::<Option<Vec<i64>>>()
        {
            Some(numbers) => Some(constant(&mut builder, &key, &numbers)),
            None => match found.get(&key) {
                Some(rep) => Some(*rep),
                None if key.0 == DType::I64 && key.1.len() <= 1 => {
                    let built = sizes.build(&mut builder, key.1.is_empty(), &key.2)?;
                    if let Some(built) = built {
                        found.insert(key, built);
                    }
                    built
                }
                None => None,
            },
        };
        if let Some(new) = replacement
            && new != id
            && !builder.graph.is_output(id)
        {
            builder.graph.replace_uses(id, new);
            changed = true;
        }
    }
    let order = graph.order();
    if order.len() > first_new {
        let (old, new) = order.split_at(first_new);
        // What is built reads graph inputs, and what was hoisted: behind the hoisted nodes, before all others.
        let (hoisted, rest) = old.split_at(moved.count);
        graph.set_order([hoisted, new, rest].concat());
    }
    Ok(dce(graph) || changed)
}

/// The outcome of moving input-only shape arithmetic to the front.
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
            && node
                .ins
                .iter()
                .flatten()
                .all(|v| graph.value(*v).def == Def::Input);
        let derived = node.ins.iter().flatten().all(|v| from_inputs[*v]);
        if node.outs.iter().all(|v| is_known[*v]) && (of_input || derived) {
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

fn constant(b: &mut Builder, key: &Key, numbers: &[i64]) -> ValueId {
    let mut bytes = Vec::new();
    for n in numbers {
        let Some(one) = Tensor::scalar_int(key.0, *n).bytes().cloned() else {
            continue;
        };
        bytes.extend_from_slice(&one);
    }
    let dims: Vec<u64> = key.1.iter().map(|d| *d as u64).collect();
    let text: Vec<String> = numbers.iter().map(i64::to_string).collect();
    b.constant(
        &format!("const.{}.[{}]", key.0, text.join("_")),
        Tensor::new(key.0, dims, bytes),
    )
}
