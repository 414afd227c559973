//! Decodes an ONNX file, or says which other format it has.
//!
//! The protobuf decoder keeps its recursion limit of 100 nested messages, so that no file can exhaust the stack.

use crate::frontend::file::{describe, map, recognise_other};
use crate::onnx::proto::{MAX_MODEL_BYTES, ModelProto};
use bytes::Bytes;
use ckpt_passes::{Error, Result};
use prost::Message;
use std::path::Path;

/// Newest IR version whose fields we know.
pub const MAX_IR_VERSION: i64 = 14;

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
        bail!("version", "the model names no operator set");
    }
    Ok(model)
}
