//! `run`: executes a graph, and compares its memory with the prediction.

use super::options::runtime::RunArgs;
use super::output::write_json;
use super::progress;
use ckpt_opt::comparison::ready;
use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::provenance::keys;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::generated;
use ckpt_opt::runtime::ranks;
use ckpt_opt::runtime::session::Session;
use ckpt_opt::runtime::trace::chrome;
use ckpt_opt::tensors::feed::{self, Feed};
use ckpt_opt::tensors::framework::in_framework;
use ckpt_opt::tensors::{self, Tensors, random};
use ckpt_opt::units::{at_most, bytes};
use ckpt_passes::analysis::gradients::{GRAD_NORM, STEP, counts_steps, training_outputs};
use ckpt_passes::analysis::sdpa::choice::AttentionKernels;
use ckpt_passes::ir::op::Effect;
use ckpt_passes::ir::{Graph, Tensor, ValueId};
use ckpt_passes::{Error, Result};
use serde::Serialize;
use std::collections::BTreeSet;

/// What a run took, beside what was predicted.
#[derive(Serialize)]
struct Report {
    predicted_peak_bytes: u64,
    /// Whether the prediction is an upper bound, for data decides some sizes.
    peak_is_bound: bool,
    measured_peak_bytes: u64,
    static_bytes: u64,
    /// The peak before the device's allocator rounds blocks up; on a CPU nothing is rounded.
    requested_peak_bytes: u64,
    /// What the plan predicts of it.
    predicted_requested_bytes: u64,
    /// What the device's allocator held for blocks; null on the CPU.
    reserved_bytes: Option<u64>,
    /// Workspaces of libraries beside the peak.
    workspace_bytes: Option<u64>,
    /// Bytes of the arena for results and temporaries; 0 without an arena.
    arena_bytes: u64,
    /// Growth of the process's own pages in memory; null where the system does not say.
    resident_bytes: Option<u64>,
    /// The most bytes that were offloaded at once, measured and predicted.
    outside_peak_bytes: u64,
    predicted_outside_bytes: u64,
    device: String,
    /// Attention nodes by kernel, gradients and copies included.
    attention: AttentionKernels,
    peak_at: Option<String>,
    /// The norm of all gradients of the last step before clipping; null where the graph does not compute it.
    grad_norm: Option<f64>,
    step_time_us: u64,
    /// Processor time of all threads, of the median step.
    step_cpu_us: u64,
    /// Steps before those in `steps`, which are not counted.
    warm_up: u32,
    /// Every step in turn.
    steps: Vec<Took>,
    /// How many of them were replayed as CUDA graphs.
    replayed_steps: usize,
    /// The loss and gradients of the last step that hold NaN or an infinity.
    not_finite: Vec<String>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Took {
    time_us: u64,
    cpu_us: u64,
}

fn median(steps: &[Took], what: fn(&Took) -> u64) -> u64 {
    let mut sorted: Vec<u64> = steps.iter().map(what).collect();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

pub fn run(args: &RunArgs) -> Result<()> {
    let execution = &args.execution;
    let step = progress::step("reading the model");
    let tensors = match &execution.inputs {
        Some(path) => tensors::read(path)?,
        None => Tensors::new(),
    };
    let given = Given {
        examples: feed::input_types(&tensors),
        ..Given::default()
    };
    let mut model = load(&args.model, &given)?;
    ready(&mut model.graph, &args.model)?;
    drop(step);
    let mut feed = Feed::new(&model.graph, tensors)?;
    let mut warnings = model.warnings;
    feed.start_training(&model.graph);
    match args.seed {
        Some(seed) => {
            random::fill(&model.graph, &mut feed, &execution.dims, seed)?;
        }
        None => feed.complete(&model.graph)?,
    }
    warnings.append(&mut feed.notes);
    if execution.fused_kernels {
        generated::fuse_for(execution.on.device, &mut model.graph)?;
    }
    if let Some(place) = args.rank {
        ranks::Coordinates::of(&model.graph, place)?.play();
    }
    let _step = progress::step("running");
    let mut session = Session::new(
        &model.graph,
        &feed.weights,
        execution.on.threads,
        execution.on.device,
        execution.rng,
    )?;
    session.use_arena(args.arena);
    session.use_streams(args.async_transfers);
    session.pin_memory(args.pin_memory);
    session.attend_by(execution.kernels.attention);
    session.use_graphs(args.cuda_graphs);
    session.go_on(true);
    session.watch(watched(&model.graph));
    let counts_steps = counts_steps(&model.graph);
    if let Some(folder) = &args.offload_dir {
        session.wait_in(folder.clone());
    }
    for _ in 0..args.warm_up {
        session.warm_up(&feed.inputs)?;
    }
    let (mut steps, mut replayed_steps) = (Vec::new(), 0);
    let mut last = None;
    for step in 1..=args.steps {
        let is_wanted = step == args.steps && args.outputs.is_some();
        let run = session.step(&feed.inputs, &|name| is_wanted || name == GRAD_NORM)?;
        if let Some(n) = feed.inputs.get_mut(STEP).filter(|_| counts_steps) {
            *n = Tensor::int(n.get_i64(0).unwrap_or(0).saturating_add(1));
        }
        steps.push(Took {
            time_us: run.time_us,
            cpu_us: run.cpu_us,
        });
        replayed_steps += usize::from(run.is_replayed);
        if args.check_finite && !run.not_finite.is_empty() {
            return Err(not_finite(step, &run.not_finite));
        }
        last = Some(run);
    }
    let Some(run) = last else {
        return Err(Error::bug("steps", "there is nothing to run: --steps is 0"));
    };
    if !run.nondeterministic.is_empty() {
        let ops: Vec<&str> = run.nondeterministic.iter().copied().collect();
        warnings.push(format!(
            "{} has no deterministic kernel for {}: another run may give other bits",
            execution.on.device,
            ops.join(", ")
        ));
    }
    if !run.ties.is_empty() {
        let names: Vec<String> = run.ties.iter().cloned().collect();
        warnings.push(format!(
            "equal values compete in {}: the first of them is taken here, PyTorch may take another",
            shown(&names)
        ));
    }
    if !run.not_finite.is_empty() {
        let names = shown(&run.not_finite);
        warnings.push(format!("NaN or infinities after the last step in {names}"));
    }
    warnings.extend(session.pins_warning());
    warnings.extend(run.attention_refused);
    warnings.extend(session.graphs_warning());
    let mut nodes = model.graph.nodes();
    if execution.rng != Rng::Counter && nodes.any(|(_, n)| n.op.effect == Effect::Seeded) {
        warnings.push(format!(
            "--rng {}: random ops draw through libtorch, whose temporaries the predicted peak does not count",
            execution.rng
        ));
    }
    if let Some(path) = &args.trace {
        // A step of its own: watching each node takes time.
        let moments = session.trace(&feed.inputs)?;
        write_json(path, &chrome(&model.graph, &moments, run.static_bytes))?;
    }
    if let Some(path) = &args.outputs {
        // `convert` then knows how adapters were added.
        let lora = model.graph.meta.get_key_value(keys::LORA);
        let meta = lora
            .map(|(key, text)| (key.clone(), text.clone()))
            .into_iter()
            .collect();
        match args.framework_names {
            true => tensors::write_with(path, &in_framework(&model.graph, &run.outputs), meta)?,
            false => tensors::write_with(path, &run.outputs, meta)?,
        }
    }
    let report = Report {
        predicted_peak_bytes: run.predicted_peak_bytes,
        peak_is_bound: run.peak_is_bound,
        measured_peak_bytes: run.peak_bytes,
        static_bytes: run.static_bytes,
        requested_peak_bytes: run.requested_peak_bytes,
        predicted_requested_bytes: run.predicted_requested_bytes,
        reserved_bytes: run.reserved_bytes,
        workspace_bytes: run.workspace_bytes,
        arena_bytes: run.arena_bytes,
        resident_bytes: run.resident_bytes,
        outside_peak_bytes: run.outside_peak_bytes,
        predicted_outside_bytes: run.predicted_outside_bytes,
        device: execution.on.device.to_string(),
        attention: run.attention,
        peak_at: run.peak_at,
        grad_norm: run.outputs.get(GRAD_NORM).and_then(|norm| norm.get_f64(0)),
        step_time_us: median(&steps, |s| s.time_us),
        step_cpu_us: median(&steps, |s| s.cpu_us),
        warm_up: args.warm_up,
        steps,
        replayed_steps,
        not_finite: run.not_finite,
        warnings,
    };
    args.console
        .print(&report, &report.warnings, || report.human())
}

/// Names the outputs that ought to be finite: loss and gradients, or all of a forward graph.
fn watched(graph: &Graph) -> BTreeSet<String> {
    let training = training_outputs(graph);
    let is_watched = |v: &&ValueId| {
        let ty = graph.ty(**v);
        ty.dtype.is_float() && (training.is_empty() || training.contains(v) || ty.rank() == 0)
    };
    let outputs = graph.outputs().iter().filter(is_watched);
    outputs.map(|v| graph.value(*v).name.clone()).collect()
}

/// Lists the first few names.
fn shown(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let first: Vec<String> = names.iter().take(SHOWN).map(|n| format!("`{n}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

fn not_finite(step: u32, names: &[String]) -> Box<Error> {
    let what = format!("step {step} gave NaN or infinities");
    Error::verification("finite", what)
        .found(shown(names))
        .help("run without --check-finite to write the outputs with --outputs FILE")
}

impl Report {
    fn human(&self) -> String {
        let workspace = match self.workspace_bytes {
            None | Some(0) => String::new(),
            Some(n) => format!("workspaces of libraries beside it: {}\n", bytes(n)),
        };
        let attention = self.attention.line();
        let attention = attention.map_or(String::new(), |line| format!("{line}\n"));
        let norm = self.grad_norm.map_or(String::new(), |norm| {
            format!("norm of the gradients before clipping: {norm:.4}\n")
        });
        format!(
            "peak {} measured, {}{} predicted; {} of it resident throughout\nreached at {}\n{workspace}{attention}{norm}step {:.3} ms\n",
            bytes(self.measured_peak_bytes),
            at_most(self.peak_is_bound),
            bytes(self.predicted_peak_bytes),
            bytes(self.static_bytes),
            self.peak_at.as_deref().unwrap_or("no node"),
            self.step_time_us as f64 / 1e3
        )
    }
}
