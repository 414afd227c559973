//! Prices of nodes at known sizes: FLOPs, bytes moved, and time on a device by the roofline.
//!
//! Time is `max(FLOPs / rate, bytes / bandwidth) + launch`. The default device is a modelling assumption, not a
//! measurement: it is the one the planner benches price their graphs with, so that figures can be compared.

use crate::analysis::sizes::Sizes;
use crate::ir::op::{Cost, CostCx};
use crate::ir::{Graph, NodeId, Side};

/// What decides how long a node takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    pub launch_us: f64,
}

impl Default for Device {
    fn default() -> Self {
        Device {
            flops_per_s: 600e12,
            bytes_per_s: 2.5e12,
            launch_us: 1.5,
        }
    }
}

impl Device {
    /// Time of one node, in microseconds; nothing to do takes no time.
    pub fn time_us(&self, cost: Cost) -> f64 {
        if cost == Cost::default() {
            return 0.0;
        }
        let arithmetic = cost.flops as f64 / self.flops_per_s;
        let traffic = cost.bytes as f64 / self.bytes_per_s;
        arithmetic.max(traffic) * 1e6 + self.launch_us
    }
}

/// The price of every node.
#[derive(Clone, Debug)]
pub struct Costs {
    table: Side<NodeId, Cost>,
    pub total: Cost,
}

impl Costs {
    pub fn new(graph: &Graph, sizes: &Sizes) -> Costs {
        let mut costs = Costs {
            table: Side::new(graph.node_bound(), Cost::default()),
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
            costs.total.flops += cost.flops;
            costs.total.bytes += cost.bytes;
        }
        costs
    }

    pub fn of(&self, node: NodeId) -> Cost {
        self.table[node]
    }
}
