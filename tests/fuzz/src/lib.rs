//! The fuzzer: targets, guards, and the loop that feeds one with the other.
//!
//! Every run happens under `catch_unwind`, a clock and an allocator that counts: a reader that panics, calls an input
//! our bug, is slow, or takes far more memory than its input is worth is a finding.

mod common;
mod json;
pub mod mutate;
#[path = "../../unit/exported_hostile/program.rs"]
mod program;
#[path = "../../support/archive.rs"]
mod saved;
mod torch;

use ckpt_opt::frontend::onnx;
use ckpt_passes::{text, transform};
use common::{files, ours, root};
use mutate::Random;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A run may take this long …
pub const MAX_RUN: Duration = Duration::from_secs(20);
/// … and this many bytes beyond what was taken when it began.
pub const MAX_RUN_BYTES: usize = 1 << 30;

/// The system's allocator, with the most that was ever taken at once.
struct Counting;

static TAKEN_BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every request is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST_BYTES.fetch_max(
            TAKEN_BYTES.fetch_add(layout.size(), Relaxed) + layout.size(),
            Relaxed,
        );
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        TAKEN_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Something to fuzz.
pub struct Target {
    /// Name of the target on the command line.
    pub name: &'static str,
    seeds: fn() -> Vec<Vec<u8>>,
    mutate: fn(&mut Random, &[Vec<u8>]) -> Vec<u8>,
    /// Whether the input was accepted; an error that is ours, as text.
    run: fn(&[u8]) -> Result<bool, String>,
}

/// All readers that are fuzzed.
pub const TARGETS: [Target; 6] = [
    Target {
        name: "onnx",
        seeds: onnx_seeds,
        mutate: mutate::protobuf,
        run: run_onnx,
    },
    Target {
        name: "text",
        seeds: text_seeds,
        mutate: mutate::lines,
        run: run_text,
    },
    Target {
        name: "archive",
        seeds: torch::archives,
        mutate: mutate::bytes,
        run: torch::run_archive,
    },
    Target {
        name: "pickle",
        seeds: torch::pickles,
        mutate: mutate::bytes,
        run: torch::run_pickle,
    },
    Target {
        name: "code",
        seeds: torch::code,
        mutate: mutate::lines,
        run: torch::run_code,
    },
    Target {
        name: "pt2",
        seeds: torch::programs,
        mutate: json::mutated,
        run: torch::run_program,
    },
];

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// An input that a reader does not survive as it should.
pub struct Finding {
    /// The panic, the limit exceeded, or the error that is a bug.
    pub what: String,
    /// The bytes that the target was given.
    pub input: Vec<u8>,
}

/// The result of fuzzing one target.
pub struct Report {
    /// Inputs that were tried, accepted or not.
    pub runs: u64,
    /// Inputs that the reader took for good.
    pub accepted: u64,
    /// Inputs that failed, in the order they were found; at most ten.
    pub findings: Vec<Finding>,
}

/// Feeds mutated seeds to a target until the time is over, `max_runs` are done, or ten findings are made.
pub fn fuzz(target: &Target, seed: u64, time: Duration, max_runs: u64) -> Report {
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty(), "{}: no seeds", target.name);
    let mut random = Random::new(seed);
    let mut report = Report {
        runs: 0,
        accepted: 0,
        findings: Vec::new(),
    };
    let begin = Instant::now();
    while begin.elapsed() < time && report.runs < max_runs && report.findings.len() < 10 {
        let input = (target.mutate)(&mut random, &seeds);
        report.runs += 1;
        match guarded(target, &input) {
            Ok(accepted) => report.accepted += u64::from(accepted),
            Err(what) => report.findings.push(Finding { what, input }),
        }
    }
    report
}

/// One run inside the guards.
///
/// # Errors
/// What the reader did wrong.
pub fn guarded(target: &Target, input: &[u8]) -> Result<bool, String> {
    // The counters belong to the process: runs of parallel tests must not see each other.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let before = TAKEN_BYTES.load(Relaxed);
    MOST_BYTES.store(before, Relaxed);
    let begin = Instant::now();
    let done = std::panic::catch_unwind(|| (target.run)(input));
    let (took, bytes) = (
        begin.elapsed(),
        MOST_BYTES.load(Relaxed).saturating_sub(before),
    );
    let accepted = match done {
        Ok(answer) => answer?,
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text
                .or(payload.downcast_ref::<&str>().copied())
                .unwrap_or("?");
            return Err(format!("panic: {text}"));
        }
    };
    if took > MAX_RUN {
        return Err(format!("took {} ms", took.as_millis()));
    }
    if bytes > MAX_RUN_BYTES {
        return Err(format!(
            "took {bytes} bytes for an input of {}",
            input.len()
        ));
    }
    Ok(accepted)
}

fn onnx_seeds() -> Vec<Vec<u8>> {
    let mut seeds = mutate::small_models();
    seeds.push(planned_model());
    seeds.extend(files(&root().join("fixtures"), "onnx"));
    seeds
}

/// A small training graph with copies and functions of our own, as written.
fn planned_model() -> Vec<u8> {
    let forward = "graph @g typed (%x: f32[n, 8]) -> (%y) {
  init %w1 : f32[1, 8] = hash \"1\"
  init %w2 : f32[1, 8] = hash \"2\"
  init %w3 : f32[1, 8] = hash \"3\"
  %t1 = Tanh %x : f32[n, 8]
  %m1 = Mul %t1, %w1 : f32[n, 8]
  %t2 = Tanh %m1 : f32[n, 8]
  %m2 = Mul %t2, %w2 : f32[n, 8]
  %t3 = Tanh %m2 : f32[n, 8]
  %y = Mul %t3, %w3 : f32[n, 8]
}
";
    let request = ckpt_passes::compile::Request {
        plan: ckpt_passes::plan::Policy::FULL.into(),
        ..Default::default()
    };
    let mut graph = text::parse_filled(forward).expect("the seed is a graph");
    let mut watch = ckpt_passes::driver::Watch::default();
    ckpt_passes::compile::compile(&mut graph, &request, &mut watch).expect("the seed compiles");
    let weights = ckpt_opt::emit::onnx::Weights::Inside;
    let written = ckpt_opt::emit::onnx::package(&graph, &weights).expect("the seed can be written");
    prost::Message::encode_to_vec(&written.model)
}

fn text_seeds() -> Vec<Vec<u8>> {
    files(&root().join("tests/golden"), "ckir")
}

/// Decodes, imports, types, verifies, and writes what was accepted.
fn run_onnx(input: &[u8]) -> Result<bool, String> {
    let model = match onnx::file::decode(bytes::Bytes::copy_from_slice(input)) {
        Ok(model) => model,
        Err(e) => return ours(&e),
    };
    // A folder that is not there: external weights are absent.
    let mut files = onnx::external::Files::beside(Path::new("no-such-folder/model.onnx"));
    let imported = onnx::import::import(&model, &mut |t| onnx::tensor::read(t, &mut files));
    let mut graph = match imported {
        Ok(imported) => imported.graph,
        Err(e) => return ours(&e),
    };
    if let Err(e) = transform::infer::infer(&mut graph) {
        return ours(&e);
    }
    ckpt_passes::ir::verify::verify(&graph).map_err(|e| e.to_string())?;
    match ckpt_opt::emit::onnx::package(&graph, &ckpt_opt::emit::onnx::Weights::Inside) {
        Ok(_) => Ok(true),
        Err(e) => ours(&e),
    }
}

/// Parses; what was accepted must survive printing and parsing.
fn run_text(input: &[u8]) -> Result<bool, String> {
    let Ok(input) = std::str::from_utf8(input) else {
        return Ok(false);
    };
    let graph = match text::parse(input) {
        Ok(graph) => graph,
        Err(e) => return ours(&e),
    };
    let printed = text::print_full(&graph);
    let again = text::parse(&printed)
        .map_err(|e| format!("what was printed does not parse: {e}\n{printed}"))?;
    if text::print_full(&again) != printed {
        return Err(format!("print and parse are not inverses:\n{printed}"));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_survive_a_short_run() {
        for target in &TARGETS {
            let report = fuzz(target, 7, Duration::from_secs(60), 500);
            let found: Vec<&str> = report.findings.iter().map(|f| f.what.as_str()).collect();
            assert!(found.is_empty(), "{}: {found:?}", target.name);
            // A fuzzer whose inputs are all refused at the door tests nothing.
            assert!(
                report.accepted > 0,
                "{}: nothing was accepted in {} runs",
                target.name,
                report.runs
            );
        }
    }

    #[test]
    fn small_models_are_good_before_they_are_mutated() {
        for (i, model) in mutate::small_models().iter().enumerate() {
            assert_eq!(run_onnx(model), Ok(true), "model {i}");
        }
        let planned = planned_model();
        assert_eq!(run_onnx(&planned), Ok(true));
        let has = |word: &str| planned.windows(word.len()).any(|w| w == word.as_bytes());
        assert!(
            has("ckpt.of") && has("SumToShape"),
            "the seed has no copies or functions"
        );
    }

    #[test]
    fn the_guards_see_panics_and_memory() {
        let bad = Target {
            name: "bad",
            seeds: Vec::new,
            mutate: mutate::lines,
            run: |_| panic!("boom"),
        };
        assert_eq!(guarded(&bad, &[]), Err("panic: boom".into()));
        let greedy = Target {
            run: |input| {
                Ok(
                    std::hint::black_box(Vec::<u8>::with_capacity(MAX_RUN_BYTES + 1)).capacity()
                        > input.len(),
                )
            },
            ..bad
        };
        assert!(guarded(&greedy, &[]).is_err_and(|e| e.contains("bytes")));
    }
}
