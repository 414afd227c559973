//! The compiler: graph in, graph out. Pure: no I/O, no libtorch.
//!
//! [`ir`] is the graph, [`ops`] the table of operations, [`analysis`] turns a graph into tables, [`transform`] turns a
//! graph into a graph, [`plan`] decides what to recompute, [`planning`] makes its input from a graph.

pub mod analysis;
pub mod compile;
pub mod driver;
pub mod ir;
pub mod ops;
pub mod planning;
pub mod request;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod transform;

pub use ckpt_error as error;
pub use ckpt_error::{Error, Kind, Result, glob, near};
pub use ckpt_plan as plan;
