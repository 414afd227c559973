//! Compiles an exported model into a training graph that fits a memory budget.
//!
//! The compiler itself is `ckpt_passes`. This crate holds everything around it that touches files, devices and the console.
//!
//! [`frontend`] reads foreign files into graphs, [`optimize()`] turns a graph into a training graph with recomputations and a
//! report, [`planning`] plans without writing a model, [`emit`] writes graphs to files, [`report`] shows plans.
//!
//! The main calls are [`load`], [`optimize()`], [`plan()`], [`save`] and, with feature `torch`, `run`.
//!
//! ```
//! use ckpt_opt::passes::plan::Budget;
//! use ckpt_opt::passes::{compile::Request, driver::Watch};
//! use ckpt_opt::{frontend::given::Given, load, optimize, save};
//! use std::path::Path;
//!
//! # fn main() -> ckpt_opt::passes::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let target = folder.path().join("train.onnx");
//! let source = Path::new("fixtures/gpt2/model.onnx");
//! let mut model = load(source, &Given::default())?;
//! let request = Request {
//!     // Sizes are for planning only: the written graph stays dynamic.
//!     dims: vec![("batch".into(), 8), ("seq".into(), 64)],
//!     plan: Budget::parse("60%")?.into(),
//!     ..Request::default()
//! };
//! let done = optimize(&mut model.graph, &request, &mut Watch::default())?;
//! let summary = done.summary.expect("the pipeline ran to its end");
//! assert!(summary.plan.peak_after_bytes <= summary.plan.budget_bytes.unwrap());
//! assert!(summary.plan.peak_after_bytes < summary.plan.peak_before_bytes);
//! save(&model.graph, source, &target, Default::default())?;
//! assert!(target.exists());
//! # Ok(())
//! # }
//! ```

pub mod attention;
#[cfg(feature = "torch")]
pub mod comparison;
pub mod emit;
pub mod export;
pub mod forward;
pub mod frontend;
#[cfg(feature = "torch")]
pub mod measure;
pub mod onnx;
pub mod optimize;
pub mod place;
pub mod planning;
pub mod provenance;
pub mod report;
pub mod rng;
#[cfg(feature = "torch")]
pub mod runtime;
pub mod tensors;
pub mod train;
pub mod units;
#[cfg(feature = "torch")]
pub mod verify;

pub use ckpt_passes as passes;
pub use frontend::load;
pub use optimize::{optimize, write as save};
pub use planning::plan;
#[cfg(feature = "torch")]
pub use runtime::run;

/// The program of the guide, which the documentation tests compile and run.
#[cfg(all(doctest, feature = "torch"))]
#[doc = include_str!("../docs/guides/rust.md")]
pub struct Guide;
