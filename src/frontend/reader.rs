//! What a reader of a file format is, and what it returns.

use super::given::{Given, InputType};
use ckpt_passes::Result;
use ckpt_passes::ir::Graph;
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
