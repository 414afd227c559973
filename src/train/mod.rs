//! Training end to end: data in, a curve going down, checkpoints, weights out.
//!
//! `trainer` is the loop. `data` makes batches from files, [`schedule`] learning rates, `checkpoint`, `saver` and `pieces` what survives a
//! crash, [`metrics`] one line for each step, `events` the same for TensorBoard, `page` the curves, `spans` where the time goes, `evaluation` the loss on
//! other data, `weights` what the framework loads, `ort_training` what
//! ONNX Runtime's training loads. All but a few need feature `torch`.

#[cfg(feature = "torch")]
pub mod checkpoint;
#[cfg(feature = "torch")]
pub mod data;
#[cfg(feature = "torch")]
pub mod evaluation;
#[cfg(feature = "torch")]
mod events;
#[cfg(feature = "torch")]
mod identity;
pub mod inputs;
pub mod metrics;
#[cfg(feature = "torch")]
mod ort_training;
#[cfg(feature = "torch")]
mod page;
#[cfg(feature = "torch")]
mod peers;
#[cfg(feature = "torch")]
mod pieces;
#[cfg(feature = "torch")]
mod saver;
pub mod schedule;
#[cfg(feature = "torch")]
mod slices;
#[cfg(feature = "torch")]
mod spans;
#[cfg(feature = "torch")]
pub mod trainer;
#[cfg(feature = "torch")]
pub mod weights;
