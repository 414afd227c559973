//! The parts of layers as `inspect` lists them: norms, attentions, MLPs or experts, and the sums that close them.

use ckpt_passes::Result;
use ckpt_passes::analysis::Layers;
use ckpt_passes::analysis::submodules::{Submodule, Submodules};
use ckpt_passes::ir::Graph;
use ckpt_passes::ops::arith::{ADD, SUM};
use serde::Serialize;
use std::collections::BTreeSet;

/// One part of a layer; `--policy parts:KIND` recomputes it.
#[derive(Clone, Debug, Serialize)]
pub struct SubBlock {
    /// `norm`, `attention`, `mlp`, `experts`, `conv` or `other`.
    pub kind: &'static str,
    /// Module path and class that most of it comes from, where the file tells.
    pub path: Option<String>,
    pub class: Option<String>,
    pub nodes: usize,
    pub first: String,
    pub last: String,
    /// The node that adds the part to the residual stream, where the part ends with one.
    pub residual: Option<String>,
}

/// The parts of each layer, in order.
///
/// # Errors
/// See [`Submodules::new`].
pub fn sub_blocks(graph: &Graph, blocks: &Layers) -> Result<Vec<Vec<SubBlock>>> {
    let mut of_layers: Vec<Vec<SubBlock>> = blocks.list.iter().map(|_| Vec::new()).collect();
    for part in Submodules::new(graph, blocks)?.list {
        let (Some(first), Some(last)) = (part.nodes.first(), part.nodes.last()) else {
            continue;
        };
        let name = |id| graph.node(id).name.clone();
        of_layers[part.block].push(SubBlock {
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

/// A sum at the end of what is made in the part and of what is made before it.
fn residual(graph: &Graph, part: &Submodule) -> Option<String> {
    let inside: BTreeSet<_> = part.nodes.iter().collect();
    let last = graph.node(*part.nodes.last()?);
    let adds = std::ptr::eq(last.op, &ADD) || std::ptr::eq(last.op, &SUM);
    let mut operands = last.ins.iter().flatten();
    let from_before = operands.any(|v| graph.def_node(*v).is_some_and(|n| !inside.contains(&n)));
    (adds && from_before).then(|| last.name.clone())
}

/// The parts of one layer in a line: `norm 2, attention 31 +, norm 2, mlp 6 +`; `+` where it is added to the stream.
pub fn human(parts: &[SubBlock]) -> String {
    let one = |p: &SubBlock| {
        let sum = if p.residual.is_some() { " +" } else { "" };
        format!("{} {}{sum}", p.kind, p.nodes)
    };
    parts.iter().map(one).collect::<Vec<_>>().join(", ")
}
