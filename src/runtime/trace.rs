//! Runs that are watched node by node, and a step in Chrome's trace format, which chrome://tracing and Perfetto show: a
//! bar a node, and the bytes alive.
//!
//! Format: "Trace Event Format" of the Chromium project; times are in microseconds.

use super::device;
use super::executor::{Program, Run, cpu_ns, cpu_us};
use crate::place::Place;
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, NodeId, Role};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use tch::Tensor;

/// A node as a traced run saw it.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub start_us: f64,
    pub time_us: f64,
    /// Processor time of all threads.
    pub cpu_us: u64,
    /// Bytes above what was alive before the run, once the node has run and what it read last is gone.
    pub live_bytes: u64,
}

impl Program<'_> {
    /// Runs the graph once and measures what each node takes, in microseconds in the order of the schedule: its kernel,
    /// what the executor does around it, and giving back what it read last. A device is waited for after every node, so
    /// that a node's time is its own. On a CPU no more counts than the processor time that all threads took meanwhile: what
    /// is beyond that was taken by other processes. Transfers wait for files and not for processors, so that theirs is the
    /// time that passed.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_timed(&self, inputs: &BTreeMap<String, Tensor>) -> Result<(Run, Vec<f64>)> {
        let mut times_us = Vec::with_capacity(self.nodes());
        let on_cpu = self.place() == Place::Cpu;
        let mut last: Option<(u64, Instant)> = None;
        let run = self.watched(inputs, &mut |at| {
            device::synchronize(self.place())?;
            // Processor time is read outside of what it bounds.
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

    /// Runs the graph once and tells of each node when it ran and what it left alive. As in [`Program::run_timed`], a
    /// device is waited for after every node.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_traced(&self, inputs: &BTreeMap<String, Tensor>) -> Result<(Run, Vec<Moment>)> {
        let mut moments: Vec<Moment> = Vec::with_capacity(self.nodes());
        let (start, mut last, mut last_cpu_us) = (Instant::now(), 0.0, cpu_us());
        let base = device::bytes(self.place())?.live;
        let run = self.watched(inputs, &mut |at| {
            device::synchronize(self.place())?;
            let (now, now_cpu_us) = (start.elapsed().as_secs_f64() * 1e6, cpu_us());
            if at > 0 {
                moments.push(Moment {
                    start_us: last,
                    time_us: now - last,
                    cpu_us: now_cpu_us - last_cpu_us,
                    live_bytes: device::bytes(self.place())?.live.saturating_sub(base),
                });
            }
            (last, last_cpu_us) = (now, now_cpu_us);
            Ok(())
        })?;
        Ok((run, moments))
    }
}

/// What part of the step a node belongs to.
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

/// The trace of a step; `moments` are those of the graph's order, `static_bytes` what is alive throughout.
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
