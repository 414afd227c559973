//! A graph made ready to run, for callers that do not know libtorch: plain tensors in, plain tensors out.

use super::convert::{self, torch_error};
use super::device;
use super::executor::Program;
use super::kernels::attention::pairs::Available;
use super::kernels::attention::pairs::pinned::Taken;
use super::trace::Moment;
use crate::attention::Attention;
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::{Error, Result};
use ckpt_torch::{bytes, memory};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Threads that one kernel may use now.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// A graph with its weights in place.
pub struct Session<'g> {
    program: Program<'g>,
    goes_on: bool,
    /// Bytes of library workspaces that the device's allocator gave out; known once a first step has run.
    workspace_bytes: Cell<Option<u64>>,
    /// Resident bytes once weights were in place.
    resident_before: Option<u64>,
}

/// What one run measured, beside what was predicted for it.
#[derive(Clone, Debug)]
pub struct Measured {
    pub outputs: BTreeMap<String, Tensor>,
    pub predicted_peak_bytes: u64,
    pub peak_bytes: u64,
    /// The largest sum of what was asked for, before the device's allocator rounded it.
    pub requested_peak_bytes: u64,
    /// The most bytes that waited outside the device's memory, and what was predicted of them.
    pub outside_peak_bytes: u64,
    pub predicted_outside_bytes: u64,
    pub static_bytes: u64,
    /// What libraries keep beside the peak out of the framework's allocator: on a device all that they took in a first
    /// step, on the CPU the largest block that a product packed its operands in.
    pub workspace_bytes: Option<u64>,
    /// Bytes reserved for results and temporaries, of which the plan says what lies where; 0 without an arena.
    pub arena_bytes: u64,
    /// Growth of the process's own resident pages since weights were in place, outputs of the run included; `None` where the
    /// system does not say.
    pub resident_bytes: Option<u64>,
    /// Ops for which the device has no deterministic kernel.
    pub nondeterministic: BTreeSet<&'static str>,
    /// Which kernels nodes of attention take.
    pub attention: Taken,
    /// Why PyTorch's kernels of attention are not taken where they could be.
    pub attention_refused: BTreeSet<String>,
    /// The node at which the peak was first reached.
    pub peak_at: Option<String>,
    pub time_us: u64,
    /// Processor time of all threads.
    pub cpu_us: u64,
    /// Whether the device was sent the step as one; figures of its memory are then those of the step that was captured.
    pub is_replayed: bool,
}

impl<'g> Session<'g> {
    /// Chooses kernels; `weights` replace initializers of the same name.
    ///
    /// # Errors
    /// See [`Program::new`] and [`Program::override_weight`].
    pub fn new(
        graph: &'g Graph,
        weights: &BTreeMap<String, Tensor>,
        threads: Option<u16>,
        place: Place,
        rng: Rng,
    ) -> Result<Session<'g>> {
        // Before anything else asks libtorch about devices.
        device::open(place)?;
        if let Some(n) = threads {
            tch::set_num_threads(i32::from(n));
        }
        let mut program = Program::at(graph, place)?;
        program.draw_by(rng);
        program.pin_memory(true);
        for (id, value) in graph.inits() {
            if let Some(tensor) = weights.get(&value.name) {
                program.override_weight(id, convert::tensor(&value.name, tensor)?)?;
            }
        }
        let mut session = Session {
            program,
            goes_on: false,
            workspace_bytes: Cell::new(None),
            resident_before: device::resident_bytes(),
        };
        session.attend_by(Attention::default());
        Ok(session)
    }

    /// Whether results and temporaries lie in an arena from now on; they do where one can be planned.
    pub fn use_arena(&mut self, wanted: bool) {
        self.program.use_arena(wanted);
    }

    /// Which kernels of attention nodes may take from now on; unless told otherwise, PyTorch's where a device has them.
    pub fn attend_by(&mut self, attention: Attention) {
        self.program.attend_with(match attention {
            Attention::Auto => device::pairs(self.program.place()),
            Attention::Tiles => Available::default(),
        });
    }

    /// Whether each step starts from the parameters and states that the last one left, not from those that are given.
    pub fn go_on(&mut self, wanted: bool) {
        self.goes_on = wanted;
        self.program.go_on(wanted);
    }

    /// A step, node by node in the order of the schedule.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn trace(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Vec<Moment>> {
        Ok(self.program.run_traced(&self.given(inputs)?)?.1)
    }

    /// The folder in which results wait that leave the device's memory for a file.
    pub fn wait_in(&mut self, folder: PathBuf) {
        self.program.wait_in(folder);
    }

    /// Whether transfers run beside what follows them from now on; they do unless told otherwise.
    pub fn use_streams(&mut self, wanted: bool) {
        self.program.use_streams(wanted);
    }

    /// Whether the host's memory in which results of a device wait is locked from now on; it is unless told otherwise. On a
    /// CPU it means nothing.
    pub fn pin_memory(&mut self, wanted: bool) {
        self.program.pin_memory(wanted);
    }

    /// What there is to warn of where memory should be locked and is not.
    pub fn pins_warning(&self) -> Option<String> {
        let why = self.program.pins_refused()?;
        Some(format!(
            "the host's memory in which results wait is not locked: {why}; transfers are slower and run one after the other"
        ))
    }

    /// Whether a CUDA device is sent steps as one from now on, where they can be captured.
    pub fn use_graphs(&mut self, wanted: bool) {
        self.program.use_graphs(wanted);
    }

    /// What there is to warn of where steps should be sent as one and are not.
    pub fn graphs_warning(&self) -> Option<String> {
        let why = self.program.graphs_refused()?;
        Some(format!("steps are not replayed as CUDA graphs: {why}"))
    }

    /// What each node takes, in microseconds in the order of the schedule: a row a run. The first `warm_up` runs are not
    /// reported.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn time_nodes(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        warm_up: u32,
        runs: u32,
    ) -> Result<Vec<Vec<f64>>> {
        let given = self.given(inputs)?;
        for _ in 0..warm_up {
            self.program.run_timed(&given)?;
        }
        (0..runs)
            .map(|_| Ok(self.program.run_timed(&given)?.1))
            .collect()
    }

    /// The graph's inputs as libtorch's tensors.
    fn given(&self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, tch::Tensor>> {
        let mut given = BTreeMap::new();
        for (name, _) in self.program.inputs() {
            if let Some(tensor) = inputs.get(name) {
                given.insert(name.to_string(), convert::tensor(name, tensor)?);
            }
        }
        Ok(given)
    }

    /// Runs once; on a device the first time twice, so that the libraries have their workspaces before anything is
    /// measured.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn run(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Measured> {
        self.step(inputs, true)
    }

    /// The same; without `outputs` they are dropped as the run ends.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn step(&self, inputs: &BTreeMap<String, Tensor>, outputs: bool) -> Result<Measured> {
        let wanted = outputs;
        let given = self.given(inputs)?;
        let place = self.program.place();
        let schedule = self.program.schedule(&given)?;
        if place != Place::Cpu && self.workspace_bytes.get().is_none() {
            let before = device::bytes(place)?.live;
            drop(self.program.run(&given)?);
            self.program.go_on(self.goes_on);
            let grown = device::bytes(place)?.live.saturating_sub(before);
            let workspace_bytes = grown.saturating_sub(self.program.staying_bytes());
            self.workspace_bytes.set(Some(workspace_bytes));
        }
        let run = self.program.run(&given)?;
        let mut outputs = BTreeMap::new();
        for (name, tensor) in run.outputs.iter().filter(|_| wanted) {
            let tensor = device::moved(tensor.contiguous(), Place::Cpu)?;
            let dtype = convert::dtype(tensor.kind()).ok_or_else(|| {
                Error::bug(
                    "run",
                    format!("output `{name}` has kind {:?}", tensor.kind()),
                )
            })?;
            let dims: Vec<u64> = tensor.size().iter().map(|d| *d as u64).collect();
            let content = bytes::read(&tensor).map_err(torch_error)?;
            outputs.insert(name.clone(), Tensor::new(dtype, dims, content));
        }
        Ok(Measured {
            outputs,
            predicted_peak_bytes: schedule.memory.peak_bytes,
            peak_bytes: run.peak_bytes,
            requested_peak_bytes: run.requested_peak_bytes,
            workspace_bytes: match place {
                Place::Cpu => Some(memory::workspace_bytes()),
                _ => self.workspace_bytes.get(),
            },
            outside_peak_bytes: run.outside_peak_bytes,
            predicted_outside_bytes: schedule.memory.outside_peak_bytes,
            nondeterministic: run.nondeterministic,
            attention: schedule.taken(),
            attention_refused: schedule.pinned.refused.clone(),
            arena_bytes: schedule.arena_bytes(),
            resident_bytes: run
                .resident_bytes
                .zip(self.resident_before)
                .map(|(now, before)| now.saturating_sub(before)),
            static_bytes: run.static_bytes,
            peak_at: run.peak_at,
            time_us: run.time_us,
            cpu_us: run.cpu_us,
            is_replayed: run.is_replayed,
        })
    }
}
