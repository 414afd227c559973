//! Files of models: mapped into memory, and recognised by their first bytes.
//!
//! A file is mapped, not read, so that weights stay pages of the file until they are used. If another process truncates
//! a mapped file, this process ends with a bus error. We accept that, because the alternative copies all weights.

use bytes::Bytes;
use ckpt_passes::{Error, Result};
use memmap2::Mmap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Builds the error for a file that the operating system refuses.
pub fn io_error(what: &str, path: &Path, e: &std::io::Error) -> Box<Error> {
    let message = format!("cannot {what}: {e}");
    let error = match e.kind() {
        std::io::ErrorKind::NotFound
        | std::io::ErrorKind::IsADirectory
        | std::io::ErrorKind::NotADirectory => Error::usage("file", message),
        _ => Error::environment("file", message),
    };
    error.at(path.display().to_string())
}

/// Maps a regular file into memory.
///
/// # Errors
/// A file that cannot be opened or mapped, or that is a directory or device.
pub fn map(path: &Path) -> Result<Bytes> {
    let file = File::open(path).map_err(|e| io_error("open the model", path, &e))?;
    let meta = file
        .metadata()
        .map_err(|e| io_error("open the model", path, &e))?;
    if !meta.is_file() {
        return Err(
            Error::usage("file", "this is not a regular file").at(path.display().to_string())
        );
    }
    if meta.len() == 0 {
        return Ok(Bytes::new());
    }
    map_file(&file).map_err(|e| io_error("map the model", path, &e))
}

/// Maps all of an open file.
///
/// # Errors
/// See [`Mmap::map`].
pub fn map_file(file: &File) -> std::io::Result<Bytes> {
    // SAFETY: the mapping is private and read-only; see the module's note on truncation by others.
    let mapping = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(mapping))
}

/// Reads the first bytes of a file, up to 512.
///
/// # Errors
/// A file that cannot be opened or read.
pub fn read_head(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| io_error("open the model", path, &e))?;
    let mut head = Vec::new();
    file.take(512)
        .read_to_end(&mut head)
        .map_err(|e| io_error("read the model", path, &e))?;
    Ok(head)
}

/// Names the format of a file whose first bytes no ONNX file has; returns `None` for a possible ONNX file.
pub fn recognise_other(head: &[u8]) -> Option<&'static str> {
    let starts = |magic: &[u8]| head.starts_with(magic);
    Some(match head {
        [] => "an empty file",
        _ if starts(b"PK\x03\x04") => "a zip archive, such as a TorchScript or .pt2 file",
        _ if starts(b"\x80\x02") || starts(b"\x80\x04") => {
            "a Python pickle, such as a PyTorch checkpoint"
        }
        _ if starts(b"GGUF") => "a GGUF file: weights without a graph",
        _ if starts(b"\x89HDF") => "an HDF5 file, such as a Keras model",
        _ if starts(b"\x1f\x8b") => "a gzip archive",
        _ if starts(b"version https://git-lfs") => {
            "a Git LFS pointer; fetch the file with `git lfs pull`"
        }
        _ if head.get(4..8) == Some(b"TFL3") => "a TensorFlow Lite model",
        _ if head.get(8) == Some(&b'{') && head.get(4..8) == Some(&[0; 4]) => {
            "a safetensors file: weights without a graph"
        }
        _ if is_text(head) => "a text file",
        _ => return None,
    })
}

/// Returns true where the file starts with printable ASCII. No protobuf message does: the tag bytes of all fields that
/// may come first are control characters.
fn is_text(head: &[u8]) -> bool {
    let head = &head[..head.len().min(64)];
    head.iter()
        .all(|b| matches!(b, b'\n' | b'\r' | b'\t' | 0x20..=0x7e))
}

/// Describes a file by its first bytes, for messages.
pub fn describe(head: &[u8]) -> String {
    if let Some(other) = recognise_other(head) {
        return other.into();
    }
    let start: Vec<String> = head.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("beginning with {}", start.join(" "))
}
