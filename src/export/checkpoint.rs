//! Reads what was trained: a file of tensors, or a folder with a checkpoint or a PEFT adapter.

use super::peft;
use crate::frontend::file::map;
use crate::provenance::keys;
use crate::tensors::{self, Tensors};
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::{Error, Result};
use std::path::Path;

/// Files with the weights of a folder: of a finished run, and of a checkpoint of `train`.
pub const WEIGHTS: [&str; 2] = ["model.safetensors", "parameters.safetensors"];

/// Tensors, and the request for adapters that they were trained with, where the files tell it.
pub struct Checkpoint {
    /// The tensors, under the names of the file.
    pub tensors: Tensors,
    /// The adapters.
    pub lora: Option<Lora>,
}

/// Reads a file or folder.
///
/// # Errors
/// A path that does not exist or is neither, a damaged file.
pub fn read(path: &Path) -> Result<Checkpoint> {
    if !path.is_dir() {
        return read_file(path);
    }
    if path.join(peft::CONFIG).exists() {
        let (tensors, lora) = peft::read(path)?;
        return Ok(Checkpoint {
            tensors,
            lora: Some(lora),
        });
    }
    let mut files = WEIGHTS.iter().map(|name| path.join(name));
    let Some(file) = files.find(|file| file.exists()) else {
        return Err(Error::usage("weights", "the folder holds no weights")
            .at(path.display().to_string())
            .expected(format!(
                "{}, or {} and {}",
                WEIGHTS.join(", "),
                peft::CONFIG,
                peft::WEIGHTS
            )));
    };
    read_file(&file)
}

fn read_file(path: &Path) -> Result<Checkpoint> {
    let tensors = tensors::read(path)?;
    let meta = tensors::safetensors::metadata(&map(path)?);
    let lora = meta.get(keys::LORA).map(|text| Lora::parse(text));
    let lora = lora
        .transpose()
        .map_err(|e| e.at(path.display().to_string()))?;
    Ok(Checkpoint { tensors, lora })
}
