//! Cost graphs and stored plans from files, `.json` or `.json.gz`, whoever made them.
//!
//! Nothing in a file is believed: sizes are bounded before they are read, every index, size and price is checked, and
//! what is wrong is named. A cost graph must run in its own order; see [`Problem`] for the format.

use ckpt_passes::plan::{Plan, Problem, Schedule};
use ckpt_passes::{Error, Result};
use flate2::read::GzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// A compressed file may grow to this size whatever its own,
const SMALL_BYTES: u64 = 8 << 20;
/// to this multiple of its size, which is ten times what cost graphs reach,
const MAX_RATIO: u64 = 300;
/// and no file may be larger than this.
const MAX_BYTES: u64 = 4 << 30;

/// Whether a file's name says that it holds a cost graph instead of a model.
pub fn is_cost_graph(path: &Path) -> bool {
    let name = path.to_string_lossy().to_lowercase();
    name.ends_with(".json") || name.ends_with(".json.gz")
}

/// Reads a cost graph and checks it.
///
/// # Errors
/// `error[file]` where it cannot be read or is too large, `error[cost-graph]` where it is not a cost graph that runs in
/// its own order.
pub fn cost_graph(path: &Path) -> Result<Problem> {
    let place = || path.display().to_string();
    let mut problem: Problem = json(path, "cost-graph", "a cost graph")?;
    problem.settle_producers().map_err(|e| e.at(place()))?;
    problem.check().map_err(|e| e.at(place()))?;
    Ok(problem)
}

/// A plan as a file has it: one of ours, or a bare schedule `{"schedule": [op, …]}`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Whole(Box<Plan>),
    Bare(Schedule),
}

/// Reads a plan. A bare schedule is taken as a plan for whatever it is used on.
///
/// # Errors
/// `error[file]` where it cannot be read or is too large, `error[plan]` where it is neither a plan nor a schedule.
pub fn plan(path: &Path) -> Result<Plan> {
    Ok(match json(path, "plan", "a plan")? {
        Stored::Whole(plan) => *plan,
        Stored::Bare(schedule) => Plan::bare(schedule),
    })
}

/// Reads one JSON value, decompressing it where its first bytes say gzip.
fn json<T: DeserializeOwned>(path: &Path, code: &'static str, what: &str) -> Result<T> {
    let place = || path.display().to_string();
    let failed =
        |e: std::io::Error| Error::usage("file", format!("cannot read the file: {e}")).at(place());
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let packed = std::io::BufRead::fill_buf(&mut reader)
        .map_err(failed)?
        .starts_with(&[0x1f, 0x8b]);
    let limit = if packed {
        bytes
            .saturating_mul(MAX_RATIO)
            .clamp(SMALL_BYTES, MAX_BYTES)
    } else {
        MAX_BYTES
    };
    let unpacked: Box<dyn Read> = if packed {
        Box::new(BufReader::new(GzDecoder::new(reader)))
    } else {
        Box::new(reader)
    };
    let mut limited = Limited {
        inner: unpacked,
        left: limit,
        exceeded: false,
    };
    let read = serde_json::from_reader(BufReader::with_capacity(1 << 16, &mut limited));
    if limited.exceeded {
        return Err(
            Error::usage("file", format!("the file is larger than {limit} bytes"))
                .at(place())
                .help("a file that expands like this is not a cost graph"),
        );
    }
    read.map_err(|e| {
        let text = format!("this is not {what}: {e}");
        if e.is_io() {
            return Error::usage("file", format!("cannot read the file: {e}")).at(place());
        }
        Error::model(code, text).at(place())
    })
}

/// A reader that ends, and remembers it, where a limit is reached.
struct Limited<R> {
    inner: R,
    left: u64,
    exceeded: bool,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if count as u64 > self.left {
            self.exceeded = true;
            return Ok(0);
        }
        self.left -= count as u64;
        Ok(count)
    }
}
