//! Readers of foreign files: one folder a format, all behind [`Frontend`].
//!
//! A reader turns a file into a [`Graph`] of the op table's vocabulary and knows nothing of what happens to it then.
//! Nothing a file contains is ever executed, and no byte of it is trusted.

pub mod ckir;
mod fourier;
pub mod given;
pub mod onnx;
pub mod torch;

use ckpt_passes::ir::Graph;
use ckpt_passes::{Error, Result};
use given::{Given, InputType};
use std::path::Path;

/// A model as a reader leaves it.
pub struct Model {
    /// In phase `Imported`, unless the format tells how far the graph has come.
    pub graph: Graph,
    /// What a user should know about the file; each is one line.
    pub warnings: Vec<String>,
    /// Types of inputs that the user gave because the file has none: reading it again needs them.
    pub recorded: Vec<InputType>,
}

/// A reader of one file format.
pub trait Frontend: Sync {
    /// The format's name in messages.
    fn name(&self) -> &'static str;
    /// Whether a file of that name which begins with `head` (its first bytes, up to 512) is of this format.
    fn recognises(&self, path: &Path, head: &[u8]) -> bool;
    /// Reads a model; of what is given, a format takes what it does not tell itself.
    ///
    /// # Errors
    /// Kind `Model` for a file that is not a valid model of the format, `Environment` where it cannot be read.
    fn read(&self, path: &Path, given: &Given) -> Result<Model>;
}

/// All readers, most specific first.
pub static ALL: &[&dyn Frontend] = &[&ckir::Ckir, &torch::Torch, &onnx::Onnx];

/// Reads a model of any known format from its file alone.
///
/// # Errors
/// See [`read_as`].
pub fn read(path: &Path) -> Result<Model> {
    read_as(path, &Given::default())
}

/// Reads a model of any known format.
///
/// # Errors
/// See [`Frontend::read`]; a file that no reader recognises says what it looks like.
pub fn read_as(path: &Path, given: &Given) -> Result<Model> {
    let head = onnx::file::read_head(path)?;
    match ALL.iter().find(|f| f.recognises(path, &head)) {
        Some(frontend) => frontend.read(path, given),
        None => {
            let names: Vec<&str> = ALL.iter().map(|f| f.name()).collect();
            Err(
                Error::model("format", "this is not a model file that ckpt-opt reads")
                    .at(path.display().to_string())
                    .expected(names.join(" or "))
                    .found(onnx::file::describe(&head)),
            )
        }
    }
}
