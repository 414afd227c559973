//! Executes a graph on libtorch, exactly in its order. The only part of the project that knows `tch`.
//!
//! [`executor`] turns a graph into a program (kernels chosen, drop table computed) and runs it; [`schedule`] is that
//! program for given sizes of the inputs; [`kernels`] mirrors
//! `passes/ops`: one file per family, one kernel per op. Memory is counted by the allocator hook of `ckpt-torch`; what
//! is measured is what `analysis::memory` predicted. [`device`] opens CUDA where it is asked for, [`outside`] is where
//! results wait that leave the device's memory, and `lanes` moves them beside a run. `graphs` sends a
//! device whole steps. [`session`] is what the rest of the project calls.

pub mod backend;
mod capture;
pub mod convert;
mod cpu;
mod cuda;
pub mod deferred_checks;
pub mod device;
pub mod draws;
pub mod executor;
mod inputs;
pub mod kernels;
mod library;
mod operands;
pub mod recorder;
pub mod sdpa_backends;
pub mod sdpa_choice;
pub mod session;
pub mod specialization;
mod step;
pub mod swap_store;
pub mod trace;
mod train_state;
pub mod transfers;
mod values;

use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, Tensor};
use std::collections::BTreeMap;

/// Runs a graph once on the CPU, its nodes in their order, and says what it took beside what was predicted. `inputs` are
/// under the names of graph inputs; shapes bind the graph's named sizes; bytes are those of the whole process's tensors.
///
/// # Errors
/// An input that is missing or has another type; an op without a kernel; no memory.
///
/// ```
/// use ckpt_opt::{frontend::given::Given, load, run, tensors};
///
/// # fn main() -> ckpt_opt::passes::Result<()> {
/// let model = load("fixtures/gpt2/model.onnx".as_ref(), &Given::default())?;
/// let case = tensors::read("fixtures/gpt2/case.npz".as_ref())?;
/// let inputs = case.into_iter().filter_map(|(name, t)| Some((name.strip_prefix("in.")?.to_string(), t)));
/// let done = run(&model.graph, &inputs.collect())?;
/// assert_eq!(done.peak_bytes, done.predicted_peak_bytes);
/// assert!(done.outputs.contains_key("logits"));
/// # Ok(())
/// # }
/// ```
pub fn run(graph: &Graph, inputs: &BTreeMap<String, Tensor>) -> Result<session::Measured> {
    let session = session::Session::new(graph, &BTreeMap::new(), None, Place::Cpu, Rng::Counter)?;
    session.run(inputs)
}
