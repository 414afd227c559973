//! Models that PyTorch saves: what TorchScript files and `torch.export` archives share.
//!
//! [`archive`] reads the zip, [`pickle`] reads its pickles without executing anything, and [`stored`] reads the tensors that
//! they describe. [`value`] and [`scalars`] hold what is known before a run. [`aten`] lowers PyTorch's ops to rows of the op
//! table and tracks the memory that tensors share. [`torchscript`] replays saved code into it, [`pt2`] an exported graph.

pub mod archive;
pub mod aten;
pub mod pickle;
pub mod pt2;
mod scalars;
pub mod stored;
pub mod torchscript;
pub mod value;

use super::given::Given;
use super::reader::{Frontend, Model};
use archive::Archive;
use ckpt_passes::{Error, Result};
use std::path::Path;

/// The reader of PyTorch's archives. Their entries tell which kind they are.
pub struct Torch;

impl Frontend for Torch {
    fn name(&self) -> &'static str {
        "TorchScript or torch.export"
    }

    fn recognises(&self, _path: &Path, head: &[u8]) -> bool {
        archive::may_be_archive(head)
    }

    fn read(&self, path: &Path, given: &Given) -> Result<Model> {
        let archive = Archive::open(path)?;
        read(&archive, given).map_err(|e| e.at(path.display().to_string()))
    }
}

/// Reads the model of an archive of either kind.
///
/// # Errors
/// An archive without a program, and whatever the readers refuse.
pub fn read(archive: &Archive, given: &Given) -> Result<Model> {
    if torchscript::is_torchscript(archive) {
        return torchscript::read(archive, given);
    }
    if pt2::is_program(archive) {
        return pt2::read(archive, given);
    }
    let format = |message: &str| {
        Error::model("format", message)
            .help("save a traced model with torch.jit.save, or one of torch.export with torch.export.save")
    };
    Err(if archive.contains("data.pkl") {
        format("this is a PyTorch checkpoint: weights without a program")
    } else {
        format("this is a zip archive, but none that PyTorch saves models in")
    })
}
