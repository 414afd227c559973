//! Writes graphs to files. A file appears whole or not at all.
//!
//! [`onnx`] builds the model, [`save`] decides where weights go, [`mod@file`] puts files into place.

pub mod file;
pub mod onnx;
pub mod save;
