//! Everything we write: files that appear whole or not at all.

pub mod file;
pub mod function;
pub mod onnx;
pub mod save;
