//! The sub-blocks of layers, as `inspect` lists them: norms, attentions, MLPs or experts, and the residual sums that end
//! them.

use ckpt_passes::Result;
use ckpt_passes::analysis::Layers;
use ckpt_passes::analysis::sub_blocks::{self, SubBlocks};
use ckpt_passes::ir::Graph;
use ckpt_passes::ops::arith::{ADD, SUM};
use serde::Serialize;
use std::collections::BTreeSet;

/// One sub-block of a layer; `--policy parts:KIND` recomputes it.
#[derive(Clone, Debug, Serialize)]
pub struct SubBlock {
    /// `norm`, `attention`, `mlp`, `experts`, `conv` or `other`.
    pub kind: &'static str,
    /// Module path and class of most of its nodes, where the file names them.
    pub path: Option<String>,
    /// Module class of that path; `None` where the file names none.
    pub class: Option<String>,
    /// The number of its nodes.
    pub nodes: usize,
    /// Name of its first node in the graph's order.
    pub first: String,
    /// Name of its last node in the graph's order.
    pub last: String,
    /// The node that adds the sub-block to the residual stream, where it ends with one.
    pub residual: Option<String>,
}

/// Returns the sub-blocks of each layer, in order.
///
/// # Errors
/// See [`SubBlocks::new`].
pub fn sub_blocks(graph: &Graph, blocks: &Layers) -> Result<Vec<Vec<SubBlock>>> {
    let mut of_layers: Vec<Vec<SubBlock>> = blocks.list.iter().map(|_| Vec::new()).collect();
    for part in SubBlocks::new(graph, blocks)?.list {
        let (Some(first), Some(last)) = (part.nodes.first(), part.nodes.last()) else {
            continue;
        };
        let name = |id| graph.node(id).name.clone();
        of_layers[part.layer].push(SubBlock {
            kind: part.kind.word(),
            nodes: part.nodes.len(),
            first: name(*first),
            last: name(*last),
            residual: residual(graph, &part),
            path: part.path,
            class: part.class,
        });
    }
    Ok(of_layers)
}

/// Returns the sum that ends the sub-block and reads a value from before it, if there is one.
fn residual(graph: &Graph, part: &sub_blocks::SubBlock) -> Option<String> {
    let inside: BTreeSet<_> = part.nodes.iter().collect();
    let last = graph.node(*part.nodes.last()?);
    let adds = std::ptr::eq(last.op, &ADD) || std::ptr::eq(last.op, &SUM);
    let mut operands = last.ins.iter().flatten();
    let from_before = operands.any(|v| graph.def_node(*v).is_some_and(|n| !inside.contains(&n)));
    (adds && from_before).then(|| last.name.clone())
}

/// Returns the sub-blocks of one layer in a line: `norm 2, attention 31 +, norm 2, mlp 6 +`, with `+` for a residual sum.
pub fn human(parts: &[SubBlock]) -> String {
    let one = |p: &SubBlock| {
        let sum = if p.residual.is_some() { " +" } else { "" };
        format!("{} {}{sum}", p.kind, p.nodes)
    };
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}
