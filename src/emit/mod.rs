//! Writes graphs to files. A file appears whole or not at all.
//!
//! [`onnx`] builds the model, [`save`] decides where weights go, [`mod@file`] puts files into place.
//! [`onnxruntime`] says collectives in that runtime's ops.

pub mod file;
pub mod onnx;
pub mod onnxruntime;
pub mod save;
