//! Accepts a graph that already has its backward pass, and decides which outputs a training graph has.
//!
//! In: `Typed` or later. Out: at least `Training`. Nodes keep the role that their file gives them. Where no node is
//! marked as backward, every node that only gradients depend on becomes one. A training graph can become a forward graph
//! again, so that one of its outputs is the loss of another differentiation.

use super::loss::{Loss, Seeds, add_loss, head};
use super::remat::strip_plan;
use crate::analysis::gradients::{gradient_outputs, has_backward, training_outputs};
use crate::error::{Error, Result};
use crate::glob;
use crate::ir::{Graph, Phase, Role, SecondaryMap, ValueId};

/// Gives every node its role. Returns whether anything changed.
///
/// # Errors
/// A graph without a backward pass.
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
    let gradients = training_outputs(graph);
    let mut wanted = SecondaryMap::new(graph.value_bound(), false);
    for id in graph.outputs() {
        wanted[*id] = !gradients.contains(id);
    }
    for id in graph.order().to_vec().into_iter().rev() {
        let node = graph.node(id);
        if node.outs.iter().any(|v| wanted[*v]) {
            for value in node.operands() {
                wanted[value] = true;
            }
        } else {
            graph.set_role(id, Role::Backward);
            changed = true;
        }
    }
    Ok(changed)
}

/// Prefix of outputs that an earlier differentiation made.
const BEFORE: &str = "before.";

/// Turns a training graph into a forward graph, ready to be differentiated once more. An earlier plan is undone. The
/// outputs `loss` and `<initializer>.grad` become ordinary outputs, `before.loss` and `before.<initializer>.grad`.
/// Returns the requested loss under its new name.
///
/// # Errors
/// A graph that updates its parameters; a new name that the model uses.
pub fn as_forward(graph: &mut Graph, loss: &Loss) -> Result<Loss> {
    if let Some((id, _)) = graph.nodes().find(|(_, n)| n.op.is_update()) {
        return Err(Error::usage(
            "loss",
            "a step that updates its parameters is not differentiated once more",
        )
        .at(graph.describe(id))
        .help("make the training graph without --optimizer"));
    }
    strip_plan(graph);
    let outputs = graph.outputs().iter().copied();
    let mut earlier = gradient_outputs(graph);
    earlier.extend(outputs.filter(|v| graph.value(*v).name == "loss"));
    let mut requested = loss.clone();
    for value in earlier {
        let name = graph.value(value).name.clone();
        let new = format!("{BEFORE}{name}");
        if graph.has_value_name(&new) {
            let what = format!("the output `{name}` becomes `{new}`, but the model uses that name");
            return Err(Error::model("name", what));
        }
        if *loss == Loss::Output(name) {
            requested = Loss::Output(new.clone());
        }
        graph.rename_value(value, &new);
    }
    for id in graph.order().to_vec() {
        graph.set_role(id, Role::Forward);
    }
    graph.phase = graph.phase.min(Phase::Typed);
    Ok(requested)
}

/// Returns the outputs that match one of the patterns. Gradients and updates never match: freezing drops a gradient.
///
/// # Errors
/// A pattern that matches nothing.
pub fn matching_outputs(graph: &Graph, patterns: &[String]) -> Result<Vec<ValueId>> {
    let training = training_outputs(graph);
    let candidates = graph.outputs().iter().filter(|v| !training.contains(v));
    let candidates: Vec<ValueId> = candidates.copied().collect();
    let name = |v: &ValueId| graph.value(*v).name.as_str();
    let mut matching: Vec<ValueId> = Vec::new();
    for pattern in patterns {
        let before = matching.len();
        matching.extend(
            candidates
                .iter()
                .filter(|v| glob::matches(pattern, name(v))),
        );
        if matching.len() == before {
            let known: Vec<&str> = candidates.iter().map(name).collect();
            let what = format!("--drop-output `{pattern}` matches no output");
            let found = format!("outputs {}", known.join(", "));
            return Err(Error::usage("pattern", what).found(found));
        }
    }
    Ok(matching)
}

/// Adds the loss and drops the outputs that match `patterns`. The loss applies to the outputs that stay. If it fits none
/// of them, or the scores of classes are dropped, it applies to a dropped one: the logits of a language model need not
/// stay an output to be trained on, and its caches are no scores.
///
/// # Errors
/// See [`matching_outputs`] and [`add_loss`].
pub fn loss_and_outputs(graph: &mut Graph, loss: &Loss, patterns: &[String]) -> Result<Seeds> {
    let dropped = matching_outputs(graph, patterns)?;
    if dropped.is_empty() {
        return add_loss(graph, loss);
    }
    let all = graph.outputs().to_vec();
    let head = head(graph, loss);
    if !head.is_some_and(|v| dropped.contains(&v)) {
        let kept = all.iter().filter(|v| !dropped.contains(v));
        graph.set_outputs(kept.copied().collect());
        if let Ok(seeds) = add_loss(graph, loss) {
            return Ok(seeds);
        }
        graph.set_outputs(all);
    }
    let seeds = add_loss(graph, loss)?;
    // Training reports the loss itself; an output with a cotangent of its own may be dropped.
    let own = seeds.seeds.iter().filter(|s| s.cotangent.is_none());
    let is_loss = |v: &ValueId| own.clone().any(|s| s.value == *v);
    let outputs = graph.outputs().iter();
    let kept = outputs.filter(|v| !dropped.contains(v) || is_loss(v));
    let kept = kept.copied().collect();
    graph.set_outputs(kept);
    Ok(seeds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    /// A cache that stays an output is no candidate, and neither are two.
    #[test]
    fn a_loss_of_classes_is_of_the_head_even_where_it_is_dropped() {
        for outputs in ["%k, %logits", "%k, %hidden, %logits", "%hidden, %logits"] {
            let source = format!(
                "graph @g typed (%x: f32[b, s, 4]) -> ({outputs}) {{
  init %wk : f32[4, 4] = splat 0.5
  init %head : f32[4, 7] = splat 0.5
  %k = MatMul %x, %wk : f32[b, s, 4]
  %hidden = Add %x, %k : f32[b, s, 4]
  %logits = MatMul %hidden, %head : f32[b, s, 7]
}}
"
            );
            for dropped in [vec![], vec!["logits".to_string()]] {
                let mut g = text::parse(&source).unwrap();
                let seeds = loss_and_outputs(&mut g, &Loss::CausalLm, &dropped).unwrap();
                assert_eq!(seeds.seeds.len(), 1);
                let labels = g.inputs().iter().find(|v| g.value(**v).name == "labels");
                assert_eq!(g.ty(*labels.unwrap()).rank(), 2);
                let read: Vec<&str> = g
                    .nodes()
                    .filter(|(_, n)| n.role == Role::Loss)
                    .flat_map(|(_, n)| n.operands().map(|v| g.value(v).name.as_str()))
                    .collect();
                assert!(read.contains(&"logits") && !read.contains(&"k"), "{read:?}");
                let is_output = g.outputs().iter().any(|v| g.value(*v).name == "logits");
                assert_eq!(is_output, dropped.is_empty());
            }
        }
    }

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
