//! Graph to graph, one pass a file. Each states the phase it takes and the phase it leaves.

pub mod dce;
pub mod infer;
pub mod remat;
