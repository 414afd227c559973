//! Makes the result and the log-sum-exp of attention operands of its gradient, where the device's kernel reads them.
//!
//! In and out: `Training`, before planning. Without these operands such a kernel has to run the forward again; with them, the
//! planner decides whether they are kept or recomputed. Where attention runs in tiles, which read neither, they are dropped.

use crate::analysis::sdpa::choice::choice_on;
use crate::analysis::sizes::Binding;
use crate::analysis::{Device, Sizes};
use crate::error::Result;
use crate::ir::{Graph, Id, Node, NodeId, Ty, ValueId};
use crate::ops::attention::{ATTENTION, ATTENTION_GRAD, GRAD_SEGMENTS, LSE, SEGMENTS, SHARED, Y};
use crate::ops::rule::compute_type;
use crate::ops::shape::{FLATTEN, RESHAPE, TRANSPOSE};

/// Settles the operands of every gradient of attention for the device of a profile. Returns whether any changed.
///
/// # Errors
/// A size without a number.
pub fn save_attention(graph: &mut Graph, binding: &Binding, device: &Device) -> Result<bool> {
    let nodes = graph.order().iter().copied().enumerate();
    let gradients: Vec<(usize, NodeId)> = nodes
        .filter(|(_, id)| graph.node(*id).op == &ATTENTION_GRAD)
        .collect();
    if gradients.is_empty() {
        return Ok(false);
    }
    let sizes = Sizes::new(graph, binding)?;
    let (_, choice) = choice_on(graph, &sizes, device)?;
    let mut places = vec![usize::MAX; graph.node_bound()];
    for (at, id) in graph.order().iter().enumerate() {
        places[Id::index(*id)] = at;
    }
    let mut changed = false;
    for (at, id) in gradients {
        let forward = match choice.backends[at] {
            Some(_) => forward_of(graph, id),
            None => None,
        };
        let has = graph.node(id).operand(LSE).is_some();
        match forward {
            Some(forward) if !has => {
                let [y, lse] = results(graph, forward);
                let y = turned(graph, y, |id| places[Id::index(id)] < at).unwrap_or(y);
                graph.set_operand(id, Y, Some(y));
                graph.set_operand(id, LSE, Some(lse));
            }
            None if has => {
                graph.set_operand(id, Y, None);
                graph.set_operand(id, LSE, None);
            }
            _ => continue,
        }
        changed = true;
    }
    Ok(changed)
}

/// Finds the node whose gradient `id` computes: same operands, same attributes.
fn forward_of(graph: &Graph, id: NodeId) -> Option<NodeId> {
    let gradient = graph.node(id);
    let is_forward = |other: &NodeId| {
        let node = graph.node(*other);
        let same = |slot| node.operand(slot) == gradient.operand(slot + 1);
        node.op == &ATTENTION
            && (0..4).all(same)
            && node.operand(SEGMENTS) == gradient.operand(GRAD_SEGMENTS)
            && SHARED
                .iter()
                .all(|name| node.attrs.get(name) == gradient.attrs.get(name))
    };
    let readers = graph.value(gradient.operand(1)?).uses().iter();
    readers.map(|reader| reader.node).find(is_forward)
}

/// Finds a copy of a result with the heads of each row side by side, which is made before the gradient. What
/// follows attention usually reads this copy, also in the backward pass, and so do the kernels.
fn turned(graph: &Graph, y: ValueId, is_before: impl Fn(NodeId) -> bool) -> Option<ValueId> {
    let rank = graph.ty(y).rank();
    let mut swapped: Vec<i64> = (0..rank as i64).collect();
    swapped.swap(rank.checked_sub(3)?, rank - 2);
    let is_swap =
        |node: &Node| node.op == &TRANSPOSE && node.attrs.opt_ints("perm") == Some(&swapped);
    let is_copy = |node: &Node| {
        let other_rank = || graph.ty(node.outs[0]).rank() != rank;
        (node.op == &RESHAPE || node.op == &FLATTEN) && other_rank()
    };
    let readers = |value: ValueId| graph.value(value).uses().iter().map(|r| r.node);
    readers(y)
        .filter(|id| is_swap(graph.node(*id)))
        .flat_map(|id| readers(graph.node(id).outs[0]))
        .find(|id| is_copy(graph.node(*id)) && is_before(*id))
        .map(|id| graph.node(id).outs[0])
}

/// Returns the result and the log-sum-exp of a node, which gets the latter if it has none.
fn results(graph: &mut Graph, forward: NodeId) -> [ValueId; 2] {
    let outs = &graph.node(forward).outs;
    let y = outs[0];
    let lse = match outs.get(1) {
        Some(lse) => *lse,
        None => {
            let ty = graph.ty(y);
            let rows = ty.dims[..ty.rank() - 1].to_vec();
            let ty = Ty::new(compute_type(ty.dtype), rows);
            let name = format!("{}.lse", graph.value(y).name);
            graph.add_result(forward, &name, ty)
        }
    };
    [y, lse]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;
    use crate::transform::infer::infer;

    fn graph(dtype: &str) -> Graph {
        let x = format!("{dtype}[2, 4, 70, 16]");
        let source = format!(
            "graph @g imported (%dy: {x}, %q: {x}, %k: {x}, %v: {x}) -> (%y, %dq, %dk, %dv) {{
  %other = Attention %q, %k, %v {{scale=0.5}}
  %y = Attention %q, %k, %v {{scale=0.25}}
  %dq, %dk, %dv = AttentionGrad %dy, %q, %k, %v {{scale=0.25, wants=[0, 1, 2]}}
}}
"
        );
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        graph
    }

    fn saved(graph: &mut Graph, device: &str) -> bool {
        let binding = Binding::new(graph, &[]).unwrap();
        let device = Device::built_in(device).unwrap_or_default();
        save_attention(graph, &binding, &device).unwrap()
    }

    fn operands(graph: &Graph) -> Vec<Option<&str>> {
        let gradient = graph
            .nodes()
            .find(|(_, n)| n.op == &ATTENTION_GRAD)
            .unwrap();
        let name = |v: ValueId| graph.value(v).name.as_str();
        gradient.1.ins[4..].iter().map(|v| v.map(name)).collect()
    }

    #[test]
    fn a_gradient_reads_what_its_own_forward_made() {
        let mut graph = graph("bf16");
        assert!(saved(&mut graph, "h100"));
        assert_eq!(operands(&graph), [None, Some("y"), Some("y.lse")]);
        assert!(!saved(&mut graph, "h100"));
        infer(&mut graph).unwrap();
        // The same file, now for a CPU.
        assert!(saved(&mut graph, "cpu"));
        assert_eq!(operands(&graph), [None; 3]);
        assert!(!saved(&mut graph, "cpu"));
        infer(&mut graph).unwrap();
    }

    #[test]
    fn a_copy_with_heads_inside_is_read_instead() {
        let source = "graph @g imported (%dy: bf16[2, 4, 70, 16], %q: bf16[2, 4, 70, 16]) -> (%rows, %z, %dq) {
  init %shape : i64[2] = [140, 64]
  %y = Attention %q, %q, %q {scale=0.25}
  %t = Transpose %y {perm=[0, 2, 1, 3]}
  %z = Tanh %t
  %rows = Reshape %t, %shape
  %dq = AttentionGrad %dy, %q, %q, %q {scale=0.25, wants=[0]}
  %late = Reshape %t, %shape
}
";
        let mut graph = text::parse(source).unwrap();
        infer(&mut graph).unwrap();
        assert!(saved(&mut graph, "h100"));
        assert_eq!(operands(&graph), [None, Some("rows"), Some("y.lse")]);
        infer(&mut graph).unwrap();
    }

    #[test]
    fn no_fused_kernel_knows_segments() {
        let x = "bf16[2, 4, 70, 16]";
        let source = format!(
            "graph @g imported (%dy: {x}, %q: {x}, %k: {x}, %v: {x}, %s: i64[2, 70]) -> (%y, %dq) {{
  %y = Attention %q, %k, %v, _, %s {{scale=0.25}}
  %dq = AttentionGrad %dy, %q, %k, %v, _, _, _, %s {{scale=0.25, wants=[0]}}
}}
"
        );
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        assert!(!saved(&mut graph, "h100"));
    }

    #[test]
    fn no_fused_kernel_takes_a_cotangent_of_the_log_sum_exp() {
        let x = "bf16[2, 4, 70, 16]";
        let source = format!(
            "graph @g imported (%dy: {x}, %q: {x}, %k: {x}, %v: {x}, %dlse: f32[2, 4, 70]) -> (%y, %dq) {{
  %y = Attention %q, %k, %v {{scale=0.25}}
  %dq = AttentionGrad %dy, %q, %k, %v, _, _, _, _, %dlse {{scale=0.25, wants=[0]}}
}}
"
        );
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        assert!(!saved(&mut graph, "h100"));
    }

    #[test]
    fn tiles_read_neither() {
        let mut graph = graph("f32");
        assert!(!saved(&mut graph, "h100"));
        assert_eq!(operands(&graph), []);
    }
}
