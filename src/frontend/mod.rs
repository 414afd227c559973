//! Readers of foreign files: one folder a format, all behind [`Frontend`].
//!
//! A reader turns a file into a [`Graph`](ckpt_passes::ir::Graph) of the op table's vocabulary and knows nothing of what happens to it then.
//! Nothing a file contains is ever executed, and no byte of it is trusted.

/// Returns an error of kind `Model` from the enclosing function: `bail!("name", "`{name}` is defined twice")`.
macro_rules! bail {
    ($code:literal, $($what:tt)+) => {
        return Err(ckpt_passes::Error::model($code, format!($($what)+)))
    };
}

pub mod ckir;
pub mod file;
pub mod given;
pub mod lower;
pub mod onnx;
mod reader;
pub mod torch;

use ckpt_passes::transform::infer::infer;
use ckpt_passes::{Error, Result};
use file::{describe, read_head};
use given::Given;
pub use reader::{Frontend, Model};
use std::path::Path;

/// All readers, most specific first.
pub static ALL: &[&dyn Frontend] = &[&ckir::Ckir, &torch::Torch, &onnx::Onnx];

/// Reads a model of any known format from its file alone.
///
/// # Errors
/// See [`load`].
pub fn read(path: &Path) -> Result<Model> {
    load(path, &Given::default())
}

/// Reads a model of any known format; `given` adds what the file does not say, and overrides what it does.
///
/// # Errors
/// See [`Frontend::read`]; a file that no reader recognises; a given type for an input that the model does not have.
pub fn load(path: &Path, given: &Given) -> Result<Model> {
    let head = read_head(path)?;
    let Some(frontend) = ALL.iter().find(|f| f.recognises(path, &head)) else {
        let names: Vec<&str> = ALL.iter().map(|f| f.name()).collect();
        return Err(
            Error::model("format", "this is not a model file that ckpt-opt reads")
                .at(path.display().to_string())
                .expected(names.join(" or "))
                .found(describe(&head)),
        );
    };
    let mut model = frontend.read(path, given)?;
    given.set_types(&mut model.graph)?;
    let types = match model.recorded.is_empty() {
        true => &given.inputs,
        false => &model.recorded,
    };
    given::record(types, &given.output_names, &mut model.graph.meta);
    if !given.inputs.is_empty() {
        // The file derives the types of results from the types that it has for inputs.
        infer(&mut model.graph).map_err(|e| e.at(path.display().to_string()))?;
    }
    Ok(model)
}
