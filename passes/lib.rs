//! The compiler: graph in, graph out. Pure: no I/O, no libtorch.
//!
//! [`ir`] is the graph, [`ops`] the table of operations, [`analysis`] turns a graph into tables, [`transform`] turns a
//! graph into a graph, [`plan`] decides what to recompute.

pub mod error;
pub mod ir;
pub mod ops;

pub use error::{Error, Kind, Result};
