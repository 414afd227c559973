//! Tests of the command line from outside: each starts the binary.

#[cfg(feature = "torch")]
mod budgets;
mod cost_graphs;
mod explain;
mod exported;
mod faults;
mod files;
mod folded;
mod guides;
mod help;
mod hostile;
mod loss_chunks;
#[cfg(feature = "torch")]
mod measuring;
#[cfg(feature = "torch")]
mod offload_files;
mod options;
#[cfg(feature = "torch")]
mod ort_training;
mod planning;
#[cfg(feature = "torch")]
mod ranks;
mod reordering;
mod reports;
#[cfg(feature = "torch")]
mod run_and_verify;
mod schemas;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
#[cfg(feature = "torch")]
mod training;
#[cfg(all(feature = "torch", target_os = "linux"))]
mod training_faults;
