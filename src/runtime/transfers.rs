//! Transfers between the device's memory and the swap store, while other nodes run.
//!
//! A transfer occupies the memory that the graph says. An offloaded result is alive until its `Release`, which waits for
//! the transfer. A fetched value has its memory from its `Fetch` on, and its first reader waits. So the bytes alive at a
//! step do not depend on how fast transfers are.

use super::swap_store::SwapStore;
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, NodeId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};
use tch::Tensor;

/// The transfers under way during a run, by the slot of the value that each makes.
pub trait Transfers {
    /// Begins to offload a tensor, to a file if `to_disk`; `false` where that must be done at once.
    ///
    /// # Errors
    /// The device fails; no memory; no thread.
    fn begin_offload(
        &mut self,
        store: &SwapStore,
        tensor: &Tensor,
        to_disk: bool,
        slot: usize,
    ) -> Result<bool>;

    /// Waits for an offload: the stored tensor, or `None` if the offload was done at once.
    ///
    /// # Errors
    /// The transfer's.
    fn finish_offload(&mut self, slot: usize) -> Result<Option<Tensor>>;

    /// Begins to fetch a stored tensor: the tensor on the device that it will fill, or `None` where that must be done at
    /// once.
    ///
    /// # Errors
    /// The device fails; no memory; no thread.
    fn begin_fetch(
        &mut self,
        store: &SwapStore,
        from: &Tensor,
        slot: usize,
    ) -> Result<Option<Tensor>>;

    /// Waits for the fetch into a slot, if there is one.
    ///
    /// # Errors
    /// The transfer's.
    fn finish_fetch(&mut self, slot: usize) -> Result<()>;

    /// Waits for every transfer; none is under way afterwards, whatever the outcome.
    ///
    /// # Errors
    /// The first that a transfer reports.
    fn finish(&mut self) -> Result<()>;
}

/// Whether a node is a transfer, or the end of one, that may run beside the nodes after it. An `Offload` must have no
/// reader but its `Release`, and a `Fetch` must have a reader.
pub fn may_overlap(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let out = node.outs[0];
    if node.op == &FETCH {
        return !graph.value(out).uses().is_empty() || graph.is_output(out);
    }
    if node.op == &RELEASE {
        return true;
    }
    let is_release = |n: NodeId| graph.node(n).op == &RELEASE && graph.node(n).ins[0] != Some(out);
    node.op == &OFFLOAD
        && !graph.is_output(out)
        && matches!(graph.value(out).uses(), [only] if is_release(only.node))
}
