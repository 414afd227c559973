//! Transfers between the device's memory and the swap store, which overlap other nodes.
//!
//! The graph determines the memory of a transfer. An offloaded result is alive until its `Release`, which waits for the
//! transfer. A fetched value has its memory from its `Fetch` on, and its first reader waits. So live bytes do not depend on
//! the speed of transfers.

use super::swap_store::SwapStore;
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, NodeId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};
use tch::Tensor;

/// The running transfers, by the slot of the value that each makes.
pub trait Transfers {
    /// Begins to offload a tensor, to a file if `to_disk`. Returns `false` if that cannot overlap other nodes.
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

    /// Waits for an offload and returns the stored tensor; `None` if the offload did not overlap.
    ///
    /// # Errors
    /// The transfer's.
    fn finish_offload(&mut self, slot: usize) -> Result<Option<Tensor>>;

    /// Begins to fetch a stored tensor. Returns the tensor that it fills; `None` if that cannot overlap other nodes.
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

    /// Returns why no captured step can contain transfers; `None` if one can.
    fn uncaptured(&self, store: &SwapStore) -> Option<&'static str>;

    /// Makes all work submitted from now on wait for every transfer.
    ///
    /// # Errors
    /// The first error of a transfer.
    fn join(&mut self) -> Result<()>;

    /// Waits for every transfer, also after an error.
    ///
    /// # Errors
    /// The first error of a transfer.
    fn finish(&mut self) -> Result<()>;
}

/// Returns whether a node is a transfer, or the end of one, that may overlap later nodes. An `Offload` must have no reader but
/// its `Release`, and a `Fetch` must have a reader.
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
