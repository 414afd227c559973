//! A graph made ready to run, for callers that do not know libtorch: plain tensors in, plain tensors out.

use super::convert::{self, torch_error};
use super::device;
use super::executor::Program;
use super::finite::Check;
use super::kernels::collective::{gathered, whole_of};
use super::trace::Moment;
use crate::attention::Attention;
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::analysis::sdpa::SdpaBackends;
use ckpt_passes::analysis::sdpa::choice::AttentionKernels;
use ckpt_passes::error::Kind;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{DType, Graph, Id, Tensor, ValueId};
use ckpt_passes::ops::collective::own_parts;
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Returns how many threads one kernel may use now.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// A graph that is ready to run, with its weights.
pub struct Session<'g> {
    program: Program<'g>,
    goes_on: bool,
    /// Names of the outputs that are checked for numbers that are not finite.
    watched: BTreeSet<String>,
    /// Bytes of library workspaces from the device's allocator; known after the first step.
    workspace_bytes: Cell<Option<u64>>,
    /// Resident bytes after the weights were loaded.
    resident_before: Option<u64>,
    /// Whole parameters of which ranks keep slices, between steps ([`Session::gather`]). In a session beside another one, the
    /// parts of parameters that it shares.
    gathered: BTreeMap<String, tch::Tensor>,
}

/// The measurements of one run, beside the predictions.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Outputs of the graph by name; empty where they were not asked for.
    pub outputs: BTreeMap<String, Tensor>,
    /// Watched outputs that hold NaN or an infinity, in the graph's order.
    pub not_finite: Vec<String>,
    /// Peak that the memory plan predicts, static bytes included.
    pub predicted_peak_bytes: u64,
    /// Whether that is an upper bound, for data decides some sizes.
    pub peak_is_bound: bool,
    /// The most bytes alive at once, static bytes included.
    pub peak_bytes: u64,
    /// The largest sum of requested bytes, before the device's allocator rounded blocks.
    pub requested_peak_bytes: u64,
    /// What the memory plan predicts of `requested_peak_bytes`.
    pub predicted_requested_bytes: u64,
    /// The most bytes that the device's allocator held for blocks; `None` on the CPU.
    pub reserved_bytes: Option<u64>,
    /// The most bytes in the swap store, measured and predicted.
    pub outside_peak_bytes: u64,
    /// The most bytes in the swap store at once, as predicted.
    pub predicted_outside_bytes: u64,
    /// Bytes that are resident throughout: weights, constants and inputs.
    pub static_bytes: u64,
    /// Bytes of library workspaces beside the peak: on a device all that libraries allocated in a first step, on the CPU
    /// the blocks into which products pack their operands.
    pub workspace_bytes: Option<u64>,
    /// Bytes of the arena for results and temporaries; 0 without an arena.
    pub arena_bytes: u64,
    /// Growth of the process's own resident pages since the weights were loaded, outputs included; `None` where the system
    /// does not say.
    pub resident_bytes: Option<u64>,
    /// Ops for which the device has no deterministic kernel.
    pub nondeterministic: BTreeSet<&'static str>,
    /// Nodes that chose among equal elements, where PyTorch leaves the choice open; found on the CPU only.
    pub ties: BTreeSet<String>,
    /// How many attention nodes use which kernels.
    pub attention: AttentionKernels,
    /// Why PyTorch's attention kernels are not used where they could be.
    pub attention_refused: BTreeSet<String>,
    /// The node at which the peak was first reached.
    pub peak_at: Option<String>,
    /// Wall-clock time of the step, without the copying of inputs.
    pub time_us: u64,
    /// Processor time of all threads.
    pub cpu_us: u64,
    /// Whether the step was replayed as a CUDA graph; its memory figures are then those of the captured step.
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
        device::of(place).open()?;
        if let Some(n) = threads {
            tch::set_num_threads(i32::from(n));
        }
        let mut program = Program::at(graph, place)?;
        program.draw_by(rng);
        program.pin_memory(true);
        for (id, value) in graph.inits() {
            if let Some(tensor) = weights.get(&value.name) {
                program.override_weight(id, tensor)?;
            }
        }
        let mut session = Session {
            program,
            goes_on: false,
            watched: BTreeSet::new(),
            workspace_bytes: Cell::new(None),
            resident_before: device::resident_bytes(),
            gathered: BTreeMap::new(),
        };
        session.attend_by(Attention::default());
        Ok(session)
    }

    /// Sets whether results and temporaries lie in an arena, where one can be planned; on by default.
    pub fn use_arena(&mut self, wanted: bool) {
        self.program.use_arena(wanted);
    }

    /// Sets the kind of device whose blocks kernels use, instead of that of the place.
    pub fn use_blocks_of(&mut self, device: DeviceKind) {
        self.program.use_blocks_of(device);
    }

    /// Sets the kernels that attention may use; by default PyTorch's where a device has them.
    pub fn attend_by(&mut self, attention: Attention) {
        self.program.attend_with(match attention {
            Attention::Auto => device::of(self.program.place()).sdpa_backends(),
            Attention::Tiles => SdpaBackends::default(),
        });
    }

    /// Sets whether each step starts from the parameters and optimizer states that the last one left.
    pub fn go_on(&mut self, wanted: bool) {
        self.goes_on = wanted;
        self.program.go_on(wanted);
    }

    /// Opens a graph at the place of this session, on its weights as they are now: those of the same name are shared.
    ///
    /// # Errors
    /// See [`Program::new`].
    pub fn beside<'h>(&self, graph: &'h Graph, rng: Rng) -> Result<Session<'h>> {
        // A weight that this session has not loaded is read from the graph.
        let weight = |name: &str| self.weight(name).ok().flatten();
        let mut program = Program::with_weights(graph, self.program.place(), &weight)?;
        program.draw_by(rng);
        let mut gathered = BTreeMap::new();
        for part in own_parts(graph) {
            let name = &graph.value(part.input).name;
            if let Some(own) = self.weight(name)? {
                gathered.insert(name.clone(), own);
            }
        }
        Ok(Session {
            program,
            goes_on: false,
            watched: BTreeSet::new(),
            workspace_bytes: Cell::new(self.workspace_bytes.get()),
            resident_before: self.resident_before,
            gathered,
        })
    }

    /// Returns names and types of the parameters and optimizer states that the last step left. Empty unless steps go on
    /// ([`Session::go_on`]).
    ///
    /// # Errors
    /// `bug[run]` for a tensor of a type that we have no name for.
    pub fn state(&self) -> Result<Vec<(String, DType, Vec<u64>)>> {
        let mut state = self.program.state();
        for shard in self.program.shards().into_keys() {
            state.remove(&shard);
        }
        let whole = self.gathered.iter();
        state.extend(whole.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())));
        let state = state.into_iter();
        let entry = |(name, tensor): (String, tch::Tensor)| {
            let dims = tensor.size().into_iter().map(|d| d as u64).collect();
            Ok((element_type(&name, &tensor)?, dims)).map(|(dtype, dims)| (name, dtype, dims))
        };
        state.map(entry).collect()
    }

    /// Calls `look` with the bytes of a weight or optimizer state, as the last step left it. On the CPU they are lent, from a
    /// device they are copied.
    ///
    /// # Errors
    /// No such tensor; the device fails.
    pub fn look<T>(&self, name: &str, look: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let tensor = self.weight(name)?;
        let tensor = tensor.ok_or_else(|| Error::bug("run", format!("there is no `{name}`")))?;
        let tensor = device::moved(tensor, Place::Cpu)?;
        bytes::look(&tensor, look).map_err(torch_error)
    }

    fn weight(&self, name: &str) -> Result<Option<tch::Tensor>> {
        match self.gathered.get(name) {
            Some(tensor) => Ok(Some(tensor.shallow_clone())),
            None => self.program.weight(name),
        }
    }

    /// Gathers the parameters, and the parts of parameters, of which ranks keep slices. With `whole` also the parameters and states
    /// of which they have parts. Until [`Session::let_go`], they are seen so, and take as much memory.
    ///
    /// # Errors
    /// Another rank is gone or too late; no memory.
    pub fn gather(&mut self, whole: bool) -> Result<()> {
        for (name, shard) in self.program.shards() {
            let is_needed = whole || (shard.slices.is_some() && !shard.is_state);
            if shard.is_frozen || !is_needed {
                continue;
            }
            let own = self.program.weight(&name)?;
            let mut own = own.ok_or_else(|| Error::bug("run", format!("there is no `{name}`")))?;
            if let Some((group, dims)) = &shard.slices {
                own = gathered(group, &own, dims)?;
            }
            match &shard.part {
                Some((group, part)) if whole => own = whole_of(group, &own, &shard.dims, part)?,
                _ => {}
            }
            let is_part = shard.part.is_some() && !whole;
            let seen_as = if is_part { name } else { shard.whole };
            self.gathered.insert(seen_as, own);
        }
        Ok(())
    }

    /// Frees what was gathered.
    pub fn let_go(&mut self) {
        self.gathered.clear();
    }

    /// Makes steps end at a node that makes NaN or an infinity in one of these values. On the CPU only.
    pub fn expect_finite(&mut self, values: &BTreeSet<ValueId>) {
        let slots = values.iter().map(|id| Id::index(*id)).collect();
        self.program.check(Check::Finite(slots));
    }

    /// Runs a step and returns the error of the first node that makes NaN or infinities of finite numbers; `None` if no
    /// node does. On the CPU only. No step should follow.
    pub fn blame(&mut self, inputs: &BTreeMap<String, Tensor>) -> Option<Box<Error>> {
        self.program.check(Check::Blame(RefCell::default()));
        let failed = self.step(inputs, &|_| false).err();
        failed.filter(|e| e.kind() == Kind::Verification)
    }

    /// Sets the outputs that are checked for numbers that are not finite, after each step; none by default.
    pub fn watch(&mut self, outputs: BTreeSet<String>) {
        self.watched = outputs;
    }

    /// Runs a step whose results and measurements are dropped. The next step starts from what is given, as the first.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn warm_up(&self, inputs: &BTreeMap<String, Tensor>) -> Result<()> {
        self.step(inputs, &|_| false)?;
        self.program.go_on(self.goes_on);
        Ok(())
    }

    /// Runs a step and returns the measurements of each node, in order.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn trace(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Vec<Moment>> {
        Ok(self.program.run_traced(&self.given(inputs)?)?.1)
    }

    /// Sets the directory for offloaded tensors.
    pub fn wait_in(&mut self, folder: PathBuf) {
        self.program.wait_in(folder);
    }

    /// Sets whether transfers run beside the nodes after them; on by default.
    pub fn use_streams(&mut self, wanted: bool) {
        self.program.use_streams(wanted);
    }

    /// Sets whether the host pages that hold a device's offloaded tensors are locked; on by default. It has no effect on a
    /// CPU.
    pub fn pin_memory(&mut self, wanted: bool) {
        self.program.pin_memory(wanted);
    }

    /// Returns a warning if host pages should be locked and are not.
    pub fn pins_warning(&self) -> Option<String> {
        let why = self.program.pins_refused()?;
        Some(format!(
            "the host's memory in which results wait is not locked: {why}; transfers are slower and run one after the other"
        ))
    }

    /// Sets whether a CUDA device replays steps as graphs, where they can be captured.
    pub fn use_graphs(&mut self, wanted: bool) {
        self.program.use_graphs(wanted);
    }

    /// Returns a warning if steps should be replayed as graphs and are not.
    pub fn graphs_warning(&self) -> Option<String> {
        let why = self.program.graphs_refused()?;
        Some(format!("steps are not replayed as CUDA graphs: {why}"))
    }

    /// Measures the time of each node, in microseconds and in order, one row per run. Does not report the first `warm_up`
    /// runs.
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

    /// Converts the graph's inputs to libtorch's tensors. Where steps go on, optimizer states that are not given are those of
    /// the last step, and zeros before the first.
    fn given(&self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, tch::Tensor>> {
        let mut given = BTreeMap::new();
        for (name, _) in self.program.inputs() {
            if let Some(tensor) = inputs.get(name) {
                given.insert(name.to_string(), convert::tensor(name, tensor)?);
            } else if let Some(tensor) = self.gathered.get(name).filter(|_| !self.goes_on) {
                given.insert(name.to_string(), tensor.shallow_clone());
            }
        }
        let mut left = match self.goes_on {
            true => self.program.state(),
            false => return Ok(given),
        };
        let mut missing = Vec::new();
        for (name, _) in self
            .program
            .inputs()
            .filter(|(n, _)| !inputs.contains_key(*n))
        {
            let state = match left.remove(name) {
                None => self.program.first_state(name)?,
                left => left,
            };
            missing.extend(state.map(|state| (name.to_string(), state)));
        }
        given.extend(missing);
        Ok(given)
    }

    /// Returns the bytes that the plan predicts after each node of a step on these inputs, static bytes included.
    ///
    /// # Errors
    /// Inputs that do not fit the graph.
    pub fn timeline_bytes(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Vec<u64>> {
        let specialization = self.program.specialization(&self.given(inputs)?)?;
        let memory = &specialization.memory;
        let above_static = memory.timeline_bytes.iter();
        Ok(above_static.map(|b| memory.static_bytes + b).collect())
    }

    /// Runs once. The first run on a device is repeated, so that libraries have their workspaces before anything is measured.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn run(&self, inputs: &BTreeMap<String, Tensor>) -> Result<Measured> {
        self.step(inputs, &|_| true)
    }

    /// As [`Session::run`]; returns only the outputs that `wanted` names, and drops others when the run ends.
    ///
    /// # Errors
    /// See [`Program::run`].
    pub fn step(
        &self,
        inputs: &BTreeMap<String, Tensor>,
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<Measured> {
        let given = self.given(inputs)?;
        let place = self.program.place();
        let specialization = self.program.specialization(&given)?;
        if !device::of(place).is_host() && self.workspace_bytes.get().is_none() {
            let before = device::of(place).bytes()?.live_bytes;
            drop(self.program.run(&given)?);
            self.program.go_on(self.goes_on);
            let grown = device::of(place).bytes()?.live_bytes.saturating_sub(before);
            let workspace_bytes = grown.saturating_sub(self.program.staying_bytes());
            self.workspace_bytes.set(Some(workspace_bytes));
        }
        let run = self.program.run(&given)?;
        let reserved_bytes = device::of(place).bytes()?.reserved_peak_bytes;
        let mut not_finite = Vec::new();
        for (name, tensor) in &run.outputs {
            if self.watched.contains(name) && !is_finite(tensor)? {
                not_finite.push(name.clone());
            }
        }
        let mut outputs = BTreeMap::new();
        for (name, tensor) in run.outputs.iter().filter(|(name, _)| wanted(name)) {
            let tensor = device::moved(tensor.contiguous(), Place::Cpu)?;
            let dtype = element_type(name, &tensor)?;
            let dims: Vec<u64> = tensor.size().iter().map(|d| *d as u64).collect();
            let content = bytes::read(&tensor).map_err(torch_error)?;
            outputs.insert(name.clone(), Tensor::new(dtype, dims, content));
        }
        Ok(Measured {
            outputs,
            not_finite,
            predicted_peak_bytes: specialization.memory.peak_bytes,
            peak_is_bound: specialization.peak_is_bound,
            peak_bytes: run.peak_bytes,
            requested_peak_bytes: run.requested_peak_bytes,
            predicted_requested_bytes: run.static_bytes + specialization.requested_growth_bytes,
            reserved_bytes,
            workspace_bytes: device::of(place)
                .workspace_bytes()
                .or(self.workspace_bytes.get()),
            outside_peak_bytes: run.outside_peak_bytes,
            predicted_outside_bytes: specialization.memory.outside_peak_bytes,
            nondeterministic: run.nondeterministic,
            ties: run.ties,
            attention: specialization.taken(),
            attention_refused: specialization.pinned.refused.clone(),
            arena_bytes: specialization.arena_bytes(),
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

fn element_type(name: &str, tensor: &tch::Tensor) -> Result<DType> {
    convert::dtype(tensor.kind()).ok_or_else(|| {
        let what = format!("output `{name}` has kind {:?}", tensor.kind());
        Error::bug("run", what)
    })
}

/// Returns whether no element is NaN or an infinity.
fn is_finite(tensor: &tch::Tensor) -> Result<bool> {
    let all = tensor.f_isfinite().and_then(|each| each.f_all());
    let all = all.map_err(|e| convert::tch_error(&e))?;
    bool::try_from(all).map_err(|e| convert::tch_error(&e))
}
