//! Runs a graph in its order and frees each tensor right after its last use.
//!
//! A [`Program`] is made once: it looks up kernels, wraps weights and computes which values each step frees
//! ([`Liveness`]). At the first run with inputs of new sizes it is compiled for them ([`Specialization`]). A run then needs
//! nothing but the inputs. Views hold their storage, so freeing every value at its own last use frees a storage exactly
//! where `analysis::memory` says it dies. Everything runs without autograd.
//!
//! On a device, all values lie there, weights and inputs included. The host keeps and computes small integer values (axes,
//! shapes, arithmetic on shapes) as well, so that no kernel waits for the device to read them.

use super::capture::{CapturedStep, Captures, StepMode, StepStats};
use super::convert;
use super::deferred_checks::{CheckResults, DeferredChecks};
use super::device;
use super::draws::Draws;
use super::finite::Check;
use super::fixed_draws::FixedDraws;
use super::index_errors;
use super::inputs::{self, Input};
use super::kernels::{self, copy_into, scalar_number};
use super::observed::Observed;
use super::pending_exchanges;
use super::ranks::{Group, group};
use super::recorder::Recorder;
use super::specialization::{NodeForm, Specialization, SpecializationKey};
use super::step::{Given, Step};
use super::train_state::Weight;
use super::transfers;
use super::values::Values;
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::analysis::device::round_up;
use ckpt_passes::analysis::liveness::Liveness;
use ckpt_passes::analysis::sdpa::SdpaBackends;
use ckpt_passes::error::Kind;
use ckpt_passes::ir::op::{DeviceKind, Effect};
use ckpt_passes::ir::{Def, Graph, Id, Tensor as Constant, Ty, ValueId};
use ckpt_passes::ops::collective::{
    DATA_PARALLEL, OwnPart, Part, is_sharded, own_parts, reads_contents,
};
use ckpt_passes::ops::grouped;
use ckpt_passes::transform::optimizer::held_by_name;
use ckpt_passes::{Error, Result};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;
use tch::Tensor;

/// A callback that receives the number of finished steps.
type Watch<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// A graph made ready to run.
pub struct Program<'g> {
    graph: &'g Graph,
    place: Place,
    rng: Rng,
    use_arena: bool,
    /// The fused attention kernels that nodes may use.
    available: SdpaBackends,
    steps: Vec<Step<'g>>,
    inputs: Vec<Input>,
    outputs: Vec<(String, usize)>,
    /// Bytes of weights and constants.
    weight_bytes: u64,
    /// Slots of inputs and results, which are empty between runs.
    passing: Vec<usize>,
    check: Check,
    pub(super) values: RefCell<Values>,
    specialization: RefCell<Option<Rc<Specialization>>>,
    pub(super) captures: RefCell<Captures>,
}

/// What a rank has of a tensor.
pub(super) struct Shard {
    /// The name of the whole.
    pub whole: String,
    /// Its size.
    pub dims: Vec<i64>,
    /// Which part it is, and the ranks that have the others.
    pub part: Option<(Group, Part)>,
    /// The ranks that have the other slices, and the size of what they are slices of.
    pub slices: Option<(Group, Vec<i64>)>,
    /// Whether it is a state, not a parameter.
    pub is_state: bool,
    /// Whether no step changes it.
    pub is_frozen: bool,
}

/// The outputs and measurements of a run.
pub struct Run {
    /// Graph outputs by name.
    pub outputs: Vec<(String, Tensor)>,
    /// Weights, constants and inputs.
    pub static_bytes: u64,
    /// The most bytes alive at once, static ones included.
    pub peak_bytes: u64,
    /// The peak of requested bytes, before the allocator rounded blocks up; differs on a device only.
    pub requested_peak_bytes: u64,
    /// The most bytes in the swap store at once.
    pub outside_peak_bytes: u64,
    /// The step at which the peak was first reached.
    pub peak_at: Option<String>,
    /// Elapsed time of the steps and their transfers, in µs, without moving inputs and checking results.
    pub time_us: u64,
    /// Processor time of all threads during the run.
    pub cpu_us: u64,
    /// Bytes of the process's own pages that are in memory, right after the run; `None` where the system does not say.
    pub resident_bytes: Option<u64>,
    /// Ops for which the device has no deterministic kernel.
    pub nondeterministic: BTreeSet<&'static str>,
    /// Names of nodes that chose among equal elements, where PyTorch leaves the choice open.
    pub ties: BTreeSet<String>,
    /// Whether the step was replayed as a CUDA graph. Its memory figures are then those of the captured step.
    pub is_replayed: bool,
}

/// Returns the processor time of this process, in microseconds.
pub(super) fn cpu_us() -> u64 {
    cpu_ns() / 1_000
}

/// Returns the processor time of this process, in nanoseconds.
pub(super) fn cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one place to write to. The clock is there on every system that libtorch runs on.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns a weight whose bytes are there.
fn weight(name: &str, constant: &Constant) -> Result<Weight> {
    constant.bytes().ok_or_else(|| convert::absent(name))?;
    convert::kind(constant.dtype)?;
    Ok(Weight::Constant(constant.clone()))
}

/// Returns a tensor of a weight's type that takes no memory, for a weight whose contents nothing reads.
fn stand_in(constant: &Constant) -> Result<Tensor> {
    let dims: Vec<i64> = constant.dims.iter().map(|d| *d as i64).collect();
    zeros_of((convert::kind(constant.dtype)?, tch::Device::Cpu), &dims)
}

/// Returns zeros that take the memory of one element.
fn zeros_of(options: (tch::Kind, tch::Device), dims: &[i64]) -> Result<Tensor> {
    let zero = Tensor::f_zeros([1], options).and_then(|zero| zero.f_reshape(vec![1; dims.len()]));
    let zeros = zero.and_then(|zero| zero.f_expand(dims, false));
    zeros.map_err(|e| convert::tch_error(&e))
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

    /// As [`Program::new`], for a place.
    ///
    /// # Errors
    /// As [`Program::new`]; a device that is not there or too small for the weights.
    pub fn at(graph: &'g Graph, place: Place) -> Result<Program<'g>> {
        Program::with_weights(graph, place, &|_| None)
    }

    /// As [`Program::at`], with other tensors for some weights, by name. They are not copied where they lie at the place.
    ///
    /// # Errors
    /// As [`Program::at`].
    pub(super) fn with_weights(
        graph: &'g Graph,
        place: Place,
        given: &dyn Fn(&str) -> Option<Tensor>,
    ) -> Result<Program<'g>> {
        device::of(place).open()?;
        let mut values = Values::new(graph, place);
        let mut weight_bytes = 0;
        for (id, value) in graph.inits() {
            let Def::Init(constant) = &value.def else {
                continue;
            };
            if is_sharded(graph, id) {
                let stand_in = Weight::Tensor(stand_in(constant)?);
                values.set_weight(slot(id), stand_in)?;
            } else if reads_contents(graph, id) {
                let weight = match given(&value.name) {
                    Some(tensor) => Weight::Tensor(tensor),
                    None => weight(&value.name, constant)?,
                };
                values.set_weight(slot(id), weight)?;
                weight_bytes += round_up(constant.size_bytes(), place.granularity_bytes());
            }
        }
        let liveness = Liveness::new(graph);
        let (frees, arrivals) = (liveness.frees(graph), liveness.arrivals);
        let mut steps = Vec::with_capacity(graph.order().len());
        for ((id, frees), arrivals) in graph.order().iter().zip(frees).zip(arrivals) {
            let node = graph.node(*id);
            let Some(kernel) = kernels::find(node.op) else {
                return Err(Error::model(
                    "op",
                    format!("the runtime cannot execute {}", node.op_name()),
                )
                .at(graph.describe(*id)));
            };
            steps.push(Step {
                id: *id,
                node,
                kernel,
                ins: node.ins.iter().map(|v| v.map(slot)).collect(),
                outs: node.outs.iter().map(|v| slot(*v)).collect(),
                frees: frees.into_iter().map(slot).collect(),
                arrivals: arrivals.into_iter().map(slot).collect(),
                may_overlap: transfers::may_overlap(graph, *id),
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
        let is_written = |id| values.train_state.is_written(slot(id));
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
            available: SdpaBackends::default(),
            steps,
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            weight_bytes,
            passing,
            check: Check::default(),
            values: RefCell::new(values),
            specialization: RefCell::new(None),
            captures: RefCell::default(),
        })
    }

    /// Sets the directory for offloaded tensors.
    pub fn wait_in(&mut self, folder: PathBuf) {
        self.values.get_mut().store.folder = Some(folder);
    }

    /// Sets whether transfers run beside the nodes after them.
    pub fn use_streams(&mut self, wanted: bool) {
        self.values.get_mut().overlap_transfers = wanted;
    }

    /// Sets whether the host pages that hold a device's offloaded tensors are locked. The CPU has no such pages.
    pub fn pin_memory(&mut self, wanted: bool) {
        self.values.get_mut().store.pins = wanted && !device::of(self.place).is_host();
    }

    /// Returns why host pages are not locked although they should be.
    pub fn pins_refused(&self) -> Option<String> {
        self.values.borrow().store.refused()
    }

    /// Sets where random ops draw from.
    pub fn draw_by(&mut self, rng: Rng) {
        self.rng = rng;
        self.captures.get_mut().forget();
    }

    /// Sets whether steps are replayed as CUDA graphs, where they can be captured ([`capture`](super::capture)). The next
    /// run then overwrites the outputs of this one.
    pub fn use_graphs(&mut self, wanted: bool) {
        self.captures = RefCell::default();
        if wanted {
            self.captures.get_mut().record(self.place);
        }
    }

    /// Returns why steps are not captured although they should be.
    pub fn graphs_refused(&self) -> Option<String> {
        self.captures.borrow().refused()
    }

    /// Returns the bytes that stay on the device between runs for the sake of captured steps.
    pub fn staying_bytes(&self) -> u64 {
        let values = self.values.borrow();
        let all = values.train_state.places().chain(values.staying());
        all.map(|t| self.block_bytes(t)).sum()
    }

    fn block_bytes(&self, tensor: &Tensor) -> u64 {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        round_up(bytes as u64, self.place.granularity_bytes())
    }

    /// Sets whether storages lie in an arena, where one can be planned: on a CPU, if no size depends on data.
    pub fn use_arena(&mut self, wanted: bool) {
        self.use_arena = wanted;
        *self.specialization.get_mut() = None;
    }

    /// Sets the kind of device whose blocks kernels use, instead of that of the place.
    pub fn use_blocks_of(&mut self, device: DeviceKind) {
        self.values.get_mut().blocks_of = device;
        *self.specialization.get_mut() = None;
    }

    /// Sets the fused kernels that attention may use; none by default.
    pub fn attend_with(&mut self, available: SdpaBackends) {
        self.available = available;
        *self.specialization.get_mut() = None;
    }

    /// Replaces a weight for this program. Bytes that are mapped stay mapped until they are copied for a run.
    ///
    /// # Errors
    /// The shape or element type differs from the model's.
    pub fn override_weight(&mut self, id: ValueId, constant: &Constant) -> Result<()> {
        let value = self.graph.value(id);
        if is_sharded(self.graph, id) {
            return Ok(());
        }
        if constant.ty() != *value.ty() {
            let what = format!("`{}` cannot take this tensor", value.name);
            return Err(Error::usage("input", what)
                .expected(value.ty().to_string())
                .found(constant.ty().to_string()));
        }
        self.captures.get_mut().forget();
        let weight = weight(&value.name, constant)?;
        self.values.get_mut().set_weight(slot(id), weight)
    }

    /// Sets whether a run starts from the parameters and optimizer states that the last one left. The next run starts
    /// from the given ones.
    pub fn go_on(&self, wanted: bool) {
        self.values.borrow_mut().train_state.go_on(wanted);
    }

    /// Returns zeros of an optimizer state's type that take no memory, for a first run; `None` for any other input.
    pub(super) fn first_state(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(input) = self.inputs.iter().find(|i| i.name == name) else {
            return Ok(None);
        };
        let is_state = self.values.borrow().train_state.is_written(input.slot);
        let Some(dims) = input.ty.static_dims().filter(|_| is_state) else {
            return Ok(None);
        };
        let options = (convert::kind(input.ty.dtype)?, tch::Device::Cpu);
        zeros_of(options, &dims).map(Some)
    }

    /// Returns the parameters and optimizer states that the last run left, by name, if runs go on from them
    /// ([`Program::go_on`]).
    pub fn state(&self) -> BTreeMap<String, Tensor> {
        let values = self.values.borrow();
        let kept = values.train_state.kept();
        let written = self.graph.values();
        let written = written.filter_map(|(id, value)| {
            Some((value.name.clone(), kept.get(&slot(id))?.shallow_clone()))
        });
        written.collect()
    }

    /// Returns, by name, the slices and parts of parameters and states that this rank holds. A checkpoint holds these tensors
    /// whole. Slices of states are left out where each rank writes its own.
    pub(super) fn shards(&self) -> BTreeMap<String, Shard> {
        let all = held_by_name(self.graph);
        let has_parts = all.values().any(|held| held.part.is_some());
        let shards = all.into_iter().filter_map(|(name, held)| {
            let is_state = name == held.whole;
            let is_frozen = !self.is_written(&name);
            let is_whole = held.part.is_none() && (held.slices == 1 || (is_state && !has_parts));
            let dims = self.graph.ty(held.parameter).static_dims()?;
            let own = match &held.part {
                Some(part) => part.ty(self.graph).static_dims()?,
                None => dims.clone(),
            };
            let slices = match held.slices {
                1 => None,
                ranks => Some((group(DATA_PARALLEL, ranks).ok()?, own)),
            };
            let part = match held.part {
                Some(of) => Some((group(&of.group, of.ranks).ok()?, of.part)),
                None => None,
            };
            let shard = Shard {
                whole: held.whole,
                dims,
                part,
                slices,
                is_state,
                is_frozen,
            };
            (!is_whole).then_some((name, shard))
        });
        shards.collect()
    }

    /// Returns true for a parameter or state that a step overwrites.
    fn is_written(&self, name: &str) -> bool {
        let id = self.graph.find_value(name);
        id.is_some_and(|id| self.values.borrow().train_state.is_written(slot(id)))
    }

    /// Returns the tensor of a weight or state, as it is between two runs. A parameter that no step changes is that of the model,
    /// though this rank has a part of it.
    ///
    /// # Errors
    /// A weight whose file is absent.
    pub(super) fn weight(&self, name: &str) -> Result<Option<Tensor>> {
        let Some(id) = self.graph.find_value(name) else {
            return Ok(None);
        };
        if let (true, Def::Init(constant)) = (is_sharded(self.graph, id), &self.graph.value(id).def)
        {
            let mut parts = own_parts(self.graph).into_iter();
            let is_frozen = |part: OwnPart| {
                part.parameter == id && !self.is_written(&self.graph.value(part.input).name)
            };
            return match parts.any(is_frozen) {
                true => convert::tensor(name, constant).map(Some),
                false => Ok(None),
            };
        }
        let slot = slot(id);
        let values = self.values.borrow();
        let kept = values.train_state.kept().get(&slot);
        if let Some(tensor) = kept.or(values.tensors[slot].as_ref()) {
            return Ok(Some(tensor.shallow_clone()));
        }
        match (values.train_state.given(slot), &self.graph.value(id).def) {
            (Some(given), _) => given.tensor().map(Some),
            (None, Def::Init(constant)) => convert::tensor(name, constant).map(Some),
            (None, _) => Ok(None),
        }
    }

    /// Sets what a run on the host checks after each node.
    pub(super) fn check(&mut self, check: Check) {
        self.check = match device::of(self.place).is_host() {
            true => check,
            false => Check::Nothing,
        };
    }

    /// Returns the program compiled for inputs of these sizes. It is kept until inputs have other sizes.
    ///
    /// # Errors
    /// An input that is missing or does not fit its type; a size that has no number.
    pub fn specialization(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Rc<Specialization>> {
        let dims = inputs::bind(&self.inputs, inputs)?.into_iter().collect();
        // Copies that a run overwrites are row-major, whatever they are copies of.
        let row_major = self.inputs.iter().all(|i| {
            inputs[&i.name].is_contiguous() || self.values.borrow().train_state.is_written(i.slot)
        });
        let key = SpecializationKey { dims, row_major };
        let mut kept = self.specialization.borrow_mut();
        if let Some(specialization) = &*kept
            && specialization.is_for(&key)
        {
            return Ok(specialization.clone());
        }
        let blocks_of = self.values.borrow().blocks_of;
        let specialization = Specialization::new(
            self.graph,
            (self.place, blocks_of),
            key,
            self.use_arena,
            &self.available,
        )?;
        let specialization = Rc::new(specialization);
        *kept = Some(specialization.clone());
        Ok(specialization)
    }

    /// Runs the graph once. Where sizes depend on data, every node runs its own kernel.
    ///
    /// # Errors
    /// An input that is missing or does not fit its type; a kernel that fails: the error names the node.
    pub fn run(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Run> {
        self.run_watched(inputs, None)
    }

    /// Runs the graph once, node by node. Calls `watch` before the first step and after each, with the number of finished
    /// steps.
    pub(super) fn watched(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        watch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Run> {
        self.run_watched(inputs, Some(watch))
    }

    fn run_watched(&self, inputs: &BTreeMap<String, Tensor>, watch: Option<Watch>) -> Result<Run> {
        inputs::bind(&self.inputs, inputs)?;
        let specialization = match self.specialization(inputs) {
            Ok(specialization) => Some(specialization),
            Err(e) if e.kind() == Kind::Environment => return Err(e),
            Err(_) => None,
        };
        let mut values = self.values.borrow_mut();
        let mut captures = self.captures.borrow_mut();
        let mode = captures.mode(watch.is_some(), specialization.as_ref(), || {
            self.uncaptured(specialization.as_deref(), &values)
        });
        values.prepare(mode);
        let mut unwatched = |_| Ok(());
        let watch = watch.unwrap_or(&mut unwatched);
        let recorder = captures.recorder();
        let specialization = specialization.as_ref();
        let mut run = || {
            self.run_as(
                specialization,
                inputs,
                &mut values,
                &mut captures,
                mode,
                watch,
            )
        };
        let done = match recorder {
            None => run(),
            Some(recorder) => {
                let mut done = None;
                let aside = recorder.aside(&mut || {
                    done = Some(run()?);
                    // Outputs are read on another stream.
                    device::of(self.place).synchronize()
                });
                aside.and_then(|()| done.ok_or_else(|| Error::bug("run", "nothing was run")))
            }
        };
        // Whatever became of the run, none of its transfers is under way afterwards.
        drop(values.transfers.finish());
        pending_exchanges::finish();
        if done.is_err() {
            let values = &mut *values;
            values.train_state.recover(&values.tensors);
        }
        values.clear(&self.passing);
        done
    }

    fn run_as(
        &self,
        specialization: Option<&Rc<Specialization>>,
        inputs: &BTreeMap<String, Tensor>,
        values: &mut Values,
        captures: &mut Captures,
        mode: StepMode,
        watch: Watch,
    ) -> Result<Run> {
        let _no_grad = tch::no_grad_guard();
        values.draws = Draws::new(self.rng);
        let mut static_bytes = self.weight_bytes;
        for input in &self.inputs {
            let tensor = &inputs[&input.name];
            static_bytes += self.block_bytes(tensor);
            let there = values.train_state.input(input.slot, tensor, self.place)?;
            values.tensors[input.slot] = Some(there);
        }
        let weights = &mut values.tensors;
        values.train_state.own_weights(weights, self.place)?;
        if let Some(specialization) = specialization.filter(|_| mode != StepMode::Plain) {
            self.fix_draws(specialization, inputs, values)?;
            if values.check_room.is_none() {
                let device = device::of(self.place).device();
                values.check_room = Some(DeferredChecks::room(self.steps.len(), device)?);
            }
        }
        device::of(self.place).synchronize()?;
        device::of(self.place).reset_peak()?;
        values.store.reset_peak();
        let (start, start_cpu_us) = (Instant::now(), cpu_us());
        let (stats, checks, is_replayed) =
            self.run_step(specialization, values, captures, mode, watch)?;
        values.transfers.finish()?;
        device::of(self.place).synchronize()?;
        let time_us = start.elapsed().as_micros() as u64;
        let cpu_us = cpu_us() - start_cpu_us;
        let explained = |at: usize, error| {
            let id = self.steps[at].id;
            index_errors::explained(self.graph, id, values, error).at(self.graph.describe(id))
        };
        match (&checks, is_replayed) {
            (Some(checks), _) => checks.verify(explained)?,
            (None, true) => captures.ready()?.checks.verify(explained)?,
            (None, false) => {}
        }
        values.train_state.keep(&values.tensors)?;
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (name, slot) in &self.outputs {
            let tensor = values.tensors[*slot]
                .as_ref()
                .ok_or_else(|| Error::bug("run", format!("output `{name}` is gone")))?;
            outputs.push((name.clone(), tensor.shallow_clone()));
        }
        // These tensors stay for the sake of a capture.
        static_bytes += values.staying().map(|t| self.block_bytes(t)).sum::<u64>();
        Ok(Run {
            outputs,
            static_bytes,
            peak_bytes: static_bytes + stats.peak_bytes,
            requested_peak_bytes: static_bytes + stats.requested_bytes,
            outside_peak_bytes: stats.outside_bytes,
            peak_at: stats.peak_at.map(|at| self.steps[at].node.name.clone()),
            time_us,
            cpu_us,
            resident_bytes: device::resident_bytes(),
            ties: stats
                .observed
                .ties
                .iter()
                .map(|id| self.graph.node(*id).name.clone())
                .collect(),
            nondeterministic: stats.observed.nondeterministic,
            is_replayed,
        })
    }

    /// Runs the step. Returns its measurements, the checks to verify once it is done, and whether it was replayed.
    fn run_step(
        &self,
        specialization: Option<&Rc<Specialization>>,
        values: &mut Values,
        captures: &mut Captures,
        mode: StepMode,
        watch: Watch,
    ) -> Result<(StepStats, Option<CheckResults>, bool)> {
        let (Some(specialization), Some(recorder), true) =
            (specialization, captures.recorder(), mode != StepMode::Plain)
        else {
            let plan = specialization.map(Rc::as_ref);
            return Ok((self.steps_of(plan, values, None, watch)?, None, false));
        };
        if mode == StepMode::WarmUp {
            let deferred = DeferredChecks::in_room(values.check_room.as_ref());
            let stats = self.steps_of(Some(specialization), values, Some(&deferred), watch)?;
            captures.set_warm(specialization);
            return Ok((stats, Some(deferred.results()?), false));
        }
        if mode == StepMode::Capture {
            match self.captured(specialization, values, &*recorder) {
                Ok(recorded) => captures.set_ready(specialization, recorded),
                Err(e) => {
                    captures.give_up(&e);
                    values.uploads = None;
                    values.store.maps = true;
                    drop(values.transfers.finish());
                    values.clear(self.steps.iter().flat_map(|step| &step.outs));
                    device::of(self.place).reset_peak()?;
                    return Ok((
                        self.steps_of(Some(specialization), values, None, watch)?,
                        None,
                        false,
                    ));
                }
            }
        }
        let recorded = captures.ready()?;
        self.replay(specialization, values, recorded)?;
        Ok((recorded.stats.clone(), None, true))
    }

    /// Runs the nodes in order.
    pub(super) fn steps_of(
        &self,
        specialization: Option<&Specialization>,
        values: &mut Values,
        deferred: Option<&DeferredChecks>,
        watch: Watch,
    ) -> Result<StepStats> {
        let base = device::of(self.place).bytes()?;
        let mut peak = (base.live_bytes, None);
        let mut observed = Observed::default();
        watch(0)?;
        for (at, step) in self.steps.iter().enumerate() {
            if let Some(deferred) = deferred {
                deferred.at.set(at);
            }
            let form = specialization.map_or(&NodeForm::Kernel, |s| &s.forms[at]);
            let given = Given {
                known: specialization.map_or(&[][..], |s| &s.known),
                overwrites: specialization.and_then(|s| s.overwrites[at]),
                pair: specialization.and_then(|s| s.pinned.backends[at]),
                deferred,
            };
            let offer = specialization.and_then(|s| s.arena.as_ref()?.offer(at));
            let arrived = step.arrivals.iter().try_for_each(|s| values.arrive(*s));
            arrived
                .and_then(|()| step.run(form, given, values, &mut observed))
                .and_then(|()| self.check.after(step, values, self.graph))
                .map_err(|e| index_errors::explained(self.graph, step.id, values, e))
                .map_err(|e| e.at(self.graph.describe(step.id)))?;
            drop(offer);
            let reached = device::of(self.place).bytes()?.peak_bytes;
            if reached > peak.0 {
                peak = (reached, Some(at));
            }
            values.clear(specialization.map_or(&step.frees, |s| &s.frees[at]));
            watch(at + 1)?;
        }
        let most = device::of(self.place).bytes()?.requested_peak_bytes;
        Ok(StepStats {
            peak_bytes: peak.0 - base.live_bytes,
            requested_bytes: most.saturating_sub(base.requested_live_bytes),
            outside_bytes: values.store.peak_bytes(),
            peak_at: peak.1,
            observed,
        })
    }

    /// Returns how many nodes a run executes.
    pub fn nodes(&self) -> usize {
        self.steps.len()
    }

    /// Returns whether the node at a position of the order moves a value out of the device's memory or back.
    pub(super) fn is_transfer(&self, at: usize) -> bool {
        self.steps[at].node.op.is_transfer()
    }

    /// Returns the place where the program runs.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns names and types of the graph inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &Ty)> {
        self.inputs.iter().map(|i| (i.name.as_str(), &i.ty))
    }

    /// Captures a step whose inputs lie at fixed addresses.
    pub(super) fn captured(
        &self,
        specialization: &Specialization,
        values: &mut Values,
        recorder: &dyn Recorder,
    ) -> Result<CapturedStep> {
        let mut made = None;
        let recording = recorder.capture(&mut || {
            let deferred = DeferredChecks::in_room(values.check_room.as_ref());
            let stats =
                self.steps_of(Some(specialization), values, Some(&deferred), &mut |_| {
                    Ok(())
                })?;
            // The copies that nothing waited for belong to the step.
            values.transfers.join()?;
            made = Some((stats, deferred.results()?));
            Ok(())
        })?;
        values.store.maps = true;
        let (stats, checks) =
            made.ok_or_else(|| Error::bug("run", "what was captured is no step"))?;
        let outlive = self.outputs.iter().map(|(_, slot)| *slot);
        let slots: BTreeSet<usize> = outlive.chain(values.train_state.results()).collect();
        let result = |slot: usize| Some((slot, values.tensors[slot].as_ref()?.shallow_clone()));
        Ok(CapturedStep {
            recording,
            results: slots.into_iter().filter_map(result).collect(),
            checks,
            stats,
        })
    }

    /// Replays a captured step, whose results lie at fixed addresses.
    pub(super) fn replay(
        &self,
        specialization: &Specialization,
        values: &mut Values,
        recorded: &CapturedStep,
    ) -> Result<()> {
        recorded.recording.replay(&mut || {
            let deferred = DeferredChecks::in_room(values.check_room.as_ref());
            self.steps_of(Some(specialization), values, Some(&deferred), &mut |_| {
                Ok(())
            })?;
            for (slot, result) in &recorded.results {
                if let Some(new) = &values.tensors[*slot] {
                    copy_into(result, new)?;
                }
            }
            match (&recorded.checks.numbers, deferred.results()?.numbers) {
                (Some(numbers), Some(new)) => copy_into(numbers, &new),
                _ => Ok(()),
            }
        })?;
        for (slot, result) in &recorded.results {
            values.tensors[*slot] = Some(result.shallow_clone());
        }
        Ok(())
    }

    /// Computes what random nodes draw by, for a step that must not wait for the device.
    fn fix_draws(
        &self,
        specialization: &Specialization,
        inputs: &BTreeMap<String, Tensor>,
        values: &mut Values,
    ) -> Result<()> {
        let random = || self.steps.iter().filter_map(|step| step.key());
        if random().next().is_none() {
            return Ok(());
        }
        let fixed = match &values.fixed_draws {
            Some(fixed) => fixed.clone(),
            None => {
                let mut ratios = BTreeMap::new();
                for slot in self.steps.iter().filter_map(Step::ratio) {
                    if let Some(ratio) = &values.tensors[slot] {
                        ratios.insert(slot, scalar_number(ratio)?);
                    }
                }
                let device = device::of(self.place).device();
                Rc::new(FixedDraws::new(random(), ratios, device)?)
            }
        };
        fixed.fill(|slot| {
            let unknown = || Error::bug("run", "the host does not know a seed or a stream");
            let Some(input) = self.inputs.iter().find(|input| input.slot == slot) else {
                return specialization.number(slot).ok_or_else(unknown);
            };
            let given = &inputs[&input.name];
            let number = given.f_int64_value(&vec![0; given.dim()]);
            number.map_err(|e| convert::tch_error(&e))
        })?;
        values.draws.fixed = Some(fixed.clone());
        values.fixed_draws = Some(fixed);
        Ok(())
    }

    /// Returns why no step of these sizes can be captured.
    fn uncaptured(
        &self,
        specialization: Option<&Specialization>,
        values: &Values,
    ) -> Option<String> {
        let Some(specialization) = specialization.filter(|s| s.is_static) else {
            return Some("sizes depend on data, or an input is not row-major".into());
        };
        let mut steps = self.steps.iter();
        steps.find_map(|step| {
            let name = step.node.op.name;
            if step.node.op.is_transfer() {
                let reason = step.uncaptured(values)?;
                return Some(format!("{name} moves results by way of the host: {reason}"));
            }
            if grouped::ROWS.contains(&step.node.op) {
                return Some(format!(
                    "{name} waits until the host has read the groups of rows"
                ));
            }
            if step.node.op.effect != Effect::Seeded {
                return None;
            }
            if self.rng != Rng::Counter {
                return Some(format!("{name} draws from a generator on the host"));
            }
            let is_input = |slot| self.inputs.iter().any(|input| input.slot == slot);
            let is_known = |slot| is_input(slot) || specialization.number(slot).is_some();
            // A weight stays on the device between runs.
            let is_weight = |slot| !self.passing.contains(&slot);
            let has_key = step.key().is_some_and(|(a, b)| is_known(a) && is_known(b));
            let draws_by_weights = has_key && step.ratio().is_none_or(is_weight);
            (!draws_by_weights).then(|| format!("{name} draws by numbers that the step computes"))
        })
    }
}

#[cfg(test)]
mod tests;
