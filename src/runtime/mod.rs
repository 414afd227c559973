//! Executes a graph on libtorch, exactly in its order. The only part of the project that knows `tch`.
//!
//! [`executor`] turns a graph into a program (kernels chosen, drop table computed) and runs it; [`schedule`] is that
//! program for given sizes of the inputs; [`kernels`] mirrors
//! `passes/ops`: one file per family, one kernel per op. Memory is counted by the allocator hook of `ckpt-torch`; what
//! is measured is what `analysis::memory` predicted. [`device`] opens CUDA where it is asked for, [`outside`] is where results wait that leave the device's memory. [`session`] is what the
//! rest of the project calls.

pub mod convert;
pub mod device;
pub mod draws;
pub mod executor;
pub mod kernels;
pub mod outside;
pub mod schedule;
pub mod session;
pub mod trace;
