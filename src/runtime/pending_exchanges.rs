//! Exchanges between ranks that run beside the nodes of a step: sums that are begun, collected in a bucket or under way, and
//! parameters that are being gathered.
//!
//! Only the thread that runs the step begins them and waits for them, and all ranks do so in the same order. A thread of its
//! own sums one bucket after the other. It allocates nothing from libtorch: a sum is written over its tensor, or into a
//! slice that was made before. Gathers are begun at once, and run in threads of the group.
//!
//! NCCL knows an exchange by the order in which a rank issues it, and not by a tag. So tensors on a device are exchanged by the thread
//! that runs the step, in the order of its nodes.

use super::ranks::Group;
use super::work_queue::WorkQueue;
use ckpt_passes::Result;
use ckpt_torch::ranks::Gather;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use tch::{Device, Tensor};

/// A tensor, and the slice that takes this rank's slice of its sum.
struct Member {
    tensor: Tensor,
    slice: Option<Tensor>,
}

impl Member {
    fn is_like(&self, other: &Member) -> bool {
        let kinds = [&self.tensor, &other.tensor].map(Tensor::kind);
        kinds[0] == kinds[1] && self.slice.is_some() == other.slice.is_some()
    }
}

#[derive(Default)]
struct Pending {
    /// The bucket that is being filled, and its number.
    filling: Option<(Group, Vec<Member>)>,
    number: u64,
    bytes: u64,
    /// The bucket of each sum that nothing has waited for, by the address of its result.
    buckets: BTreeMap<usize, u64>,
    under_way: BTreeMap<u64, Receiver<Result<()>>>,
    /// By the address of the whole tensor.
    gathers: BTreeMap<usize, (Group, Gather)>,
    queue: WorkQueue,
}

thread_local! {
    static PENDING: RefCell<Pending> = RefCell::default();
}

impl Pending {
    /// Begins to exchange the bucket.
    fn close(&mut self) -> Result<()> {
        let Some((group, members)) = self.filling.take() else {
            return Ok(());
        };
        let is_on_device = members.iter().any(|m| m.tensor.device() != Device::Cpu);
        let mut parts: Vec<(i64, Vec<Member>)> = Vec::new();
        for member in members {
            match parts.last_mut() {
                Some((_, part)) if part[0].is_like(&member) => part.push(member),
                _ => parts.push((Group::next_tag(), vec![member])),
            }
        }
        let work = move || {
            for (tag, part) in parts {
                let slices: Option<Vec<Tensor>> = part
                    .iter()
                    .map(|m| Some(m.slice.as_ref()?.shallow_clone()))
                    .collect();
                let tensors: Vec<Tensor> = part.into_iter().map(|m| m.tensor).collect();
                group.add_up(tag, &tensors, slices.as_deref())?;
            }
            Ok(())
        };
        if is_on_device {
            work()?;
        } else {
            let result = self.queue.begin(work)?;
            self.under_way.insert(self.number, result);
        }
        (self.number, self.bytes) = (self.number + 1, 0);
        Ok(())
    }
}

fn with<T>(f: impl FnOnce(&mut Pending) -> T) -> T {
    PENDING.with_borrow_mut(f)
}

/// Begins to sum a tensor over the ranks of a group: in place, or this rank's slice of the sum into `slice`. It is exchanged
/// with those that are begun after it, once they have `bucket` bytes together.
///
/// # Errors
/// No thread.
pub fn begin(group: &Group, tensor: &Tensor, slice: Option<&Tensor>, bucket: u64) -> Result<()> {
    if group.is_alone() || group.ranks == 1 || tensor.numel() == 0 {
        return Ok(());
    }
    with(|pending| {
        let result = slice.unwrap_or(tensor).data_ptr() as usize;
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        let member = Member {
            tensor: tensor.shallow_clone(),
            slice: slice.map(Tensor::shallow_clone),
        };
        pending.buckets.insert(result, pending.number);
        let filling = pending
            .filling
            .get_or_insert_with(|| (group.clone(), Vec::new()));
        filling.1.push(member);
        pending.bytes += bytes as u64;
        match pending.bytes >= bucket {
            true => pending.close(),
            false => Ok(()),
        }
    })
}

/// Waits for the sum that was begun into a tensor, if there is one.
///
/// # Errors
/// Another rank is gone or too late.
pub fn wait(result: &Tensor) -> Result<()> {
    let received = with(|pending| -> Result<_> {
        let Some(bucket) = pending.buckets.remove(&(result.data_ptr() as usize)) else {
            return Ok(None);
        };
        if bucket == pending.number {
            pending.close()?;
        }
        Ok(pending.under_way.remove(&bucket))
    })?;
    received.map_or(Ok(()), |r| WorkQueue::wait(&r))
}

/// Begins to fill the slices of a tensor with those of the ranks. It is not to be read until [`arrive`].
///
/// # Errors
/// Another rank is gone.
pub fn begin_gather(group: &Group, whole: &Tensor) -> Result<()> {
    if let Some(gather) = group.begin_gather(whole, 1)? {
        let at = whole.data_ptr() as usize;
        with(|pending| pending.gathers.insert(at, (group.clone(), gather)));
    }
    Ok(())
}

/// Waits until a tensor is gathered, if it is being.
///
/// # Errors
/// Another rank is gone or too late.
pub fn arrive(whole: &Tensor) -> Result<()> {
    let at = whole.data_ptr() as usize;
    match with(|pending| pending.gathers.remove(&at)) {
        Some((group, gather)) => group.end_gather(gather),
        None => Ok(()),
    }
}

/// Forgets what was not exchanged, and waits for all else: afterwards no tensor is written to.
pub fn finish() {
    let under_way = with(|pending| {
        pending.filling = None;
        pending.bytes = 0;
        pending.buckets.clear();
        pending.gathers.clear();
        std::mem::take(&mut pending.under_way)
    });
    for received in under_way.into_values() {
        // What failed has been told by a node that waited, or the step has failed already.
        drop(WorkQueue::wait(&received));
    }
}
