//! Comparisons with other implementations: ONNX node tests, ONNX Runtime, PyTorch, a second decoder.

#[cfg(feature = "torch")]
mod fixtures;
#[cfg(feature = "torch")]
mod onnx_node_tests;
mod second_decoder;
#[path = "../support/mod.rs"]
mod support;
