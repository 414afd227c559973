//! Timelines for Perfetto and `chrome://tracing`, in the Trace Event Format (JSON).
//!
//! Complete events (`X`) of one track must not overlap, so starts and ends are rounded to the same nanosecond. Counters
//! (`C`) show memory by kind. Times are in microseconds from the start of the step. Source: "Trace Event Format" by the
//! Chromium project.

use super::account::Account;
use super::memory::{Kind, Memory};
use super::verdict::Fate;
use ckpt_passes::plan::{OpPhase, Step};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::{Result, Write};

/// A track of the viewer, which calls it a thread of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Track {
    /// The `pid` of its events; tracks of one process share counters.
    pub process: u32,
    /// The `tid` of its events, unique within the process.
    pub thread: u32,
}

/// Events in the order they were added, predicted or measured.
#[derive(Default)]
pub struct Trace {
    events: Vec<Value>,
}

/// Rounds to a nanosecond: the end of a slice must equal the start of the next.
fn rounded(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

impl Trace {
    /// Builds a trace without events.
    pub fn new() -> Trace {
        Trace::default()
    }

    /// Names a track and the process it is in.
    pub fn name(&mut self, track: Track, process: &str, thread: &str) {
        let Track {
            process: pid,
            thread: tid,
        } = track;
        let name = |what: &str, name: &str| json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}});
        self.events.push(name("process_name", process));
        self.events.push(name("thread_name", thread));
    }

    /// Adds a slice from `start_us` to `end_us`.
    pub fn slice(
        &mut self,
        track: Track,
        (name, category): (&str, &str),
        (start_us, end_us): (f64, f64),
        args: &Map<String, Value>,
    ) {
        let start = rounded(start_us);
        self.events.push(json!({
            "ph": "X", "name": name, "cat": category, "pid": track.process, "tid": track.thread,
            "ts": start, "dur": rounded(rounded(end_us) - start), "args": args,
        }));
    }

    /// Sets the values of a counter from `at_us` on.
    pub fn counter(
        &mut self,
        process: u32,
        name: &str,
        at_us: f64,
        values: &BTreeMap<&'static str, u64>,
    ) {
        self.events.push(json!({
            "ph": "C", "name": name, "pid": process, "tid": 0, "ts": rounded(at_us), "args": values,
        }));
    }

    /// Writes the file. `about` is the trace's metadata.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, about: &Value, out: &mut dyn Write) -> Result<()> {
        writeln!(
            out,
            "{{\"displayTimeUnit\": \"ms\", \"otherData\": {about},"
        )?;
        writeln!(out, "\"traceEvents\": [")?;
        for (i, event) in self.events.iter().enumerate() {
            let comma = if i + 1 < self.events.len() { "," } else { "" };
            writeln!(out, "{event}{comma}")?;
        }
        writeln!(out, "]}}")
    }
}

/// Returns the predicted times and memory of the step, with and without the plan, as two processes.
pub fn predicted(account: &Account) -> Trace {
    let mut trace = Trace::new();
    let tracks = [
        (1, &account.after, "planned (predicted)"),
        (2, &account.before, "unplanned (predicted)"),
    ];
    for (process, memory, name) in tracks {
        let track = Track { process, thread: 1 };
        trace.name(track, name, "nodes");
        slices(&mut trace, account, memory, track);
    }
    trace
}

fn slices(trace: &mut Trace, account: &Account, memory: &Memory, track: Track) {
    let terms = &memory.terms;
    let problem = terms.problem;
    let kinds = memory.kinds();
    let mut fates: BTreeMap<&str, Fate> = BTreeMap::new();
    for v in &account.verdicts {
        fates.entry(&v.node).or_insert(v.fate);
    }
    let mut now_us = 0.0;
    for (at, step) in memory.schedule.steps.iter().enumerate() {
        let node = &problem.ops[step.op()];
        let (category, flops) = match (step, node.phase) {
            (Step::Fetch(_), _) => ("fetch", 0),
            (Step::Offload(_) | Step::Release(_), _) => ("offload", 0),
            (Step::Run(_), _) if memory.is_recompute[at] => ("recompute", node.flops),
            (Step::Run(_), OpPhase::Forward) => ("forward", node.flops),
            (Step::Run(_), OpPhase::Backward) => ("backward", node.flops),
        };
        let mut args = Map::new();
        args.insert("step".into(), at.into());
        args.insert("op".into(), node.kind.as_str().into());
        args.insert("flops".into(), flops.into());
        args.insert("live_bytes".into(), memory.live_bytes[at].into());
        if let Some(layer) = terms.annotations.layer_of[step.op()] {
            args.insert("layer".into(), layer.into());
        }
        if let Some(fate) = fates.get(node.name.as_str()) {
            args.insert("decision".into(), fate.word().into());
        }
        let values: BTreeMap<&'static str, u64> =
            Kind::ALL.iter().map(|k| k.word()).zip(kinds[at]).collect();
        trace.counter(track.process, "memory", now_us, &values);
        let end_us = now_us + problem.cost(*step);
        trace.slice(track, (&node.name, category), (now_us, end_us), &args);
        now_us = end_us;
    }
}
