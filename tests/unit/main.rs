//! Tests of the libraries that need no libtorch: readers, ops, analyses, plans, and the rules of the repository.

mod attention_patterns;
#[cfg(feature = "torch")]
mod data;
mod export;
mod exported_hostile;
mod foreign;
mod hostile;
mod imports;
mod layout;
mod onnxruntime;
mod ops;
mod ort_training;
mod plans;
mod refine;
mod round_trip;
#[path = "../support/mod.rs"]
mod support;
mod symbolic_elements;
mod tidy;
mod torchscript;
mod updates;
