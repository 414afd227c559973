//! The parts of libtorch that the runtime needs and tch lacks, over a small C++ layer (`cpp/`).
//!
//! - [`Op`]: calls any ATen operator by name, through the dispatcher. tch binds only some operators (none with an output mask
//!   or mixed results). One path for all operators checks and converts all arguments.
//! - [`memory`]: a counting CPU allocator, so that live and peak bytes are exact and independent of malloc.
//! - [`arena`]: a reserved range of memory with planned offsets.
//! - [`storage`]: which tensors share memory. Memory is counted in storages, not in tensors.
//! - [`bytes`]: tensors over foreign memory (a mapped weight file) without a copy, and raw bytes of tensors.
//! - [`cuda`]: libtorch's CUDA library, loaded on demand.
//! - [`graph`]: CUDA graphs.
//! - [`kernel`]: CUDA kernels from generated source.
//! - [`product`]: matrix products for processors on which the library's are slow.
//! - [`attention`]: tiles of attention on top of them.
//! - [`ranks`]: stores and groups of processes over c10d.
//! - [`rng`]: separate random generators.
//! - [`version`]: the version of the loaded libtorch.
//!
//! Every C++ exception is returned as a [`TorchError`]. Nothing is recorded for autograd, because graphs are already
//! differentiated.
#![cfg(feature = "libtorch")]

pub mod arena;
pub mod attention;
pub mod bytes;
pub mod cuda;
mod error;
pub mod graph;
mod handle;
pub mod kernel;
pub mod memory;
mod op;
pub mod product;
pub mod ranks;
pub mod rng;
pub mod storage;
mod sys;
pub mod version;

pub use error::{ErrorKind, TorchError};
pub use op::{Arg, Op, Ret};
pub use storage::{empty, storage_id, view};
pub use tch;
