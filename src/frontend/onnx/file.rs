//! Opens a model file: maps it, decodes it, and says what it is if it is not ONNX.
//!
//! The file is mapped, not read: weights stay pages of the file until somebody needs them. The decoder's recursion
//! limit (100 messages deep) stands, so that no file can exhaust the stack. A file that another process truncates while
//! it is mapped ends this process with a bus error; that is the price of not copying weights.

use super::proto::ModelProto;
use bytes::Bytes;
use ckpt_passes::{Error, Result};
use memmap2::Mmap;
use prost::Message;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Protobuf messages end at 2 GiB; larger models keep their weights in external files.
pub const MAX_MODEL_BYTES: u64 = i32::MAX as u64;

/// Newest IR version whose fields we know.
pub const MAX_IR_VERSION: i64 = 14;

/// The error for a file that the operating system refuses.
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

/// Maps a regular file.
///
/// # Errors
/// A file that cannot be opened or mapped, or that is a folder or device.
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

/// Maps an open file whole.
pub(super) fn map_file(file: &File) -> std::io::Result<Bytes> {
    // SAFETY: the mapping is private and read-only; see the module's note on truncation by others.
    let mapping = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(mapping))
}

/// The first bytes of a file, up to 512.
pub fn read_head(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(|e| io_error("open the model", path, &e))?;
    let mut head = Vec::new();
    file.take(512)
        .read_to_end(&mut head)
        .map_err(|e| io_error("read the model", path, &e))?;
    Ok(head)
}

/// Maps and decodes a model.
///
/// # Errors
/// `format` for a file that is not ONNX, `decode` for a damaged one, `version` for one from the future.
pub fn open(path: &Path) -> Result<ModelProto> {
    let bytes = map(path)?;
    decode(bytes).map_err(|e| e.at(path.display().to_string()))
}

/// Decodes a model; large fields share the memory of `bytes`.
///
/// # Errors
/// See [`open`].
pub fn decode(bytes: Bytes) -> Result<ModelProto> {
    let size = bytes.len() as u64;
    if let Some(other) = recognise_other(&bytes) {
        return Err(Error::model("format", "this is not an ONNX file")
            .found(other)
            .help("export the model with torch.onnx.export(..., dynamo=True)"));
    }
    if size > MAX_MODEL_BYTES {
        return Err(Error::model("format", "an ONNX file ends at 2 GiB")
            .found(format!("{size} bytes"))
            .help("save the model with external data"));
    }
    let head: Vec<u8> = bytes[..bytes.len().min(512)].to_vec();
    let model = ModelProto::decode(bytes).map_err(|e| {
        Error::model("decode", format!("the file is damaged or not ONNX: {e}"))
            .found(format!("{size} bytes, {}", describe(&head)))
    })?;
    if model.graph.is_none() || model.ir_version.is_none() {
        let missing = if model.graph.is_none() {
            "a graph"
        } else {
            "an IR version"
        };
        return Err(Error::model(
            "format",
            format!("the file has no model: {missing} is missing"),
        )
        .found(format!("{size} bytes, {}", describe(&head))));
    }
    if model.ir_version() > MAX_IR_VERSION || model.ir_version() < 3 {
        return Err(Error::model(
            "version",
            format!("IR version {} is not supported", model.ir_version()),
        )
        .expected(format!("3 to {MAX_IR_VERSION}"))
        .help("save the model with another version of its exporter"));
    }
    if model.opset_import.is_empty() {
        return Err(Error::model("version", "the model names no operator set"));
    }
    Ok(model)
}

/// What a file is that begins like no ONNX file does.
fn recognise_other(head: &[u8]) -> Option<&'static str> {
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

/// Printable from the start. Protobuf cannot be: its first tag bytes are control characters for every field we know.
fn is_text(head: &[u8]) -> bool {
    let head = &head[..head.len().min(64)];
    head.iter()
        .all(|b| matches!(b, b'\n' | b'\r' | b'\t' | 0x20..=0x7e))
}

/// What a file looks like, for messages.
pub fn describe(head: &[u8]) -> String {
    if let Some(other) = recognise_other(head) {
        return other.into();
    }
    let start: Vec<String> = head.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("beginning with {}", start.join(" "))
}

/// Whether a file may be ONNX: it is not recognisably something else.
pub fn may_be_onnx(head: &[u8]) -> bool {
    recognise_other(head).is_none()
}
