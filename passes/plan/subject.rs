//! A graph at known sizes, ready to be planned: the problem, what its ops are, and the way back to the graph.

use super::problem::{Correspondence, Problem};
use crate::analysis::attention;
use crate::analysis::{Binding, Blocks, Device, MemoryProfile, Sizes};
use crate::error::Result;
use crate::ir::{Graph, NodeId};
use crate::ops::kind::{Kind, kind};
use serde::{Deserialize, Serialize};

/// What an op is, as far as policies care.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// A product of an activation with a weight.
    PlainProduct,
    /// The same with a bias added in one op.
    BiasedProduct,
    QuantisedProduct,
    /// The softmax of a decomposed attention.
    Probabilities,
    FusedAttention,
    Convolution,
    /// Picks elements by size (TopK).
    Choice,
    MaxReduction,
    Other,
}

/// Layers and parts, by op of a problem.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Structure {
    /// How many layers there are.
    pub blocks: usize,
    pub block_of: Vec<Option<usize>>,
    pub part_of: Vec<Part>,
}

/// Everything a policy or solver needs to plan a graph, and what applies its plan.
pub struct Subject {
    pub sizes: Sizes,
    pub memory: MemoryProfile,
    pub blocks: Blocks,
    pub problem: Problem,
    pub map: Correspondence,
    pub structure: Structure,
}

impl Subject {
    /// # Errors
    /// A size without a number; a graph that has copies.
    pub fn new(graph: &Graph, binding: &Binding, device: &Device) -> Result<Subject> {
        let sizes = Sizes::new(graph, binding)?;
        let memory = MemoryProfile::rounded(graph, &sizes, device.granularity_bytes)?;
        let blocks = Blocks::new(graph)?;
        let (problem, map) = Problem::of_graph(graph, &sizes, &memory, device)?;
        let structure = Structure {
            blocks: blocks.list.len(),
            block_of: map.nodes.iter().map(|n| blocks.of[*n]).collect(),
            part_of: map.nodes.iter().map(|n| part(graph, &blocks, *n)).collect(),
        };
        Ok(Subject {
            sizes,
            memory,
            blocks,
            problem,
            map,
            structure,
        })
    }
}

fn part(graph: &Graph, blocks: &Blocks, node: NodeId) -> Part {
    match (blocks.part[node], kind(graph.node(node).op)) {
        (Some(attention::Part::Probabilities), _) => Part::Probabilities,
        (_, Kind::Attention) => Part::FusedAttention,
        _ if blocks.plain_matmul[node] => Part::PlainProduct,
        (_, Kind::BiasedProduct) => Part::BiasedProduct,
        (_, Kind::QuantisedProduct) => Part::QuantisedProduct,
        (_, Kind::Convolution) => Part::Convolution,
        (_, Kind::Choice) => Part::Choice,
        (_, Kind::MaxReduction) => Part::MaxReduction,
        _ => Part::Other,
    }
}
