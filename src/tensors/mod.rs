//! Files of named tensors: what `run` and `verify` read and write.
//!
//! [`npz`] is NumPy's archive, [`safetensors`](mod@safetensors) the only one that has bfloat16. Which of them a file is
//! shows in its first bytes; which to write, in its name. [`feed`] matches tensors to a graph's inputs, [`random`] makes
//! those that nobody gives, [`compare`](mod@compare) says whether two are equal.

pub mod compare;
pub mod feed;
pub mod npy;
pub mod npz;
pub mod random;
pub mod safetensors;

use crate::emit::file::write_whole;
use crate::frontend::file::{io_error, map};
use ckpt_passes::ir::Tensor;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// Reads all tensors of a file.
///
/// # Errors
/// Kind `Usage` for a file that is neither format, is damaged, or holds an element type we do not have.
pub fn read(path: &Path) -> Result<Tensors> {
    let place = |e: Box<Error>| e.at(path.display().to_string());
    let meta = std::fs::metadata(path).map_err(|e| io_error("open the tensors", path, &e))?;
    if meta.len() == 0 {
        return Err(place(Error::usage("tensors", "the file is empty")));
    }
    let bytes = map(path)?;
    if bytes.starts_with(b"PK") {
        return npz::read(&bytes).map_err(place);
    }
    if bytes.get(8) == Some(&b'{') {
        return safetensors::read(&bytes).map_err(place);
    }
    Err(place(Error::usage(
        "tensors",
        "this is neither an npz nor a safetensors file",
    )))
}

/// Writes tensors: safetensors if the name ends so, else npz.
///
/// # Errors
/// bfloat16 in npz, which has no such type; a disk that refuses.
pub fn write(path: &Path, tensors: &Tensors) -> Result<()> {
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("safetensors") => safetensors::write(tensors)?,
        Some("npz") => npz::write(tensors)?,
        _ => {
            return Err(
                Error::usage("tensors", "the name must end in .npz or .safetensors")
                    .at(path.display().to_string()),
            );
        }
    };
    write_whole(path, &bytes)
}

/// The content of a tensor; all tensors here have theirs in memory.
///
/// # Errors
/// A tensor whose file is absent.
fn content<'a>(name: &str, tensor: &'a Tensor) -> Result<&'a [u8]> {
    match tensor.bytes() {
        Some(bytes) => Ok(bytes),
        None => Err(Error::environment(
            "weights",
            format!("the file that holds `{name}` is absent"),
        )),
    }
}
