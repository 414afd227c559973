//! Files of named tensors, which `run` and `verify` read and write.
//!
//! The formats are [`npz`], NumPy's archive, and [`safetensors`](mod@safetensors), the only one with bfloat16. Reading
//! recognises a format by its first bytes, and writing chooses it by the file name. [`feed`] matches tensors to a graph's
//! inputs, [`random`] generates missing ones, and [`compare`](mod@compare) compares two tensors.
//! [`framework`] gives results the framework's names.

pub mod compare;
pub mod feed;
pub mod framework;
mod named;
pub mod npy;
pub mod npz;
pub mod random;
pub mod safetensors;

use self::safetensors::Meta;
use crate::emit::file::write_whole;
use crate::frontend::file::{io_error, map};
use ckpt_passes::{Error, Result};
pub use named::Tensors;
use std::path::Path;

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
    write_with(path, tensors, Meta::new())
}

/// Writes tensors with metadata, for which npz has no place.
///
/// # Errors
/// See [`write()`].
pub fn write_with(path: &Path, tensors: &Tensors, meta: Meta) -> Result<()> {
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("safetensors") => safetensors::write_with(tensors, meta)?,
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

#[cfg(test)]
mod tests {
    use ckpt_passes::ir::DType;
    use std::path::Path;

    #[test]
    fn the_fixtures_are_read() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gpt2/case.npz");
        let tensors = super::read(Path::new(path)).unwrap();
        assert_eq!(tensors["in.input_ids"].dtype, DType::I64);
        assert_eq!(tensors["in.input_ids"].dims, [2, 7]);
        assert!(tensors.contains_key("cot.logits"));
    }
}
