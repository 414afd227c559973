//! What ranks that share layers keep of the values that all of them have: a slice each ([`KEEP_SLICE`], `--offload ranks`).
//!
//! A value is the same on all ranks of the tensor-parallel group unless it depends on a rank's part of a weight; a sum over the
//! group is the same again. Of such a value a rank keeps one of N slices, and gathers the others before the value is read
//! again (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198; Megatron-LM's
//! distributed saved activations). A value that is in parts already has nothing to share.

use crate::analysis::{Device, Sizes};
use crate::error::{Error, Result};
use crate::ir::{Graph, SecondaryMap, ValueId};
use crate::ops::collective::{
    ALL_REDUCE, GROUP, KEEP_SLICE, OWN_INDICES, OWN_SLICE, TENSOR_PARALLEL, own_parts, slice_size,
    tensor_parallel_ranks,
};
use crate::plan::index::ByValue;
use crate::plan::problem::{Problem, Transfer};

/// Makes a problem move results to the ranks of the tensor-parallel group instead of out of the device's memory. A slice of each
/// moved value stays, and only values that are the same on all ranks may be moved.
///
/// # Errors
/// A graph that ranks do not share the layers of.
pub fn keep_slices(
    problem: &mut Problem,
    (graph, sizes, values): (&Graph, &Sizes, &ByValue<ValueId>),
    device: &Device,
) -> Result<()> {
    let Some(ranks) = tensor_parallel_ranks(graph) else {
        return Err(Error::usage(
            "offload",
            "there are no ranks to keep slices: each has its own examples, or there is one process",
        )
        .expected("--mesh tp=N or dp=M,tp=N")
        .found("--offload ranks")
        .help("--offload cpu moves results to the host's memory"));
    };
    let is_same = same_on_all_ranks(graph);
    let slice = |v: &ValueId| {
        let (dims, dtype) = (sizes.of(*v), graph.ty(*v).dtype);
        let width = dtype.size_bytes().max(1);
        let elements = (dims.bytes() / width) as i64;
        match is_same[*v] {
            true => slice_size(elements, ranks) as u64 * width,
            false => 0,
        }
    };
    problem.slices = values.iter().map(slice).collect();
    let others = (ranks - 1) as f64 / ranks as f64;
    problem.transfer = Some(Transfer {
        us_per_megabyte: others * 1e3 / device.link_gigabytes_per_s,
        start_us: device.link_us,
        busy_share: 1.0,
    });
    Ok(())
}

/// Returns true if a graph keeps slices of results.
pub fn has_slices(graph: &Graph) -> bool {
    graph.nodes().any(|(_, node)| node.op == &KEEP_SLICE)
}

/// Returns whether each value has the same bits on all ranks that share the layers.
fn same_on_all_ranks(graph: &Graph) -> SecondaryMap<ValueId, bool> {
    let mut is_same = SecondaryMap::new(graph.value_bound(), true);
    // Also where a slice of the part is gathered before the part is read.
    for part in own_parts(graph) {
        is_same[part.input] = false;
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let is_sum = node.op == &ALL_REDUCE && node.attrs.str(GROUP) == TENSOR_PARALLEL;
        let is_own = node.op == &OWN_SLICE || node.op == &OWN_INDICES;
        let same = is_sum || (!is_own && node.operands().all(|v| is_same[v]));
        for out in &node.outs {
            is_same[*out] = same;
        }
    }
    is_same
}
