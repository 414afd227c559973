//! The protobuf messages of ONNX (IR version 14), and shorthands over their optional fields.
//!
//! The build script generates them from `onnx.proto`, which is that of onnx 1.23.2 (Apache-2.0). Fields newer than that
//! file are dropped when a model is read.

pub use generated::*;

use std::collections::BTreeMap;

#[allow(missing_docs, clippy::all, reason = "generated from onnx.proto")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/onnx.rs"));
}

/// Protobuf messages end at 2 GiB; larger models keep their weights in external files.
pub const MAX_MODEL_BYTES: u64 = i32::MAX as u64;

impl StringStringEntryProto {
    /// Returns an entry of a metadata list, such as `metadata_props`.
    pub fn new(key: &str, value: &str) -> Self {
        StringStringEntryProto {
            key: Some(key.into()),
            value: Some(value.into()),
        }
    }
}

/// Returns all metadata by key.
pub fn to_map(props: &[StringStringEntryProto]) -> BTreeMap<String, String> {
    let pairs = props.iter().map(|p| (p.key().into(), p.value().into()));
    pairs.collect()
}

impl NodeProto {
    /// Returns the node's name, or `<op>_<index>` where it has none.
    pub fn name_or_index(&self, index: usize) -> String {
        match self.name() {
            "" => format!("{}_{index}", self.op_type()),
            name => name.to_string(),
        }
    }
}
