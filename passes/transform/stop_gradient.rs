//! Stops gradients where the user says so. An ONNX export loses `detach`: `exp(p - p.detach())`, as policy losses have it,
//! becomes `exp(p - p)`, whose gradient is zero.
//!
//! In: any phase before `Training`. Out: the same, with a `StopGradient` for each match.

use crate::error::{Error, Result};
use crate::glob;
use crate::ir::edit::NewNode;
use crate::ir::{Attrs, Graph, NodeId, Role, SecondaryMap, Use, ValueId};
use crate::near::nearest;
use crate::ops::arith::{DIV, SUB};
use crate::ops::shape::{IDENTITY, STOP_GRADIENT};
use crate::transform::order::order_by_reads;

/// Stops the gradient at what each pattern names: values, nodes (all their results), or with `NAME#K` the operand `K` of
/// nodes, counted from 0, for which other readers of that value still get a gradient.
///
/// # Errors
/// A pattern that matches nothing.
pub fn stop_gradients(graph: &mut Graph, patterns: &[String]) -> Result<()> {
    for pattern in patterns {
        let mut uses: Vec<(ValueId, Vec<Use>)> = Vec::new();
        let all = |v: ValueId| (v, graph.value(v).uses().to_vec());
        let values = graph.values().map(|(v, _)| v);
        uses.extend(
            values
                .filter(|v| glob::matches(pattern, &graph.value(*v).name))
                .map(all),
        );
        let nodes = |pattern: &str| -> Vec<NodeId> {
            let named = |id: &NodeId| {
                let node = graph.node(*id);
                [&node.name, &node.loc.node]
                    .iter()
                    .any(|name| glob::matches(pattern, name))
            };
            graph.order().iter().copied().filter(named).collect()
        };
        uses.extend(
            nodes(pattern)
                .iter()
                .flat_map(|n| &graph.node(*n).outs)
                .copied()
                .map(all),
        );
        if let Some((name, Ok(slot))) = pattern
            .rsplit_once('#')
            .map(|(n, k)| (n, k.parse::<usize>()))
        {
            let operand = |id: NodeId| {
                let value = graph.node(id).operand(slot)?;
                Some((value, vec![Use { node: id, slot }]))
            };
            uses.extend(nodes(name).into_iter().filter_map(operand));
        }
        // A value and the node that makes it may have the same name.
        uses.sort_by_key(|(v, _)| *v);
        uses.dedup();
        uses.retain(|(_, readers)| !readers.is_empty());
        if uses.is_empty() {
            return Err(no_match(graph, pattern));
        }
        for (value, readers) in uses {
            stop(graph, value, &readers);
        }
    }
    if patterns.is_empty() {
        return Ok(());
    }
    order_by_reads(graph, &[])
}

/// Lets some readers of a value read it through a `StopGradient`.
fn stop(graph: &mut Graph, value: ValueId, readers: &[Use]) {
    let name = format!("{}/stopped", graph.value(value).name);
    let maker = graph.def_node(value);
    let node = graph.add_node(NewNode {
        op: &STOP_GRADIENT,
        name: &name,
        attrs: Attrs::new(),
        ins: vec![Some(value)],
        outs: vec![(name.clone(), graph.value(value).ty.clone())],
        loc: maker.map(|m| graph.node(m).loc.clone()).unwrap_or_default(),
        role: Role::Forward,
    });
    let stopped = graph.node(node).outs[0];
    for Use { node, slot } in readers {
        graph.set_operand(*node, *slot, Some(stopped));
    }
}

fn no_match(graph: &Graph, pattern: &str) -> Box<Error> {
    const SHOWN: usize = 5;
    let names = graph.order().iter().map(|id| graph.node(*id).name.as_str());
    let names = names.chain(graph.values().map(|(_, v)| v.name.as_str()));
    let near = nearest(pattern.split('#').next().unwrap_or(pattern), names, SHOWN);
    Error::usage(
        "pattern",
        format!("--stop-gradient `{pattern}` matches no value or node that something reads"),
    )
    .expected("the name of a value or a node, or NODE#K for its operand K, counted from 0")
    .found(format!("names such as {}", near.join(", ")))
}

/// Returns the nodes that subtract a value from itself or divide it by itself, where a trained parameter flows into that
/// value and a seed of the backward pass depends on the result: the gradient is zero.
pub fn self_differences(graph: &Graph, trained: &[ValueId], seeds: &[ValueId]) -> Vec<NodeId> {
    let mut flows = SecondaryMap::new(graph.value_bound(), false);
    for v in trained {
        flows[*v] = true;
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let flow = node.op != &STOP_GRADIENT && node.operands().any(|v| flows[v]);
        for out in node.outs.iter().filter(|_| flow) {
            flows[*out] = graph.ty(*out).dtype.is_real();
        }
    }
    let mut wanted = SecondaryMap::new(graph.value_bound(), false);
    for v in seeds {
        wanted[*v] = true;
    }
    let mut found = Vec::new();
    for id in graph.order().iter().rev() {
        let node = graph.node(*id);
        if !node.outs.iter().any(|v| wanted[*v]) {
            continue;
        }
        for v in node.operands() {
            wanted[v] = true;
        }
        let same = |a, b| origin(graph, a) == origin(graph, b);
        if let (true, [Some(a), Some(b)]) = (node.op == &SUB || node.op == &DIV, &node.ins[..])
            && same(*a, *b)
            && flows[*a]
        {
            found.push(*id);
        }
    }
    found.reverse();
    found
}

/// Returns the value that a chain of `Identity` passes on.
fn origin(graph: &Graph, mut value: ValueId) -> ValueId {
    while let Some(id) = graph.def_node(value)
        && graph.node(id).op == &IDENTITY
        && let Some(from) = graph.node(id).operand(0)
    {
        value = from;
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Request, compile};
    use crate::driver::Watch;
    use crate::text;
    use crate::transform::loss::Loss;

    const RATIO: &str = "graph @g imported (%x: f32[2, 3]) -> (%total) {
  init %w : f32[3, 1] = [1, 2, 3]
  %p = MatMul %x, %w
  %same = Identity %p
  %d = Sub %p, %same
  %ratio = Exp %d
  %total = ReduceSum %ratio {keepdims=0}
}
";

    fn compiled(stops: &[&str]) -> Result<(Graph, Vec<String>)> {
        let mut graph = text::parse(RATIO)?;
        let request = Request {
            loss: Loss::Output("total".into()),
            stop_gradients: stops.iter().map(|s| s.to_string()).collect(),
            plan: crate::plan::Policy::NONE.into(),
            ..Request::default()
        };
        let done = compile(&mut graph, &request, &mut Watch::default())?;
        Ok((graph, done.warnings))
    }

    #[test]
    fn a_difference_with_itself_is_named_and_a_stopped_operand_mends_it() {
        let (_, warnings) = compiled(&[]).unwrap();
        assert!(
            warnings
                .iter()
                .any(|w| w.contains("`d`") && w.contains("--stop-gradient")),
            "{warnings:?}"
        );
        for stop in ["d#1", "same", "sam*"] {
            let (graph, warnings) = compiled(&[stop]).unwrap();
            assert!(
                !warnings.iter().any(|w| w.contains("itself")),
                "{stop}: {warnings:?}"
            );
            assert!(graph.nodes().any(|(_, n)| n.op == &STOP_GRADIENT), "{stop}");
        }
    }

    #[test]
    fn a_pattern_without_a_match_names_what_is_near() {
        let error = compiled(&["ratios"]).err().unwrap();
        assert_eq!((error.code(), error.exit_code()), ("pattern", 2));
        assert!(error.to_string().contains("ratio"), "{error}");
        assert!(compiled(&["d#7"]).is_err());
    }
}
