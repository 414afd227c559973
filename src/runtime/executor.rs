//! Runs a graph in its order and frees each tensor right after its last use.
//!
//! A [`Program`] is made once: kernels looked up, weights wrapped, the drop table computed. At the first run with inputs
//! of new sizes it is compiled for them ([`Schedule`]); a run then needs nothing but the inputs. Views hold their storage,
//! so dropping every value at its own last use frees a storage exactly where `analysis::memory` says it dies. Everything
//! runs without autograd.
//!
//! On a device every value lies there, weights and inputs included. Small integer values that are known on the CPU (axes,
//! shapes, arithmetic on shapes) are kept and worked out there as well, so that no kernel waits for the device to read
//! them.

use super::convert;
use super::device;
use super::draws::Draws;
use super::graphs::{Figures, Graphs, Turn};
use super::inputs::Input;
use super::kernels;
use super::kernels::attention::pairs::Available;
use super::lanes;
use super::later::{Answers, Later};
use super::schedule::{Form, Key, Schedule};
use super::step::{Given, Step};
use super::values::{Brought, Values};
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::analysis::device::round_up;
use ckpt_passes::analysis::liveness::Liveness;
use ckpt_passes::error::Kind;
use ckpt_passes::ir::{Def, Graph, Id, OpDef, Ty, ValueId};
use ckpt_passes::{Error, Result};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;
use tch::Tensor;

/// Is called with how many steps are done.
type Watch<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// A graph made ready to run.
pub struct Program<'g> {
    graph: &'g Graph,
    place: Place,
    rng: Rng,
    use_arena: bool,
    /// Pairs of kernels of attention that nodes may take.
    available: Available,
    steps: Vec<Step<'g>>,
    pub(super) inputs: Vec<Input>,
    outputs: Vec<(String, usize)>,
    /// Bytes of weights and constants.
    weight_bytes: u64,
    /// Slots of inputs and results: empty between runs.
    passing: Vec<usize>,
    pub(super) values: RefCell<Values>,
    schedule: RefCell<Option<Rc<Schedule>>>,
    pub(super) graphs: RefCell<Graphs>,
}

/// What a run gives back.
pub struct Run {
    /// Graph outputs by name.
    pub outputs: Vec<(String, Tensor)>,
    /// Weights, constants and inputs.
    pub static_bytes: u64,
    /// Largest number of bytes alive at once, static ones included.
    pub peak_bytes: u64,
    /// The same before the allocator rounded blocks up; differs from `peak_bytes` on a device only.
    pub requested_peak_bytes: u64,
    /// Largest number of bytes that waited outside the device's memory at once.
    pub outside_peak_bytes: u64,
    /// The step at which the peak was first reached.
    pub peak_at: Option<String>,
    pub time_us: u64,
    /// Processor time of all threads during the run.
    pub cpu_us: u64,
    /// Bytes of the process's own pages that are in memory, right after the run; `None` where the system does not say.
    pub resident_bytes: Option<u64>,
    /// Ops that ran without a deterministic kernel, because the device has none for them.
    pub nondeterministic: BTreeSet<&'static str>,
    /// Whether the device was sent the step as one. Figures of its memory are then those of the step that was captured.
    pub is_replayed: bool,
}

/// Processor time that this process has taken, in microseconds.
pub(super) fn cpu_us() -> u64 {
    cpu_ns() / 1_000
}

/// The same in nanoseconds.
pub(super) fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one place to write to. The clock is there on every system that libtorch runs on.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn slot(id: ValueId) -> usize {
    Id::index(id)
}

impl<'g> Program<'g> {
    /// Chooses a kernel for every node and wraps the weights, for the CPU.
    ///
    /// # Errors
    /// An op without a kernel, an element type libtorch lacks, a weight whose file is absent.
    pub fn new(graph: &'g Graph) -> Result<Program<'g>> {
        Program::at(graph, Place::Cpu)
    }

    /// The same for a place.
    ///
    /// # Errors
    /// As [`Program::new`]; a device that is not there or too small for the weights.
    pub fn at(graph: &'g Graph, place: Place) -> Result<Program<'g>> {
        device::open(place)?;
        let mut values = Values::new(graph, place);
        let mut weight_bytes = 0;
        for (id, value) in graph.inits() {
            if let Def::Init(constant) = &value.def
                && (!value.uses().is_empty() || graph.is_output(id))
            {
                values.set_weight(slot(id), convert::tensor(&value.name, constant)?)?;
                weight_bytes += round_up(constant.size_bytes(), place.granularity_bytes());
            }
        }
        let liveness = Liveness::new(graph);
        let (drops, joins) = (liveness.frees(graph), liveness.arrivals);
        let mut steps = Vec::with_capacity(graph.order().len());
        for ((id, drops), joins) in graph.order().iter().zip(drops).zip(joins) {
            let node = graph.node(*id);
            let Some(kernel) = kernels::find(node.op) else {
                return Err(Error::model(
                    "op",
                    format!("the runtime cannot execute {}", node.op.name),
                )
                .at(graph.describe(*id)));
            };
            steps.push(Step {
                id: *id,
                node,
                kernel,
                ins: node.ins.iter().map(|v| v.map(slot)).collect(),
                outs: node.outs.iter().map(|v| slot(*v)).collect(),
                drops: drops.into_iter().map(slot).collect(),
                joins: joins.into_iter().map(slot).collect(),
                is_beside: lanes::may_run_beside(graph, *id),
            });
        }
        let inputs = graph.inputs().iter().map(|id| {
            let value = graph.value(*id);
            Input {
                name: value.name.clone(),
                ty: value.ty().clone(),
                slot: slot(*id),
            }
        });
        let outputs = graph
            .outputs()
            .iter()
            .map(|id| (graph.value(*id).name.clone(), slot(*id)));
        let is_written = |id| values.statics.is_written(slot(id));
        let passing = graph
            .values()
            .filter(|(id, value)| !matches!(value.def, Def::Init(_)) || is_written(*id))
            .map(|(id, _)| slot(id))
            .collect();
        Ok(Program {
            graph,
            place,
            rng: Rng::default(),
            use_arena: true,
            available: Available::default(),
            steps,
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            weight_bytes,
            passing,
            values: RefCell::new(values),
            schedule: RefCell::new(None),
            graphs: RefCell::default(),
        })
    }

    /// The folder in which results wait that leave the device's memory for a file.
    pub fn wait_in(&mut self, folder: PathBuf) {
        self.values.get_mut().outside.folder = Some(folder);
    }

    /// Whether transfers run beside what follows them from now on.
    pub fn use_streams(&mut self, wanted: bool) {
        self.values.get_mut().lanes.is_wanted = wanted;
    }

    /// Whether pages of the host's memory in which results of a device wait are locked from now on. On a CPU there are
    /// none.
    pub fn pin_memory(&mut self, wanted: bool) {
        self.values.get_mut().outside.pins = wanted && self.place != Place::Cpu;
    }

    /// Why such pages are not locked though they should be.
    pub fn pins_refused(&self) -> Option<String> {
        self.values.borrow().outside.refused()
    }

    /// Makes random ops draw so from now on.
    pub fn draw_by(&mut self, rng: Rng) {
        self.rng = rng;
        self.graphs.get_mut().forget();
    }

    /// Whether a device is sent steps as one from now on, where they can be captured ([`graphs`](super::graphs)). The
    /// outputs of a run then lie where those of the next one will.
    pub fn use_graphs(&mut self, wanted: bool) {
        self.graphs = RefCell::default();
        if wanted {
            self.graphs.get_mut().record(self.place);
        }
    }

    /// Why steps are not captured though they should be.
    pub fn graphs_refused(&self) -> Option<String> {
        self.graphs.borrow().refused()
    }

    /// Bytes that stay on the device from run to run for steps that are captured.
    pub fn staying_bytes(&self) -> u64 {
        let values = self.values.borrow();
        let brought = values.brought.iter().flat_map(Brought::tensors);
        let all = values.statics.places().chain(brought);
        all.map(|t| self.block_bytes(t)).sum()
    }

    fn block_bytes(&self, tensor: &Tensor) -> u64 {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        round_up(bytes as u64, self.place.granularity_bytes())
    }

    /// Whether storages lie in an arena from now on, where one can be planned: on a CPU, no size depending on data.
    pub fn use_arena(&mut self, wanted: bool) {
        self.use_arena = wanted;
        *self.schedule.get_mut() = None;
    }

    /// The pairs of kernels that attention may take from now on; none unless told otherwise.
    pub fn attend_with(&mut self, available: Available) {
        self.available = available;
        *self.schedule.get_mut() = None;
    }

    /// Replaces a weight by name, for this program.
    ///
    /// # Errors
    /// The shape or element type differs from the model's.
    pub fn override_weight(&mut self, id: ValueId, tensor: Tensor) -> Result<()> {
        let value = self.graph.value(id);
        let ty = value.ty();
        let found = (convert::dtype(tensor.kind()), tensor.size());
        if found.0 != Some(ty.dtype) || Some(found.1.clone()) != ty.static_dims() {
            return Err(
                Error::usage("input", format!("`{}` cannot take this tensor", value.name))
                    .expected(ty.to_string())
                    .found(format!("{:?}{:?}", tensor.kind(), tensor.size())),
            );
        }
        self.graphs.get_mut().forget();
        self.values.get_mut().set_weight(slot(id), tensor)
    }

    /// Whether a run starts from the parameters and states that the last one left, not from those that are given.
    /// The next one starts from what is given.
    pub fn go_on(&self, wanted: bool) {
        self.values.borrow_mut().statics.go_on(wanted);
    }

    /// The program compiled for inputs of these sizes; kept until inputs of other sizes come.
    ///
    /// # Errors
    /// As [`Program::bind`]; a size that has no number.
    pub fn schedule(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Rc<Schedule>> {
        let dims = self.bind(inputs)?.into_iter().collect();
        let row_major = self.inputs.iter().all(|i| inputs[&i.name].is_contiguous());
        let key = Key { dims, row_major };
        let mut kept = self.schedule.borrow_mut();
        if let Some(schedule) = &*kept
            && schedule.is_for(&key)
        {
            return Ok(schedule.clone());
        }
        let schedule = Schedule::new(self.graph, self.place, key, self.use_arena, &self.available)?;
        let schedule = Rc::new(schedule);
        *kept = Some(schedule.clone());
        Ok(schedule)
    }

    /// Runs the graph once; node by node as they stand where a size is not known before it has run.
    ///
    /// # Errors
    /// As [`Program::bind`], or a kernel that fails; the error names the node.
    pub fn run(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Run> {
        self.go(inputs, None)
    }

    /// Runs the graph once, node by node; `watch` is called before the first step and after each, with how many are done.
    pub(super) fn watched(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        watch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Run> {
        self.go(inputs, Some(watch))
    }

    fn go(&self, inputs: &BTreeMap<String, Tensor>, watch: Option<Watch>) -> Result<Run> {
        self.bind(inputs)?;
        let schedule = match self.schedule(inputs) {
            Ok(schedule) => Some(schedule),
            Err(e) if e.kind() == Kind::Environment => return Err(e),
            Err(_) => None,
        };
        let mut values = self.values.borrow_mut();
        let mut graphs = self.graphs.borrow_mut();
        let turn = graphs.turn(watch.is_some(), schedule.as_ref(), || {
            self.uncaptured(schedule.as_deref(), self.rng)
        });
        values.prepare(turn);
        let mut unwatched = |_| Ok(());
        let watch = watch.unwrap_or(&mut unwatched);
        let recorder = graphs.recorder();
        let schedule = schedule.as_ref();
        let mut run = || self.run_as(schedule, inputs, &mut values, &mut graphs, turn, watch);
        let done = match recorder {
            None => run(),
            Some(recorder) => {
                let mut done = None;
                let aside = recorder.aside(&mut || {
                    done = Some(run()?);
                    // Outputs are read on another stream.
                    device::synchronize(self.place)
                });
                aside.and_then(|()| done.ok_or_else(|| Error::bug("run", "nothing was run")))
            }
        };
        values.lanes.abandon();
        for slot in &self.passing {
            values.tensors[*slot] = None;
            values.host[*slot] = None;
        }
        done
    }

    fn run_as(
        &self,
        schedule: Option<&Rc<Schedule>>,
        inputs: &BTreeMap<String, Tensor>,
        values: &mut Values,
        graphs: &mut Graphs,
        turn: Turn,
        watch: Watch,
    ) -> Result<Run> {
        let _no_grad = tch::no_grad_guard();
        values.draws = Draws::new(self.rng);
        let mut static_bytes = self.weight_bytes;
        for input in &self.inputs {
            let tensor = &inputs[&input.name];
            static_bytes += self.block_bytes(tensor);
            let there = values.statics.input(input.slot, tensor, self.place)?;
            values.tensors[input.slot] = Some(there);
        }
        let weights = &mut values.tensors;
        values.statics.own_weights(weights, self.place)?;
        device::synchronize(self.place)?;
        device::reset_peak(self.place)?;
        values.outside.reset_peak();
        let (start, start_cpu_us) = (Instant::now(), cpu_us());
        let (figures, answers, is_replayed) =
            self.take_turn(schedule, values, graphs, turn, watch)?;
        values.lanes.arrive_all()?;
        device::synchronize(self.place)?;
        let time_us = start.elapsed().as_micros() as u64;
        let cpu_us = cpu_us() - start_cpu_us;
        let place = |at: usize| self.graph.describe(self.steps[at].id);
        match (&answers, is_replayed) {
            (Some(answers), _) => answers.judge(place)?,
            (None, true) => graphs.ready()?.answers.judge(place)?,
            (None, false) => {}
        }
        values.statics.keep(&values.tensors)?;
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (name, slot) in &self.outputs {
            let tensor = values.tensors[*slot]
                .as_ref()
                .ok_or_else(|| Error::bug("run", format!("output `{name}` is gone")))?;
            outputs.push((name.clone(), tensor.shallow_clone()));
        }
        // What stays there for the sake of a capture.
        let brought = values.brought.iter().flat_map(Brought::tensors);
        static_bytes += brought.map(|t| self.block_bytes(t)).sum::<u64>();
        Ok(Run {
            outputs,
            static_bytes,
            peak_bytes: static_bytes + figures.peak_bytes,
            requested_peak_bytes: static_bytes + figures.requested_bytes,
            outside_peak_bytes: values.outside.peak_bytes(),
            peak_at: figures.peak_at.map(|at| self.steps[at].node.name.clone()),
            time_us,
            cpu_us,
            resident_bytes: device::resident_bytes(),
            nondeterministic: figures.nondeterministic,
            is_replayed,
        })
    }

    /// Does the step: what it measured, what is to be looked at once it is done, and whether the device was sent it as one.
    fn take_turn(
        &self,
        schedule: Option<&Rc<Schedule>>,
        values: &mut Values,
        graphs: &mut Graphs,
        turn: Turn,
        watch: Watch,
    ) -> Result<(Figures, Option<Answers>, bool)> {
        let (Some(schedule), Some(recorder), true) =
            (schedule, graphs.recorder(), turn != Turn::Plain)
        else {
            let plan = schedule.map(Rc::as_ref);
            return Ok((self.steps_of(plan, values, None, watch)?, None, false));
        };
        if turn == Turn::WarmUp {
            let later = Later::default();
            let figures = self.steps_of(Some(schedule), values, Some(&later), watch)?;
            graphs.is_warm(schedule);
            return Ok((figures, Some(later.answers()?), false));
        }
        if turn == Turn::Capture {
            match self.captured(schedule, values, &*recorder) {
                Ok(recorded) => graphs.is_ready(schedule, recorded),
                Err(e) => {
                    graphs.give_up(&e);
                    values.brought = None;
                    for slot in self.steps.iter().flat_map(|step| &step.outs) {
                        values.tensors[*slot] = None;
                        values.host[*slot] = None;
                    }
                    device::reset_peak(self.place)?;
                    return Ok((
                        self.steps_of(Some(schedule), values, None, watch)?,
                        None,
                        false,
                    ));
                }
            }
        }
        let recorded = graphs.ready()?;
        self.replay(schedule, values, recorded)?;
        Ok((recorded.figures.clone(), None, true))
    }

    /// Runs the nodes in their order.
    pub(super) fn steps_of(
        &self,
        schedule: Option<&Schedule>,
        values: &mut Values,
        later: Option<&Later>,
        watch: Watch,
    ) -> Result<Figures> {
        let base = device::bytes(self.place)?;
        let mut peak = (base.live, None);
        let mut nondeterministic = BTreeSet::new();
        watch(0)?;
        for (at, step) in self.steps.iter().enumerate() {
            if let Some(later) = later {
                later.at.set(at);
            }
            let form = schedule.map_or(&Form::Kernel, |s| &s.forms[at]);
            let given = Given {
                known: schedule.map_or(&[][..], |s| &s.known),
                over: schedule.and_then(|s| s.over[at]),
                pair: schedule.and_then(|s| s.pinned.pairs[at]),
                later,
            };
            let offer = schedule.and_then(|s| s.arena.as_ref()?.offer(at));
            let arrived = step.joins.iter().try_for_each(|s| values.lanes.arrive(*s));
            arrived
                .and_then(|()| step.run(form, given, values, &mut nondeterministic))
                .map_err(|e| e.at(self.graph.describe(step.id)))?;
            drop(offer);
            let reached = device::bytes(self.place)?.peak;
            if reached > peak.0 {
                peak = (reached, Some(at));
            }
            for slot in &step.drops {
                values.tensors[*slot] = None;
                values.host[*slot] = None;
            }
            watch(at + 1)?;
        }
        let most = device::bytes(self.place)?.requested_peak;
        Ok(Figures {
            peak_bytes: peak.0 - base.live,
            requested_bytes: most.saturating_sub(base.requested_live),
            peak_at: peak.1,
            nondeterministic,
        })
    }

    /// How many nodes a run executes.
    pub fn nodes(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn ops(&self) -> impl Iterator<Item = &'static OpDef> {
        self.steps.iter().map(|step| step.node.op)
    }

    /// Names and slots of the graph outputs.
    pub(super) fn outputs(&self) -> impl Iterator<Item = (&str, usize)> {
        self.outputs
            .iter()
            .map(|(name, slot)| (name.as_str(), *slot))
    }

    /// Whether the node at a position of the order moves a value out of the device's memory or back.
    pub(super) fn is_transfer(&self, at: usize) -> bool {
        self.steps[at].node.op.is_transfer()
    }

    /// Where it runs.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Names and types of the graph inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &Ty)> {
        self.inputs.iter().map(|i| (i.name.as_str(), &i.ty))
    }
}
