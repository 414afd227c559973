//! The training loop.
//!
//! A [`Trainer`] holds a training graph: planned from a model, or as it was written. [`Trainer::train`] reads data, runs
//! steps, evaluates, saves, and writes the weights. A run that was killed goes on from its last checkpoint with the same
//! bits: parameters, optimizer states, the position in the data and every number that a step takes are in it.

use super::checkpoint::{Checkpoint, Checkpoints, FOLDER, Manifest, lock};
use super::data::{self, Batch, Batches, DataRequest};
use super::evaluation::evaluate;
use super::events::EventFile;
use super::identity;
use super::inputs::{Number, numbers, runs_per_update, takes};
use super::metrics::{self, MetricsFile, StepMetrics};
use super::ort_training;
use super::page;
use super::peers::{Peers, RankPeak};
use super::saver::Saver;
use super::schedule::Schedule;
use super::slices::{first_masters, own_states};
use super::spans::{Span, Spans};
use super::weights::{self, Buffers};
use crate::attention::Attention;
use crate::comparison::ready;
use crate::emit::file::write_whole;
use crate::export::ort_training::Artifacts;
use crate::forward::{forward, loss};
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::optimize::optimize;
use crate::place::Place;
use crate::provenance::keys;
use crate::report::summary::Summary;
use crate::rng::Rng;
use crate::runtime::ranks::{Coordinates, RankOptions};
use crate::runtime::session::{Measured, Session};
use crate::tensors::Tensors;
use ckpt_passes::analysis::gradients::{
    FOUND_INF, GRAD_NORM, has_backward, states, trained, updated,
};
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, DimKind, planned_sizes};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph, ValueId};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::{Error, Result};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The loss scale that a run begins with, and when it grows: those of `torch.amp.GradScaler`.
const FIRST_SCALE: f64 = 65536.0;
const SCALE_GROWTH: f64 = 2.0;
const SCALE_BACKOFF: f64 = 0.5;
const GROWTH_INTERVAL: u64 = 2000;

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// So many steps.
    Steps(u64),
    /// So many times through the data. A last step that would need more data is left out.
    Epochs(u64),
}

/// How to train.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// The data. Its batch size and seed are those of the plan and of the run.
    pub data: DataRequest,
    /// The data to evaluate on.
    pub eval_data: Option<DataRequest>,
    /// How long.
    pub length: Length,
    /// The learning rate, which the schedule multiplies.
    pub lr: f64,
    /// The schedule of the learning rate.
    pub schedule: Schedule,
    /// Evaluate after so many steps; only at the end without it.
    pub eval_every: Option<u64>,
    /// Save after so many steps; a tenth of all without it.
    pub save_every: Option<u64>,
    /// The number of checkpoints that stay.
    pub keep: usize,
    /// Go on from the newest checkpoint, if there is one.
    pub resume: bool,
    /// The seed of the order of the data and of random ops.
    pub seed: u64,
    /// The folder of the run.
    pub out: PathBuf,
    /// Threads that one kernel may use; `None` keeps libtorch's default.
    pub threads: Option<u16>,
    /// Where to run.
    pub place: Place,
    /// Kernels of attention.
    pub attention: Attention,
    /// Directory for offloaded tensors; the system's without it.
    pub offload_dir: Option<PathBuf>,
    /// This rank of several that train the graph, and where the others are.
    pub ranks: Option<RankOptions>,
    /// The file that gets a trace of the run: what each step waited for.
    pub trace: Option<PathBuf>,
    /// Write what ONNX Runtime's on-device training loads, too.
    pub ort_training: bool,
    /// Ends the run after the step that is under way, once it is true.
    pub stop: Arc<AtomicBool>,
}

impl Default for TrainOptions {
    fn default() -> TrainOptions {
        TrainOptions {
            data: DataRequest::default(),
            eval_data: None,
            length: Length::Epochs(1),
            lr: 1e-4,
            schedule: Schedule::default(),
            eval_every: None,
            save_every: None,
            keep: 2,
            resume: false,
            seed: 0,
            out: PathBuf::from("out"),
            threads: None,
            place: Place::Cpu,
            attention: Attention::default(),
            offload_dir: None,
            ranks: None,
            trace: None,
            ort_training: false,
            stop: Arc::default(),
        }
    }
}

/// What happens in a run, for whoever watches.
pub enum Event<'a> {
    /// The run begins, or goes on after these steps of so many.
    Begin {
        /// Steps that are done.
        done: u64,
        /// Steps in all.
        total: u64,
    },
    /// A step is done.
    Step(&'a StepMetrics),
    /// Something that the user should know.
    Warning(&'a str),
}

/// What a run did.
#[derive(Clone, Debug, Serialize)]
pub struct Trained {
    /// Steps in all, those of earlier runs included.
    pub steps: u64,
    /// Steps that were asked for.
    pub total_steps: u64,
    /// The step that this run went on from; 0 for a new run.
    pub resumed_from: u64,
    /// True where the run was asked to stop before its end.
    pub is_interrupted: bool,
    /// Tokens of all steps.
    pub tokens: u64,
    /// The first and last loss of this run.
    pub first_loss: Option<f64>,
    /// The last one.
    pub last_loss: Option<f64>,
    /// The last loss on the evaluation data.
    pub eval_loss: Option<f64>,
    /// e to the power of it.
    pub perplexity: Option<f64>,
    /// Elapsed time of this run's steps.
    pub seconds: f64,
    /// Of it, the time that steps waited for data.
    pub data_seconds: f64,
    /// The time for which steps waited for checkpoints, beside `seconds`.
    pub checkpoint_seconds: f64,
    /// The largest measured peak.
    pub peak_bytes: u64,
    /// The largest predicted one.
    pub predicted_peak_bytes: u64,
    /// The weights; null where the run was interrupted.
    pub model: Option<PathBuf>,
    /// The newest checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The memory of each rank; empty for one process.
    pub ranks: Vec<RankPeak>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// A training graph, ready to be trained.
pub struct Trainer {
    /// The file that the graph was made from, and what was said about it.
    source: (PathBuf, Given),
    graph: Graph,
    /// What was compiled; `None` where the graph was taken as it was written.
    request: Option<Request>,
    /// A hash of the model, its loss and its optimizer.
    identity: String,
    buffers: Buffers,
    /// What the plan costs, where it was made here.
    pub summary: Option<Summary>,
    /// What reading and planning had to say.
    pub warnings: Vec<String>,
}

impl Trainer {
    /// Reads a model and plans its training step. The updates of the request are completed by
    /// [`UpdateOptions::for_training`](ckpt_passes::transform::optimizer::UpdateOptions::for_training); without outputs to drop,
    /// all but the loss are dropped. A training graph that updates its parameters is taken as it is.
    ///
    /// # Errors
    /// A file that cannot be read; what any pass refuses; a graph without a loss or an update.
    pub fn load(path: &Path, given: &Given, request: &Request) -> Result<Trainer> {
        let mut model = load(path, given)?;
        let mut trainer = Trainer {
            source: (path.into(), given.clone()),
            graph: Graph::new(""),
            request: None,
            identity: String::new(),
            buffers: Buffers::default(),
            summary: None,
            warnings: std::mem::take(&mut model.warnings),
        };
        ready(&mut model.graph, path)?;
        trainer.buffers = Buffers::of(&model.graph)?;
        trainer.warnings.extend(trainer.buffers.warning());
        if updated(&model.graph).is_empty() {
            let mut request = request.clone();
            request.updates = request.updates.for_training();
            // The gradients of float16 results would vanish.
            let graph = &model.graph;
            let has_f16 = graph
                .inits()
                .any(|(id, _)| graph.ty(id).dtype == DType::F16);
            if has_f16 {
                request.updates.loss_scale = true;
                request.updates.fuse &= request.updates.may_fuse();
            }
            // Nobody reads forward results. The loss stays, whatever the pattern.
            if !has_backward(&model.graph) && request.drop_outputs.is_empty() {
                request.drop_outputs.push("*".into());
            }
            if request.mesh.is_some() {
                trainer.identity = identity::model(&for_one_process(&model.graph, &request)?);
            }
            let outcome = optimize(&mut model.graph, &request, &mut Watch::default())?;
            trainer.warnings.extend(outcome.warnings);
            trainer.summary = outcome.summary;
            trainer.request = Some(request);
        } else {
            trainer.warnings.push("the graph updates its parameters already, so it is trained as it is; options of the plan have no effect".into());
        }
        loss(&model.graph)?;
        if trainer.identity.is_empty() {
            trainer.identity = identity::model(&model.graph);
        }
        trainer.graph = model.graph;
        Ok(trainer)
    }

    /// Returns the training graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Trains, and tells `watch` what happens.
    ///
    /// # Errors
    /// Data, a checkpoint or an option that does not fit the graph; a disk that refuses; a step that gives NaN or
    /// infinities; a rank that is gone or has something else.
    pub fn train(&self, options: &TrainOptions, watch: &mut dyn FnMut(Event)) -> Result<Trained> {
        let join = |ranks| Peers::join(ranks, options.place, &self.graph);
        let peers = options.ranks.as_ref().map(join).transpose()?;
        let leads = peers.as_ref().is_none_or(Peers::leads);
        let _lock = leads.then(|| lock(&options.out)).transpose()?;
        let checkpoints = match leads {
            true => Checkpoints::open(&options.out, options.keep)?,
            false => Checkpoints::beside(&options.out),
        };
        let mut run = Run::new(self, options, (&checkpoints, peers), watch)?;
        let mut session = run.open()?;
        session.go_on(true);
        run.steps(&mut session)?;
        run.finish(self, &mut session)
    }
}

/// Returns the training graph that one process would run, unplanned: a checkpoint of any number of ranks goes on with any
/// other number.
fn for_one_process(graph: &Graph, request: &Request) -> Result<Graph> {
    let request = Request {
        mesh: None,
        plan: Policy::NONE.into(),
        // They may name exchanges, which one process lacks.
        overrides: Default::default(),
        ..request.clone()
    };
    let mut graph = graph.clone();
    optimize(&mut graph, &request, &mut Watch::default())?;
    Ok(graph)
}

/// A run under way.
struct Run<'a> {
    graph: &'a Graph,
    options: &'a TrainOptions,
    watch: &'a mut dyn FnMut(Event),
    batches: Batches,
    eval: Option<(Graph, Batches)>,
    /// The checkpoint that the run goes on from.
    start: Option<Checkpoint>,
    /// The states that the first step reads.
    first_states: Option<Tensors>,
    manifest: Manifest,
    total: u64,
    /// Runs of the graph in a step.
    runs: u64,
    /// What ONNX Runtime's training loads, where it is wanted.
    artifacts: Option<Artifacts>,
    /// The files that tell about steps, on the rank that leads.
    files: Option<(MetricsFile, EventFile)>,
    saver: Saver,
    peers: Option<Peers>,
    spans: Spans,
    /// Predicted bytes after each node of a step.
    timeline_bytes: Vec<u64>,
    done: Trained,
}

impl<'a> Run<'a> {
    fn new(
        trainer: &'a Trainer,
        options: &'a TrainOptions,
        (checkpoints, mut peers): (&Checkpoints, Option<Peers>),
        watch: &'a mut dyn FnMut(Event),
    ) -> Result<Run<'a>> {
        let graph = &trainer.graph;
        let runs = runs_per_update(graph)?;
        let request = |data: &DataRequest| -> Result<DataRequest> {
            Ok(DataRequest {
                batch: batch_size(graph)?,
                seed: options.seed,
                share: peers.as_ref().map_or((0, 1), Peers::share),
                ..data.clone()
            })
        };
        let mut batches = data::open(&request(&options.data)?, graph)?;
        let eval = match &options.eval_data {
            None => None,
            Some(eval_data) => {
                let forward = forward(graph)?;
                let eval_data = DataRequest {
                    shuffle: false,
                    ..request(eval_data)?
                };
                let batches = data::open(&eval_data, &forward)?;
                Some((forward, batches))
            }
        };
        let total = match options.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => (epochs * batches.batches_per_epoch() / runs).max(1),
        };
        let tokenizer = options
            .data
            .tokenizer
            .as_deref()
            .map(identity::file)
            .transpose()?;
        let mut manifest = Manifest {
            format: Manifest::FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            step: 0,
            skipped: 0,
            loss_scale: takes(graph, Number::LossScale).then_some(FIRST_SCALE),
            good_steps: 0,
            tokens: 0,
            seed: options.seed,
            position: batches.position(),
            data: batches.fingerprint(),
            tokenizer,
            model: trainer.identity.clone(),
            plan: identity::plan(graph),
            settings: settings(options, total),
            slices: 0,
            files: Default::default(),
        };
        let mut warnings = trainer.warnings.clone();
        warnings.extend(batches.notes().iter().cloned());
        if let Some(peers) = &peers {
            // The leader has opened the folder once all are here.
            peers.ranks.agree("start of the run", "")?;
        }
        let start = match options.resume {
            true => checkpoints.read()?,
            false => {
                refuse_to_overwrite(checkpoints, &options.out)?;
                None
            }
        };
        if let Some(start) = &start {
            warnings.extend(accept(start, &manifest)?);
            let now = manifest;
            manifest = Manifest {
                plan: now.plan,
                settings: now.settings,
                version: now.version,
                files: Default::default(),
                ..start.manifest.clone()
            };
            batches.seek(manifest.position)?;
        } else if options.resume {
            warnings.push("there is no checkpoint to resume from: the run begins anew".into());
        }
        if let Some(peers) = &mut peers {
            peers.agree(&manifest)?;
        }
        let resumed_from = manifest.step;
        let files = || -> Result<_> {
            let metrics = MetricsFile::after(&options.out, resumed_from)?;
            Ok((metrics, EventFile::after(&options.out, resumed_from)?))
        };
        let leads = peers.as_ref().is_none_or(Peers::leads);
        let place = peers.as_ref().map(|peers| peers.at);
        let place = place.unwrap_or(Coordinates {
            dp: (0, 1),
            tp: (0, 1),
        });
        let first_states = match &start {
            Some(start) => {
                // A master of the checkpoint is more exact than its parameter.
                let mut states = first_masters(graph, &start.parameters, place);
                states.extend(own_states(&start.states, graph, place)?);
                states
            }
            None => first_masters(graph, &Tensors::new(), place),
        };
        let mut artifacts = None;
        if options.ort_training && leads {
            let source = (trainer.source.0.as_path(), &trainer.source.1);
            artifacts = Some(match &trainer.request {
                Some(request) => {
                    let (artifacts, notes) = ort_training::plan(source, request)?;
                    warnings.extend(notes);
                    artifacts
                }
                None => Artifacts::new(graph.clone(), &Optimizer::ADAMW)?,
            });
        }
        let mut run = Run {
            graph,
            artifacts,
            options,
            watch,
            batches,
            eval,
            start,
            first_states: Some(first_states),
            manifest,
            total,
            runs,
            files: leads.then(files).transpose()?,
            saver: Saver::new(checkpoints.clone(), peers.as_ref().map(|p| p.ranks.clone()))?,
            peers,
            spans: Spans::new(options.trace.is_some()),
            timeline_bytes: Vec::new(),
            done: Trained {
                steps: resumed_from,
                total_steps: total,
                resumed_from,
                is_interrupted: false,
                tokens: 0,
                first_loss: None,
                last_loss: None,
                eval_loss: None,
                perplexity: None,
                seconds: 0.0,
                data_seconds: 0.0,
                checkpoint_seconds: 0.0,
                peak_bytes: 0,
                predicted_peak_bytes: 0,
                model: None,
                checkpoint: None,
                ranks: Vec::new(),
                warnings: Vec::new(),
            },
        };
        warnings.into_iter().for_each(|warning| run.warn(warning));
        Ok(run)
    }

    fn warn(&mut self, warning: String) {
        if !self.done.warnings.contains(&warning) {
            (self.watch)(Event::Warning(&warning));
            self.done.warnings.push(warning);
        }
    }

    /// Opens the graph on the weights of the checkpoint, or of the model.
    fn open(&mut self) -> Result<Session<'a>> {
        let options = self.options;
        let nothing = Tensors::new();
        let start = self.start.take();
        let weights = start.as_ref().map_or(&nothing, |start| &start.parameters);
        let mut session = Session::new(
            self.graph,
            weights,
            options.threads,
            options.place,
            Rng::Counter,
        )?;
        session.attend_by(options.attention);
        if let Some(folder) = &options.offload_dir {
            session.wait_in(folder.clone());
        }
        session.expect_finite(&expected_finite(self.graph)?);
        Ok(session)
    }

    fn steps(&mut self, session: &mut Session) -> Result<()> {
        let total = self.total;
        let done = self.manifest.step;
        (self.watch)(Event::Begin { done, total });
        let save_every = self.options.save_every.unwrap_or(total.div_ceil(10)).max(1);
        let mut saved = done;
        while self.manifest.step < total {
            let step = self.manifest.step + 1;
            let lost = |e: Box<Error>| match e.code() {
                "rank" => e.at(format!("step {step}")),
                _ => e,
            };
            let mut metrics = self.step(session).map_err(lost)?;
            let is_last = step == total;
            let is_due = |every: Option<u64>| every.is_some_and(|n| step.is_multiple_of(n.max(1)));
            if is_last || is_due(self.options.eval_every) {
                let started = Instant::now();
                metrics.eval_loss = self.evaluate(session).map_err(lost)?;
                self.spans.add(Span::Evaluate, step, started);
                metrics.perplexity = metrics.eval_loss.map(f64::exp);
                self.done.eval_loss = metrics.eval_loss.or(self.done.eval_loss);
                self.done.perplexity = metrics.perplexity.or(self.done.perplexity);
            }
            if let Some((lines, events)) = &mut self.files {
                let added = lines.add(&metrics);
                let added = added.and_then(|()| events.add(&metrics));
                added.map_err(|e| self.with_checkpoint(e))?;
            }
            (self.watch)(Event::Step(&metrics));
            let is_asked_to_stop = self.is_asked_to_stop().map_err(lost)?;
            if is_last || is_asked_to_stop || is_due(Some(save_every)) {
                let started = Instant::now();
                let manifest = self.manifest.clone();
                session.gather(true).map_err(lost)?;
                self.saver.save(self.graph, session, manifest)?;
                session.let_go();
                self.spans.add(Span::Save, step, started);
                self.done.checkpoint_seconds += started.elapsed().as_secs_f64();
                saved = step;
            }
            if is_asked_to_stop && !is_last {
                self.done.is_interrupted = true;
                break;
            }
        }
        if saved == self.manifest.step {
            self.saver.wait()?;
        }
        Ok(())
    }

    /// Whether any rank is asked to stop: all of them stop after the same step.
    fn is_asked_to_stop(&self) -> Result<bool> {
        let own = self.options.stop.load(Ordering::Relaxed);
        match &self.peers {
            None => Ok(own),
            Some(peers) => peers.any(own),
        }
    }

    fn step(&mut self, session: &mut Session) -> Result<StepMetrics> {
        let step = self.manifest.step + 1;
        let factor = self.options.schedule.factor(step, self.total);
        let mut metrics = StepMetrics {
            step,
            lr: self.options.lr * factor,
            loss_scale: self.manifest.loss_scale,
            ..StepMetrics::default()
        };
        let started = Instant::now();
        let runs = self.runs;
        for run in 0..runs {
            let waited = Instant::now();
            let batch = self.batch()?;
            metrics.data_seconds += waited.elapsed().as_secs_f64();
            self.spans.add(Span::Data, step, waited);
            metrics.tokens += match &self.peers {
                Some(peers) => match peers.sum(batch.tokens)? {
                    0 => return Err(data::no_label_counts()),
                    all => all,
                },
                None => batch.tokens,
            };
            let mut inputs = batch.inputs;
            if let Some(states) = self.first_states.take() {
                self.start = None;
                inputs.extend(states);
            }
            let updates = step - self.manifest.skipped;
            // Each run draws with a seed of its own.
            let seed = self.options.seed.wrapping_mul(1 << 32) + (step - 1) * runs + run;
            numbers(self.graph, &mut inputs, &|number| match number {
                Number::Rate => Some(metrics.lr),
                Number::Step => Some(updates as f64),
                Number::Apply => Some(f64::from(u8::from(run + 1 == runs))),
                Number::LossScale => metrics.loss_scale,
                Number::Seed => Some((seed & ((1 << 52) - 1)) as f64),
            })?;
            let ran = Instant::now();
            let measured = self.run(session, &inputs, step)?;
            self.spans.add(Span::Run, step, ran);
            if self.timeline_bytes.is_empty() {
                self.timeline_bytes = session.timeline_bytes(&inputs)?;
            }
            self.take(&measured, &mut metrics, runs)?;
        }
        metrics.seconds = started.elapsed().as_secs_f64();
        self.scale(&metrics);
        let manifest = &mut self.manifest;
        manifest.step = step;
        manifest.tokens += metrics.tokens;
        manifest.position = self.batches.position();
        let done = &mut self.done;
        done.steps = step;
        done.tokens = manifest.tokens;
        done.seconds += metrics.seconds;
        done.data_seconds += metrics.data_seconds;
        done.first_loss = done.first_loss.or(Some(metrics.loss));
        done.last_loss = Some(metrics.loss);
        done.peak_bytes = done.peak_bytes.max(metrics.peak_bytes);
        done.predicted_peak_bytes = done.predicted_peak_bytes.max(metrics.predicted_peak_bytes);
        Ok(metrics)
    }

    /// Runs the graph once. Names the node where NaN or infinities began, and the last checkpoint.
    fn run(&mut self, session: &mut Session, inputs: &Tensors, step: u64) -> Result<Measured> {
        let graph = self.graph;
        let loss = &graph.value(loss(graph)?).name;
        let names = [loss.as_str(), GRAD_NORM, FOUND_INF];
        let run = session.step(inputs, &|name| names.contains(&name));
        let run = run.and_then(
            |run| match run.outputs.get(loss).and_then(|l| l.get_f64(0)) {
                Some(x) if !x.is_finite() => {
                    Err(Error::verification("finite", format!("`{loss}` is {x}")))
                }
                _ => Ok(run),
            },
        );
        run.map_err(|e| match e.code() {
            "finite" => {
                let blamed = session.blame(inputs).unwrap_or(e);
                let what = format!("step {step}: {}", blamed.message());
                let mut error = Error::verification("finite", what);
                for (_, place) in blamed.notes().filter(|(label, _)| *label == "at") {
                    error = error.at(place);
                }
                self.with_checkpoint(error)
            }
            _ => self.with_checkpoint(e),
        })
    }

    /// Adds to an error where the run can go on, once the checkpoint that is being written is whole.
    fn with_checkpoint(&mut self, error: Box<Error>) -> Box<Error> {
        // A checkpoint that cannot be written is not the last good one; the first error is reported.
        let _ = self.saver.wait();
        error.help(match self.saver.last() {
            Some(last) => format!("the last good checkpoint is {}", last.display()),
            None => "there is no checkpoint yet".into(),
        })
    }

    /// Adds a run of the graph to the metrics of its step.
    fn take(&mut self, run: &Measured, metrics: &mut StepMetrics, runs: u64) -> Result<()> {
        let number = |name: &str| run.outputs.get(name).and_then(|tensor| tensor.get_f64(0));
        let loss = number(&self.graph.value(loss(self.graph)?).name);
        let loss = loss.ok_or_else(|| Error::bug("train", "the loss has no number"))?;
        metrics.loss += loss / runs as f64;
        metrics.grad_norm = number(GRAD_NORM).or(metrics.grad_norm);
        metrics.is_skipped |= number(FOUND_INF).is_some_and(|found| found != 0.0);
        metrics.peak_bytes = metrics.peak_bytes.max(run.peak_bytes);
        metrics.predicted_peak_bytes = metrics.predicted_peak_bytes.max(run.predicted_peak_bytes);
        let is_exact = self.options.place == Place::Cpu && !run.peak_is_bound;
        if is_exact && run.peak_bytes != run.predicted_peak_bytes {
            self.warn(format!(
                "step {}: the measured peak is {} bytes and the predicted one {}; please report this",
                metrics.step, run.peak_bytes, run.predicted_peak_bytes
            ));
        }
        Ok(())
    }

    /// Sets the loss scale of the next step.
    fn scale(&mut self, metrics: &StepMetrics) {
        let manifest = &mut self.manifest;
        manifest.skipped += u64::from(metrics.is_skipped);
        let Some(scale) = &mut manifest.loss_scale else {
            return;
        };
        manifest.good_steps = match metrics.is_skipped {
            true => 0,
            false => manifest.good_steps + 1,
        };
        if metrics.is_skipped {
            *scale *= SCALE_BACKOFF;
        } else if manifest.good_steps == GROWTH_INTERVAL {
            *scale *= SCALE_GROWTH;
            manifest.good_steps = 0;
        }
    }

    fn batch(&mut self) -> Result<Batch> {
        for _ in 0..2 {
            if let Some(batch) = self.batches.next()? {
                return Ok(batch);
            }
        }
        Err(Error::usage("data", "the data has no batch"))
    }

    fn evaluate(&mut self, session: &mut Session) -> Result<Option<f64>> {
        let Some((forward, batches)) = &mut self.eval else {
            return Ok(None);
        };
        session.gather(false)?;
        let of_run = (self.options.seed, self.peers.as_ref());
        let loss = evaluate(session, forward, batches, of_run);
        session.let_go();
        loss.map(Some).map_err(|e| self.with_checkpoint(e))
    }

    /// Writes the weights and the page.
    fn finish(mut self, trainer: &Trainer, session: &mut Session) -> Result<Trained> {
        session.gather(true)?;
        if self.files.is_some() {
            self.write(trainer, session)?;
        }
        if let Some(peers) = &self.peers {
            self.done.ranks = peers.finish(self.done.peak_bytes, self.done.predicted_peak_bytes)?;
        }
        self.done.tokens = self.manifest.tokens;
        self.done.checkpoint = self.saver.last().map(Path::to_path_buf);
        Ok(self.done)
    }

    fn write(&mut self, trainer: &Trainer, session: &Session) -> Result<()> {
        if !self.done.is_interrupted {
            let path = self.options.out.join(weights::FILE);
            // A written training graph is not the model that adapters could be merged into: `convert` does that.
            let has_adapters =
                self.graph.meta.contains_key(keys::LORA) && trainer.request.is_some();
            let notes = match self.saver.last().filter(|_| has_adapters) {
                Some(saved) => {
                    let source = (trainer.source.0.as_path(), &trainer.source.1);
                    weights::write_adapted(&self.options.out, source, saved)
                }
                None => weights::write(&path, (self.graph, session), &trainer.buffers),
            };
            for note in notes.map_err(|e| self.with_checkpoint(e))? {
                self.warn(note);
            }
            if let (Some(artifacts), Some(saved)) = (&mut self.artifacts, self.saver.last()) {
                let written = ort_training::write(artifacts, saved, &self.options.out);
                written.map_err(|e| self.with_checkpoint(e))?;
            }
            self.done.model = Some(path);
        }
        let steps = metrics::read(&self.options.out.join(metrics::FILE))?;
        let page_file = self.options.out.join(page::FILE);
        let written = write_whole(
            &page_file,
            page::page(&steps, &self.timeline_bytes).as_bytes(),
        );
        written.map_err(|e| self.with_checkpoint(e))?;
        if let Some(path) = &self.options.trace {
            self.spans.write(path)?;
        }
        Ok(())
    }
}

/// Returns the loss, and the gradients that updates read unless they may overflow.
fn expected_finite(graph: &Graph) -> Result<BTreeSet<ValueId>> {
    let mut values = BTreeSet::from([loss(graph)?]);
    if !takes(graph, Number::LossScale) {
        values.extend(trained(graph).into_values());
    }
    Ok(values)
}

/// Returns the number of examples of a step: the first axis of the inputs, as the plan has it.
fn batch_size(graph: &Graph) -> Result<u64> {
    let planned: Vec<(String, i64)> = planned_sizes::of(graph)?.into_iter().collect();
    let binding = Binding::of_run(graph, &planned)?;
    let kinds = dim_kinds(graph);
    let states = states(graph);
    let mut axes = graph.inputs().iter().filter(|id| !states.contains(id));
    let first = axes.find_map(|id| graph.ty(*id).dims.first());
    let size = first.and_then(|dim| dim.eval(&|name: &str| binding.get(name)));
    let named = || {
        let batch = kinds.iter().find(|(_, kind)| **kind == DimKind::Batch)?;
        binding.get(batch.0)
    };
    let size = size.or_else(named).and_then(|n| u64::try_from(n).ok());
    size.ok_or_else(|| Error::usage("data", "the graph has no input with a batch axis"))
}

/// Returns the options that decide the numbers of a step, as a text to compare.
fn settings(options: &TrainOptions, total: u64) -> String {
    let Schedule { shape, warmup } = options.schedule;
    let ranks = match &options.ranks {
        Some(place) => format!(", {} ranks", place.ranks),
        None => String::new(),
    };
    format!(
        "lr {}, schedule {shape}, warmup {warmup}, {total} steps{ranks}",
        options.lr
    )
}

fn refuse_to_overwrite(checkpoints: &Checkpoints, out: &Path) -> Result<()> {
    match checkpoints.newest()? {
        None => Ok(()),
        Some(newest) => Err(
            Error::usage("out", "the folder holds the checkpoints of another run")
                .at(newest.display().to_string())
                .help(format!(
                    "go on from there with --resume, choose another --out, or remove {}",
                    out.join(FOLDER).display()
                )),
        ),
    }
}

/// Checks that a run may go on from a checkpoint. Returns what differs without harm.
fn accept(start: &Checkpoint, now: &Manifest) -> Result<Vec<String>> {
    let was = &start.manifest;
    let same = |what: &str, was: &str, now: &str, help: &str| match was == now {
        true => Ok(()),
        false => Err(
            Error::usage("resume", format!("{what} since the checkpoint was written"))
                .at(start.path.display().to_string())
                .expected(was)
                .found(now)
                .help(help),
        ),
    };
    let begin = "resume with what the run began with, or begin a new run in another --out";
    same(
        "the model, its loss or its optimizer has changed",
        &was.model,
        &now.model,
        begin,
    )?;
    let none = |tokenizer: &Option<String>| tokenizer.clone().unwrap_or("none".into());
    same(
        "the tokenizer has changed",
        &none(&was.tokenizer),
        &none(&now.tokenizer),
        begin,
    )?;
    same(
        "the seed has changed",
        &was.seed.to_string(),
        &now.seed.to_string(),
        begin,
    )?;
    same("the data has changed", &was.data, &now.data, begin)?;
    let mut notes = Vec::new();
    if was.plan != now.plan {
        notes.push("the plan is another one than that of the checkpoint: the memory differs, the numbers do not".into());
    }
    if was.settings != now.settings {
        notes.push(format!(
            "the checkpoint was made with other settings ({}), so the run is not the one that was interrupted",
            was.settings
        ));
    }
    Ok(notes)
}
