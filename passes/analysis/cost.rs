//! Prices of nodes at known sizes: FLOPs, bytes moved, and the element type of the arithmetic. A
//! [`Device`](super::device::Device) turns them into time.

use crate::analysis::sizes::Sizes;
use crate::ir::op::{Cost, CostCx};
use crate::ir::{DType, Graph, NodeId, SecondaryMap};

/// The price of every node.
#[derive(Clone, Debug)]
pub struct Costs {
    table: SecondaryMap<NodeId, Cost>,
    dtype: SecondaryMap<NodeId, DType>,
    /// The sum over all nodes.
    pub total: Cost,
}

impl Costs {
    /// Prices every node of a graph.
    pub fn new(graph: &Graph, sizes: &Sizes) -> Costs {
        let mut costs = Costs {
            table: SecondaryMap::new(graph.node_bound(), Cost::default()),
            dtype: SecondaryMap::new(graph.node_bound(), DType::F32),
            total: Cost::default(),
        };
        for id in graph.order() {
            let node = graph.node(*id);
            let ins: Vec<_> = node
                .ins
                .iter()
                .map(|v| v.map(|v| sizes.of(v).clone()))
                .collect();
            let outs: Vec<_> = node.outs.iter().map(|v| sizes.of(*v).clone()).collect();
            let cost = (node.op.cost)(&CostCx {
                attrs: &node.attrs,
                ins: &ins,
                outs: &outs,
            });
            costs.table[*id] = cost;
            let all = ins.iter().flatten().chain(&outs).map(|s| s.dtype);
            if let Some(widest) = all.filter(|d| d.is_float()).max_by_key(|d| d.size_bytes()) {
                costs.dtype[*id] = widest;
            }
            costs.total.flops += cost.flops;
            costs.total.bytes += cost.bytes;
        }
        costs
    }

    /// Returns the price of a node.
    pub fn of(&self, node: NodeId) -> Cost {
        self.table[node]
    }

    /// Returns the element type whose rate applies to the node: the widest floating-point type that it reads or makes.
    pub fn dtype(&self, node: NodeId) -> DType {
        self.dtype[node]
    }
}
