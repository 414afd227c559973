//! The options of every command, with their help and examples.
//!
//! [`model`] says what the training step is, [`plan`] how to plan it, [`overrides`] which layers and ops to treat
//! differently, [`updates`] what updates parameters, [`ranks`] which processes share it, [`runtime`] how to execute graphs and [`train`] how to train. [`parse`] reads
//! values. `--help` groups options by these questions.

pub mod convert;
pub mod model;
pub mod overrides;
pub mod parse;
pub mod plan;
pub mod ranks;
pub mod runtime;
pub mod train;
pub mod updates;
