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
use super::kernels::attention::pairs::{Available, Pair};
use super::kernels::{self, KernelCx};
use super::lanes;
use super::lifetimes::Lifetimes;
use super::operands::Operands;
use super::schedule::{Form, Key, Schedule};
use super::values::Values;
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::analysis::device::round_up;
use ckpt_passes::error::Kind;
use ckpt_passes::ir::{DType, Def, Graph, Id, Node, NodeId, Ty, ValueId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};
use ckpt_passes::{Error, Result};
use ckpt_torch::cuda;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;
use tch::Tensor;

/// A graph made ready to run.
pub struct Program<'g> {
    graph: &'g Graph,
    place: Place,
    rng: Rng,
    use_arena: bool,
    /// Pairs of kernels of attention that nodes may take.
    available: Available,
    steps: Vec<Step<'g>>,
    inputs: Vec<Input>,
    outputs: Vec<(String, usize)>,
    /// Bytes of weights and constants.
    weight_bytes: u64,
    /// Slots of inputs and results: empty between runs.
    passing: Vec<usize>,
    values: RefCell<Values>,
    schedule: RefCell<Option<Rc<Schedule>>>,
}

struct Step<'g> {
    id: NodeId,
    node: &'g Node,
    kernel: kernels::Kernel,
    ins: Vec<Option<usize>>,
    outs: Vec<usize>,
    /// Slots that nobody reads after this step.
    drops: Vec<usize>,
    /// Slots of what was fetched and is read here for the first time.
    joins: Vec<usize>,
    /// Whether it is a transfer that may run beside what follows it.
    is_beside: bool,
}

struct Input {
    name: String,
    ty: Ty,
    slot: usize,
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
        let Lifetimes { drops, joins } = Lifetimes::new(graph);
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
        self.values.get_mut().set_weight(slot(id), tensor)
    }

    /// Whether a run starts from the parameters and states that the last one left, not from those that are given.
    /// The next one starts from what is given.
    pub fn go_on(&self, wanted: bool) {
        self.values.borrow_mut().statics.go_on(wanted);
    }

    /// The sizes that the named dimensions of the inputs have in `inputs`.
    ///
    /// # Errors
    /// A missing input, one of the wrong type, sizes that contradict each other, a named size of 0.
    pub fn bind(&self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, i64>> {
        let mut sizes: BTreeMap<String, i64> = BTreeMap::new();
        for input in &self.inputs {
            let Some(tensor) = inputs.get(&input.name) else {
                return Err(
                    Error::usage("input", format!("input `{}` is missing", input.name))
                        .expected(input.ty.to_string()),
                );
            };
            self.bind_one(input, tensor, &mut sizes)?;
        }
        // A size such as `seq + 1` can only be checked once the names have numbers.
        for input in &self.inputs {
            let size_of = |name: &str| sizes.get(name).copied();
            for (dim, found) in input.ty.dims.iter().zip(inputs[&input.name].size()) {
                if dim.eval(&size_of).is_some_and(|n| n != found) {
                    return Err(wrong_shape(input, &inputs[&input.name])
                        .help(format!("sizes so far: {sizes:?}")));
                }
            }
        }
        Ok(sizes)
    }

    fn bind_one(
        &self,
        input: &Input,
        tensor: &Tensor,
        sizes: &mut BTreeMap<String, i64>,
    ) -> Result<()> {
        if convert::dtype(tensor.kind()) != Some(input.ty.dtype) || tensor.dim() != input.ty.rank()
        {
            return Err(wrong_shape(input, tensor));
        }
        for (dim, found) in input.ty.dims.iter().zip(tensor.size()) {
            let Some(name) = dim.as_symbol() else {
                continue;
            };
            if found == 0 {
                return Err(Error::usage(
                    "input",
                    format!("dimension `{name}` of input `{}` is 0", input.name),
                )
                .help("a named dimension is at least 1"));
            }
            let known = *sizes.entry(name.to_string()).or_insert(found);
            if known != found {
                return Err(wrong_shape(input, tensor)
                    .help(format!("`{name}` is {known} in another input")));
            }
        }
        Ok(())
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
        self.watched(inputs, &mut |_| Ok(()))
    }

    /// Runs the graph once; `watch` is called before the first step and after each, with how many are done.
    pub(super) fn watched(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        watch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Run> {
        self.bind(inputs)?;
        let schedule = match self.schedule(inputs) {
            Ok(schedule) => Some(schedule),
            Err(e) if e.kind() == Kind::Environment => return Err(e),
            Err(_) => None,
        };
        let mut values = self.values.borrow_mut();
        let done = self.run_as(schedule.as_deref(), inputs, &mut values, watch);
        values.lanes.abandon();
        for slot in &self.passing {
            values.tensors[*slot] = None;
            values.host[*slot] = None;
        }
        done
    }

    fn run_as(
        &self,
        schedule: Option<&Schedule>,
        inputs: &BTreeMap<String, Tensor>,
        values: &mut Values,
        watch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Run> {
        let _no_grad = tch::no_grad_guard();
        values.draws = Draws::new(self.rng);
        let mut static_bytes = self.weight_bytes;
        for input in &self.inputs {
            let tensor = &inputs[&input.name];
            let bytes = tensor.numel() as u64 * input.ty.dtype.size_bytes();
            static_bytes += round_up(bytes, self.place.granularity_bytes());
            let there = values.statics.input(input.slot, tensor, self.place)?;
            values.tensors[input.slot] = Some(there);
        }
        let weights = &mut values.tensors;
        values.statics.own_weights(weights, self.place)?;
        device::synchronize(self.place)?;
        device::reset_peak(self.place)?;
        values.outside.reset_peak();
        let base = device::bytes(self.place)?;
        let mut peak = (base.live, None);
        let mut nondeterministic = BTreeSet::new();
        let (start, start_cpu_us) = (Instant::now(), cpu_us());
        watch(0)?;
        for (at, step) in self.steps.iter().enumerate() {
            let form = schedule.map_or(&Form::Kernel, |s| &s.forms[at]);
            let known = schedule.map_or(&[][..], |s| &s.known);
            let over = schedule.and_then(|s| s.over[at]);
            let pair = schedule.and_then(|s| s.pinned.pairs[at]);
            let offer = schedule.and_then(|s| s.arena.as_ref()?.offer(at));
            let arrived = step.joins.iter().try_for_each(|s| values.lanes.arrive(*s));
            arrived
                .and_then(|()| step.run(form, (known, over, pair), values, &mut nondeterministic))
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
        values.lanes.arrive_all()?;
        device::synchronize(self.place)?;
        let time_us = start.elapsed().as_micros() as u64;
        let cpu_us = cpu_us() - start_cpu_us;
        let most = device::bytes(self.place)?.requested_peak;
        let requested_bytes = most.saturating_sub(base.requested_live);
        values.statics.keep(&values.tensors)?;
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (name, slot) in &self.outputs {
            let tensor = values.tensors[*slot]
                .as_ref()
                .ok_or_else(|| Error::bug("run", format!("output `{name}` is gone")))?;
            outputs.push((name.clone(), tensor.shallow_clone()));
        }
        Ok(Run {
            outputs,
            static_bytes,
            peak_bytes: static_bytes + (peak.0 - base.live),
            requested_peak_bytes: static_bytes + requested_bytes,
            outside_peak_bytes: values.outside.peak_bytes(),
            peak_at: peak.1.map(|at| self.steps[at].node.name.clone()),
            time_us,
            cpu_us,
            resident_bytes: device::resident_bytes(),
            nondeterministic,
        })
    }

    /// How many nodes a run executes.
    pub fn nodes(&self) -> usize {
        self.steps.len()
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

/// What a schedule gives a step beside its form: contents of small integer values, by slot, the operand that the first
/// result is written over, and the pair of kernels that is pinned to it.
type Given<'a> = (&'a [Option<Box<[i64]>>], Option<usize>, Option<Pair>);

impl Step<'_> {
    /// A kernel that has no deterministic form runs all the same, and its op is noted.
    fn run(
        &self,
        form: &Form,
        known: Given,
        values: &mut Values,
        nondeterministic: &mut BTreeSet<&'static str>,
    ) -> Result<()> {
        match form {
            Form::View {
                of,
                dims,
                strides,
                to,
            } => {
                let base = values.tensors[*of].as_ref().ok_or_else(|| self.gone())?;
                let view = ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                values.tensors[*to] = Some(view);
                // What is small and integral is needed on the CPU too.
                if let Some(base) = &values.host[*of] {
                    let view =
                        ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                    values.host[*to] = Some(view);
                }
                Ok(())
            }
            Form::Constant { contents, to } => values.set(*to, contents.tensor()?),
            Form::Kernel if self.is_beside && self.begin(values)? => Ok(()),
            Form::Kernel => match self.execute(known, values) {
                Err(e) if e.code() == convert::NONDETERMINISTIC => {
                    nondeterministic.insert(self.node.op.name);
                    cuda::refuse_nondeterministic(false);
                    let done = self.execute(known, values);
                    cuda::refuse_nondeterministic(true);
                    done
                }
                done => done,
            },
        }
    }

    /// A transfer, or the end of one, beside the run; `false` where it must be done at once.
    fn begin(&self, values: &mut Values) -> Result<bool> {
        let (lanes, outside, place) = (&mut values.lanes, &values.outside, values.place);
        let operand = |n: usize| self.ins.get(n).copied().flatten();
        let tensor = |n: usize| operand(n).and_then(|s| values.tensors[s].as_ref());
        let moved = tensor(0).ok_or_else(|| self.gone())?;
        let result = match self.node.op {
            op if op == &OFFLOAD => {
                return lanes.leave(outside, moved, &self.node.attrs, self.outs[0]);
            }
            op if op == &RELEASE => match operand(1) {
                Some(left) => lanes.left(left)?,
                None => None,
            },
            _ => lanes.come(outside, moved, (place, self.outs[0]))?,
        };
        let began = result.is_some();
        if began {
            values.tensors[self.outs[0]] = result;
        }
        Ok(began)
    }

    fn gone(&self) -> Box<Error> {
        let name = self.node.op.name;
        Error::bug("run", format!("an operand of {name} is gone"))
    }

    fn execute(&self, (known, over, pair): Given, values: &mut Values) -> Result<()> {
        let mut ins = Operands::new(&self.ins, &values.tensors);
        let mut host = Operands::new(&[], &values.host);
        if values.place != Place::Cpu {
            host = Operands::new(&self.ins, &values.host);
            let is_known = |(there, here): (&Option<&Tensor>, &Option<&Tensor>)| {
                there.is_none() || here.is_some()
            };
            // What follows from numbers that are known here is worked out here.
            if ins.list().iter().any(Option::is_some)
                && ins.list().iter().zip(host.list()).all(is_known)
            {
                ins = host;
                host = Operands::new(&[], &values.host);
            }
        }
        let cx = KernelCx {
            op: self.node.op,
            attrs: &self.node.attrs,
            ins: ins.list(),
            host: host.list(),
            known,
            draws: &values.draws,
            outside: &values.outside,
            slots: &self.ins,
            n_outs: self.outs.len(),
            over,
            pair,
        };
        let results = (self.kernel)(&cx)?;
        if results.len() != self.outs.len() {
            return Err(Error::bug(
                "kernel",
                format!("{} gave {} results", self.node.op.name, results.len()),
            ));
        }
        for (slot, tensor) in self.outs.iter().zip(results) {
            if self.node.op.is_transfer() && self.node.op != &FETCH {
                values.tensors[*slot] = Some(tensor);
            } else {
                values.set(*slot, tensor)?;
            }
        }
        Ok(())
    }
}

fn wrong_shape(input: &Input, tensor: &Tensor) -> Box<Error> {
    let dtype = convert::dtype(tensor.kind())
        .map_or_else(|| format!("{:?}", tensor.kind()), |d: DType| d.to_string());
    Error::usage(
        "input",
        format!("input `{}` has the wrong type", input.name),
    )
    .expected(input.ty.to_string())
    .found(format!("{dtype}{:?}", tensor.size()))
}
