//! Everything we write: files that appear whole or not at all, and reports.
//!
//! [`onnx`] and [`function`] build the model, [`save`] decides where weights go, [`file`] puts files into place;
//! [`summary`] and [`inspection`] are the reports, [`sharing`] what they say of layers, in [`units`] that people read.

pub mod file;
pub mod function;
pub mod inspection;
pub mod onnx;
pub mod parts;
pub mod save;
pub mod sharing;
pub mod summary;
pub mod units;
