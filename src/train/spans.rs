//! What a run spent its time on, as a trace for Perfetto and `chrome://tracing`.

use crate::emit::file::Batch;
use crate::report::trace::{Trace, Track};
use ckpt_passes::Result;
use serde_json::{Map, json};
use std::path::Path;
use std::time::Instant;

const TRACK: Track = Track {
    process: 1,
    thread: 1,
};

/// What the loop does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// It waits for a batch.
    Data,
    /// It runs the graph.
    Run,
    /// It evaluates.
    Evaluate,
    /// It saves a checkpoint: what the next step waits for, not the writing beside it.
    Save,
}

impl Span {
    fn name(self) -> &'static str {
        match self {
            Span::Data => "data",
            Span::Run => "run",
            Span::Evaluate => "evaluate",
            Span::Save => "save",
        }
    }
}

/// The spans of a run, if they are wanted.
pub struct Spans {
    start: Instant,
    /// Each with its step, start and end in microseconds.
    all: Option<Vec<(Span, u64, f64, f64)>>,
}

impl Spans {
    /// Returns no spans yet.
    pub fn new(are_wanted: bool) -> Spans {
        Spans {
            start: Instant::now(),
            all: are_wanted.then(Vec::new),
        }
    }

    /// Adds what was done in a step since `from`.
    pub fn add(&mut self, span: Span, step: u64, from: Instant) {
        let us = |at: Instant| at.duration_since(self.start).as_secs_f64() * 1e6;
        let (from, to) = (us(from), us(Instant::now()));
        if let Some(all) = &mut self.all {
            all.push((span, step, from, to));
        }
    }

    /// Writes the trace.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut trace = Trace::new();
        trace.name(TRACK, "ckpt-opt train", "steps");
        for (span, step, from, to) in self.all.iter().flatten() {
            let args = Map::from_iter([("step".to_string(), json!(step))]);
            trace.slice(TRACK, (span.name(), "train"), (*from, *to), &args);
        }
        let mut batch = Batch::new();
        batch.add(path, |out| trace.write(&json!({}), out))?;
        batch.publish()
    }
}
