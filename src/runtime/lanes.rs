//! Transfers that run beside a run on the CPU: a lane out and a lane in, each a thread that does one after the other. A run
//! on a device has streams for them (`side_streams`).
//!
//! What a lane holds is what the graph holds: a result that leaves is alive until its `Release`, which waits for the
//! lane; what comes in has its memory from its `Fetch` on, and its first reader waits. So the bytes alive at a step do not
//! depend on how fast a lane is. Only bytes are copied there: no op runs, and nothing is allocated from libtorch. A lane
//! takes a few transfers ahead, then the run waits.

use super::convert::torch_error;
use super::outside::{Left, Outside, new_tensor};
use super::side_streams::SideStreams;
use crate::place::Place;
use ckpt_passes::ir::{Attrs, Graph, NodeId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE, TO, TO_DISK};
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use tch::{Device, Tensor};

/// Transfers that wait for a lane before the run waits.
const QUEUE: usize = 16;

/// Whether a node is a transfer, or the end of one, that need not be done at once: nothing but a `Release` reads what
/// leaves, something reads what comes.
pub fn may_run_beside(graph: &Graph, id: NodeId) -> bool {
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

/// Transfers under way, by the slot of what they make.
pub struct Lanes {
    /// Whether transfers run beside what follows them.
    pub is_wanted: bool,
    streams: SideStreams,
    out: Lane,
    back: Lane,
    leaving: BTreeMap<usize, Receiver<Result<Left>>>,
    coming: BTreeMap<usize, Receiver<Result<()>>>,
}

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes {
            is_wanted: true,
            streams: SideStreams::default(),
            out: Lane::default(),
            back: Lane::default(),
            leaving: BTreeMap::new(),
            coming: BTreeMap::new(),
        }
    }
}

impl Lanes {
    /// Begins to move a tensor out; `false` where that must be done at once.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn leave(
        &mut self,
        outside: &Outside,
        tensor: &Tensor,
        attrs: &Attrs,
        slot: usize,
    ) -> Result<bool> {
        let on_disk = attrs.str(TO) == TO_DISK;
        if self.is_wanted && !on_disk && tensor.device() != Device::Cpu {
            return self.streams.leave(outside, tensor, slot);
        }
        let is_here = tensor.device() == Device::Cpu && tensor.is_contiguous();
        if !self.is_wanted || !is_here || tensor.numel() == 0 {
            return Ok(false);
        }
        let leaving = outside.begin(tensor, on_disk)?;
        let tensor = tensor.shallow_clone();
        let work = move || {
            let left = leaving.write(&tensor);
            // Whoever waits finds nobody else holding it.
            drop(tensor);
            left
        };
        let result = self.out.begin(work)?;
        self.leaving.insert(slot, result);
        Ok(true)
    }

    /// What left, once it is outside; `None` if it was moved at once.
    ///
    /// # Errors
    /// The transfer's.
    pub fn left(&mut self, slot: usize) -> Result<Option<Tensor>> {
        match self.leaving.remove(&slot) {
            Some(result) => wait(&result)?.tensor().map(Some),
            None => self.streams.left(slot),
        }
    }

    /// Begins to move a tensor in to a place: what it will be; `None` where that must be done at once.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn come(
        &mut self,
        outside: &Outside,
        waits: &Tensor,
        (place, slot): (Place, usize),
    ) -> Result<Option<Tensor>> {
        if !self.is_wanted || waits.device() != Device::Cpu || waits.numel() == 0 {
            return Ok(None);
        }
        if let Place::Cuda(device) = place {
            return self.streams.come(outside, waits, (device, slot));
        }
        let here = new_tensor(waits)?;
        let (from, mut to) = (waits.shallow_clone(), here.shallow_clone());
        let work = move || bytes::copy(&from, &mut to).map_err(torch_error);
        let result = self.back.begin(work)?;
        self.coming.insert(slot, result);
        Ok(Some(here))
    }

    /// Waits for what comes in to a slot, if anything does.
    ///
    /// # Errors
    /// The transfer's.
    pub fn arrive(&mut self, slot: usize) -> Result<()> {
        match self.coming.remove(&slot) {
            Some(result) => wait(&result),
            None => self.streams.arrive(slot),
        }
    }

    /// Waits for all that nobody has waited for.
    ///
    /// # Errors
    /// The first transfer's that failed.
    pub fn arrive_all(&mut self) -> Result<()> {
        let coming = std::mem::take(&mut self.coming).into_values();
        let came = coming.map(|r| wait(&r)).collect::<Result<()>>();
        let leaving = std::mem::take(&mut self.leaving).into_values();
        let left = leaving.map(|r| wait(&r).map(drop)).collect::<Result<()>>();
        let streams = self.streams.finish();
        came.and(left).and(streams)
    }

    /// Ends a run, whatever became of it: nothing of it is under way afterwards.
    pub fn abandon(&mut self) {
        drop(self.streams.finish());
        for result in std::mem::take(&mut self.coming).into_values() {
            drop(wait(&result));
        }
        for result in std::mem::take(&mut self.leaving).into_values() {
            drop(wait(&result));
        }
    }
}

fn wait<T>(result: &Receiver<Result<T>>) -> Result<T> {
    match result.recv() {
        Ok(done) => done,
        Err(_) => Err(Error::bug(
            "offload",
            "a lane has ended before its transfer",
        )),
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that is there from its first transfer on.
#[derive(Default)]
struct Lane {
    running: Option<(SyncSender<Job>, JoinHandle<()>)>,
}

impl Lane {
    fn begin<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Receiver<Result<T>>> {
        let (done, result) = channel();
        let job: Job = Box::new(move || {
            let outcome = work();
            // Nobody waits for a run that was abandoned.
            drop(done.send(outcome));
        });
        if self.running.is_none() {
            let (jobs, queue) = sync_channel::<Job>(QUEUE);
            let thread = std::thread::Builder::new()
                .name("transfers".into())
                .spawn(move || queue.into_iter().for_each(|job| job()))
                .map_err(|e| {
                    Error::environment("offload", format!("no thread for transfers: {e}"))
                        .help("--async-transfers off needs none")
                })?;
            self.running = Some((jobs, thread));
        }
        let sent = self.running.as_ref().map(|(jobs, _)| jobs.send(job));
        match sent {
            Some(Ok(())) => Ok(result),
            _ => Err(Error::bug("offload", "a lane has ended")),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.running.take() {
            drop(jobs);
            drop(thread.join());
        }
    }
}
