//! The compiler: graph in, graph out. Pure: no I/O, no libtorch.
//!
//! [`ir`] is the graph and [`ops`] the table of operations; these and [`error`] are crates of their own. [`analysis`]
//! turns a graph into tables, [`transform`] turns a graph into a graph, [`plan`] decides what to recompute,
//! [`planning`] makes its input from a graph.

pub mod analysis;
pub mod compile;
pub mod driver;
pub mod plan;
pub mod planning;
pub mod request;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod transform;

pub use ckpt_error as error;
pub use ckpt_error::{Error, Kind, Result, glob, near};
pub use ckpt_ir as ir;
pub use ckpt_ops as ops;
