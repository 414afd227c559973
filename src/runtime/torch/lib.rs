//! What the runtime needs of libtorch and tch does not give, over a small C++ layer (`cpp/`).
//!
//! - [`Op`]: any ATen operator by name, through the dispatcher. tch binds only part of them (no op with an output mask,
//!   no mixed returns), and one path for all means one place where arguments are checked and converted.
//! - [`memory`]: a counting CPU allocator, so that live and peak bytes are exact and independent of malloc.
//! - [`arena`]: one reserved stretch of memory in which blocks go where a plan has them.
//! - [`storage`]: which tensors share memory. Memory is counted in storages, never in tensors.
//! - [`bytes`]: tensors over foreign memory (a mapped weight file) without a copy; raw bytes in and out.
//! - [`cuda`]: libtorch's CUDA library, loaded when it is asked for; its memory, its determinism.
//! - [`graph`]: steps on a CUDA device that are captured once and sent as one.
//! - [`product`]: products of matrices where the library's are slow.
//! - [`attention`]: tiles of attention on top of them.
//! - [`rng`]: seeds, states and separate generators.
//! - [`version`]: which libtorch was loaded.
//!
//! Every C++ exception comes back as a [`TorchError`]. Nothing here records for autograd: the graphs we run are
//! already differentiated.
#![cfg(feature = "libtorch")]

pub mod arena;
pub mod attention;
pub mod bytes;
pub mod cuda;
mod error;
pub mod graph;
mod handle;
pub mod memory;
mod op;
pub mod product;
pub mod rng;
pub mod storage;
mod sys;
pub mod version;

pub use error::{ErrorKind, TorchError};
pub use op::{Arg, Op, Ret};
pub use storage::{empty, storage_bytes, storage_id, view};
pub use tch;
