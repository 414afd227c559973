//! Accepts a graph that has its backward already, and settles which outputs a training graph has.
//!
//! In: `Typed` or later. Out: at least `Training`. Nodes keep the role their file gives them. Where no node says that
//! it belongs to the backward, everything that only gradients depend on does. A training graph can become a forward graph
//! again, of which one output is the loss of another differentiation.

use super::loss::{Loss, Seeds, add_loss};
use super::optimizer::{update_node, updated};
use super::remat::strip_again;
use crate::error::{Error, Result};
use crate::glob;
use crate::ir::{Graph, Phase, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// How names of gradients end: ours, and ONNX Runtime's with and without the buffer it adds them up in. Its parameters
/// are graph inputs (training artifacts of onnxruntime 1.19).
const ENDS: [&str; 3] = [".grad", "_grad.accumulation.out", "_grad"];

/// What a value of that name would be the gradient of.
pub fn gradient_of(name: &str) -> Option<&str> {
    ENDS.iter().find_map(|end| name.strip_suffix(end))
}

/// Outputs that are the gradient of an initializer or input, by their name (`<initializer>.grad`).
pub fn gradient_outputs(graph: &Graph) -> Vec<ValueId> {
    let inits = graph.inits().map(|(_, v)| v.name.as_str());
    let inputs = graph.inputs().iter().map(|v| graph.value(*v).name.as_str());
    let sources: BTreeSet<&str> = inits.chain(inputs).collect();
    let is_gradient =
        |id: &ValueId| gradient_of(&graph.value(*id).name).is_some_and(|n| sources.contains(n));
    graph
        .outputs()
        .iter()
        .copied()
        .filter(is_gradient)
        .collect()
}

/// What is trained, initializers and inputs, each with its gradient: an output, or what an update reads. No order.
pub fn trained(graph: &Graph) -> BTreeMap<ValueId, ValueId> {
    let mut trained: BTreeMap<ValueId, ValueId> = updated(graph).into_iter().collect();
    let inits = graph.inits().map(|(id, v)| (v.name.as_str(), id));
    let inputs = graph.inputs().iter();
    let inputs = inputs.map(|id| (graph.value(*id).name.as_str(), *id));
    let sources: BTreeMap<&str, ValueId> = inits.chain(inputs).collect();
    for output in graph.outputs() {
        let source = gradient_of(&graph.value(*output).name).and_then(|name| sources.get(name));
        if let Some(source) = source {
            trained.insert(*source, *output);
        }
    }
    trained
}

/// Outputs that only training has: gradients, and what updates make.
pub fn training_outputs(graph: &Graph) -> BTreeSet<ValueId> {
    let updates = graph.outputs().iter().copied();
    let updates = updates.filter(|v| update_node(graph, *v).is_some());
    updates.chain(gradient_outputs(graph)).collect()
}

/// Whether a graph holds its own backward.
pub fn has_backward(graph: &Graph) -> bool {
    graph
        .nodes()
        .any(|(_, n)| n.role == Role::Backward || n.op.is_update())
        || !gradient_outputs(graph).is_empty()
}

/// Gives every node its role. Returns whether anything changed.
///
/// # Errors
/// A graph without a backward.
pub fn joint(graph: &mut Graph) -> Result<bool> {
    if !has_backward(graph) {
        return Err(
            Error::usage("joint", "the graph has no backward").help("`loss,autodiff` add one")
        );
    }
    let mut changed = graph.phase < Phase::Training;
    graph.phase = graph.phase.max(Phase::Training);
    if graph.nodes().any(|(_, n)| n.role == Role::Backward) {
        return Ok(changed);
    }
    let mut is_gradient = SecondaryMap::new(graph.value_bound(), false);
    for id in training_outputs(graph) {
        is_gradient[id] = true;
    }
    let mut wanted = SecondaryMap::new(graph.value_bound(), false);
    for id in graph.outputs() {
        wanted[*id] = !is_gradient[*id];
    }
    for id in graph.order().to_vec().into_iter().rev() {
        let node = graph.node(id);
        if node.outs.iter().any(|v| wanted[*v]) {
            for value in node.ins.iter().flatten() {
                wanted[*value] = true;
            }
        } else {
            graph.set_role(id, Role::Backward);
            changed = true;
        }
    }
    Ok(changed)
}

/// Before the names that outputs of an earlier differentiation have from the next one on.
const BEFORE: &str = "before.";

/// Makes a training graph a forward graph, to be differentiated once more: an earlier plan is taken back, and what was
/// `loss` and `<initializer>.grad` is an output like any other, `before.loss` and `before.<initializer>.grad`. Returns
/// the loss that is meant, which may be one of these.
///
/// # Errors
/// A graph that updates its parameters.
pub fn forward_again(graph: &mut Graph, loss: &Loss) -> Result<Loss> {
    if let Some((id, _)) = graph.nodes().find(|(_, n)| n.op.is_update()) {
        return Err(Error::usage(
            "loss",
            "a step that updates its parameters is not differentiated once more",
        )
        .at(graph.describe(id))
        .help("make the training graph without --optimizer"));
    }
    strip_again(graph);
    let outputs = graph.outputs().iter().copied();
    let mut earlier = gradient_outputs(graph);
    earlier.extend(outputs.filter(|v| graph.value(*v).name == "loss"));
    let mut meant = loss.clone();
    for value in earlier {
        let name = graph.value(value).name.clone();
        let new = format!("{BEFORE}{name}");
        if graph.has_value_name(&new) {
            let what = format!("the output `{name}` becomes `{new}`, but the model uses that name");
            return Err(Error::model("name", what));
        }
        if *loss == Loss::Output(name) {
            meant = Loss::Output(new.clone());
        }
        graph.rename_value(value, &new);
    }
    for id in graph.order().to_vec() {
        graph.set_role(id, Role::Forward);
    }
    graph.phase = graph.phase.min(Phase::Typed);
    Ok(meant)
}

/// Outputs that match one of the patterns; gradients are dropped by freezing, not by name, and updates not at all.
///
/// # Errors
/// A pattern that matches nothing.
pub fn matching_outputs(graph: &Graph, patterns: &[String]) -> Result<Vec<ValueId>> {
    let training = training_outputs(graph);
    let candidates = graph.outputs().iter().filter(|v| !training.contains(v));
    let candidates: Vec<ValueId> = candidates.copied().collect();
    let mut matching: Vec<ValueId> = Vec::new();
    for pattern in patterns {
        let name = |v: &&ValueId| glob::matches(pattern, &graph.value(**v).name);
        let before = matching.len();
        matching.extend(candidates.iter().filter(name));
        if matching.len() == before {
            let known: Vec<&str> = candidates
                .iter()
                .map(|v| graph.value(*v).name.as_str())
                .collect();
            let what = format!("--drop-output `{pattern}` matches no output");
            return Err(
                Error::usage("pattern", what).found(format!("outputs {}", known.join(", ")))
            );
        }
    }
    Ok(matching)
}

/// Adds the loss and drops the outputs that nobody wants. The loss looks at the outputs that stay; one that finds
/// nothing there is made of a dropped one: the logits of a language model need not be handed out to be trained on.
///
/// # Errors
/// See [`matching_outputs`] and [`add_loss`].
pub fn loss_and_outputs(graph: &mut Graph, loss: &Loss, patterns: &[String]) -> Result<Seeds> {
    let dropped = matching_outputs(graph, patterns)?;
    if dropped.is_empty() {
        return add_loss(graph, loss);
    }
    let all = graph.outputs().to_vec();
    graph.set_outputs(
        all.iter()
            .copied()
            .filter(|v| !dropped.contains(v))
            .collect(),
    );
    if let Ok(seeds) = add_loss(graph, loss) {
        return Ok(seeds);
    }
    graph.set_outputs(all);
    let seeds = add_loss(graph, loss)?;
    // The loss itself is what training reports; an output with a cotangent of its own may go.
    let own = seeds.seeds.iter().filter(|s| s.cotangent.is_none());
    let is_loss = |v: &ValueId| own.clone().any(|s| s.value == *v);
    let kept = graph
        .outputs()
        .iter()
        .copied()
        .filter(|v| !dropped.contains(v) || is_loss(v));
    let kept = kept.collect();
    graph.set_outputs(kept);
    Ok(seeds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn gradients_of_another_tool_are_told_by_their_names() {
        let source = "graph @g typed (%x: f32[4], %w: f32[4], %w_grad.accumulation.buffer: f32[4]) -> (%y, %w_grad.accumulation.out) {
  %y = Mul %x, %w : f32[4]
  %w_grad = Opaque %y, %x {domain=\"com.microsoft\", op=\"MulGrad\"} : f32[4]
  %w_grad.accumulation.out = Opaque %w_grad.accumulation.buffer, %w_grad {domain=\"com.microsoft\", op=\"InPlaceAccumulatorV2\"} : bool[1]
}
";
        let mut g = text::parse(source).unwrap();
        assert!(has_backward(&g) && joint(&mut g).unwrap());
        let roles: Vec<Role> = g.order().iter().map(|n| g.node(*n).role).collect();
        assert_eq!(roles, [Role::Forward, Role::Backward, Role::Backward]);
        for forward in ["%q_grad", "%v.grad", "%grad"] {
            let other = source.replace("%w_grad.accumulation.out", forward);
            assert!(!has_backward(&text::parse(&other).unwrap()), "{forward}");
        }
    }

    #[test]
    fn what_only_gradients_need_is_backward() {
        let source = "graph @g typed (%x: f32[4]) -> (%y, %w.grad) {
  init %w : f32[4] = [1, 2, 3, 4]
  %y = Mul %x, %w : f32[4]
  %d = Mul %y, %x : f32[4]
  %w.grad = Neg %d : f32[4]
}
";
        let mut g = text::parse(source).unwrap();
        assert!(joint(&mut g).unwrap());
        let roles: Vec<Role> = g.order().iter().map(|n| g.node(*n).role).collect();
        assert_eq!(roles, [Role::Forward, Role::Backward, Role::Backward]);
        assert_eq!(g.phase, Phase::Training);
        assert!(!joint(&mut g).unwrap());
        let mut forward = text::parse("graph @g typed (%x: f32[4]) -> (%x) {\n}\n").unwrap();
        assert_eq!(joint(&mut forward).unwrap_err().exit_code(), 2);
    }
}
