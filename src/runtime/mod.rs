//! Executes a graph on libtorch, exactly in its order. No other part of the project uses `tch`.
//!
//! [`session`] is the interface for the rest of the project. [`executor`] turns a graph into a program and runs it, and
//! [`specialization`] compiles the program for given input sizes. [`kernels`] mirrors `passes/ops`: one file per family, one
//! kernel per op. The allocator of `ckpt-torch` measures the memory that `analysis::memory` predicts.
//!
//! [`backend`] is the interface to a place that runs kernels. `cpu` and `cuda` implement it, and everything else is shared.
//! [`ranks`] are processes that run one graph on different rows of a batch; `pending_exchanges` are their sums under way.
//! [`swap_store`] holds offloaded tensors, and [`transfers`] moves them while other nodes run.

pub mod backend;
mod capture;
pub mod convert;
mod cpu;
mod cuda;
pub mod deferred_checks;
pub mod device;
pub mod draws;
pub mod executor;
mod finite;
mod fixed_draws;
mod fused_updates;
pub mod generated;
mod index_errors;
mod inputs;
pub mod kernels;
mod library;
mod observed;
mod operands;
mod pending_exchanges;
pub mod ranks;
pub mod recorder;
pub mod session;
pub mod specialization;
mod step;
pub mod swap_store;
pub mod trace;
mod train_state;
pub mod transfers;
mod values;
mod work_queue;

use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::Result;
use ckpt_passes::ir::{Graph, Tensor};
use std::collections::BTreeMap;

/// Runs a graph once on the CPU, in its order. Returns outputs, measurements and predictions. `inputs` have the names of the
/// graph's inputs, and their shapes bind its named sizes. Bytes are those of all tensors of the process.
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
