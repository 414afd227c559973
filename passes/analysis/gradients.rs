//! What a training graph trains: gradients by their names, optimizer updates, and the states that updates keep.

use crate::ir::{Def, Graph, Node, NodeId, Origin, Role, Tensor, ValueId};
use crate::ops::collective::{ALL_GATHER, GATHER_SLICES, OWN_PART, own_parts};
use crate::ops::optimizer::REPLACE;
use crate::ops::shape::EXPAND;
use std::collections::{BTreeMap, BTreeSet};

/// Suffixes of gradient names: ours, then those of ONNX Runtime with and without its accumulation buffer. Parameters of
/// ONNX Runtime are graph inputs (training artifacts of onnxruntime 1.19).
const SUFFIXES: [&str; 3] = [".grad", "_grad.accumulation.out", "_grad"];

/// Name of the graph input that counts optimizer steps, from 1.
pub const STEP: &str = "step";

/// Name of the output that is the norm of all gradients together, before clipping.
pub const GRAD_NORM: &str = "grad_norm";

/// Name of the output that says whether a gradient is not finite.
pub const FOUND_INF: &str = "found_inf";

/// Returns the name of the tensor that a value called `name` would be the gradient of.
pub fn gradient_of(name: &str) -> Option<&str> {
    SUFFIXES.iter().find_map(|end| name.strip_suffix(end))
}

/// Returns each initializer or input whose gradient is an output by its name, with that output, in output order.
fn named_gradients(graph: &Graph) -> Vec<(ValueId, ValueId)> {
    let inits = graph.inits().map(|(id, v)| (v.name.as_str(), id));
    let inputs = graph.inputs().iter();
    let inputs = inputs.map(|id| (graph.value(*id).name.as_str(), *id));
    let sources: BTreeMap<&str, ValueId> = inits.chain(inputs).collect();
    let with_source = |output: &ValueId| {
        let source = gradient_of(&graph.value(*output).name)?;
        Some((*sources.get(source)?, *output))
    };
    graph.outputs().iter().filter_map(with_source).collect()
}

/// The name and layout that the framework has for a result of training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameworkName {
    /// `fc.weight.grad` for `val_39.grad`.
    pub name: String,
    /// The result is the transpose of the framework's.
    pub transposed: bool,
}

/// Returns the framework's names of results that are called after an initializer: gradients, updated parameters, and states
/// of optimizers. Initializers without a name from the file have none.
pub fn framework_names(graph: &Graph) -> impl Fn(&str) -> Option<FrameworkName> {
    let origins = graph.origins.iter();
    let origins = origins.filter(|(id, o)| graph.contains_value(**id) && !o.names.is_empty());
    let of: BTreeMap<&str, &Origin> = origins
        .map(|(id, origin)| (graph.value(*id).name.as_str(), origin))
        .collect();
    move |name| {
        let ends = name.match_indices('.').map(|(at, _)| at).rev();
        let mut ends = std::iter::once(name.len()).chain(ends);
        ends.find_map(|end| {
            let origin = of.get(&name[..end])?;
            Some(FrameworkName {
                name: format!("{}{}", origin.names[0], &name[end..]),
                transposed: origin.transposed,
            })
        })
    }
}

/// Returns the outputs that are the gradient of an initializer or input by their name (`<initializer>.grad`).
pub fn gradient_outputs(graph: &Graph) -> Vec<ValueId> {
    named_gradients(graph).into_iter().map(|(_, g)| g).collect()
}

/// Returns the trained initializers and inputs, each with its gradient: an output, or the operand of an update.
pub fn trained(graph: &Graph) -> BTreeMap<ValueId, ValueId> {
    let updated = updated(graph).into_iter();
    updated.chain(named_gradients(graph)).collect()
}

/// Returns the outputs that only training has: gradients and the results of updates.
pub fn training_outputs(graph: &Graph) -> BTreeSet<ValueId> {
    let updates = graph.outputs().iter().copied();
    let updates = updates.filter(|v| update_node(graph, *v).is_some());
    updates.chain(gradient_outputs(graph)).collect()
}

/// Returns true for the zeros that stand for the gradient of a parameter that the loss does not reach.
pub fn is_zero_gradient(graph: &Graph, gradient: ValueId) -> bool {
    let Some(node) = graph.def_node(gradient).map(|id| graph.node(id)) else {
        return false;
    };
    let constant = node.operand(0).and_then(|v| graph.value(v).tensor());
    let is_zero = |t: &Tensor| t.elements() == 1 && t.get_f64(0) == Some(0.0);
    node.op == &EXPAND && constant.is_some_and(is_zero)
}

/// Returns true if the graph holds its own backward pass.
pub fn has_backward(graph: &Graph) -> bool {
    let mut nodes = graph.nodes().map(|(_, node)| node);
    nodes.any(|n| n.role == Role::Backward || n.op.is_update())
        || !gradient_outputs(graph).is_empty()
}

/// Iterates over updates that are not copies, in schedule order, with the tensor that each one updates.
fn updates(graph: &Graph) -> impl Iterator<Item = (ValueId, &Node)> {
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let updates = nodes.filter(|node| node.op.is_update() && node.recompute_of.is_none());
    updates.filter_map(|node| Some((node.operand(0)?, node)))
}

/// Returns the parameters that the graph updates, each with its gradient, in schedule order.
pub fn updated(graph: &Graph) -> Vec<(ValueId, ValueId)> {
    let gradient = |(old, node): (ValueId, &Node)| {
        let mut gradient = node.operand(1)?;
        // The gradient reaches the step through the updated state.
        while let Some(maker) = update_node(graph, gradient)
            && let Some(from) = graph.node(maker).operand(1)
        {
            gradient = from;
        }
        let parameter = sharded_by(graph, old).unwrap_or(old);
        matches!(graph.value(parameter).def, Def::Init(_)).then_some((parameter, gradient))
    };
    updates(graph).filter_map(gradient).collect()
}

/// Returns the parameter of which an input is the rank's slice or part, if it is one.
fn sharded_by(graph: &Graph, shard: ValueId) -> Option<ValueId> {
    let mut readers = graph.value(shard).uses().iter();
    readers.find_map(|u| match (graph.node(u.node), u.slot) {
        (node, 1) if node.op == &ALL_GATHER => node.operand(0),
        (node, 0) if node.op == &OWN_PART => node.operand(1),
        _ => None,
    })
}

/// Returns the update that makes a value, if one does.
pub fn update_node(graph: &Graph, value: ValueId) -> Option<NodeId> {
    let maker = graph.def_node(value);
    maker.filter(|id| graph.node(*id).op.is_update())
}

/// Returns true if an update of the graph reads the step counter ([`STEP`]).
pub fn counts_steps(graph: &Graph) -> bool {
    let reads_it = |v: &ValueId| {
        let mut uses = graph.value(*v).uses().iter();
        graph.value(*v).name == STEP && uses.any(|u| graph.node(u.node).op.is_update())
    };
    graph.inputs().iter().any(reads_it)
}

/// What a state holds before the first step of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Zeros; false for a truth value.
    Zeros,
    /// The elements of a parameter, or a rank's slice or part of them, in the type of the state.
    Widened(ValueId),
}

/// Returns what an input of [`states`] holds before the first step: a master weight is the parameter that is its rounding, and
/// a shard the rank's slice or part of its parameter.
pub fn start(graph: &Graph, state: ValueId) -> Start {
    let later = |v: ValueId| {
        let mut uses = graph.value(v).uses().iter();
        let by = uses.find(|u| u.slot == 0 && graph.node(u.node).op.is_update());
        by.map(|u| graph.node(u.node).outs[0])
    };
    let rounded = |v: ValueId| {
        let readers = graph.value(v).uses().iter().map(|u| graph.node(u.node));
        let is_rounding = |n: &&Node| n.op == &REPLACE || n.op == &GATHER_SLICES;
        let mut roundings = readers.filter(|n| is_rounding(n) && n.operand(1) == Some(v));
        let of = |n: &Node| n.operand(0).map(|p| sharded_by(graph, p).unwrap_or(p));
        roundings.find_map(|n| of(n).filter(|p| matches!(graph.value(*p).def, Def::Init(_))))
    };
    let parameter = sharded_by(graph, state).or_else(|| later(state).and_then(rounded));
    parameter.map_or(Start::Zeros, Start::Widened)
}

/// Returns the inputs that are optimizer states: tensors that updates update and that are no parameters. A rank's slice or part
/// of a parameter is one of them.
pub fn states(graph: &Graph) -> Vec<ValueId> {
    let old = updates(graph).map(|(old, _)| old);
    let mut states: Vec<ValueId> = old.filter(|v| graph.value(*v).def == Def::Input).collect();
    for part in own_parts(graph) {
        if !states.contains(&part.input) {
            states.push(part.input);
        }
    }
    states
}
