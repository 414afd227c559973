//! Runs that measure each node, and their trace in Chrome's format.
//!
//! chrome://tracing and Perfetto show such a trace: one bar per node, and the live bytes.
//!
//! Format: "Trace Event Format" of the Chromium project; times are in microseconds.

use super::device;
use super::executor::{Program, Run, cpu_ns, cpu_us};
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, NodeId, Role};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use tch::Tensor;

/// The measurements of one node in a traced run.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// When the node began, in microseconds after the run was started.
    pub start_us: f64,
    /// Elapsed time of the node, in microseconds.
    pub time_us: f64,
    /// Processor time of all threads.
    pub cpu_us: u64,
    /// Live bytes after the node ran and its last reads were freed, above those before the run.
    pub live_bytes: u64,
}

impl Program<'_> {
    /// Runs the graph once and measures the time of each node, in microseconds and in order: its kernel, the executor's
    /// work around it, and freeing what it read last. The host waits for the device after every node, so that a node's time
    /// is its own. On a CPU, a node's time is at most the processor time of all threads: other processes took the rest. A
    /// transfer waits for files and not for processors, so its time is the elapsed time.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_timed(&self, inputs: &BTreeMap<String, Tensor>) -> Result<(Run, Vec<f64>)> {
        let mut times_us = Vec::with_capacity(self.nodes());
        let on_cpu = device::of(self.place()).is_host();
        let mut last: Option<(u64, Instant)> = None;
        let run = self.watched(inputs, &mut |at| {
            device::of(self.place()).synchronize()?;
            // Reads processor time outside the elapsed time that it bounds.
            let (now, now_cpu_ns) = (Instant::now(), cpu_ns());
            if let (Some((last_cpu_ns, last)), true) = (last, at > 0) {
                let passed_us = (now - last).as_secs_f64() * 1e6;
                let cpu_us = now_cpu_ns.saturating_sub(last_cpu_ns) as f64 / 1e3;
                times_us.push(match on_cpu && !self.is_transfer(at - 1) {
                    true => passed_us.min(cpu_us),
                    false => passed_us,
                });
            }
            let before_cpu_ns = cpu_ns();
            last = Some((before_cpu_ns, Instant::now()));
            Ok(())
        })?;
        Ok((run, times_us))
    }

    /// Runs the graph once and records when each node ran and the bytes it left alive. As in [`Program::run_timed`], the
    /// host waits for the device after every node.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_traced(&self, inputs: &BTreeMap<String, Tensor>) -> Result<(Run, Vec<Moment>)> {
        let mut moments: Vec<Moment> = Vec::with_capacity(self.nodes());
        let (start, mut last, mut last_cpu_us) = (Instant::now(), 0.0, cpu_us());
        let base = device::of(self.place()).bytes()?.live_bytes;
        let run = self.watched(inputs, &mut |at| {
            device::of(self.place()).synchronize()?;
            let (now, now_cpu_us) = (start.elapsed().as_secs_f64() * 1e6, cpu_us());
            if at > 0 {
                moments.push(Moment {
                    start_us: last,
                    time_us: now - last,
                    cpu_us: now_cpu_us - last_cpu_us,
                    live_bytes: device::of(self.place())
                        .bytes()?
                        .live_bytes
                        .saturating_sub(base),
                });
            }
            (last, last_cpu_us) = (now, now_cpu_us);
            Ok(())
        })?;
        Ok((run, moments))
    }
}

/// Returns the role of a node in the step.
fn part(graph: &Graph, node: NodeId) -> &'static str {
    let node = graph.node(node);
    match (node.recompute_of, node.role) {
        (Some(_), _) => "recompute",
        _ if node.op.is_update() => "update",
        (None, Role::Forward) => "forward",
        (None, Role::Loss) => "loss",
        (None, Role::Backward) => "backward",
    }
}

/// Returns the trace of a step. `moments` are in the graph's order; `static_bytes` are alive throughout.
pub fn chrome(graph: &Graph, moments: &[Moment], static_bytes: u64) -> Value {
    let mut events = Vec::with_capacity(2 * moments.len());
    for (id, moment) in graph.order().iter().zip(moments) {
        let node = graph.node(*id);
        events.push(json!({
            "name": node.name,
            "cat": node.op.name,
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": moment.start_us,
            "dur": moment.time_us,
            "args": {
                "op": node.op.name,
                "part": part(graph, *id),
                "cpu_us": moment.cpu_us,
                "live_bytes": static_bytes + moment.live_bytes,
            },
        }));
        events.push(json!({
            "name": "live bytes",
            "ph": "C",
            "pid": 1,
            "ts": moment.start_us + moment.time_us,
            "args": { "bytes": static_bytes + moment.live_bytes },
        }));
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}
