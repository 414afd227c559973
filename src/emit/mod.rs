//! Writes graphs to files. A file appears whole or not at all.
//!
//! [`onnx`] and [`function`] build the model, [`save`] decides where weights go, [`file`] puts files into place.

pub mod file;
pub mod function;
pub mod onnx;
pub mod save;
