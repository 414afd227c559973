//! Training: batches from files.

pub mod data;
