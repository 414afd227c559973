//! `ckpt-opt`: everything that touches the world around the compiler in `ckpt_passes`.
//!
//! [`frontend`] turns foreign files into graphs, [`optimize`] turns a graph into its checkpointed training graph and a
//! report, [`planning`] plans without writing a model, [`emit`] turns graphs into files. Dependencies run from here to `ckpt_passes`, never back.
//!
//! ```no_run
//! use ckpt_opt::frontend::given::Given;
//! use ckpt_opt::optimize::{load, optimize, write};
//! use ckpt_passes::{compile::Request, driver::Watch};
//! # fn main() -> ckpt_passes::Result<()> {
//! let source = std::path::Path::new("model.onnx");
//! let mut model = load(source, &Given::default())?;
//! let done = optimize(&mut model.graph, &Request::default(), &mut Watch::default())?;
//! if let Some(summary) = &done.summary {
//!     println!("{}", summary.human());
//! }
//! write(&model.graph, source, std::path::Path::new("train.onnx"), false)?;
//! # Ok(())
//! # }
//! ```

pub mod emit;
pub mod frontend;
#[cfg(feature = "torch")]
pub mod measure;
pub mod optimize;
pub mod place;
pub mod planning;
pub mod report;
pub mod rng;
#[cfg(feature = "torch")]
pub mod runtime;
pub mod tensors;
#[cfg(feature = "torch")]
pub mod verify;

pub use ckpt_passes as passes;
